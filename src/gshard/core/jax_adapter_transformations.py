"""Registers how JAX's transformations treat a primitive that holds a jaxpr, and lowers values of ``hijax`` types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax.experimental import jet
from jax.extend.core import jaxpr_as_fun

from gshard.core.jax_adapter import closed, shapes_of, sub_jaxprs
from gshard.core.jax_adapter_dispatch import weakly_cached


def mapped_by(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers the vmap rule of a primitive: ``rule(mapped axis, operands, dimensions, **parameters)``."""
    _batching.fancy_primitive_batchers[primitive] = rule


def mapped(jaxpr: Any, axis: Any, dims: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A closed jaxpr mapped over the axis that a vmap rule receives, and the mapped dimensions of the results."""
    return _batching.batch_jaxpr2(jaxpr, axis, tuple(dims))  # type: ignore[no-any-return]


def expanded_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """Registers how JAX expands the high-level operators in the jaxpr of a primitive.

    Newer JAX keeps some operators (``SearchSorted``) whole until all transformations are done. Then it binds a
    primitive that holds such an operator through ``rebind(operands, expanded jaxpr, parameters)``.
    """

    def expand(*operands: Any, jaxpr: Any, **parameters: Any) -> list[Any]:
        return rebind(operands, _partial_eval.lower_jaxpr2(jaxpr), parameters)

    primitive.to_lojax = expand


@weakly_cached
def _of_series(jaxpr: Any, tree: Any, avals: tuple[Any, ...]) -> tuple[Any, Any]:
    def f(*flat: Any) -> Any:
        primals, series = jax.tree.unflatten(tree, flat)
        return jet.jet(jaxpr_as_fun(jaxpr), primals, series, factorial_scaled=False)

    made, shapes = jax.make_jaxpr(f, return_shape=True)(*shapes_of(avals))
    return made, jax.tree.structure(shapes)


def interpreted_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """Registers how ``jet`` and ``sparsify`` bind a primitive with a jaxpr: ``rebind(operands, jaxpr, parameters)``."""

    def in_series(primals: Any, series: Any, *, jaxpr: Any, **parameters: Any) -> Any:
        flat, tree = jax.tree.flatten((tuple(primals), tuple(series)))
        made, out_tree = _of_series(jaxpr, tree, tuple(map(jax.typeof, flat)))
        return jax.tree.unflatten(out_tree, rebind(flat, made, parameters))

    def of_sparse(env: Any, *values: Any, jaxpr: Any, **parameters: Any) -> Any:
        made, tree = sparsify._sparsify_jaxpr(env, jaxpr, *values)
        flat = jax.tree.leaves(sparsify.spvalues_to_arrays(env, values))
        return sparsify.arrays_to_spvalues(env, jax.tree.unflatten(tree, rebind(flat, made, parameters)))

    rules: dict[Any, Any] = jet.jet_rules
    rules[primitive] = in_series
    sparsify: Any = sys.modules.get("jax.experimental.sparse.transform")  # its import takes long
    if sparsify is not None:
        sparsify.sparse_rules_bcoo[primitive] = sparsify.sparse_rules_bcsr[primitive] = of_sparse


def rematerialised_by(primitive: Any) -> None:
    """Registers how the policy of a ``jax.checkpoint`` around a primitive with a jaxpr selects values inside of it."""

    def rule(saveable: Any, unknown: Any, instantiated: Any, e: Any) -> tuple[Any, ...]:
        if any(unknown):  # a linear function of tangents
            return None, e, [True] * len(e.outvars), [True] * len(e.outvars), needed(e, instantiated)
        known, staged, *rest = _partial_eval.closed_call_partial_eval_custom_rule(
            "jaxpr", lambda *arguments: arguments[-2:], saveable, unknown, instantiated, e
        )
        if len(known.outvars) == len(staged.outvars) == len(e.outvars) and not e.effects:  # it saves nothing
            return e, e, *rest[:2], needed(e, instantiated)
        return known, staged if staged.outvars else None, *rest

    def needed(e: Any, instantiated: Any) -> list[Any]:
        return [x for x, there in zip(e.invars, instantiated, strict=True) if isinstance(x, _core.Var) and not there]

    _partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def arrays_alone(jaxpr: Any) -> Any:
    """A closed jaxpr in which the arrays that a value of a user's type (``hijax``) consists of take its place."""
    body, _ = closed(jaxpr)
    return _partial_eval.lower_jaxpr2(jaxpr) if body.is_high and _has_user_types(body) else jaxpr


def _has_user_types(body: Any) -> bool:
    values = [*body.constvars, *(v for e in body.eqns for v in e.outvars)]
    inner = (closed(j)[0] for e in body.eqns for j in sub_jaxprs(e.params))
    return any(v.aval.is_high for v in values) or any(map(_has_user_types, inner))


_CHECKS_HAVE_A_CONTEXT = hasattr(_checkify, "CheckifyContext")  # newer JAX


def checked_by(primitive: Any, rebind: Callable[..., list[Any]]) -> None:
    """Registers how ``checkify`` binds a primitive with a jaxpr: ``rebind(operands, checked jaxpr, parameters)``."""

    def check(*arguments: Any, jaxpr: Any, **parameters: Any) -> tuple[Any, Any]:
        context = arguments[: int(_CHECKS_HAVE_A_CONTEXT)]
        error, enabled, *operands = arguments[len(context) :]
        errors, tree = jax.tree.flatten(error)
        errors_and_operands = [*errors, *operands]
        avals = map(jax.typeof, errors_and_operands)
        checked, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(*context, jaxpr, enabled, tree, *avals)
        results = rebind(errors_and_operands, checked, parameters)
        return jax.tree.unflatten(out_tree, results)  # type: ignore[no-any-return]

    _checkify.error_checks[primitive] = check
