"""Adapts gshard to kernels of others: ``custom_partitioning``, Pallas, and JAX's fused attention for TPU."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core as _core
from jax._src import custom_partitioning_sharding_rule as _sharding_rules
from jax.extend.core import Literal
from jax.interpreters import mlir as _mlir
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import closed, of_no_mesh
from gshard.core.jax_adapter_retracing import AsTracedHere


def ir_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR types of arrays, which JAX passes to a sharding rule that is a function."""
    with _mlir.make_ir_context(), _mlir.ir.Location.unknown():
        return [_mlir.ir.RankedTensorType.get(a.shape, _mlir.dtype_to_ir_type(a.dtype)) for a in avals]


def read_sharding_rule(text: str, **details: Any) -> Any:
    """Parses the text of a sharding rule of ``custom_partitioning`` to an ``SdyShardingRule``."""
    return _sharding_rules.str_to_sdy_sharding_rule(text, **details)


def kernel_as_traced_here(value: Any, atoms_of: Mapping[str, tuple[str, ...]]) -> Any:
    """A parameter of a kernel, such as its jaxpr or its grid, with all types under the current mesh.

    The result names the atoms of the mesh where the kernel names an axis of the user's mesh.

    In interpret mode JAX runs a kernel's equations inside ``shard_map``. It then gives the results of branches and
    loops the types of their bodies, which must have the current mesh.
    """
    return _KernelAsTracedHere(jax.sharding.get_abstract_mesh(), atoms_of).parameter(value)


class _KernelAsTracedHere(AsTracedHere):
    """Also converts the types of variables, types among the parameters, and names of axes."""

    def __init__(self, mesh: Any, atoms_of: Mapping[str, tuple[str, ...]]):
        super().__init__(mesh)
        self._variables: dict[Any, Any] = {}
        self._atoms_of = atoms_of

    def jaxpr(self, jaxpr: Any) -> Any:
        body, consts = closed(jaxpr)
        if body not in self._bodies:
            variables = {k: list(map(self._read, getattr(body, k))) for k in ("constvars", "invars", "outvars")}
            eqns = [converted for e in body.eqns for converted in self._equations(e)]
            effects = self._effects(body.effects)
            self._bodies[body] = body.replace(**variables, eqns=eqns, effects=effects)
        new_body = self._bodies[body]
        if body is jaxpr:
            return new_body
        return jaxpr.replace(jaxpr=new_body, consts=[of_no_mesh(x) if isinstance(x, jax.Array) else x for x in consts])

    def _equations(self, e: Any) -> Sequence[Any]:
        """The equations that replace one: ``axis_index`` of an axis becomes ``axis_index`` of its atoms."""
        if e.primitive.name != "axis_index" or e.params["axis_name"] not in self._atoms_of:
            return [self.equation(e)]
        atoms = self._atoms_of[e.params["axis_name"]]
        (result,) = map(self._read, e.outvars)
        any_axis = next(iter(self._mesh.axis_names))
        index, _ = closed(jax.make_jaxpr(lambda: lax.axis_index(atoms) if atoms else lax.axis_index(any_axis) * 0)())
        return [*index.eqns[:-1], index.eqns[-1].replace(outvars=[result])]

    def equation(self, e: Any) -> Any:
        """The equation under the mesh, with names of atoms."""
        # A sharding in the parameters names the user's axes. It has no meaning in a kernel.
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in e.params.items()}
        for key in {"axes", "axis_name"} & params.keys():
            params[key] = self._axes(params[key])
        effects = self._effects(e.effects)
        return super().equation(e.replace(params=params, effects=effects, outvars=list(map(self._read, e.outvars))))

    def _axes(self, axes: Any) -> Any:
        """The atoms for the axis names of a reduction or a collective. Numbers of dimensions stay."""
        entries = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        if not any(isinstance(entry, str) for entry in entries):
            return axes
        converted: list[Any] = []
        for entry in entries:
            converted.extend(self._atoms_of.get(entry, (entry,)) if isinstance(entry, str) else (entry,))
        return tuple(converted)

    def _effects(self, effects: Any) -> Any:
        named = {e for e in effects if isinstance(e, _core.NamedAxisEffect)}
        atoms = {a for e in named for a in self._atoms_of.get(str(e.name), (str(e.name),))}
        return type(effects)((*(e for e in effects if e not in named), *map(_core.NamedAxisEffect, sorted(atoms))))

    def parameter(self, value: Any) -> Any:
        if isinstance(value, jax.core.AbstractValue):
            return self._type(value)
        if isinstance(value, jax.sharding.AbstractMesh):
            return value if value.empty else self._mesh
        if isinstance(value, NamedSharding):
            unchanged = value.mesh.empty or value.mesh == self._mesh
            return value if unchanged else NamedSharding(self._mesh, PartitionSpec(*(None,) * len(value.spec)))
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return super().parameter(value)
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        converted = {name: self.parameter(x) for name, x in fields.items()}
        changed = {name: x for name, x in converted.items() if x is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value

    def _read(self, v: Any) -> Any:
        if isinstance(v, Literal):
            return super()._read(v)
        if v not in self._variables:
            self._variables[v] = v
            aval = self._type(v.aval)
            if aval is not v.aval:
                self._variables[v] = copy.copy(v)
                self._variables[v].aval = aval
        return self._variables[v]

    def _type(self, aval: Any) -> Any:
        if hasattr(aval, "inner_aval"):
            inner = self._type(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        if not isinstance(aval, jax.core.ShapedArray) or aval.sharding.mesh == self._mesh or aval.sharding.mesh.empty:
            return aval
        replicated = None if self._mesh.empty else NamedSharding(self._mesh, PartitionSpec(*(None,) * len(aval.shape)))
        return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=replicated)


# Adapts gshard to JAX's fused attention for TPU (``jax.experimental.pallas.ops.tpu.flash_attention``).

_LANES = 128  # positions: blocks are multiples of it
_LARGEST = 512  # positions: the largest block whose arrays fit the vector memory beside each other


def _kernels() -> Any:
    """JAX's module, imported when a program for TPU is lowered: Pallas takes half a second to import."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")


def tpu_refusal(q: Any, k: Any, v: Any) -> str:
    """Why the kernels for TPU do not accept arrays of these shapes and dtypes; empty if they do."""
    features, out = q.shape[-1], v.shape[-1]
    if features != out:
        return f"{features} features of queries and {out} of values"
    if features > _LANES and features % _LANES:
        return f"{features} features"
    if any(n % _LANES or not n for n in (q.shape[-4], k.shape[-3])):
        return f"{q.shape[-4]} queries and {k.shape[-3]} keys: no multiples of {_LANES}"
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in (q, k, v)):
        return f"arrays of {q.dtype}, {k.dtype} and {v.dtype}"
    return ""


def tpu_attention(q: Any, k: Any, v: Any, segments: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """The result, in the dtype of the queries, and the log-sum-exp in float32."""
    q_block, k_block = _block(q.shape[-4]), _block(k.shape[-3])
    heads = _Heads(q.shape[:-4], *q.shape[-3:-1])
    kernels = _kernels()
    out, total, most = kernels._flash_attention_impl(
        heads.of_queries(q), heads.of_keys(k), heads.of_keys(v), None, heads.segment_ids(segments), True, causal, scale,
        1, q_block, k_block, k_block, False,
    )  # fmt: skip
    out, lse = heads.as_queries(out), heads.as_queries(most + jnp.log(total))
    if segments is not None:
        sees = lse > kernels.DEFAULT_MASK_VALUE / 2  # the score of a key that a query does not see is less
        out, lse = jnp.where(sees[..., None], out, 0), jnp.where(sees, lse, -jnp.inf)
    return out, lse


def tpu_attention_gradient(
    q: Any, k: Any, v: Any, lse: Any, delta: Any, dout: Any, segments: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, in the dtypes of these."""
    q_block, k_block = _block(q.shape[-4]), _block(k.shape[-3])
    heads = _Heads(q.shape[:-4], *q.shape[-3:-1])
    kernels = _kernels()
    most = heads.of_queries(jnp.where(lse == -jnp.inf, 0, lse).astype(jnp.float32))
    operands = (
        heads.of_queries(q), heads.of_keys(k), heads.of_keys(v), None, heads.segment_ids(segments),
        jnp.ones_like(most), most, heads.of_queries(dout), heads.of_queries(delta.astype(jnp.float32)),
    )  # fmt: skip
    static: dict[str, Any] = {"sm_scale": scale, "causal": causal, "mask_value": kernels.DEFAULT_MASK_VALUE}
    dk, dv = kernels._flash_attention_bwd_dkv(
        *operands, block_q_major=q_block, block_q=q_block, block_k_major=k_block, block_k=k_block, **static
    )
    dq, _ = kernels._flash_attention_bwd_dq(
        *operands, block_q_major=q_block, block_k_major=k_block, block_k=k_block, debug=False, **static
    )
    return heads.as_queries(dq), heads.as_keys(dk), heads.as_keys(dv)


def _block(count: int) -> int:
    """The number of positions in a block: the largest power of two that divides the count."""
    return min(count & -count, _LARGEST)


@dataclasses.dataclass(frozen=True, slots=True)
class _Heads:
    """Moves arrays between the dimensions of gshard and those of the kernels."""

    batch: tuple[int, ...]  # the sizes of the batch dimensions
    keys: int  # the number of key heads
    group: int  # the number of query heads of each key head

    def of_queries(self, x: Any) -> Any:
        """[*batch, T, K, G, ...] as [batch, K * G, T, ...]."""
        first = len(self.batch)
        whole = x.reshape(math.prod(self.batch), x.shape[first], self.keys * self.group, *x.shape[first + 3 :])
        return jnp.swapaxes(whole, 1, 2)

    def as_queries(self, x: Any) -> Any:
        """The inverse of ``of_queries``."""
        x = jnp.swapaxes(x, 1, 2)
        return x.reshape(*self.batch, x.shape[1], self.keys, self.group, *x.shape[3:])

    def of_keys(self, x: Any) -> Any:
        """[*batch, S, K, D] as [batch, K * G, S, D]: a head for each query head."""
        whole = x.reshape(math.prod(self.batch), *x.shape[len(self.batch) :])
        return jnp.repeat(jnp.swapaxes(whole, 1, 2), self.group, axis=1)

    def as_keys(self, x: Any) -> Any:
        """The sums of [batch, K * G, S, D] over the query heads of each key head, as [*batch, S, K, D]."""
        grouped = x.reshape(x.shape[0], self.keys, self.group, *x.shape[2:])
        sums = jnp.sum(grouped, axis=2, dtype=jnp.float32).astype(x.dtype) if self.group > 1 else grouped[:, :, 0]
        return jnp.swapaxes(sums, 1, 2).reshape(*self.batch, x.shape[2], self.keys, x.shape[3])

    def segment_ids(self, segments: Any) -> Any:
        """Segments of queries and keys, [*batch or 1, position], as the kernels take them."""
        if segments is None:
            return None
        count = math.prod(self.batch)
        whole = (jnp.broadcast_to(x, (*self.batch, x.shape[-1])).reshape(count, -1) for x in segments)
        return _kernels().SegmentIds(*whole)
