"""Moves parts of arrays around a ring of devices, while each device computes with the parts that it holds.

A collective matmul is such a rotation: it computes a contraction part by part while they move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.route import Chunk, pairs, routed
from gshard.comm.shards import Shards
from gshard.comm.steps import PERMUTE
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms
from gshard.core.plan import Ring
from gshard.core.program import NO_CONTEXT
from gshard.core.xla_workarounds import opaque_for_slice, ppermute

Use = Callable[[Any, list[Any], Any], tuple[Any, list[Any]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """A ring of the devices along some atoms."""

    shards: Shards  # the equation that rotates its operands
    atoms: Atoms  # the atoms of the ring
    order: tuple[int, ...] = ()  # the order of the devices around the ring; () for the order of their numbers

    @property
    def parts(self) -> int:
        """The number of devices on the ring."""
        return self.shards.mesh.count(self.atoms)

    def behind(self, steps: Any) -> Any:
        """The device that is some steps behind this one; before this one if the number is negative."""
        return lax.rem(lax.axis_index(self.atoms) - steps + self.parts, self.parts)

    def run(
        self, moving: Sequence[Any], state: Any, steps: int, use: Use, *, sign: int = 1, sums: bool = False
    ) -> tuple[Any, list[Any]]:
        """Uses the parts of the next devices on the ring, one after the other."""
        if not steps:
            return state, []
        first = 1
        adding: list[Any] = []
        arrived = self.moved(moving, sign, steps)
        if sums and steps > 1:  # before the loop, whose sums need values to begin with
            onward = self.moved(arrived, sign, 0)
            state, adding = use(state, arrived, sign)
            arrived, first = onward, 2
            self.note(adding, steps - 1)

        def step(carry: Any, j: Any) -> tuple[Any, None]:
            state, arrived, adding = carry
            onward, older = self.moved(arrived, sign, 0), self.moved(adding, sign, 0)
            state, more = use(state, arrived, sign * j)
            return (state, onward, [x + y for x, y in zip(older, more, strict=True)]), None

        if steps > first:
            carry = state, arrived, adding
            (state, arrived, adding), _ = lax.scan(step, carry, jnp.arange(first, steps, dtype=jnp.int32))
        older = self.moved(adding, sign, 0)
        state, more = use(state, arrived, sign * steps)
        returned = [x + y for x, y in zip(older, more, strict=True)] if older else more
        return state, self.moved(returned, -sign * steps, 1)

    def zigzag(self, x: Any, dim: int, *, back: bool = False) -> Any:
        """Two halves of parts for each device: half ``d`` and half ``2 * parts - 1 - d`` for device ``d``, joined.

        Before, or after the way ``back``, device ``d`` has the halves ``2 * d`` and ``2 * d + 1``. Where work grows
        with the position (causal attention), all devices then have equally much.
        """
        parts, half = self.parts, x.shape[dim] // 2
        ends = [((h // 2, h % 2 * half), (min(h, 2 * parts - 1 - h), h // parts * half)) for h in range(2 * parts)]
        chunks = (Chunk(*there, *here, half) if back else Chunk(*here, *there, half) for here, there in ends)
        return self.shards.route(x, dim, self.atoms, routed(tuple(chunks)), 2 * half)

    def moved(self, arrays: Sequence[Any], shift: int, times: int) -> list[Any]:
        """Each array of the device ``shift`` places behind. ``times`` permutes are noted."""
        n, order = self.parts, self.order or range(self.parts)
        self.note(arrays, times)
        return [self._permuted(x, [(order[a], order[(a + shift) % n]) for a in range(n)]) for x in arrays]

    @in_context(NO_CONTEXT)
    def _permuted(self, x: Any, moves: list[tuple[int, int]]) -> Any:
        mesh = self.shards.mesh
        return ppermute(x, mesh.atoms, pairs(moves, self.atoms, mesh))

    def note(self, arrays: Sequence[Any], times: int) -> None:
        """Notes that each array is sent ``times`` times."""
        if self.shards.note is not None and times:
            for x in arrays:
                self.shards.note(PERMUTE, self.atoms, x.size * x.dtype.itemsize, x, times)


# Runs a collective matmul: computes a contraction part by part while the network moves other parts.


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    """A slice of every part that rotates together: ``size`` elements from ``low`` on.

    With ``sign`` 1 a device receives the part of the next device, with -1 the part of the previous one. Lanes of
    ``turn`` 1 are computed while the network moves the sums of turn 0, and the reverse.
    """

    sign: int
    low: int
    size: int
    turn: int


def collective_matmul(ring: Ring, shards: Shards, arrays: Sequence[Any]) -> Any:
    """Computes a contraction part by part, inside ``shard_map``."""
    return _Steps(ring, shards, Rotation(shards, ring.atoms, ring.order)).run(arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    ring: Ring
    shards: Shards
    rotation: Rotation

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.rotation.parts

    @property
    def part(self) -> int:
        """The number of elements of one part along the factor."""
        mesh, f = self.shards.mesh, self.ring.factor
        return -(-self.shards.rule.factors[f].size // (mesh.count(self.shards.atoms(f)) * self.parts))

    @property
    def lanes(self) -> tuple[_Lane, ...]:
        """The lanes of every part: one for each direction and, if sums rotate, for each turn."""
        turns = range(1 + (self.ring.operand is None))
        kinds = [(turn, sign) for turn in turns for sign in (1, -1)[: 1 + self.ring.both_ways]]
        size = -(-self.part // len(kinds))
        return tuple(
            _Lane(sign, low, min(size, self.part - low), turn)
            for low, (turn, sign) in zip(range(0, self.part, size), kinds, strict=False)
        )

    @property
    def dim_of_factor(self) -> int | None:
        """The dimension of the factor in the result; None if the factor is summed over."""
        return self._dim(self.shards.rule.results[0])

    def _dim(self, dims: Sequence[tuple[int, ...]]) -> int | None:
        return next((d for d, factors in enumerate(dims) if factors == (self.ring.factor,)), None)

    def run(self, arrays: Sequence[Any]) -> Any:
        """Runs all steps."""
        staying = [x if i == self.ring.operand else self._padded(x, i) for i, x in enumerate(arrays)]
        return self._with_sums(staying) if self.ring.operand is None else self._with_operand(staying, self.ring.operand)

    def _with_operand(self, staying: list[Any], i: int) -> Any:
        """Runs each step while the network moves the parts of operand ``i`` that it uses."""

        def step(state: Any, t: Any) -> tuple[Any, None]:
            parts, result = state
            onward = [self._onward(part, lane) for part, lane in zip(parts, self.lanes, strict=True)]
            return (onward, self._written(result, staying, parts, t)), None

        parts, d = [self._start(staying[i], i, lane) for lane in self.lanes], self.dim_of_factor
        parts, result = self._all_but_last(step, (parts, self._empty(staying, parts)))
        result = self._written(result, staying, parts, self.parts - 1)
        return result.astype(self._dtype) if d is None else _slice_of(result, 0, self.shards.out_shape()[d], d)

    def _with_sums(self, staying: list[Any]) -> Any:
        """Runs step t of turn 1 while the sums of turn 0 move, then step t + 1 of turn 0 while those of turn 1 move."""
        lanes = self.lanes

        def added(x: Any, lane: _Lane, turn: int, t: Any) -> Any:
            return x + self._step(staying, None, lane, t)[0].astype(self._dtype) if lane.turn == turn else x

        def step(sums: Any, t: Any) -> tuple[Any, None]:
            sent = [self._onward(added(x, lane, 1, t), lane) for x, lane in zip(sums, lanes, strict=True)]
            return [added(x, lane, 0, t + 1) for x, lane in zip(sent, lanes, strict=True)], None

        sums = self._all_but_last(step, [self._first(staying, lane) for lane in lanes])
        assert self.dim_of_factor is not None
        whole = [added(x, lane, 1, self.parts - 1) for x, lane in zip(sums, lanes, strict=True)]
        return lax.concatenate(whole, self.dim_of_factor)

    def _all_but_last(self, step: Callable[[Any, Any], tuple[Any, None]], state: Any) -> Any:
        last = self.parts - 1
        unroll = min(2, last) if self.ring.two_steps else 1
        return lax.scan(step, state, jnp.arange(last, dtype=jnp.int32), unroll=unroll)[0]

    def _padded(self, x: Any, i: int) -> Any:
        """An operand that does not rotate, padded to a full last part."""
        x, d = self.shards.masked(x, i), self._dim(self.shards.rule.operands[i])
        missing = 0 if d is None else self.parts * self.part - x.shape[d]
        return jnp.pad(x, [(0, missing if k == d else 0) for k in range(x.ndim)]) if missing else x

    def _start(self, x: Any, i: int, lane: _Lane) -> Any:
        """The slice of the rotating operand that a device holds in the first step."""
        shards, f = self.shards, self.ring.factor
        finer = dataclasses.replace(shards, split={**shards.split, f: (*shards.atoms(f), *self.ring.atoms)})
        d = self._dim(shards.rule.operands[i])
        assert d is not None
        x = _slice_of(finer.masked(x, i), lane.low, lane.size, d)
        self.rotation.note([x], self.parts - 1)
        return x

    def _onward(self, x: Any, lane: _Lane) -> Any:
        """The part or the sums that the device before this one in the lane has."""
        return self.rotation.moved([x], -lane.sign, 0)[0]

    def _step(self, staying: list[Any], part: Any, lane: _Lane, t: Any) -> tuple[Any, Any]:
        """The product of a lane in step t, and the position of its first element along the factor."""
        ring, rule = self.ring, self.shards.rule
        position = lax.axis_index(ring.atoms)
        if ring.order:
            position = _element_of(sorted(range(self.parts), key=ring.order.__getitem__), position)
        turn = lax.rem(position + lane.sign * (t + (ring.operand is None)) + self.parts, self.parts)
        begin = (_element_of(ring.order, turn) if ring.order else turn) * self.part + lane.low
        operands: list[Any] = []
        for i, x in enumerate(staying):
            d = self._dim(rule.operands[i])
            if i == ring.operand:
                operands.append(part)
            elif d is None:
                operands.append(x)
            else:
                operands.append(lax.dynamic_slice_in_dim(opaque_for_slice(x, d, lane.size), begin, lane.size, axis=d))
        assert rule.part is not None
        return rule.part(self.shards, *operands), begin

    def _first(self, staying: list[Any], lane: _Lane) -> Any:
        """The first sums: the product of the first step, or zeros for lanes of turn 1."""
        if lane.turn:
            product = jax.eval_shape(lambda: self._step(staying, None, lane, 0)[0])
            sums = jnp.zeros(product.shape, self._dtype)
        else:
            sums = self._step(staying, None, lane, 0)[0].astype(self._dtype)
        self.rotation.note([sums], self.parts - 1)
        return sums

    def _empty(self, staying: list[Any], parts: list[Any]) -> Any:
        """The result before the first step: zeros to add to, or uninitialised memory that the steps fill."""
        shape, d = list(self.shards.out_shape()), self.dim_of_factor
        if d is not None:
            shape[d] = self.parts * self.part
            return lax.empty(tuple(shape), self._dtype)
        product = jax.eval_shape(lambda: self._step(staying, parts[0], self.lanes[0], 0)[0])
        return jnp.zeros(shape, product.dtype)

    def _written(self, result: Any, staying: list[Any], parts: list[Any], t: Any) -> Any:
        """The result after the products of step t are added or written."""
        d = self.dim_of_factor
        for part, lane in zip(parts, self.lanes, strict=True):
            product, begin = self._step(staying, part, lane, t)
            if d is None:
                result = result + product
            else:
                result = lax.dynamic_update_slice_in_dim(result, product.astype(self._dtype), begin, axis=d)
        return result

    @property
    def _dtype(self) -> Any:
        return self.shards.equation.outputs[0].dtype


def _element_of(numbers: Sequence[int], i: Any) -> Any:
    return lax.dynamic_index_in_dim(jnp.asarray(numbers, jnp.int32), i, keepdims=False)


def _slice_of(x: Any, begin: int, size: int, dim: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, begin, begin + size, axis=dim)
