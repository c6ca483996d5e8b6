"""Gathers the first weights of a loop's next iteration beside the last product of this one.

    scan: w = gather(ws[i]); ... x = y @ v              each iteration begins with a wait for its gather

    w = gather(ws[0])
    scan: ... next, y = barrier(ws[i + 1], y); x = y @ v; w = gather(next)

A compiler that overlaps gathers with products (``Compiler.hides``) finds no product before the first one of an
iteration. The barrier keeps the prefetch from being sent beside an earlier product, which has a gather of its own. The
last iteration fetches the last slice again, so a loop sends one gather more than it has iterations. (To run the last
iteration after the loop avoids that; but then libtpu copies the stacks of the loop into another layout.)

As before, an iteration holds the array of its present product and that of the next one. If its only product reads the
held array, the loop is unrolled twice, so that the arriving array is not copied into the place of the other.

gshard prefetches in a loop if the cost model predicts a call that is faster by enough to be worth the gather. It does
not in a loop that stacks results of its products, if the compiler would then write the stack in a separate kernel
(``Compiler.gathers_split_stack_writes``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.comm.collectives import KINDS
from gshard.comm.steps import ALL_GATHER
from gshard.core.jax_adapter import scan_counts
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Value
from gshard.core.spmd import Collective, Prefetched, SpmdProgram
from gshard.device.cost import WORTH, Cost, cost, origins
from gshard.device.fusion_model import COLLECTIVE, PRODUCT, REGION, Kernel, Kernels
from gshard.device.machine import Machine
from gshard.language.region import Interpreter, value_of
from gshard.remat.replay import run_by
from gshard.remat.straight_line import without_dead_code
from gshard.rewrite.equation_graph import is_pure


@with_tables
def prefetched(
    spmd: SpmdProgram,
    machine: Machine,
    donated: Sequence[int] = (),
    limit: int | None = None,
    known: Cost | None = None,
) -> SpmdProgram:
    """The program with prefetches in loops where that is faster, or the program itself."""
    if ALL_GATHER not in (machine.compiler.hides or ()):
        return spmd
    before = known or cost(spmd, machine, donated)
    chosen: dict[Equation, _Prefetch] = {}
    best, priced = spmd, before
    for prefetch in _possible_prefetches(before, stacks=not machine.compiler.gathers_split_stack_writes):
        program = _rewritten(spmd, before, {**chosen, prefetch.loop: prefetch})
        new_cost = cost(program, machine, donated)
        if new_cost.seconds < WORTH * priced.seconds and (limit is None or new_cost.peak <= limit):
            chosen[prefetch.loop], best, priced = prefetch, program, new_cost
    if not chosen:
        return spmd
    lines = tuple(dict.fromkeys(e.line for prefetch in chosen.values() for e in prefetch.gathers))
    return dataclasses.replace(best, prefetched=Prefetched(before.seconds, priced.seconds, machine.name, lines))


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefetch:
    """The prefetch of a loop."""

    loop: Equation  # a scan
    gathers: tuple[Equation, ...]  # the gathers of its body that run one iteration earlier
    makes: tuple[Equation, ...]  # the equations that compute their operands from slices and constants, in order
    beside: Equation  # the product beside which they run
    operand: Value  # an operand of that product that is computed late enough


def _possible_prefetches(found: Cost, *, stacks: bool) -> Iterator[_Prefetch]:
    """The prefetches of loops whose iterations wait for gathers of slices; with ``stacks``, loops that stack too."""
    waited = {row.equation for row in found.kernels if row.kind == COLLECTIVE and row.seconds > 0}

    def loops(program: Kernels) -> Iterator[Kernel]:
        for kernel in program.kernels:
            if kernel.kind == REGION:
                yield kernel
                for body in kernel.bodies:
                    yield from loops(body)

    for kernel in loops(found.program):
        e = kernel.equation
        if (
            e.name == "scan"
            and e.params["length"] > 1
            and (ahead := _prefetch_of(e, kernel.bodies[0], waited, stacks=stacks))
        ):
            yield ahead


def _prefetch_of(loop: Equation, body: Kernels, waited: set[Equation], *, stacks: bool) -> _Prefetch | None:
    products = [k for k in body.kernels if k.kind == PRODUCT]
    consts, carry = scan_counts(loop.params)
    inputs, outputs = loop.blocks[0].inputs, loop.blocks[0].outputs
    stacked = any(isinstance(v, Value) and v not in inputs for v in outputs[carry:])
    if not products or (stacked and not stacks):
        return None
    sliced = set(inputs[consts + carry :])  # slices, and values computed from slices and constants
    early = {*inputs[:consts], *sliced}  # all values that exist before the iteration
    computable = []
    for e in loop.blocks[0].equations:
        reads = {v for v in e.inputs if isinstance(v, Value)}
        if reads <= early and e.rule is not None and e.name not in KINDS and is_pure(e):
            computable.append(e)
            early.update(e.outputs)
            sliced.update(e.outputs if reads & sliced else ())
    first = body.kernels.index(products[0])
    before = [k.equation for k in body.kernels[:first] if k.kind == COLLECTIVE]
    waiting = [e for e in before if KINDS[e.name] == ALL_GATHER and e in waited]
    gathers = [e for e in waiting if early.issuperset(e.inputs) and not sliced.isdisjoint(e.inputs)]
    last = products[-1].equation
    late_operands = [v for v in last.inputs if isinstance(v, Value) and v not in early]
    if not gathers or not late_operands:
        return None
    sent = tuple(v for e in gathers for v in e.inputs)
    makes = without_dead_code(Block(inputs, tuple(computable), sent)).equations
    return _Prefetch(loop, tuple(gathers), makes, last, late_operands[0])


def _rewritten(spmd: SpmdProgram, before: Cost, chosen: Mapping[Equation, _Prefetch]) -> SpmdProgram:
    jaxpr = run_by(_PrefetchingInterpreter(chosen), before.program.block, spmd)
    return dataclasses.replace(spmd, jaxpr=jaxpr, collectives=tuple(_noted(spmd, before, chosen)))


def _noted(spmd: SpmdProgram, before: Cost, chosen: Mapping[Equation, _Prefetch]) -> Iterator[Collective]:
    """The collectives of the rewritten program: the prefetches in a loop, and once more before it."""
    loops = {e: loop for loop, ahead in chosen.items() for e in ahead.gathers}
    pairs = zip(before.kernels, origins(spmd, before), strict=True)
    early = {id(c): loops[k.equation].trip_count for k, c in pairs if c is not None and k.equation in loops}
    for c in spmd.collectives:
        if id(c) in early:
            yield dataclasses.replace(c, times=c.times // early[id(c)])
        yield c


@dataclasses.dataclass(frozen=True)
class _PrefetchingInterpreter(Interpreter):
    """Runs blocks on one device's parts unchanged, except loops that prefetch."""

    ahead: Mapping[Equation, _Prefetch]

    def region(self, e: Equation, arrays: Sequence[Any]) -> Sequence[Any]:
        """Runs a loop or a branch."""
        return _PrefetchingLoop(self, self.ahead[e], arrays).run() if e in self.ahead else super().region(e, arrays)


class _PrefetchingLoop:
    """Runs a loop with prefetches on arrays."""

    def __init__(self, interpreter: Interpreter, ahead: _Prefetch, arrays: Sequence[Any]):
        self.interpreter, self.ahead = interpreter, ahead
        body, params = ahead.loop.blocks[0], ahead.loop.params
        self.rounds, self.backwards = int(params["length"]), bool(params["reverse"])
        consts, self.carry = scan_counts(params)
        self.consts, self.start = arrays[:consts], list(arrays[consts : consts + self.carry])
        self.stacks = arrays[consts + self.carry :]
        self.fixed, self.carried = body.inputs[:consts], body.inputs[consts : consts + self.carry]
        self.slices = body.inputs[consts + self.carry :]
        self.sent = tuple(v for e in ahead.gathers for v in e.inputs if isinstance(v, Value))
        self.held = tuple(v for e in ahead.gathers for v in e.outputs)
        rest = tuple(e for e in body.equations if e not in ahead.gathers)
        self.body = without_dead_code(Block((*body.inputs, *self.held), rest, body.outputs))
        self.unroll = max(2, params["unroll"]) if set(ahead.beside.inputs) & set(self.held) else params["unroll"]

    def run(self) -> list[Any]:
        """The results of the loop."""
        first = self.rounds - 1 if self.backwards else 0
        start = self.start, self._fetched(self._sent(first))
        counted = jnp.arange(self.rounds), list(self.stacks)
        (carried, _), stacked = lax.scan(self._round, start, counted, reverse=self.backwards, unroll=self.unroll)
        return [*carried, *stacked]

    def _round(self, state: Any, slices: Any) -> tuple[Any, list[Any]]:
        """One iteration: the carry, with the arrays fetched for the next iteration, and the stacked outputs."""
        (carried, held), (i, own_slices) = state, slices
        env = dict(zip(self.body.inputs, (*self.consts, *carried, *own_slices, *held), strict=True))
        for e in self.body.equations:
            if e is not self.ahead.beside:
                self.interpreter.evaluate([e], env)
                continue
            next_index = jnp.maximum(i - 1, 0) if self.backwards else jnp.minimum(i + 1, self.rounds - 1)
            *sent, late_operand = lax.optimization_barrier((*self._sent(next_index), env[self.ahead.operand]))
            inner_env = {**env, self.ahead.operand: late_operand}
            self.interpreter.evaluate([e], inner_env)
            env.update((v, inner_env[v]) for v in e.outputs)
            held = self._fetched(sent)
        outputs = [jnp.asarray(value_of(v, env)) for v in self.body.outputs]
        return (outputs[: self.carry], held), outputs[self.carry :]

    def _sent(self, at: Any) -> list[Any]:
        """The operands of the gathers of an iteration."""
        found = [lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False) for x in self.stacks]
        env = dict(zip((*self.fixed, *self.slices), (*self.consts, *found), strict=True))
        self.interpreter.evaluate(self.ahead.makes, env)
        return [env[v] for v in self.sent]

    def _fetched(self, sent: Sequence[Any]) -> list[Any]:
        """The results of the gathers."""
        env = dict(zip(self.sent, sent, strict=True))
        self.interpreter.evaluate(self.ahead.gathers, env)
        return [env[v] for v in self.held]
