"""Kinds of machines: a name is a label, device kinds are told apart, direct links, the table of the documentation."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard import Machine, Mesh, split
from gshard.device.cost import cost
from gshard.device.machine import COMPILERS, DEVICE_KINDS, DIRECT, KINDS, Dimension, kind_called
from gshard.device.network import least_gather_seconds, permutation_seconds, seconds
from gshard.xla.calibrate import calibrate
from gshard.xla.tpu import PlanningError, topology_mesh

ROOT = Path(__file__).resolve().parents[2]
LABEL = "the machine under the desk"
FLAGS = ("compiler", "kind")


def loss(ws: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ split(w[0], 1, "b")) @ w[1], None

    h, _ = jax.lax.scan(layer, split(x, 0, "a"), ws)
    return (h**2).mean()


def step(ws: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))


SHAPES = (
    tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((4, 256, 1024), (4, 1024, 256))),
    jax.ShapeDtypeStruct((1024, 256), "float32"),
)
MESH = Mesh.abstract(a=4, b=2)


ONE_OF_EACH_MAKER = ("v3", "h100", "mi300x", "cpu")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ONE_OF_EACH_MAKER else pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.one_in(3)
def test_renaming_a_machine_changes_its_name_only(kind: str, tmp_path: Path) -> None:
    machine = Machine.of(kind, MESH.size)
    renamed = dataclasses.replace(machine, name=LABEL)
    assert renamed != machine
    assert dataclasses.replace(renamed, name=machine.name) == machine
    renamed.dump(tmp_path / "machine.json")
    assert Machine.of(str(tmp_path / "machine.json")) == renamed

    lowered, again = (gshard.jit(step, mesh=MESH, machine=m).lower(*SHAPES) for m in (machine, renamed))
    assert str(again.plan) == str(lowered.plan)
    assert again.spmd.jaxpr.pretty_print() == lowered.spmd.jaxpr.pretty_print()

    found = gshard.explain(step, *SHAPES, mesh=MESH)
    first, second = (json.dumps(found.data(m)) for m in (machine, renamed))
    assert LABEL in second
    assert second.replace(LABEL, machine.name) == first
    assert str(found.cost(renamed)).replace(LABEL, machine.name) == str(found.cost(machine))
    assert found.difference(json.loads(first), renamed).lines == ()

    limit = cost(lowered.spmd, machine).peak * 19 // 20
    limited = [gshard.jit(step, mesh=MESH, memory_limit=limit, machine=m).lower(*SHAPES) for m in (machine, renamed)]
    assert limited[0].spmd.recomputed is not None
    assert str(limited[0].spmd.recomputed) == str(limited[1].spmd.recomputed)


@pytest.mark.parametrize("kind", ["v3", "v5e", "tpu7x", "h100", "mi300x", "cpu"])
@pytest.mark.one_in(2)
def test_a_calibrated_machine_behaves_as_its_kind(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its figures are measured; what its compiler does, and so peak memory and messages, are those of the kind."""
    monkeypatch.setattr("gshard.xla.calibrate.kind_of_devices", lambda mesh: kind)
    measured, named = calibrate(jax.devices()[:8], side=8, elements=64), Machine.of(kind, 8)
    assert (measured.compiler, measured.kind) == (named.compiler, named.kind)
    assert measured.memory == named.memory
    measured.dump(tmp_path / "machine.json")
    assert Machine.of(str(tmp_path / "machine.json")) == measured
    spmd = gshard.jit(step, mesh=MESH).lower(*SHAPES).spmd
    assert cost(spmd, measured).peak == cost(spmd, named).peak
    assert not str(named).startswith(f"{named.name}, measured")
    assert str(measured).startswith(f"{measured.name}, measured: 8 devices")


def test_an_unknown_accelerator_is_calibrated_as_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gshard.xla.calibrate.kind_of_devices", lambda mesh: None)
    monkeypatch.setattr("gshard.xla.calibrate.compiler_of", lambda device: COMPILERS["gpu"])
    with pytest.raises(gshard.stages.MachineError, match="does not tell how much memory"):
        calibrate(jax.devices()[:2], side=8, elements=64)
    monkeypatch.setattr("gshard.xla.calibrate.memory_of", lambda device: 7 << 30)
    measured = calibrate(jax.devices()[:2], side=8, elements=64)
    assert (measured.memory, measured.kind) == (7 << 30, jax.devices()[0].device_kind)
    assert measured.compiler == COMPILERS["gpu"]


def test_a_measured_machine_of_an_older_version_is_refused(tmp_path: Path) -> None:
    """Its file says nothing of the compiler, and the name is no place to guess it from."""
    old = dataclasses.asdict(dataclasses.replace(Machine.of("h100:1x8"), measured=True, name="NVIDIA H100 x 8"))
    for name in FLAGS:
        del old[name]
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(gshard.stages.MachineError, match=r"older version[\s\S]*gshard calibrate"):
        Machine.of(str(tmp_path / "old.json"))


@pytest.mark.parametrize(
    "called, platform, kind",
    [
        ("cpu", "cpu", "cpu"),
        ("TPU v3", "tpu", "v3"),
        ("TPU v4", "tpu", "v4"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5e", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v5p", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
        ("TPU7x", "tpu", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA B200", "gpu", "b200"),
        ("NVIDIA GB200", "gpu", "gb200"),
        ("NVIDIA B300 SXM6 AC", "gpu", "b300"),
        ("NVIDIA GB300", "gpu", "gb300"),
        ("AMD Instinct MI300X", "gpu", "mi300x"),
        ("AMD Instinct MI300X OAM", "gpu", "mi300x"),
        ("AMD Instinct MI325X", "gpu", "mi325x"),
        ("AMD Instinct MI350X VF", "gpu", "mi350x"),
        ("AMD Instinct MI355X", "gpu", "mi355x"),
        # The same chip on another board, another generation, a part of the name: nothing is guessed.
        ("TPU v2", "tpu", None),
        ("TPU v4 lite", "tpu", None),
        ("TPU8t", "tpu", None),
        ("NVIDIA H100 PCIe", "gpu", None),
        ("NVIDIA H100 NVL", "gpu", None),
        ("NVIDIA H200 NVL", "gpu", None),
        ("NVIDIA A100-PCIE-40GB", "gpu", None),
        ("NVIDIA GH200 480GB", "gpu", None),
        ("NVIDIA L40S", "gpu", None),
        ("Tesla V100-SXM2-16GB", "gpu", None),
        ("gfx942:sramecc+:xnack-", "gpu", None),
        ("cpu", "gpu", None),
    ],
)
def test_device_kinds_are_told_apart(called: str, platform: str, kind: str | None) -> None:
    assert kind_called(called, platform) == kind


def test_every_kind_has_devices_and_every_device_a_kind() -> None:
    assert set(DEVICE_KINDS.values()) | {"cpu"} == set(KINDS)
    assert all(called == called.lower() for called in DEVICE_KINDS)


def test_a_node_is_as_large_as_its_kind_says() -> None:
    def sizes(kind: str, devices: int) -> list[int]:
        return [d.size for d in Machine.of(kind, devices).network]

    assert sizes("h100", 8) == [8]
    assert sizes("h100", 16) == [2, 8]
    assert sizes("h100", 12) == [2, 6]  # twelve are no node of eight
    assert sizes("b200", 64) == [8, 8]
    assert sizes("gb200", 64) == [64]
    assert sizes("gb300", 72) == [72]
    assert sizes("gb200", 128) == [2, 64]
    assert sizes("tpu7x", 128) == [4, 4, 4, 2]


def test_cores_of_a_chip_exchange_as_their_kind_says() -> None:
    assert Machine.of("v3:2x2").network[-1].bandwidth == 225e9  # through memory, which is written and read
    assert Machine.of("tpu7x:2x2x1").network[-1].bandwidth == 600e9
    assert Machine.of("tpu7x:4x4x4").network[0].kind == "ring"


def test_direct_links_are_used_together_by_collectives_and_singly_by_messages() -> None:
    machine, data = Machine.of("mi300x:1x8"), 64 << 20
    assert machine.network == (Dimension(8, DIRECT, 64e9, 2e-6),)
    mesh = Mesh.abstract(a=2, b=4)
    for axes, members in ((("a",), 2), (("b",), 4), (("a", "b"), 8)):
        atoms = tuple(atom for axis in axes for atom in mesh.atoms_of[axis])
        # An eighth of the data goes to each of the others, over a link of its own.
        taken = seconds("all_to_all", data, mesh, machine, atoms)
        assert taken == pytest.approx(2e-6 + data / members / 64e9)
        taken = seconds("all_gather", data, mesh, machine, atoms)
        assert taken == pytest.approx(2e-6 + data / 64e9)
        assert least_gather_seconds(data, data * members, machine) <= taken
    around = [(i, (i + 1) % 8) for i in range(8)]
    assert permutation_seconds(data, around, machine) == pytest.approx(2e-6 + data / 64e9)
    assert permutation_seconds(data, [(0, 1), (1, 0)], machine) == pytest.approx(2e-6 + data / 64e9)
    switch = dataclasses.replace(machine, network=(Dimension(8, "switch", 7 * 64e9, 2e-6),))
    assert permutation_seconds(data, around, switch) < permutation_seconds(data, around, machine)


def test_only_chips_in_a_torus_have_a_topology_of_libtpu() -> None:
    assert Machine.of("v5e:2x4").topology == "v5e:2x4"
    assert dataclasses.replace(Machine.of("tpu7x:2x2x1"), name=LABEL).topology == "tpu7x:2x2x1"
    with pytest.raises(PlanningError, match="no arrangement of TPU chips"):
        topology_mesh(Machine.of("h100:1x8"))


def test_the_documentation_has_the_figures_of_every_kind() -> None:
    spec = importlib.util.spec_from_file_location("machines", ROOT / "scripts" / "machines.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text("utf-8"), "docs/machines.md is stale: run make machines"
    rows = script.table().splitlines()[2:]
    assert len(rows) == len(KINDS) > 10
    assert all(kind.source in row and f"`{name}`" in row for row, (name, kind) in zip(rows, KINDS.items(), strict=True))
    assert (
        "| `tpu7x` | `TPU7x` | 1,153.5 | 1,153.5 | 2,307 | 3,690 | 96 GiB | 3-D torus, 100; two cores a chip, 600 |"
        in script.table()
    )
    assert "| 8, each linked to each, 64; between nodes 50 |" in script.table()
