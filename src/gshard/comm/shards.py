"""Describes one device's shard of an equation, and provides the communication of ``Rule.local``.

def local(shards, x):                       # inside shard_map, x is this device's part
    return shards.bind(x, shape=shards.out_shape())
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from gshard.comm.halo import Window, add_windows, is_number, laid_out, received
from gshard.comm.route import Route, carry
from gshard.comm.steps import ALL_REDUCE, PERMUTE, all_reduce, collectives_of, sent_bytes
from gshard.comm.steps import identity as identity
from gshard.core.jax_adapter import bind, traced_together
from gshard.core.jax_adapter_context import in_context
from gshard.core.jax_adapter_retracing import computation_here
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import NO_CONTEXT, Equation
from gshard.core.rule import COMMUNICATE, REDUCE, Rule, Split, place
from gshard.core.xla_workarounds import all_gather, taken

Fetched = dict[tuple[int, Any], tuple[Any, Any]]


class Note(Protocol):
    """Records a collective that an equation runs."""

    def __call__(self, kind: str, atoms: Atoms, sent: int, x: Any, times: int = 1) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """One equation, its split and the mesh, on one device.

    Attributes:
        equation: the equation.
        split: the atoms of its factors.
        mesh: the mesh.
        note: called for every collective with its kind, its atoms, the bytes that each device sends, the local operand,
            and how many times it runs, if more than once.
        unread: the numbers of results that nothing reads.
        fetched: the windows that equations of this block have already fetched.
    """

    equation: Equation
    split: Split
    mesh: Mesh
    note: Note | None = None
    unread: frozenset[int] = frozenset()
    fetched: Fetched | None = None

    @property
    def rule(self) -> Rule:
        """The rule of the equation."""
        assert self.equation.rule is not None
        return self.equation.rule

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation, with global shapes."""
        return self.equation.params

    def bind(self, *arrays: Any, **changes: Any) -> list[Any]:
        """Runs the primitive of the equation on local arrays, with some changed parameters."""
        params = {name: computation_here(value) for name, value in (self.params | changes).items()}
        return bind(self.equation.primitive, params, arrays)

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
        """The size of a factor on one device, including padding."""
        return -(-self.rule.factors[factor].size // self.mesh.count(self.atoms(factor)))

    def offset(self, dim: tuple[int, ...]) -> Any:
        """The global index of the first element of this device's part of a dimension (an ``int32`` scalar or 0)."""
        atoms = tuple(a for f in dim for a in self.atoms(f))
        if not atoms:
            return 0
        size = math.prod(self.size(f) for f in dim)
        return lax.axis_index(atoms) * size

    def fetch(self, x: Any, dim: int, atoms: Atoms, window: Window) -> Any:
        """The elements of this device's window. Elements outside of the array are undefined."""
        return self.once((dim, atoms, window), x, lambda: self._laid_out(x, dim, atoms, window, 0))

    def _laid_out(self, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
        def sent() -> tuple[Any, ...]:
            self.permutes(x, dim, atoms, window.messages(x.shape[dim]))
            return received(x, dim, atoms, self.mesh, window)

        return laid_out(x, self.once(("received", dim, atoms, window), x, sent), dim, atoms, window, fill)

    def give_back(self, x: Any, dim: int, atoms: Atoms, window: Window, size: int) -> Any:
        """This device's part, of ``size`` elements, of the sums over all windows (``comm.halo.add_windows``)."""
        part = jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)
        self.permutes(part, dim, atoms, window.messages(size))
        return add_windows(x, dim, atoms, self.mesh, window, size)

    def once(self, name: Any, x: Any, compute: Callable[[], Any]) -> Any:
        """The result of ``compute`` on ``x``, or the equal result of another equation of this block.

        Args:
            name: identifies the computation.
            x: its operand.
            compute: the computation.
        """
        if self.fetched is None:
            return compute()
        key = (id(x), name)
        if key not in self.fetched:
            result = compute()
            if not all(traced_together(x, y) for y in jax.tree.leaves(result)):
                return result
            self.fetched[key] = (x, result)  # keeps x alive, so that its id stays unique
        return self.fetched[key][1]

    def route(self, x: Any, dim: int, atoms: Atoms, route: Route, room: int) -> Any:
        """The chunks of a route for this device: ``room`` elements along ``dim``."""
        self.permutes(x, dim, atoms, route.messages)
        return carry(x, dim, atoms, self.mesh, route, room)

    def permutes(self, x: Any, dim: int, atoms: Atoms, messages: Iterable[int]) -> None:
        """Notes a CollectivePermute for each message, of a number of elements along ``dim``."""
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
        # The key contains repr(fill), because -0.0 == 0.0.
        return self.once((dim, atoms, window, repr(fill)), x, lambda: self._window(x, dim, atoms, window, fill))

    def _window(self, x: Any, dim: int, atoms: Atoms, window: Window, fill: Any) -> Any:
        if window.filled_outside(x.shape[dim]):
            return self._laid_out(x, dim, atoms, window, fill)
        elements = self.fetch(x, dim, atoms, window)
        part = lax.axis_index(atoms)
        if window.dilation > 1:
            positions = window.position(part) + jnp.arange(window.extent, dtype=jnp.int32)
            elements = taken(elements, jnp.clip(positions, 0) // window.dilation - window.start(part), dim)
        has_element = along(window.has_element(part), dim, x.ndim)
        return jnp.where(has_element, elements, jnp.asarray(fill, x.dtype))

    @in_context(NO_CONTEXT)
    def all_gather(self, x: Any, dim: int, atoms: Atoms) -> Any:
        """The concatenation of all parts of ``x`` along ``dim``."""
        count = self.mesh.count(atoms)
        if not x.size:
            return jnp.zeros((*x.shape[:dim], x.shape[dim] * count, *x.shape[dim + 1 :]), x.dtype)
        if self.note is not None:
            self.note("all_gather", atoms, x.size * x.dtype.itemsize * (count - 1), x)
        return all_gather(x, atoms, dim)

    @in_context(NO_CONTEXT)
    def all_reduce(self, x: Any, atoms: Atoms, monoid: str) -> Any:
        """The parts of ``x`` on all devices along some atoms, combined by a monoid (``comm.steps.all_reduce``)."""
        if not x.size:
            return x
        if self.note is not None:
            sent = sent_bytes(ALL_REDUCE, x.size * x.dtype.itemsize, self.mesh.count(atoms))
            self.note(ALL_REDUCE, atoms, sent, x)
        return all_reduce(x, atoms, monoid)

    def run_program(self, function: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
        """Runs a per-device function that communicates by itself, and notes its collectives."""
        program = jax.make_jaxpr(function)(*arrays)
        if self.note is not None:
            for kind, atoms, sent, operand in collectives_of(program, self.mesh.atom_sizes):
                self.note(kind, atoms, sent, operand)
        return list(jaxpr_as_fun(program)(*arrays))

    def masked(self, x: Any, i: int, dims: Container[int] | None = None) -> Any:
        """Operand ``i`` with its padding along split reduce factors filled with the identity of the monoid.

        Args:
            x: this device's part.
            i: the number of the operand.
            dims: the dimensions to fill; None for all.
        """
        for d, factors in enumerate(self.rule.operands[i]):
            for f in factors:
                factor, atoms = self.rule.factors[f], self.atoms(f)
                if factor.kind == REDUCE and factor.size % self.mesh.count(atoms) and (dims is None or d in dims):
                    x = mask(x, d, factor.size, atoms, identity(factor.monoid or "add", x.dtype))
        return x

    def filled(self, x: Any, i: int) -> Any:
        """Operand ``i`` with zeros in place of all padding."""
        for d, (factors, n) in enumerate(zip(self.rule.operands[i], self.equation.inputs[i].shape, strict=True)):
            atoms = tuple(a for f in factors for a in self.atoms(f))
            if n % self.mesh.count(atoms):
                x = mask(x, d, n, atoms, 0)
        return x

    def is_first(self, atoms: Atoms) -> Any:
        """Whether this device holds the first part over these atoms. It adds values that must be added once."""
        return lax.axis_index(atoms) == 0

    def passing(self, monoid: str) -> Atoms:
        """The atoms over which operands are unreduced and pass the equation, for this monoid."""
        ways = enumerate(self.rule.linear)
        return tuple(a for k, (name, _) in ways if name == monoid for a in self.split.get(-1 - k, ()))

    def reduced_atoms(self) -> Atoms:
        """All atoms over which reduce factors are split."""
        return tuple(a for f, factor in enumerate(self.rule.factors) if factor.kind == REDUCE for a in self.atoms(f))


def sent_inside(e: Equation, split: Split, mesh: Mesh) -> int:
    """The bytes that each device sends while an equation runs with a split."""
    rule = e.operator_rule
    if rule.sends is not None:
        return rule.sends(mesh, split)
    is_manual = rule.manual is not None and rule.manual.step == "inside"
    communicates = any(f >= 0 and atoms and rule.factors[f].kind == COMMUNICATE for f, atoms in split.items())
    if rule.local is None or not (communicates or is_manual):
        return 0
    total = 0

    def note(kind: str, atoms: Atoms, sent: int, x: Any, times: int = 1) -> None:
        nonlocal total
        total += sent * times

    shards = Shards(e, split, mesh, note)
    parts = [jax.ShapeDtypeStruct(shards.in_shape(i), v.dtype) for i, v in enumerate(e.inputs)]
    whole = jax.sharding.PartitionSpec()
    jax.eval_shape(
        jax.shard_map(
            functools.partial(rule.local, shards), mesh=mesh.abstract_jax_mesh, in_specs=whole, out_specs=whole,
            check_vma=False,
        ),
        *parts,
    )  # fmt: skip
    return total


def mask(x: Any, dim: int, valid: int, atoms: Atoms, fill: Any) -> Any:
    """Fills the padding of a part: elements of ``dim`` with global index ``valid`` or more become ``fill``."""
    local = x.shape[dim]
    index = lax.axis_index(atoms) * local + lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < valid, x, jnp.asarray(fill, x.dtype))


def along(flags: Any, dim: int, ndim: int) -> Any:
    """Reshapes a vector to an array of ``ndim`` dimensions, along ``dim``."""
    return flags.reshape([-1 if d == dim else 1 for d in range(ndim)])
