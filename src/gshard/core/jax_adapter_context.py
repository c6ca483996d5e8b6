"""Adapts gshard to JAX's contexts: compute types and XLA metadata of equations, and 64-bit types while it traces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_metadata_lib as _xla_metadata_lib
from jax._src.compute_on import compute_on_p as compute_on_p
from jax._src.core import AbstractToken as AbstractToken

from gshard.core.jax_adapter import closed, mesh_of_context, no_mesh_set, sub_jaxprs
from gshard.core.planning_tables import tabulated
from gshard.core.program import NO_CONTEXT, Context

# The settings of JAX that form a context.
_METADATA, _COMPUTE_ON = _config.xla_metadata_context_manager, _config.compute_on_context_manager
_MESH = getattr(_mesh, "device_context", None) or _config.device_context  # newer JAX has it in another module


def context_of(eqn: Any) -> Context:
    """The context of an equation of a jaxpr."""
    compute_type, metadata = eqn.ctx.compute_type, eqn.ctx.xla_metadata
    if compute_type is None and not metadata:
        return NO_CONTEXT
    return Context(compute_type, tuple(sorted((metadata or {}).items())))


def context_of_body(eqn: Any) -> Context:
    """The context that a call gives its body; the context of the call itself if its primitive sets none."""
    name, params = eqn.primitive.name, eqn.params
    if name == "compute_on" and all(space == jax.memory.Space.Device for space in params["out_memory_spaces"]):
        return Context(params["compute_type"]).inside(context_of(eqn))
    if name == "xla_metadata_call":
        parameters_of_metadata = {k: v for k, v in params.items() if k not in ("jaxpr", "xla_metadata", "ad_metadata")}
        metadata = params.get("xla_metadata", tuple(sorted(parameters_of_metadata.items())))
        return Context(metadata=tuple(metadata)).inside(context_of(eqn))
    return context_of(eqn)


class in_context(contextlib.ContextDecorator):
    """A context manager and decorator: equations traced inside have exactly this context."""

    def __init__(self, context: Context):
        self._context = context
        self._before: tuple[Any, Any] | None = None

    def _recreate_cm(self) -> in_context:
        return in_context(self._context)  # a decorated function may call itself

    def __enter__(self) -> None:
        context = self._context
        if not context and _METADATA.value is None and _COMPUTE_ON.value is None:
            return  # the usual case; JAX's caches of traces stay valid
        metadata = _xla_metadata_lib.XlaMetadata(dict(context.metadata)) if context.metadata else None
        self._before = _METADATA.swap_local(metadata), _COMPUTE_ON.swap_local(context.compute_type)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            _METADATA.set_local(self._before[0])
            _COMPUTE_ON.set_local(self._before[1])


def with_settings_of(eqn: Any) -> contextlib.AbstractContextManager[None]:
    """A context manager: equations traced inside have the settings of an equation, and no context.

    ``jax.threefry_partitionable`` changes the random bits of a key.
    """
    if eqn.ctx.threefry_partitionable == jax.threefry_partitionable.value:
        return in_context(NO_CONTEXT)
    return _with_random_bits(eqn.ctx.threefry_partitionable)


@contextlib.contextmanager
def _with_random_bits(partitionable: bool) -> Iterator[None]:
    with jax.threefry_partitionable(partitionable), in_context(NO_CONTEXT):
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting in an equation's context."""

    name: str  # the name of the setting in JAX
    value: Any  # its value in this context
    default: Any  # its value if nothing is set


@tabulated(256)
def settings_of(context: Any) -> tuple[Setting, ...]:
    """The settings of an equation's context (``eqn.ctx``) that differ from their defaults."""
    settings = (Setting(name, getattr(context, name, None), default) for name, default in _defaults())
    return tuple(s for s in settings if s.value is not s.default and s.value != s.default)


@tabulated(1)
def _defaults() -> tuple[tuple[str, Any], ...]:
    with no_mesh_set(), in_context(NO_CONTEXT):
        empty = _core.JaxprEqnContext()
    return tuple((name, getattr(empty, name, None)) for name in names_of_settings())


def names_of_settings() -> tuple[str, ...]:
    """The names of the settings in an equation's context, in this version of JAX."""
    return tuple(name for name in _core.JaxprEqnContext.__slots__ if not name.startswith("_"))


@contextlib.contextmanager
def mesh_set(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Iterator[None]:
    """Sets a mesh like ``jax.set_mesh``, but also while a function is traced, and also a mesh without devices."""
    previous = _MESH.swap_local(mesh)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh):
            yield
    finally:
        _MESH.set_local(previous)


_NEEDS_A_MESH = (
    "requires a non-empty mesh in context if you are passing",
    "Please set a mesh via `jax.set_mesh` if a PartitionSpec",
    "Using PartitionSpec when you are not under a mesh context",
    "The context mesh cannot be empty",
)


def with_mesh_for_specs(trace: Callable[[], Any], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None) -> Any:
    """Traces a function, and traces it again with a mesh set if JAX refuses a ``PartitionSpec`` because none is set.

        gshard.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")) * 2, mesh=8)

    JAX resolves a bare ``PartitionSpec`` (in ``with_sharding_constraint``, ``jax.device_put``, the shardings of a
    nested ``jax.jit``), and a ``jax.shard_map`` without ``mesh=``, against the mesh that is set, and raises if none is.
    Functions that need no mesh are traced without one, because JAX refuses a ``shard_map`` over axes that the set mesh
    does not have.
    """
    try:
        return trace()
    except (RuntimeError, ValueError) as error:
        if mesh is None or not any(text in str(error) for text in _NEEDS_A_MESH) or mesh_of_context() is not None:
            raise
    with mesh_set(mesh):
        return trace()


def is_unspecified(value: Any) -> bool:
    """Whether a value is JAX's placeholder for a sharding that the user has not given."""
    return isinstance(value, _sharding_impls.UnspecifiedValue)


# Enables JAX's 64-bit types while gshard traces a program that contains 64-bit values.

_WIDE = frozenset(("float64", "int64", "uint64", "complex128"))


@contextlib.contextmanager
def wide_enough_for(dtypes: Iterable[Any]) -> Iterator[None]:
    """Enables 64-bit types inside if any of these dtypes has 64 bits."""
    wide = any(getattr(dtype, "itemsize", 0) >= 8 and str(dtype) in _WIDE for dtype in dtypes)
    if not wide or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        yield
        return
    with jax.enable_x64(True):
        yield


def dtypes_in(jaxpr: Any) -> Iterator[Any]:
    """The dtypes of all results of equations in a (closed) jaxpr and its bodies."""
    body, _ = closed(jaxpr)
    for e in body.eqns:
        yield from (getattr(v.aval, "dtype", None) for v in e.outvars)
        for inner in sub_jaxprs(e.params):
            yield from dtypes_in(inner)
