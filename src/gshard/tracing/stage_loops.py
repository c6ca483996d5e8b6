"""Converts chains of equal calls of ``gshard.stage`` to loops over stacked operands, which run as pipelines.

    x = stage(layer)(x, w0)
    x = stage(layer)(x, w1)     ──▶     x, _ = scan(layer, x, pipeline(stack([w0, w1, w2])))
    x = stage(layer)(x, w2)

Each call is a ``jit`` in the jaxpr. The loop takes the place of the last call of a chain. Equations that read results
of earlier calls come after it. A loop reads the results of another chain, such as residuals, as the stack that the loop
of that chain makes, also in reverse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var
from jax.extend.core.primitives import closed_call_p

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import as_if_at, closed, shapes_of, sub_jaxprs, user_line
from gshard.core.jax_adapter_context import with_settings_of
from gshard.core.jax_adapter_retracing import EachJaxpr
from gshard.core.mark import mark_of_stack
from gshard.core.pipeline_schedule import Schedule
from gshard.language.mark_primitive import bind_mark
from gshard.language.stage_primitive import stage_p
from gshard.tracing.stage_chains import StageCall, StageChain, call_of, chains_of, schedule_of, unmarked, variables_of

_INSIDE = (
    "Compute it inside of a stage. If it is the derivative of a loss that reads the results of several stages, return "
    "them from the stages as second results."
)


def with_stage_loops(whole: Any) -> Any:
    """The (closed) jaxpr with loops in place of the calls of ``gshard.stage``; the same object if there are none."""
    staged = list(_staged(closed(whole)[0], set()))
    if not staged:
        return whole
    loops = _StageLoops()
    changed = loops.jaxpr(whole)
    for body, mark in staged:
        if id(body) not in loops.looped:
            raise ShardingError(
                "jax.jit did not trace this stage as a call.",
                user_line(mark.source_info),
                str(mark.params["schedule"]),
                "gshard.stage has no effect under jax.disable_jit(), nor inside of another stage.",
            )
    return changed


def _staged(jaxpr: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """The bodies with marks of a stage, each with the first of these marks."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    mark = next(filter(schedule_of, jaxpr.eqns), None)
    if mark is not None:
        yield jaxpr, mark
    for e in jaxpr.eqns:
        for inner in sub_jaxprs(e.params):
            yield from _staged(closed(inner)[0], seen)


class _StageLoops(EachJaxpr):
    """Converts the chains of a jaxpr and of the jaxprs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.looped: set[int] = set()  # the identities of the bodies of calls that are in loops

    def body(self, body: Any) -> Any:
        """The body with loops in place of its chains."""
        if any(e.primitive is stage_p and schedule_of(e) is None for e in body.eqns):
            body = unmarked(body)
        calls = {i: call for i, e in enumerate(body.eqns) if (call := call_of(e)) is not None}
        if not calls:
            return super().body(body)
        chains = chains_of([*calls.values()])
        chained = {id(call) for chain in chains for call in chain}
        calls = {i: call for i, call in calls.items() if id(call) in chained}
        self.looped.update(id(call.body) for call in calls.values())
        chain_of_last = {id(chain[-1]): StageChain(chain) for chain in chains}
        writer = _Writer()
        for i, e in enumerate(body.eqns):
            if i not in calls:
                writer.add(self.equation(e))
            elif (chain := chain_of_last.get(id(calls[i]))) is not None:
                writer.loop(chain)
            else:
                writer.pending.update(calls[i].results)
        return body.replace(outvars=list(map(writer.read, body.outvars)), eqns=writer.equations)


class _Writer:
    """Writes the equations of a body."""

    def __init__(self) -> None:
        self.equations = list[Any]()  # the equations so far
        self.pending = set[Any]()  # the variables of calls and equations that are not written so far
        self._delayed = list[Any]()
        self._renamed = dict[Any, Any]()
        self._stacks = dict[tuple[int, ...], Any]()  # by the identities of their slices
        self._stack_of = dict[Any, tuple[Any, tuple[Any, ...], Any]]()  # of a slice: the stack, its slices, the call

    def read(self, v: Any) -> Any:
        """The variable to read for a variable of the original body. Takes a stack apart if it is a slice."""
        if isinstance(v, Literal):
            return v
        if v not in self._renamed and v in self._stack_of:
            stack, slices, e = self._stack_of[v]
            for own, made in zip(slices, self._call(jnp.unstack, [stack], e), strict=True):
                if not isinstance(own, Literal):
                    self._renamed.setdefault(own, made)
        return self._renamed.get(v, v)

    def add(self, e: Any) -> None:
        """Writes an equation, or delays it until what it reads is written."""
        if self._is_pending(e.invars):
            self._delayed.append(e)
            self.pending.update(e.outvars)
            return
        inputs = list(map(self.read, e.invars))
        self.equations.append(e.replace(invars=inputs))

    def loop(self, chain: StageChain) -> None:
        """Writes the loop of a chain in place of its last call."""
        self._check(chain)
        call = chain.calls[0]
        keys = [tuple(map(id, chain.slices(i))) for i in chain.stacked]
        reverse = any(key[::-1] in self._stacks for key in keys)
        step = -1 if reverse else 1
        stacks = [self._stack(chain.slices(i)[::step], call) for i in chain.stacked]
        before = [call.operands[i] for i in (*chain.carried, *chain.shared)]
        operands = list(map(self.read, before))
        made = self._call(functools.partial(chain.run, reverse), [*operands, *stacks], call.equation)
        last, made = made[: len(chain.carried)], made[len(chain.carried) :]
        self._renamed.update((v, x) for v, x in zip(before, operands, strict=True) if not isinstance(v, Literal))
        self._renamed.update((chain.calls[-1].results[j], v) for j, v in zip(chain.carried.values(), last, strict=True))
        for stack, slices in zip(made, [*map(chain.slices, chain.carried), *chain.results], strict=True):
            self._stacks[tuple(map(id, slices[::step]))] = stack
            for v in variables_of(slices):
                self._stack_of.setdefault(v, (stack, slices[::step], call.equation))
        self.pending.difference_update(v for call in chain.calls for v in call.results)
        delayed, self._delayed = self._delayed, []
        self.pending.difference_update(v for e in delayed for v in e.outvars)
        for e in delayed:
            self.add(e)

    def _is_pending(self, variables: Iterable[Any]) -> bool:
        return any(v in self.pending for v in variables_of(variables))

    def _check(self, chain: StageChain) -> None:
        """Checks that all operands of a chain are known before its loop."""
        own = {v for call in chain.calls for v in call.results}
        for k, call in enumerate(chain.calls):
            for i, v in enumerate(call.operands):
                if not self._is_pending([v]) or (k and i in chain.carried):
                    continue
                if v in own:
                    hint = "Hand it on through all stages in between."
                    raise call.refusal("a stage reads a result of a stage that is not directly before it.", "", hint)
                between = next((e for e in self._delayed if v in e.outvars), call.equation)
                what = "a stage reads what is computed from an earlier stage outside of the stages."
                raise call.refusal(what, f"{between.primitive.name} at {user_line(between.source_info)}", _INSIDE)
        if not chain.stacked:
            hint = "A pipeline gives each stage weights of its own. Call the function without gshard.stage."
            raise chain.calls[0].refusal("all stages have the same operands.", "", hint)

    def _stack(self, slices: Sequence[Any], call: StageCall) -> Any:
        """The variable of a stack. A stack that is new gets the mark of the pipeline."""
        key = tuple(map(id, slices))
        if key not in self._stacks:
            assert call.schedule is not None
            stacked = functools.partial(_stacked, call.schedule)
            (self._stacks[key],) = self._call(stacked, list(map(self.read, slices)), call.equation)
        return self._stacks[key]

    def _call(self, f: Callable[..., Any], operands: Sequence[Any], e: Any) -> list[Any]:
        """Writes a call of a function, with the source line of an equation. Returns the variables of its results."""
        with as_if_at(e.source_info), with_settings_of(e):
            made = jax.make_jaxpr(f)(*shapes_of([v.aval for v in operands]))
        results = list(map(Var, made.out_avals))
        call = {"primitive": closed_call_p, "params": {"call_jaxpr": made}, "effects": made.effects}
        self.equations.append(e.replace(invars=list(operands), outvars=results, **call))
        return results


def _stacked(schedule: Schedule, *slices: Any) -> Any:
    stack = jnp.stack(slices)
    if jnp.issubdtype(stack.dtype, jax.dtypes.extended):
        return stack
    return bind_mark(stack, mark_of_stack(schedule, stack.ndim))
