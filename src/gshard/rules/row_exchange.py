"""Rows that move to places of their own (``gshard.put_rows`` and ``gshard.take_rows``).

    put     a b c, a d -> a c        tokens and places are one factor a: both are split over the same devices
    take    a c, a d -> a d c       d, the places of one token, is parallel

Each device sends the numbers of places, and the rows, to the devices that hold the places (``comm.ragged_rows``). So it
sends what is routed, where a gather would send all rows to all devices. Equations with the same numbers send them once.
Rows that are sorted by their places are sent as they lie. The dimensions of a row are parallel. So are batches, which
``vmap`` adds: each has places of its own, on all devices of ``a``. A device exchanges the rows of all its batches
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.comm.collectives import sent_bytes
from gshard.comm.ragged_rows import RowRoutes, inverse, owners, routes_of
from gshard.comm.shards import Shards, along
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import Rule, RuleMaker, moves
from gshard.core.split import Split
from gshard.language.registry import Call, rule
from gshard.language.row_primitives import put, read, take


@rule("gshard_put_rows")
def put_rows(call: Call) -> Rule:
    """Tokens and places are one factor.

    >>> print(put_rows(Call("", {"size": 9}, ((6, 1, 4), (6, 2)), ((9, 4),), ("f4", "i4"))))
    a b c, a d -> a c; communicate a; replicate b d
    """
    make = RuleMaker()
    rows = _Rows(make, call, places=call.params["size"])
    each, *row_shape = call.in_shapes[0][len(rows.batch) + 1 :]
    row = rows.row(row_shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        if not rows.exchanges(shards):
            return [put(x, numbers, shards.out_shape()[len(rows.batch)])]
        routes = rows.routes(shards, numbers)
        sent = x.reshape(-1, *x.shape[numbers.ndim :])
        if not rows.are_sorted(shards, numbers):
            sent = jnp.take(sent, routes.order // rows.choices if each == 1 else routes.order, axis=0)
        arrived = rows.moved(shards, routes.there, sent)
        return [read(arrived, routes.arrival_of_place).reshape(shards.out_shape())]

    return make.rule(
        [[*rows.batch, rows.factor, make.replicate(each), *row], rows.numbers], [[*rows.batch, rows.factor, *row]],
        local=local, sends=rows.sends(row_shape, row), flops=math.prod(call.out_shapes[0]), linear=moves(0),
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
    row = rows.row(row_shape)

    def local(shards: Shards, x: Any, numbers: Any) -> list[Any]:
        if not rows.exchanges(shards):
            return [take(x, numbers)]
        routes = rows.routes(shards, numbers)
        held = x.reshape(-1, *x.shape[batches + 1 :])
        result = rows.moved(shards, routes.back, jnp.take(held, routes.place_of_arrival, axis=0, mode="clip"))
        if not rows.are_sorted(shards, numbers):
            result = jnp.take(result, inverse(routes.order), axis=0)
        has_row = along(rows.in_range(shards, numbers).reshape(-1), 0, result.ndim)
        result = jnp.where(has_row, result, jnp.zeros((), result.dtype))
        return [result.reshape(*numbers.shape, *held.shape[1:])]

    return make.rule(
        [[*rows.batch, rows.factor, *row], rows.numbers], [[*rows.numbers, *row]], local=local,
        sends=rows.sends(row_shape, row), flops=math.prod(call.out_shapes[0]), linear=moves(0),
    )  # fmt: skip


class _Rows:
    """The factors of tokens and their places."""

    def __init__(self, make: RuleMaker, call: Call, places: int, *, reads: bool = False) -> None:
        self._make, self._call, self._places = make, call, places
        *self._batches, self._tokens, self.choices = call.in_shapes[1]  # how many places each token has
        on_keys = jax.dtypes.issubdtype(call.in_dtypes[0], jax.dtypes.prng_key)
        size = max(self._tokens, places)
        is_whole = on_keys or 0 in call.in_shapes[1] or not places
        self.batch = make.parallel(self._batches)  # the dimensions of the batches, each with places of its own
        # the dimension of tokens and of places
        self.factor = make.replicate(size) if is_whole else make.communicate(size)
        copies = make.factor(self.choices) if reads else make.replicate(self.choices)
        self.numbers = [*self.batch, self.factor, copies]  # the dimensions of the numbers of places

    def row(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The dimensions of a row."""
        return self._make.parallel(shape)

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

    def are_sorted(self, shards: Shards, numbers: Any) -> bool:
        """Whether this device's numbers increase: they are of one sorted part of one batch."""
        parts, of_all = shards.mesh.count(shards.atoms(self.factor[0])), self._call.params.get("sorted_parts")
        is_one_part = of_all and not parts % of_all and not self._tokens % parts
        return bool(is_one_part) and math.prod(numbers.shape[:-2]) == 1

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
            return routes_of(places, sizes, index, held, room, atoms, is_sorted=is_sorted)

        is_sorted = self.are_sorted(shards, numbers)
        return shards.once(("row routes", atoms, self._places, is_sorted), numbers, compute)

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

    def sends(self, row_shape: Sequence[int], row: Sequence[tuple[int, ...]]) -> Any:
        """The bytes that each device sends; of rows as many as if all devices received the same number."""

        def sent(mesh: Mesh, split: Split) -> int:
            def of_device(shape: Sequence[int], dims: Sequence[tuple[int, ...]]) -> int:
                return math.prod(-(-n // mesh.count(split.get(dim[0], ()))) for n, dim in zip(shape, dims, strict=True))

            parts = mesh.count(split.get(self.factor[0], ()))
            if parts == 1:
                return 0
            rows = min(-(-self._tokens // parts) * of_device([self.choices], self.numbers[-1:]), self._room(parts))
            rows *= of_device(self._batches, self.batch)
            each = rows * 4, rows * of_device(row_shape, row) * itemsize(self._call.in_dtypes[0])
            return sent_bytes("all_gather", 4 * parts, parts) + sum(sent_bytes("all_to_all", n, parts) for n in each)

        return sent


def _joined(places: Any, held: int) -> Any:
    """Numbers of places in batches as numbers in one array, in which a device has its places of all batches together.

    >>> _joined(jnp.array([[0, 1, 2, 3], [3, 2, -1, 0]]), 4).tolist()
    [[0, 1, 4, 5], [7, 6, -1, 2]]
    """
    batches = len(places)
    of_batch = held // batches
    first = jnp.arange(batches, dtype=places.dtype)[:, None] * of_batch
    return jnp.where(places < 0, places, places // of_batch * held + first + places % of_batch)
