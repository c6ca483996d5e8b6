"""Adapts gshard to JAX's lowering: leaves an equation to XLA's partitioner, and reads the meshes of a program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import config as _config
from jax._src.lib.mlir.dialects import sdy
from jax._src.sharding_impls import ShardingContext
from jax._src.xla_bridge import expand_platform_alias
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir as _mlir
from jax.interpreters.mlir import ir


def branches_on(devices: Sequence[Any], platforms: Sequence[Sequence[str] | None]) -> list[int]:
    """The branches of a ``lax.platform_dependent`` that run on these devices. None names all other platforms."""
    first = [
        next(i for i, names in enumerate((*platforms, None)) if names is None or p in names)
        for p in expand_platform_alias(devices[0].platform)
    ]
    return sorted({i for i in first if i < len(platforms)})


def has_devices(ctx: Any, count: int) -> bool:
    """Whether JAX lowers a program that XLA will partition for this number of devices, not one to export."""
    axis_context = ctx.module_context.axis_context
    partitioned = isinstance(axis_context, ShardingContext) and axis_context.num_devices == count
    return partitioned and not ctx.module_context.lowering_parameters.for_export


def lowered_with_devices(ctx: Any, devices: Sequence[Any], f: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Lowers a function in place of an equation. The function contains an operator whose program XLA requests later."""
    module = ctx.module_context
    keepalives = _Keepalives()
    axis_context = module.axis_context
    if axis_context.device_assignment is None:
        axis_context = dataclasses.replace(axis_context, device_assignment=tuple(devices))
    new_module = module.replace(axis_context=axis_context, keepalives=keepalives.objects)
    new_ctx = ctx.replace(module_context=new_module)
    module.add_keepalive(keepalives)
    return _mlir.lower_fun(f, multiple_results=True)(new_ctx, *operands)


class _Keepalives:
    """Holds objects that must live as long as a compiled program. A serialized program does not need them."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def __reduce__(self) -> Any:
        return _Keepalives, ()


@dataclasses.dataclass(frozen=True, eq=False)
class ThreadSettings:
    """JAX's settings of one thread, such as those of ``with jax.enable_x64(True)``, which other threads do not see."""

    values: tuple[tuple[Any, Any], ...]

    @staticmethod
    def here() -> ThreadSettings:
        """The settings of the calling thread."""
        states = [s for s in _config.config_states.values() if hasattr(s, "get_local")]
        return ThreadSettings(tuple((s, s.get_local()) for s in states))

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Sets these settings in the calling thread until the end of the block."""

        def notify(state: Any, value: Any) -> None:
            if state._update_thread_local_hook:
                state._update_thread_local_hook(None if value is _config.config_ext.unset else value)

        with contextlib.ExitStack() as undo:
            for state, value in self.values:
                previous = state.swap_local(value)
                if previous is value:
                    continue
                notify(state, value)
                undo.callback(notify, state, previous)
                undo.callback(state.set_local, previous)
            yield


_under_settings_p = Primitive("under_settings")
_under_settings_p.multiple_results = True


@_under_settings_p.def_abstract_eval
def _types_under_settings(*avals: Any, jaxpr: Any, settings: Any) -> list[Any]:
    return [ShapedArray(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in jaxpr.out_avals]


def _lower_under_settings(ctx: Any, *arrays: Any, jaxpr: Any, settings: Any) -> Any:
    with settings.set():
        return _mlir.core_call_lowering(ctx, *arrays, name="partitioned", call_jaxpr=jaxpr)


_mlir.register_lowering(_under_settings_p, _lower_under_settings, cacheable=False)


def under_settings(jaxpr: Any, settings: ThreadSettings, arrays: Sequence[Any]) -> list[Any]:
    """Runs a closed jaxpr on arrays. JAX lowers it under the settings of another thread."""
    results: list[Any] = _under_settings_p.bind(*arrays, jaxpr=jaxpr, settings=settings)
    return results


def meshes_of(ctx: Any) -> list[tuple[tuple[tuple[str, int], ...], tuple[int, ...]]]:
    """The meshes of a program's arguments: their axes, and the positions of their devices if these are reordered."""
    symbols = ctx.module_context.symbol_table
    if "main" not in symbols or "arg_attrs" not in symbols["main"].operation.attributes:
        return []
    given = [ir.DictAttr(a) for a in ir.ArrayAttr(symbols["main"].operation.attributes["arg_attrs"])]
    shardings = {a["sdy.sharding"] for a in given if "sdy.sharding" in a}
    meshes = [_mesh(sdy.TensorShardingAttr(s).mesh_or_ref, symbols) for s in shardings]
    return [(tuple((a.name, int(a.size)) for a in map(sdy.MeshAxisAttr, m.axes)), tuple(m.device_ids)) for m in meshes]


_PLACED = object()
_OPEN = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.sharding_constraint", "sdy.manual_computation")


def is_placed(ctx: Any, value: Any) -> bool:
    """Whether an operand of the equation that JAX is lowering may depend on an array on a mesh, or on a constraint.

    It follows operations back to the arguments of the program. It keeps its own stack, because programs are longer than
    Python's recursion limit, and visits each value once: what it has found lives with JAX's own caches of the module.
    """
    symbols = ctx.module_context.symbol_table
    known: dict[Any, bool] = ctx.module_context.cached_primitive_lowerings.setdefault("gshard placed", {})
    path = [(value, _sources(value, symbols))] if value not in known else []
    while path:
        reached, sources = path[-1]
        source = next(sources, None)
        if source is None:
            known[reached] = False
            path.pop()
        elif source is _PLACED or known.get(source):
            known.update((reached, True) for reached, _ in path)
            break
        elif source not in known:
            path.append((source, _sources(source, symbols)))
    return known[value]


def _sources(value: Any, symbols: Any) -> Iterator[Any]:
    """The operands of the operation that computes a value; ``_PLACED`` where more may determine its sharding."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        op = owner.operation if hasattr(owner, "operation") else owner
        yield from (_PLACED,) if op.name in _OPEN else op.operands
        return
    function = owner.owner.operation if hasattr(owner.owner, "operation") else owner.owner
    is_main = function.name == "func.func" and ir.StringAttr(function.attributes["sym_name"]).value == "main"
    attributes = ir.ArrayAttr(function.attributes["arg_attrs"]) if "arg_attrs" in function.attributes else ()
    given: Any = ir.DictAttr(attributes[value.arg_number]) if value.arg_number < len(attributes) else ()
    if not is_main or ("sdy.sharding" in given and _names_devices(given["sdy.sharding"], symbols)):
        yield _PLACED


def _names_devices(attribute: Any, symbols: Any) -> bool:
    """Whether an attribute of Shardy is a sharding over a mesh, and does not leave all dimensions open."""
    sharding = sdy.TensorShardingAttr(attribute)
    dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
    is_open = bool(dims) and not any(d.is_closed or len(d.axes) for d in dims)
    return not is_open and len(_mesh(sharding.mesh_or_ref, symbols).axes) > 0


def _mesh(reference: Any, symbols: Any) -> Any:
    """The mesh that an attribute contains or names."""
    if isinstance(reference, ir.FlatSymbolRefAttr):
        reference = symbols[ir.FlatSymbolRefAttr(reference).value].attributes["mesh"]
    return sdy.MeshAttr(reference)
