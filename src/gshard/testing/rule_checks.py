"""Rule checks: checks a rule, or the two functions of a ``gshard.kernel``, by simulating every split."""

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
from gshard.comm.collectives import collectives_of
from gshard.comm.steps import identity
from gshard.core.errors import ArgumentError, RuleError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mark import positions_of_parts
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.rule import COMMUNICATE, REDUCE, REPLICATE, Rule, Split, is_valid, operand_sharding, passing
from gshard.core.sharding import Sharding
from gshard.core.spmd import Collective, SpmdProgram, by_kind
from gshard.emit.partition import partition
from gshard.language.kernel_primitive import kernel_p
from gshard.language.region import Interpreter
from gshard.planning.settled import on_mesh
from gshard.simulator.simulate import simulate
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
    """Checks that an equation run on shards, in every way its rule allows, computes what it computes whole.

    Args:
        f: a function around the equation; results of the equation that it does not use are not looked at.
        args: its arguments. What they hold is for you to choose: numbers that vary in sign and are never all equal,
            dimensions that do not divide by the mesh, and one that is smaller than it.
        primitive: the equations to check, by name or as the primitive itself; None for all that ``f`` has.
        mesh: devices to simulate, as ``gshard.jit`` takes them or an abstract mesh; by default 2 x 3 of them. None need
            exist.
        most: check no more than so many splits of an equation, drawn with a fixed seed, those of one factor first.
        tolerance: relative and absolute, for sums that are made in another order; 0 demands the same bits.

    Returns:
        the splits that were checked, as text.

    Raises:
        RuleError: a split computes something else; it names the split, its factors and the first element that differs.
            Or it sends what it does not report; or ``f`` has no such equation outside of loops, or one without a rule.

    >>> check_rule(lambda x: jnp.sort(x, 0), np.float32([[1, -2, 4], [3, 0, 5], [2, 1, -7]]), mesh=2)
    ('a@devices', 'b@devices')
    """
    name = getattr(primitive, "name", primitive)
    devices = SMALL if mesh is None else Mesh.of(mesh)
    program = on_mesh(trace(f, *args), devices)
    found = [e for e in program.block.equations if e.rule is not None and e.mark is None and name in (None, e.name)]
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
        rule = alone.equation.operator_rule
        for split in (*splits_of(rule, devices, most), *alone.passing(devices)):
            spmd = emit(plan_of(alone.program, alone.equation, split, devices))
            alone.compare_sent(spmd, split)
            alone.compare(run_on_all(spmd, alone.arguments), split, devices, tolerance)
            checked.append(split_text(rule, split, devices))
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
    expected: tuple[Any, ...]  # what the primitive computes from them; None for results that the program does not read

    @staticmethod
    def of(program: Program, equation: Equation, leaves: Sequence[Any]) -> Alone:
        """Takes an equation out of a program, outside of loops, that is called with these arrays."""
        values = dict(zip(program.block.inputs, (*program.captured, *map(jnp.asarray, leaves)), strict=True))
        before = itertools.takewhile(lambda e: e is not equation, program.block.equations)
        _Unmarked().evaluate((*before, equation), values)
        inputs = tuple(dict.fromkeys(v for v in equation.inputs if isinstance(v, Value)))
        made = [values[v] for v in equation.outputs]
        read = {v for e in program.block.walk() for v in e.inputs} | set(program.block.outputs)
        expected = tuple(x if v in read else None for v, x in zip(equation.outputs, made, strict=True))
        block = Block(inputs, (equation,), equation.outputs)
        names = tuple(f"operand {equation.inputs.index(v)}" for v in inputs)
        tree = jax.tree.structure(made)
        own = Program(block, (), (None,) * len(inputs), names, tree, equation.name)
        return Alone(own, equation, tuple(values[v] for v in inputs), expected)

    def of_finite(self) -> Alone:
        """The same where all sums are said to be finite: with the ways of ``Rule.finite``, which are checked too."""
        block = permitted(self.program.block, finite=True)
        return dataclasses.replace(
            self, program=dataclasses.replace(self.program, block=block), equation=block.equations[0]
        )

    def passing(self, mesh: Mesh) -> list[Split]:
        """Every way in which the rule lets values pass that are still to be combined, over one atom."""
        given = dict(zip(self.program.block.inputs, self.arguments, strict=True))

        def divides(x: Value | Constant, monoid: str) -> bool:
            return isinstance(x, Value) and _divides(given[x], monoid)

        return [
            {-1 - k: mesh.atoms[-1:]}
            for k, (monoid, operands) in enumerate(self.equation.operator_rule.linear)
            if mesh.atoms and all(divides(self.equation.inputs[i], monoid) for i in operands)
        ]

    def compare(self, results: Sequence[Sequence[Any]], split: Split, mesh: Mesh, tolerance: float) -> None:
        """Compares the results on every device with the expected ones."""
        for i, (per_device, whole) in enumerate(zip(results, self.expected, strict=True)):
            if whole is None:
                continue
            want = numbers_of(whole)
            for device, got in enumerate(map(numbers_of, per_device)):
                if found := first_difference(got, want, tolerance, f"on device {device}", "unsplit"):
                    raise self._lie(split, mesh, f"result {i}: {found}")

    def compare_sent(self, spmd: SpmdProgram, split: Split) -> None:
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


def run_on_all(spmd: SpmdProgram, arguments: Sequence[Any]) -> list[list[Any]]:
    """Simulates a per-device program that ``emit`` made; each result as a list over the devices."""
    mesh = spmd.mesh
    (equation,) = (e for e in spmd.jaxpr.jaxpr.eqns if "in_specs" in e.params)
    values: dict[Any, list[Any]] = {
        var: [x] * mesh.size for var, x in zip(spmd.jaxpr.jaxpr.constvars, spmd.jaxpr.consts, strict=True)
    }
    for var, x, sharding in zip(spmd.jaxpr.jaxpr.invars, arguments, spmd.in_shardings, strict=True):
        values[var] = parts_of(x, sharding, mesh)
    stacked = [values[v] for v in equation.invars]
    return [list(result) for result in simulate(equation.params["jaxpr"], (), mesh.atom_sizes, stacked)]


def parts_of(x: Any, sharding: Sharding, mesh: Mesh) -> list[Any]:
    """Each device's part of a whole array; where a dimension does not divide, padded with what spoils results.

    If it is unreduced, the parts are to be combined: no device has the array itself.
    """
    if sharding.unreduced:
        partial = tuple(a for a, _ in sharding.unreduced)
        cut = Sharding(sharding.dims)
        split = [parts_of(part, cut, mesh) for part in _divided(x, sharding.unreduced[0][1], mesh.count(partial))]
        part_of = {int(d): part for part, devices in enumerate(positions_of_parts((partial,), mesh)) for d in devices}
        return [split[part_of[device]][device] for device in range(mesh.size)]
    if _is_key(x):
        data = parts_of(jax.random.key_data(x), Sharding((*sharding.dims, ())), mesh)
        return [jax.random.wrap_key_data(jnp.asarray(part), impl=jax.random.key_impl(x)) for part in data]
    x = np.asarray(x)
    local = sharding.local_shape(mesh, x.shape)
    missing = [size * mesh.count(atoms) - n for n, size, atoms in zip(x.shape, local, sharding.dims, strict=True)]
    if any(missing):
        x = np.pad(x, [(0, n) for n in missing], constant_values=_poison(x.dtype))
    parts: list[Any] = [None] * mesh.size
    devices = positions_of_parts(sharding.dims, mesh)
    for at in np.ndindex(devices.shape[:-1]):
        part = x[tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, local, strict=True))]
        for device in devices[at]:
            parts[device] = part
    return parts


def _divided(x: Any, monoid: str, count: int) -> list[np.ndarray]:
    """Parts whose combination is ``x``: each element is with one device, and noise of both signs is spread."""
    x, rng = np.asarray(x), np.random.default_rng(count)
    owner = rng.integers(0, count, x.shape)
    parts = [np.where(owner == i, x, np.asarray(identity(monoid, x.dtype), x.dtype)) for i in range(count)]
    if monoid in ("add", "xor") and x.dtype != np.bool_:
        # What one device has too much, the next one lacks.
        for i in range(count):
            extra = rng.integers(-3, 4, x.shape).astype(x.dtype)
            j = (i + 1) % count
            parts[i] = parts[i] + extra if monoid == "add" else parts[i] ^ extra
            parts[j] = parts[j] - extra if monoid == "add" else parts[j] ^ extra
    return parts


def _divides(x: Any, monoid: str) -> bool:
    """Whether numbers of this dtype can be parts under a monoid."""
    if _is_key(x):
        return False
    kind = np.asarray(x).dtype.kind
    finite = kind not in "fc" or bool(np.isfinite(x).all())
    return finite and kind in {"add": "iufc", "mul": "iufc", "max": "iuf", "min": "iuf", "pick": "biufc"}.get(
        monoid, "biu"
    )


def _poison(dtype: Any) -> Any:
    if dtype == np.bool_:
        return True
    value = np.nan if jnp.issubdtype(dtype, jnp.inexact) else int(jnp.iinfo(dtype).max) // 3
    return np.asarray(value).astype(dtype)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def numbers_of(x: Any) -> np.ndarray:
    """An array as numbers; random keys as the words they are made of."""
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def first_difference(got: np.ndarray, want: np.ndarray, tolerance: float, one: str, other: str) -> str:
    """The first element that is not equal, or near where it is inexact, and how many are not; nothing if all are."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise RuleError(f"a result is {got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} belongs.")
    right = np.asarray(got == want)
    if jnp.issubdtype(want.dtype, jnp.inexact):
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        right = np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
    if right.all():
        return ""
    at = tuple(map(int, np.argwhere(~right)[0]))
    differ = f"({(~right).sum()} of {right.size} differ)"
    return f"element {list(at)} is {got[at]} {one}, and {want[at]} {other} {differ}"


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
        mesh: devices to simulate, as ``gshard.jit`` takes them or an abstract mesh; by default 2 x 3 of them.
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
    ('a@devices', 'a@devices', 'a@devices')
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
        if found := first_difference(numbers_of(got), numbers_of(want), tolerance, "of fast", "of like"):
            raise RuleError(
                f"the two functions of kernel {kernel} do not compute the same.",
                user_line(),
                f"{what}result {i}: {found}",
                "Both must compute the same for arrays of all sizes; tolerance= allows for rounding.",
            )
