"""Moves parts of arrays around a ring of devices, while each device uses the parts that pass it.

After step ``j`` a device holds the part of the device ``j`` places behind it on the ring (before it, in the other
direction). Sums for the passing parts may travel with them and return to the devices of the parts at the end. While a
device computes, the network moves the next part, and the sums of the previous step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.route import pairs
from gshard.comm.shards import Shards
from gshard.comm.steps import PERMUTE
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms
from gshard.core.xla_workarounds import ppermute

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

    def zigzag(self, x: Any, dim: int) -> Any:
        """Two halves of parts for each device: half ``d`` and half ``2 * parts - 1 - d`` for device ``d``, joined.

        Before, device ``d`` has the halves ``2 * d`` and ``2 * d + 1``. Where work grows with the position (causal
        attention), all devices then have equally much.
        """
        even, odd = jnp.split(x, 2, axis=dim)
        places = [self._place(h) for h in range(2 * self.parts)]
        even = self._permuted(even, [(d, places[2 * d]) for d in range(self.parts)])
        odd = self._permuted(odd, [(d, places[2 * d + 1]) for d in range(self.parts)])
        self._note([x], 1)
        low = self._has_even_low
        return jnp.concatenate([jnp.where(low, even, odd), jnp.where(low, odd, even)], axis=dim)

    def unzigzag(self, x: Any, dim: int) -> Any:
        """The inverse of ``zigzag``."""
        first, second = jnp.split(x, 2, axis=dim)
        low = self._has_even_low
        even, odd = jnp.where(low, first, second), jnp.where(low, second, first)
        places = [self._place(h) for h in range(2 * self.parts)]
        even = self._permuted(even, [(places[2 * d], d) for d in range(self.parts)])
        odd = self._permuted(odd, [(places[2 * d + 1], d) for d in range(self.parts)])
        self._note([x], 1)
        return jnp.concatenate([even, odd], axis=dim)

    def _place(self, half: int) -> int:
        return min(half, 2 * self.parts - 1 - half)

    @property
    def _has_even_low(self) -> Any:
        """Whether the lower half of this device has an even number."""
        return lax.axis_index(self.atoms) % 2 == 0

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
