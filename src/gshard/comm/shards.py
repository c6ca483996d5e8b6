"""Shards: describes one device's shard of an equation to the ``local`` of its rule.

def local(shards, x):                       # inside shard_map, x is this device's part
    return shards.bind(x, shape=shards.out_shape())
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.halo import Window, add_windows, is_number, laid_out, received
from gshard.comm.route import Route, carry
from gshard.comm.steps import PERMUTE
from gshard.comm.steps import identity as identity
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter import traced_together
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, itemsize
from gshard.core.rule import REDUCE, Rule
from gshard.core.split import Split, place
from gshard.core.xla_workarounds import all_gather, taken

Fetched = dict[tuple[int, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """One equation, its split and the mesh, seen from one device.

    Attributes:
        equation: what is computed.
        split: the atoms of its factors.
        mesh: the devices.
        note: told of every collective: kind, atoms, bytes that each device sends, local operand.
        unread: results without users.
        fetched: the windows that equations of this block have fetched already.
    """

    equation: Equation
    split: Split
    mesh: Mesh
    note: Callable[[str, Atoms, int, Any], None] | None = None
    unread: frozenset[int] = frozenset()
    fetched: Fetched | None = None

    @property
    def rule(self) -> Rule:
        """The equation's rule."""
        assert self.equation.rule is not None
        return self.equation.rule

    @property
    def params(self) -> dict[str, Any]:
        """The equation's parameters, which have global shapes."""
        return self.equation.params

    def bind(self, *arrays: Any, **changes: Any) -> list[Any]:
        """Runs the equation's own primitive on local arrays, with some parameters changed."""
        out = self.equation.primitive.bind(*arrays, **{**self.params, **changes})
        return list(out) if self.equation.primitive.multiple_results else [out]

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """The local shape of result ``i``."""
        return self._shape(self.rule.results[i], self.equation.outputs[i].shape)

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """The local shape of operand ``i``."""
        return self._shape(self.rule.operands[i], self.equation.inputs[i].shape)

    def _shape(self, dims: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        atoms = place(dims, self.split)
        return tuple(-(-n // self.mesh.count(a)) for n, a in zip(shape, atoms, strict=True))

    def atoms(self, factor: int) -> Atoms:
        """The atoms over which a factor is split."""
        return self.split.get(factor, ())

    def size(self, factor: int) -> int:
        """A factor's size on one device, padding included."""
        return -(-self.rule.factors[factor].size // self.mesh.count(self.atoms(factor)))

    def offset(self, dim: tuple[int, ...]) -> Any:
        """Where this device's part of a dimension begins, as a global index (an ``int32`` scalar or 0)."""
        atoms = tuple(a for f in dim for a in self.atoms(f))
        if not atoms:
            return 0
        size = math.prod(self.size(f) for f in dim)
        return lax.axis_index(atoms) * size

    def fetch(self, x: Any, dim: int, atoms: Atoms, window: Window) -> Any:
        """The elements that stand in this device's window, side by side; those outside of the array are undefined."""

        return self._once((dim, atoms, window), x, lambda: self._laid_out(x, dim, atoms, window, 0))

    def _laid_out(self, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
        def sent() -> tuple[Any, ...]:
            self.permutes(x, dim, atoms, window.messages(x.shape[dim]))
            return received(x, dim, atoms, self.mesh, window)

        return laid_out(x, self._once(("received", dim, atoms, window), x, sent), dim, atoms, window, fill)

    def give_back(self, x: Any, dim: int, atoms: Atoms, window: Window, size: int) -> Any:
        """This device's part of ``size`` elements: the sums of what all windows hold (``comm.halo.add_windows``)."""
        part = jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)
        self.permutes(part, dim, atoms, window.messages(size))
        return add_windows(x, dim, atoms, self.mesh, window, size)

    def _once(self, what: Any, x: Any, made: Callable[[], Any]) -> Any:
        """What ``made`` makes of ``x``, or what another equation of this block has made of it in the same way."""
        if self.fetched is None:
            return made()
        key = (id(x), what)
        if key not in self.fetched:
            got = made()
            if not all(traced_together(x, y) for y in jax.tree.leaves(got)):
                return got
            self.fetched[key] = (x, got)  # with x, so that no other array gets its id
        return self.fetched[key][1]

    def route(self, x: Any, dim: int, atoms: Atoms, route: Route, room: int) -> Any:
        """``room`` elements along ``dim``: the chunks that come to this device."""
        self.permutes(x, dim, atoms, route.messages)
        return carry(x, dim, atoms, self.mesh, route, room)

    def permutes(self, x: Any, dim: int, atoms: Atoms, messages: Iterable[int]) -> None:
        """Notes one CollectivePermute of so many elements along ``dim`` each."""
        if self.note is not None and x.size:
            each = x.size // x.shape[dim] * x.dtype.itemsize
            for length in messages:
                self.note(PERMUTE, atoms, length * each, x)

    def window(self, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
        """This device's window of a split dimension, with ``fill`` outside the array and between dilated elements."""
        if window.within and window.dilation == 1:
            return self.fetch(x, dim, atoms, window)
        if not is_number(fill):
            return self._window(x, dim, atoms, window, fill)
        # -0.0 and 0.0 are equal, and not the same
        return self._once((dim, atoms, window, repr(fill)), x, lambda: self._window(x, dim, atoms, window, fill))

    def _window(self, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
        if window.filled_outside(x.shape[dim]):
            return self._laid_out(x, dim, atoms, window, fill)
        got = self.fetch(x, dim, atoms, window)
        position = window.position(lax.axis_index(atoms))
        at = position + jnp.arange(window.extent, dtype=jnp.int32)
        inside = (at >= 0) & (at < (window.n - 1) * window.dilation + 1)
        if window.dilation > 1:
            index = jnp.clip(at, 0) // window.dilation - window.start(lax.axis_index(atoms))
            got = taken(got, index, dim)
            inside &= at % window.dilation == 0
        return jnp.where(along(inside, dim, x.ndim), got, jnp.asarray(fill, x.dtype))

    @in_context(NO_CONTEXT)
    def all_gather(self, x: Any, dim: int, atoms: Atoms) -> Any:
        """Every part of ``x`` along ``dim``, laid side by side."""
        if self.note is not None and x.size:
            self.note("all_gather", atoms, x.size * x.dtype.itemsize * (self.mesh.count(atoms) - 1), x)
        return (
            all_gather(x, atoms, dim)
            if x.size
            else jnp.zeros((*x.shape[:dim], x.shape[dim] * self.mesh.count(atoms), *x.shape[dim + 1 :]), x.dtype)
        )

    def masked(self, x: Any, i: int, dims: Container[int] | None = None) -> Any:
        """Operand ``i``, its padding along split reduce factors filled with what their monoid does not notice.

        Args:
            x: this device's part.
            i: which operand.
            dims: only along these dimensions.
        """
        for d, factors in enumerate(self.rule.operands[i]):
            for f in factors:
                factor, atoms = self.rule.factors[f], self.atoms(f)
                if factor.kind == REDUCE and factor.size % self.mesh.count(atoms) and (dims is None or d in dims):
                    x = mask(x, d, factor.size, atoms, identity(factor.monoid or "add", x.dtype))
        return x

    def is_first(self, atoms: Atoms) -> Any:
        """Whether this device holds the first part over these atoms: the one that counts what counts once."""
        return lax.axis_index(atoms) == 0

    def passing(self, monoid: str) -> Atoms:
        """The atoms over which operands come as parts, to be combined by this monoid after the equation."""
        ways = enumerate(self.rule.linear)
        return tuple(a for k, (name, _) in ways if name == monoid for a in self.split.get(-1 - k, ()))

    def reduced_atoms(self) -> Atoms:
        """All atoms over which reduce factors are split."""
        return tuple(a for f, factor in enumerate(self.rule.factors) if factor.kind == REDUCE for a in self.atoms(f))


def mask(x: Any, dim: int, valid: int, atoms: Atoms, fill: Any) -> Any:
    """Fills the padding of a part: elements of ``dim`` whose global index is ``valid`` or more become ``fill``."""
    local = x.shape[dim]
    index = lax.axis_index(atoms) * local + lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < valid, x, jnp.asarray(fill, x.dtype))


def along(flags: Any, dim: int, ndim: int) -> Any:
    """A vector as an array of ``ndim`` dimensions, along ``dim``."""
    return flags.reshape([-1 if d == dim else 1 for d in range(ndim)])


def rest_bytes(
    shape: tuple[int, ...], dtype: Any, axis: int, dims: Sequence[tuple[int, ...]], split: Split, mesh: Mesh
) -> int:
    """Bytes of one device's part of an array for each element along ``axis``."""
    sizes = [-(-n // mesh.count(a)) for n, a in zip(shape, place(tuple(dims), split), strict=True)]
    return math.prod(n for d, n in enumerate(sizes) if d != axis) * itemsize(dtype)
