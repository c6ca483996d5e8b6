"""Attention (``gshard.attention``) and its gradient: split batches, heads and positions.

    b t h g d, b s h d, b s h e -> b t h g e, b t h g        (d and e are replicated)

Batches, key heads and the query heads of each key head are parallel. So heads can be split after an all-to-all that
gathers the sequence (Jacobs et al., "DeepSpeed-Ulysses"). For positions there are two cases:

- If there are as many keys as queries, both are one factor. Keys and values rotate, and each device merges its results
  for the parts that pass it (Liu et al., "Ring attention"; ``rules.attention_ring``).
- Otherwise queries and keys are two factors. Devices with parts of the keys (a cache) merge their results by the
  log-sum-exps of their scores ("flash-decoding").

Each device computes positions, segments and masks for its own parts. The gradient has the same factors. It sums over
queries, keys and query heads, so devices compute parts of these sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from gshard.comm.collectives import sent_bytes
from gshard.comm.shards import Shards, mask
from gshard.comm.steps import ALL_REDUCE
from gshard.core.mesh import Mesh
from gshard.core.program import itemsize
from gshard.core.rule import REDUCE, Rule, RuleMaker
from gshard.core.split import Split
from gshard.language.attention_primitive import AttentionParams, wide_dtype
from gshard.language.registry import Call, rule
from gshard.rules.attention_ring import Sequences, gradient_on_ring, in_place, on_ring, ring_bytes

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
            return on_ring(shards, dims.sequences(shards.mesh, shards.split), query_atoms, arrays)
        if not key_atoms and not query_atoms:
            return shards.bind(*arrays.values())
        params_of_part, arrays = dims.for_part(shards, arrays)
        if not key_atoms:
            return shards.bind(*arrays.values(), params=params_of_part)
        wide = dataclasses.replace(params_of_part, wide=True)
        out, lse = shards.bind(*arrays.values(), params=wide)
        return _merged(shards, key_atoms, out, lse)

    def sends(mesh: Mesh, split: Split) -> int:
        if dims.together:
            return ring_bytes(dims.sequences(mesh, split), dims.local_shapes(mesh, split), call.in_dtypes, False)
        parts = mesh.count(split.get(dims.s[0], ()))
        out, lse = (math.prod(shape) for shape in dims.local_results(mesh, split))
        size = itemsize(wide_dtype(call.in_dtypes[0]))
        return sum(sent_bytes(ALL_REDUCE, elements * size, parts) for elements in (lse, out + lse))

    flops = dims.pairs * 2 * (dims.features + dims.out_features)
    return make.rule(
        [dims.of[name] for name in names], [dims.out, dims.lse], local=local, sends=sends, flops=flops, products=flops,
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
            return gradient_on_ring(shards, dims.sequences(shards.mesh, shards.split), query_atoms, arrays)
        if not shards.atoms(dims.s[0]) and not query_atoms:
            return shards.bind(*arrays.values())
        params_of_part, arrays = dims.for_part(shards, arrays)
        return shards.bind(*arrays.values(), params=params_of_part)

    def sends(mesh: Mesh, split: Split) -> int:
        return ring_bytes(dims.sequences(mesh, split), dims.local_shapes(mesh, split), call.in_dtypes, True)

    flops = dims.pairs * 2 * (3 * dims.features + 2 * dims.out_features)
    return make.rule(
        [dims.of[name] for name in names], [dims.of[name] for name in "qkv"], local=local,
        sends=sends if dims.together else None, flops=flops, products=flops, masks_itself=True,
    )  # fmt: skip


class _Dims:
    """The factors of the operands and results of attention."""

    def __init__(
        self, make: RuleMaker, params: AttentionParams, shapes: Mapping[str, Sequence[int]], *, gradient: bool
    ) -> None:
        *batch, queries, heads, group, features = shapes["q"]
        keys, out_features = shapes["k"][-3], shapes["v"][-1]
        self._params, self._shapes = params, shapes
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
        params, keys = self._params, self.keys
        if params.positions or not params.by_position or not self.together:
            return keys
        before, after = params.window
        behind = keys // 2 if before is None else min(before, keys // 2)
        ahead = 0 if params.causal else keys // 2 if after is None else min(after, keys // 2)
        return max(1, min(keys, behind + ahead + 1))

    def sequences(self, mesh: Mesh, split: Split) -> Sequences:
        """The positions that devices hold under a split."""
        return Sequences(self._params, self.queries, mesh.count(split.get(self.t[0], ())))

    def local_shapes(self, mesh: Mesh, split: Split) -> dict[str, tuple[int, ...]]:
        """The shapes of one device's parts of the operands."""
        return {name: self._local(dims, self._shapes[name], mesh, split) for name, dims in self.of.items()}

    def local_results(self, mesh: Mesh, split: Split) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of one device's parts of the result and the log-sum-exp."""
        lse = self._shapes["q"][:-1]
        out = (*lse, self.out_features)
        return self._local(self.out, out, mesh, split), self._local(self.lse, lse, mesh, split)

    def _local(self, dims: Any, shape: Sequence[int], mesh: Mesh, split: Split) -> tuple[int, ...]:
        return tuple(
            -(-n // mesh.count(split.get(dim[0], ()))) if dim else n for n, dim in zip(shape, dims, strict=True)
        )

    def for_part(self, shards: Shards, arrays: Mapping[str, Any]) -> tuple[AttentionParams, dict[str, Any]]:
        """One device's parameters and operands, with positions in the whole arrays and without padding."""
        lead = (1,) * len(self._batch)

        def indices(name: str, dim: tuple[int, ...]) -> Any:
            count = arrays[name].shape[len(self._batch)]
            return (shards.offset(dim) + jnp.arange(count)).reshape(*lead, count)

        is_padded = self.keys % shards.mesh.count(shards.atoms(self.s[0])) != 0
        q_at, k_at = indices("q", self.t), indices("k", self.s)
        params, arrays = in_place(self._params, arrays, q_at, k_at, self.keys if is_padded else None)
        names = params.gradient_names if "dout" in arrays else params.names
        return params, {name: arrays[name] for name in names}

    def without_padding(self, shards: Shards, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays with zeros in place of padding that would be added, or multiplied by zero."""
        summed = ("k", "v", *(_BY_QUERY if "dout" in arrays else ()))
        return {name: self._filled(shards, name, x) if name in summed else x for name, x in arrays.items()}

    def _filled(self, shards: Shards, name: str, x: Any) -> Any:
        for d, (dim, n) in enumerate(zip(self.of[name], self._shapes[name], strict=True)):
            atoms = shards.atoms(dim[0]) if dim else ()
            if n % shards.mesh.count(atoms):
                x = mask(x, d, n, atoms, jnp.zeros((), x.dtype))
        return x


def _merged(shards: Shards, atoms: Any, out: Any, lse: Any) -> list[Any]:
    """Merges the results for parts of the keys, on all devices."""
    largest = shards.all_reduce(lse, atoms, "max")
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weight = jnp.exp(lse - largest)[..., None]
    sums = shards.all_reduce(jnp.concatenate([out * weight, weight], axis=-1), atoms, "add")
    weighted, total = sums[..., :-1], sums[..., -1]
    result = weighted / jnp.where(total == 0, 1, total)[..., None]
    return [result.astype(shards.equation.outputs[0].dtype), largest + jnp.log(total)]
