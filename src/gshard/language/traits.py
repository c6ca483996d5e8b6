"""Defines traits: properties of a primitive besides its rule, so that other modules need not list operators.

    @rule("transpose", handed_on=True, values=lambda params, x: x.transpose(params["permutation"]))

A primitive without traits has the default values. A rule is computed for each equation. Traits apply to all equations
of a primitive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gshard.core.program import Constant, Equation, Value
from gshard.language.merged_dims import Maker

Places = tuple[Any, ...]
"""For each dimension the positions to compute, int32 [m], or None for all positions."""


class Part(Protocol):
    """Computes some elements of arrays whose elements depend on their positions only (``rules.table``)."""

    def of(self, x: Value | Constant, at: Places) -> Any:
        """The elements of an array at some positions of each dimension."""


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
    fixed: bool = False  # whether a loop must run it in every iteration, even if it reads nothing
    # whether the result can be computed at no cost where it is read: it depends on no array, or on one number
    free: bool = False
    handed_on: bool = False  # whether it also runs on values in host memory
    # whether it runs with the same parameters along parallel dimensions, although its rule has a ``local`` function
    same_on_parts: bool = False
    # the parameter that contains the shape of the result, or of the operand if the result is a part of it
    shape_in: str = ""
    # ``values(params, *arrays)`` returns the result for NumPy arrays (floats are float64), or None if the result may
    # depend on the rounding of a device
    values: Callable[..., np.ndarray | None] | None = None
    # ``normal(params, shape)`` returns those parameters that can be written in several ways, as its rule writes them
    # for a result of this shape. So equal equations of two programs are equal texts.
    normal: Callable[[Mapping[str, Any], Sequence[int]], Mapping[str, Any]] | None = None
    # computes an equation in fine form (``language.merged_dims``)
    merged: Callable[[Maker, Equation], bool] | None = None
    # ``placed(part, equation, places)`` computes the elements of the result at some positions only
    placed: Callable[[Part, Equation, Places], Any] | None = None

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
