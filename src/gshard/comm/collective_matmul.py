"""Collective matmul: a contraction taken part by part, run on one device's parts while other parts are on their way.

With p parts and one array that rotates, device ``a`` works in step t on part ``a + t``: it holds that part of a
rotating operand, or the sum for that part of the result, which came from device ``a + 1``. Where two arrays rotate,
along ``a`` and along ``b``, it is part ``a + b + t`` (Cannon): operands are skewed before the first step, and a sum
that rotated is brought home after the last. A step's operator and the permutation beside it need not wait for each
other.

The loop is one ``scan`` whatever p is. Its last step (where sums rotate: its first) stands outside, so that nothing is
sent which nobody needs: p - 1 permutations for each array that rotates, and one for each skew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.comm.route import pairs
from gshard.comm.shards import Shards
from gshard.core.mesh import Atoms
from gshard.core.ring import Ring
from gshard.core.xla_workarounds import opaque_for_slice

Note = Callable[[Atoms, Any, int, int | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Direction:
    """What rotates in one direction: ``size`` elements of every part, from ``low`` on.

    With ``direction`` 1 the part of the next device comes, with -1 that of the one before.
    """

    sign: int
    low: int
    size: int


def collective_matmul(ring: Ring, shards: Shards, arrays: Sequence[Any], note: Note) -> Any:
    """The result of a contraction, its factor taken part by part; runs inside ``shard_map``.

    Args:
        ring: what rotates.
        shards: the equation, split without the ring.
        arrays: one device's parts, as ``core.ring.entering`` says.
        note: told of every permutation: atoms, what each device sends, how often, and which operand that is a part
            of; None for sums.

    Returns:
        one device's part of the result, as ``core.ring.leaving`` says.
    """
    return _Steps(ring, shards, note).run(arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    ring: Ring
    shards: Shards
    note: Note

    @property
    def parts(self) -> int:
        """How many there are."""
        return self.ring.steps(self.shards.mesh)

    @property
    def part(self) -> int:
        """Elements of one part along the factor."""
        mesh, f = self.shards.mesh, self.ring.factor
        return -(-self.shards.rule.factors[f].size // (mesh.count(self.shards.atoms(f)) * self.parts))

    @property
    def directions(self) -> tuple[_Direction, ...]:
        """Two if halves of parts rotate in both directions."""
        if not self.ring.both_ways or self.part < 2:
            return (_Direction(1, 0, self.part),)
        half = -(-self.part // 2)
        return _Direction(1, 0, half), _Direction(-1, half, self.part - half)

    @property
    def made_along(self) -> int | None:
        """The result's dimension of the factor; None if it is summed over."""
        return self._dim(self.shards.rule.results[0])

    def _dim(self, dims: Sequence[tuple[int, ...]]) -> int | None:
        return next((d for d, factors in enumerate(dims) if factors == (self.ring.factor,)), None)

    def run(self, arrays: Sequence[Any]) -> Any:
        """All steps."""
        ring, last = self.ring, self.parts - 1
        places = [i for i, _ in ring.operands]
        staying = [None if i in places else self._padded(x, i) for i, x in enumerate(arrays)]
        moving = [[self._start(arrays[i], i, direction) for i in places] for direction in self.directions]

        def step(state: Any, t: Any) -> tuple[Any, None]:
            moving, sums = state
            onward = self._onward(moving)
            return (onward, self._more(sums, staying, moving, t)), None

        if ring.result:
            state = self._onward(moving), self._first(staying, moving)
            turns = range(1, last if ring.operands else last + 1)
        else:
            state, turns = (moving, [self._empty(staying, moving)]), range(last)
        if turns:
            state, _ = lax.scan(step, state, jnp.arange(turns.start, turns.stop, dtype=jnp.int32))
        moving, sums = state
        if ring.operands:
            sums = self._more(sums, staying, moving, last)
        return self._finished(sums)

    def _padded(self, x: Any, i: int) -> Any:
        """An operand that stays, long enough for a full last part."""
        x, d = self.shards.masked(x, i), self._dim(self.shards.rule.operands[i])
        missing = 0 if d is None else self.parts * self.part - x.shape[d]
        return jnp.pad(x, [(0, missing if k == d else 0) for k in range(x.ndim)]) if missing else x

    def _start(self, x: Any, i: int, direction: _Direction) -> Any:
        """What of a rotating operand is at hand in the first step."""
        shards, f, atoms = self.shards, self.ring.factor, self.ring.atoms_of(i)
        finer = dataclasses.replace(shards, split={**shards.split, f: (*shards.atoms(f), *atoms)})
        d = self._dim(shards.rule.operands[i])
        assert d is not None
        x = _slice_of(finer.masked(x, i), direction.low, direction.size, d)
        self.note(atoms, x, self.parts - 1, i)
        ahead = direction.sign if self.ring.result else 0
        return self._skewed(x, i, lambda a, b: a + b + ahead)

    def _skewed(self, x: Any, i: int | None, source: Callable[[int, int], int]) -> Any:
        """An operand, or the sums, from ``source(a, b)`` to ``a``; ``b`` counts along what else rotates, if it does."""
        atoms = self.ring.result if i is None else self.ring.atoms_of(i)
        others = tuple(other for other in self.ring.rotating if other != atoms)
        if not others:
            return x
        n, mesh = self.parts, self.shards.mesh
        moves = [(source(a, b) % n * n + b, a * n + b) for a in range(n) for b in range(n)]
        self.note((*atoms, *others[0]), x, 1, i)
        return lax.ppermute(x, mesh.atoms, pairs(moves, (*atoms, *others[0]), mesh))

    def _onward(self, moving: list[list[Any]]) -> list[list[Any]]:
        """Every part of a rotating operand, one device further."""
        return [
            [self._permuted(x, atoms, direction) for x, (_, atoms) in zip(xs, self.ring.operands, strict=True)]
            for xs, direction in zip(moving, self.directions, strict=True)
        ]

    def _permuted(self, x: Any, atoms: Atoms, direction: _Direction) -> Any:
        n, mesh = self.parts, self.shards.mesh
        return lax.ppermute(x, mesh.atoms, pairs([((a + direction.sign) % n, a) for a in range(n)], atoms, mesh))

    def _step(self, staying: list[Any], moving: list[Any], direction: _Direction, t: Any) -> tuple[Any, Any]:
        """What one direction makes in step t, and where the elements that it makes it of begin."""
        ring, rule = self.ring, self.shards.rule
        turn = sum(lax.axis_index(atoms) for atoms in ring.rotating) + direction.sign * (t + bool(ring.result))
        begin = lax.rem(turn + self.parts, self.parts) * self.part + direction.low
        come, operands = iter(moving), []
        for i, x in enumerate(staying):
            d = self._dim(rule.operands[i])
            if x is None:
                operands.append(next(come))
            elif d is None:
                operands.append(x)
            else:
                operands.append(
                    lax.dynamic_slice_in_dim(opaque_for_slice(x, d, direction.size), begin, direction.size, axis=d)
                )
        assert rule.part is not None
        return rule.part(self.shards, *operands), begin

    def _first(self, staying: list[Any], moving: list[list[Any]]) -> list[Any]:
        """The sums that set out: what has arrived, and what is to be added before it goes on.

        Were it added at once, XLA would make the addition part of the product, which then had to wait for the sum.
        """
        found = [
            self._step(staying, xs, direction, 0)[0].astype(self._dtype)
            for xs, direction in zip(moving, self.directions, strict=True)
        ]
        for x in found:
            self.note(self.ring.result, x, self.parts - 1, None)
        return [(jnp.zeros_like(x), x) for x in found]

    def _empty(self, staying: list[Any], moving: list[list[Any]]) -> Any:
        """A result of which nothing is made yet."""
        shape, d = list(self.shards.out_shape()), self.made_along
        if d is not None:
            shape[d] = self.parts * self.part
            return jnp.zeros(shape, self._dtype)
        one = functools.partial(self._step, direction=self.directions[0], t=0)
        return jnp.zeros(shape, jax.eval_shape(one, staying, moving[0])[0].dtype)

    def _more(self, sums: list[Any], staying: list[Any], moving: list[list[Any]], t: Any) -> list[Any]:
        """The sums, or the result, with what step t makes."""
        found, d = list(sums), self.made_along
        for k, (xs, direction) in enumerate(zip(moving, self.directions, strict=True)):
            if self.ring.result:
                arrived, added = found[k]
                arriving = self._permuted(arrived + added, self.ring.result, direction)
                found[k] = arriving, self._step(staying, xs, direction, t)[0].astype(self._dtype)
                continue
            made, begin = self._step(staying, xs, direction, t)
            if d is None:
                found[0] = found[0] + made
            else:
                found[0] = lax.dynamic_update_slice_in_dim(found[0], made.astype(self._dtype), begin, axis=d)
        return found

    def _finished(self, sums: list[Any]) -> Any:
        d = self.made_along
        if self.ring.result:
            assert d is not None
            return lax.concatenate([self._skewed(x + y, None, lambda a, b: a - b) for x, y in sums], d)
        if d is None:
            return sums[0].astype(self._dtype)
        return _slice_of(sums[0], 0, self.shards.out_shape()[d], d)

    @property
    def _dtype(self) -> Any:
        return self.shards.equation.outputs[0].dtype


def _slice_of(x: Any, begin: int, size: int, dim: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, begin, begin + size, axis=dim)
