"""Machines: what the paper says of a torus (section 5.3), grids of any size, and errors."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from gshard.core.mesh import Mesh
from gshard.device.machine import KINDS, RING, Machine, MachineError
from gshard.device.network import (
    extents,
    goes_one_way,
    groups,
    link_loads,
    permutation_seconds,
    permuting,
    seconds,
)

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


def test_all_reduce_does_not_grow_with_the_torus():
    times = [on_torus("all_reduce", n) for n in SIZES]
    assert max(times) < 1.1 * min(times)


def test_all_to_all_grows_with_the_root_of_the_torus():
    times = [on_torus("all_to_all", n) for n in SIZES]
    assert [b / a for a, b in pairwise(times)] == pytest.approx([2.0] * (len(SIZES) - 1), rel=0.01)


def test_all_gather_of_a_fixed_operand_grows_with_the_devices():
    times = [on_torus("all_gather", n) for n in SIZES]
    assert [b / a for a, b in pairwise(times)] == pytest.approx([4.0] * (len(SIZES) - 1), rel=0.1)


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


@pytest.mark.parametrize(
    "text",
    [
        "v3:2x3",
        "v4:2x3x4",
        "v5e:16x16",
        "v5p:4x4x4",
        "v6e:2x4",
        "tpu7x:2x2x3",
        "h100:2x8",
        "h200:8",
        "gb200:2x72",
        "mi300x:2x8",
        "cpu:12",
    ],
)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_time_grows_with_bytes_on_every_machine_and_group(text, kind):
    machine = Machine.of(text)
    mesh = Mesh.abstract(devices=machine.size)
    for k in range(len(mesh.atoms)):
        atoms = mesh.atoms[k:]
        times = [seconds(kind, n, mesh, machine, atoms) for n in (0, 1 << 10, 1 << 20, 1 << 30)]
        assert times[0] == 0.0
        assert all(a < b for a, b in pairwise(times))
        assert all(map(math.isfinite, times))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_is_found_for_a_number_of_devices(kind):
    for devices in (2, 8, 16, 96, 128, 2048):
        assert Machine.of(kind, devices).size == devices


def test_a_machine_is_written_and_read(tmp_path):
    for text in ("v5e:4x8", "h100:4x8", "mi300x:4x8", "cpu:32"):
        machine = Machine.of(text)
        machine.dump(tmp_path / "machine.json")
        assert Machine.of(str(tmp_path / "machine.json"), 32) == machine


@pytest.mark.parametrize(
    "text, devices, message",
    [
        ("v9:2x2", None, "no machine is called 'v9:2x2'"),
        ("v3", None, "does not say how many devices"),
        ("v3", 7, "2 devices on each chip"),
        ("v3:2x2", 7, "has 8 devices, and the mesh has 7"),
        ("v3:2x2x2", None, "has 3 dimensions"),
        ("absent.json", None, "cannot be read"),
    ],
)
def test_errors_say_what_to_write(text, devices, message):
    with pytest.raises(MachineError, match=message):
        Machine.of(text, devices)


def test_a_file_that_is_no_machine(tmp_path):
    (tmp_path / "m.json").write_text('{"name": "x"}')
    with pytest.raises(MachineError, match="does not describe a machine"):
        Machine.of(str(tmp_path / "m.json"))
