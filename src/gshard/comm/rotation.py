"""Moves parts of arrays around a ring of devices, while each device computes with the parts that it holds.

A collective matmul is such a rotation: it computes a contraction part by part while they move.
"""

from __future__ import annotations

import dataclasses
import functools
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
        arrived = self._moved(moving, sign, steps)
        if sums and steps > 1:  # before the loop, whose sums need values to begin with
            onward = self._moved(arrived, sign, 0)
            state, adding = use(state, arrived, sign)
            arrived, first = onward, 2
            self._note(adding, steps - 1)

        def step(carry: Any, j: Any) -> tuple[Any, None]:
            state, arrived, adding = carry
            onward, older = self._moved(arrived, sign, 0), self._moved(adding, sign, 0)
            state, more = use(state, arrived, sign * j)
            return (state, onward, [x + y for x, y in zip(older, more, strict=True)]), None

        if steps > first:
            carry = state, arrived, adding
            (state, arrived, adding), _ = lax.scan(step, carry, jnp.arange(first, steps, dtype=jnp.int32))
        older = self._moved(adding, sign, 0)
        state, more = use(state, arrived, sign * steps)
        returned = [x + y for x, y in zip(older, more, strict=True)] if older else more
        return state, self._moved(returned, -sign * steps, 1)

    def zigzag(self, x: Any, dim: int, *, back: bool = False) -> Any:
        """Two halves of parts for each device: half ``d`` and half ``2 * parts - 1 - d`` for device ``d``, joined.

        Before, or after the way ``back``, device ``d`` has the halves ``2 * d`` and ``2 * d + 1``. Where work grows
        with the position (causal attention), all devices then have equally much.
        """
        parts, half = self.parts, x.shape[dim] // 2
        ends = [((h // 2, h % 2 * half), (min(h, 2 * parts - 1 - h), h // parts * half)) for h in range(2 * parts)]
        chunks = (Chunk(*there, *here, half) if back else Chunk(*here, *there, half) for here, there in ends)
        return self.shards.route(x, dim, self.atoms, routed(tuple(chunks)), 2 * half)

    def _moved(self, arrays: Sequence[Any], shift: int, times: int) -> list[Any]:
        """Each array of the device ``shift`` places behind. ``times`` permutes are noted."""
        n = self.parts
        self._note(arrays, times)
        return [self._permuted(x, [(a, (a + shift) % n) for a in range(n)]) for x in arrays]

    @in_context(NO_CONTEXT)
    def _permuted(self, x: Any, moves: list[tuple[int, int]]) -> Any:
        mesh = self.shards.mesh
        return ppermute(x, mesh.atoms, pairs(moves, self.atoms, mesh))

    def _note(self, arrays: Sequence[Any], times: int) -> None:
        if self.shards.note is not None and times:
            for x in arrays:
                self.shards.note(PERMUTE, self.atoms, x.size * x.dtype.itemsize, x, times)


# Runs a collective matmul: computes a contraction part by part while the network moves other parts.

Note = Callable[[Atoms, Any, int, int | None], None]


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


def collective_matmul(ring: Ring, shards: Shards, arrays: Sequence[Any], note: Note) -> Any:
    """Computes a contraction part by part, inside ``shard_map``."""
    return _Steps(ring, shards, note).run(arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    ring: Ring
    shards: Shards
    note: Note

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.ring.steps(self.shards.mesh)

    @property
    def part(self) -> int:
        """The number of elements of one part along the factor."""
        mesh, f = self.shards.mesh, self.ring.factor
        return -(-self.shards.rule.factors[f].size // (mesh.count(self.shards.atoms(f)) * self.parts))

    @property
    def lanes(self) -> tuple[_Lane, ...]:
        """The lanes of every part: one for each direction and, if sums rotate, for each turn."""
        kinds = [
            (turn, sign) for turn in range(1 + bool(self.ring.result)) for sign in (1, -1)[: 1 + self.ring.both_ways]
        ]
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
        ring, last = self.ring, self.parts - 1
        places = [i for i, _ in ring.operands]
        staying = [None if i in places else self._padded(x, i) for i, x in enumerate(arrays)]
        moving = [[self._start(arrays[i], i, lane) for i in places] for lane in self.lanes]
        if ring.result:
            sums = [self._first(staying, xs, lane) for xs, lane in zip(moving, self.lanes, strict=True)]
            step = functools.partial(self._sums_on, staying)
        else:
            sums = [self._empty(staying, moving)]
            step = functools.partial(self._operands_on, staying)
        unroll = min(2, last) if ring.two_steps else 1
        state, _ = lax.scan(step, (moving, sums), jnp.arange(last, dtype=jnp.int32), unroll=unroll)
        moving, sums = state
        return self._finished(self._last(staying, moving, sums))

    def _operands_on(self, staying: list[Any], state: Any, t: Any) -> tuple[Any, None]:
        """Runs step t, while the network moves the parts of operands that it uses."""
        moving, sums = state
        onward = [self._onward(xs, lane) for xs, lane in zip(moving, self.lanes, strict=True)]
        return (onward, self._written(sums, staying, moving, t)), None

    def _sums_on(self, staying: list[Any], state: Any, t: Any) -> tuple[Any, None]:
        """Runs step t of turn 1 while the sums of turn 0 move, then step t + 1 of turn 0 while those of turn 1 move."""
        moving, sums = state
        lanes = list(enumerate(self.lanes))
        sent = {k: self._permuted(sums[k], self.ring.result, lane) for k, lane in lanes if not lane.turn}
        for k, lane in lanes:
            if lane.turn:
                sent[k] = self._permuted(self._added(sums[k], staying, moving[k], lane, t), self.ring.result, lane)
        onward = [self._onward(moving[k], lane) for k, lane in lanes]
        arrived = [sent[k] if lane.turn else self._added(sent[k], staying, onward[k], lane, t + 1) for k, lane in lanes]
        return (onward, arrived), None

    def _last(self, staying: list[Any], moving: list[list[Any]], sums: list[Any]) -> list[Any]:
        """The sums or the result after the last products."""
        if not self.ring.result:
            return self._written(sums, staying, moving, self.parts - 1)
        return [
            self._added(x, staying, xs, lane, self.parts - 1) if lane.turn else x
            for x, xs, lane in zip(sums, moving, self.lanes, strict=True)
        ]

    def _padded(self, x: Any, i: int) -> Any:
        """An operand that does not rotate, padded to a full last part."""
        x, d = self.shards.masked(x, i), self._dim(self.shards.rule.operands[i])
        missing = 0 if d is None else self.parts * self.part - x.shape[d]
        return jnp.pad(x, [(0, missing if k == d else 0) for k in range(x.ndim)]) if missing else x

    def _start(self, x: Any, i: int, lane: _Lane) -> Any:
        """The slice of a rotating operand that a device holds in the first step."""
        shards, f, atoms = self.shards, self.ring.factor, self.ring.atoms_of(i)
        finer = dataclasses.replace(shards, split={**shards.split, f: (*shards.atoms(f), *atoms)})
        d = self._dim(shards.rule.operands[i])
        assert d is not None
        x = _slice_of(finer.masked(x, i), lane.low, lane.size, d)
        self.note(atoms, x, self.parts - 1, i)
        ahead = lane.sign if self.ring.result else 0
        return self._skewed(x, i, lambda a, b: a + b + ahead)

    @in_context(NO_CONTEXT)
    def _skewed(self, x: Any, i: int | None, source: Callable[[int, int], int]) -> Any:
        """Moves an operand or the sums from ``source(a, b)`` to ``a``, if another array rotates along ``b``."""
        atoms = self.ring.result if i is None else self.ring.atoms_of(i)
        others = tuple(other for other in self.ring.rotating if other != atoms)
        if not others:
            return x
        n, mesh = self.parts, self.shards.mesh
        moves = [(source(a, b) % n * n + b, a * n + b) for a in range(n) for b in range(n)]
        self.note((*atoms, *others[0]), x, 1, i)
        return ppermute(x, mesh.atoms, pairs(moves, (*atoms, *others[0]), mesh))

    def _onward(self, moving: list[Any], lane: _Lane) -> list[Any]:
        """The next part of every rotating operand."""
        return [self._permuted(x, atoms, lane) for x, (_, atoms) in zip(moving, self.ring.operands, strict=True)]

    @in_context(NO_CONTEXT)
    def _permuted(self, x: Any, atoms: Atoms, lane: _Lane) -> Any:
        n, mesh = self.parts, self.shards.mesh
        order = self.ring.order or range(n)
        moves = [(order[(a + lane.sign) % n], order[a]) for a in range(n)]
        return ppermute(x, mesh.atoms, pairs(moves, atoms, mesh))

    def _step(self, staying: list[Any], moving: list[Any], lane: _Lane, t: Any) -> tuple[Any, Any]:
        """The product of a lane in step t, and the position of its first element along the factor."""
        ring, rule = self.ring, self.shards.rule
        position = sum(lax.axis_index(atoms) for atoms in ring.rotating)
        if ring.order:
            position = _element_of(sorted(range(self.parts), key=ring.order.__getitem__), position)
        turn = lax.rem(position + lane.sign * (t + bool(ring.result)) + self.parts, self.parts)
        begin = (_element_of(ring.order, turn) if ring.order else turn) * self.part + lane.low
        rotating = iter(moving)
        operands: list[Any] = []
        for i, x in enumerate(staying):
            d = self._dim(rule.operands[i])
            if x is None:
                operands.append(next(rotating))
            elif d is None:
                operands.append(x)
            else:
                operands.append(lax.dynamic_slice_in_dim(opaque_for_slice(x, d, lane.size), begin, lane.size, axis=d))
        assert rule.part is not None
        return rule.part(self.shards, *operands), begin

    def _first(self, staying: list[Any], moving: list[Any], lane: _Lane) -> Any:
        """The first sums: the product of the first step, or zeros for lanes of turn 1."""
        if lane.turn:
            product = jax.eval_shape(lambda: self._step(staying, moving, lane, 0)[0])
            sums = jnp.zeros(product.shape, self._dtype)
        else:
            sums = self._step(staying, moving, lane, 0)[0].astype(self._dtype)
        self.note(self.ring.result, sums, self.parts - 1, None)
        return sums

    def _added(self, sums: Any, staying: list[Any], moving: list[Any], lane: _Lane, t: Any) -> Any:
        return sums + self._step(staying, moving, lane, t)[0].astype(self._dtype)

    def _empty(self, staying: list[Any], moving: list[list[Any]]) -> Any:
        """The result before the first step: zeros to add to, or uninitialised memory that the steps fill."""
        shape, d = list(self.shards.out_shape()), self.dim_of_factor
        if d is not None:
            shape[d] = self.parts * self.part
            return lax.empty(tuple(shape), self._dtype)
        product = jax.eval_shape(lambda: self._step(staying, moving[0], self.lanes[0], 0)[0])
        return jnp.zeros(shape, product.dtype)

    def _written(self, sums: list[Any], staying: list[Any], moving: list[list[Any]], t: Any) -> list[Any]:
        """The result after the products of step t are added or written."""
        (result,) = sums
        d = self.dim_of_factor
        for xs, lane in zip(moving, self.lanes, strict=True):
            product, begin = self._step(staying, xs, lane, t)
            if d is None:
                result = result + product
            else:
                result = lax.dynamic_update_slice_in_dim(result, product.astype(self._dtype), begin, axis=d)
        return [result]

    def _finished(self, sums: list[Any]) -> Any:
        d = self.dim_of_factor
        if self.ring.result:
            assert d is not None
            return lax.concatenate([self._skewed(x, None, lambda a, b: a - b) for x in sums], d)
        if d is None:
            return sums[0].astype(self._dtype)
        return _slice_of(sums[0], 0, self.shards.out_shape()[d], d)

    @property
    def _dtype(self) -> Any:
        return self.shards.equation.outputs[0].dtype


def _element_of(numbers: Sequence[int], i: Any) -> Any:
    return lax.dynamic_index_in_dim(jnp.asarray(numbers, jnp.int32), i, keepdims=False)


def _slice_of(x: Any, begin: int, size: int, dim: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, begin, begin + size, axis=dim)
