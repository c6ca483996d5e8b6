"""The chain of steps that is found against an exhaustive search: every step there is, from every sharding."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterator

import pytest

from gshard.comm import reshard
from gshard.comm.reshard import plan_reshard, reshard_bytes, single_steps
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_SLICE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Step,
    bytes_sent,
    can_be_exchanged,
    can_change,
    moved,
)
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.device.network import StepTimes
from laws.test_reshard_any import shardings

CUBE, SHAPE, BYTES = Mesh.abstract(a=2, b=2, c=2), (64, 64, 64), 4
EVERY = shardings(CUBE, len(SHAPE))


def every_step(here: Sharding) -> Iterator[Step]:
    """All that can be done to an even array in one step."""
    waiting = dict(here.unreduced)
    free = [a for a in CUBE.atoms if a not in here.atoms]

    def with_changes(changes: dict[int, tuple[str, ...]], combined: tuple[str, ...] = ()) -> Sharding:
        dims = tuple(changes.get(d, dim) for d, dim in enumerate(here.dims))
        return Sharding(dims).with_unreduced({a: m for a, m in waiting.items() if a not in combined})

    for d, have in enumerate(here.dims):
        for k in range(1, 4):
            for atoms in itertools.permutations(free, k):
                yield Step(ALL_SLICE, atoms, here, with_changes({d: (*have, *atoms)}), d)
            for atoms in itertools.permutations(waiting, k):
                yield Step(REDUCE_SCATTER, atoms, here, with_changes({d: (*have, *atoms)}, atoms), d)
        for k in range(len(have)):
            yield Step(ALL_GATHER, have[k:], here, with_changes({d: have[:k]}), d)
            for e, other in enumerate(here.dims):
                if e != d:
                    after = with_changes({d: have[:k], e: (*other, *have[k:])})
                    yield Step(ALL_TO_ALL, have[k:], here, after, d, e)
    for k in range(1, 4):
        for atoms in itertools.combinations(waiting, k):
            yield Step(ALL_REDUCE, atoms, here, with_changes({}, atoms))
    for after in EVERY:
        alike = all(CUBE.count(a) == CUBE.count(b) for a, b in zip(here.dims, after.dims, strict=True))
        if alike and after != here and after.unreduced == here.unreduced:
            yield Step(PERMUTE, CUBE.atoms, here, after)
        if can_be_exchanged(here, after, SHAPE, CUBE):
            yield Step(ALL_TO_ALL, moved(here.dims, after.dims), here, after)
        elif can_change(here, after, SHAPE, CUBE):
            yield Step(PERMUTE, CUBE.atoms, here, after)


def least_bytes(source: Sharding) -> dict[Sharding, int]:
    """What it takes at least to get from one sharding to each other."""
    best, queue, order = {source: 0}, [(0, 0, source)], itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if cost > best[here]:
            continue
        for step in every_step(here):
            total = cost + bytes_sent(step, SHAPE, BYTES, CUBE)
            if total < best.get(step.after, total + 1):
                best[step.after] = total
                heapq.heappush(queue, (total, next(order), step.after))
    return best


def check(sources: list[Sharding]) -> None:
    ratios = []
    for source in sources:
        least = least_bytes(source)
        for target in EVERY:
            if set(target.unreduced) <= set(source.unreduced):
                found = reshard_bytes(source, target, SHAPE, BYTES, CUBE)
                assert found >= least[target], "the exhaustive search is exhaustive"
                ratios.append(1.0 if found == least[target] else found / least[target])
    assert max(ratios) <= 1.3
    assert sum(r == 1.0 for r in ratios) >= 0.93 * len(ratios)


def test_some_reshards_send_no_more_than_they_must() -> None:
    check(random.Random(3).sample(EVERY, 6))


@pytest.mark.slow
def test_all_reshards_send_no_more_than_they_must() -> None:
    check(list(EVERY))


def test_few_shardings_are_looked_at_on_a_mesh_of_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without regard to what is still missing, the search goes through 8,000 shardings of small parts."""
    mesh = Mesh.abstract(data=16, model=32)
    data, model = mesh.atoms_of["data"], mesh.atoms_of["model"]
    source = Sharding((data, (), (), ()), tuple((a, "add") for a in model))
    target = Sharding(((), (), (), data))
    looked_at = []
    monkeypatch.setattr(reshard, "single_steps", lambda *given: looked_at.append(given) or single_steps(*given))
    chain = plan_reshard(source, target, (64, 32, 8, 16), 4, mesh)
    assert [step.kind for step in chain] == [REDUCE_SCATTER, REDUCE_SCATTER, ALL_TO_ALL, ALL_GATHER]
    assert 0 < len(looked_at) < 200


def test_few_shardings_are_looked_at_on_thousands_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """If parts of blocks moved anywhere, the search would go through 10,000 shardings for the same chain."""
    mesh = dataclasses.replace(Mesh.abstract(data=256, stage=8), times=StepTimes(Machine.of("v3:32x32")))
    data, stage = mesh.atoms_of["data"], mesh.atoms_of["stage"]
    source, target = Sharding((data[5:], (), data[:5], (), ())), Sharding(((), stage, (), (), ()))
    looked_at = []
    monkeypatch.setattr(reshard, "single_steps", lambda *given: looked_at.append(given) or single_steps(*given))
    chain = plan_reshard(source, target, (8, 1024, 128, 16, 64), 4, mesh)
    assert [step.kind for step in chain] == [ALL_SLICE, ALL_GATHER, ALL_GATHER]
    assert 0 < len(looked_at) < 500


def test_parts_are_gathered_along_the_outer_axis_first_and_scattered_along_it_last() -> None:
    mesh = Mesh.abstract(outer=4, inner=4)
    outer, inner = mesh.atoms_of["outer"], mesh.atoms_of["inner"]
    cut, whole = Sharding((inner, (), outer)), Sharding(((), (), ()))
    gathers = plan_reshard(cut, whole, (64, 8, 64), 4, mesh)
    assert [(s.kind, s.atoms) for s in gathers] == [("all_gather", outer), ("all_gather", inner)]
    parts = whole.with_unreduced(dict.fromkeys(mesh.atoms, "add"))
    scatters = plan_reshard(parts, cut, (64, 8, 64), 4, mesh)
    assert [(s.kind, s.atoms) for s in scatters] == [("reduce_scatter", inner), ("reduce_scatter", outer)]
