"""Divides a per-device program into runs, the equations between two collectives, and compiles each run once.

A jaxpr is first flattened: calls such as jit and remat are replaced by their bodies. Then each equation gets a time, as
early as its operands allow. Equations without communication get odd times, others even times. All equations of an odd
time form a *run*, which is compiled as one function and called for every device.

    time 0   p = axis_index a                 no operands
    time 1   y = sin x;  z = mul x x          one run
    time 2   s = psum y                       needs the run
    time 3   r = add s z                      the next run

A compilation takes some 40 ms, a call 10 us. So runs are values: two runs with the same primitives, parameters and
operands are equal, and equal runs of all programs share one compiled function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.errors import TraceError
from gshard.core.jax_adapter_dispatch import Cache
from gshard.core.planning_tables import tabulated
from gshard.core.xla_workarounds import AS_WRITTEN, NegativePads
from gshard.simulator.simulated_collectives import COLLECTIVES


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
    platform = _platform()
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


def _platform() -> str:
    """The platform on which JAX runs arrays that are on no particular device."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def unknown_collective(eqn: core.JaxprEqn) -> TraceError:
    """The error for an equation that names mesh axes and has no simulation."""
    axes = sorted(map(str, jax_adapter.named_axes(eqn)))
    return TraceError(
        f"'{eqn.primitive.name}' communicates over {axes} and has no simulation.",
        where=jax_adapter.user_line(eqn.source_info),
    )
