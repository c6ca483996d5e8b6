"""Simulates a per-device program for all devices of a mesh on one device.

The mesh may have any number of devices, and they need not exist. Equations between two collectives are compiled and run
for one device after the other. Collectives run in NumPy on the list of all devices' arrays.

    >>> import jax, numpy as np
    >>> shifted = lambda x: x - jax.lax.pmax(x, "a")
    >>> simulate_function(shifted, {"a": 3}, np.array([2, 5, 3], np.int32))
    [array([-3,  0, -2], dtype=int32)]

If the operands of several devices are the same objects (literals, replicated arguments, results of an all-reduce),
they are computed once. Loops and branches are interpreted only if devices communicate inside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.errors import RuleError, TraceError
from gshard.core.planning_tables import with_tables
from gshard.simulator.simulated_collectives import COLLECTIVES, AxisSizes, PerDevice, run_collective
from gshard.simulator.simulated_runs import (
    Communication,
    Operand,
    PlacedRun,
    communicates,
    compiled,
    flat_program,
    unknown_collective,
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


@with_tables
def simulate_function(
    function: Callable[..., Any], axis_sizes: Mapping[str, int], *stacked_args: Any
) -> list[np.ndarray]:
    """Traces a function of one device's arrays, and simulates it."""
    jaxpr, constants = local_jaxpr(function, axis_sizes, *(x[0] for x in stacked_args))
    devices = math.prod(axis_sizes.values())
    return simulate(jaxpr, (), axis_sizes, [*([c] * devices for c in constants), *stacked_args])


def local_jaxpr(
    function: Callable[..., Any], axis_sizes: Mapping[str, int], *local_args: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Traces the program of one device. The devices of the mesh need not exist."""
    mesh = jax.sharding.AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes))
    replicated = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    outer, consts = jax_adapter.closed(jax.make_jaxpr(mapped)(*local_args))
    (eqn,) = outer.eqns
    return eqn.params["jaxpr"], consts


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
        return [run_collective(name, params, axis_sizes, operands)]
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
