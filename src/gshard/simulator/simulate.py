"""Simulates a per-device program for all devices of a mesh on one device, run by run between collectives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.errors import RuleError, TraceError
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.xla_workarounds import AS_WRITTEN, NegativePads

# Simulates each collective on lists of NumPy arrays, one array for each device.

AxisSizes = tuple[tuple[str, int], ...]
Groups = tuple[tuple[int, ...], ...]
PerDevice = list[Any]


@tabulated(1024)
def device_groups(axis_sizes: AxisSizes, axes: tuple[str, ...], index_groups: Groups | None = None) -> Groups:
    """The groups of devices of a collective over ``axes``."""
    names = [name for name, _ in axis_sizes]
    sizes = [size for _, size in axis_sizes]
    named = [names.index(axis) for axis in axes]
    others = [i for i in range(len(names)) if i not in named]
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + named)
    groups = devices.reshape(-1, math.prod(sizes[i] for i in named)).tolist()
    if index_groups is not None:
        groups = [[group[i] for i in part] for group in groups for part in index_groups]
    return tuple(tuple(group) for group in groups)


def _groups(params: dict[str, Any], axis_sizes: AxisSizes) -> Groups:
    axes = params.get("axis_name", params.get("axes"))
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    parts = params.get("axis_index_groups")
    return device_groups(axis_sizes, axes, None if parts is None else tuple(map(tuple, parts)))


def _on_groups(
    params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice, f: Callable[..., Sequence[Any]]
) -> PerDevice:
    """Applies ``f``, which maps the arrays of a group to the results of the group, to every group."""
    result: PerDevice = [None] * len(x)
    for group in _groups(params, axis_sizes):
        for device, value in zip(group, f([np.asarray(x[d]) for d in group]), strict=True):
            result[device] = value
    return result


def _sum(parts: list[np.ndarray]) -> np.ndarray:
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype.kind in "fV" and dtype.itemsize <= 2 else dtype
    return functools.reduce(np.add, [p.astype(wide) for p in parts]).astype(dtype)


def _all_reduce(combine: Callable[[list[np.ndarray]], np.ndarray]) -> Callable[..., PerDevice]:
    def all_reduce(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
        named = tuple(a for a in params["axes"] if not isinstance(a, int))
        positional = tuple(a for a in params["axes"] if isinstance(a, int))
        if positional:  # vmap has replaced a named axis by a dimension of the array
            moved = [np.moveaxis(np.asarray(v), positional, range(len(positional))) for v in x]
            x = [combine(list(v.reshape(-1, *v.shape[len(positional) :]))) for v in moved]
        if not named:
            return x
        return _on_groups({**params, "axes": named}, axis_sizes, x, lambda parts: [combine(parts)] * len(parts))

    return all_reduce


def _all_gather(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    join = np.concatenate if params["tiled"] else np.stack
    dimension = params["all_gather_dimension"]
    return _on_groups(params, axis_sizes, x, lambda parts: [join(parts, axis=dimension)] * len(parts))


def _reduce_scatter(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    dimension = params["scatter_dimension"]

    def scatter(parts: list[np.ndarray]) -> list[np.ndarray]:
        chunks = np.split(_sum(parts), len(parts), axis=dimension)
        return chunks if params["tiled"] else [chunk.squeeze(dimension) for chunk in chunks]

    return _on_groups(params, axis_sizes, x, scatter)


def _all_to_all(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    """The primitive is always tiled: ``lax.all_to_all(tiled=False)`` adds and removes a dimension around it."""

    def exchange(parts: list[np.ndarray]) -> list[np.ndarray]:
        sent = [np.split(part, len(parts), axis=params["split_axis"]) for part in parts]
        return [np.concatenate(received, axis=params["concat_axis"]) for received in zip(*sent, strict=True)]

    return _on_groups(params, axis_sizes, x, exchange)


def _ragged_all_to_all(
    params: dict[str, Any],
    axis_sizes: AxisSizes,
    operand: PerDevice,
    output: PerDevice,
    input_offsets: PerDevice,
    send_sizes: PerDevice,
    output_offsets: PerDevice,
    recv_sizes: PerDevice,
) -> PerDevice:
    """Each sender writes rows from its ``input_offsets`` on to its ``output_offsets`` in the receivers' outputs."""
    result = [np.array(v) for v in output]
    for group in _groups(params, axis_sizes):
        for sender in group:
            starts, sizes, targets = (np.asarray(v[sender]) for v in (input_offsets, send_sizes, output_offsets))
            rows = np.asarray(operand[sender])
            chunks_per_receiver = len(starts) // len(group)
            for i, (start, size, target) in enumerate(zip(starts, sizes, targets, strict=True)):
                receiver = group[i // chunks_per_receiver]
                result[receiver][target : target + size] = rows[start : start + size]
    return result


def _ppermute(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    """Devices that receive nothing get zeros.

    The axes must be in the order of the mesh. For another order, JAX 0.10 still counts positions in the order of the
    mesh, and JAX 0.12 raises an error.
    """
    pairs = list(params["perm"])
    sources, targets = {s for s, _ in pairs}, {t for _, t in pairs}
    if len(sources) < len(pairs) or len(targets) < len(pairs):
        raise RuleError("a ppermute has a source or a destination twice.", got=f"pairs: {pairs}")
    result: PerDevice = [np.zeros_like(np.asarray(v)) for v in x]
    for group in _groups(params, axis_sizes):
        if list(group) != sorted(group):
            raise RuleError(
                "a ppermute names its axes in another order than the mesh.",
                got=f"axes: {params['axis_name']}; mesh: {axis_sizes}",
                hint="Name the axes in the order of the mesh and number the pairs accordingly.",
            )
        for source, target in pairs:
            result[group[target]] = np.asarray(x[group[source]])
    return result


def _broadcast(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    return _on_groups(params, axis_sizes, x, lambda parts: [parts[params["source"]]] * len(parts))


def _axis_index(params: dict[str, Any], axis_sizes: AxisSizes) -> PerDevice:
    groups = _groups(params, axis_sizes)
    positions = [np.asarray(i, np.int32) for i in range(len(groups[0]))]  # the same objects for equal devices
    index = {device: positions[i] for group in groups for i, device in enumerate(group)}
    return [index[d] for d in range(len(index))]


def _same(params: dict[str, Any], axis_sizes: AxisSizes, x: PerDevice) -> PerDevice:
    return x


COLLECTIVES: dict[str, Callable[..., PerDevice]] = {
    "psum": _all_reduce(_sum),
    "psum_invariant": _all_reduce(_sum),
    "pmax": _all_reduce(lambda parts: functools.reduce(np.maximum, parts)),
    "pmin": _all_reduce(lambda parts: functools.reduce(np.minimum, parts)),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged_all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _broadcast,
    "axis_index": _axis_index,
    "pvary": _same,
    "pcast": _same,
}
"""For each primitive that names mesh axes, a function of its parameters, the axes of the mesh and its operands."""


# Divides a per-device program into runs, the equations between two collectives, and compiles each run once.


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Equations without communication."""

    invars: tuple[Any, ...]  # invars, outvars: the variables of its operands and results
    outvars: tuple[Any, ...]
    call: Callable[..., list[Any]]  # the compiled function
    repeat: bool  # whether it must be called for each device, even if operands are the same, because it has effects


@tabulated(256)
def divided(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any], tuple[Run | core.JaxprEqn, ...]]:
    """The body of a ClosedJaxpr or Jaxpr, its constants, and its runs and equations that communicate, in order."""
    body, consts = jax_adapter.closed(NegativePads().jaxpr(jaxpr))
    steps: list[Run | core.JaxprEqn] = []
    needed = _variables(body.outvars)  # by later steps
    groups = itertools.groupby(body.eqns, functools.partial(_communicates, by_index=True))
    for together, eqns in reversed([(together, list(eqns)) for together, eqns in groups]):
        for step in reversed(eqns) if together else [_run_of(eqns, needed)]:
            needed |= _variables(step.invars)
            steps.append(step)
    return body, consts, tuple(reversed(steps))


def _variables(operands: Iterable[Any]) -> dict[Any, None]:
    return {v: None for v in operands if not isinstance(v, core.Literal)}


def _run_of(eqns: Sequence[core.JaxprEqn], needed: Container[Any]) -> Run:
    """A run of consecutive equations. It returns the results that later steps need."""
    computed = [v for eqn in eqns for v in eqn.outvars]
    reads = tuple(v for v in _variables(v for eqn in eqns for v in eqn.invars) if v not in {*computed})
    writes = tuple(v for v in computed if v in needed)

    def call(*operands: Any) -> list[Any]:
        env = dict(zip(reads, operands, strict=True))
        for eqn in eqns:
            values = [_literal(v) if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, jax_adapter.bind(eqn.primitive, eqn.params, values), strict=True))
        return [env[v] for v in writes]

    # Without the simplifier, XLA:GPU ends the process when it compiles a sort of one element.
    options = AS_WRITTEN if jax.default_backend() == "cpu" else None
    return Run(reads, writes, jax.jit(call, compiler_options=options), any(eqn.effects for eqn in eqns))


@tabulated(1024)
def communicates(jaxpr: Any, *, by_index: bool = False) -> bool:
    """Whether devices communicate inside a jaxpr, or, ``by_index``, read their positions on the mesh."""
    return any(_communicates(eqn, by_index=by_index) for eqn in jax_adapter.closed(jaxpr)[0].eqns)


def _communicates(eqn: core.JaxprEqn, *, by_index: bool) -> bool:
    if eqn.primitive.name in COLLECTIVES:
        return by_index or eqn.primitive.name != "axis_index"
    inner = jax_adapter.sub_jaxprs(eqn.params)
    return any(communicates(x, by_index=by_index) for x in inner) if inner else bool(jax_adapter.named_axes(eqn))


def _literal(v: core.Literal) -> np.ndarray:
    return np.asarray(v.val, v.aval.dtype)  # type: ignore[attr-defined]


@with_tables
def simulate(
    jaxpr: Any, consts: Sequence[Any], axis_sizes: Mapping[str, int], stacked_args: Sequence[Any]
) -> list[np.ndarray]:
    """The results of a per-device program on all devices."""
    sizes = tuple(axis_sizes.items())
    devices = math.prod(axis_sizes.values())
    invars = jax_adapter.closed(jaxpr)[0].invars
    if len(invars) != len(stacked_args):
        raise TraceError(f"the program takes {len(invars)} arguments and got {len(stacked_args)}.")
    arguments = [_unstack(i, var.aval, x, devices) for i, (var, x) in enumerate(zip(invars, stacked_args, strict=True))]
    held = [[_on_host(c)] * devices for c in consts]
    return [_stack(value) for value in _interpret(jaxpr, sizes, devices, [*held, *arguments])]


def _on_host(x: Any) -> Any:
    """A NumPy array. Random keys stay JAX arrays, because NumPy has no dtype for them."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return x if is_key else np.asarray(x)


def _unstack(position: int, aval: Any, stacked: Any, devices: int) -> PerDevice:
    values = [_on_host(x) for x in (stacked if isinstance(stacked, (list, tuple)) else _on_host(stacked))]
    needed = f"the mesh needs {devices} arrays {aval.dtype}{list(aval.shape)}"
    if len(values) != devices:
        raise TraceError(f"argument {position} is given for {len(values)} devices.", got=needed)
    for x in values:
        if x.shape != aval.shape or x.dtype != aval.dtype:
            raise TraceError(f"argument {position} has a part {x.dtype}{list(x.shape)}.", got=needed)
    return values


def _stack(values: PerDevice) -> Any:
    if isinstance(values[0], jax.Array) and jnp.issubdtype(values[0].dtype, jax.dtypes.extended):
        return jnp.stack(values)
    return np.stack([np.asarray(v) for v in values])


def _interpret(jaxpr: Any, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]) -> list[PerDevice]:
    """The results of a jaxpr, whose open constvars come first among the operands."""
    body, consts, steps = divided(jaxpr)
    held = [[_on_host(x)] * devices for x in consts]
    values: dict[Any, PerDevice] = dict(zip((*body.constvars, *body.invars), [*held, *operands], strict=True))

    def read(v: Any) -> PerDevice:
        return [_literal(v)] * devices if isinstance(v, core.Literal) else values[v]

    for step in steps:
        arrays = [read(v) for v in step.invars]
        if isinstance(step, Run):
            results = _run(step, arrays, devices)
        else:
            results = _communicate(step, axis_sizes, devices, arrays)
        values.update(zip(step.outvars, results, strict=True))
    return [read(v) for v in body.outvars]


def _run(run: Run, operands: list[PerDevice], devices: int) -> list[PerDevice]:
    """Calls a run for every device, but only once for devices whose operands are the same objects."""
    results: dict[Any, list[Any]] = {}
    per_device = []
    for device in range(devices):
        local = [operand[device] for operand in operands]
        key = device if run.repeat else tuple(map(id, local))
        if key not in results:
            # As NumPy arrays, because the type of a JAX array contains a mesh, and the next program has another mesh.
            results[key] = [_on_host(result) for result in run.call(*local)]
        per_device.append(results[key])
    return [list(result) for result in zip(*per_device, strict=True)]


def _communicate(eqn: core.JaxprEqn, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]) -> list[PerDevice]:
    name = eqn.primitive.name
    if name in COLLECTIVES:
        return [COLLECTIVES[name](eqn.params, axis_sizes, *operands)]
    if (called := jax_adapter.called_jaxpr(eqn)) is not None:
        return _interpret(called, axis_sizes, devices, operands)
    if name not in _REGIONS:
        axes = sorted(map(str, jax_adapter.named_axes(eqn)))
        where = jax_adapter.user_line(eqn.source_info)
        raise TraceError(f"'{name}' communicates over {axes} and has no simulation.", where=where)
    return _REGIONS[name](eqn, axis_sizes, devices, operands)


def _scan(eqn: core.JaxprEqn, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]) -> list[PerDevice]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    num_consts, num_carry = jax_adapter.scan_counts(eqn.params)
    consts, carry = operands[:num_consts], operands[num_consts:][:num_carry]
    xs = [[_on_host(x) for x in per_device] for per_device in operands[num_consts + num_carry :]]
    collected: list[list[PerDevice]] = [[] for _ in eqn.outvars[num_carry:]]
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        slices = [[x[i] for x in per_device] for per_device in xs]
        results = _interpret(body, axis_sizes, devices, [*consts, *carry, *slices])
        carry = results[:num_carry]
        for rows, row in zip(collected, results[num_carry:], strict=True):
            rows.append(row)
    if eqn.params["reverse"]:
        collected = [rows[::-1] for rows in collected]
    avals: list[Any] = [var.aval for var in eqn.outvars[num_carry:]]
    ys = [
        [_stack([row[d] for row in rows]) if rows else np.zeros(aval.shape, aval.dtype) for d in range(devices)]
        for rows, aval in zip(collected, avals, strict=True)
    ]
    return [*carry, *ys]


def _while(eqn: core.JaxprEqn, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]) -> list[PerDevice]:
    """Runs a while loop. If devices do not communicate, some may run more iterations than others."""
    params = eqn.params
    num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition_consts = operands[:num_condition]
    body_consts = operands[num_condition : num_condition + num_body]
    carry = operands[num_condition + num_body :]
    communicate = communicates(params["cond_jaxpr"]) or communicates(params["body_jaxpr"])
    while True:
        (conditions,) = _interpret(params["cond_jaxpr"], axis_sizes, devices, [*condition_consts, *carry])
        continues = [bool(condition) for condition in conditions]
        if not any(continues):
            return carry
        if communicate and not all(continues):
            raise _divergence(eqn, "a while loop ends", continues)
        results = _interpret(params["body_jaxpr"], axis_sizes, devices, [*body_consts, *carry])
        carry = [
            [new if is_running else old for is_running, new, old in zip(continues, after, before, strict=True)]
            for after, before in zip(results, carry, strict=True)
        ]


def _cond(eqn: core.JaxprEqn, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]) -> list[PerDevice]:
    branches = eqn.params["branches"]
    index, *operands = operands
    chosen = [min(max(int(i), 0), len(branches) - 1) for i in index]
    taken = sorted(set(chosen))
    if len(taken) > 1 and any(communicates(branches[i]) for i in taken):
        raise _divergence(eqn, "a cond takes a branch", chosen)
    results = {i: _interpret(branches[i], axis_sizes, devices, operands) for i in taken}
    return [[results[i][n][d] for d, i in enumerate(chosen)] for n in range(len(eqn.outvars))]


def _divergence(eqn: core.JaxprEqn, what: str, values: list[Any]) -> RuleError:
    return RuleError(
        f"{what} on some devices only, and there is a collective inside: the others would wait forever.",
        where=jax_adapter.user_line(eqn.source_info),
        got=f"predicate by device: {values}",
        hint="Make the predicate the same on every device (reduce it over the mesh), or communicate outside.",
    )


_REGIONS: dict[str, Callable[..., list[PerDevice]]] = {"scan": _scan, "while": _while, "cond": _cond}
