"""Defines regions, the equations with bodies (scan, while and cond), and runs blocks on arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.jax_adapter import as_if_at, bind, scan_counts
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms
from gshard.core.program import Block, Constant, Edge, Equation, Value
from gshard.core.sharding import Sharding
from gshard.language.per_device import renamed

ShardingOf = Callable[[Value | Constant], Sharding]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The definition of one kind of equation with bodies."""

    # returns the jaxprs of the bodies, from the parameters of the equation
    bodies: Callable[[dict[str, Any]], list[Any]]
    entry: Callable[[Equation, ShardingOf], list[Sharding]]  # returns the sharding of each operand at the entry
    leave: Callable[[Equation, ShardingOf], list[Sharding]]  # returns the sharding of each result at the exit
    emit: Callable[[Equation, Interpreter, Sequence[Any]], Sequence[Any]]  # runs the equation on local arrays
    # returns the values that are moved at the boundary of a body. The two values of each must agree.
    crossings: Callable[[Equation], list[Crossing]]
    trip_count: Callable[[dict[str, Any]], int] = lambda params: 1  # returns the number of runs of the bodies, if known
    # for each body returns the operands that are its first inputs in every iteration
    same: Callable[[dict[str, Any]], list[range]] = lambda params: []
    # returns the values that determine which body runs, or how often
    decided: Callable[[Equation], Sequence[Value | Constant]] = lambda equation: ()


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A value that becomes another value at the boundary of a body, and is moved to the sharding of that value."""

    edge: Edge  # both values
    inward: bool  # whether the outer value becomes the inner one, or the reverse
    each_round: bool = False  # whether this happens in each run of the body, or once before or after the region


def crossing(
    outer: Any, inner: Any, stacked: int = 0, *, inward: bool = True, each_round: bool = False
) -> list[Crossing]:
    """The crossing between an outer and an inner value; none if one is a constant or both are the same value."""
    if isinstance(outer, Value) and isinstance(inner, Value) and outer is not inner:
        return [Crossing(Edge(outer, inner, int(stacked)), inward, each_round)]
    return []


def _stacked(sharding: Sharding) -> Sharding:
    return Sharding(((), *sharding.dims), sharding.unreduced)


def moved_to(
    equation: Equation, emitter: Interpreter, values: Sequence[Any], arrays: Sequence[Any], like: Sequence[Any],
    trip_count: int = 1,
) -> list[Any]:  # fmt: skip
    """The arrays of values, moved to the shardings of other values."""
    found = zip(values, arrays, like, strict=True)
    return [emitter.move(v, x, emitter.sharding(other), equation, trip_count) for v, x, other in found]


def _scan_entry(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    consts, carry = scan_counts(equation.params)
    inner = [sharding(v) for v in equation.blocks[0].inputs]
    return inner[: consts + carry] + [_stacked(s) for s in inner[consts + carry :]]


def _scan_leave(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    consts, carry = scan_counts(equation.params)
    (body,) = equation.blocks
    return [sharding(v) for v in body.inputs[consts : consts + carry]] + [
        _stacked(sharding(v)) for v in body.outputs[carry:]
    ]


def _scan_crossings(equation: Equation) -> list[Crossing]:
    consts, carry = scan_counts(equation.params)
    (body,) = equation.blocks
    carried = body.inputs[consts : consts + carry]
    operands = [crossing(x, v, i >= consts + carry) for i, (x, v) in enumerate(zip(equation.inputs, body.inputs))]
    iterations = [crossing(x, v, each_round=True) for x, v in zip(body.outputs, carried, strict=False)]
    final_carry = [crossing(x, v, inward=False) for x, v in zip(equation.outputs, carried, strict=False)]
    stacks = [crossing(x, v, 1, inward=False) for x, v in zip(equation.outputs[carry:], body.outputs[carry:])]
    return [c for crossings in (*operands, *iterations, *final_carry, *stacks) for c in crossings]


def _emit_scan(equation: Equation, emitter: Interpreter, arrays: Sequence[Any]) -> Sequence[Any]:
    consts, carry = scan_counts(equation.params)
    length = equation.params["length"]
    (body,) = equation.blocks

    def step(carried: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = emitter.run(body, [*arrays[:consts], *carried, *xs], length)
        carried_inputs = body.inputs[consts : consts + carry]
        return moved_to(equation, emitter, body.outputs[:carry], out[:carry], carried_inputs, length), out[carry:]

    end, stacked = lax.scan(
        step,
        list(arrays[consts : consts + carry]),
        list(arrays[consts + carry :]),
        length=length,
        reverse=equation.params["reverse"],
        unroll=equation.params["unroll"],
    )
    return [*end, *stacked]


def _while_entry(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    condition, body = equation.blocks
    cond_consts = equation.params["cond_nconsts"]
    return [sharding(v) for v in (*condition.inputs[:cond_consts], *body.inputs)]


def _while_crossings(equation: Equation) -> list[Crossing]:
    condition, body = equation.blocks
    cond_consts, body_consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carried = body.inputs[body_consts:]
    crossings = [
        crossing(x, v) for x, v in zip(equation.inputs, (*condition.inputs[:cond_consts], *body.inputs), strict=True)
    ]
    crossings += [crossing(x, v, each_round=True) for x, v in zip(carried, condition.inputs[cond_consts:], strict=True)]
    crossings += [crossing(x, v, each_round=True) for x, v in zip(body.outputs, carried, strict=True)]
    crossings += [crossing(x, v, inward=False) for x, v in zip(equation.outputs, carried, strict=True)]
    return [c for of_values in crossings for c in of_values]


def _emit_while(equation: Equation, emitter: Interpreter, arrays: Sequence[Any]) -> Sequence[Any]:
    condition, body = equation.blocks
    cond_consts, body_consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carried = body.inputs[body_consts:]

    def go_on(carry: Any) -> Any:
        moved = moved_to(equation, emitter, carried, carry, condition.inputs[cond_consts:])
        (flag,) = emitter.run(condition, [*arrays[:cond_consts], *moved])
        return emitter.move(condition.outputs[0], flag, Sharding(()), equation)

    def step(carry: Any) -> Any:
        out = emitter.run(body, [*arrays[cond_consts : cond_consts + body_consts], *carry])
        return moved_to(equation, emitter, body.outputs, out, carried)

    start = list(arrays[cond_consts + body_consts :])
    return list(lax.while_loop(go_on, step, start))


def _cond_crossings(equation: Equation) -> list[Crossing]:
    crossings: list[Crossing] = []
    for branch in equation.blocks:
        for x, v in zip(equation.inputs[1:], branch.inputs, strict=True):
            crossings += crossing(x, v)
        for result, end in zip(equation.outputs, branch.outputs, strict=True):
            crossings += crossing(result, end, inward=False)
    return crossings


def _emit_cond(equation: Equation, emitter: Interpreter, arrays: Sequence[Any]) -> Sequence[Any]:
    platforms = equation.params.get("branches_platforms")

    def branch(block: Block) -> Callable[..., list[Any]]:
        times = int(block in equation.blocks_on(emitter.devices))

        def run(*operands: Any) -> list[Any]:
            moved = moved_to(equation, emitter, equation.inputs[1:], operands, block.inputs, times)
            results = emitter.run(block, moved, times)
            return moved_to(equation, emitter, block.outputs, results, equation.outputs, times)

        return run

    branches = list(map(branch, equation.blocks))
    if platforms is None:
        return lax.switch(arrays[0].astype("int32"), branches, *arrays[1:])
    by_platform = {name: b for names, b in zip(platforms, branches, strict=True) for name in names or ["default"]}
    return lax.platform_dependent(*arrays[1:], **by_platform)  # type: ignore[no-any-return]


REGIONS: dict[str, Region] = {
    "scan": Region(
        lambda params: [params["jaxpr"]],
        _scan_entry,
        _scan_leave,
        _emit_scan,
        _scan_crossings,
        lambda params: int(params["length"]),
        lambda params: [range(scan_counts(params)[0])],
    ),
    "while": Region(
        lambda params: [params["cond_jaxpr"], params["body_jaxpr"]],
        _while_entry,
        lambda equation, sharding: list(map(sharding, equation.blocks[1].inputs[equation.params["body_nconsts"] :])),
        _emit_while,
        _while_crossings,
        same=lambda params: [
            range(params["cond_nconsts"]),
            range(params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]),
        ],
        decided=lambda equation: equation.blocks[0].outputs,
    ),
    "cond": Region(
        lambda params: list(params["branches"]),
        lambda equation, sharding: [Sharding(()), *map(sharding, equation.inputs[1:])],
        lambda equation, sharding: list(map(sharding, equation.outputs)),
        _emit_cond,
        _cond_crossings,
        same=lambda params: [range(1, 1 + len(body.in_avals)) for body in params["branches"]],
        decided=lambda equation: equation.inputs[:1],
    ),
}


def with_edges(equation: Equation, **changes: Any) -> Equation:
    """An equation with some changes, and with the edges that follow from its operands, results and bodies."""
    equation = dataclasses.replace(equation, **changes)
    if not equation.blocks:
        return equation
    crossings = REGIONS[equation.name].crossings(equation)
    # The value of the next iteration is unreduced if that of the last one is.
    edges = (Edge(c.edge.inner, c.edge.outer) if c.each_round else c.edge for c in crossings)
    return dataclasses.replace(equation, edges=tuple(dict.fromkeys(edges)))


# Runs a block on arrays, without splitting or moving them.


class Interpreter:
    """Runs blocks on whole arrays. Subclasses run equations in other ways, or blocks on shards (``emit.partition``)."""

    devices: Sequence[Any] | None = None  # the devices of the mesh, if it has any

    def sharding(self, value: Value | Constant) -> Sharding:
        """The sharding of the array of a value: the replicated one."""
        return Sharding.replicated(len(value.shape))

    def move(
        self, value: Value | Constant, array: Any, target: Sharding, equation: Equation, trip_count: int = 1
    ) -> Any:
        """Moves an array with the sharding of ``value`` to another sharding, in each of ``trip_count`` iterations."""
        return array

    def combine(self, flag: Any, monoid: str, atoms: Atoms, equation: Equation) -> Any:
        """Combines the flags of all devices to one flag."""
        return flag

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation without a body.

        The types in the body of a ``shard_map`` contain the user's mesh, so the body is traced again.
        """
        if "check_vma" not in e.params:
            return bind(e.primitive, e.params, inputs)
        mesh, specs = e.params["mesh"], list(e.params["out_specs"])
        body = renamed(e.params["jaxpr"], {str(axis): (str(axis),) for axis in mesh.shape})
        mapped = jax.shard_map(body, mesh=mesh, in_specs=e.params["in_specs"], out_specs=specs, check_vma=False)
        return list(mapped(*inputs))

    def region(self, e: Equation, arrays: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation with bodies."""
        return REGIONS[e.name].emit(e, self, arrays)

    def run(self, block: Block, arrays: Sequence[Any], trip_count: int = 1) -> list[Any]:
        """Runs a block on arrays with the shardings of its inputs; results have the shardings of its outputs."""
        env: dict[Value, Any] = dict(zip(block.inputs, arrays, strict=True))
        self.evaluate(block.equations, env)
        return [jnp.asarray(value_of(v, env)) for v in block.outputs]

    def evaluate(self, equations: Iterable[Equation], env: dict[Value, Any]) -> None:
        """Runs equations in order."""
        for e in equations:
            with as_if_at(e.source_info), jax.named_scope(e.name), in_context(e.context):
                inputs = [value_of(v, env) for v in e.inputs]
                if e.rule is not None:
                    results = self.equation(e, inputs)
                else:
                    results = self.region(e, [jnp.asarray(x) for x in inputs])
            env.update(zip(e.outputs, results, strict=True))


def value_of(v: Value | Constant, env: Mapping[Value, Any]) -> Any:
    """The array of a value, or the value of a constant."""
    return v.value if isinstance(v, Constant) else env[v]
