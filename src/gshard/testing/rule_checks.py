"""Rule checks: checks a rule, or the two functions of a ``gshard.kernel``, by running every split."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gshard.api.kernel_function import KernelFunction
from gshard.api.prove import Proof, prove
from gshard.comm.steps import collectives_of
from gshard.core.errors import ArgumentError, RuleError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.rule import COMMUNICATE, REDUCE, REPLICATE, Rule, Split, is_valid, operand_sharding, passing
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram, by_kind
from gshard.emit.partition import partition
from gshard.exact.numbers import Field, Reals
from gshard.exact.on_parts import Exactly, first_difference, near
from gshard.exact.operations import Undecided
from gshard.language.kernel_primitive import kernel_p
from gshard.language.region import Interpreter
from gshard.planning.settled import on_mesh
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace

# Counts the collectives of a per-device program in its jaxpr, independently of the partitioner's notes.


def emitted(jaxpr: Any, sizes: Mapping[str, int]) -> Counter[str]:
    """Bytes that each device sends in one call, by kind. The body of a loop of unknown length counts once."""
    return +by_kind((kind, sent) for kind, _, sent, _ in collectives_of(jaxpr, sizes))


def reported(collectives: Iterable[Collective]) -> Counter[str]:
    """The bytes that a program reports, in the same form."""
    return +by_kind((c.kind, c.total_bytes) for c in collectives)


SMALL = Mesh.abstract(a=2, b=3)


@without_our_frames
def check_rule(
    f: Callable[..., Any],
    *args: Any,
    primitive: Any = None,
    mesh: Any = None,
    most: int | None = None,
    tolerance: float = 1e-5,
) -> tuple[str, ...]:
    """Proves that an equation run on shards, in every way its rule allows, computes what it computes whole.

    As ``gshard.prove``, it runs exactly, for random numbers. Operators without an exact value run in JAX, and their
    numbers are compared up to a tolerance.

    Args:
        f: a function around the equation; results of the equation that it does not use are not looked at.
        args: its arguments: dimensions that do not divide by the mesh, and one that is smaller than it. Zeros,
            infinities and equal elements stay what they are; other floats count where the operator has no exact value:
            take numbers that vary in sign and are never all equal.
        primitive: the equations to check, by name or as the primitive itself; None for all that ``f`` has.
        mesh: the devices, as ``gshard.jit`` takes them or an abstract mesh; by default 2 x 3 of them. None need
            exist.
        most: check no more than so many splits of an equation, drawn with a fixed seed, those of one factor first.
        tolerance: relative and absolute, for operators without an exact value.

    Returns:
        the splits that were checked, as text; "up to rounding" follows those that are not proved.

    Raises:
        RuleError: a split computes something else; it names the split, its factors and the first element that differs.
            Or it sends what it does not report; or ``f`` has no such equation outside of loops, or one without a rule.

    >>> check_rule(lambda x: jnp.sort(x, 0), np.float32([[1, -2, 4], [3, 0, 5], [2, 1, -7]]), mesh=2)
    ('a@devices', 'b@devices')
    """
    name = getattr(primitive, "name", primitive)
    devices = SMALL if mesh is None else Mesh.of(mesh)
    program = on_mesh(trace(f, *args), devices)
    named = [e for e in program.block.equations if e.name == name or (name is None and e.mark is None)]
    found = [e for e in named if e.rule is not None]
    if not found:
        inside = any(name in (None, e.name) for e in program.block.walk())
        raise RuleError(
            f"{program.name} has no equation of primitive {name!r}{' outside of its loops' if inside else ''}.",
            got=f"it has: {', '.join(dict.fromkeys(e.name for e in program.block.walk()))}",
            hint="Give a function that applies the primitive directly.",
        )
    checked: list[str] = []
    for equation in found:
        if not equation.operator_rule.known and all(
            factor.kind == REPLICATE for factor in equation.operator_rule.factors
        ):
            raise RuleError(
                f"primitive '{equation.name}' has no rule.", equation.line, hint="Register one: gshard.rule(...)."
            )
        alone = Alone.of(program, equation, jax.tree.leaves(args)).of_finite()
        for split in (*splits_of(alone.equation.operator_rule, devices, most), *alone.passing(devices)):
            spmd = emit(plan_of(alone.program, alone.equation, split, devices))
            checked.append(alone.check(spmd, split, tolerance))
    return tuple(checked)


class _Unmarked(Interpreter):
    """Runs equations on whole arrays; marks do nothing."""

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one equation without a body."""
        return inputs if e.mark is not None else super().equation(e, inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    """One equation as a program of its own."""

    program: Program  # it
    equation: Equation  # its only equation
    arguments: tuple[Any, ...]  # the values of the operands that are not constants
    is_read: tuple[bool, ...]  # whether the program reads a result; others are not compared

    @staticmethod
    def of(program: Program, equation: Equation, leaves: Sequence[Any]) -> Alone:
        """Takes an equation out of a program, outside of loops, that is called with these arrays."""
        values = dict(zip(program.block.inputs, (*program.captured, *map(jnp.asarray, leaves)), strict=True))
        _Unmarked().evaluate(itertools.takewhile(lambda e: e is not equation, program.block.equations), values)
        inputs = tuple(dict.fromkeys(v for v in equation.inputs if isinstance(v, Value)))
        read = {v for e in program.block.walk() for v in e.inputs} | set(program.block.outputs)
        block = Block(inputs, (equation,), equation.outputs)
        names = tuple(f"operand {equation.inputs.index(v)}" for v in inputs)
        tree = jax.tree.structure([0] * len(equation.outputs))
        own = Program(block, (), (None,) * len(inputs), names, tree, equation.name)
        return Alone(own, equation, tuple(values[v] for v in inputs), tuple(v in read for v in equation.outputs))

    def of_finite(self) -> Alone:
        """The same where all sums are said to be finite: with the ways of ``Rule.finite``, which are checked too."""
        block = permitted(self.program.block, finite=True)
        return dataclasses.replace(
            self, program=dataclasses.replace(self.program, block=block), equation=block.equations[0]
        )

    def passing(self, mesh: Mesh) -> list[Split]:
        """Every way in which the rule lets values pass that are still to be combined, over one atom.

        Alone, and beside a factor that is split over another atom.
        """
        given = dict(zip(self.program.block.inputs, self.arguments, strict=True))
        rule, operands_of = self.equation.operator_rule, self.equation.inputs
        first = next((s for s in splits_of(rule, mesh) if list(s.values()) == [mesh.atoms[:1]]), {})

        def divides(x: Value | Constant, monoid: str) -> bool:
            return isinstance(x, Value) and _divides(given[x], monoid)

        ways = [
            {**base, -1 - k: mesh.atoms[-1:]}
            for k, (monoid, operands) in enumerate(rule.linear)
            if mesh.atoms and all(divides(operands_of[i], monoid) for i in operands)
            for base in ([{}, first] if first else [{}])
        ]
        return [way for way in ways if len(way) == 1 or is_valid(rule, way, mesh)]

    def _whole(self) -> Any:
        """The jaxpr of the equation."""

        def run(*arrays: Any) -> Any:
            values = dict(zip(self.program.block.inputs, arrays, strict=True))
            _Unmarked().evaluate(self.program.block.equations, values)
            return [values[v] for v in self.equation.outputs]

        return jax.make_jaxpr(run)(*self.arguments)

    @functools.cached_property
    def _runs(self) -> dict[Any, Exactly]:
        return {}

    def check(self, spmd: SpmdProgram, split: Split, tolerance: float) -> str:
        """Checks a per-device program that ``emit`` made; returns its split as text."""
        mesh = spmd.mesh
        self._compare_sent(spmd, split)
        text = split_text(self.equation.operator_rule, split, mesh)
        try:
            if not self._difference(spmd, Field, 0.0):
                return text
        except Undecided:
            pass
        if found := self._difference(spmd, Reals, tolerance):
            raise self._lie(split, mesh, found)
        return f"{text}, up to rounding"

    def _difference(self, spmd: SpmdProgram, domain: type[Field | Reals], tolerance: float) -> str:
        if (domain, spmd.mesh) not in self._runs:
            self._runs[domain, spmd.mesh] = Exactly(self._whole(), self.arguments, spmd.mesh, domain(2, 0))
        return self._runs[domain, spmd.mesh].difference(spmd, self.is_read, tolerance)

    def _compare_sent(self, spmd: SpmdProgram, split: Split) -> None:
        """Compares what the devices send with what the rule's ``local`` reports of it."""
        sent, said = emitted(spmd.jaxpr, spmd.mesh.atom_sizes), reported(spmd.collectives)
        if sent != said:
            raise RuleError(
                f"the rule of '{self.equation.name}' sends what it does not report.",
                self.equation.line,
                f"rule: {self.equation.rule}; split {split_text(self.equation.operator_rule, split, spmd.mesh)}\n"
                f"  bytes sent by each device: {dict(sent)}, reported: {dict(said)}",
                "Tell shards.note, or move data by shards.all_gather and shards.window, which do.",
            )

    def _lie(self, split: Split, mesh: Mesh, difference: str) -> RuleError:
        rule, name = self.equation.operator_rule, self.equation.name
        factors = [f for f, atoms in split.items() if atoms and f >= 0]
        ways = [f"{monoid} in operands {sorted(i)}" for monoid, i, _ in passing(rule, split)]
        words = " and ".join([*(f"factor '{rule.names[f]}'" for f in factors), *ways])
        padded = [rule.names[f] for f in factors if rule.factors[f].size % mesh.count(split[f])]
        notes = f"\n  parts along {' '.join(padded)} are padded: their sizes do not divide" if padded else ""
        return RuleError(
            f"the rule of '{name}' is not true of {words}: split, it computes something else.",
            self.equation.line,
            f"rule: {rule}; split {split_text(rule, split, mesh)}\n  {difference}{notes}",
            " ".join(dict.fromkeys(_advice(rule, f) for f in factors)) or "Leave it out of linear.",
        )


def _advice(rule: Rule, f: int) -> str:
    factor, name = rule.factors[f], rule.names[f]
    if factor.kind == REDUCE:
        return f"Are parts along '{name}' combined by '{factor.monoid}'? If by nothing, it is replicated."
    if factor.kind == COMMUNICATE:
        return f"Does local fetch all that a part along '{name}' needs?"
    return f"Do elements along '{name}' meet? Then it is reduced, communicated in a local, or replicated."


def splits_of(rule: Rule, mesh: Mesh, most: int | None = None) -> list[Split]:
    """Ways to split an equation, those of a single factor first; all of them, or a sample."""
    ways = [split for split in _splits(rule, mesh, 0, {}) if split and is_valid(rule, split, mesh)]
    if most is not None and len(ways) > most:
        ways = random.Random(0).sample(ways, most)
    return sorted(ways, key=lambda split: (len(split), *split))


def _splits(rule: Rule, mesh: Mesh, f: int, so_far: Split) -> Iterator[Split]:
    """All splits of the factors from ``f`` on, beside those of the ones before."""
    if rule.fixed is not None:
        return
    if f == len(rule.factors):
        yield so_far
        return
    yield from _splits(rule, mesh, f + 1, so_far)
    if rule.factors[f].kind != REPLICATE:
        used = {a for g, atoms in so_far.items() if rule.component[g] == rule.component[f] for a in atoms}
        free = [a for a in mesh.atoms if a not in used]
        for count in range(1, len(free) + 1):
            for atoms in itertools.permutations(free, count):
                yield from _splits(rule, mesh, f + 1, {**so_far, f: atoms})


def split_text(rule: Rule, split: Split, mesh: Mesh) -> str:
    """A split in the words of its rule: ``a@data c@model``."""
    words = [f"{rule.names[f]}@{mesh.format_atoms(atoms)}" for f, atoms in split.items() if atoms and f >= 0]
    words += [f"{monoid} over {mesh.format_atoms(atoms)} unreduced" for monoid, _, atoms in passing(rule, split)]
    return " ".join(words)


def plan_of(program: Program, equation: Equation, split: Split, mesh: Mesh) -> Plan:
    """A plan in which one equation is split, and everything else is whole on every device."""
    shardings = {v: Sharding.replicated(len(v.shape)) for v in program.block.inputs}
    for e in program.block.walk():
        shardings |= {v: Sharding.replicated(len(v.shape)) for v in e.outputs}
    for i, value in enumerate(equation.inputs):
        if isinstance(value, Value) and value in program.block.inputs:
            shardings[value] = operand_sharding(equation.operator_rule, i, split)
    splits = {e: split if e is equation else {} for e in program.block.walk()}
    return Plan(program, mesh, shardings, splits, {})


def emit(plan: Plan) -> SpmdProgram:
    """The per-device program of a plan, which takes its arguments in padded parts as they are planned."""
    block = plan.program.block
    leave = tuple(Sharding(plan.sharding(v).dims) for v in block.outputs)
    return partition(dataclasses.replace(plan, entry=tuple(map(plan.sharding, block.inputs)), leave=leave))


def _divides(x: Any, monoid: str) -> bool:
    """Whether numbers of this dtype can be parts under a monoid."""
    if _is_key(x):
        return False
    kind = np.asarray(x).dtype.kind
    finite = kind not in "fc" or bool(np.isfinite(x).all())
    return finite and kind in {"add": "iufc", "mul": "iufc", "max": "iuf", "min": "iuf", "pick": "biufc"}.get(
        monoid, "biu"
    )


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# Kernel checks: checks that the two functions of a ``gshard.kernel`` compute the same, whole and on shards.


def check_kernel(
    kernel: KernelFunction[..., Any],
    *args: Any,
    mesh: Any = None,
    most: int | None = None,
    tolerance: float = 1e-5,
    gradient: bool = True,
    **kwargs: Any,
) -> tuple[str, ...]:
    """Checks that the fast function of a kernel computes what the plain one computes, whole and on shards.

    gshard proves of the plain function that it may be split. It cannot prove that the fast function computes the same.

    Args:
        kernel: what ``gshard.kernel`` returned. Its fast function must run on this computer: write a Pallas kernel with
            ``interpret=True`` for a test on CPU.
        args: its arrays: numbers that vary in sign, dimensions that the mesh divides and some that it does not.
        kwargs: its static arguments.
        mesh: the devices, as ``gshard.jit`` takes them or an abstract mesh; by default 2 x 3 of them.
        most: check no more than so many splits, drawn with a fixed seed.
        tolerance: relative and absolute.
        gradient: whether to check the gradient with respect to all arguments of floating-point numbers, too.

    Returns:
        the splits that were checked, as text; those of the gradient after those of the kernel.

    Raises:
        RuleError: the two functions, or a split, compute something else; with the first element that differs.
        ArgumentError: this is no kernel.

    >>> import gshard
    >>> double = gshard.kernel(lambda x: x + x, like=lambda x: 2 * x)
    >>> check_kernel(double, np.float32([1, -2, 3]), mesh=2)
    ('a@devices, up to rounding', 'a@devices, up to rounding', 'a@devices, up to rounding')
    """
    if not isinstance(kernel, KernelFunction):
        hint = "Give what gshard.kernel(fast, like=plain) returns."
        raise ArgumentError(f"check_kernel takes a kernel, not {type(kernel).__name__}.", user_line(), hint=hint)

    def value(function: Callable[..., Any], *arrays: Any) -> Any:
        return function(*arrays, **kwargs)

    def slope(function: Callable[..., Any], *arrays: Any) -> Any:
        leaves, tree = jax.tree.flatten(arrays)
        floats = tuple(i for i, x in enumerate(leaves) if _is_float(x))

        def weighed(*some: Any) -> Any:
            results = jax.tree.leaves(value(function, *jax.tree.unflatten(tree, some)))
            return sum(jnp.sum(jnp.sin(x)) for x in results if _is_float(x))

        return jax.grad(weighed, argnums=floats)(*leaves)

    checked: list[str] = []
    has_gradient = gradient and any(map(_is_float, jax.tree.leaves(args)))
    for compute, what in ((value, ""), (slope, "the gradient: "))[: 2 if has_gradient else 1]:
        _compare(kernel, what, compute, args, tolerance)
        of_kernel = functools.partial(compute, kernel)
        checked += check_rule(of_kernel, *args, primitive=kernel_p, mesh=mesh, most=most, tolerance=tolerance)
    return tuple(checked)


def assert_proved(
    f: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Callable[..., Any] | None = None,
    dtypes: Literal["any", "kept"] = "any",
) -> Proof:
    """Asserts that a sharded program computes what a plain one does, as ``gshard.prove``.

    Args:
        f, like, dtypes: as for ``gshard.prove``.
        args, kwargs: the arguments of f.

    Raises:
        AssertionError: the programs are different, or the proof is undecided.

    >>> import gshard, jax.numpy as jnp
    >>> step = gshard.jit(lambda x: gshard.split(x, 0, "d") * 2, mesh=gshard.Mesh.abstract(d=4))
    >>> assert_proved(step, (jnp.ones(8),)).verdict
    'equal'
    """
    __tracebackhide__ = True
    proof = prove(f, *args, like=like, dtypes=dtypes, **(kwargs or {}))
    if not proof:
        raise AssertionError(str(proof))
    return proof


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _compare(
    kernel: KernelFunction[..., Any], what: str, compute: Callable[..., Any], arguments: Any, tolerance: float
) -> None:
    fast, plain = (jax.tree.leaves(jax.jit(compute, static_argnums=0)(f, *arguments)) for f in (kernel, kernel.like))
    for i, (got, want) in enumerate(zip(fast, plain, strict=True)):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise RuleError(f"a result is {got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} belongs.")
        got, want = (np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in (got, want))
        if found := first_difference(~near(got, want, tolerance), got, want, "of fast", "of like"):
            raise RuleError(
                f"the two functions of kernel {kernel} do not compute the same.",
                user_line(),
                f"{what}result {i}: {found}",
                "Both must compute the same for arrays of all sizes; tolerance= allows for rounding.",
            )
