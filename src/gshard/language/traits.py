"""Traits: properties of a primitive beside its rule, so that no other module lists operators.

    @rule("transpose", handed_on=True, values=lambda params, x: x.transpose(params["permutation"]))

A primitive without traits has the defaults. A rule is computed from one equation; traits hold for all of a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gshard.core.program import Constant, Equation, Value
from gshard.language.merged_dims import Maker

Places = tuple[Any, ...]
"""For each dimension int32 [m], the positions that are wanted, or None for all."""


class Part(Protocol):
    """Arrays that follow from the positions of their elements, computed at some of them (``rules.table``)."""

    def of(self, x: Value | Constant, at: Places) -> Any:
        """The elements of an array at some positions of each dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a primitive.

    Attributes:
        elementwise: each element of the result depends only on the elements of the operands at its place.
        remark: the result is the operand; the equation only annotates it, for example with a name.
        moves: elements change their places, so that shards have to exchange them.
        monoid: of an operation on two arrays that combines elements as a reduction does.
        pure: it may run once more, or not at all: it gives the same results and has no effects.
        shared: equal equations may become one.
        fixed: a loop may not leave it out of its rounds, even if it reads nothing.
        free: made of nothing, or of one number, wherever it is read.
        handed_on: it runs on values in the memory of the host as well.
        same_on_parts: along parallel dimensions it is the same with the same parameters, although its rule has a way
            of its own to run on shards.
        shape_in: the parameter that holds the shape of the result, or of the operand where the result is a part of it.
        values: ``values(params, *arrays)``: the result, of NumPy arrays (floats are float64); None if it may depend on
            how a device rounds.
        merged: computes an equation on arrays whose merged dimensions are apart (``language.merged_dims``).
        placed: ``placed(part, equation, places)``: the elements of the result at some places only.
    """

    elementwise: bool = False
    remark: bool = False
    moves: bool = False
    monoid: str = ""
    pure: bool = True
    shared: bool = True
    fixed: bool = False
    free: bool = False
    handed_on: bool = False
    same_on_parts: bool = False
    shape_in: str = ""
    values: Callable[..., np.ndarray | None] | None = None
    merged: Callable[[Maker, Equation], bool] | None = None
    placed: Callable[[Part, Equation, Places], Any] | None = None

    @property
    def computes(self) -> bool:
        """Whether it is elementwise and no mere remark."""
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
    """The primitives whose traits fulfil a condition."""
    return frozenset(name for name, traits in _TRAITS.items() if holds(traits))
