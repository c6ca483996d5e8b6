"""The part of the JAX adapter about programs that JAX is lowering: how values in them are sharded, as far as they say.

While ``jax.jit`` lowers a function to StableHLO, the arguments of the whole program have the shardings with which they
are placed. From an operand of an equation one follows the operations that made it back to those, to constraints and to
regions with shardings of their own; elementwise operations, transpositions, slices and loops are passed. That is read
before XLA has partitioned anything, so it is a hint: how the operand is really split, XLA decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax._src import config as _config
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import sdy
from jax._src.sharding_impls import ShardingContext
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
    """How a value of a program that is being lowered is sharded.

    Attributes:
        dims: for each dimension the axes over which it is split.
        axes: names and sizes of the axes of the mesh, major to minor.
        device_ids: the positions of its devices among those of the program, in row-major order.
    """

    dims: tuple[Axes, ...]
    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...]

    def picked(self, dims: Sequence[int | None]) -> LoweredSharding:
        """The same for a value whose dimensions are those of this one, in another order; None for one that is whole."""
        return dataclasses.replace(self, dims=tuple(() if d is None else self.dims[d] for d in dims))


def has_devices(ctx: Any, count: int) -> bool:
    """Whether a program is lowered for so many devices that XLA partitions it for, and not to be exported."""
    around = ctx.module_context.axis_context
    partitioned = isinstance(around, ShardingContext) and around.num_devices == count
    return partitioned and not ctx.module_context.lowering_parameters.for_export


def lowered_with_devices(ctx: Any, devices: Sequence[Any], f: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Lowers a function of operands, with an operator that XLA asks for its program, in the place of an equation.

    Args:
        ctx: the context of the rule that lowers the equation.
        devices: of the program. JAX fills them in for programs only in which it knows of such operators.
        f: the function; it returns several arrays.
        operands: values of the program that is made.
    """
    module, kept = ctx.module_context, _Kept()
    around = module.axis_context
    if around.device_assignment is None:
        around = dataclasses.replace(around, device_assignment=tuple(devices))
    inside = ctx.replace(module_context=module.replace(axis_context=around, keepalives=kept.objects))
    module.add_keepalive(kept)
    return _mlir.lower_fun(f, multiple_results=True)(inside, *operands)


class _Kept:
    """Holds what must live as long as a compiled program. One that is serialized does not need it: it is compiled."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def __reduce__(self) -> Any:
        return _Kept, ()


@dataclasses.dataclass(frozen=True, eq=False)
class ThreadSettings:
    """JAX's settings as a thread has them: what ``with jax.enable_x64(True)`` sets, another thread does not see."""

    values: tuple[tuple[Any, Any], ...]

    @staticmethod
    def here() -> ThreadSettings:
        """Those of the thread that calls."""
        states = [s for s in _config.config_states.values() if hasattr(s, "get_local")]
        return ThreadSettings(tuple((s, s.get_local()) for s in states))

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """What is done inside is done under these settings."""

        def told(state: Any, value: Any) -> None:
            if state._update_thread_local_hook:
                state._update_thread_local_hook(None if value is _config.config_ext.unset else value)

        with contextlib.ExitStack() as before:
            for state, value in self.values:
                previous = state.swap_local(value)
                if previous is value:
                    continue
                told(state, value)
                before.callback(told, state, previous)
                before.callback(state.set_local, previous)
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
    """Runs a closed jaxpr on arrays; it is lowered under settings of JAX's that another thread has."""
    made: list[Any] = _under_settings_p.bind(*arrays, jaxpr=jaxpr, settings=settings)
    return made


class Unknown(Exception):
    """Nothing in the program says how a value is sharded."""


def sharding_of_lowered(ctx: Any, value: Any) -> LoweredSharding | None:
    """How an operand of the equation that is being lowered is sharded; None if no array on a mesh is in it.

    Args:
        ctx: the context of the rule that lowers the equation.
        value: the operand.

    Raises:
        Unknown: it is an argument of a function that is lowered before the call of it, such as a loop's body, or what
            made it is none of the operations that are followed.
    """
    return _Reader(ctx.module_context.module).read(value, {})


def meshes_of(ctx: Any) -> list[tuple[tuple[tuple[str, int], ...], tuple[int, ...]]]:
    """The meshes on which arguments of a program are: axes, and positions of devices if they are in another order."""
    module = ctx.module_context.module
    main = next((op for op in module.body.operations if _symbol(op) == "main"), None)
    if main is None or "arg_attrs" not in main.operation.attributes:
        return []
    given = [ir.DictAttr(a) for a in ir.ArrayAttr(main.operation.attributes["arg_attrs"])]
    shardings = [sdy.TensorShardingAttr(a["sdy.sharding"]) for a in given if "sdy.sharding" in a]
    meshes = [_Reader(module).mesh(s.mesh_or_ref) for s in shardings]
    return [(tuple((a.name, int(a.size)) for a in map(sdy.MeshAxisAttr, m.axes)), tuple(m.device_ids)) for m in meshes]


@dataclasses.dataclass(frozen=True)
class _Reader:
    module: Any

    def read(self, value: Any, operands: Mapping[Any, Any]) -> LoweredSharding | None:
        """How a value is sharded, where the ``operands`` stand for the arguments of functions that were entered."""
        if value in operands:
            return self.read(*operands[value])
        owner = value.owner
        if isinstance(owner, ir.Block):
            return self._of_argument(value, owner, operands)
        op = owner.operation if hasattr(owner, "operation") else owner
        name = op.name
        match name:
            case "sdy.sharding_constraint":
                found = self._of_attribute(op.attributes["sharding"])
                return self.read(op.operands[0], operands) if found is None else found
            case "sdy.manual_computation":
                return self._of_attribute(_values(op.attributes["out_shardings"])[_number(value)])
            case "func.call" | "call":
                return self._of_call(op, _number(value), operands)
            case "stablehlo.while":
                return self.read(op.operands[_number(value)], operands)
            case "stablehlo.optimization_barrier":
                return self.read(op.operands[_number(value)], operands)
            case "stablehlo.case" | "stablehlo.if":
                returned = list(op.regions[0].blocks[0].operations)[-1].operands[_number(value)]
                return self.read(returned, operands)
            case "stablehlo.constant" | "stablehlo.iota":
                return None
        return self._of_operation(name.removeprefix("stablehlo."), op, value, lambda x: self.read(x, operands))

    def _of_argument(self, value: Any, block: Any, operands: Mapping[Any, Any]) -> LoweredSharding | None:
        op = block.owner.operation if hasattr(block.owner, "operation") else block.owner
        if op.name == "stablehlo.while":
            return self.read(op.operands[value.arg_number], operands)
        if op.name != "func.func" or ir.StringAttr(op.attributes["sym_name"]).value != "main":
            raise Unknown
        attributes = ir.ArrayAttr(op.attributes["arg_attrs"]) if "arg_attrs" in op.attributes else ()
        if value.arg_number >= len(attributes):
            return None
        given = ir.DictAttr(attributes[value.arg_number])
        return self._of_attribute(given["sdy.sharding"]) if "sdy.sharding" in given else None

    def _of_call(self, op: Any, number: int, operands: Mapping[Any, Any]) -> LoweredSharding | None:
        callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        function = next(f for f in self.module.body.operations if _symbol(f) == callee)
        (block,) = function.regions[0].blocks
        inside = {**operands, **{a: (x, operands) for a, x in zip(block.arguments, op.operands, strict=True)}}
        return self.read(list(block.operations)[-1].operands[number], inside)

    def _of_operation(self, name: str, op: Any, value: Any, read: Callable[[Any], Any]) -> LoweredSharding | None:
        result = _shape(value)
        if name in _ELEMENTWISE:
            return _first(read, [x for x in op.operands if _shape(x) == result])
        if name == "dynamic_update_slice":
            return _first(read, op.operands[:2])
        if name in ("concatenate", "pad"):
            return _first(lambda x: _kept(read(x), _shape(x), result), op.operands)
        operand = op.operands[0] if len(op.operands) else None
        found = None if operand is None else read(operand)
        if found is None:
            return None
        shape = _shape(operand)
        match name:
            case "transpose":
                return found.picked(_numbers(op.attributes["permutation"]))
            case "broadcast_in_dim":
                at = {d: i for i, d in enumerate(_numbers(op.attributes["broadcast_dimensions"]))}
                return found.picked([at[d] if d in at and shape[at[d]] == n else None for d, n in enumerate(result)])
            case "slice" | "dynamic_slice" | "reverse":
                return _kept(found, shape, result)
            case "reshape":
                return _reshaped(found, shape, result)
            case "reduce":
                gone = _numbers(op.attributes["dimensions"])
                return found.picked([d for d in range(len(shape)) if d not in gone])
        if any(found.dims):
            raise Unknown
        return None

    def _of_attribute(self, attribute: Any) -> LoweredSharding | None:
        """A sharding as Shardy writes it; None if it leaves all open."""
        sharding = sdy.TensorShardingAttr(attribute)
        dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
        references = [[sdy.AxisRefAttr(a) for a in d.axes] for d in dims]
        if dims and not any(d.is_closed for d in dims) and not any(references):
            return None
        if any(a.sub_axis_info is not None for axes in references for a in axes):
            raise Unknown
        mesh = self.mesh(sharding.mesh_or_ref)
        axes = tuple((a.name, int(a.size)) for a in map(sdy.MeshAxisAttr, mesh.axes))
        return LoweredSharding(tuple(tuple(a.name for a in r) for r in references), axes, tuple(mesh.device_ids))

    def mesh(self, reference: Any) -> Any:
        """A mesh, as it is or by its name."""
        if isinstance(reference, ir.FlatSymbolRefAttr):
            name = ir.FlatSymbolRefAttr(reference).value
            found = next(op for op in self.module.body.operations if _symbol(op) == name)
            reference = found.attributes["mesh"]
        return sdy.MeshAttr(reference)


def _first(read: Callable[[Any], Any], values: Sequence[Any]) -> LoweredSharding | None:
    """How the first of some values is sharded that is split at all; else whatever is known of one."""
    unknown, found = False, None
    for x in values:
        try:
            one = read(x)
        except Unknown:
            unknown = True
            continue
        if one is not None and any(one.dims):
            return one  # type: ignore[no-any-return]
        found = found or one
    if unknown:
        raise Unknown
    return found


def _kept(found: LoweredSharding | None, before: Sequence[int], after: Sequence[int]) -> LoweredSharding | None:
    """The sharding of what is cut or joined along some dimensions: that of the others."""
    return found and found.picked([d if m == n else None for d, (m, n) in enumerate(zip(before, after, strict=True))])


def _reshaped(found: LoweredSharding, before: Sequence[int], after: Sequence[int]) -> LoweredSharding:
    """The sharding after dimensions of one element are added or left out.

    Raises:
        Unknown: dimensions are merged or parted, of an array that is split.
    """
    kept = [d for d, n in enumerate(before) if n != 1]
    if [before[d] for d in kept] != [n for n in after if n != 1]:
        if any(found.dims):
            raise Unknown
        return dataclasses.replace(found, dims=((),) * len(after))
    rest = iter(kept)
    return found.picked([None if n == 1 else next(rest) for n in after])


def _symbol(op: Any) -> str | None:
    attributes = op.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else None


def _values(attribute: Any) -> Sequence[Any]:
    return sdy.TensorShardingPerValueAttr(attribute).shardings  # type: ignore[no-any-return]


def _number(value: Any) -> int:
    return int(ir.OpResult(value).result_number)


def _numbers(attribute: Any) -> tuple[int, ...]:
    return tuple(map(int, ir.DenseI64ArrayAttr(attribute)))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)
