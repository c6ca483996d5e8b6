"""Attention with a split sequence: keys and values rotate among the devices of the sequence.

Each device keeps its queries and merges the results for the keys that pass it. Backward, the gradients of keys and
values travel with them. A window needs the parts within its reach only.

With a causal mask, queries see parts before their own as a whole and later parts not at all, so each step but the first
is attention without a mask. Half of the pairs of a query and a key count, most of them on the last device. If it pays,
devices first exchange halves of their parts, so that each has one from both ends of the sequence
(``comm.rotation.zigzag``; Dubey et al., "The Llama 3 herd of models", section 3.3.2). Of the four pairs of halves of a
device's queries and the passing keys, queries then see all keys of two pairs, and none of the two others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.rotation import Rotation
from gshard.comm.shards import Shards
from gshard.core.mesh import Atoms
from gshard.core.program import itemsize
from gshard.language.attention_blocks import merged
from gshard.language.attention_primitive import AttentionParams

OPERATIONS = 1_000  # operations of a product that take as long as sending a byte, as without a machine (objective.py)

_Arrays = Mapping[str, Any]
_BY_KEY = ("k", "v", "k_positions", "k_segments")


@dataclasses.dataclass(frozen=True, slots=True)
class Sequences:
    """How the positions of queries and keys lie on the devices of a ring.

    Attributes:
        params: what attention computes.
        count: the number of positions.
        parts: the number of devices.
    """

    params: AttentionParams
    count: int
    parts: int

    @property
    def size(self) -> int:
        """The number of positions on one device, padding included."""
        return -(-self.count // self.parts)

    @property
    def padded(self) -> bool:
        """Whether the last devices have padding."""
        return self.count % self.parts != 0

    @property
    def triangular(self) -> bool:
        """Whether queries see all keys of earlier parts, and of their own part those up to themselves."""
        params = self.params
        return params.causal and not params.positions and params.window == (None, None)

    @property
    def reach(self) -> tuple[int, int]:
        """The numbers of parts before and after its own that a device needs."""
        every, params = self.parts - 1, self.params
        if params.positions or not params.by_position:
            return every, 0
        before, after = params.window
        behind = every if before is None else min(every, -(-before // self.size))
        ahead = 0 if params.causal else every if after is None else min(every, -(-after // self.size))
        return (behind, ahead) if behind + ahead < every else (every, 0)

    def zigzags(self, q: Sequence[int], sent: int, *, gradient: bool) -> bool:
        """Whether devices exchange halves of their parts first.

        Args:
            q: the shape of one device's part of the queries.
            sent: the bytes that the exchange sends.
            gradient: whether they compute the gradient.
        """
        if not self.triangular or self.params.segments or self.params.mask:
            return False
        if self.padded or self.size % 2 or self.parts < 2:
            return False
        # Half of the pairs of queries and keys are left out: two products of each, or five for the gradient.
        saved = (5 if gradient else 2) * math.prod(q) * self.size * (self.parts - 1)
        return saved > OPERATIONS * sent


def in_place(
    params: AttentionParams, arrays: _Arrays, q_at: Any, k_at: Any, keys: int | None
) -> tuple[AttentionParams, dict[str, Any]]:
    """Parameters and operands of parts of queries and keys, which say where the parts are in the whole arrays.

    Args:
        params: what attention computes.
        arrays: the parts of the operands, by name.
        q_at, k_at: the indices of the parts in the whole arrays, in the dimensions of positions.
        keys: the number of keys; those with larger indices are padding, which no query sees. None without padding.
    """
    arrays = dict(arrays)
    if params.by_position and not params.positions:
        params = dataclasses.replace(params, positions=True)
        arrays |= {"q_positions": q_at, "k_positions": k_at}
    if keys is not None:
        real = k_at < keys
        if params.segments:
            padding = jnp.iinfo(arrays["k_segments"].dtype).min
            arrays["k_segments"] = jnp.where(real, arrays["k_segments"], padding)
        else:
            params = dataclasses.replace(params, segments=True)
            arrays |= {"q_segments": jnp.ones(q_at.shape, jnp.int32), "k_segments": real.astype(jnp.int32)}
    return params, arrays


def ring_bytes(
    sequences: Sequences, shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[Any], gradient: bool
) -> int:
    """The bytes that a device sends.

    Args:
        sequences: the positions that devices hold.
        shapes: the shapes of its parts of operands, by name, in order.
        dtypes: their dtypes.
        gradient: whether it computes the gradient.
    """
    if sequences.parts == 1:
        return 0
    size = {n: math.prod(shape) * itemsize(d) for (n, shape), d in zip(shapes.items(), dtypes, strict=True)}
    moving, steps = sum(size.get(name, 0) for name in _BY_KEY), sum(sequences.reach)
    total = moving * steps + (size["k"] + size["v"]) * steps * gradient
    exchanged = _exchanged(shapes, size, gradient)
    return total + exchanged if sequences.zigzags(shapes["q"], exchanged, gradient=gradient) else total


def _exchanged(shapes: Mapping[str, tuple[int, ...]], size: Mapping[str, int], gradient: bool) -> int:
    """The bytes of operands and results, which are exchanged before and after."""
    given = sum(size[name] for name in ("q", "k", "v"))
    if gradient:
        return 2 * given + sum(size[name] for name in ("lse", "delta", "dout"))
    q, features = shapes["q"], shapes["v"][-1]
    each = size["q"] // max(1, math.prod(q))
    return given + math.prod(q[:-1]) * (features * each + max(4, each))


def on_ring(shards: Shards, sequences: Sequences, atoms: Atoms, arrays: _Arrays) -> list[Any]:
    """One device's part of the result and of the log-sum-exp. Padding of keys and values is finite."""
    ring = _Ring(shards, sequences, Rotation(shards, atoms), arrays)
    out, lse = ring.forward()
    return [out.astype(shards.equation.outputs[0].dtype), lse]


def gradient_on_ring(shards: Shards, sequences: Sequences, atoms: Atoms, arrays: _Arrays) -> list[Any]:
    """One device's parts of the gradients of queries, keys and values. Padding of operands is zero."""
    ring = _Ring(shards, sequences, Rotation(shards, atoms), arrays)
    return [x.astype(v.dtype) for x, v in zip(ring.backward(), shards.equation.outputs, strict=True)]


class _Ring:
    """Attention of one device's queries with all keys."""

    def __init__(self, shards: Shards, sequences: Sequences, rotation: Rotation, arrays: _Arrays) -> None:
        self._shards, self._sequences, self._rotation = shards, sequences, rotation
        self._dim = arrays["q"].ndim - 4
        self._params: AttentionParams = shards.params["params"]
        gradient = "dout" in arrays
        self._arrays = dict(arrays)
        shapes = {name: tuple(x.shape) for name, x in arrays.items()}
        size = {name: x.size * x.dtype.itemsize for name, x in arrays.items()}
        self._zigzags = sequences.zigzags(shapes["q"], _exchanged(shapes, size, gradient), gradient=gradient)
        if self._zigzags:
            self._arrays = {name: rotation.zigzag(x, self._dim) for name, x in self._arrays.items()}

    def forward(self) -> tuple[Any, Any]:
        """The result and the log-sum-exp, in the dtype of scores."""
        state = self._attend(self._arrays, 0)

        def use(state: Any, passing: list[Any], steps: Any) -> tuple[Any, list[Any]]:
            arrays = {**self._arrays, **dict(zip(self._moving, passing, strict=True))}
            if self._zigzags:
                return self._halves(state, arrays, steps), []
            made = merged(state, self._attend(arrays, steps))
            if self._sequences.triangular:
                seen = self._are_earlier(steps)
                made = jnp.where(seen, made[0], state[0]), jnp.where(seen, made[1], state[1])
            return made, []

        for sign, steps in zip((1, -1), self._sequences.reach, strict=True):
            state, _ = self._rotation.run(self._passing, state, steps, use, sign=sign)
        if self._zigzags:
            out, lse = state
            # It is exchanged in the dtype that it will have.
            out = out.astype(self._shards.equation.outputs[0].dtype)
            return self._rotation.unzigzag(out, self._dim), self._rotation.unzigzag(lse, self._dim)
        return state

    def backward(self) -> list[Any]:
        """The gradients of queries, keys and values."""
        dq, *own = self._differentiate(self._arrays, 0)
        dtypes = [self._arrays[name].dtype for name in ("k", "v")]

        def use(dq: Any, passing: list[Any], steps: Any) -> tuple[Any, list[Any]]:
            arrays = {**self._arrays, **dict(zip(self._moving, passing, strict=True))}
            if self._zigzags:
                more, *sums = self._gradient_of_halves(arrays, steps)
            else:
                more, *sums = self._differentiate(arrays, steps)
                if self._sequences.triangular:
                    seen = self._are_earlier(steps)
                    more, *sums = (jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in (more, *sums))
            return dq + more, [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]

        for sign, steps in zip((1, -1), self._sequences.reach, strict=True):
            dq, returned = self._rotation.run(self._passing, dq, steps, use, sign=sign, sums=True)
            own = [x + y for x, y in zip(own, returned, strict=True)] if returned else own
        made = [dq, *own]
        if self._zigzags:
            outputs = self._shards.equation.outputs
            cast = [x.astype(v.dtype) for x, v in zip(made, outputs, strict=True)]
            made = [self._rotation.unzigzag(x, self._dim) for x in cast]
        return made

    @property
    def _moving(self) -> list[str]:
        return [name for name in _BY_KEY if name in self._arrays]

    @property
    def _passing(self) -> list[Any]:
        return [self._arrays[name] for name in self._moving]

    def _attend(self, arrays: _Arrays, steps: Any) -> tuple[Any, Any]:
        """Attention with the keys of the device some steps behind."""
        params, arrays = self._of_part(arrays, steps)
        out, lse = self._shards.bind(*(arrays[name] for name in params.names), params=params)
        return out, lse

    def _differentiate(self, arrays: _Arrays, steps: Any) -> list[Any]:
        """The gradients with the keys of the device some steps behind."""
        params, arrays = self._of_part(arrays, steps)
        return self._shards.bind(*(arrays[name] for name in params.gradient_names), params=params)

    def _of_part(self, arrays: _Arrays, steps: Any) -> tuple[AttentionParams, _Arrays]:
        params, arrays = dataclasses.replace(self._params, wide=True), dict(arrays)
        own, triangular = type(steps) is int and steps == 0, self._sequences.triangular
        if not own and triangular:
            params = dataclasses.replace(params, causal=False)
        in_order = triangular or (own and not self._sequences.padded)
        if in_order and not params.mask:
            return params, arrays  # of a device's own positions, or of parts that are seen as a whole or not at all
        lead, size, count = (1,) * self._dim, self._sequences.size, self._sequences.count
        q_first, k_first = (self._rotation.behind(n) * size for n in (0, steps))
        if not in_order:
            q_at, k_at = ((first + jnp.arange(size)).reshape(*lead, size) for first in (q_first, k_first))
            params, arrays = in_place(params, arrays, q_at, k_at, count if self._sequences.padded else None)
        if params.mask:
            missing = size * self._sequences.parts - count
            columns = jnp.pad(arrays["mask"], [(0, 0)] * (arrays["mask"].ndim - 1) + [(0, missing)])
            arrays["mask"] = lax.dynamic_slice_in_dim(columns, k_first, size, axis=-1)
        return params, arrays

    def _are_earlier(self, steps: Any) -> Any:
        """Whether the keys of the device some steps behind come before this device's queries."""
        return self._rotation.behind(steps) < self._rotation.behind(0)

    def _split_halves(self, x: Any) -> tuple[Any, Any]:
        low, high = jnp.split(x, 2, axis=self._dim)
        return low, high

    def _pairs(self, arrays: _Arrays, steps: Any, names: Sequence[str]) -> tuple[Any, list[Any]]:
        """Whether the keys come from an earlier device, and the results of two pairs of halves, one after the other.

        Queries in the upper half see the keys in the lower half. Beyond that, the lower halves see each other if the
        keys are of an earlier device, and the upper halves if they are of a later one.
        """
        earlier = self._are_earlier(steps)
        operands = []
        for name in names:
            low, high = self._split_halves(arrays[name])
            first = low if name in _BY_KEY else high
            operands.append(jnp.stack([first, jnp.where(earlier, low, high)]))
        params = dataclasses.replace(self._params, causal=False, wide=True)
        return earlier, self._shards.bind(*operands, params=params)

    def _halves(self, state: Any, arrays: _Arrays, steps: Any) -> tuple[Any, Any]:
        earlier, (outs, lses) = self._pairs(arrays, steps, self._params.names)
        (out_low, out_high), (lse_low, lse_high) = map(self._split_halves, state)
        out_high, lse_high = merged((out_high, lse_high), (outs[0], lses[0]))
        chosen = jnp.where(earlier, out_low, out_high), jnp.where(earlier, lse_low, lse_high)
        out, lse = merged(chosen, (outs[1], lses[1]))
        both_outs = jnp.where(earlier, out, out_low), jnp.where(earlier, out_high, out)
        both_lses = jnp.where(earlier, lse, lse_low), jnp.where(earlier, lse_high, lse)
        return jnp.concatenate(both_outs, axis=self._dim), jnp.concatenate(both_lses, axis=self._dim)

    def _gradient_of_halves(self, arrays: _Arrays, steps: Any) -> list[Any]:
        earlier, (dq, dk, dv) = self._pairs(arrays, steps, self._params.gradient_names)

        def joined(always: Any, chosen: Any, *, upper: bool) -> Any:
            none = jnp.zeros((), chosen.dtype)
            low, high = jnp.where(earlier, chosen, none), jnp.where(earlier, none, chosen)
            halves = (low, high + always) if upper else (low + always, high)
            return jnp.concatenate(halves, axis=self._dim)

        return [joined(*dq, upper=True), joined(*dk, upper=False), joined(*dv, upper=False)]
