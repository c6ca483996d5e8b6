"""Reads the options with which ``jax.jit`` was called, and adapts gshard to the equations of ``jax.jit``."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import layout as _layout
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax.extend.core import Var


@dataclasses.dataclass(frozen=True, slots=True)
class GivenToJit:
    """The arguments of one call of ``jax.jit``."""

    f: Callable[..., Any]  # the function
    static: tuple[tuple[int, ...], tuple[str, ...]]  # numbers and names of static arguments
    donated: tuple[tuple[int, ...], tuple[str, ...]]  # numbers and names of donated arguments
    in_shardings: Any  # in_shardings, out_shardings: pytree prefixes of shardings; None if the user gave none
    out_shardings: Any
    layouts: tuple[Any, ...]  # the memory layouts in the given shardings (each the layout of a ``Format``)
    keep_unused: bool  # whether XLA receives arguments that nothing reads
    compiler_options: Mapping[str, Any]  # options of XLA
    device: Any  # the device or the backend; None if the user gave none
    resolves: bool  # whether ``None`` among the shardings has a meaning (``pjit``)


def given_to_jit(f: Any) -> GivenToJit | None:
    """The arguments of the ``jax.jit`` call that returned a function; None for any other function.

    For a bound method of a jitted function, argument numbers do not count the bound argument.
    """
    if isinstance(f, types.MethodType):
        options = given_to_jit(f.__func__)
        return None if options is None else _of_method(options, f.__self__)
    info = getattr(f, "_jit_info", None)
    if not isinstance(f, _jax.PjitFunction) or info is None:
        return None
    layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
    return GivenToJit(
        f._fun,
        (tuple(info.static_argnums), tuple(info.static_argnames)),
        (tuple(info.donate_argnums), tuple(info.donate_argnames)),
        _given(info.in_shardings_treedef, info.in_shardings_leaves),
        _given(info.out_shardings_treedef, info.out_shardings_leaves),
        tuple(x for x in layouts if x is not None),
        info.keep_unused,
        dict(info.compiler_options_kvs),
        info.device or info.backend,
        info.use_resource_env,
    )


def _given(tree: Any, leaves: Sequence[Any]) -> Any:
    if all(x is None or isinstance(x, _sharding_impls.UnspecifiedValue) for x in leaves):
        return None
    return jax.tree.unflatten(tree, leaves)


def _of_method(given: GivenToJit, owner: Any) -> GivenToJit:
    f = types.MethodType(given.f, owner)
    bound = next(iter(inspect.signature(given.f).parameters), None)

    def without_first(
        arguments: tuple[tuple[int, ...], tuple[str, ...]],
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        numbers, names = arguments
        return tuple(i - 1 if i > 0 else i for i in numbers if i), tuple(n for n in names if n != bound)

    in_shardings = given.in_shardings
    if isinstance(in_shardings, tuple) and 0 not in given.static[0]:  # there is a sharding for the owner
        in_shardings = in_shardings[1:]
    return dataclasses.replace(
        given, f=f, static=without_first(given.static), donated=without_first(given.donated), in_shardings=in_shardings
    )


def has_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
    """Whether a memory layout is the default layout of arrays of this type."""
    return isinstance(layout, _layout.Layout) and bool(_pxla.is_default_layout(layout, sharding, aval))


def bound_without_shardings(primitive: Any, params: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
    """Binds the equation of a ``jit`` to these arrays, without its shardings and layouts."""
    unspecified = {k: (_sharding_impls.UNSPECIFIED,) * len(params[k]) for k in ("in_shardings", "out_shardings")}
    no_layout = {k: (None,) * len(params[k]) for k in ("in_layouts", "out_layouts")}
    results: list[Any] = primitive.bind(*arrays, **{**params, **unspecified, **no_layout})
    return results


def axes_of_exported(exported: Any) -> dict[str, int] | None:
    """The axes of the mesh for which a function was exported; None if its shardings name no axes."""
    shardings = getattr(exported, "_in_named_shardings", None) or ()
    mesh = next((s.mesh for s in shardings if s is not None and s.mesh.axis_names), None)
    return None if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def arguments_of_calls(traced: Any) -> list[dict[str, int]]:
    """Of each jitted function that a traced function calls, its arguments by name."""
    numbers = {v: i for i, v in enumerate(traced.jaxpr.invars)}
    calls = []
    for e in traced.jaxpr.eqns:
        if e.primitive.name not in ("jit", "pjit"):
            continue
        names = e.params["jaxpr"].jaxpr.debug_info.arg_names or ()
        passed = [numbers.get(v) if isinstance(v, Var) else None for v in e.invars]
        pairs = list(zip(names, passed, strict=False)) if len(names) == len(passed) else []
        calls.append({name: i for name, i in pairs if i is not None and list(names).count(name) == 1})
    return calls
