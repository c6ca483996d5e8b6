"""Trace: a function and its arguments become a Program.

JAX traces the function to a jaxpr; here calls are opened (jit, custom derivatives, remat), dead code is dropped, what
is computed twice is computed once, random bits are expanded into counters and arithmetic, every variable becomes a
value of its own, and each equation gets its rule or its region.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from gshard import rules as _rules
from gshard.core.errors import TraceError
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter import (
    closed,
    line_of_exception,
    optimization_barrier_p,
    user_line,
    without_dead_code,
)
from gshard.core.mark import Mark
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.rule import Rule
from gshard.rules.expand import expansion, mark_of_equation, needs_barrier
from gshard.rules.pieces import join_slices
from gshard.rules.region import REGIONS
from gshard.rules.registry import Call, rule_of
from gshard.rules.subexpression import common_key
from gshard.rules.zones import check_zones

assert _rules  # imported for the rules it registers


@collected_seldom()
def trace(
    f: Callable[..., Any],
    *args: Any,
    argument_marks: Sequence[Mark | None] | None = None,
    **kwargs: Any,
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
    name = getattr(f, "__name__", type(f).__name__)
    whole, out_tree = closed_of(f, *args, **kwargs)
    jaxpr, consts = closed(whole)
    leaves_with_paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    block = _Builder().block(without_dead_code(jaxpr))
    check_zones(block)
    captured = tuple(consts)
    parameters = _parameters(f)
    names = (
        *(f"captured[{i}]" for i in range(len(captured))),
        *(_argument_name(path, parameters) for path, _ in leaves_with_paths),
    )
    marks = tuple(argument_marks) if argument_marks is not None else (None,) * len(leaves_with_paths)
    return Program(block, captured, marks, names, out_tree, name)


def closed_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function of pytrees, over its flat arguments, and the pytree of its results.

    Raises:
        TraceError: as ``trace``.
    """
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    out_trees: list[Any] = []

    def flat(*flat_args: Any) -> list[Any]:
        a, k = jax.tree.unflatten(in_tree, flat_args)
        out, tree = jax.tree.flatten(f(*a, **k))
        out_trees.append(tree)
        return out

    try:
        return jax.make_jaxpr(flat)(*leaves), out_trees[0]
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError, TypeError) as error:
        is_shape = str(error).startswith("Shapes must be 1D sequences of concrete values")
        if not is_shape and not isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            raise  # a mistake of another kind
        raise TraceError(
            f"{getattr(f, '__name__', type(f).__name__)} cannot be traced: it needs the value of an array, "
            "and only shapes are known.",
            line_of_exception(error),
            str(error).splitlines()[0],
            "Use jnp.where or jax.lax.cond instead of branching on array values, and static_argnums for plain values.",
        ) from error


def block_of(jaxpr: Any) -> Block:
    """The equations of a jaxpr that is there already, such as that of a per-device program."""
    return _Builder().block(without_dead_code(jaxpr))


def _parameters(f: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters, where Python knows them."""
    try:
        return tuple(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return ()


def _argument_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    """A leaf's path in the user's words: ``params['wi']`` for a leaf of the argument ``params``."""
    which, entry, rest = path[0].idx, path[1], jax.tree_util.keystr(tuple(path[2:]))
    if which == 1:
        return f"{entry.key}{rest}"
    return f"{parameters[entry.idx] if entry.idx < len(parameters) else f'args[{entry.idx}]'}{rest}"


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

    def block(self, jaxpr: Any, consts: Sequence[Any] | None = None) -> Block:
        """A block of a jaxpr; its constants are inputs in front, or written in where ``consts`` are given."""
        env: dict[Any, Value | Constant] = {}
        inputs: list[Value] = []
        for i, var in enumerate(jaxpr.constvars):
            if consts is not None:
                env[var] = Constant(consts[i])
            else:
                inputs.append(self._new(env, var))
        inputs += [self._new(env, var) for var in jaxpr.invars]
        body = _Body()
        self._equations(jaxpr, env, body, None)
        outputs = tuple(_read(env, v) for v in jaxpr.outvars)
        return Block(tuple(inputs), tuple(join_slices(body.equations, outputs)), outputs)

    def _equations(self, jaxpr: Any, env: dict[Any, Any], out: _Body, line: Any) -> None:
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            # An equation that JAX's own library made inside a call is blamed on the line that called it.
            source = eqn.source_info if user_line(eqn.source_info) or line is None else line
            inputs = tuple(_read(env, v) for v in eqn.invars)
            body = expansion(name, params, [v.aval for v in eqn.invars])
            if body is not None:
                if needs_barrier(name, params):
                    inputs = self._barrier(inputs, out, source)
                inner, consts = body
                env_inner: dict[Any, Any] = {v: Constant(c) for v, c in zip(inner.constvars, consts, strict=True)}
                env_inner.update(zip(inner.invars, inputs, strict=True))
                self._equations(inner, env_inner, out, source)
                env.update({v: _read(env_inner, w) for v, w in zip(eqn.outvars, inner.outvars, strict=True)})
                continue
            key = None if eqn.effects else common_key(eqn.primitive, params, inputs)
            if key is not None and key in out.known:
                env.update(zip(eqn.outvars, out.known[key].outputs, strict=True))
                continue
            outputs = tuple(self._new(env, v) for v in eqn.outvars)
            out.equations.append(self._equation(eqn.primitive, params, inputs, outputs, source))
            if key is not None:
                out.known[key] = out.equations[-1]

    def _equation(self, primitive: Any, params: dict[str, Any], inputs: Any, outputs: Any, source: Any) -> Equation:
        region = REGIONS.get(primitive.name)
        if region is not None:
            blocks = tuple(self.block(*closed(body)) for body in region.bodies(params))
            edges = tuple(region.edges(params, inputs, outputs, blocks))
            return Equation(primitive, params, inputs, outputs, None, source, blocks, edges, None, region.trips(params))
        mark = mark_of_equation(primitive.name, params, len(inputs[0].shape) if inputs else 0)
        if mark is None:
            # Where JAX saw arguments that lie on a mesh it wrote that down; inside shard_map it means nothing.
            params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
        call = Call(
            primitive.name,
            params,
            tuple(x.shape for x in inputs),
            tuple(x.shape for x in outputs),
            tuple(x.dtype for x in inputs),
            primitive,
        )
        return Equation(primitive, params, inputs, outputs, self._rule(call, source), source, mark=mark)

    def _rule(self, call: Call, source: Any) -> Rule:
        """The rule of a call; equal calls (those of equal layers) share one."""
        key = (call.primitive, tuple(call.params.items()), call.in_shapes, call.out_shapes, call.in_dtypes)
        try:
            known = self.rules.get(key)
        except TypeError:  # a parameter that cannot be compared
            return rule_of(call, source)
        if known is None:
            self.rules[key] = known = rule_of(call, source)
        return known

    def _barrier(self, inputs: tuple[Any, ...], out: _Body, source: Any) -> tuple[Any, ...]:
        at = [i for i, x in enumerate(inputs) if isinstance(x, Value)]
        given = tuple(inputs[i] for i in at)
        fresh = tuple(Value(x.shape, x.dtype, next(self.counter)) for x in given)
        out.equations.append(self._equation(optimization_barrier_p, {}, given, fresh, source))
        hidden = dict(zip(at, fresh, strict=True))
        return tuple(hidden.get(i, x) for i, x in enumerate(inputs))

    def _new(self, env: dict[Any, Any], var: Any) -> Value:
        value = Value(tuple(map(int, var.aval.shape)), var.aval.dtype, next(self.counter))
        env[var] = value
        return value


def _read(env: Mapping[Any, Value | Constant], var: Any) -> Value | Constant:
    return Constant(var.val) if isinstance(var, Literal) else env[var]
