"""Attention (``gshard.attention``) and its gradient: split batches, heads, or sequences around a ring."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.rotation import Rotation
from gshard.comm.shards import Shards
from gshard.core.mesh import Mesh
from gshard.core.rule import REDUCE, Rule, RuleMaker, Split
from gshard.language.attention_primitive import AttentionParams, merged
from gshard.language.registry import Call, rule

# Runs attention with a split sequence: keys and values rotate among the devices of the sequence.

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
        others = self.parts - 1

        def parts_within(count: int | None) -> int:
            return others if count is None else min(others, -(-count // self.size))

        behind, ahead = map(parts_within, self.params.reach)
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
    params: AttentionParams, arrays: _Arrays, q_first: Any, k_first: Any, keys: int | None
) -> tuple[AttentionParams, dict[str, Any]]:
    """Adds the positions in the whole arrays to the parameters and operands of parts of queries and keys.

    Positions begin at ``q_first`` and ``k_first``. From ``keys`` on, keys are padding; None if there is no padding.
    """
    arrays, lead = dict(arrays), (1,) * (arrays["q"].ndim - 4)
    counts = (q_first, arrays["q"].shape[-4]), (k_first, arrays["k"].shape[-3])
    q_at, k_at = ((first + jnp.arange(n)).reshape(*lead, n) for first, n in counts)
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


def _exchanged_bytes(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], gradient: bool) -> int:
    """The bytes of the operands and results, which devices exchange before and after; ``sizes`` are in bytes."""
    operands = sum(sizes[name] for name in ("q", "k", "v"))
    if gradient:
        return 2 * operands + sum(sizes[name] for name in ("lse", "delta", "dout"))
    query_shape, out_features = shapes["q"], shapes["v"][-1]
    query_itemsize = sizes["q"] // max(1, math.prod(query_shape))
    return operands + math.prod(query_shape[:-1]) * (out_features * query_itemsize + max(4, query_itemsize))


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
            return self._rotation.zigzag(out, self._dim, back=True), self._rotation.zigzag(lse, self._dim, back=True)
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
            gradients = [self._rotation.zigzag(x, self._dim, back=True) for x in cast]
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
            params, arrays = in_place(params, arrays, q_first, k_first, count if self._sequences.padded else None)
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


# Attention (``gshard.attention``) and its gradient: split batches, heads and positions.

_BY_QUERY = ("q", "lse", "delta", "dout")  # arrays whose padding must not add to the sums for keys


@rule("gshard_attention")
def attention(call: Call) -> Rule:
    """All dimensions except features can be split. Positions are one factor if there are as many keys as queries.

    >>> call = Call("", {"params": AttentionParams(1.0)}, ((2, 8, 3, 2, 5), (2, 8, 3, 5), (2, 8, 3, 4)),
    ...             ((2, 8, 3, 2, 4), (2, 8, 3, 2)), ("f4",) * 3)
    >>> print(attention(call))
    a b c d e, a b c e, a b c f -> a b c d f, a b c d; communicate b; replicate e f
    """
    params: AttentionParams = call.params["params"]
    names, make = params.names, RuleMaker()
    dims = _Dims(make, params, dict(zip(names, call.in_shapes, strict=True)), gradient=False)

    def local(shards: Shards, *parts: Any) -> list[Any]:
        arrays = dims.without_padding(shards, dict(zip(names, parts, strict=True)))
        query_atoms, key_atoms = shards.atoms(dims.t[0]), shards.atoms(dims.s[0])
        if dims.together and query_atoms:
            # The padding of keys and values is finite here.
            ring = _Ring(shards, dims.sequences(shards.mesh, shards.split), Rotation(shards, query_atoms), arrays)
            out, lse = ring.forward()
            return [out.astype(shards.equation.outputs[0].dtype), lse]
        if not key_atoms and not query_atoms:
            return shards.bind(*arrays.values())
        params_of_part, arrays = dims.for_part(shards, arrays)
        if not key_atoms:
            return shards.bind(*arrays.values(), params=params_of_part)
        wide = dataclasses.replace(params_of_part, wide=True)
        out, lse = shards.bind(*arrays.values(), params=wide)
        largest = shards.all_reduce(lse, key_atoms, "max")
        largest = jnp.where(largest == -jnp.inf, 0, largest)
        weight = jnp.exp(lse - largest)[..., None]
        sums = shards.all_reduce(jnp.concatenate([out * weight, weight], axis=-1), key_atoms, "add")
        weighted, total = sums[..., :-1], sums[..., -1]
        result = weighted / jnp.where(total == 0, 1, total)[..., None]
        return [result.astype(shards.equation.outputs[0].dtype), largest + jnp.log(total)]

    flops = dims.pairs * 2 * (dims.features + dims.out_features)
    return make.rule(
        [dims.of[name] for name in names], [dims.out, dims.lse], local=local, flops=flops, products=flops,
    )  # fmt: skip


@rule("gshard_attention_gradient")
def attention_gradient(call: Call) -> Rule:
    """The gradients of keys and values are sums over queries, the gradient of queries is a sum over keys.

    >>> shapes = ((2, 7, 3, 2, 5), (2, 8, 3, 5), (2, 8, 3, 4), (2, 7, 3, 2), (2, 7, 3, 2), (2, 7, 3, 2, 4))
    >>> call = Call("", {"params": AttentionParams(1.0)}, shapes, shapes[:3], ("f4",) * 6)
    >>> print(attention_gradient(call))  # doctest: +NORMALIZE_WHITESPACE
    a b c d e, a f c e, a f c g, a b c d, a b c d, a b c d g -> a b c d e, a f c e, a f c g;
    add over b=7; add over d=2; add over f=8; replicate e g
    """
    params: AttentionParams = call.params["params"]
    names, make = params.gradient_names, RuleMaker()
    dims = _Dims(make, params, dict(zip(names, call.in_shapes, strict=True)), gradient=True)

    def local(shards: Shards, *parts: Any) -> list[Any]:
        arrays = dims.without_padding(shards, dict(zip(names, parts, strict=True)))
        query_atoms = shards.atoms(dims.t[0])
        if dims.together and query_atoms:
            # The padding of operands is zero here.
            ring = _Ring(shards, dims.sequences(shards.mesh, shards.split), Rotation(shards, query_atoms), arrays)
            return [x.astype(v.dtype) for x, v in zip(ring.backward(), shards.equation.outputs, strict=True)]
        if not shards.atoms(dims.s[0]) and not query_atoms:
            return shards.bind(*arrays.values())
        params_of_part, arrays = dims.for_part(shards, arrays)
        return shards.bind(*arrays.values(), params=params_of_part)

    flops = dims.pairs * 2 * (3 * dims.features + 2 * dims.out_features)
    return make.rule(
        [dims.of[name] for name in names], [dims.of[name] for name in "qkv"], local=local,
        flops=flops, products=flops, masks_itself=True,
    )  # fmt: skip


class _Dims:
    """The factors of the operands and results of attention."""

    def __init__(
        self, make: RuleMaker, params: AttentionParams, shapes: Mapping[str, Sequence[int]], *, gradient: bool
    ) -> None:
        *batch, queries, heads, group, features = shapes["q"]
        keys, out_features = shapes["k"][-3], shapes["v"][-1]
        self._params = params
        self.features, self.out_features = features, out_features
        self.together = queries == keys and queries > 1  # whether queries and keys have one factor
        summed = (REDUCE, "add") if gradient else ()
        self._batch = [make.factor(n) for n in batch]
        # t, s: the dimensions of queries and of keys
        self.t = make.communicate(queries) if self.together else make.factor(queries, *summed)
        head, groups = make.factor(heads), make.factor(group, *summed)
        d = make.replicate(features)
        self.s = self.t if self.together else make.factor(keys, *summed) if gradient else make.communicate(keys)
        e = make.replicate(out_features)
        self.lse = [*self._batch, self.t, head, groups]  # lse, out: the dimensions of the log-sum-exp and of the result
        self.out = [*self.lse, e]
        columns = make.replicate(keys) if self.together and params.mask else self.s
        full = {
            "q": [*self.lse, d], "k": [*self._batch, self.s, head, d], "v": [*self._batch, self.s, head, e],
            "q_positions": [*self._batch, self.t], "k_positions": [*self._batch, self.s],
            "q_segments": [*self._batch, self.t], "k_segments": [*self._batch, self.s],
            "mask": [*self._batch, head, groups, self.t, columns],
            "lse": self.lse, "delta": self.lse, "dout": self.out,
        }  # fmt: skip
        # the dimensions of each operand, by name; () for a dimension of size 1 that is broadcast
        self.of = {
            name: [dim if make.factors[dim[0]].size == n else () for dim, n in zip(full[name], shape, strict=True)]
            for name, shape in shapes.items()
        }
        self.queries, self.keys = queries, keys
        # the number of pairs of a query and a key that count
        self.pairs = math.prod(batch) * heads * group * queries * self._seen_keys()

    def _seen_keys(self) -> int:
        """The keys that a query sees on average."""
        keys = self.keys
        if not self.together:
            return keys
        behind, ahead = (keys // 2 if n is None else min(n, keys // 2) for n in self._params.reach)
        return max(1, min(keys, behind + ahead + 1))

    def sequences(self, mesh: Mesh, split: Split) -> Sequences:
        """The positions that devices hold under a split."""
        return Sequences(self._params, self.queries, mesh.count(split.get(self.t[0], ())))

    def for_part(self, shards: Shards, arrays: Mapping[str, Any]) -> tuple[AttentionParams, dict[str, Any]]:
        """One device's parameters and operands, with positions in the whole arrays and without padding."""
        is_padded = self.keys % shards.mesh.count(shards.atoms(self.s[0])) != 0
        q_first, k_first = shards.offset(self.t), shards.offset(self.s)
        params, arrays = in_place(self._params, arrays, q_first, k_first, self.keys if is_padded else None)
        names = params.gradient_names if "dout" in arrays else params.names
        return params, {name: arrays[name] for name in names}

    def without_padding(self, shards: Shards, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays with zeros in place of padding that would be added, or multiplied by zero."""
        summed = ("k", "v", *(_BY_QUERY if "dout" in arrays else ()))
        return {name: shards.filled(x, i) if name in summed else x for i, (name, x) in enumerate(arrays.items())}
