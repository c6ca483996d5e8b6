"""Simulates a per-device program for all devices of a mesh on one device, run by run between collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.errors import RuleError, TraceError
from gshard.core.jax_adapter_dispatch import Cache
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
class Scalar:
    """A literal of a jaxpr, compared by its bits."""

    bits: bytes
    dtype: np.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(literal: core.Literal) -> Scalar:
        value = np.asarray(literal.val, literal.aval.dtype)  # type: ignore[attr-defined]
        return Scalar(value.tobytes(), value.dtype, value.shape)

    @property
    def value(self) -> np.ndarray:
        return np.frombuffer(self.bits, self.dtype).reshape(self.shape)


Operand = int | Scalar
"""A slot (the number of a value of a flat program) or a literal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One equation, with slots instead of variables."""

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A function without communication. Its slots are numbered from 0; the operands come first."""

    operands: int
    operations: tuple[Operation, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run in a program."""

    run: Run  # the run
    reads: tuple[int, ...]  # reads, writes: the slots of the program for its operands and results
    writes: tuple[int, ...]
    repeat: bool  # whether it must be called for each device, even if operands are the same, because it has effects


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """An equation that several devices run together: a collective, or a region that contains one."""

    eqn: core.JaxprEqn
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FlatProgram:
    """A flattened jaxpr."""

    operands: tuple[int, ...]  # the slots of its operands
    constants: tuple[tuple[int, Any], ...]  # the slots and values of its constants
    steps: tuple[PlacedRun | Communication, ...]  # runs and communications, in the order of their times
    results: tuple[Operand, ...]  # the slots of its results, or literals


@tabulated(1024)
def communicates(jaxpr: Any) -> bool:
    """Whether devices communicate inside a jaxpr. ``axis_index`` is not communication."""
    eqns = jax_adapter.closed(jaxpr)[0].eqns
    return any(_communicates(eqn) and eqn.primitive.name != "axis_index" for eqn in eqns)


@tabulated(1024)
def names_axes(jaxpr: Any) -> bool:
    """Whether an equation inside a jaxpr names a mesh axis, so that the jaxpr cannot run on a single device."""
    eqns = jax_adapter.closed(jaxpr)[0].eqns
    return any(_names_axes(eqn) for eqn in eqns)


def _communicates(eqn: core.JaxprEqn) -> bool:
    inner = jax_adapter.sub_jaxprs(eqn.params)
    return any(map(communicates, inner)) if inner else _names_axes(eqn)


def _names_axes(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name in COLLECTIVES:
        return True
    inner = jax_adapter.sub_jaxprs(eqn.params)
    return any(map(names_axes, inner)) if inner else bool(jax_adapter.named_axes(eqn))


@tabulated(256)
def flat_program(jaxpr: Any) -> FlatProgram:
    """The flattened form of a ClosedJaxpr or Jaxpr."""
    timeline = _Timeline()
    opened, consts = jax_adapter.closed(NegativePads().jaxpr(jaxpr))
    operands = tuple(timeline.slot(0) for _ in (*opened.constvars[len(consts) :], *opened.invars))
    constants = timeline.constants_for(consts)
    results = timeline.inline(opened, (*constants, *operands))
    return FlatProgram(operands, tuple(timeline.constants), timeline.steps(results), results)


class _Timeline:
    """Collects the equations of a jaxpr and of the bodies that it calls, by their times."""

    def __init__(self) -> None:
        self.times: list[int] = []  # for each slot the time at which it is computed
        self.constants: list[tuple[int, Any]] = []
        self.pure: dict[int, list[tuple[Operation, bool]]] = {}
        self.communications: dict[int, list[Communication]] = {}

    def slot(self, time: int) -> int:
        """A new slot."""
        self.times.append(time)
        return len(self.times) - 1

    def constants_for(self, values: tuple[Any, ...]) -> tuple[int, ...]:
        """New slots for constants."""
        slots = tuple(self.slot(0) for _ in values)
        self.constants.extend(zip(slots, values, strict=True))
        return slots

    def inline(self, jaxpr: core.Jaxpr, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Adds the equations of ``jaxpr``, applied to ``operands`` (constvars first); returns its results."""
        first = len(jaxpr.constvars)
        held, given = operands[:first], operands[first:]
        return tuple(jax_adapter.evaluate(jaxpr, held, given, lambda e, xs: self.add(e, tuple(xs)), Scalar.of))

    def add(self, eqn: core.JaxprEqn, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Adds one equation; returns its results."""
        body = jax_adapter.called_jaxpr(eqn)
        if body is not None:
            opened, consts = jax_adapter.closed(body)
            return self.inline(opened, (*self.constants_for(consts), *operands))
        if eqn.primitive.name == "layout_constraint":  # the simulation has no layouts
            return operands
        ready = max((self.times[o] for o in operands if isinstance(o, int)), default=0)
        if _names_axes(eqn):
            time = ready + ready % 2
            writes = tuple(self.slot(time) for _ in eqn.outvars)
            self.communications.setdefault(time, []).append(Communication(eqn, operands, writes))
            return writes
        writes = tuple(self.slot(ready | 1) for _ in eqn.outvars)
        operation = Operation(eqn.primitive, tuple(eqn.params.items()), operands, writes)
        self.pure.setdefault(ready | 1, []).append((operation, bool(eqn.effects)))
        return writes

    def steps(self, results: tuple[Operand, ...]) -> tuple[PlacedRun | Communication, ...]:
        """All steps in the order of their times. A run returns only values that other steps or the results read."""
        computed_at = {slot: time for time, run in self.pure.items() for op, _ in run for slot in op.results}
        needed = _slots(results)
        needed |= _slots(x for steps in self.communications.values() for step in steps for x in step.reads)
        for time, run in self.pure.items():
            reads = _slots(x for op, _ in run for x in op.operands)
            needed |= {slot for slot in reads if computed_at.get(slot) != time}
        steps: list[PlacedRun | Communication] = []
        for time in sorted({*self.pure, *self.communications}):
            if time % 2:
                steps.append(_place(self.pure[time], needed))
            else:
                steps.extend(self.communications[time])
        return tuple(steps)


def _slots(operands: Iterable[Operand]) -> set[int]:
    return {operand for operand in operands if isinstance(operand, int)}


def _place(operations: list[tuple[Operation, bool]], needed: set[int]) -> PlacedRun:
    """The run of these operations. Slots are numbered by first use, so that equal runs are equal values."""
    computed = {slot for op, _ in operations for slot in op.results}
    slots = (x for op, _ in operations for x in op.operands if isinstance(x, int))
    reads = list(dict.fromkeys(slot for slot in slots if slot not in computed))
    number = {slot: n for n, slot in enumerate(reads)}
    renumbered = []
    for op, _ in operations:
        for slot in op.results:
            number[slot] = len(number)
        operands = tuple(number[x] if isinstance(x, int) else x for x in op.operands)
        results = tuple(number[slot] for slot in op.results)
        renumbered.append(dataclasses.replace(op, operands=operands, results=results))
    writes = tuple(slot for op, _ in operations for slot in op.results if slot in needed)
    run = Run(len(reads), tuple(renumbered), tuple(number[slot] for slot in writes))
    return PlacedRun(run, tuple(reads), writes, any(has_effects for _, has_effects in operations))


def compiled(run: Run) -> Callable[..., list[Any]]:
    """A run as a compiled function of its operands. Equal runs share it."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    try:
        return _COMPILED.get((run, platform), lambda: _compiled(run, platform))  # type: ignore[no-any-return]
    except TypeError:  # a parameter without a hash
        return _compiled(run, platform)


# `jax.clear_caches` empties it, as it does JAX's own caches.
_COMPILED = Cache(1024)


def _compiled(run: Run, platform: str) -> Callable[..., list[Any]]:
    def call(*operands: Any) -> list[Any]:
        env = dict(enumerate(operands))
        for op in run.operations:
            values = [env[x] if isinstance(x, int) else x.value for x in op.operands]
            env.update(zip(op.results, jax_adapter.bind(op.primitive, dict(op.params), values), strict=True))
        return [env[slot] for slot in run.results]

    # Without the simplifier, XLA:GPU ends the process when it compiles a sort of one element.
    return jax.jit(call, compiler_options=AS_WRITTEN if platform == "cpu" else None)


def unknown_collective(eqn: core.JaxprEqn) -> TraceError:
    """The error for an equation that names mesh axes and has no simulation."""
    axes = sorted(map(str, jax_adapter.named_axes(eqn)))
    return TraceError(
        f"'{eqn.primitive.name}' communicates over {axes} and has no simulation.",
        where=jax_adapter.user_line(eqn.source_info),
    )


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
    program = flat_program(jaxpr)
    values: dict[int, PerDevice] = {slot: [_on_host(value)] * devices for slot, value in program.constants}
    values.update(zip(program.operands, operands, strict=True))

    def read(operand: Operand) -> PerDevice:
        return values[operand] if isinstance(operand, int) else [operand.value] * devices

    for step in program.steps:
        if isinstance(step, PlacedRun):
            results = _run(step, [values[slot] for slot in step.reads], devices)
        else:
            results = _communicate(step, axis_sizes, devices, [read(operand) for operand in step.reads])
        values.update(zip(step.writes, results, strict=True))
    return [read(operand) for operand in program.results]


def _run(step: PlacedRun, operands: list[PerDevice], devices: int) -> list[PerDevice]:
    """Calls a run for every device, but only once for devices whose operands are the same objects."""
    function = compiled(step.run)
    results: dict[Any, list[Any]] = {}
    per_device = []
    for device in range(devices):
        local = [operand[device] for operand in operands]
        key = device if step.repeat else tuple(map(id, local))
        if key not in results:
            # As NumPy arrays, because the type of a JAX array contains a mesh, and the next program has another mesh.
            results[key] = [_on_host(result) for result in function(*local)]
        per_device.append(results[key])
    return [list(result) for result in zip(*per_device, strict=True)]


def _communicate(
    step: Communication, axis_sizes: AxisSizes, devices: int, operands: list[PerDevice]
) -> list[PerDevice]:
    name, params = step.eqn.primitive.name, step.eqn.params
    if name in COLLECTIVES:
        return [COLLECTIVES[name](params, axis_sizes, *operands)]
    region = _REGIONS.get(name)
    if region is None:
        raise unknown_collective(step.eqn)
    return region(step.eqn, axis_sizes, devices, operands)


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
