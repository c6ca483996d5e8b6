"""Operands: how the arguments of a partitioned function are split where it is called inside ``jax.jit``.

Placed arguments of ``jax.jit`` have no sharding while the function is traced, unless their mesh has axes of type
Explicit. While it is lowered they have; so a call of a partitioned function is planned then, for operands as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gshard.api.target import Target
from gshard.core.jax_adapter_lowering import LoweredSharding, sharding_of_lowered
from gshard.core.mark import Mark
from gshard.tracing.expand import mark_of_type


def marks_of_operands(ctx: Any, operands: Sequence[Any], target: Target) -> tuple[Mark | None, ...] | None:
    """The marks that the operands of a call come with, while it is lowered; None if they do not count.

    Raises:
        Unknown: how one of them is split is not to be seen before XLA partitions the program.

    Args:
        ctx: the context of the rule that lowers it.
        operands: values of the program that is made.
        target: what the function is partitioned for.
    """
    if not target.takes_arguments_as_marks or target.mesh.devices is None:
        return None
    return tuple(_mark(ctx, aval, x, target) for aval, x in zip(ctx.avals_in, operands, strict=True))


def _mark(ctx: Any, aval: Any, operand: Any, target: Target) -> Mark | None:
    typed = mark_of_type(getattr(aval, "sharding", None), len(aval.shape))
    if typed is not None:
        return typed
    found = sharding_of_lowered(ctx, operand)
    return None if found is None else _mark_of(found, len(aval.shape), target)


def _mark_of(found: LoweredSharding, ndim: int, target: Target) -> Mark | None:
    assert target.mesh.devices is not None
    spec = tuple(axes or None for axes in found.dims[:ndim])  # a random key is numbers along more dimensions
    devices = tuple(target.mesh.devices[i] for i in found.device_ids)
    return Mark("spec", spec=spec, axes=found.axes, devices=devices)
