"""Function again: how a function from ``jax.jit``, or from the jit of a framework, is compiled once more.

The arguments of the compiled program are not those of the function: a framework takes modules apart, and ``jax.jit``
leaves out what nothing reads. Both are matched by their names. Arrays are kept as shapes, so that an explanation keeps
no array of the user's in memory. ``equinox.filter_jit`` takes arrays and no shapes, so functions of frameworks get the
user's arrays as long as these exist.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from gshard.api.compiled_programs import is_from_framework, is_from_jax_jit, lowered_by_jax, on_first_devices
from gshard.api.jit import jit
from gshard.core.deadline import OutOfTime, until
from gshard.core.errors import GShardError
from gshard.core.jax_adapter import is_transposed, user_place
from gshard.core.memory_kinds import in_memory
from gshard.core.mesh import Mesh
from gshard.core.paths import leaf_names
from gshard.planning.added_marks import spec_of_cut
from gshard.xla_programs.compiled_explanation import CompiledAgain, CompiledExplanation
from gshard.xla_programs.tried_shardings import Specs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_bound_arguments(f: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Arguments]:
    """A jitted function, and all of its arguments, of a ``functools.partial`` or a bound method of it.

    Others are returned as they are given.
    """
    if all(hasattr(f, name) for name in ("func", "args", "keywords")):  # also Equinox's own
        inner, given = with_bound_arguments(f.func, (*f.args, *args), {**f.keywords, **kwargs})
        return (inner, given) if is_from_jax_jit(inner) else (f, (args, dict(kwargs)))
    if hasattr(f, "__self__") and is_from_jax_jit(function := getattr(f, "__func__", None)):
        return function, ((f.__self__, *args), dict(kwargs))
    return f, (args, dict(kwargs))


def compiled_again(
    found: CompiledExplanation, f: Any, given: Arguments, read: Callable[[Any], CompiledExplanation]
) -> CompiledAgain:
    """What compiles an explained function once more."""
    leaves, tree = jax.tree.flatten(on_first_devices(given))
    shapes = [_shape_of(leaf) for leaf in leaves]
    numbers = _numbers(found, f, given, shapes)
    is_of_framework = is_from_framework(f)
    alive = [weakref.ref(leaf) if is_of_framework and isinstance(leaf, jax.Array) else None for leaf in leaves]
    del leaves, given

    def arguments(specs: Specs) -> Arguments:
        changed = {numbers[i]: spec for i, spec in specs.items()}
        made = [_with_spec(shape, changed[i]) if i in changed else shape for i, shape in enumerate(shapes)]
        arrays = [None if reference is None else reference() for reference in alive]
        made = [
            leaf if x is None else x if i not in changed else jax.device_put(x, leaf.sharding)
            for i, (x, leaf) in enumerate(zip(arrays, made, strict=True))
        ]
        args, kwargs = jax.tree.unflatten(tree, made)
        return args, kwargs

    def lower(specs: Specs) -> Any:
        args, kwargs = arguments(specs)
        return lowered_by_jax(f, args, kwargs)

    def planned(seconds: float) -> dict[tuple[str, int, tuple[int, ...]], list[Any]]:
        return {} if is_of_framework else _planned(f, arguments({}), found.mesh, seconds)

    return CompiledAgain(tuple(None if n is None else shapes[n] for n in numbers), lower, read, planned)


def _shape_of(leaf: Any) -> Any:
    """An array as a shape with its sharding; what is no array itself."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    is_placed = getattr(leaf, "committed", True)
    sharding = leaf.sharding if is_placed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=_is_weak(leaf))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))  # keys have no such type


def _with_spec(leaf: Any, spec: Any) -> Any:
    sharding = in_memory(NamedSharding(leaf.sharding.mesh, spec), leaf.sharding.memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=_is_weak(leaf))


def _numbers(found: CompiledExplanation, f: Any, given: Arguments, shapes: list[Any]) -> list[int | None]:
    """For each argument of the program the number of its leaf; None if that is not known."""
    arguments = found.program.arguments
    if not is_from_framework(f) and len(arguments) == len(shapes):
        return list(range(len(shapes)))
    names = leaf_names(f, given)
    number_of = {name: i for i, name in enumerate(names) if names.count(name) == 1}
    return [number_of.get(argument.name) for argument in arguments]


def _planned(f: Any, given: Arguments, mesh: Mesh, seconds: float) -> dict[tuple[str, int, tuple[int, ...]], list[Any]]:
    """The shardings that gshard plans for the values of a function; none if it cannot plan it in so many seconds."""
    args, kwargs = given
    try:
        with until(time.monotonic() + seconds):
            plan = jit(f, mesh=mesh.user_jax_mesh).lower(*args, **kwargs).plan
    except (GShardError, OutOfTime):
        return {}
    found: dict[tuple[str, int, tuple[int, ...]], list[Any]] = {}
    for e in plan.program.block.walk():
        place = None if is_transposed(e.source_info) else user_place(e.source_info)
        for v in e.outputs if place is not None else ():
            spec = spec_of_cut(plan.sharding(v), plan.mesh)
            same = found.setdefault((*place, v.shape), []) if place is not None and spec is not None else []
            if spec is not None and spec not in same:
                same.append(spec)
    return found
