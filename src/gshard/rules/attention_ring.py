"""Runs attention with a split sequence: keys and values rotate among the devices of the sequence.

Each device keeps its queries and merges the results for the keys that pass it. In the backward pass, the gradients of
keys and values travel with them. Attention with a window only needs the parts within the window.

With a causal mask, queries see all keys of earlier parts and no keys of later parts. So each step except the first is
attention without a mask. Half of all pairs of a query and a key count, and the last devices have most of them. If it
pays, devices first exchange halves of their parts, so that each device has a half from both ends of the sequence
(``comm.rotation.zigzag``; Dubey et al., "The Llama 3 herd of models", section 3.3.2). A device's queries and the
passing keys then form four pairs of halves: the queries see all keys of two pairs and no keys of the other two.
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

# Operations of a product that take as long as sending one byte: the value without a machine (objective.py).
OPERATIONS = 1_000

_Arrays = Mapping[str, Any]
_BY_KEY = ("k", "v", "k_positions", "k_segments")


@dataclasses.dataclass(frozen=True, slots=True)
class Sequences:
    """The distribution of the positions of queries and keys over the devices of a ring."""

    params: AttentionParams  # the parameters of attention
    count: int  # the number of positions
    parts: int  # the number of devices

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
        """Whether queries see all keys of earlier parts, and the keys of their own part up to their own positions."""
        params = self.params
        return params.causal and not params.positions and params.window == (None, None)

    @property
    def reach(self) -> tuple[int, int]:
        """The numbers of parts before and after its own that a device needs."""
        params = self.params
        others = self.parts - 1
        if params.positions or not params.by_position:
            return others, 0

        def parts_within(window: int | None) -> int:
            return others if window is None else min(others, -(-window // self.size))

        before, after = params.window
        behind = parts_within(before)
        ahead = 0 if params.causal else parts_within(after)
        return (behind, ahead) if behind + ahead < others else (others, 0)

    def zigzags(self, query_shape: Sequence[int], sent: int, *, gradient: bool) -> bool:
        """Whether devices first exchange halves of their parts."""
        if not self.triangular or self.params.segments or self.params.mask:
            return False
        if self.padded or self.size % 2 or self.parts < 2:
            return False
        # Devices leave out half of the pairs of queries and keys: two products for each pair, five for the gradient.
        products = 5 if gradient else 2
        saved = products * math.prod(query_shape) * self.size * (self.parts - 1)
        return saved > OPERATIONS * sent


def in_place(
    params: AttentionParams, arrays: _Arrays, q_at: Any, k_at: Any, keys: int | None
) -> tuple[AttentionParams, dict[str, Any]]:
    """Adds the positions in the whole arrays to the parameters and operands of parts of queries and keys."""
    arrays = dict(arrays)
    if params.by_position and not params.positions:
        params = dataclasses.replace(params, positions=True)
        arrays |= {"q_positions": q_at, "k_positions": k_at}
    if keys is not None:
        is_key = k_at < keys
        if params.segments:
            padding = jnp.iinfo(arrays["k_segments"].dtype).min
            arrays["k_segments"] = jnp.where(is_key, arrays["k_segments"], padding)
        else:
            params = dataclasses.replace(params, segments=True)
            arrays |= {"q_segments": jnp.ones(q_at.shape, jnp.int32), "k_segments": is_key.astype(jnp.int32)}
    return params, arrays


def ring_bytes(
    sequences: Sequences, shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[Any], gradient: bool
) -> int:
    """The bytes that each device sends."""
    if sequences.parts == 1:
        return 0
    sizes = {
        name: math.prod(shape) * itemsize(dtype) for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    steps = sum(sequences.reach)
    total = sum(sizes.get(name, 0) for name in _BY_KEY) * steps
    if gradient:
        total += (sizes["k"] + sizes["v"]) * steps
    exchanged = _exchanged_bytes(shapes, sizes, gradient)
    return total + exchanged if sequences.zigzags(shapes["q"], exchanged, gradient=gradient) else total


def _exchanged_bytes(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], gradient: bool) -> int:
    """The bytes of the operands and results, which devices exchange before and after; ``sizes`` are in bytes."""
    operands = sum(sizes[name] for name in ("q", "k", "v"))
    if gradient:
        return 2 * operands + sum(sizes[name] for name in ("lse", "delta", "dout"))
    query_shape, out_features = shapes["q"], shapes["v"][-1]
    query_itemsize = sizes["q"] // max(1, math.prod(query_shape))
    return operands + math.prod(query_shape[:-1]) * (out_features * query_itemsize + max(4, query_itemsize))


def on_ring(shards: Shards, sequences: Sequences, atoms: Atoms, arrays: _Arrays) -> list[Any]:
    """One device's part of the result and of the log-sum-exp. The padding of keys and values must be finite."""
    ring = _Ring(shards, sequences, Rotation(shards, atoms), arrays)
    out, lse = ring.forward()
    return [out.astype(shards.equation.outputs[0].dtype), lse]


def gradient_on_ring(shards: Shards, sequences: Sequences, atoms: Atoms, arrays: _Arrays) -> list[Any]:
    """One device's parts of the gradients of queries, keys and values. The padding of operands must be zero."""
    ring = _Ring(shards, sequences, Rotation(shards, atoms), arrays)
    return [x.astype(v.dtype) for x, v in zip(ring.backward(), shards.equation.outputs, strict=True)]


class _Ring:
    """Computes attention of one device's queries with all keys."""

    def __init__(self, shards: Shards, sequences: Sequences, rotation: Rotation, arrays: _Arrays) -> None:
        self._shards, self._sequences, self._rotation = shards, sequences, rotation
        self._dim = arrays["q"].ndim - 4  # the dimension of positions
        self._params: AttentionParams = shards.params["params"]
        self._arrays = dict(arrays)
        gradient = "dout" in arrays
        shapes = {name: tuple(x.shape) for name, x in arrays.items()}
        sizes = {name: x.size * x.dtype.itemsize for name, x in arrays.items()}
        exchanged = _exchanged_bytes(shapes, sizes, gradient)
        self._zigzags = sequences.zigzags(shapes["q"], exchanged, gradient=gradient)
        if self._zigzags:
            self._arrays = {name: rotation.zigzag(x, self._dim) for name, x in self._arrays.items()}

    def forward(self) -> tuple[Any, Any]:
        """The result and the log-sum-exp, in the dtype of scores."""
        state = self._attend(self._arrays, 0)

        def attend_to_passing(state: Any, passing: list[Any], steps: Any) -> tuple[Any, list[Any]]:
            arrays = self._with_passing(passing)
            if self._zigzags:
                return self._attend_in_halves(state, arrays, steps), []
            out, lse = merged(state, self._attend(arrays, steps))
            if self._sequences.triangular:
                seen = self._are_earlier(steps)
                out, lse = jnp.where(seen, out, state[0]), jnp.where(seen, lse, state[1])
            return (out, lse), []

        for sign, steps in zip((1, -1), self._sequences.reach, strict=True):
            state, _ = self._rotation.run(self._rotating, state, steps, attend_to_passing, sign=sign)
        if self._zigzags:
            out, lse = state
            # Devices exchange the result in its final dtype.
            out = out.astype(self._shards.equation.outputs[0].dtype)
            return self._rotation.unzigzag(out, self._dim), self._rotation.unzigzag(lse, self._dim)
        return state

    def backward(self) -> list[Any]:
        """The gradients of queries, keys and values."""
        dq, *dk_dv = self._differentiate(self._arrays, 0)
        dtypes = [self._arrays[name].dtype for name in ("k", "v")]

        def differentiate_by_passing(dq: Any, passing: list[Any], steps: Any) -> tuple[Any, list[Any]]:
            arrays = self._with_passing(passing)
            if self._zigzags:
                dq_here, *sums = self._differentiate_in_halves(arrays, steps)
            else:
                dq_here, *sums = self._differentiate(arrays, steps)
                if self._sequences.triangular:
                    seen = self._are_earlier(steps)
                    dq_here, *sums = (jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in (dq_here, *sums))
            return dq + dq_here, [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]

        for sign, steps in zip((1, -1), self._sequences.reach, strict=True):
            dq, returned = self._rotation.run(self._rotating, dq, steps, differentiate_by_passing, sign=sign, sums=True)
            dk_dv = [x + y for x, y in zip(dk_dv, returned, strict=True)] if returned else dk_dv
        gradients = [dq, *dk_dv]
        if self._zigzags:
            outputs = self._shards.equation.outputs
            cast = [x.astype(v.dtype) for x, v in zip(gradients, outputs, strict=True)]
            gradients = [self._rotation.unzigzag(x, self._dim) for x in cast]
        return gradients

    @property
    def _rotating(self) -> list[Any]:
        """This device's parts of the arrays that rotate."""
        return [self._arrays[name] for name in _BY_KEY if name in self._arrays]

    def _with_passing(self, passing: Sequence[Any]) -> _Arrays:
        """The operands with the parts of keys and values that pass this device."""
        names = [name for name in _BY_KEY if name in self._arrays]
        return {**self._arrays, **dict(zip(names, passing, strict=True))}

    def _attend(self, arrays: _Arrays, steps: Any) -> tuple[Any, Any]:
        """The result and the log-sum-exp for the keys of the device some steps behind."""
        params, arrays = self._for_keys_of(steps, arrays)
        out, lse = self._shards.bind(*(arrays[name] for name in params.names), params=params)
        return out, lse

    def _differentiate(self, arrays: _Arrays, steps: Any) -> list[Any]:
        """The gradients for the keys of the device some steps behind."""
        params, arrays = self._for_keys_of(steps, arrays)
        return self._shards.bind(*(arrays[name] for name in params.gradient_names), params=params)

    def _for_keys_of(self, steps: Any, arrays: _Arrays) -> tuple[AttentionParams, _Arrays]:
        """The parameters and operands of attention with the keys of the device some steps behind."""
        params = dataclasses.replace(self._params, wide=True)
        arrays = dict(arrays)
        own_keys = type(steps) is int and steps == 0
        triangular = self._sequences.triangular
        if triangular and not own_keys:
            params = dataclasses.replace(params, causal=False)
        # Positions in the whole arrays do not matter for a device's own keys, or if queries see all keys or none.
        in_order = triangular or (own_keys and not self._sequences.padded)
        if in_order and not params.mask:
            return params, arrays
        size, count = self._sequences.size, self._sequences.count
        q_first, k_first = (self._rotation.behind(n) * size for n in (0, steps))
        if not in_order:
            lead = (1,) * self._dim
            q_at, k_at = ((first + jnp.arange(size)).reshape(*lead, size) for first in (q_first, k_first))
            params, arrays = in_place(params, arrays, q_at, k_at, count if self._sequences.padded else None)
        if params.mask:
            missing = size * self._sequences.parts - count
            columns = jnp.pad(arrays["mask"], [(0, 0)] * (arrays["mask"].ndim - 1) + [(0, missing)])
            arrays["mask"] = lax.dynamic_slice_in_dim(columns, k_first, size, axis=-1)
        return params, arrays

    def _are_earlier(self, steps: Any) -> Any:
        """Whether the keys of the device some steps behind have lower positions than this device's queries."""
        return self._rotation.behind(steps) < self._rotation.behind(0)

    def _split_halves(self, x: Any) -> tuple[Any, Any]:
        low, high = jnp.split(x, 2, axis=self._dim)
        return low, high

    def _pairs(self, arrays: _Arrays, steps: Any, names: Sequence[str]) -> tuple[Any, list[Any]]:
        """Computes the two pairs of halves of queries and passing keys that count.

        Queries in the upper half always see the keys in the lower half. In addition, the lower halves see each other
        if the keys come from an earlier device, and the upper halves otherwise.
        """
        earlier = self._are_earlier(steps)
        operands = []
        for name in names:
            low, high = self._split_halves(arrays[name])
            always = low if name in _BY_KEY else high
            operands.append(jnp.stack([always, jnp.where(earlier, low, high)]))
        params = dataclasses.replace(self._params, causal=False, wide=True)
        return earlier, self._shards.bind(*operands, params=params)

    def _attend_in_halves(self, state: Any, arrays: _Arrays, steps: Any) -> tuple[Any, Any]:
        """The state merged with the results for the passing keys, after the exchange of halves."""
        earlier, (outs, lses) = self._pairs(arrays, steps, self._params.names)
        (out_low, out_high), (lse_low, lse_high) = map(self._split_halves, state)
        out_high, lse_high = merged((out_high, lse_high), (outs[0], lses[0]))
        chosen = jnp.where(earlier, out_low, out_high), jnp.where(earlier, lse_low, lse_high)
        out, lse = merged(chosen, (outs[1], lses[1]))
        both_outs = jnp.where(earlier, out, out_low), jnp.where(earlier, out_high, out)
        both_lses = jnp.where(earlier, lse, lse_low), jnp.where(earlier, lse_high, lse)
        return jnp.concatenate(both_outs, axis=self._dim), jnp.concatenate(both_lses, axis=self._dim)

    def _differentiate_in_halves(self, arrays: _Arrays, steps: Any) -> list[Any]:
        """The gradients for the passing keys, after the exchange of halves."""
        earlier, (dq, dk, dv) = self._pairs(arrays, steps, self._params.gradient_names)

        def joined(always: Any, chosen: Any, *, upper: bool) -> Any:
            none = jnp.zeros((), chosen.dtype)
            low, high = jnp.where(earlier, chosen, none), jnp.where(earlier, none, chosen)
            halves = (low, high + always) if upper else (low + always, high)
            return jnp.concatenate(halves, axis=self._dim)

        return [joined(*dq, upper=True), joined(*dk, upper=False), joined(*dv, upper=False)]
