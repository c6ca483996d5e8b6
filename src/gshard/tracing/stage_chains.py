"""Finds chains of equal calls of ``gshard.stage``, and defines the loop that computes what a chain does.

A call is the next one of a chain if it reads a result of the call before it, and if both have equal bodies. In a
derivative the calls of the backward pass are another chain. Of the operands of a chain

- those that are results of the call before become the carry,
- those that are the same in all calls become constants,
- all others are stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import called_jaxpr, closed, is_transposed, retyped, user_line
from gshard.core.pipeline_schedule import Schedule
from gshard.language.stage_primitive import STAGE, stage_p
from gshard.tracing.equal_bodies import first_difference, same_operand

_APART = "Each stage reads what the one before it returns. Put what is computed in between into the stages."
_UNLIKE = "Stages have equal shapes and operations. Give numbers that differ, such as the number of a layer, as arrays."
_DERIVED = (
    "Give jax.checkpoint(layer) to gshard.stage instead of recomputing all stages together. Give weights as arguments "
    "if the first stage reads what no derivative is by."
)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StageCall:
    """A call of a stage."""

    equation: Any  # the equation
    operands: Sequence[Any]  # its operands, and the constants of its body as literals
    # the schedule of the pipeline; None if JAX left out all results with the mark of the stage
    schedule: Schedule | None

    @property
    def body(self) -> Any:
        return closed(called_jaxpr(self.equation))[0]

    @property
    def results(self) -> list[Any]:
        return list(self.equation.outvars)

    def refusal(self, what: str, got: str, hint: str) -> ShardingError:
        own = str(self.schedule or "").replace("pipeline(x", "stage(f")
        given = "; ".join(filter(None, (own, got)))
        return ShardingError(what, user_line(self.equation.source_info), given, hint)


def call_of(e: Any) -> StageCall | None:
    """The call of a stage; None for other equations."""
    if called_jaxpr(e) is None:
        return None
    body, consts = closed(called_jaxpr(e))
    schedule = next(filter(None, map(schedule_of, body.eqns)), None)
    if schedule is None and e.params.get("name") != STAGE:
        return None
    constants = (Literal(x, v.aval) for x, v in zip(consts, body.constvars, strict=True))
    return StageCall(e, (*e.invars, *constants), schedule)


def schedule_of(e: Any) -> Schedule | None:
    """The schedule that marks the results of a stage; None for other equations."""
    return e.params["schedule"] if e.primitive is stage_p else None


def chains_of(calls: Sequence[StageCall]) -> list[list[StageCall]]:
    """The chains of calls.

    A call without a mark that reads no result of another call is in no chain: JAX moved operations on weights alone out
    of a loop.
    """
    chains: list[list[StageCall]] = []
    ending_in: dict[Any, list[StageCall]] = {}  # for each result of the last call of a chain, the chain
    differences: list[str] = []
    for call in calls:
        before = {id(chain): chain for v in variables_of(call.operands) if (chain := ending_in.get(v)) is not None}
        found = {id(chain): _difference(chain[-1], call) for chain in before.values()}
        chain = next((before[i] for i, difference in found.items() if not difference), None)
        if chain is None and call.schedule is None and not before:
            continue
        if chain is None:
            differences += [
                difference
                for i, difference in found.items()
                if is_transposed(before[i][-1].equation.source_info) == is_transposed(call.equation.source_info)
            ]
            chains.append(chain := [])
        else:
            ending_in = {v: other for v, other in ending_in.items() if other is not chain}
        chain.append(call)
        ending_in.update((v, chain) for v in call.results)
    for chain in chains:
        if len(chain) == 1 or chain[0].schedule is None:
            raise _alone(chain[0], differences)
    return chains


def _alone(call: StageCall, differences: Sequence[str]) -> ShardingError:
    hints = [_UNLIKE if differences else _APART]
    if is_transposed(call.equation.source_info) or any("the operands" in d or "the results" in d for d in differences):
        hints.append(_DERIVED)
    what = "a stage has no equal stage directly before or after it, so there is no pipeline."
    return call.refusal(what, f"in the stage next to it {differences[0]}" if differences else "", " ".join(hints))


def _difference(before: StageCall, call: StageCall) -> str:
    """How the bodies of two calls differ; empty if they are equal."""
    if before.schedule and call.schedule and before.schedule != call.schedule:
        return f"one has the schedule {before.schedule}, the other {call.schedule}"
    return first_difference(before.body, call.body, constants=False)  # constants are operands


class StageChain:
    """The loop of a chain of calls."""

    def __init__(self, calls: Sequence[StageCall]):
        self.calls = calls  # the calls in their order
        # carried: for each operand that is a result of the call before, the number of this result; shared: the operands
        # that are the same in all calls; stacked: all other operands
        self.carried, self.shared, self.stacked = dict[int, int](), list[int](), list[int]()
        for i in range(len(calls[0].operands)):
            own = [call.operands[i] for call in calls]
            j = next((j for j, v in enumerate(calls[0].results) if v is own[1]), None)
            if j is not None and all(v is call.results[j] for v, call in zip(own[1:], calls, strict=False)):
                self.carried[i] = j
            elif all(same_operand(own[0], v, {}) for v in own[1:]):
                self.shared.append(i)
            else:
                self.stacked.append(i)

    @property
    def results(self) -> list[tuple[Any, ...]]:
        """Each result, of all calls."""
        return list(zip(*(call.results for call in self.calls), strict=True))

    def slices(self, i: int) -> tuple[Any, ...]:
        """Operand ``i`` of all calls."""
        return tuple(call.operands[i] for call in self.calls)

    def run(self, reverse: bool, *operands: Any) -> list[Any]:
        """The loop."""
        order = [*self.carried, *self.shared, *self.stacked]
        first, last = len(self.carried), len(self.carried) + len(self.shared)
        body = unmarked(self.calls[0].body)
        types = [v.aval for v in (*body.invars, *body.constvars)]

        def layer(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            of_operand = dict(zip(order, (*carry, *operands[first:last], *slices), strict=True))
            inputs = [of_operand[i] for i in range(len(order))]
            count = len(body.invars)
            results = jaxpr_as_fun(ClosedJaxpr(body, inputs[count:]))(*inputs[:count])
            after = [retyped(results[j], types[i]) for i, j in self.carried.items()]
            return after, [*carry, *results]

        begin = [retyped(x, types[i]) for i, x in zip(self.carried, operands, strict=False)]
        left, made = lax.scan(layer, begin, list(operands[last:]), length=len(self.calls), reverse=reverse)
        return [*left, *made]


def variables_of(operands: Iterable[Any]) -> list[Any]:
    """The operands that are no literals, which have no hash."""
    return [v for v in operands if not isinstance(v, Literal)]


def unmarked(body: Any) -> Any:
    """The body without marks of stages."""
    same = dict[Any, Any]()

    def read(v: Any) -> Any:
        return v if isinstance(v, Literal) else same.get(v, v)

    equations = []
    for e in body.eqns:
        if e.primitive is stage_p:
            same.update(zip(e.outvars, map(read, e.invars), strict=True))
        else:
            equations.append(e.replace(invars=list(map(read, e.invars))))
    return body.replace(eqns=equations, outvars=list(map(read, body.outvars)))
