"""Batches equal functions of separate arrays, so that devices compute whole ones of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import PlanError
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import BATCH_EQUAL_FUNCTIONS, Block, Constant, Equation, Fired, Program, Value
from gshard.core.rule import REDUCE, REPLICATE
from gshard.language.region import Interpreter, with_edges
from gshard.planning.settled import settled
from gshard.rewrite.driver import recorded
from gshard.rewrite.equation_graph import Neighbours, is_pure, literal_key, operands_first, written
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted

# Finds equal functions of separate arrays, such as a matrix function that an optimizer computes for each weight.


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """The equations of a block that compute a function of one array."""

    root: Value  # the array
    equations: tuple[Equation, ...]  # the equations in order
    outputs: tuple[Value, ...]  # the results that other equations read, or that leave the block
    # the other values that the equations read, in the order of reading: numbers, arrays that are small beside the root,
    # and arrays that depend on no array
    outside: tuple[Value, ...]

    @property
    def key(self) -> Hashable:
        """A key: functions with equal keys compute the same for other roots and values from outside."""
        operands = self.root, *self.outside
        numbers: dict[Any, Hashable] = {v: ("operand", i) for i, v in enumerate(operands)}
        types = tuple(map(_type, operands))
        equations = _keys(self.equations, numbers)
        return types, equations, tuple(numbers[v] for v in self.outputs)


def equal_functions(block: Block) -> list[list[Function]]:
    """Groups of at least two equal functions of a block.

    No function depends on another one of its group, and no two groups depend on each other: the functions of a group
    have the same level, and a function that depends on another one has a higher level.
    """
    functions = list(_functions(block))
    if len(functions) < 2:
        return []
    inside = {e for function in functions for e in function.equations}
    parts: list[Sequence[Equation]] = [
        *(f.equations for f in functions),
        *((e,) for e in block.equations if e not in inside),
    ]
    number = {e: i for i, e in enumerate(block.equations)}
    places = [number[part[0]] for part in parts]
    needs = needed_parts(parts, places)
    levels: dict[int, int] = {}
    for i in operands_first(range(len(parts)), needs.__getitem__):
        levels[i] = max((levels[k] for k in needs[i]), default=0) + (i < len(functions))
    groups: dict[Hashable, list[Function]] = {}
    for i, function in enumerate(functions):
        with contextlib.suppress(TypeError):  # a parameter without a hash
            groups.setdefault((levels[i], function.key), []).append(function)
    return [group for group in groups.values() if len(group) > 1]


def needed_parts(parts: Sequence[Sequence[Equation]], places: Sequence[int]) -> list[set[int]]:
    """For each part of a block, the numbers of the parts that must come before: those that it reads.

    If a part has effects, the part with effects before it is one of them.
    """
    maker = {v: i for i, equations in enumerate(parts) for e in equations for v in e.outputs}
    needs = [{maker[x] for e in equations for x in e.inputs if x in maker} - {i} for i, equations in enumerate(parts)]
    effects = sorted((places[i], i) for i, equations in enumerate(parts) if not all(map(is_pure, equations)))
    for (_, before), (_, after) in itertools.pairwise(effects):
        needs[after].add(before)
    return needs


def _functions(block: Block) -> Iterator[Function]:
    """The functions of one array that multiply it with itself or decompose it."""
    found, graph = _Roots(block), Neighbours(block.equations, block.outputs)
    for root, equations in found.equations.items():
        kept = _around(equations, [e for e in equations if found.mixes(e)])
        if not kept:
            continue
        inside, made = set(kept), {v for e in kept for v in e.outputs}
        outside = dict.fromkeys(x for e in kept for x in e.inputs if isinstance(x, Value) and x not in made)
        outside.pop(root, None)
        every = (v for e in kept for v in e.outputs)
        outputs = tuple(v for v in every if v in graph.outputs or not inside.issuperset(graph.readers(v)))
        yield Function(root, tuple(kept), outputs, tuple(outside))


class _Roots:
    """Finds for each value of a block the array that it is a function of, its root.

    An equation continues the function of its operands if all large arrays among them are functions of one root, or
    depend on no array. Otherwise its results are new roots. An array is large if it has more elements than each
    dimension of the largest operand.
    """

    def __init__(self, block: Block):
        # the root of each value; None for a value that depends on no array, and for a number with several roots
        self.of: dict[Value, Value | None] = {}
        self.before: dict[Value, int] = {}  # the roots on which each value depends, each as a bit
        self.bit: dict[Value, int] = {}  # the bit of each root
        self.equations: dict[Value, dict[Equation, None]] = {}  # the equations of each root's function, in order
        for v in block.inputs:
            self._begin(v, 0, is_root=bool(v.shape))
        for e in block.equations:
            self._add(e)

    def _begin(self, v: Value, before: int, *, is_root: bool) -> None:
        """Adds a value that is not a function of one root: a root itself, or a number or array that belongs to none."""
        self.of[v] = v if is_root else None
        if is_root:
            self.bit[v] = 1 << len(self.bit)
            before |= self.bit[v]
        self.before[v] = before

    def _add(self, e: Equation) -> None:
        operands = [x for x in e.inputs if isinstance(x, Value)]
        before = 0
        for x in operands:
            before |= self.before[x]
        roots: set[Value | None] = set()
        for kind in (_large(operands), [x for x in operands if x.shape], operands):
            roots = roots or {self.of[x] for x in kind} - {None}
        may_run = can_batch(e)
        if len(roots) == 1 and may_run:
            (root,) = roots
            assert root is not None
            bit = self.bit[root]
            # A number of several arrays, as a global norm, is a function of none of them.
            forbidden = bit if any(x.shape for x in operands) else -1
            if not any(self.before[x] & forbidden for x in operands if self.of[x] is not root):
                self.equations.setdefault(root, {})[e] = None
                self.of.update(dict.fromkeys(e.outputs, root))
                self.before.update(dict.fromkeys(e.outputs, before))
                return
        for v in e.outputs:
            self._begin(v, before, is_root=bool(v.shape) and (bool(roots) or not may_run))

    def mixes(self, e: Equation) -> bool:
        """Whether an equation multiplies functions of one root with each other, or decomposes one."""
        if e.rule is None:
            return any(map(_multiplies_results, e.blocks))
        root = self.of[e.outputs[0]]
        own = [x for x in e.inputs if isinstance(x, Value) and x.shape and self.of[x] is root]
        return _multiplies(e, len(own)) or (bool(own) and _decomposes(e))


def _multiplies(e: Equation, operands: int) -> bool:
    return operands > 1 and e.rule is not None and any(f.kind == REDUCE for f in e.rule.factors) and e.rule.flops > 0


def _decomposes(e: Equation) -> bool:
    """Whether an equation combines all elements along a dimension in more operations than it has elements."""
    if e.rule is None or not any(f.kind == REPLICATE and f.size > 1 for f in e.rule.factors):
        return False
    return e.rule.flops > max((_elements(x) for x in e.inputs), default=0)


def _multiplies_results(body: Block) -> bool:
    """Whether a body multiplies two of its values, or decomposes one."""
    return any(
        any(map(_multiplies_results, e.blocks))
        or _multiplies(e, sum(isinstance(x, Value) and bool(x.shape) for x in e.inputs))
        or _decomposes(e)
        for e in body.equations
    )


def _elements(x: Value | Constant) -> int:
    return math.prod(x.shape)


def _large(operands: Sequence[Value]) -> list[Value]:
    """The operands with more elements than any dimension of the largest one."""
    longest = max(max(operands, key=_elements).shape, default=0) if operands else 0
    return [x for x in operands if _elements(x) > longest]


def can_batch(e: Equation) -> bool:
    """Whether an equation may run on a batch of its operands: it is pure, not a mark, and computes on the device."""
    if e.mark is not None or not is_pure(e) or any(isinstance(v, Value) and v.on_host for v in (*e.outputs, *e.inputs)):
        return False
    if e.rule is not None and not (e.rule.is_free and e.rule.known):
        return False
    return all(can_batch(q) for block in e.blocks for q in block.equations)


def _around(equations: Iterable[Equation], mixing: Sequence[Equation]) -> list[Equation]:
    """The equations that depend on a mixing one, and those on which these and the mixing ones depend, in order."""
    ordered = list(equations)
    kept: set[Equation] = set(mixing)
    made = {v for e in mixing for v in e.outputs}
    for e in ordered:
        if e in kept or not made.isdisjoint(e.inputs):
            kept.add(e)
            made.update(e.outputs)
    needed = {x for e in kept for x in e.inputs}
    for e in reversed(ordered):
        if e in kept or not needed.isdisjoint(e.outputs):
            kept.add(e)
            needed.update(e.inputs)
    return [e for e in ordered if e in kept]


def _keys(equations: Iterable[Equation], numbers: dict[Any, Hashable]) -> tuple[Hashable, ...]:
    """A key for each equation; ``numbers`` has a key for each value from outside, and gets one for each result."""
    found = []
    for i, e in enumerate(equations):
        operands = tuple(numbers[x] if isinstance(x, Value) else (_type(x), literal_key(x)) for x in e.inputs)
        params = tuple((name, p) for name, p in e.params.items() if not e.blocks or not _has_equations(p))
        bodies = tuple(_body_key(body) for body in e.blocks)
        found.append((e.primitive, params, operands, tuple(map(_type, e.outputs)), bodies, e.context))
        numbers.update((v, (i, k)) for k, v in enumerate(e.outputs))
    return tuple(found)


def _body_key(body: Block) -> Hashable:
    numbers: dict[Any, Hashable] = {v: ("input", i) for i, v in enumerate(body.inputs)}
    keys = _keys(body.equations, numbers)
    outputs = tuple(numbers[v] if isinstance(v, Value) else (_type(v), literal_key(v)) for v in body.outputs)
    return tuple(map(_type, body.inputs)), keys, outputs


def _has_equations(parameter: Any) -> bool:
    """Whether a parameter is a jaxpr, or a tuple of jaxprs: the bodies stand for it."""
    return hasattr(parameter, "eqns") or (isinstance(parameter, tuple) and any(map(_has_equations, parameter)))


def _type(x: Value | Constant) -> Hashable:
    return x.shape, x.dtype, isinstance(x, Value) and x.weak


# Bytes of the arrays that a device has of one batch, unless one array is larger. A kernel that reads and writes as many
# takes several times as long as its launch.
_BUSY = 2**25


def batched(program: Program, mesh: Mesh) -> Program:
    """The program with equal functions batched; the same object if there are none."""
    if mesh.size == 1 or any(fired.rewrite == BATCH_EQUAL_FUNCTIONS for fired in program.fired):
        return program
    made = program.decomposed.get(
        (program.block, BATCH_EQUAL_FUNCTIONS, mesh.size), lambda: _batched(program, mesh.size)
    )
    return program if made is None else dataclasses.replace(program, block=made[0], fired=made[1])


def plan_of_either(program: Program, mesh: Mesh, make: Callable[[Program], Plan]) -> Plan:
    """A plan that was made before, for a settled program or for the same program with batches."""
    try:
        return make(program)
    except PlanError as error:
        with_batches = batched(program, mesh)
        if with_batches is program:
            raise
        try:
            return make(settled(with_batches, mesh).program)
        except PlanError:
            raise error from None


@no_mesh_set()
def _batched(program: Program, devices: int) -> tuple[Block, tuple[Fired, ...]] | None:
    fired: list[Fired] = []
    block = _with_batches(program.block, devices, Builder.after(program.block), fired)
    if block is program.block:
        return None
    return permitted(block, finite=program.finite), (*program.fired, *fired)


def _with_batches(block: Block, devices: int, builder: Builder, fired: list[Fired]) -> Block:
    """The block with batches of equal functions, also in bodies of its equations."""
    batches: list[tuple[Sequence[Function], list[Equation]]] = []
    for group in equal_functions(block):
        for functions, size in _shares(group, devices):
            equations = _batch(functions, size, builder)
            if equations is not None:
                batches.append((functions, equations))
                replaced = dict.fromkeys((e for f in functions for e in f.equations), ())
                others = {**replaced, functions[0].equations[0]: equations}
                fired.append(recorded(BATCH_EQUAL_FUNCTIONS, others, _note(functions, size)))
    gone = {e for functions, _ in batches for f in functions for e in f.equations}
    parts, is_changed = list[tuple[int, Sequence[Equation]]](), bool(batches)
    number = {e: i for i, e in enumerate(block.equations)}
    for e in block.equations:
        if e in gone:
            continue
        bodies = tuple(_with_batches(body, devices, builder, fired) for body in e.blocks)
        if bodies == e.blocks:
            parts.append((number[e], (e,)))
            continue
        is_changed = True
        parts.append((number[e], (with_edges(e, blocks=bodies),)))
    if not is_changed:
        return block
    parts += [(number[functions[0].equations[0]], equations) for functions, equations in batches]
    places = [place for place, _ in parts]
    needs = needed_parts([equations for _, equations in parts], places)
    order = operands_first(sorted(range(len(parts)), key=places.__getitem__), needs.__getitem__)
    return Block(block.inputs, tuple(e for i in order for e in parts[i][1]), block.outputs)


def _shares(group: Sequence[Function], devices: int) -> Iterator[tuple[Sequence[Function], int]]:
    """Divides equal functions into batches, each with a size that devices can share evenly.

    If one function would be left over for an additional round, it is not batched: gathering its array sends as much.
    """
    most = devices * max(1, _BUSY // max(group[0].root.bytes, 1))
    for start in range(0, len(group), most):
        functions = group[start : start + most]
        if len(functions) % devices == 1:
            functions = functions[:-1]
        if len(functions) > devices:
            yield functions, -(-len(functions) // devices) * devices
        elif functions:
            yield functions, next(n for n in range(len(functions), devices + 1) if devices % n == 0)


def _note(functions: Sequence[Function], size: int) -> str:
    root, line = functions[0].root, functions[0].equations[0].line
    shape = f"{root.dtype_name}[{','.join(map(str, root.shape))}]"
    repeated = f", one of them {size - len(functions) + 1} times" if size > len(functions) else ""
    return f"{len(functions)} functions of {shape}{repeated}{f' at {line}' if line else ''}"


def _batch(functions: Sequence[Function], size: int, builder: Builder) -> list[Equation] | None:
    """The equations that compute equal functions as one batch; None if one of their operators has no batched form."""
    first, count = functions[0], len(functions)
    outside = list(zip(*(f.outside for f in functions), strict=True))
    own = [i for i, values in enumerate(outside) if any(v is not values[0] for v in values)]  # of each function
    common = [v for i, v in enumerate(first.outside) if i not in own]
    inputs = [*(f.root for f in functions), *(v for i in own for v in outside[i]), *common]

    def function(*arrays: Any) -> list[Any]:
        rows = [*range(count), *[count - 1] * (size - count)]
        columns = [jnp.stack([arrays[k * count + i] for i in rows]) for k in range(1 + len(own))]
        known = dict(zip(common, arrays[(1 + len(own)) * count :], strict=True))

        def of_one(root: Any, *others: Any) -> list[Any]:
            env = {**known, first.root: root, **{first.outside[i]: x for i, x in zip(own, others, strict=True)}}
            Interpreter().evaluate(first.equations, env)
            return [env[v] for v in first.outputs]

        results = jax.vmap(of_one)(*columns)
        return [jax.lax.index_in_dim(y, i, keepdims=False) for y in results for i in range(count)]

    outputs = [v for values in zip(*(f.outputs for f in functions), strict=True) for v in values]
    try:
        return written(builder, function, inputs, outputs, first.equations[0])
    except NotImplementedError:
        return None
