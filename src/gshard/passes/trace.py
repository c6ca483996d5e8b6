"""Trace: a function and its arguments become a Program.

JAX traces the function to a jaxpr; here calls are opened (jit, custom derivatives, remat), dead code is dropped, what
is computed twice is computed once, random bits become counters and arithmetic, every variable becomes a value of its
own, and each equation gets its rule or its region.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from gshard import rules as _rules
from gshard.core.errors import TraceError
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter import (
    as_if_at,
    as_traced_here,
    closed,
    in_scopes_of,
    jaxpr_without_dead_code,
    no_mesh_set,
    optimization_barrier_p,
    user_line,
)
from gshard.core.layout import Layout, Named
from gshard.core.mark import Mark
from gshard.core.paths import leaf_names
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.rule import Rule
from gshard.language.mark_primitive import mark_p, name_p
from gshard.language.region import REGIONS
from gshard.language.registry import Call, rule_of
from gshard.tracing.added_in_rounds import added_in_rounds
from gshard.tracing.by_jax import closed_of, name_of
from gshard.tracing.expand import expansion, mark_of_equation, mark_of_type, needs_barrier
from gshard.tracing.files import with_names_of_files
from gshard.tracing.framed import in_frames
from gshard.tracing.in_a_row import one_equation_each
from gshard.tracing.known import Facts, makes_indices
from gshard.tracing.look_up import simpler
from gshard.tracing.manual_regions import check_manual_regions
from gshard.tracing.moved_first import moved_first
from gshard.tracing.opened import opened
from gshard.tracing.padded import padded_by_windows
from gshard.tracing.partly_manual import opened_region
from gshard.tracing.scanned import scanned
from gshard.tracing.subexpression import common_key
from gshard.tracing.sums_of_updates import sums_of_updates
from gshard.tracing.swapped import products_as_wanted
from gshard.tracing.tables import made_of_positions
from gshard.tracing.turned import searched_as_they_lie
from gshard.tracing.unmerged import unmerged
from gshard.tracing.unread import without_unread

assert _rules  # imported for the rules it registers


@collected_seldom()
def trace(
    f: Callable[..., Any], *args: Any, argument_marks: Sequence[Mark | None] | None = None, **kwargs: Any
) -> Program:
    """Traces ``f`` on arguments (arrays or ``jax.ShapeDtypeStruct``) without running it.

    Args:
        f: a function of pytrees of arrays.
        args, kwargs: its arguments.
        argument_marks: for each leaf of ``(args, kwargs)`` a mark or None.

    Returns:
        the program; it does not depend on a mesh.

    Raises:
        TraceError: ``f`` branches on the values of its arguments, or is not a function of arrays.
        ShardingError: parts (``auto_to_manual``) and whole arrays are mixed.

    >>> import jax.numpy as jnp
    >>> print(trace(lambda x: jnp.sin(x).sum(), jnp.zeros((4, 2))))
    program <lambda>
      (%0:f32[4,2]) ->
      %1:f32[4,2] = sin %0   # a b -> a b
      %2:f32[] = reduce_sum %1   # a b -> (); add over a=4; add over b=2
      return %2
    """
    whole, out_tree = closed_of(f, *args, **kwargs)
    return program_of(whole, out_tree, name_of(f), leaf_names(f, (args, kwargs)), argument_marks)


@with_tables
@no_mesh_set()
def program_of(
    whole: Any,
    out_tree: Any,
    name: str,
    names: Sequence[str],
    argument_marks: Sequence[Mark | None] | None = None,
    *,
    as_typed: bool = False,
    layout: Layout | None = None,
) -> Program:
    """The program of a closed jaxpr.

    Args:
        whole: the jaxpr; its constants become the program's first inputs.
        out_tree: the structure of its results.
        name: the function's.
        names: of its flat arguments.
        argument_marks: for each of them a mark or None.
        as_typed: whether results must be sharded as their types say, also where these name no axis: what JAX's
            transformations do with them depends on it.
        layout: what names of dimensions mean; without one they mean nothing.

    Raises:
        ShardingError: parts (``auto_to_manual``) and whole arrays are mixed.
    """
    jaxpr, consts = closed(whole)
    builder = _Builder(layout=layout)
    block = builder.block(jaxpr_without_dead_code(as_traced_here(jaxpr)), captured=consts)
    block = builder.marked_by_type(block, jaxpr.outvars, as_typed)
    check_manual_regions(block)
    with_names_of_files(block)
    captured = tuple(consts)
    marks = tuple(argument_marks) if argument_marks is not None else (None,) * len(names)
    every = (*(f"captured[{i}]" for i in range(len(captured))), *names)
    weak = tuple(bool(getattr(v.aval, "weak_type", False)) for v in jaxpr.outvars)
    return Program(block, captured, marks, every, out_tree, name, weak, tuple(builder.named), layout)


@no_mesh_set()
def block_of(jaxpr: Any, program: Program | None) -> Block:
    """The equations of a jaxpr that is there already, such as that of the per-device program of a program."""
    block = _Builder().block(jaxpr_without_dead_code(jaxpr))
    return with_names_of_files(block, None if program is None else program.block)


@no_mesh_set()
def equations_of(whole: Any, e: Equation, numbers: Iterator[int]) -> tuple[Equation, ...]:
    """The equations of a closed jaxpr that stands for an equation; new values are numbered so."""
    builder = _Builder(numbers)
    made, results = builder.made_of(*closed(whole), e.inputs, e.source_info)
    own = {v for q in made for v in q.outputs}
    result: dict[Any, Value] = {}
    for x, v in zip(results, e.outputs, strict=True):
        if x in own and x not in result:
            result[x] = v
            continue
        # What is computed twice was computed once, and what is given back as it came not at all: a copy has its name.
        copied = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=v.weak))
        copies, (copy,) = builder.made_of(*closed(copied), (x,), e.source_info)
        made, result[copy] = [*made, *copies], v
    return tuple(
        dataclasses.replace(
            q,
            inputs=tuple(result.get(x, x) for x in q.inputs),
            outputs=tuple(result.get(x, x) for x in q.outputs),
            file=e.file,
        )
        for q in made
    )


@dataclasses.dataclass
class _Body:
    """The equations of a block, and which of them have been met before."""

    equations: list[Equation] = dataclasses.field(default_factory=list)
    known: dict[Any, Equation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Builder:
    """Turns jaxprs into blocks; one numbering for all values."""

    counter: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    rules: dict[Any, Rule] = dataclasses.field(default_factory=dict)
    bodies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    layout: Layout | None = None
    named: list[Named] = dataclasses.field(default_factory=list)
    facts: Facts = dataclasses.field(default_factory=Facts)

    def block(
        self,
        jaxpr: Any,
        consts: Sequence[Any] | None = None,
        captured: Sequence[Any] = (),
        same: Iterable[Value | Constant] = (),
    ) -> Block:
        """A block of a jaxpr; its constants are inputs in front, or written in where ``consts`` are given.

        Of those that are inputs the values are known where they are ``captured``; of others, where they are the
        ``same`` as arrays outside.
        """
        env: dict[Any, Value | Constant] = {}
        inputs: list[Value] = []
        for i, var in enumerate(jaxpr.constvars):
            if consts is not None:
                env[var] = Constant(consts[i])
            else:
                inputs.append(self._new(env, var))
        for value, array in zip(inputs, captured, strict=False):
            self.facts.note_captured(value, array)
        arguments = [self._new(env, var) for var in jaxpr.invars]
        for value, outer in zip(arguments, same, strict=False):
            self.facts.note_same(value, outer)
        inputs += arguments
        body = _Body()
        self._equations(jaxpr, env, body, None)
        outputs = tuple(_read(env, v) for v in jaxpr.outvars)
        equations = without_unread(body.equations, outputs, makes_indices)
        equations = scanned(equations, outputs, self._fresh, self._equation, self.made_of)
        equations = made_of_positions(equations, outputs, self._equation)
        for in_place in (sums_of_updates, unmerged, moved_first, in_frames, one_equation_each):
            equations = in_place(equations, outputs, self._fresh, self._equation)
        for fewer in (padded_by_windows, products_as_wanted, searched_as_they_lie):
            equations = fewer(equations, outputs, self._equation)
        return Block(tuple(inputs), tuple(equations), outputs)

    def made_of(self, jaxpr: Any, consts: Any, arrays: Any, line: Any = None) -> tuple[list[Equation], list[Any]]:
        """The equations of a jaxpr on some arrays, and its results."""
        env, body = (
            dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(Constant, consts), *arrays), strict=True)),
            _Body(),
        )
        self._equations(jaxpr, env, body, line)
        return body.equations, [_read(env, v) for v in jaxpr.outvars]

    def marked_by_type(self, block: Block, variables: Sequence[Any], as_typed: bool) -> Block:
        """The block with marks on those results whose types (of explicit axes) say how they are sharded."""
        added, outputs = [], list(block.outputs)
        for i, (v, variable) in enumerate(zip(block.outputs, variables, strict=True)):
            mark = mark_of_type(getattr(variable.aval, "sharding", None), len(v.shape))
            if mark is not None and isinstance(v, Value) and (as_typed or any(mark.spec)):
                outputs[i] = result = self._new({}, variable)
                call = Call(mark_p.name, {"mark": mark}, (v.shape,), (v.shape,), (v.dtype,), mark_p)
                rule = self._rule(call, None)
                added.append(Equation(mark_p, {"mark": mark}, (v,), (result,), rule, mark=mark))
        return Block(block.inputs, (*block.equations, *added), tuple(outputs))

    def _equations(self, jaxpr: Any, env: dict[Any, Any], out: _Body, line: Any) -> None:
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            # An equation that JAX's own library made inside a call is blamed on the line that called it.
            source = eqn.source_info if user_line(eqn.source_info) or line is None else line
            source = source if line is None else in_scopes_of(source, line)
            inputs = tuple(_read(env, v) for v in eqn.invars)
            if eqn.primitive is name_p:
                self._named(eqn, inputs[0], env, out, source)
                continue
            with as_if_at(source):  # what stands for an equation has its line
                avals = [v.aval for v in eqn.invars]
                body = opened_region(name, params, avals) or expansion(name, params, avals)
                look_up = simpler(self.facts, eqn.primitive, params, inputs) if body is None else None
                if look_up is not None and look_up[0].out_avals[0].weak_type == eqn.outvars[0].aval.weak_type:
                    body, inputs = closed(look_up[0]), tuple(look_up[1])
                body = body or self._opened(eqn)
            if body is not None:
                if needs_barrier(name, params):
                    inputs = self._barrier(inputs, out, source)
                inner, consts = body
                env_inner: dict[Any, Any] = {v: Constant(c) for v, c in zip(inner.constvars, consts, strict=True)}
                env_inner.update(zip(inner.invars, inputs, strict=True))
                around = self.layout  # a partitioned function that has a layout of its own keeps it
                self.layout = getattr(params.get("target"), "layout", None) or around
                self._equations(inner, env_inner, out, source)
                self.layout = around
                env.update({v: _read(env_inner, w) for v, w in zip(eqn.outvars, inner.outvars, strict=True)})
                continue
            key = None if eqn.effects else common_key(eqn.primitive, params, inputs)
            if key is not None and key in out.known:
                env.update(zip(eqn.outvars, out.known[key].outputs, strict=True))
                continue
            if not all(hasattr(v.aval, "shape") for v in eqn.outvars):
                raise TraceError(
                    f"{name} makes a token, which is no array.",
                    user_line(source),
                    hint="Leave tokens out: jax.debug.callback(..., ordered=True) keeps callbacks in their order.",
                )
            outputs = tuple(self._new(env, v) for v in eqn.outvars)
            out.equations.append(self._equation(eqn.primitive, params, inputs, outputs, source))
            if key is not None:
                out.known[key] = out.equations[-1]
            if len(outputs) == 1:
                self.facts.note(name, params, inputs, outputs[0])

    def _equation(self, primitive: Any, params: dict[str, Any], inputs: Any, outputs: Any, source: Any) -> Equation:
        region = REGIONS.get(primitive.name)
        if region is not None:
            same = itertools.chain(region.same(params), itertools.repeat(range(0)))
            bodies = zip(region.bodies(params), same, strict=False)
            made = [self.block(*closed(body), same=[inputs[i] for i in at]) for body, at in bodies]
            blocks = added_in_rounds(primitive.name, made)
            edges = tuple(region.edges(params, inputs, outputs, blocks))
            count = region.trip_count(params)
            return Equation(primitive, params, inputs, outputs, None, source, blocks, edges, None, count)
        mark = mark_of_equation(primitive.name, params, len(inputs[0].shape) if inputs else 0)
        if mark is None:
            # Where JAX saw arguments that are on a mesh it wrote that down; inside shard_map it means nothing.
            params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
        shapes = tuple(x.shape for x in inputs), tuple(x.shape for x in outputs)
        numbers = tuple(x.number if isinstance(x, Constant) else None for x in inputs)
        call = Call(primitive.name, params, *shapes, tuple(x.dtype for x in inputs), primitive, numbers)
        return Equation(primitive, params, inputs, outputs, self._rule(call, source), source, mark=mark)

    def _named(self, eqn: Any, x: Value | Constant, env: dict[Any, Any], out: _Body, source: Any) -> None:
        """A name is a mark where the layout has a row for it, and nothing otherwise."""
        names, line = eqn.params["mark"], user_line(source)
        (variable,) = eqn.outvars
        mark = None if self.layout is None else self.layout.mark(names, line)
        if mark is not None:
            params = {"mark": mark}
            key = common_key(mark_p, params, (x,))
            made = None if key is None else out.known.get(key)
            if made is None:
                made = self._equation(mark_p, params, (x,), (self._new({}, variable),), source)
                out.equations.append(made)
                if key is not None:
                    out.known[key] = made
            (x,) = made.outputs
        env[variable] = x
        if isinstance(x, Value):
            self.named.append(Named(x, names, line, self.layout))

    def _opened(self, eqn: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """What a primitive without a rule is made of; equal equations (those of equal layers) share it."""
        if eqn.effects:
            return None
        avals = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
        key = (eqn.primitive, tuple(eqn.params.items()), avals)
        try:
            if key not in self.bodies:
                self.bodies[key] = opened(eqn.primitive, eqn.params, *avals)
            made = self.bodies[key]
        except TypeError:  # a parameter that cannot be compared
            made = opened(eqn.primitive, eqn.params, *avals)
        return None if made is None else closed(made)

    def _rule(self, call: Call, source: Any) -> Rule:
        """The rule of a call; equal calls (those of equal layers) share one, whatever numbers they are written with."""
        key = (call.primitive, tuple(call.params.items()), call.in_shapes, call.out_shapes, call.in_dtypes)
        try:
            known = self.rules.get((key, call.literals))
        except TypeError:  # a parameter that cannot be compared
            return rule_of(call, source)
        if known is None:
            made = rule_of(call, source)
            known = self.rules.setdefault((key, made.linear), made)
            self.rules[key, call.literals] = known
        return known

    def _barrier(self, inputs: tuple[Any, ...], out: _Body, source: Any) -> tuple[Any, ...]:
        at = [i for i, x in enumerate(inputs) if isinstance(x, Value)]
        given = tuple(inputs[i] for i in at)
        fresh = tuple(Value(x.shape, x.dtype, next(self.counter)) for x in given)
        out.equations.append(self._equation(optimization_barrier_p, {}, given, fresh, source))
        hidden = dict(zip(at, fresh, strict=True))
        return tuple(hidden.get(i, x) for i, x in enumerate(inputs))

    def _fresh(self, shape: tuple[int, ...], dtype: Any) -> Value:
        return Value(shape, dtype, next(self.counter), made=True)

    def _new(self, env: dict[Any, Any], var: Any) -> Value:
        aval = var.aval
        env[var] = value = Value(tuple(map(int, aval.shape)), aval.dtype, next(self.counter), aval.weak_type)
        return value


def _read(env: Mapping[Any, Value | Constant], var: Any) -> Value | Constant:
    return Constant(var.val) if isinstance(var, Literal) else env[var]
