"""Merged dimensions: an array in fine form has those that its dimensions were merged from (``Traits.merged``).

    (B * S, D)      in fine form (B, S, D), its groups ((B, S), (D,))

An equation treats all elements of a merged dimension alike if it can be written with the dimensions that it was merged
from: what was one dimension in its parameters is then a group of them. Which equations can, their rules say;
``rewrite.split_merged_dims`` decides where it is of use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gshard.core.program import Constant, Equation, Value

Array = Value | Constant

Groups = tuple[tuple[int, ...], ...]  # for each dimension the sizes of those that it was merged from


@dataclasses.dataclass(frozen=True, slots=True)
class Fine:
    """An array in fine form.

    Attributes:
        array: it; its shape is the groups' numbers in a row.
        groups: for each dimension of the merged array the sizes of its own.
        roots: where it was merged: what would have been made there.
    """

    array: Array
    groups: Groups
    roots: frozenset[Value]

    def dims(self, d: int) -> range:
        """The dimensions that stand for one of the merged array."""
        first = sum(map(len, self.groups[:d]))
        return range(first, first + len(self.groups[d]))

    def all_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for d in dims for i in self.dims(d))


class Maker(Protocol):
    """Interface of the rewriter (``rewrite.split_merged_dims``)."""

    def either(self, x: Array) -> Fine:
        """An array in fine form, or one none of whose dimensions was merged."""

    def operands(self, e: Equation, groups: Sequence[Groups]) -> list[Array] | None:
        """The operands of an equation with their dimensions as in some groups; None if one was merged from others."""

    def add(self, at: Equation, params: dict[str, Any], inputs: Sequence[Array], shape: tuple[int, ...], dtype: Any,
            primitive: Any = None) -> Value:  # fmt: skip
        """Appends an equation, of the primitive of ``at`` or another one, and returns its result."""

    def note(self, e: Equation, array: Value, groups: Groups, which: int = 0) -> bool:
        """Notes what a result of an equation is in fine form."""


def flat(groups: Groups) -> tuple[int, ...]:
    """The shape in fine form."""
    return tuple(n for group in groups for n in group)


def groups_of(fine: Sequence[int], merged: Sequence[int]) -> Groups | None:
    """The sizes that dimensions have if an array of one shape becomes one of another; None if they cross.

    >>> groups_of((8, 512, 128), (4096, 2, 64))
    ((8, 512), (2,), (64,))
    >>> groups_of((4, 6), (3, 8)) is None
    True
    """
    rest, groups = [n for n in fine if n != 1][::-1], []
    for m in merged:
        group: list[int] = []
        while m > 1:
            n = rest.pop()
            if n > m:
                if n % m:
                    return None
                rest.append(n // m)
                n = m
            if m % n:
                return None
            group.append(n)
            m //= n
        groups.append(tuple(group) or (1,))
    return tuple(groups)


def emit(a: Maker, e: Equation, inputs: Sequence[Array], groups: Groups, **params: Any) -> bool:
    """Computes an equation in fine form, with some parameters changed; True."""
    return a.note(e, a.add(e, {**e.params, **params}, inputs, flat(groups), e.outputs[0].dtype), groups)
