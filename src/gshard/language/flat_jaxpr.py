"""Jaxprs as one list of equations: calls are opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import bind, called_jaxpr, closed, evaluate, jaxpr_without_dead_code, shapes_of, user_line
from gshard.language.ledger import RESULT_SHARDINGS
from gshard.language.mark_primitive import name_p
from gshard.language.per_device import CONSTRAINTS
from gshard.language.traits import traits_of


def flat(jaxpr: Any) -> Any:
    """A closed jaxpr with the equations of calls in place of them, and without names of dimensions.

    The bodies of scans are flat too, and have no equations that no result needs.
    """
    body, consts = closed(jaxpr)

    def run(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        called = eqn.params["kernel"].plain_of(eqn) if eqn.primitive.name == "gshard_kernel" else called_jaxpr(eqn)
        if eqn.primitive is name_p:
            return operands
        if called is None:
            _refuse_shardings(eqn)
            params = {k: None if k in RESULT_SHARDINGS else _as_python(v) for k, v in eqn.params.items()}
            if (normal := traits_of(eqn.primitive.name).normal) is not None:
                params |= normal(params, eqn.outvars[0].aval.shape)
            if eqn.primitive.name == "scan":
                params["jaxpr"] = flat(jaxpr_without_dead_code(params["jaxpr"]))
            return bind(eqn.primitive, params, operands)
        inner, own = closed(called)
        return evaluate(inner, own, operands, run)

    return jax.make_jaxpr(lambda *arrays: evaluate(body, consts, arrays, run))(*shapes_of(jaxpr.in_avals))


def _as_python(value: Any) -> Any:
    """A parameter with Python's integers in place of NumPy's, so that equal parameters have equal types."""
    if isinstance(value, np.integer):
        return int(value)
    return tuple(map(_as_python, value)) if type(value) is tuple else value


def _refuse_shardings(eqn: Any) -> None:
    meshes = [mesh for key in RESULT_SHARDINGS if (mesh := getattr(eqn.params.get(key), "mesh", None)) is not None]
    if eqn.primitive.name in CONSTRAINTS or any(not mesh.empty for mesh in meshes):
        raise ShardingError(
            "the plain function of a kernel cannot say how arrays are sharded.",
            user_line(eqn.source_info),
            eqn.primitive.name,
            "Mark the arguments and results of the kernel instead.",
        )
