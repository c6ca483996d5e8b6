"""Runs: the stretches of a per-device program between two collectives, each compiled once.

A jaxpr is first made flat (jit, remat and their like mean their bodies) and then put on a time line: pure
equations at odd times, equations that communicate at even times, each as early as its operands allow. All pure
equations of one time form a *run*, compiled as one function and called once for every device.

    time 0   p = axis_index a                 no operands: before everything
    time 1   y = sin x;  z = mul x x          one run
    time 2   s = psum y                       needs the run
    time 3   r = add s z                      the next run

Compiling is what costs (some 40 ms, against 10 us for a call), so a run is a *value*: two runs with the same
primitives, parameters and wiring are equal, and equal runs share one compiled function across programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.core.errors import TraceError
from gshard.core.jax_adapter_dispatch import Cache
from gshard.core.planning_tables import tabulated
from gshard.core.xla_workarounds import AS_WRITTEN
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
"""A slot (every value of a flat program has a number) or a literal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One equation with its variables as slots."""

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A pure function: its slots are its own, ``0 .. operands - 1`` for the operands."""

    operands: int
    operations: tuple[Operation, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run with the slots of the program that it reads and writes."""

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    repeat: bool
    """Whether it must be called for each device even if their operands are the same (it has effects)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """An equation that a device cannot do alone: a collective, or a region with one inside."""

    eqn: core.JaxprEqn
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FlatProgram:
    """A jaxpr on its time line."""

    operands: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    steps: tuple[PlacedRun | Communication, ...]
    results: tuple[Operand, ...]


@tabulated(1024)
def communicates(jaxpr: Any) -> bool:
    """Whether devices depend on each other anywhere inside; ``axis_index`` alone is no communication."""
    eqns = jax_adapter.closed(jaxpr)[0].eqns
    return any(_communicates(eqn) and eqn.primitive.name != "axis_index" for eqn in eqns)


@tabulated(1024)
def names_axes(jaxpr: Any) -> bool:
    """Whether something inside names a mesh axis, so that it cannot run on a single device as it stands."""
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
    """The time line of a jaxpr, ClosedJaxpr or Jaxpr."""
    timeline = _Timeline()
    opened, consts = jax_adapter.closed(jaxpr)
    operands = tuple(timeline.slot(0) for _ in (*opened.constvars[len(consts) :], *opened.invars))
    constants = timeline.constants_for(consts)
    results = timeline.inline(opened, (*constants, *operands))
    return FlatProgram(operands, tuple(timeline.constants), timeline.steps(results), results)


class _Timeline:
    """Collects the equations of one jaxpr and of the bodies that it calls."""

    def __init__(self) -> None:
        self.times: list[int] = []  # of each slot: when it is there
        self.constants: list[tuple[int, Any]] = []
        self.pure: dict[int, list[tuple[Operation, bool]]] = {}
        self.communications: dict[int, list[Communication]] = {}

    def slot(self, time: int) -> int:
        self.times.append(time)
        return len(self.times) - 1

    def constants_for(self, values: tuple[Any, ...]) -> tuple[int, ...]:
        slots = tuple(self.slot(0) for _ in values)
        self.constants.extend(zip(slots, values, strict=True))
        return slots

    def inline(self, jaxpr: core.Jaxpr, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Adds the equations of ``jaxpr``, applied to ``operands`` (those of its constvars first)."""
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), operands, strict=True))

        def read(atom: Any) -> Operand:
            return Scalar.of(atom) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.add(eqn, tuple(map(read, eqn.invars))), strict=True))
        return tuple(map(read, jaxpr.outvars))

    def add(self, eqn: core.JaxprEqn, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Adds one equation; gives its results."""
        body = jax_adapter.called_jaxpr(eqn)
        if body is not None:
            opened, consts = jax_adapter.closed(body)
            return self.inline(opened, (*self.constants_for(consts), *operands))
        if (
            eqn.primitive.name == "layout_constraint"
        ):  # simulated arrays have any sharding; taken away by what is disabled
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
        """Everything in the order of time; a run returns only what others read."""
        made_at = {w: time for time, placed in self.pure.items() for i, _ in placed for w in i.results}
        kept = {o for o in results if isinstance(o, int)}
        kept |= {o for cs in self.communications.values() for c in cs for o in c.reads if isinstance(o, int)}
        for time, placed in self.pure.items():
            reads = {o for i, _ in placed for o in i.operands if isinstance(o, int)}
            kept |= {o for o in reads if made_at.get(o) != time}
        steps: list[PlacedRun | Communication] = []
        for time in sorted({*self.pure, *self.communications}):
            if time % 2:
                steps.append(_place(self.pure[time], kept))
            else:
                steps.extend(self.communications[time])
        return tuple(steps)


def _place(placed: list[tuple[Operation, bool]], kept: set[int]) -> PlacedRun:
    """Numbers the slots of one run from zero, in the order of first use, so that equal runs are equal values."""
    made = {w for i, _ in placed for w in i.results}
    reads = list(dict.fromkeys(o for i, _ in placed for o in i.operands if isinstance(o, int) and o not in made))
    number = {slot: n for n, slot in enumerate(reads)}
    operations = []
    for i, _ in placed:
        for w in i.results:
            number[w] = len(number)
        operands = tuple(number[o] if isinstance(o, int) else o for o in i.operands)
        operations.append(dataclasses.replace(i, operands=operands, results=tuple(number[w] for w in i.results)))
    writes = tuple(w for i, _ in placed for w in i.results if w in kept)
    run = Run(len(reads), tuple(operations), tuple(number[w] for w in writes))
    return PlacedRun(run, tuple(reads), writes, any(effects for _, effects in placed))


def compiled(run: Run) -> Callable[..., list[Any]]:
    """The run as a compiled function of its operands; shared by equal runs."""
    platform = _platform()
    try:
        return _COMPILED.get((run, platform), lambda: _compiled(run, platform))  # type: ignore[no-any-return]
    except TypeError:  # a parameter that does not hash
        return _compiled(run, platform)


# As JAX keeps what it has compiled, and emptied with that.
_COMPILED = Cache(1024)


def _compiled(run: Run, platform: str) -> Callable[..., list[Any]]:
    def call(*operands: Any) -> list[Any]:
        env = dict(enumerate(operands))
        for i in run.operations:
            values = [env[o] if isinstance(o, int) else o.value for o in i.operands]
            env.update(zip(i.results, jax_adapter.bind(i.primitive, dict(i.params), values), strict=True))
        return [env[slot] for slot in run.results]

    # Without its simplifier XLA:GPU ends the process at a sort of one element.
    return jax.jit(call, compiler_options=AS_WRITTEN if platform == "cpu" else None)


def _platform() -> str:
    """The platform on which JAX runs what has no device of its own."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def unknown_collective(eqn: core.JaxprEqn) -> TraceError:
    """The error for an equation that names mesh axes and has no simulation."""
    axes = sorted(map(str, jax_adapter.named_axes(eqn)))
    return TraceError(
        f"'{eqn.primitive.name}' communicates over {axes} and has no simulation.",
        where=jax_adapter.user_line(eqn.source_info),
    )
