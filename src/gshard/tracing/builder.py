"""Converts jaxprs to blocks: opens calls, merges equal equations, and finds marks and nested shardings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import (
    as_if_at,
    bind,
    closed,
    function_of,
    in_scopes_of,
    optimization_barrier_p,
    retyped,
    shapes_of,
    sub_jaxprs,
    user_line,
)
from gshard.core.jax_adapter_context import context_of, context_of_body, with_settings_of
from gshard.core.jax_adapter_jit import bound_without_shardings, has_default_layout
from gshard.core.layout import Layout, Named
from gshard.core.mark import Mark
from gshard.core.memory_kinds import is_on_host
from gshard.core.program import NO_CONTEXT, Block, Constant, Context, Dropped, Equation, Fired, Value
from gshard.core.rule import Rule
from gshard.language.batch import same
from gshard.language.ledger import RESULT_SHARDINGS, check_arrays, dropped
from gshard.language.mark_primitive import bind_mark, mark_p, name_p
from gshard.language.region import REGIONS, with_edges
from gshard.language.registry import Call, has_rule, rule_of
from gshard.rewrite.driver import Rewrite, run
from gshard.rewrite.equation_graph import common_key, without_dead_code
from gshard.rewrite.look_up import KnownValues, simpler
from gshard.rewrite.rewrites import TRACE
from gshard.rewrite.shard_scan import added_in_rounds
from gshard.rewrite.widening import in_segments
from gshard.tracing.expand import (
    expansion,
    mark_of_any_sharding,
    mark_of_equation,
    mark_of_result,
    mark_of_type,
    marks_of_parts,
    needs_barrier,
    without_shardings,
)
from gshard.tracing.partly_manual import opened_region
from gshard.tracing.permitted import permit_from

# Splits an operation with ``out_sharding=`` into the operation and a mark on its result.


def demanded(eqn: Any) -> Any | None:
    """The closed jaxpr that replaces an equation with a sharding of its (last) result; None for other equations."""
    sharding = next((eqn.params[k] for k in RESULT_SHARDINGS if eqn.params.get(k) is not None), None)
    spec = getattr(sharding, "spec", None)
    if spec is None or eqn.effects or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None  # the type of the result also states unreduced and reduced axes (expand.marks_of_parts)
    shape = eqn.outvars[-1].aval.shape
    mark = mark_of_type(sharding, len(shape))
    if mark is None or mark_of_equation(eqn.primitive.name, eqn.params, shape) is not None:
        return None
    params = {k: None if k in RESULT_SHARDINGS else v for k, v in eqn.params.items()}

    def marked(*arrays: Any) -> list[Any]:
        *others, last = bind(eqn.primitive, params, arrays)
        return [*others, mark_p.bind(last, mark=mark)]

    return jax.make_jaxpr(marked)(*shapes_of([v.aval for v in eqn.invars]))


# Opens a primitive without a rule: replaces it by the equations of its lowering function.


def opened(primitive: Any, params: dict[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that replaces an equation without a rule that is no loop and no branch; None if the equation stays."""
    function = function_of(primitive)
    if function is None:
        return None

    def typed(*arrays: Any) -> list[Any]:
        return [retyped(x, aval) for x, aval in zip(function(*arrays, **params), out_avals, strict=True)]

    try:
        jaxpr = jax.make_jaxpr(typed)(*shapes_of(in_avals))
    except Exception:  # the function cannot be traced here, so the equation stays
        return None
    return None if jaxpr.effects or _is_inside(jaxpr, primitive, params, in_avals) else jaxpr


def _is_inside(jaxpr: Any, primitive: Any, params: dict[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a jaxpr contains the same equation again, for example because the function applies the primitive.

    The primitive may occur with other shapes: a solver may solve a smaller system with the same primitive.
    """
    shapes = [(a.shape, a.dtype) for a in avals]
    return any(
        (
            e.primitive is primitive
            and [(v.aval.shape, v.aval.dtype) for v in e.invars] == shapes
            and same(params, e.params)
        )
        or any(_is_inside(inner, primitive, params, avals) for inner in sub_jaxprs(e.params))
        for e in closed(jaxpr)[0].eqns
    )


# Converts the shardings of a nested ``jax.jit`` to marks on its operands and results.


def with_shardings_as_marks(primitive: Any, params: Mapping[str, Any], in_avals: Sequence[Any]) -> Any | None:
    """The closed jaxpr of a call of ``jit`` with marks instead of shardings; None for other equations."""
    if primitive.name not in ("jit", "pjit"):
        return None
    _refuse_layouts(params, in_avals)
    shardings_of = {name: params[name] for name in ("in_shardings", "out_shardings")}
    if not any(isinstance(s, jax.sharding.Sharding) for shardings in shardings_of.values() for s in shardings):
        return None

    def marked(name: str, arrays: Sequence[Any]) -> list[Any]:
        results = list(arrays)
        for i, (x, sharding) in enumerate(zip(arrays, shardings_of[name], strict=True)):
            if isinstance(sharding, jax.sharding.Sharding):
                mark = mark_of_any_sharding(sharding, x.shape, f"{name}[{i}] of {params['name']}")
                results[i] = bind_mark(x, mark)
        return results

    def called(*arrays: Any) -> list[Any]:
        return marked("out_shardings", bound_without_shardings(primitive, params, marked("in_shardings", arrays)))

    return jax.make_jaxpr(called)(*shapes_of(in_avals))


def _refuse_layouts(params: Mapping[str, Any], in_avals: Sequence[Any]) -> None:
    for side, avals in (("in", in_avals), ("out", params["jaxpr"].out_avals)):
        arguments = zip(params[f"{side}_layouts"], params[f"{side}_shardings"], avals, strict=True)
        for i, (layout, sharding, aval) in enumerate(arguments):
            if layout is None or has_default_layout(layout, sharding, aval):
                continue
            raise ShardingError(
                f"{side}_shardings[{i}] of {params['name']} has a layout in memory, which gshard does not keep.",
                user_line(),
                f"{layout}",
                "Give the sharding without jax.experimental.layout.Format.",
            )


@dataclasses.dataclass
class _Body:
    """The equations of a block under construction."""

    equations: list[Equation] = dataclasses.field(default_factory=list)  # the equations so far
    # the equation for each key of ``common_key``, to merge equal equations
    known: dict[Any, Equation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Builder:
    """Converts jaxprs to blocks. All blocks of one builder share the numbering of values."""

    counter: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # the numbers of new values
    rules: dict[Any, Rule] = dataclasses.field(default_factory=dict)  # the rule of each call, which equal calls share
    # the jaxpr of each opened equation, which equal equations share
    bodies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    layout: Layout | None = None  # the layout for names of dimensions
    context: Context = NO_CONTEXT  # the context of the current equation
    dropped: list[Dropped] = dataclasses.field(default_factory=list)  # features that the program does not keep
    rewrites: Sequence[Rewrite] = TRACE  # the rewrites to run
    fired: list[Fired] = dataclasses.field(default_factory=list)  # the rewrites that have changed the program
    named: list[Named] = dataclasses.field(default_factory=list)  # the values whose dimensions have names
    known_values: KnownValues = dataclasses.field(default_factory=KnownValues)  # the known values of constant indices

    @staticmethod
    def after(block: Block) -> Builder:
        """A builder whose values have other numbers than those of a block."""
        return Builder(itertools.count(1 + max((v.index for v in block.values()), default=0)))

    def block(
        self,
        jaxpr: Any,
        consts: Sequence[Any] | None = None,
        captured: Sequence[Any] = (),
        same: Iterable[Value | Constant] = (),
    ) -> Block:
        """The block of a jaxpr."""
        env: dict[Any, Value | Constant] = {}
        inputs: list[Value] = []
        for i, var in enumerate(jaxpr.constvars):
            if consts is not None:
                env[var] = Constant(consts[i])
            else:
                inputs.append(self._new(env, var))
        for value, array in zip(inputs, captured, strict=False):
            self.known_values.note_captured(value, array)
        arguments = [self._new(env, var) for var in jaxpr.invars]
        for value, outer in zip(arguments, same, strict=False):
            self.known_values.note_same(value, outer)
        inputs += arguments
        body = _Body()
        self._equations(jaxpr, env, body, None)
        outputs = tuple(_read(env, v) for v in jaxpr.outvars)
        equations = without_dead_code(body.equations, outputs)
        outer_context = self.context
        equations = in_segments(equations, outputs, self._rewritten)
        self.context = outer_context
        return Block(tuple(inputs), tuple(equations), outputs)

    def _rewritten(self, context: Context, equations: Sequence[Equation], outputs: Sequence[Any]) -> Sequence[Equation]:
        """The equations of a segment after all rewrites."""
        self.context = context
        rewritten, fired = run(self.rewrites, equations, outputs, self)
        self.fired += fired
        return rewritten

    def made_of(self, jaxpr: Any, consts: Any, arrays: Any) -> tuple[list[Equation], list[Any]]:
        """The equations of a jaxpr on some values, and its results."""
        variables = (*jaxpr.constvars, *jaxpr.invars)
        env = dict(zip(variables, (*map(Constant, consts), *arrays), strict=True))
        body = _Body()
        self._equations(jaxpr, env, body, None)
        return body.equations, [_read(env, v) for v in jaxpr.outvars]

    def marked_by_type(self, block: Block, variables: Sequence[Any], as_typed: bool) -> Block:
        """The block with marks on results whose types (with explicit axes) contain a sharding."""
        marks: list[Equation] = []
        outputs = list(block.outputs)
        for i, (v, variable) in enumerate(zip(block.outputs, variables, strict=True)):
            mark = mark_of_result(variable.aval, i, block)
            if mark is not None and isinstance(v, Value) and (as_typed or any(mark.spec)):
                outputs[i] = result = self._new({}, variable)
                call = Call(mark_p.name, {"mark": mark}, (v.shape,), (v.shape,), (v.dtype,), mark_p)
                rule = self._rule(call, None)
                marks.append(Equation(mark_p, {"mark": mark}, (v,), (result,), rule, mark=mark))
        return Block(block.inputs, (*block.equations, *marks), tuple(outputs))

    def _equations(self, jaxpr: Any, env: dict[Any, Any], out: _Body, line: Any) -> None:
        """Appends the equations of a jaxpr."""
        outer = self.context
        for eqn in jaxpr.eqns:
            self.context = context_of(eqn).inside(outer)
            name, params = eqn.primitive.name, eqn.params
            # An equation of JAX's own library has no user line. It gets the line of the call.
            source = eqn.source_info if line is None or user_line(eqn.source_info) else line
            source = source if line is None else in_scopes_of(source, line)
            self.dropped += dropped(eqn, source)
            inputs = tuple(_read(env, v) for v in eqn.invars)
            if eqn.primitive is name_p:
                self._named(eqn, inputs[0], env, out, source)
                continue
            with as_if_at(source), with_settings_of(eqn):  # equations that replace this one get its line
                body, inputs = self._replacement(eqn, inputs)
            if body is not None:
                if needs_barrier(name, params):
                    inputs = self._barrier(inputs, out, source)
                self.context = context_of_body(eqn).inside(outer)
                self._body(eqn, body, inputs, env, out, source)
                continue
            key = None if eqn.effects else common_key(eqn.primitive, params, inputs, self.context)
            if key is not None and key in out.known:
                env.update(zip(eqn.outvars, out.known[key].outputs, strict=True))
                self._mark_unreduced_results(eqn, env, out, source)
                continue
            check_arrays(eqn, source)
            outputs = tuple(self._new(env, v) for v in eqn.outvars)
            out.equations.append(self.equation(eqn.primitive, params, inputs, outputs, source))
            if key is not None:
                out.known[key] = out.equations[-1]
            if len(outputs) == 1:
                self.known_values.note(out.equations[-1])
            self._mark_unreduced_results(eqn, env, out, source)
        self.context = outer

    def _replacement(
        self, eqn: Any, inputs: tuple[Value | Constant, ...]
    ) -> tuple[tuple[Any, tuple[Any, ...]] | None, tuple[Value | Constant, ...]]:
        """The jaxpr that replaces an equation, with its constants and its operands; None for an equation that stays."""
        name, params = eqn.primitive.name, eqn.params
        avals = [v.aval for v in eqn.invars]
        with_marks = demanded(eqn)
        if with_marks is None:
            with_marks = with_shardings_as_marks(eqn.primitive, params, avals)
        body = None if with_marks is None else closed(with_marks)
        body = body or opened_region(name, params, avals) or expansion(name, params, avals)
        if body is not None:
            return body, inputs
        look_up = simpler(self.known_values, eqn.primitive, params, inputs)
        if look_up is not None and look_up[0].out_avals[0].weak_type == eqn.outvars[0].aval.weak_type:
            return closed(look_up[0]), tuple(look_up[1])
        return self._opened(eqn), inputs

    def _body(
        self, eqn: Any, body: tuple[Any, tuple[Any, ...]], inputs: Sequence[Any], env: dict[Any, Any], out: _Body,
        source: Any,
    ) -> None:  # fmt: skip
        """Appends the equations of the jaxpr that replaces an equation."""
        target = eqn.params.get("target")
        inner, consts = body
        env_inner: dict[Any, Any] = {v: Constant(c) for v, c in zip(inner.constvars, consts, strict=True)}
        env_inner.update(zip(inner.invars, inputs, strict=True))
        outer_layout = self.layout
        self.layout = getattr(target, "layout", None) or outer_layout  # a partitioned function may have its own layout
        first = len(out.equations)
        self._equations(inner, env_inner, out, source)
        self.layout = outer_layout
        permit_from(first, out.equations, target)
        env.update({v: _read(env_inner, w) for v, w in zip(eqn.outvars, inner.outvars, strict=True)})

    def equation(self, primitive: Any, params: dict[str, Any], inputs: Any, outputs: Any, source: Any) -> Equation:
        """An equation with its rule or its region."""
        region = REGIONS.get(primitive.name)
        if region is not None:
            same = itertools.chain(region.same(params), itertools.repeat(range(0)))
            bodies = zip(region.bodies(params), same, strict=False)
            traced = [self.block(*closed(body), same=[inputs[i] for i in positions]) for body, positions in bodies]
            blocks = added_in_rounds(primitive.name, traced)
            count = region.trip_count(params)
            return with_edges(
                Equation(
                    primitive, params, inputs, outputs, None, source, blocks, trip_count=count, context=self.context
                )
            )
        mark = mark_of_equation(primitive.name, params, inputs[0].shape if inputs else ())
        if mark is None:
            params = without_shardings(primitive.name, params)
        shapes = tuple(x.shape for x in inputs), tuple(x.shape for x in outputs)
        numbers = tuple(x.number if isinstance(x, Constant) else None for x in inputs)
        call = Call(primitive.name, params, *shapes, tuple(x.dtype for x in inputs), primitive, numbers)
        rule = self._rule(call, source)
        return Equation(primitive, params, inputs, outputs, rule, source, mark=mark, context=self.context)

    def _named(self, eqn: Any, x: Value | Constant, env: dict[Any, Any], out: _Body, source: Any) -> None:
        """Converts names to a mark if the layout has a row for any of them; otherwise ignores them."""
        names = eqn.params["mark"]
        (variable,) = eqn.outvars
        mark = None if self.layout is None else self.layout.mark(names)
        if mark is not None:
            x = self._marked(x, mark, variable, out, source)
        env[variable] = x
        if isinstance(x, Value):
            self.named.append(Named(x, names, self.layout))

    def _mark_unreduced_results(self, eqn: Any, env: dict[Any, Any], out: _Body, source: Any) -> None:
        for variable, mark in marks_of_parts(eqn, source):
            env[variable] = self._marked(env[variable], mark, variable, out, source)

    def _marked(self, x: Value | Constant, mark: Mark, variable: Any, out: _Body, source: Any) -> Value:
        params = {"mark": mark}
        key = common_key(mark_p, params, (x,), self.context)
        marked = None if key is None else out.known.get(key)
        if marked is None:
            marked = self.equation(mark_p, params, (x,), (self._new({}, variable),), source)
            out.equations.append(marked)
            if key is not None:
                out.known[key] = marked
        return marked.outputs[0]

    def _opened(self, eqn: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """The jaxpr of a primitive without a rule, which equal equations (of equal layers) share; None without one."""
        if eqn.effects or eqn.primitive.name in REGIONS or has_rule(eqn.primitive.name, eqn.params):
            return None
        avals = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
        key = (eqn.primitive, tuple(eqn.params.items()), avals)
        try:
            if key not in self.bodies:
                self.bodies[key] = opened(eqn.primitive, eqn.params, *avals)
            jaxpr = self.bodies[key]
        except TypeError:  # a parameter that cannot be compared
            jaxpr = opened(eqn.primitive, eqn.params, *avals)
        return None if jaxpr is None else closed(jaxpr)

    def _rule(self, call: Call, source: Any) -> Rule:
        """The rule of a call. Equal calls (of equal layers) share a rule, unless their literals change the rule."""
        key = (call.primitive, tuple(call.params.items()), call.in_shapes, call.out_shapes, call.in_dtypes)
        try:
            shared = self.rules.get((key, call.literals))
        except TypeError:  # a parameter that cannot be compared
            return rule_of(call, source)
        if shared is None:
            rule = rule_of(call, source)
            shared = self.rules.setdefault((key, rule.linear, rule.finite), rule)
            self.rules[key, call.literals] = shared
        return shared

    def _barrier(self, inputs: tuple[Any, ...], out: _Body, source: Any) -> tuple[Any, ...]:
        """Appends a barrier, and returns the operands behind it."""
        positions = [i for i, x in enumerate(inputs) if isinstance(x, Value)]
        before = tuple(inputs[i] for i in positions)
        after = tuple(Value(x.shape, x.dtype, next(self.counter), on_host=x.on_host) for x in before)
        out.equations.append(self.equation(optimization_barrier_p, {}, before, after, source))
        behind_barrier = dict(zip(positions, after, strict=True))
        return tuple(behind_barrier.get(i, x) for i, x in enumerate(inputs))

    def fresh(self, shape: tuple[int, ...], dtype: Any, weak: bool = False) -> Value:
        """A new value that is not an array of the user's program."""
        return Value(shape, dtype, next(self.counter), weak, made=True)

    def _new(self, env: dict[Any, Any], var: Any) -> Value:
        """A new value for a variable of a jaxpr, which is added to ``env``."""
        aval = var.aval
        index, on_host = next(self.counter), is_on_host(aval)
        value = Value(tuple(map(int, aval.shape)), aval.dtype, index, aval.weak_type, on_host=on_host)
        env[var] = value
        return value


def _read(env: Mapping[Any, Value | Constant], var: Any) -> Value | Constant:
    return Constant(var.val) if isinstance(var, Literal) else env[var]
