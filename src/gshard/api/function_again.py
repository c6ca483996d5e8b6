"""Function again: how a function from ``jax.jit``, or from the jit of a framework, is compiled once more.

It is traced once. The arguments of the compiled program are not those of the function (frameworks take modules apart,
``jax.jit`` leaves out unread ones), so both are matched by names. Arrays are kept as shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from gshard.api.compiled_programs import is_from_framework, is_from_jax_jit, on_first_devices, traced_call
from gshard.api.jit import jit
from gshard.core.errors import ArgumentError, GShardError
from gshard.core.jax_adapter import (
    Expression,
    is_transposed,
    no_mesh_set,
    user_expressions,
    user_line,
)
from gshard.core.jax_adapter_jit import (
    Jitted,
    argument_names,
    calls_of_jit,
    jitted_as,
    operands_of_call,
    shardings_of_call,
)
from gshard.core.jax_adapter_retracing import OnDevices
from gshard.core.memory_kinds import in_memory, shape_of_type
from gshard.core.mesh import Mesh
from gshard.core.paths import leaf_names
from gshard.core.plan import Plan
from gshard.core.spmd import SpmdProgram
from gshard.core.time_budget import OutOfTime, until
from gshard.device.machine import Machine, kind_of_devices
from gshard.explanation.compiled_source import CompiledAgain, CompiledSource, source_of
from gshard.explanation.traced_expressions import runs_of
from gshard.explanation.tried_changes import Planned, Specs
from gshard.planning.added_marks import spec_of_cut
from gshard.tracing.trace import name_of
from gshard.xla.described import described_mesh

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Traced = tuple[Any, list[Any], list[int | None], Any]

# Options with which XLA for CPU compiles in 0.4 of the time. They concern LLVM alone: the passes of XLA make the same
# program.
_WITHOUT_LLVM = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}


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


def compiled_for(
    machine: str | Machine, f: Any, given: Arguments, names: Mapping[str, str]
) -> tuple[CompiledSource, Machine] | None:
    """What XLA compiles of a function for the devices of a machine, which need not exist, and the machine.

    None if no sharding of the function is over several devices, or these are devices of the machine.

    Raises:
        PlanningError: XLA cannot compile for these devices here. MachineError: the machine has another number of them.
    """
    leaves, tree = jax.tree.flatten(given)
    shapes = [_shape_of(leaf) for leaf in leaves]
    call, operands, passed, out_tree = _traced(f, jax.tree.unflatten(tree, shapes), shapes)
    shardings = [*(getattr(x, "sharding", None) for x in operands), *shardings_of_call(call)]
    meshes = [Mesh.of(s.mesh) for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
    if not meshes:
        return None
    on_machine = Machine.read(machine, max(mesh.size for mesh in meshes))
    if any(mesh.devices is not None and kind_of_devices(mesh) == on_machine.kind for mesh in meshes):
        return None
    on = OnDevices(described_mesh(on_machine).devices or ())
    call = on.equation(call)
    operands = [x.update(sharding=on.sharding(x.sharding)) if getattr(x, "sharding", None) else x for x in operands]
    called = {f"arrays[{i}]": names.get(name, name) for i, name in enumerate(argument_names(call.params["jaxpr"]))}
    read = functools.partial(source_of, out_tree=out_tree, names=called)
    with no_mesh_set():
        found = read(jitted_as(call, call.params["jaxpr"]).lower(*operands).compile())
    again = compiled_again(found, f, given, read, (call, operands, passed, out_tree))
    return dataclasses.replace(found, again=again), on_machine


def compiled_again(
    found: CompiledSource, f: Any, given: Arguments, read: Callable[[Any], CompiledSource], first: _Traced | None = None
) -> CompiledAgain:
    """What compiles an explained function once more; ``first`` is what was traced of it for other devices."""
    leaves, tree = jax.tree.flatten(on_first_devices(given) if first is None else given)
    shapes = [_shape_of(leaf) for leaf in leaves]
    numbers = _numbers(found, f, given, shapes)
    del leaves, given
    once: list[_Traced] = [] if first is None else [first]

    def traced() -> _Traced:
        if not once:
            once.append(_traced(f, jax.tree.unflatten(tree, shapes), shapes))
        return once[0]

    def compiled(jaxpr: Any, specs: Specs) -> CompiledSource:
        call, operands, passed, _ = traced()
        changed = {numbers[n]: spec for n, spec in specs.items()}
        pairs = zip(operands, passed, strict=True)
        arguments = [_with_spec(x, changed[i]) if i in changed else x for x, i in pairs]
        with contextlib.nullcontext() if first is None else no_mesh_set():  # a mesh that is set has the devices here
            lowered = jitted_as(call, jaxpr).lower(*arguments)
        return read(lowered.compile(_WITHOUT_LLVM if found.program.platform == "cpu" else None))

    def planned(seconds: float) -> Planned | None:
        call, operands, *_ = traced()
        return _planned(call, operands, found.mesh, seconds)

    leaves_of = tuple(None if n is None else shapes[n] for n in numbers)
    return CompiledAgain(leaves_of, lambda: traced()[0].params["jaxpr"], compiled, planned)


def _traced(f: Any, given: Arguments, shapes: Sequence[Any]) -> _Traced:
    """What a function gives to ``jax.jit``: the equation, its operands, and which leaves of its arguments they are.

    Last the tree of its results, if the equation has the same ones.
    """
    whole, arrays, tree = traced_call(f, *given)
    calls = calls_of_jit(whole)
    if len(calls) != 1:
        raise ArgumentError(f"{name_of(f)} calls {len(calls)} jitted functions: explain one around these.", user_line())
    passed = [None if i is None else arrays[i] for i in operands_of_call(whole, calls[0])]
    types = [shape_of_type(v.aval) for v in calls[0].invars]
    operands = [x if i is None else shapes[i] for x, i in zip(types, passed, strict=True)]
    return calls[0], operands, passed, tree if tree.num_leaves == len(calls[0].outvars) else None


def _shape_of(leaf: Any) -> Any:
    """An array as a shape with its sharding; what is no array itself."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding if getattr(leaf, "committed", True) else None
    is_weak = bool(getattr(leaf, "weak_type", False))  # keys have no such type
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak)


def _with_spec(leaf: Any, spec: Any) -> Any:
    return leaf.update(sharding=in_memory(NamedSharding(leaf.sharding.mesh, spec), leaf.sharding.memory_kind))


def _numbers(found: CompiledSource, f: Any, given: Arguments, shapes: list[Any]) -> list[int | None]:
    """For each argument of the program the number of its leaf; None if that is not known."""
    arguments = found.program.arguments
    if not is_from_framework(f) and len(arguments) == len(shapes):
        return list(range(len(shapes)))
    names = leaf_names(f, given)
    number_of = {name: i for i, name in enumerate(names) if names.count(name) == 1}
    return [number_of.get(argument.name) for argument in arguments]


def _planned(call: Any, operands: Sequence[Any], mesh: Mesh, seconds: float) -> Planned | None:
    """What gshard plans for the call of a jitted function; None if it cannot plan it in so many seconds."""
    ends = Jitted.of(call.params)
    entering = (getattr(x, "sharding", None) or given for x, given in zip(operands, ends.in_shardings, strict=True))
    f = jit(
        jaxpr_as_fun(call.params["jaxpr"]), mesh=mesh.user_jax_mesh, donate_argnums=ends.donated,
        in_shardings=tuple(entering), out_shardings=list(ends.out_shardings),
    )  # fmt: skip
    try:
        with until(time.monotonic() + seconds):
            lowered = f.lower(*operands)
            return _planned_by(lowered.plan, lowered.spmd)
    except (GShardError, OutOfTime):
        return None


def _planned_by(plan: Plan, spmd: SpmdProgram) -> Planned:
    """What a plan sends at each line, and the shardings of values of expressions, where these are always the same."""
    own = [e for e in plan.program.block.walk() if not is_transposed(e.source_info)]
    specs: dict[tuple[Expression, tuple[int, ...]], set[PartitionSpec | None]] = {}
    for place, runs in runs_of([user_expressions(e.source_info) for e in own]).items():
        for run in runs:
            last = {v.shape: plan.sharding(v) for i in run for v in own[i].outputs}
            for shape, sharding in last.items():
                spec = None if sharding.unreduced else spec_of_cut(sharding, plan.mesh)
                specs.setdefault((place, shape), set()).add(spec)
    lines = Counter[tuple[str, int]]()
    for c in spmd.collectives:
        if (cause := c.cause or c.emitted) is not None:
            calls = {(place.file, place.line) for place in user_expressions(cause.source_info)}
            lines.update(dict.fromkeys(calls, c.total_bytes))
    sent = sum(c.total_bytes for c in spmd.collectives)
    return Planned(sent, lines, {at: next(iter(s)) for at, s in specs.items() if len(s) == 1})
