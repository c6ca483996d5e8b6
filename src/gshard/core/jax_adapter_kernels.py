"""The part of the JAX adapter that ``jax.experimental.custom_partitioning`` needs: types and shardings of XLA's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import custom_partitioning_sharding_rule as _sharding_rules
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir as _ir
from jax.sharding import NamedSharding, PartitionSpec


def ir_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR types of arrays: what JAX gives to a sharding rule that is a function."""
    with _mlir.make_ir_context(), _ir.Location.unknown():
        return [_ir.RankedTensorType.get(a.shape, _mlir.dtype_to_ir_type(a.dtype)) for a in avals]


def as_gspmd(sharding: NamedSharding, ndim: int, devices: Sequence[Any]) -> jax.sharding.Sharding:
    """A sharding without names of axes, as XLA has it: what functions get that want none of them decoded."""
    return _sharding_impls.GSPMDSharding(devices, sharding._to_xla_hlo_sharding(ndim))


def spec_on(mesh: Any, sharding: jax.sharding.Sharding, ndim: int) -> PartitionSpec:
    """A sharding without names of axes as a ``PartitionSpec`` over the axes of a mesh of the same devices."""
    return _sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]


def read_sharding_rule(text: str, **details: Any) -> Any:
    """A sharding rule of ``custom_partitioning`` as text, as an ``SdyShardingRule``."""
    return _sharding_rules.str_to_sdy_sharding_rule(text, **details)
