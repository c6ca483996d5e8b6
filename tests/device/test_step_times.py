"""What steps take on a machine: bounds that the search for ways relies on."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, Step, is_exchange
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.device.network import StepTimes, least_gather_seconds, seconds
from gshard.device.roofline import copy_seconds
from sampled import crossed

MACHINES = ["v5e:2x4", "v3:4x2", "h100:2x8", "cpu:8"]


class Unguided(StepTimes):
    """Looks at every way that is not dearer than the one it takes."""

    def least(self, held: int, wanted: int) -> float:
        return 0.0


def some(mesh: Mesh, rank: int, rng: random.Random) -> Sharding:
    atoms = [a for a in mesh.atoms if rng.random() < 0.8]
    rng.shuffle(atoms)
    dims: list[list[str]] = [[] for _ in range(rank)]
    unreduced = {}
    for a in atoms:
        if rng.random() < 0.15:
            unreduced[a] = "add"
        else:
            rng.choice(dims).append(a)
    return Sharding(tuple(map(tuple, dims))).with_unreduced(unreduced)


@pytest.mark.parametrize(("named", "joined"), crossed(MACHINES, [False, True], one_in=4))
@pytest.mark.one_in(2)
def test_ways_are_no_dearer_for_what_is_known_to_remain(named: str, joined: bool) -> None:
    rng = random.Random(len(named))
    machine = Machine.of(named)
    mesh = Mesh.abstract(x=2, y=machine.size // 2)
    guided, unguided = (dataclasses.replace(mesh, times=made(machine, joined)) for made in (StepTimes, Unguided))
    for _ in range(60):
        source, target = some(mesh, 3, rng), some(mesh, 3, rng).with_unreduced({})
        shape = tuple(rng.choice((3, 8, 64, 500)) for _ in range(3))
        taken = [
            sum(m.times.seconds(s, shape, 4, m) for s in plan_reshard(source, target, shape, 4, m))
            for m in (guided, unguided)
            if m.times
        ]
        assert taken[0] <= taken[1] * (1 + 1e-9), (source, target, shape)


@pytest.mark.parametrize("named", MACHINES)
def test_steps_take_what_they_copy_and_what_they_make_a_message_longer(named: str) -> None:
    machine = Machine.of(named)
    mesh = Mesh.abstract(d=machine.size)
    times, joined = StepTimes(machine), StepTimes(machine, joined=True)
    shape, n = (256, 512), mesh.size
    whole, local = Sharding(((), ())), 4 * 256 * 512 // n

    def taken(step: Step, of: StepTimes = times) -> float:
        return of.seconds(step, shape, 4, mesh)

    rows, columns = Sharding((mesh.atoms, ())), Sharding(((), mesh.atoms))
    gathers = [Step(ALL_GATHER, mesh.atoms, cut, whole, d) for d, cut in enumerate((rows, columns))]
    copies = (
        copy_seconds(machine, local)
        + (0 if machine.compiler.products_take_layouts else copy_seconds(machine, local * n))
        if machine.compiler.copies_for_collectives
        else 0.0
    )
    assert taken(gathers[1]) - taken(gathers[0]) >= copies * (1 - 1e-9)
    sums, largest = (
        Step(ALL_REDUCE, mesh.atoms, whole.with_unreduced(dict.fromkeys(mesh.atoms, monoid)), whole, monoid=monoid)
        for monoid in ("add", "max")
    )
    assert taken(largest) - taken(sums) == pytest.approx(
        copy_seconds(machine, local * n) + 14 * 256 * 512 / machine.vector_flops
    )
    latency = seconds(ALL_REDUCE, 1, mesh, machine, mesh.atoms)
    assert taken(sums) - taken(sums, joined) == pytest.approx(latency, rel=1e-3)
    exchange = Step(ALL_TO_ALL, mesh.atoms, rows, columns, 0, 1)
    assert taken(exchange, joined) == taken(exchange), "no compiler puts these together"
    tiles = dataclasses.replace(exchange, dim=-1, to=-1)
    assert taken(tiles) >= seconds(ALL_TO_ALL, local, mesh, machine, mesh.atoms) + copy_seconds(machine, local)


@pytest.mark.parametrize("named", MACHINES)
def test_what_uneven_parts_pad_and_cut_is_copied(named: str) -> None:
    machine = Machine.of(named)
    mesh = Mesh.abstract(d=machine.size)
    times, n = StepTimes(machine), mesh.size
    rows, columns, whole = Sharding((mesh.atoms, ())), Sharding(((), mesh.atoms)), Sharding(((), ()))
    gather = Step(ALL_GATHER, mesh.atoms, rows, whole, 0)
    # The same parts are sent; of the second array the last part is padded, and the whole is cut after the gather.
    even, uneven = (times.seconds(gather, (size, n), 4, mesh) for size in (2 * n, 2 * n - 1))
    assert uneven - even == pytest.approx(copy_seconds(machine, 4 * (2 * n - 1) * n))
    exchange = Step(ALL_TO_ALL, mesh.atoms, rows, columns, 0, 1)
    local = 4 * (2 * n - 1)  # one row, which is padded, and whose parts lie in order
    sent = seconds(ALL_TO_ALL, local, mesh, machine, mesh.atoms) + 0.1 * machine.launch
    assert times.seconds(exchange, (n, 2 * n - 1), 4, mesh) - sent == pytest.approx(copy_seconds(machine, local))


def test_tiles_of_an_exchange_are_cut_and_put_in_place() -> None:
    """Where starting a kernel takes long and messages are short, an all-to-all and a permutation are less."""
    mesh = Mesh.abstract(x=2, y=4)
    x, y = (mesh.atoms_of[name] for name in ("x", "y"))
    before, after = Sharding((x, y, ())), Sharding((y, x, ()))
    machine = Machine.of("h100:1x8")
    times = StepTimes(machine)
    tiles = Step(PERMUTE, mesh.atoms, before, after)
    assert is_exchange(tiles, mesh)
    apart = times.seconds(tiles, (32, 16, 64), 4, mesh)
    assert apart >= 4 * machine.launch, "two tiles, each cut and put"
    way = plan_reshard(before, after, (32, 16, 64), 4, dataclasses.replace(mesh, times=times))
    assert len(way) > 1
    assert sum(times.seconds(s, (32, 16, 64), 4, mesh) for s in way) < apart
    large = plan_reshard(before, after, (3200, 1600, 640), 4, dataclasses.replace(mesh, times=times))
    assert [is_exchange(s, mesh) for s in large] == [True], "there the bytes decide"


@pytest.mark.parametrize("named", MACHINES)
def test_the_bound_leaves_out_steps(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is priced only if the steps that must follow it can still be cheaper than the best ones so far."""
    machine = Machine.of(named)
    mesh, counts = Mesh.abstract(a=2, b=machine.size // 2), dict[type, int]()
    original = StepTimes.seconds

    def counted(self: StepTimes, *args: Any, **options: Any) -> float:
        counts[type(self)] = counts.get(type(self), 0) + 1
        return original(self, *args, **options)

    monkeypatch.setattr(StepTimes, "seconds", counted)
    rng = random.Random(1)
    for _ in range(20):
        before, after = some(mesh, 3, rng), some(mesh, 3, rng)
        with tables():
            for times in (StepTimes(machine), Unguided(machine)):
                plan_reshard(before, after, (64, 48, 32), 4, dataclasses.replace(mesh, times=times))
    assert 0 < counts[StepTimes] < 0.95 * counts[Unguided]


@pytest.mark.parametrize("named", MACHINES)
def test_no_gather_takes_less_than_the_least(named: str) -> None:
    machine = Machine.of(named)
    mesh = Mesh.abstract(d=machine.size)
    for first in range(len(mesh.atoms)):
        for last in range(first + 1, len(mesh.atoms) + 1):
            atoms = mesh.atoms[first:last]
            taken = seconds(ALL_GATHER, 1 << 20, mesh, machine, atoms)
            least = least_gather_seconds(1 << 20, (1 << 20) * mesh.count(atoms), machine)
            assert 0 < least <= taken * (1 + 1e-9), atoms
    assert least_gather_seconds(8, 8, machine) == least_gather_seconds(16, 8, machine) == 0


def test_what_is_left_over_a_torus_is_not_taken_for_what_goes_over_a_switch() -> None:
    machine = Machine.of("v3:4x2")  # two cores of a chip are behind a switch that is faster than all links
    half, whole = (least_gather_seconds(1 << 20, n << 20, machine) for n in (2, 16))
    links = sum(2 * d.bandwidth / d.shared_by for d in machine.network[:2])
    assert math.isclose(whole, (8 << 20) / machine.network[2].bandwidth + (7 << 20) / links)
    assert half < whole / 7
