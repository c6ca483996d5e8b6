"""Converts sharding rules of ``jax.experimental.custom_partitioning`` to factors.

A sharding rule is a text, ``"... i k, k j -> ... i j"``, or an ``SdyShardingRule`` object. It corresponds to a rule in
gshard's notation. The partitioner does not reduce a factor that occurs in operands only: the user's per-device program
combines the parts.

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
    """The factors of an equation."""

    sizes: tuple[int, ...]  # the size of each factor: the largest dimension that it stands for
    # for each dimension of each operand, then of each result, its factors, major to minor
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    whole: frozenset[int] = frozenset()  # the factors that cannot be split
    communicated: frozenset[int] = frozenset()  # the factors along which devices communicate


def independent(shapes: Shapes) -> Factors:
    """A separate factor for each dimension of each array, for an equation without a sharding rule."""
    sizes: list[int] = []
    dims = []
    for shape in shapes:
        dims.append(tuple((len(sizes) + d,) for d in range(len(shape))))
        sizes += shape
    return Factors(tuple(sizes), tuple(dims))


def factors_of(rule: SdyShardingRule, in_shapes: Shapes, out_shapes: Shapes) -> Factors:
    """The factors of a sharding rule, for arrays of these shapes."""
    mappings = (*rule.operand_mappings, *rule.result_mappings)
    for what, mappings_of_rule, shapes_of_call in (
        ("operands", rule.operand_mappings, in_shapes),
        ("results", rule.result_mappings, out_shapes),
    ):
        if len(mappings_of_rule) != len(shapes_of_call):
            raise _misfit(rule, f"is for {len(mappings_of_rule)} {what}, and there are {len(shapes_of_call)}")
    shapes = (*in_shapes, *out_shapes)
    names_of_arrays = list(_expand_ellipses(rule, mappings, shapes, len(in_shapes)))
    size_of = {str(name): int(size) for name, size in rule.factor_sizes.items()}
    for names, shape in zip(names_of_arrays, shapes, strict=True):
        for (name, *others), n in zip(names, shape, strict=True):
            if not others:
                size_of[name] = max(n, size_of.get(name, n))
    all_names = dict.fromkeys(name for names in names_of_arrays for dim in names for name in dim)
    number_of = {name: i for i, name in enumerate(all_names)}
    if missing := [name for name in number_of if name not in size_of]:
        raise _misfit(rule, f"leaves the size of {missing[0]!r} open")
    sizes = [size_of[name] for name in number_of]
    dims_of_arrays = []
    whole = {number_of[name] for name in rule.need_replication_factors}
    for i, (names, shape) in enumerate(zip(names_of_arrays, shapes, strict=True)):
        dims: list[tuple[int, ...]] = []
        for d, (dim, n) in enumerate(zip(names, shape, strict=True)):
            factors = tuple(number_of[name] for name in dim)
            if len(dim) > 1 and math.prod(sizes[f] for f in factors) != n:
                product = " * ".join(f"{name}={size_of[name]}" for name in dim)
                raise _misfit(rule, f"has dimension {d} of {_array(i, len(in_shapes))} be {product}, and it is {n}")
            if len(dim) == 1 and n == 1 < sizes[factors[0]]:  # a broadcast dimension stays whole
                factors = (len(sizes),)
                whole.add(len(sizes))
                sizes.append(1)
            dims.append(factors)
        used = [f for factors in dims for f in factors]
        if len(set(used)) != len(used):
            raise _misfit(rule, f"names a factor twice in {_array(i, len(in_shapes))}")
        dims_of_arrays.append(tuple(dims))
    communicated = {number_of[name] for name in (*rule.reduction_factors, *rule.permutation_factors)}
    return Factors(tuple(sizes), tuple(dims_of_arrays), frozenset(whole), frozenset(communicated))


def _expand_ellipses(
    rule: SdyShardingRule, mappings: Sequence[Any], shapes: Shapes, operands: int
) -> Iterator[list[Any]]:
    """For each array a tuple of factor names for each dimension. Dimensions of '...' get names of their own."""
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
