"""Defines the primitives of a ``shard_map`` that is manual over some axes of its mesh and automatic over others.

Tracing converts such a region to equations of the program (``tracing.partly_manual``):

    enter_manual      takes the part of a whole array at one position along the manual axes
    manual_psum, ...  a collective of JAX over manual axes, between such parts
    leave_manual      joins the parts to a whole array, or adds them

These primitives cannot run outside of gshard, because they name axes of the user's mesh.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.extend.core import Primitive

from gshard.comm.collectives import KINDS

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionBoundary:
    """The boundary of a region at one array."""

    axes: Axes  # names and sizes of the axes of the user's mesh
    manual: tuple[str, ...]  # the axes that become manual in the region
    spec: tuple[tuple[str, ...], ...]  # for each dimension the manual axes that split it in the region
    # the devices of the user's mesh in row-major order, if it has devices
    devices: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    summed: tuple[str, ...] = ()  # the manual axes over which parts that leave the region are added

    def parts(self) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        sizes = dict(self.axes)
        return tuple(math.prod(sizes[name] for name in names) for names in self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of JAX in the body of a region."""

    primitive: Any  # primitive, params: the primitive and the parameters of JAX's equation
    params: tuple[tuple[str, Any], ...]
    over: tuple[str, ...]  # the axes of the user's mesh that the collective names
    axes: Axes  # names and sizes of all axes of this mesh
    manual: tuple[str, ...]  # the axes that are manual at the collective
    results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each result


enter_manual_p = Primitive("enter_manual")
leave_manual_p = Primitive("leave_manual")


@enter_manual_p.def_abstract_eval
def _part(x: Any, *, boundary: RegionBoundary) -> Any:
    shape = tuple(n // parts for n, parts in zip(x.shape, boundary.parts(), strict=True))
    return jax.core.ShapedArray(shape, x.dtype, weak_type=x.weak_type)


@leave_manual_p.def_abstract_eval
def _whole(x: Any, *, boundary: RegionBoundary) -> Any:
    shape = tuple(n * parts for n, parts in zip(x.shape, boundary.parts(), strict=True))
    return jax.core.ShapedArray(shape, x.dtype, weak_type=x.weak_type)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"manual_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, collective: [jax.core.ShapedArray(shape, dtype) for shape, dtype in collective.results]
    )
    return primitive


MANUAL_COLLECTIVES = {name: _primitive(name) for name in (*KINDS, "axis_index")}
"""The primitive for each of JAX's collectives that such a region may contain, by JAX's name."""
