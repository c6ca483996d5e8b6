"""``gshard.prove``: whether a sharded program computes what a plain one does, exactly, without a tolerance."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding

from gshard.api.compiled_programs import on_first_devices
from gshard.api.jit import Jitted
from gshard.core import jax_adapter
from gshard.core.errors import ArgumentError, counted, listed
from gshard.core.jax_adapter_jit import given_to_jit, jaxpr_and_constants, jitted_like
from gshard.core.planning_tables import with_tables
from gshard.exact.from_hlo import partitioned, written_out
from gshard.exact.interpreter import Interpreter
from gshard.exact.numbers import Field, Reals, Value
from gshard.exact.operations import Complex, Undecided, is_float
from gshard.exact.repairs import line_of_result, repair
from gshard.exact.shrunk import Sizes, elements_of, shrunk
from gshard.tracing.trace import name_of

EQUAL, DIFFERENT, UNDECIDED = "equal", "different", "undecided"
_DRAWS = 2  # at first; more are drawn until a false "equal" is as unlikely as this:
_CHANCE = 1e-12
_MOST_DRAWS = 40
_MOST_ELEMENTS = 30_000_000  # of all values of programs that also run at their own sizes
_DRAWS_FOR_COMPARISONS = 16  # or until each comparison of random numbers has been true and false


@dataclasses.dataclass(frozen=True)
class Proof:
    """What ``gshard.prove`` found. It is true if the programs are equal.

    Attributes:
        verdict: ``"equal"``, ``"different"`` or ``"undecided"``.
        chance: an upper bound of the probability that different programs are called equal.
        result: the name of the first result that differs.
        line: the user's line of the change that makes the program right, or else of what computes the result; of an
            undecided proof the line of the operator.
        cause: what is likely wrong, or why it is undecided.
        elements: how many elements of the result differ, and how many it has.
        assumed: the identities that the proof rests on, besides those of sums and products.
        shrunk: the sizes that were made smaller.
        equations: how many equations have run.
        seconds: how long it took.
    """

    verdict: str
    chance: float = 1.0
    result: str = ""
    line: str = ""
    cause: str = ""
    elements: tuple[int, int] = (0, 0)
    assumed: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    equations: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.verdict == EQUAL

    def __str__(self) -> str:
        lines = [self._first_line()]
        if self.cause:
            lines.append(f"  {self.cause}" + (f", at {self.line}" if self.line else ""))
        lines += [f"  assumed: {text}" for text in self.assumed]
        lines += [f"  shrunk: {text}" for text in listed(self.shrunk)]
        lines.append(f"  {counted(self.equations, 'equation')} in {self.seconds:.1f} s")
        return "\n".join(lines)

    def _first_line(self) -> str:
        if self.verdict == EQUAL:
            return f"equal: the chance that different programs pass is below {self.chance:.0e}"
        if self.verdict == DIFFERENT and self.elements[1]:
            wrong, all_of_them = self.elements
            return f"different: {self.result}, {wrong:,} of {counted(all_of_them, 'element')}"
        return self.verdict if self.verdict == UNDECIDED else f"different: {self.result}"


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr, the constants that are its first operands, and its results."""

    whole: Any  # the jaxpr
    constants: Sequence[Any]
    results: Any  # their tree
    arguments: Sequence[Any]  # the flat arguments
    instead: Any = None  # what to run instead of an equation

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The jaxpr without dead code."""
        return jax_adapter.jaxpr_without_dead_code(self.whole)


@with_tables
def prove(
    f: Callable[..., Any],
    /,
    *args: Any,
    like: Callable[..., Any] | None = None,
    dtypes: Literal["any", "kept"] = "any",
    **kwargs: Any,
) -> Proof:
    """Proves that a sharded program computes what a plain one does, or finds where it does not.

    Both programs run exactly, without devices: floats are residues modulo a prime, so that sums and products do not
    depend on their order. Arguments are random. Of ``tanh`` and other functions gshard assumes only that equal operands
    have equal results.
    Equal residues mean equal programs up to the order of sums and products, with a probability that the result states.

    Args:
        f: a function from ``gshard.jit``; any function with ``jax.shard_map`` inside; or, without ``like``, a function
            from ``jax.jit``: then what XLA's partitioner makes of it is compared with the function itself.
        args, kwargs: its arguments, as arrays or ``jax.ShapeDtypeStruct``. Floats stand for their shapes only; integers
            and booleans keep their values.
        like: the plain function. A function from ``gshard.jit`` or ``jax.jit`` needs none: its own function is the
            plain one.
        dtypes: ``"any"``: conversions between float dtypes change nothing; ``"kept"``: each is a function of its own.

    Returns:
        A ``Proof``.

    Raises:
        ArgumentError: ``like`` is missing, or the two functions have different arguments or results.

    >>> import gshard, jax.numpy as jnp
    >>> step = gshard.jit(lambda w, x: jnp.tanh(gshard.split(x, 0, "d") @ w).sum(), mesh=gshard.Mesh.abstract(d=4))
    >>> gshard.prove(step, jnp.ones((6, 5)), jnp.ones((8, 6))).verdict
    'equal'
    """
    start = time.perf_counter()
    if dtypes not in ("any", "kept"):
        raise ArgumentError(f"dtypes={dtypes!r} is neither 'any' nor 'kept'.", jax_adapter.user_line())
    sharded, plain = _programs(f, like, args, kwargs)
    _refuse_different_types(f, sharded, plain)
    is_same = len(sharded.constants) == len(plain.constants)
    given = [*plain.constants, *plain.arguments]
    sizes = shrunk(plain.jaxpr, sharded.jaxpr, given) if is_same else Sizes()
    found = _Comparison(plain, sharded, sizes, dtypes == "kept").proof()
    if found.verdict == DIFFERENT and sizes.notes and elements_of(plain.jaxpr, sharded.jaxpr) <= _MOST_ELEMENTS:
        # A number of the program may be the size of a dimension.
        found = _Comparison(plain, sharded, Sizes(), dtypes == "kept").proof()
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


def _programs(f: Any, like: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, _Program]:
    if isinstance(f, Jitted):
        lowered, own = f.lower(*args, **kwargs), f if like is None else Jitted(jitted_like(f._by_jax, like), f.options)
        call = own.read(args, kwargs)
        sharded = _Program(lowered.spmd.jaxpr, lowered.program.captured, lowered.out_tree, call.leaves)
        return sharded, _of_jit(call.traced, call.leaves)
    given = given_to_jit(f)
    if like is None and given is not None:  # what XLA's partitioner makes of it
        args, kwargs = on_first_devices((args, kwargs))
        traced, leaves = f.trace(*args, **kwargs), jax.tree.leaves(given.without_static(args, kwargs))
        plain = _of_jit(traced, leaves, written_out)
        return _Program(partitioned(traced.lower()), (), plain.results, leaves), plain
    if like is None:
        raise ArgumentError(
            f"prove compares {name_of(f)} with a plain function, and none is given.",
            jax_adapter.user_line(),
            hint="Give it: gshard.prove(f, *args, like=plain).",
        )
    return _traced(f, args, kwargs, with_shardings=True), _traced(like, args, kwargs)


def _of_jit(traced: jax.stages.Traced, leaves: Sequence[Any], instead: Any = None) -> _Program:
    jaxpr, constants = jaxpr_and_constants(traced)
    return _Program(jaxpr, constants, jax.tree.structure(traced.out_info), leaves, instead)


def _traced(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], with_shardings: bool = False) -> _Program:
    """The program of a call; leaves that are no arrays are constants."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        is_named = with_shardings and isinstance(sharding, NamedSharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if is_named else None)

    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: shape(x) for i, x in enumerate(leaves) if _is_array(x)}

    def called(given: dict[int, Any]) -> Any:
        positional, named = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        return f(*positional, **named)

    jaxpr, results = jax.make_jaxpr(called, return_shape=True)(arrays)
    return _Program(jaxpr, (), jax.tree.structure(results), [leaves[i] for i in arrays])


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _refuse_different_types(f: Any, sharded: _Program, plain: _Program) -> None:
    for what, ours, theirs in zip(("arguments", "results"), _types(sharded), _types(plain), strict=True):
        if ours != theirs:
            differ = [f"{a} and {b}" for a, b in zip(ours, theirs, strict=False) if a != b]
            raise ArgumentError(
                f"{name_of(f)} and the plain function have different {what}.",
                jax_adapter.user_line(),
                got="; ".join(listed(differ)) or f"{len(ours)} and {len(theirs)} arrays",
            )


def _types(program: _Program) -> list[list[str]]:
    """The types of the arguments and of the results."""
    body = jax_adapter.closed(program.jaxpr)[0]
    both = body.invars[len(program.constants) :], body.outvars
    return [[f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]" for v in own] for own in both]


class _Comparison:
    """Two programs that run in the same domains."""

    def __init__(self, plain: _Program, sharded: _Program, sizes: Sizes, keeps_dtypes: bool) -> None:
        self.plain, self.sharded, self.sizes, self.keeps_dtypes = plain, sharded, sizes, keeps_dtypes
        self._equations = 0

    def proof(self) -> Proof:
        """The verdict."""
        try:
            return self._proof()
        except Undecided as error:
            return self._made(UNDECIDED, cause=error.what, line=error.where or "")

    def _proof(self) -> Proof:
        draws, wanted, assumed, outcomes = 0, _DRAWS, set[str](), dict[int, int]()
        while draws < wanted:
            domain = Field(wanted - draws, draws, self.keeps_dtypes)
            if self._differs(domain):
                return self._different(Field(_DRAWS, draws, self.keeps_dtypes))
            chance, assumed = domain.chance, assumed | domain.identities
            outcomes = {k: outcomes.get(k, 0) | domain.outcomes.get(k, 0) for k in {*outcomes, *domain.outcomes}}
            draws = wanted
            wanted = min(math.ceil(math.log(_CHANCE) / math.log(chance)), _MOST_DRAWS)
            if one_sided := [k for k, seen in outcomes.items() if seen != 3]:
                wanted = max(wanted, min(2 * draws, _DRAWS_FOR_COMPARISONS))
        if one_sided:
            assumed.add(f"{counted(len(one_sided), 'comparison')} had the same outcome in all {draws} draws")
        return self._made(EQUAL, chance=chance**draws, assumed=tuple(sorted(assumed)))

    def _made(self, verdict: str, **fields: Any) -> Proof:
        return Proof(verdict, shrunk=tuple(self.sizes.notes), equations=self._equations, **fields)

    def _run(self, program: _Program, domain: Field | Reals) -> tuple[list[Value], Interpreter]:
        run = Interpreter(domain, self.sizes, instead=program.instead)
        results = run.run(program.jaxpr, self._operands(run, program))
        self._equations += run.equations
        return results, run

    def _operands(self, run: Interpreter, program: _Program) -> list[Value]:
        body = jax_adapter.closed(program.jaxpr)[0]
        held = [run.constant(c, v) for c, v in zip(program.constants, body.invars)]
        variables = zip(body.invars[len(held) :], program.arguments, strict=True)
        return held + [self._argument(run, i, v, x) for i, (v, x) in enumerate(variables)]

    def _argument(self, run: Interpreter, i: int, v: Any, x: Any) -> Value:
        shape, dtype = self.sizes.shape(v), v.aval.dtype
        random = run.domain.random
        if jax.dtypes.issubdtype(dtype, np.complexfloating):
            return Complex(random(f"real {i}", shape), random(f"imaginary {i}", shape))
        if jax.dtypes.issubdtype(dtype, np.floating):
            return random(f"argument {i}", shape)
        if not isinstance(x, jax.ShapeDtypeStruct):
            return run.constant(x if _is_array(x) else np.asarray(x, dtype), v)
        if not jax.dtypes.issubdtype(dtype, np.integer):
            return run.constant(np.random.default_rng(i).integers(0, 2, shape).astype(np.bool_))
        limit = self.sizes.limit(v) or 4
        return run.constant(np.random.default_rng(i).integers(0, limit, shape).astype(dtype))

    def _differs(self, domain: Field | Reals) -> bool:
        """Whether a result differs between the programs or between devices."""
        expected, _ = self._run(self.plain, domain)
        stand_ins = {*domain.stand_ins}
        domain.stand_ins.clear()
        found, run = self._run(self.sharded, domain)
        if only := sorted(stand_ins ^ domain.stand_ins):
            raise Undecided(f"only one program uses {', '.join(only)}, and gshard cannot compute this exactly.")
        if any(domain.is_nan(x).any() for x in expected if is_float(x)):
            domain.identities.add("elements that are NaN in both programs count as equal")
        return bool(_wrong(domain, found, expected) or run.unequal)

    def _different(self, domain: Field) -> Proof:
        is_confirmed = any(self._differs(Reals(draws, domain.seed)) for draws in (_DRAWS, 8 * _DRAWS))
        expected, _ = self._run(self.plain, domain)
        found, run = self._run(self.sharded, domain)
        cause = "no change of one place makes it right; this line computes the result"
        result, line, elements = "", "", (0, 0)
        for i, where in list(_wrong(domain, found, expected).items())[:1]:
            tree = jax.tree.unflatten(self.sharded.results, range(len(found)))
            path, _ = jax.tree_util.tree_leaves_with_path(tree)[i]
            result, line = f"result{jax.tree_util.keystr(path)}", line_of_result(self.sharded.jaxpr, i)
            elements = int(where.any(0).sum()), math.prod(where.shape[1:])
        for first in run.unequal[:1]:
            result = result or f"a result of shard_map (number {first.number})"
            line = line_of_result(first.eqn.params["jaxpr"], first.number)
            cause = f"devices along {first.axis} have different parts of a result that is called replicated"
        if not is_confirmed:
            cause = "the results are equal in float64, perhaps by an identity that gshard does not know"
            return self._made(UNDECIDED, cause=cause, line=line, result=result)
        repaired = self._repaired(domain, expected)
        if repaired is not None:
            line, cause = repaired[0] or line, repaired[1]
        line = line or jax_adapter.user_line()  # an equation that JAX adds has none: the call of ``prove``
        return self._made(DIFFERENT, cause=cause, line=line, result=result, elements=elements)

    def _repaired(self, domain: Field, expected: Sequence[Value]) -> tuple[str, str] | None:
        operands = self._operands(Interpreter(domain, self.sizes), self.sharded)

        def wrong(run: Interpreter, jaxpr: Any) -> set[int]:
            found = _wrong(domain, run.run(jaxpr, operands), expected)
            return {*found} | {len(expected) + u.number for u in run.unequal}

        try:  # what people forget to use is dead code
            whole = self.sharded.jaxpr if self.sizes.notes else self.sharded.whole
            return repair(wrong, whole, self.plain.jaxpr, domain=domain, sizes=self.sizes)
        except Undecided:
            return repair(wrong, self.sharded.jaxpr, self.plain.jaxpr, domain=domain, sizes=self.sizes)


def _wrong(domain: Field | Reals, found: Sequence[Value], expected: Sequence[Value]) -> dict[int, np.ndarray]:
    """Where each result that differs does."""
    where = (_where(domain, a, b) for a, b in zip(found, expected, strict=True))
    return {i: w for i, w in enumerate(where) if w.any()}


def _where(domain: Field | Reals, a: Value, b: Value) -> np.ndarray:
    if isinstance(a, Complex):
        return _where(domain, a.real, b.real) | _where(domain, a.imag, b.imag)
    return domain.differs(a, b)
