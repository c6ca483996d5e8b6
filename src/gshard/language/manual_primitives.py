"""The primitives of a ``shard_map`` that is manual over some axes of its mesh and leaves others automatic.

When the program is traced such a region becomes equations of the program (``tracing.partly_manual``):

    enter_manual      a whole array becomes the part that belongs to one position along the manual axes
    manual_psum, ...  a collective of JAX's over manual axes, between such parts
    leave_manual      parts become a whole array

They mean nothing outside of gshard: each names axes of the user's mesh, which only the per-device program has.
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
    """The boundary of a region at one array.

    Attributes:
        axes: names and sizes of the user's mesh.
        manual: the axes that become manual here.
        spec: for each dimension the manual axes along which the region has it in parts.
        devices: the devices of the user's mesh in row-major order, if it has any.
    """

    axes: Axes
    manual: tuple[str, ...]
    spec: tuple[tuple[str, ...], ...]
    devices: tuple[Any, ...] = dataclasses.field(default=(), repr=False)

    def parts(self) -> tuple[int, ...]:
        """In how many parts each dimension is."""
        sizes = dict(self.axes)
        return tuple(math.prod(sizes[name] for name in names) for names in self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of JAX's, as its equation in the body of the region shows it.

    Attributes:
        primitive, params: JAX's.
        over: the axes that it names, of the user's mesh.
        axes, manual: names and sizes of that mesh, and which of them are manual where it stands.
        results: shape and dtype of each result.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    over: tuple[str, ...]
    axes: Axes
    manual: tuple[str, ...]
    results: tuple[tuple[tuple[int, ...], Any], ...]


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
    made = Primitive(f"manual_{name}")
    made.multiple_results = True
    made.def_abstract_eval(
        lambda *_, collective: [jax.core.ShapedArray(shape, dtype) for shape, dtype in collective.results]
    )
    return made


MANUAL_COLLECTIVES = {name: _primitive(name) for name in (*KINDS, "axis_index")}
"""The collectives of JAX's that such a region may have, by JAX's name."""
