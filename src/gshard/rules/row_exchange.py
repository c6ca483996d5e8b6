"""Rows that move to places of their own (``gshard.put_rows`` and ``gshard.take_rows``): primitives, rule and exchange.

A ragged all-to-all sends each row to the device that holds its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.comm.shards import Shards, along
from gshard.comm.steps import sent_bytes
from gshard.core.jax_adapter_context import in_context
from gshard.core.program import NO_CONTEXT
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.xla_workarounds import ragged_all_to_all
from gshard.language.registry import Call, rule

# Sends rows to the devices that hold their places, by a ragged all-to-all.


class RowRoutes(NamedTuple):
    """Routes of one device's rows. Each of ``P`` devices has ``n`` rows and ``m`` places, and can receive ``room``."""

    order: Any  # int32 [n], the rows sorted by the device that holds their place; rows without a place come last
    starts: Any  # starts, sizes: int32 [P], the chunk of ``order`` that each device receives
    sizes: Any
    targets: Any  # int32 [P], where the chunk begins among the rows that the device receives
    received_starts: Any  # received_starts, received_sizes: int32 [P], the chunk that comes from each device
    received_sizes: Any
    sources: Any  # int32 [P], where this chunk begins in the ``order`` of its sender
    arrival_of_place: Any  # int32 [m], the arrival that belongs to each place; ``room`` if none does
    place_of_arrival: Any  # int32 [room], the place of each arrival; ``m`` if there is none

    @in_context(NO_CONTEXT)
    def there(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The rows that this device receives, in the order of their arrival."""
        room = jnp.zeros((*self.place_of_arrival.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, room, self.starts, self.sizes, self.targets, self.received_sizes, axes)

    @in_context(NO_CONTEXT)
    def back(self, x: Any, axes: tuple[str, ...]) -> Any:
        """This device's rows sorted by ``order``, from the arrivals ``x`` of all devices."""
        home = jnp.zeros((*self.order.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, home, self.received_starts, self.received_sizes, self.sources, self.sizes, axes)


@in_context(NO_CONTEXT)
def routes_of(places: Any, sizes: Any, index: Any, held: int, room: int, axes: tuple[str, ...]) -> RowRoutes:
    """The routes of the rows of one device."""
    owner = owners(places, held, sizes.shape[0])
    starts = jnp.cumsum(sizes, axis=1) - sizes
    targets = jnp.cumsum(sizes, axis=0) - sizes
    sizes = jnp.clip(room - targets, 0, sizes)

    def of_sender(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)

    def of_receiver(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

    order = jnp.argsort(owner, stable=True).astype(jnp.int32)
    local = places - owner * held
    sent = of_sender(starts), of_sender(sizes), of_sender(targets)
    received = of_receiver(targets), of_receiver(sizes), of_receiver(starts)
    arrived = jnp.full((room,), held, jnp.int32)
    place_of_arrival = ragged_all_to_all(local[order], arrived, *sent, received[1], axes)
    arrival = jnp.full((held,), room, jnp.int32)
    arrival = arrival.at[place_of_arrival].set(jnp.arange(room, dtype=jnp.int32), mode="drop")
    return RowRoutes(order, *sent, *received, arrival, place_of_arrival)


def owners(places: Any, held: int, parts: int) -> Any:
    """The number of the device that holds each place; ``parts`` for a row without a place."""
    return jnp.where(places < 0, parts, places // held)


def inverse(order: Any) -> Any:
    """The position of each element in ``order``, a permutation."""
    return jnp.zeros_like(order).at[order].set(lax.iota(order.dtype, order.size), unique_indices=True)


# The primitives of ``gshard.put_rows`` and ``gshard.take_rows``: rows move to places that no two of them share.

put_rows_p = Primitive("gshard_put_rows")
take_rows_p = Primitive("gshard_take_rows")


def put(x: Any, rows: Any, size: int) -> Any:
    """Computes ``put`` of whole arrays."""
    if rows.ndim > 2:
        return jax.vmap(functools.partial(put, size=size))(x, rows)
    places, choices = rows.size, rows.shape[1]
    if not x.size or not size:
        return jnp.zeros((size, *x.shape[2:]), x.dtype)
    # Numbers are written to a table, and rows are read through it, as in ``moe.dispatch``.
    table = jnp.full((size,), places, jnp.int32)
    table = table.at[rows.reshape(-1)].set(
        jnp.arange(places, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
    )
    each = choices if x.shape[1] == 1 else 1
    # A place without a row holds ``places``, which is beyond the rows.
    return read(x.reshape(-1, *x.shape[2:]), table // each if each > 1 else table)


def take(x: Any, rows: Any) -> Any:
    """Computes ``take`` of whole arrays."""
    if rows.ndim > 2:
        return jax.vmap(take)(x, rows)
    if not x.size or not rows.size:
        return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
    return read(x, rows)


def read(x: Any, rows: Any) -> Any:
    """The rows with these numbers; zeros for numbers out of range."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _define(primitive: Primitive, meaning: Callable[..., Any], *params: str) -> None:
    """Registers the function that a primitive computes, and the names of its parameters."""
    primitive.def_impl(jax.jit(meaning, static_argnames=params))
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=False))
    ad.defjvp(primitive, lambda tangent, x, rows, **params: primitive.bind(tangent, rows, **params), None)
    batching.primitive_batchers[primitive] = functools.partial(_mapped, primitive)


@put_rows_p.def_abstract_eval
def _type_of_put(x: Any, rows: Any, *, size: int) -> Any:
    return jax.core.ShapedArray((*rows.shape[:-2], size, *x.shape[rows.ndim :]), x.dtype)


@take_rows_p.def_abstract_eval
def _type_of_take(x: Any, rows: Any) -> Any:
    return jax.core.ShapedArray((*rows.shape, *x.shape[rows.ndim - 1 :]), x.dtype)


def _put_transposed(cotangent: Any, x: Any, rows: Any, *, size: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    read_back = take_rows_p.bind(cotangent, rows)
    copies = rows.ndim - 1
    if x.aval.shape[copies] != rows.shape[copies]:
        read_back = jnp.sum(read_back, axis=copies, keepdims=True)
    return [read_back, None]


def _take_transposed(cotangent: Any, x: Any, rows: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None]
    return [put_rows_p.bind(cotangent, rows, size=x.aval.shape[rows.ndim - 2]), None]


def _mapped(primitive: Primitive, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    """Mapped numbers have one more batch dimension; a mapped ``x`` alone has wider rows."""
    x, rows = operands
    if dims[1] is None:
        assert dims[0] is not None
        result = primitive.bind(jnp.moveaxis(x, dims[0], -1), rows, **params)
        return result, result.ndim - 1
    rows = jnp.moveaxis(rows, dims[1], 0)
    x = jnp.broadcast_to(x, (len(rows), *x.shape)) if dims[0] is None else jnp.moveaxis(x, dims[0], 0)
    return primitive.bind(x, rows, **params), 0


_define(put_rows_p, put, "size")
_define(take_rows_p, take)
ad.primitive_transposes[put_rows_p] = _put_transposed
ad.primitive_transposes[take_rows_p] = _take_transposed


@rule("gshard_put_rows")
def put_rows(call: Call) -> Rule:
    """Tokens and places are one factor.

    >>> print(put_rows(Call("", {"size": 9}, ((6, 1, 4), (6, 2)), ((9, 4),), ("f4", "i4"))))
    a b c, a d -> a c; communicate a; replicate b d
    """
    make = RuleMaker()
    rows = _Rows(make, call, places=call.params["size"])
    each, *row_shape = call.in_shapes[0][len(rows.batch) + 1 :]
    row = make.parallel(row_shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        if not rows.exchanges(shards):
            return [put(x, numbers, shards.out_shape()[len(rows.batch)])]
        routes = rows.routes(shards, numbers)
        sent = x.reshape(-1, *x.shape[numbers.ndim :])
        sent = jnp.take(sent, routes.order // rows.choices if each == 1 else routes.order, axis=0)
        arrived = rows.moved(shards, routes.there, sent)
        return [read(arrived, routes.arrival_of_place).reshape(shards.out_shape())]

    return make.rule(
        [[*rows.batch, rows.factor, make.replicate(each), *row], rows.numbers], [[*rows.batch, rows.factor, *row]],
        local=local, flops=math.prod(call.out_shapes[0]), linear=moves(0),
    )  # fmt: skip


@rule("gshard_take_rows")
def take_rows(call: Call) -> Rule:
    """Tokens and places are one factor. Rows may be read by several devices, so the choices of a token are parallel.

    >>> print(take_rows(Call("", {}, ((9, 4), (6, 2)), ((6, 2, 4),), ("f4", "i4"))))
    a b, a c -> a c b; communicate a
    """
    make = RuleMaker()
    batches = len(call.in_shapes[1]) - 2
    rows = _Rows(make, call, places=call.in_shapes[0][batches], reads=True)
    row_shape = call.in_shapes[0][batches + 1 :]
    row = make.parallel(row_shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        if not rows.exchanges(shards):
            return [take(x, numbers)]
        routes = rows.routes(shards, numbers)
        held = x.reshape(-1, *x.shape[batches + 1 :])
        result = rows.moved(shards, routes.back, jnp.take(held, routes.place_of_arrival, axis=0, mode="clip"))
        result = jnp.take(result, inverse(routes.order), axis=0)
        has_row = along(rows.in_range(shards, numbers).reshape(-1), 0, result.ndim)
        result = jnp.where(has_row, result, jnp.zeros((), result.dtype))
        return [result.reshape(*numbers.shape, *held.shape[1:])]

    return make.rule(
        [[*rows.batch, rows.factor, *row], rows.numbers], [[*rows.numbers, *row]], local=local,
        flops=math.prod(call.out_shapes[0]), linear=moves(0),
    )  # fmt: skip


class _Rows:
    """The factors of tokens and their places."""

    def __init__(self, make: RuleMaker, call: Call, places: int, *, reads: bool = False) -> None:
        self._call, self._places = call, places
        *batches, self._tokens, self.choices = call.in_shapes[1]  # how many places each token has
        on_keys = jax.dtypes.issubdtype(call.in_dtypes[0], jax.dtypes.prng_key)
        size = max(self._tokens, places)
        is_whole = on_keys or 0 in call.in_shapes[1] or not places
        self.batch = make.parallel(batches)  # the dimensions of the batches, each with places of its own
        # the dimension of tokens and of places
        self.factor = make.replicate(size) if is_whole else make.communicate(size)
        copies = make.factor(self.choices) if reads else make.replicate(self.choices)
        self.numbers = [*self.batch, self.factor, copies]  # the dimensions of the numbers of places

    def exchanges(self, shards: Shards) -> bool:
        """Whether devices exchange rows."""
        return bool(shards.atoms(self.factor[0])) and 0 not in shards.equation.outputs[0].shape

    def in_range(self, shards: Shards, numbers: Any) -> Any:
        """Which of this device's numbers are those of places. Padding is not."""
        found = (numbers >= 0) & (numbers < self._places)
        for d, ((factor,), size) in enumerate(zip(self.numbers, self._call.in_shapes[1], strict=True)):
            if atoms := shards.atoms(factor):
                count = numbers.shape[d]
                index = jax.lax.axis_index(atoms) * count + jnp.arange(count, dtype=jnp.int32)
                found &= along(index < size, d, numbers.ndim)
        return found

    def routes(self, shards: Shards, numbers: Any) -> RowRoutes:
        """The routes of this device's rows; equations with the same numbers share them."""
        atoms = shards.atoms(self.factor[0])
        parts = shards.mesh.count(atoms)

        def compute() -> RowRoutes:
            batches = math.prod(numbers.shape[:-2])
            held, room = batches * -(-self._places // parts), batches * self._room(parts)
            places = jnp.where(self.in_range(shards, numbers), numbers, -1).astype(jnp.int32)
            places = _joined(places.reshape(batches, -1), held).reshape(-1)
            own_sizes = jnp.sum(
                owners(places, held, parts)[:, None] == jnp.arange(parts, dtype=jnp.int32), axis=0, dtype=jnp.int32
            )
            sizes = shards.all_gather(own_sizes[None], 0, atoms)
            self._noted(shards, min(places.size, room), places)
            index = jax.lax.axis_index(atoms)
            return routes_of(places, sizes, index, held, room, atoms)

        return shards.once(("row routes", atoms, self._places), numbers, compute)

    def moved(self, shards: Shards, move: Any, x: Any) -> Any:
        """The rows after an exchange, with its note."""
        atoms = shards.atoms(self.factor[0])
        result = move(x, atoms)
        self._noted(shards, min(x.size, result.size), x)
        return result

    def _noted(self, shards: Shards, elements: int, x: Any) -> None:
        if shards.note is not None and elements:
            atoms = shards.atoms(self.factor[0])
            sent = sent_bytes("all_to_all", elements * x.dtype.itemsize, shards.mesh.count(atoms))
            shards.note("all_to_all", atoms, sent, x)

    def _room(self, parts: int) -> int:
        """How many rows of a batch a device receives at most."""
        return min(-(-self._places // parts), -(-self._tokens // parts) * parts * self.choices)


def _joined(places: Any, held: int) -> Any:
    """Numbers of places in batches as numbers in one array, in which a device has its places of all batches together.

    >>> _joined(jnp.array([[0, 1, 2, 3], [3, 2, -1, 0]]), 4).tolist()
    [[0, 1, 4, 5], [7, 6, -1, 2]]
    """
    batches = len(places)
    of_batch = held // batches
    first = jnp.arange(batches, dtype=places.dtype)[:, None] * of_batch
    return jnp.where(places < 0, places, places // of_batch * held + first + places % of_batch)
