"""Defines traits: properties of a primitive besides its rule, such as what sums and merged dimensions pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gshard.core.program import Constant, Equation, Value

# Determines which equations unreduced parts of a sum may pass before they are added (``Rule.linear``).

Ways = list[tuple[str, tuple[int, ...]]]


def added(dtype: Any, *positions: int) -> Ways:
    """The value of ``linear`` for a rule whose results are sums of elements of all these operands."""
    return [("add", positions)] if sums_in_range(dtype) else []


def combined(monoid: str, dtype: Any, *positions: int) -> Ways:
    """The value of ``linear`` for a rule that combines elements of these operands by a monoid in another order."""
    if monoid == "mul":  # some factors may be 1e30 and others 1e-30
        return [(monoid, positions)] if is_exact(dtype) else []
    return added(dtype, *positions) if monoid == "add" else [(monoid, positions)]


def if_finite(dtype: Any, *operands: tuple[int, ...]) -> Ways:
    """The value of ``finite`` for a rule that is linear in each of these sets of operands, if they are floats.

    >>> if_finite(jnp.float16, (0,), (1,)), if_finite(jnp.int8, (0,))
    ([('add', (0,)), ('add', (1,))], [])
    """
    return [("add", positions) for positions in operands] if jax.dtypes.issubdtype(dtype, jnp.inexact) else []


def sums_in_range(dtype: Any) -> bool:
    """Whether parts of a sum may be added to other parts: integers, and floats with the range of bfloat16 or more."""
    return is_exact(dtype) or (
        jax.dtypes.issubdtype(dtype, jnp.inexact) and float(jnp.finfo(dtype).max) > 1e38  # bfloat16 and wider
    )


def is_exact(dtype: Any) -> bool:
    """Whether sums and products are exact in every order: for integers, modulo a power of two."""
    return jax.dtypes.issubdtype(dtype, jnp.integer)


# Defines the fine form of arrays with merged dimensions, for ``Traits.merged``.

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


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a primitive."""

    # whether each element of the result depends only on the elements of the operands at its position
    elementwise: bool = False
    # whether the result is the operand, and the equation only annotates it, for example with a name
    remark: bool = False
    moves: bool = False  # whether elements change their positions, so that shards must exchange them
    monoid: str = ""  # the monoid with which the operation combines the elements of two arrays; empty if it is none
    # whether the equation may run again or not at all: it always gives the same results and has no effects
    pure: bool = True
    shared: bool = True  # whether gshard may replace equal equations by one
    handed_on: bool = False  # whether it also runs on values in host memory
    # ``values(params, *arrays)`` returns the result for NumPy arrays (floats are float64), or None if the result may
    # depend on the rounding of a device
    values: Callable[..., np.ndarray | None] | None = None
    # ``normal(params, shape)`` returns those parameters that can be written in several ways, as its rule writes them
    # for a result of this shape. So equal equations of two programs are equal texts.
    normal: Callable[[Mapping[str, Any], Sequence[int]], Mapping[str, Any]] | None = None
    # computes an equation in fine form (``Fine``)
    merged: Callable[[Maker, Equation], bool] | None = None

    @property
    def computes(self) -> bool:
        """Whether it is elementwise and not only a remark."""
        return self.elementwise and not self.remark

    @property
    def adds(self) -> bool:
        """Whether it adds two arrays."""
        return self.monoid == "add"


_TRAITS: dict[str, Traits] = {}
_NONE = Traits()


def set_traits(*names: str, **traits: Any) -> None:
    """Adds traits to the primitives of these names."""
    for name in names:
        _TRAITS[name] = dataclasses.replace(traits_of(name), **traits)


def traits_of(name: str) -> Traits:
    """The traits of a primitive."""
    return _TRAITS.get(name, _NONE)


def names_where(holds: Callable[[Traits], Any]) -> frozenset[str]:
    """The names of the primitives whose traits satisfy a condition."""
    return frozenset(name for name, traits in _TRAITS.items() if holds(traits))
