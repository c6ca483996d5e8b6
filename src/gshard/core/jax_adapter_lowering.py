"""Reads the shardings of values in programs that JAX is lowering to StableHLO.

gshard follows the operations that computed an operand back to an argument, whose sharding is that of the placed array,
or to a constraint. The result is a hint: XLA has not partitioned the program yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jax._src import config as _config
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import sdy
from jax._src.sharding_impls import ShardingContext
from jax._src.xla_bridge import expand_platform_alias
from jax.core import ShapedArray
from jax.extend.core import Primitive

_ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros divide exponential
    exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate not or popcnt
    power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left
    shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor""".split()
)

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredSharding:
    """The sharding of a value of a program that is being lowered."""

    dims: tuple[Axes, ...]  # for each dimension the axes that split it
    axes: tuple[tuple[str, int], ...]  # names and sizes of the axes of the mesh, major to minor
    # the positions of the mesh's devices among the devices of the program, in row-major order
    device_ids: tuple[int, ...]

    def picked(self, dims: Sequence[int | None]) -> LoweredSharding:
        """The sharding of a value with these dimensions of this value. None stands for a dimension that is whole."""
        return dataclasses.replace(self, dims=tuple(() if d is None else self.dims[d] for d in dims))


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


class Unknown(Exception):
    """The program does not determine the sharding of a value."""


def sharding_of_lowered(ctx: Any, value: Any) -> LoweredSharding | None:
    """The sharding of an operand of the equation that JAX is lowering; None if it depends on no array on a mesh."""
    found = _Reader(ctx.module_context).read(value)
    if isinstance(found, type):
        raise found
    return found


def meshes_of(ctx: Any) -> list[tuple[tuple[tuple[str, int], ...], tuple[int, ...]]]:
    """The meshes of a program's arguments: their axes, and the positions of their devices if these are reordered."""
    symbols = ctx.module_context.symbol_table
    if "main" not in symbols or "arg_attrs" not in symbols["main"].operation.attributes:
        return []
    given = [ir.DictAttr(a) for a in ir.ArrayAttr(symbols["main"].operation.attributes["arg_attrs"])]
    shardings = {a["sdy.sharding"] for a in given if "sdy.sharding" in a}
    meshes = [_mesh(sdy.TensorShardingAttr(s).mesh_or_ref, symbols) for s in shardings]
    return [(tuple((a.name, int(a.size)) for a in map(sdy.MeshAxisAttr, m.axes)), tuple(m.device_ids)) for m in meshes]


_Found = LoweredSharding | None | type[Unknown]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The shardings of the operands of a call. Calls of one function with equal shardings have equal results."""

    operands: tuple[_Found, ...]


# A value, and the call of the function that contains it; None in main and in functions that JAX is lowering.
_Place = tuple[Any, _Call | None]
# Yields the places that it reads. It gets their shardings, and returns its own.
_Reading = Generator[_Place, LoweredSharding | None, LoweredSharding | None]


class _Reader:
    """Reads shardings from the operations of a module.

    It reads each value once: what it has found lives with JAX's own caches of the module. It keeps its own stack,
    because programs are longer than Python's recursion limit.
    """

    def __init__(self, module_context: Any) -> None:
        self._symbols = module_context.symbol_table
        caches = module_context.cached_primitive_lowerings
        self._found: dict[_Place, _Found] = caches.setdefault("gshard shardings", {})
        self._results: dict[Any, list[Any]] = caches.setdefault("gshard results", {})
        self._calls: dict[Any, _Call] = caches.setdefault("gshard calls", {})

    def read(self, value: Any) -> _Found:
        """The sharding of a value."""
        place: _Place = (value, None)
        found: _Found = self._found.get(place)
        stack = [] if place in self._found else [(place, self._of(*place))]
        while stack:
            place, reading = stack[-1]
            try:
                place = reading.throw(found) if isinstance(found, type) else reading.send(found)
            except (StopIteration, Unknown) as end:
                found = end.value if isinstance(end, StopIteration) else Unknown
                self._found[place] = found
                stack.pop()
                continue
            found = self._found.get(place)
            if place not in self._found:
                stack.append((place, self._of(*place)))
        return found

    def _of(self, value: Any, call: _Call | None) -> _Reading:
        owner = value.owner
        if isinstance(owner, ir.Block):
            return (yield from self._of_argument(value, owner, call))
        op = owner.operation if hasattr(owner, "operation") else owner
        name = op.name
        match name:
            case "sdy.sharding_constraint":
                found = self._of_attribute(op.attributes["sharding"])
                return (yield op.operands[0], call) if found is None else found
            case "sdy.manual_computation":
                if op not in self._results:
                    of_results = sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"])
                    self._results[op] = list(of_results.shardings)
                return self._of_attribute(self._results[op][_number(value)])
            case "func.call" | "call":
                return (yield from self._of_call(op, _number(value), call))
            case "stablehlo.while" | "stablehlo.optimization_barrier":
                return (yield op.operands[_number(value)], call)
            case "stablehlo.case" | "stablehlo.if":
                return (yield op.regions[0].blocks[0].operations[-1].operands[_number(value)], call)
            case "stablehlo.constant" | "stablehlo.iota":
                return None
        return (yield from self._of_operation(name.removeprefix("stablehlo."), op, _shape(value), call))

    def _of_argument(self, value: Any, block: Any, call: _Call | None) -> _Reading:
        op = block.owner.operation if hasattr(block.owner, "operation") else block.owner
        if op.name == "stablehlo.while":
            return (yield op.operands[value.arg_number], call)
        if op.name == "func.func" and call is not None:
            found = call.operands[value.arg_number]
            if isinstance(found, type):
                raise found
            return found
        if op.name != "func.func" or ir.StringAttr(op.attributes["sym_name"]).value != "main":
            raise Unknown
        attributes = ir.ArrayAttr(op.attributes["arg_attrs"]) if "arg_attrs" in op.attributes else ()
        if value.arg_number >= len(attributes):
            return None
        given = ir.DictAttr(attributes[value.arg_number])
        return self._of_attribute(given["sdy.sharding"]) if "sdy.sharding" in given else None

    def _of_call(self, op: Any, number: int, call: _Call | None) -> _Reading:
        inner = self._calls.get((op, call))
        if inner is None:
            operands: list[_Found] = []
            for x in op.operands:
                try:
                    operands.append((yield x, call))
                except Unknown:
                    operands.append(Unknown)
            inner = self._calls[op, call] = self._calls.setdefault(tuple(operands), _Call(tuple(operands)))
        function = self._symbols[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        (block,) = function.regions[0].blocks
        return (yield block.operations[-1].operands[number], inner)

    def _of_operation(self, name: str, op: Any, result: tuple[int, ...], call: _Call | None) -> _Reading:
        if name in _ELEMENTWISE:
            return (yield from _first([x for x in op.operands if _shape(x) == result], result, call))
        if name == "dynamic_update_slice":
            return (yield from _first(list(op.operands)[:2], result, call))
        if name in ("concatenate", "pad"):
            return (yield from _first(op.operands, result, call))
        operand = op.operands[0] if len(op.operands) else None
        sharding_of_operand = None if operand is None else (yield operand, call)
        if sharding_of_operand is None:
            return None
        shape = _shape(operand)
        match name:
            case "transpose":
                return sharding_of_operand.picked(_numbers(op.attributes["permutation"]))
            case "broadcast_in_dim":
                source = {d: i for i, d in enumerate(_numbers(op.attributes["broadcast_dimensions"]))}
                is_kept = [d in source and shape[source[d]] == n for d, n in enumerate(result)]
                return sharding_of_operand.picked([source[d] if kept else None for d, kept in enumerate(is_kept)])
            case "slice" | "dynamic_slice" | "reverse":
                return _kept(sharding_of_operand, shape, result)
            case "reshape":
                return _reshaped(sharding_of_operand, shape, result)
            case "reduce":
                reduced = _numbers(op.attributes["dimensions"])
                return sharding_of_operand.picked([d for d in range(len(shape)) if d not in reduced])
        if any(sharding_of_operand.dims):
            raise Unknown
        return None

    def _of_attribute(self, attribute: Any) -> LoweredSharding | None:
        """The sharding in an attribute of Shardy; None if the attribute leaves all dimensions open."""
        sharding = sdy.TensorShardingAttr(attribute)
        dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
        references = [[sdy.AxisRefAttr(a) for a in d.axes] for d in dims]
        if dims and not any(d.is_closed for d in dims) and not any(references):
            return None
        if any(a.sub_axis_info is not None for axes in references for a in axes):
            raise Unknown
        mesh = _mesh(sharding.mesh_or_ref, self._symbols)
        axes = tuple((a.name, int(a.size)) for a in map(sdy.MeshAxisAttr, mesh.axes))
        return LoweredSharding(tuple(tuple(a.name for a in r) for r in references), axes, tuple(mesh.device_ids))


def _mesh(reference: Any, symbols: Any) -> Any:
    """The mesh that an attribute contains or names."""
    if isinstance(reference, ir.FlatSymbolRefAttr):
        reference = symbols[ir.FlatSymbolRefAttr(reference).value].attributes["mesh"]
    return sdy.MeshAttr(reference)


def _first(values: Iterable[Any], result: Sequence[int], call: _Call | None) -> _Reading:
    """The sharding that a result of this shape has from the first operand that is split, or the first known one."""
    has_unknown = False
    first_known = None
    for x in values:
        try:
            sharding = _kept((yield x, call), _shape(x), result)
        except Unknown:
            has_unknown = True
            continue
        if sharding is not None and any(sharding.dims):
            return sharding
        first_known = first_known or sharding
    if has_unknown:
        raise Unknown
    return first_known


def _kept(sharding: LoweredSharding | None, before: Sequence[int], after: Sequence[int]) -> LoweredSharding | None:
    """The sharding after an operation that changes the sizes of some dimensions: these become whole."""
    return sharding and sharding.picked(
        [d if m == n else None for d, (m, n) in enumerate(zip(before, after, strict=True))]
    )


def _reshaped(sharding: LoweredSharding, before: Sequence[int], after: Sequence[int]) -> LoweredSharding:
    """The sharding after a reshape that adds or removes dimensions of one element."""
    kept = [d for d, n in enumerate(before) if n != 1]
    if [before[d] for d in kept] != [n for n in after if n != 1]:
        if any(sharding.dims):
            raise Unknown
        return dataclasses.replace(sharding, dims=((),) * len(after))
    rest = iter(kept)
    return sharding.picked([None if n == 1 else next(rest) for n in after])


def _number(value: Any) -> int:
    return int(ir.OpResult(value).result_number)


def _numbers(attribute: Any) -> tuple[int, ...]:
    return tuple(map(int, ir.DenseI64ArrayAttr(attribute)))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)
