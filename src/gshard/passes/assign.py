"""Assign: the split of each equation, once the shardings of its arrays are known (or guessed).

The cost of a candidate (``passes.candidates``) is what each device sends to bring operands into place and results where
they belong, and what computing its share counts as (``Prices``): an equation that could be split is not computed by
all devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.steps import SILENT
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Equation, Value, itemsize
from gshard.core.rule import REDUCE, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, parts, result_sharding
from gshard.passes.candidates import Arrays, Lying, arrays_of, near_and_far
from gshard.rules.region import REGIONS

# What moves an operand elsewhere though it could stay counts so many times: neighbours may pay for what it spares here.
DOUBT = 2.0


@dataclasses.dataclass(slots=True)
class Available:
    """Which other shardings of a value have been made already, so that using them again costs nothing."""

    made: dict[Value, set[Sharding]] = dataclasses.field(default_factory=dict)

    def has(self, value: Value, sharding: Sharding) -> bool:
        """Whether an earlier equation needed the value so."""
        return sharding in self.made.get(value, ())

    def copy(self) -> Available:
        """The same, to be added to."""
        return Available({value: set(made) for value, made in self.made.items()})

    def add(self, value: Value, sharding: Sharding) -> None:
        """Notes that the value has been brought into this sharding."""
        self.made.setdefault(value, set()).add(sharding)


def taken(equation: Equation, split: Split) -> Iterator[tuple[Value, Sharding]]:
    """The operands of an equation that are values, and how it takes each."""
    assert equation.rule is not None
    for i, value in enumerate(equation.inputs):
        if isinstance(value, Value):
            yield value, operand_sharding(equation.rule, i, split)


def assign(block: Block, shardings: Mapping[Value, Sharding], mesh: Mesh) -> dict[Equation, Split]:
    """The cheapest candidate of every equation of a block and its bodies, in program order."""
    return assign_and_cost(block, shardings, mesh)[0]


def assign_and_cost(
    block: Block, shardings: Mapping[Value, Sharding], mesh: Mesh
) -> tuple[dict[Equation, Split], float]:
    """The same with what all equations cost together; bodies count as often as they run."""
    splits: dict[Equation, Split] = {}
    choices: dict[Equation, Priced] = {}
    total = 0.0
    available = Available()
    for e in block.equations:
        for body in e.blocks:
            inner, cost = assign_and_cost(body, shardings, mesh)
            splits.update(inner)
            total += e.trips * cost
        if e.rule is not None:
            choices[e], cost = best_choice(e, shardings, mesh, available)
            splits[e], total = choices[e].split, total + cost
            for x, wanted in _brought(e, choices[e], shardings):
                available.add(x, wanted)
    spared = _shared(choices, shardings, mesh)
    splits.update((e, choice.split) for e, choice in choices.items())
    return splits, total - spared


def _shared(choices: dict[Equation, Priced], shardings: Mapping[Value, Sharding], mesh: Mesh) -> float:
    """Takes operands as a later equation takes them, where that spares something, and tells how much.

    Equations choose in program order, and each knows what those before it have brought into place. Some would choose
    otherwise if they knew what is brought into place after them.
    """
    last: dict[Value, dict[Sharding, int]] = {}
    for position, (e, choice) in enumerate(choices.items()):
        for x, wanted in _brought(e, choice, shardings):
            last.setdefault(x, {})[wanted] = position
    spared, earlier = 0.0, Available()
    for position, e in enumerate(choices if last else ()):
        values = [x for x in e.inputs if x in last]
        later = [(x, s) for x in values for s, at in last[x].items() if at > position]
        if later:
            _, now = best_choice(e, shardings, mesh, earlier)
            known = earlier.copy()
            for x, sharding in later:
                known.add(x, sharding)
            choice, cost = best_choice(e, shardings, mesh, known)
            if cost < now - 1.0:
                choices[e], spared = choice, spared + now - cost
        for x, wanted in _brought(e, choices[e], shardings):
            earlier.add(x, wanted)
    return spared


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """A candidate and what it costs.

    Attributes:
        split: the atoms of the factors.
        operands: how each operand enters; None for constants.
        moves: what it costs to bring each operand there.
        rest: what results, the equation itself and computing cost.
    """

    split: Split
    operands: tuple[Sharding | None, ...]
    moves: tuple[float, ...]
    rest: float

    def times(self, factor: float) -> Priced:
        """The same, dearer."""
        return Priced(self.split, self.operands, tuple(factor * m for m in self.moves), factor * self.rest)

    def cost(self, inputs: Sequence[Value | Constant], available: Available) -> float:
        """The whole cost, where some operands have been brought into place for others already."""
        total = self.rest
        for value, target, move in zip(inputs, self.operands, self.moves, strict=True):
            if move and not (target is not None and isinstance(value, Value) and available.has(value, target)):
                total += move
        return total


@functools.lru_cache(maxsize=16384)
def priced_near(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[Priced, ...]:
    """The candidates of an equation whose arrays lie so that these suggest, with their costs."""
    return tuple(price(rule, split, arrays, mesh) for split in near_and_far(rule, arrays, mesh)[0])


@functools.lru_cache(maxsize=16384)
def _priced_far(rule: Rule, arrays: Arrays, mesh: Mesh, i: int) -> Priced:
    return price(rule, near_and_far(rule, arrays, mesh)[1][i], arrays, mesh).times(DOUBT)


@functools.lru_cache(maxsize=16384)
def _least_far(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[tuple[float, ...], ...]:
    """What the other candidates cost at least, operand by operand, and for all results: easy to tell."""
    count = len(rule.operands)
    found = []
    for split in near_and_far(rule, arrays, mesh)[1]:
        targets = [operand_sharding(rule, i, split) for i in range(count)]
        each = [0.0 if x is None else DOUBT * _received(x, t, mesh) for x, t in zip(arrays, targets, strict=False)]
        made = (result_sharding(rule, i, split) for i in range(len(rule.results)))
        each.append(
            sum(
                DOUBT * _received(Lying(source, x.shape, x.itemsize), x.sharding, mesh)
                for x, source in zip(arrays[count:], made, strict=True)
                if x is not None
            )
        )
        found.append(tuple(each))
    return tuple(found)


def _received(x: Lying, target: Sharding, mesh: Mesh) -> float:
    """Bytes of the target's part that a device does not hold already, if nothing is to be combined."""
    if x.sharding.unreduced:
        return 0.0
    pairs = zip(x.sharding.dims, target.dims, strict=True)
    held = math.prod(mesh.count(tuple(dict.fromkeys((*have, *wanted)))) for have, wanted in pairs)
    return x.bytes / mesh.count([a for dim in target.dims for a in dim]) - x.bytes / held


def price(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> Priced:
    """What each device sends if an equation is split like this, and what its share of the work counts as."""
    count = len(rule.operands)
    operands = tuple(operand_sharding(rule, i, split) if arrays[i] is not None else None for i in range(count))
    moves = tuple(
        0.0 if x is None or target is None else cost_of_move(x.sharding, target, x.shape, x.itemsize, mesh)
        for x, target in zip(arrays, operands, strict=False)
    )
    rest = 0.0
    for i, x in enumerate(arrays[count:]):
        assert x is not None
        rest += cost_of_move(result_sharding(rule, i, split), x.sharding, x.shape, x.itemsize, mesh)
    if rule.sends is not None:
        rest += rule.sends(mesh, split)
    return Priced(split, operands, moves, rest + work_per_device(rule, split, arrays, mesh))


def work_per_device(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> float:
    """A device's operations of an equation, as the bytes that they count as."""
    size = next((x.itemsize for x in arrays if x is not None), 4)
    return rule.flops / parts(split, mesh) * (mesh.prices.product(size) if is_product(rule) else mesh.prices.other)


def is_product(rule: Rule) -> bool:
    """Whether an equation multiplies arrays and adds up."""
    return len(rule.operands) > 1 and any(f.kind == REDUCE for f in rule.factors)


def _brought(
    equation: Equation, choice: Priced, shardings: Mapping[Value, Sharding]
) -> Iterator[tuple[Value, Sharding]]:
    """The operands that have to be moved for an equation, and where to."""
    for x, wanted in zip(equation.inputs, choice.operands, strict=True):
        if wanted is not None and isinstance(x, Value) and wanted != shardings[x]:
            yield x, wanted


def best_split(
    equation: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh, available: Available
) -> tuple[Split, float]:
    """The cheapest candidate of an equation, and its cost."""
    choice, cost = best_choice(equation, shardings, mesh, available)
    return choice.split, cost


def best_choice(
    equation: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh, available: Available
) -> tuple[Priced, float]:
    """The same, with how the operands enter."""
    assert equation.rule is not None
    arrays, inputs = arrays_of(equation, shardings), equation.inputs
    at_hand = tuple([i for i, x in enumerate(inputs) if x in available.made]) if available.made else ()
    if not at_hand:
        return _cheapest(equation.rule, arrays, mesh)
    return _best(equation.rule, arrays, mesh, at_hand, lambda choice: choice.cost(inputs, available))


@functools.lru_cache(maxsize=16384)
def _cheapest(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[Priced, float]:
    """The best choice where nothing has been brought into place yet."""
    return _best(rule, arrays, mesh, (), lambda choice: choice.rest + sum(choice.moves))


def _best(
    rule: Rule, arrays: Arrays, mesh: Mesh, at_hand: tuple[int, ...], cost: Callable[[Priced], float]
) -> tuple[Priced, float]:
    """The cheapest candidate; those that cannot be are not priced. Operands ``at_hand`` may cost nothing."""
    choices = priced_near(rule, arrays, mesh)
    costs = [cost(choice) for choice in choices]
    least = min(costs)
    best = choices[costs.index(least)]
    for i, bounds in enumerate(_least_far(rule, arrays, mesh)):
        if sum(bounds) - sum(bounds[k] for k in at_hand) < least:
            other = _priced_far(rule, arrays, mesh, i)
            if (now := cost(other)) < least:
                best, least = other, now
    return best, least


def cost_around(
    equations: Iterable[Equation],
    shardings: Mapping[Value, Sharding],
    mesh: Mesh,
    only: Container[Value] | None = None,
    elsewhere: Available | None = None,
    most: float = math.inf,
) -> float:
    """What some equations of a block send together; a sharding of a value that two of them want is made once.

    Args:
        equations: in program order; of regions only the moves of their operands count.
        shardings: how all values lie.
        mesh: the devices.
        only: the values whose moves into regions, and made shardings, are of interest; None for all.
        elsewhere: what other equations make anyway.
        most: what is more than this need not be known exactly.
    """
    total, available = 0.0, elsewhere.copy() if elsewhere else Available()
    for e in equations:
        if total > most:
            break
        if e.rule is None:
            for x, wanted in zip(e.inputs, entering(e, shardings), strict=True):
                if isinstance(x, Value) and (only is None or x in only) and not available.has(x, wanted):
                    total += cost_of_moving(x, shardings[x], wanted, mesh)
                    available.add(x, wanted)
            continue
        choice, cost = best_choice(e, shardings, mesh, available)
        total += cost
        for x, wanted in _brought(e, choice, shardings):
            if only is None or x in only:
                available.add(x, wanted)
    return total


def sends_more(
    equations: Sequence[Equation],
    before: Mapping[Value, Sharding],
    shardings: Mapping[Value, Sharding],
    mesh: Mesh,
    only: Container[Value] | None = None,
    elsewhere: Available | None = None,
) -> bool:
    """Whether some equations send more than they did ``before``: less work is not bought with bytes either."""
    if mesh.by_bytes is mesh:
        return False
    old = ChainMap(dict(before), shardings)  # type: ignore[arg-type]
    now = cost_around(equations, old, mesh.by_bytes, only, elsewhere)
    return cost_around(equations, shardings, mesh.by_bytes, only, elsewhere, now + 1.0) > now + 1.0


def entering(region: Equation, shardings: Mapping[Value, Sharding]) -> list[Sharding]:
    """The shardings in which a region takes its operands."""
    return REGIONS[region.name].entry(region, lambda x: shardings[x] if isinstance(x, Value) else Sharding(()))


@functools.lru_cache(maxsize=65536)
def cost_of_move(source: Sharding, target: Sharding, shape: tuple[int, ...], size: int, mesh: Mesh) -> float:
    """Bytes that each device sends to move an array, and a little for each message: prefer fewer of them."""
    if source == target:
        return 0.0
    steps = plan_reshard(source, target, shape, size, mesh)
    messages = sum(step.kind not in SILENT for step in steps)
    return reshard_bytes(source, target, shape, size, mesh) + mesh.prices.message * messages


def cost_of_moving(value: Value, source: Sharding, target: Sharding, mesh: Mesh) -> float:
    """``cost_of_move`` of a value."""
    return cost_of_move(source, target, value.shape, itemsize(value.dtype), mesh)
