"""Defines the fine form of arrays with merged dimensions, for ``Traits.merged``.

    (B * S, D)      has the fine form (B, S, D) with the groups ((B, S), (D,))

An array in fine form has the dimensions from which its dimensions were merged. Many equations can be written in fine
form: a dimension in their parameters becomes a group of dimensions. ``Traits.merged`` of a primitive does this, and
``rewrite.split_merged_dims`` decides where it is useful.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gshard.core.program import Constant, Equation, Value

Array = Value | Constant

Groups = tuple[tuple[int, ...], ...]  # for each dimension the sizes of the dimensions from which it was merged


@dataclasses.dataclass(frozen=True, slots=True)
class Fine:
    """An array in fine form."""

    array: Array  # the array; its shape is the concatenation of the groups
    groups: Groups  # for each dimension of the merged array the sizes of its dimensions in fine form
    roots: frozenset[Value]  # the values at which dimensions were merged

    def dims(self, d: int) -> range:
        """The dimensions in fine form of dimension ``d`` of the merged array."""
        first = sum(map(len, self.groups[:d]))
        return range(first, first + len(self.groups[d]))

    def all_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The dimensions in fine form of several dimensions of the merged array."""
        return tuple(i for d in dims for i in self.dims(d))


class Maker(Protocol):
    """The interface of the rewriter (``rewrite.split_merged_dims``)."""

    def either(self, x: Array) -> Fine:
        """The fine form of an array. An array without merged dimensions is its own fine form."""

    def operands(self, e: Equation, groups: Sequence[Groups]) -> list[Array] | None:
        """The operands of an equation in fine form with these groups; None if an operand has other groups."""

    def add(self, at: Equation, params: dict[str, Any], inputs: Sequence[Array], shape: tuple[int, ...], dtype: Any,
            primitive: Any = None) -> Value:  # fmt: skip
        """Appends an equation with the primitive of ``at``, or with ``primitive``, and returns its result."""

    def note(self, e: Equation, array: Value, groups: Groups, which: int = 0) -> bool:
        """Records the fine form of result ``which`` of an equation; returns True."""


def flat(groups: Groups) -> tuple[int, ...]:
    """The shape in fine form."""
    return tuple(n for group in groups for n in group)


def groups_of(fine: Sequence[int], merged: Sequence[int]) -> Groups | None:
    """The groups of a reshape that merges dimensions; None if the dimensions of the two shapes do not align.

    >>> groups_of((8, 512, 128), (4096, 2, 64))
    ((8, 512), (2,), (64,))
    >>> groups_of((4, 6), (3, 8)) is None
    True
    """
    remaining = [n for n in fine if n != 1][::-1]
    groups: list[tuple[int, ...]] = []
    for size in merged:
        group: list[int] = []
        while size > 1:
            n = remaining.pop()
            if n > size:
                if n % size:
                    return None
                remaining.append(n // size)
                n = size
            if size % n:
                return None
            group.append(n)
            size //= n
        groups.append(tuple(group) or (1,))
    return tuple(groups)


def emit(a: Maker, e: Equation, inputs: Sequence[Array], groups: Groups, **params: Any) -> bool:
    """Appends an equation in fine form, with some changed parameters, and records its result; returns True."""
    return a.note(e, a.add(e, {**e.params, **params}, inputs, flat(groups), e.outputs[0].dtype), groups)
