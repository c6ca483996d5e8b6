"""Defines the primitive of ``gshard.stage``: an identity on several arrays.

Inside of a call of a stage it marks the results, with the schedule. Its derivative is itself, so the body of the call
in a derivative has it as well: ``tracing.stage_loops`` finds these calls by it.

Around the call it has no schedule. If one of the arrays has a tangent or a cotangent, all have one, which may be zero.
So the calls of a chain have equal derivatives. Without this, the first call would differ if the user takes no
derivative by its input, and the last call if nothing reads one of its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.pipeline_schedule import Schedule

STAGE = "gshard_stage"  # the name of the function that is called

stage_p = Primitive(STAGE)
stage_p.multiple_results = True


@stage_p.def_impl
@stage_p.def_abstract_eval
def _same(*arrays: Any, schedule: Schedule | None) -> list[Any]:
    return list(arrays)


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, schedule: Schedule | None) -> tuple[Any, Any]:
    results = stage_p.bind(*primals, schedule=schedule)
    if all(type(t) is ad.Zero for t in tangents):
        return results, list(tangents)
    return results, stage_p.bind(*map(ad.instantiate_zeros, tangents), schedule=schedule)


def _transposed(cotangents: Sequence[Any], *arrays: Any, schedule: Schedule | None) -> list[Any]:
    given = stage_p.bind(*map(ad.instantiate_zeros, cotangents), schedule=schedule)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in zip(given, arrays, strict=True)]


def _batched(args: Sequence[Any], dims: Sequence[Any], *, schedule: Schedule | None) -> tuple[list[Any], Sequence[Any]]:
    return stage_p.bind(*args, schedule=schedule), dims


ad.primitive_jvps[stage_p] = _derivative
ad.primitive_transposes[stage_p] = _transposed
batching.primitive_batchers[stage_p] = _batched
mlir.register_lowering(stage_p, lambda ctx, *arrays, schedule: arrays)
