"""Kinds of machines: a name is a label, device kinds are told apart, direct links, the table of the documentation."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard import Machine, Mesh, split
from gshard.device.cost import cost
from gshard.device.machine import DEVICE_KINDS, DIRECT, KINDS, Dimension, kind_called
from gshard.device.network import permutation_seconds, seconds
from gshard.xla.described import PlanningError, described_mesh
from training_files import loaded

ROOT = Path(__file__).resolve().parents[2]
LABEL = "the machine under the desk"


def loss(ws, x):
    def layer(h, w):
        return jnp.tanh(h @ split(w[0], 1, "b")) @ w[1], None

    h, _ = jax.lax.scan(layer, split(x, 0, "a"), ws)
    return (h**2).mean()


def step(ws, x):
    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))


SHAPES = (
    tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((4, 256, 1024), (4, 1024, 256))),
    jax.ShapeDtypeStruct((1024, 256), "float32"),
)
MESH = Mesh.abstract(a=4, b=2)


@pytest.mark.parametrize("kind", ["h100", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("v3", "cpu"))])
def test_renaming_a_machine_changes_its_name_only(kind):
    machine = Machine.of(kind, MESH.size)
    renamed = dataclasses.replace(machine, name=LABEL)
    assert renamed != machine
    assert dataclasses.replace(renamed, name=machine.name) == machine

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


CALLED = {
    "v3": ["TPU v3"], "v4": ["TPU v4"], "v5e": ["TPU v5 lite", "TPU v5e"], "v5p": ["TPU v5", "TPU v5p"],
    "v6e": ["TPU v6 lite"], "tpu7x": ["TPU7x"], "a100_40gb": ["NVIDIA A100-SXM4-40GB"],
    "a100": ["NVIDIA A100-SXM4-80GB"], "h100": ["NVIDIA H100 80GB HBM3"], "h200": ["NVIDIA H200"],
    "b200": ["NVIDIA B200"], "gb200": ["NVIDIA GB200"], "b300": ["NVIDIA B300 SXM6 AC"], "gb300": ["NVIDIA GB300"],
    "mi300x": ["AMD Instinct MI300X", "AMD Instinct MI300X OAM"], "mi325x": ["AMD Instinct MI325X"],
    "mi350x": ["AMD Instinct MI350X VF"], "mi355x": ["AMD Instinct MI355X"],
    # The same chip on another board, another generation, a part of the name: nothing is guessed.
    None: [
        "TPU v2", "TPU v4 lite", "TPU8t", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL",
        "NVIDIA A100-PCIE-40GB", "NVIDIA GH200 480GB", "NVIDIA L40S", "Tesla V100-SXM2-16GB", "gfx942:sramecc+:xnack-",
    ],
}  # fmt: skip


def test_device_kinds_are_told_apart():
    for kind, names in CALLED.items():
        for called in names:
            assert kind_called(called, "tpu" if called.startswith("TPU") else "gpu") == kind, called
    assert (kind_called("cpu", "cpu"), kind_called("cpu", "gpu")) == ("cpu", None)
    assert set(DEVICE_KINDS.values()) | {"cpu"} == set(KINDS) == {*CALLED, "cpu"} - {None}
    assert all(called == called.lower() for called in DEVICE_KINDS)


def test_nodes_and_chips_are_as_their_kind_says():
    for (kind, devices), sizes in {
        ("h100", 8): [8], ("h100", 16): [2, 8], ("h100", 12): [2, 6],  # twelve are no node of eight
        ("b200", 64): [8, 8], ("gb200", 64): [64], ("gb300", 72): [72], ("gb200", 128): [2, 64],
        ("tpu7x", 128): [4, 4, 4, 2],
    }.items():  # fmt: skip
        assert [d.size for d in Machine.of(kind, devices).network] == sizes
    assert Machine.of("v3:2x2").network[-1].bandwidth == 225e9  # through memory, which is written and read
    assert Machine.of("tpu7x:2x2x1").network[-1].bandwidth == 600e9
    assert Machine.of("tpu7x:4x4x4").network[0].kind == "ring"


def test_direct_links_are_used_together_by_collectives_and_singly_by_messages():
    machine, data = Machine.of("mi300x:1x8"), 64 << 20
    assert machine.network == (Dimension(8, DIRECT, 64e9, 2e-6),)
    mesh = Mesh.abstract(a=2, b=4)
    for axes, members in ((("a",), 2), (("b",), 4), (("a", "b"), 8)):
        atoms = tuple(atom for axis in axes for atom in mesh.atoms_of[axis])
        # An eighth of the data goes to each of the others, over a link of its own.
        assert seconds("all_to_all", data, mesh, machine, atoms) == pytest.approx(2e-6 + data / members / 64e9)
        taken = seconds("all_gather", data, mesh, machine, atoms)
        assert taken == pytest.approx(2e-6 + data / 64e9)
    around = [(i, (i + 1) % 8) for i in range(8)]
    assert permutation_seconds(data, around, machine) == pytest.approx(2e-6 + data / 64e9)
    assert permutation_seconds(data, [(0, 1), (1, 0)], machine) == pytest.approx(2e-6 + data / 64e9)
    switch = dataclasses.replace(machine, network=(Dimension(8, "switch", 7 * 64e9, 2e-6),))
    assert permutation_seconds(data, around, switch) < permutation_seconds(data, around, machine)


def test_only_chips_in_a_torus_have_a_topology_of_libtpu():
    assert Machine.of("v5e:2x4").topology == "v5e:2x4"
    assert dataclasses.replace(Machine.of("tpu7x:2x2x1"), name=LABEL).topology == "tpu7x:2x2x1"
    with pytest.raises(PlanningError, match="only where these devices are"):
        described_mesh(Machine.of("mi300x:1x8"))


def test_the_documentation_has_the_figures_of_every_kind():
    script = loaded(ROOT / "scripts" / "machines.py", "machines")
    assert script.page() == script.PAGE.read_text("utf-8"), "docs/machines.md is stale: run make machines"
    rows = script.table().splitlines()[2:]
    assert len(rows) == len(KINDS) > 10
    assert all(kind.source in row and f"`{name}`" in row for row, (name, kind) in zip(rows, KINDS.items(), strict=True))
