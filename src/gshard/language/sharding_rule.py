"""Sharding rules of ``jax.experimental.custom_partitioning``, read as factors.

JAX writes them as text, ``"... i k, k j -> ... i j"``, or as ``SdyShardingRule`` objects; they say what our own
notation says. A factor of theirs that stands in operands alone is not reduced by the partitioner: the program that the
user gives for each device combines the parts.

    >>> from jax.experimental.custom_partitioning import SdyShardingRule, ArrayMapping
    >>> mapping = SdyShardingRule((ArrayMapping("i", "k"), ArrayMapping("k")), (ArrayMapping("i"),))
    >>> factors_of(mapping, ((8, 4), (4,)), ((8,),))
    Factors(sizes=(8, 4), dims=(((0,), (1,)), ((1,),), ((0,),)), whole=frozenset(), communicated=frozenset())
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule

from gshard.core.errors import RuleError

Shapes = Sequence[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The factors of an equation.

    Attributes:
        sizes: of each factor; the largest dimension that it stands for.
        dims: for each operand, then each result, for each dimension, its factors major to minor.
        whole: those that cannot be split.
        communicated: those along which devices send to each other.
    """

    sizes: tuple[int, ...]
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    whole: frozenset[int] = frozenset()
    communicated: frozenset[int] = frozenset()


def independent(shapes: Shapes) -> Factors:
    """A factor for each dimension of each array: what holds where there is no sharding rule."""
    sizes: list[int] = []
    dims = []
    for shape in shapes:
        dims.append(tuple((len(sizes) + d,) for d in range(len(shape))))
        sizes += shape
    return Factors(tuple(sizes), tuple(dims))


def factors_of(rule: SdyShardingRule, in_shapes: Shapes, out_shapes: Shapes) -> Factors:
    """The factors of a sharding rule, for arrays of these shapes.

    Raises:
        RuleError: the rule does not fit the arrays.
    """
    mappings = (*rule.operand_mappings, *rule.result_mappings)
    for what, written, given in (
        ("operands", rule.operand_mappings, in_shapes),
        ("results", rule.result_mappings, out_shapes),
    ):
        if len(written) != len(given):
            raise _misfit(rule, f"is for {len(written)} {what}, and there are {len(given)}")
    shapes = (*in_shapes, *out_shapes)
    spread = list(_spread(rule, mappings, shapes, len(in_shapes)))
    sizes = {str(name): int(size) for name, size in rule.factor_sizes.items()}
    for names, shape in zip(spread, shapes, strict=True):
        for (name, *more), n in zip(names, shape, strict=True):
            if not more:
                sizes[name] = max(n, sizes.get(name, n))
    numbers = {name: i for i, name in enumerate(dict.fromkeys(w for names in spread for dim in names for w in dim))}
    if missing := [name for name in numbers if name not in sizes]:
        raise _misfit(rule, f"leaves the size of {missing[0]!r} open")
    every = [sizes[name] for name in numbers]
    dims, whole = [], {numbers[name] for name in rule.need_replication_factors}
    for i, (names, shape) in enumerate(zip(spread, shapes, strict=True)):
        own: list[tuple[int, ...]] = []
        for d, (dim, n) in enumerate(zip(names, shape, strict=True)):
            product = tuple(numbers[name] for name in dim)
            if len(dim) > 1 and math.prod(every[f] for f in product) != n:
                got = " * ".join(f"{name}={sizes[name]}" for name in dim)
                raise _misfit(rule, f"has dimension {d} of {_array(i, len(in_shapes))} be {got}, and it is {n}")
            if len(dim) == 1 and n == 1 < every[product[0]]:  # one element for all of the others: it stays whole
                product = (len(every),)
                whole.add(len(every))
                every.append(1)
            own.append(product)
        used = [f for product in own for f in product]
        if len(set(used)) != len(used):
            raise _misfit(rule, f"names a factor twice in {_array(i, len(in_shapes))}")
        dims.append(tuple(own))
    communicated = {numbers[name] for name in (*rule.reduction_factors, *rule.permutation_factors)}
    return Factors(tuple(every), tuple(dims), frozenset(whole), frozenset(communicated))


def _spread(rule: SdyShardingRule, mappings: Sequence[Any], shapes: Shapes, operands: int) -> Iterator[list[Any]]:
    """The names of each array's dimensions, each a tuple; leading dimensions that '...' stands for have their own."""
    ranks: dict[str, int] = {}
    for i, (mapping, shape) in enumerate(zip(mappings, shapes, strict=True)):
        names = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
        if names and names[0][0].startswith(BATCHING):
            group = names.pop(0)[0].removeprefix(BATCHING) or "0"
            rank = len(shape) - len(names)
            if ranks.setdefault(group, rank) != rank:
                raise _misfit(rule, f"has '...' stand for {ranks[group]} dimensions and for {rank}")
            names = [*((f"{BATCHING}{group}_{d}",) for d in range(rank)), *names]
        if len(names) != len(shape):
            raise _misfit(rule, f"gives {_array(i, operands)} {len(names)} dimensions, and it has {len(shape)}")
        yield names


def _array(i: int, operands: int) -> str:
    return f"operand {i}" if i < operands else f"result {i - operands}"


def _misfit(rule: SdyShardingRule, what: str) -> RuleError:
    return RuleError(f"the sharding_rule of a custom_partitioning {what}.", got=str(rule))
