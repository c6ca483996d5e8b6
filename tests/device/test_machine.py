"""Machines: what the paper says of a torus (section 5.3), grids of any size, and errors."""

import dataclasses
import math
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from device.models import explained, f32, model
from gshard.core.mesh import Mesh
from gshard.device.cost import origins
from gshard.device.fusion_model import COLLECTIVE
from gshard.device.machine import COMPILERS, KINDS, LINE, RING, Dimension, Machine, MachineError
from gshard.device.memory import held_at_peak
from gshard.device.network import (
    extents,
    goes_one_way,
    groups,
    latency,
    link_loads,
    permutation_seconds,
    permuting,
    seconds,
)
from training_files import loaded

SIZES = (4, 8, 16, 32)
DATA = 8 << 20


def on_torus(kind, n, operand=DATA):
    """A v3-like torus of n x n chips that closes whatever its size, without latency."""
    machine = Machine.of(f"v3:{n}x{n}")
    network = [
        d.__class__(d.size, RING if d.shared_by > 1 else d.kind, d.bandwidth, 0.0, d.shared_by) for d in machine.network
    ]
    machine = Machine("torus", machine.flops, 1.0, 1.0, 1, tuple(network))
    mesh = Mesh.abstract(d=machine.size)
    return seconds(kind, operand, mesh, machine, mesh.atoms)


@pytest.mark.parametrize(("kind", "growth"), [("all_reduce", 1.0), ("all_to_all", 2.0), ("all_gather", 4.0)])
def test_times_grow_with_the_side_of_the_torus(kind, growth):
    """An all-reduce does not grow; an all-gather of a fixed operand grows with the devices."""
    times = [on_torus(kind, n) for n in SIZES]
    assert [b / a for a, b in pairwise(times)] == pytest.approx([growth] * 3, rel=0.01 if growth == 2 else 0.1)


def test_a_neighbour_is_near_and_the_antipode_is_far():
    machine = Machine.of("v3:32x32")
    shift = [(d, (d + 2) % 2048) for d in range(2048)]
    far = [(d, (d + 32) % 64 + d // 64 * 64) for d in range(2048)]
    assert permutation_seconds(DATA, far, machine) > 10 * permutation_seconds(DATA, shift, machine)


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:1x8", "v3:4x2", "v5p:4x4x4", "h100:2x8", "v5e:16x16", "mi300x:3x8"])
def test_a_byte_takes_what_the_busiest_link_takes(name):
    """Against messages that go hop by hop."""
    machine = Machine.of(name)
    sources = np.arange(machine.size)
    for targets in ((sources + 1) % machine.size, sources[::-1], np.random.default_rng(0).permutation(machine.size)):
        loads = [int(x.max(initial=0)) for x in link_loads(sources, targets, machine)]
        assert loads == busiest(sources, targets, machine)
        alone = [permuting(np.array([a]), np.array([b]), machine)[0] for a, b in zip(sources, targets, strict=True)]
        assert permuting(sources, targets, machine)[0] == pytest.approx(max(alone))
        a_byte = max(n / d.bandwidth for n, d in zip(loads, machine.network, strict=True))
        assert permuting(sources, targets, machine)[1] == pytest.approx(a_byte)


def busiest(sources, targets, machine):
    passed = [Counter() for _ in machine.network]
    strides = [math.prod(d.size for d in machine.network[k + 1 :]) for k in range(len(machine.network))]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        here = source
        for k, d in reversed(list(enumerate(machine.network))):
            at, to = here // strides[k] % d.size, target // strides[k] % d.size
            if d.kind == "direct":
                if at != to:
                    passed[k][here, here + (to - at) * strides[k]] += 1
                here += (to - at) * strides[k]
                continue
            if d.kind == "switch":
                if at != to:
                    passed[k].update([("out", here), ("in", here + (to - at) * strides[k])])
                here += (to - at) * strides[k]
                continue
            hops = (to - at) % d.size
            step = (1 if 2 * hops <= d.size else -1) if d.kind == "ring" else (1 if to > at else -1)
            while at != to:
                passed[k][step, here // (machine.network[-1].size if d.shared_by > 1 else 1)] += 1
                here, at = here + ((at + step) % d.size - at) * strides[k], (at + step) % d.size
    return [max(counted.values(), default=0) for counted in passed]


def test_a_cycle_on_a_grid_leaves_the_other_direction_of_its_links_free():
    machine = Machine.of("v5e:2x4")
    for order, free in (((0, 1, 2, 3, 7, 6, 5, 4), True), (range(8), False)):
        sources = np.array(order)
        assert goes_one_way(sources, np.roll(sources, 1), machine) == free
    sources, direct = np.arange(8), Machine.of("mi300x:1x8")
    assert goes_one_way(sources, np.roll(sources, 1), direct)
    assert not goes_one_way(sources, sources ^ 1, direct)


def test_every_axis_of_a_mesh_has_its_own_links():
    """Atoms of the minor chip dimension, of the major one, and the two cores of a chip."""
    mesh, machine = Mesh.abstract(y=32, x=32, core=2), Machine.of("v3:32x32")
    for name, kind in (("y", "ring"), ("x", "ring"), ("core", "switch")):
        ((extent,),) = extents(mesh, machine, mesh.atoms_of[name])
        assert (extent.kind, extent.members, extent.step) == (kind, 2 if name == "core" else 32, 1)
    # Half a ring is a line, and every other device of one crosses links that its neighbours use too.
    ((half,),) = extents(mesh, machine, mesh.atoms_of["x"][1:])
    assert (half.kind, half.members, half.step) == ("line", 16, 1)
    ((other,),) = extents(mesh, machine, mesh.atoms_of["x"][:4])
    assert (other.kind, other.members, other.step) == ("ring", 16, 2)


@pytest.mark.parametrize("axes", [{"a": 6, "b": 4}, {"a": 3, "b": 8}, {"a": 24}, {"a": 2, "b": 2, "c": 6}])
def test_groups_are_a_partition_of_the_devices(axes):
    mesh = Mesh.abstract(**axes)
    for k in range(len(mesh.atoms) + 1):
        atoms = mesh.atoms[k:]
        found = groups(mesh, atoms)
        assert sorted(d for group in found for d in group) == list(range(mesh.size))
        assert {len(group) for group in found} == {mesh.count(atoms)}


@pytest.mark.parametrize("text", [
    "v3:2x3", "v4:2x3x4", "v5e:16x16", "v5p:4x4x4", "v6e:2x4", "tpu7x:2x2x3", "h100:2x8", "h200:8", "gb200:2x72",
    "mi300x:2x8", "cpu:12",
])  # fmt: skip
def test_time_grows_with_bytes_on_every_machine_and_group(text):
    machine = Machine.of(text)
    mesh = Mesh.abstract(devices=machine.size)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for kind, k in product(kinds, range(len(mesh.atoms))):
        times = [seconds(kind, n, mesh, machine, mesh.atoms[k:]) for n in (0, 1 << 10, 1 << 20, 1 << 30)]
        assert times[0] == 0.0
        assert all(a < b for a, b in pairwise(times))
        assert all(map(math.isfinite, times))


def test_a_shape_is_found_for_a_number_of_devices():
    for kind, devices in product(KINDS, (2, 8, 16, 96, 128, 2048)):
        assert Machine.of(kind, devices).size == devices


@pytest.mark.parametrize("text, devices, message", [
    ("v9:2x2", None, "no machine is called 'v9:2x2'"), ("v3", None, "does not say how many devices"),
    ("v3", 7, "2 devices on each chip"), ("v3:2x2", 7, "has 8 devices, and the mesh has 7"),
    ("v3:2x2x2", None, "has 3 dimensions"), ("absent.json", None, "no machine is called"),
])  # fmt: skip
def test_errors_say_what_to_write(text, devices, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text('{"name": "x"}')
    with pytest.raises(MachineError, match=message):
        Machine.of(text, devices)


# Which line a collective is caused by, and where it is emitted: every byte that is sent belongs to one line.


@pytest.mark.parametrize("name", ["recurrent", "vocabulary", pytest.param("experts gradient", marks=pytest.mark.slow)])
def test_every_costed_collective_is_one_that_was_noted(name):
    found = explained(name)
    cost = found.cost("v3:2x2")
    owners = origins(found.spmd, cost)
    for kernel, owner in zip(cost.kernels, owners, strict=True):
        assert (kernel.kind == COLLECTIVE) == (owner is not None)
        if owner is not None:
            noted = owner.kind, owner.atoms, owner.bytes, owner.times, owner.emitted.line
            assert (kernel.name, kernel.axes, kernel.sent, kernel.times, kernel.line) == noted
    taken = [id(c) for c in owners if c is not None]
    assert len(taken) == len(set(taken)) == len(found.spmd.collectives)
    # Merging keeps bytes, times and seconds.
    rows = found.data(cost.machine, seconds=0)["collectives"]
    assert sum(r["bytes"] for r in rows) == found.total_bytes
    assert sum(r["times"] for r in rows) == sum(c.times for c in found.spmd.collectives)
    sent = sum(k.total_seconds for k in cost.kernels if k.kind == COLLECTIVE)
    assert sum(r["seconds"] * (1 - r["hidden"]) for r in rows) == pytest.approx(sent)
    ordered = [r["bytes"] for r in rows]
    assert ordered == sorted(ordered, reverse=True)


def test_a_sum_is_caused_where_it_is_made_and_emitted_where_it_is_first_used():
    def f(x, w):
        h = gshard.split(x, 1, "d") @ w
        b = jnp.float32(2) + w[0, 0]
        return jnp.tanh(h) + b

    found = gshard.explain(f, f32(16, 4096), f32(4096, 32), mesh=gshard.Mesh.abstract(d=4))
    first = f.__code__.co_firstlineno
    (c,) = [c for c in found.spmd.collectives if c.bytes > 100]
    assert c.cause.line == c.line == f"test_machine.py:{first + 1} ({f.__qualname__})"
    assert c.emitted.line == f"test_machine.py:{first + 3} ({f.__qualname__})"

    # Nothing inside uses a result: what brings it to how it leaves is emitted at its own line, not at the call's.
    def leaves(x, w):
        return gshard.replicate(gshard.split(x, 0, "d") @ w)

    found = gshard.explain(leaves, f32(8, 8), f32(8, 8), mesh=gshard.Mesh.abstract(d=4))
    here = f"test_machine.py:{leaves.__code__.co_firstlineno + 1} ({leaves.__qualname__})"
    assert {(c.cause.line, c.emitted.line) for c in found.spmd.collectives} == {(here, here)}


def test_what_a_memory_limit_runs_again_has_a_line():
    f, args, axes, _ = model("attention")
    mesh = gshard.Mesh.abstract(**axes)
    peak = gshard.explain(f, *args, mesh=mesh).cost("v3:2x2").peak
    found = gshard.explain(gshard.jit(f, mesh=mesh, memory_limit=int(0.8 * peak), machine="v3:2x2"), *args)
    again = [c for c in found.spmd.collectives if c.why.startswith("recomputed")]
    assert all(c.cause.line == c.line != "" for c in found.spmd.collectives)
    assert found.spmd.recomputed is not None or not again


def test_a_permutation_along_some_axes_is_emitted_over_all():
    mesh = gshard.Mesh.abstract(a=2, b=4)
    found = gshard.explain(lambda x: jnp.roll(gshard.split(x, 0, "b"), 3, 0), f32(32, 4), mesh=mesh)
    (row,) = found.data(seconds=0)["collectives"]
    assert row["group"] == "b.0,b.1"
    assert row["over"] == mesh.atoms
    assert set(row["pairs"]) == {(4 * i + b, 4 * i + (b + 1) % 4) for i in range(2) for b in range(4)}
    assert row["seconds"] > 0


# Collectives on a torus: link by link, and as the GShard paper measured them on TPU v3.


PUBLISHED = Path(__file__).resolve().parents[2] / "benchmarks" / "figure9.py"
MEASURED = 1.22  # how far modelled AllToAlls are from measured ones, at most
ALL_REDUCE = 1.42  # how much longer measured AllReduces take than modelled ones, at most
RECTANGLES = (16, 64, 256)  # cores of 4x2, 8x4 and 16x8 chips, where no dimension closes


@pytest.fixture(scope="module")
def published():
    return loaded(PUBLISHED, "figure9")


def microseconds(kind, mib, cores):
    mesh = Mesh.abstract(cores=cores)
    return 1e6 * seconds(kind, mib << 20, mesh, Machine.of("v3", cores), mesh.atoms)


@pytest.mark.parametrize("mib", [8, 32])
def test_collectives_take_what_the_paper_measured(published, mib):
    """All 16 points of figure 9; the model's growth from 16 to 2,048 cores is 7.9, the measured 8.3 and 9.6.

    1,024 cores (32x16) took twice as long as 512 (16x16), although 32 chips are a ring. All-reduces on rectangles
    without a ring took 1.7 to 2.8 times as long, for which the model has no reason.
    """
    points = published.MICROSECONDS["all_to_all", mib]
    modelled = [microseconds("all_to_all", mib, cores) for cores in published.CORES]
    for ours, measured in zip(modelled, points, strict=True):
        assert measured / MEASURED < ours < measured * MEASURED
    assert 7.8 < modelled[-1] / modelled[0] < 8.1
    assert [n / modelled[5] for n in modelled[6:]] == pytest.approx([n / points[5] for n in points[6:]], rel=0.1)
    assert [d.kind for d in Machine.of("v3:32x16").network[:2]] == [RING, LINE]
    for cores, measured in published.DISPATCH_AND_COMBINE.items():  # figure 8: two AllToAlls of a layer
        assert 2 * microseconds("all_to_all", published.DISPATCHED_MIB, cores) == pytest.approx(measured, rel=0.21)
    for cores, measured in zip(published.CORES, published.MICROSECONDS["all_reduce", mib], strict=True):
        times = measured / microseconds("all_reduce", mib, cores)
        assert 1.7 < times < 2.8 if cores in RECTANGLES else 1.0 < times < ALL_REDUCE


def test_the_time_of_a_hop_is_that_of_measured_all_reduces(published):
    """A line through 8 and 32 MB at 0 bytes: 79 µs on 2,048 cores, 1 µs a hop is 66; within 30 µs on squares."""
    for cores in (32, 128, 512, 2048):
        at = published.CORES.index(cores)
        small, large = (published.MICROSECONDS["all_reduce", mib][at] for mib in (8, 32))
        mesh = Mesh.abstract(cores=cores)
        ours = 1e6 * latency("all_reduce", mesh, Machine.of("v3", cores), mesh.atoms)
        assert ours == pytest.approx(small - (large - small) / 3, abs=30)


@pytest.mark.parametrize("kind", [RING, LINE])
@pytest.mark.parametrize("chips", [4, 5, 6, 9, 16, 32])
def test_in_turn_an_all_to_all_takes_the_busiest_link_of_each_turn(kind, chips):
    """Against messages: in turn k each device sends to the device k places ahead."""
    compiler = dataclasses.replace(COMPILERS["tpu"], exchanges_in_turn=True)
    machine = Machine("torus", {"f32": 1.0}, 1.0, 1.0, 1, (Dimension(chips, kind, 1e9, 0.0),), compiler=compiler)
    mesh = Mesh.abstract(chips=chips)
    devices = np.arange(chips)
    turns = [max(map(np.max, link_loads(devices, (devices + k) % chips, machine))) for k in range(1, chips)]
    in_turn = sum(turns) * DATA / chips / 1e9
    # A link of an odd number of chips is crossed by (n n - 1) / 4 messages.
    assert seconds("all_to_all", DATA, mesh, machine, mesh.atoms) == pytest.approx(in_turn, rel=1.1 / chips**2)
    at_once = dataclasses.replace(machine, compiler=COMPILERS["tpu"])
    together = seconds("all_to_all", DATA, mesh, at_once, mesh.atoms)
    assert together == pytest.approx(in_turn / (2 if kind == RING else 1), rel=1.1 / chips**2)


# The rows of a memory peak name the arguments whose parts, casts and gradients are held, and lose no bytes.


MESH = gshard.Mesh.abstract(data=8)
LAYERS, WIDTH, HIDDEN = 3, 64, 512


def step(params, x):
    """Gradient descent on layers in a loop, whose weights are split and gathered in each round."""
    params = jax.tree.map(lambda w: gshard.split(w, w.ndim - 1, 8), params)

    def loss(params):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        y, _ = jax.lax.scan(layer, gshard.split(x, 0, 8), params)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def test_weights_that_are_gathered_and_their_gradients_are_named():
    """Where memory is the highest, in the report, and in errors."""
    arguments = {"up": f32(LAYERS, WIDTH, HIDDEN), "down": f32(LAYERS, HIDDEN, WIDTH)}, f32(2048, WIDTH)
    found = gshard.explain(step, *arguments, mesh=MESH)
    cost = found.cost("h100:1x8")
    rows = held_at_peak(cost.memory, cost.program.block, found.plan.program, found.source.names)
    assert sum(row.bytes for row in rows) == sum(v.bytes for v, _ in cost.memory.alive)
    assert sum(row.count for row in rows) == len(cost.memory.alive)
    names = {row.name for row in rows if row.type in (f"f32[{WIDTH},{HIDDEN}]", f"f32[{HIDDEN},{WIDTH}]")}
    assert names
    assert names <= {f"{what}params/{w}" for what in ("", "gradient of ") for w in ("up", "down")}
    shown = found.data("h100:1x8")["memory"]["alive"]
    assert [(row[0], row[2], row[4]) for row in shown] == [(of.type, of.name, of.count) for of in rows[: len(shown)]]
    with pytest.raises(gshard.stages.MemoryLimitError, match=r"params/(up|down)"):
        gshard.jit(step, mesh=MESH, memory_limit="64KiB").lower(*arguments).spmd  # noqa: B018
