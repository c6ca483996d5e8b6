"""Models the kernels into which XLA fuses the equations of one device, and the buffers between them.

The emitted program is read back as a block of equations with rules, on local shapes. An equation whose factors are all
parallel only moves or combines elements in place. A slice, a padding or a concatenation gives elements of its operands
at other places. XLA fuses both into the equation that reads them, so their results never reach memory. The remaining
equations are *kernels*: contractions, reductions, look-ups, collectives, and results that several kernels read.

    exp(x @ w + b).sum()     two kernels: the product, and one that adds, takes exponentials and sums up
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from gshard.comm.collectives import KINDS
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.rule import COMMUNICATE, MONOIDS, PARALLEL, REDUCE, Rule, moves
from gshard.core.spmd import SpmdProgram
from gshard.language.transfer import changes_memory
from gshard.tracing.trace import block_of

COLLECTIVE, REGION, FUSED, REDUCTION, PRODUCT, OPERATOR, PASSING = (
    "collective", "region", "fused", "reduction", "product", "operator", "passing",
)  # fmt: skip


_MOVES = frozenset((monoid, frozenset(operands)) for monoid, operands in moves(0))
_MONOIDS = frozenset(MONOIDS)


class StackSlice(NamedTuple):
    """A slice of a stack that one iteration of a loop moves."""

    value: Value  # the slice, a value of the body
    copied: bool  # whether it is copied out of the stack, or into it
    filled: bool  # whether its part of the stack is filled with zeros before the loop


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An equation that writes to memory, with the equations that are fused into it."""

    equation: Equation  # the last equation
    kind: str  # collective, region, reduction, product, operator, or fused (elementwise)
    fused: tuple[Equation, ...]  # the other equations, in order
    reads: tuple[Value, ...]  # the buffers that it reads
    writes: tuple[Value, ...]  # the buffers that it writes
    bodies: tuple[Kernels, ...] = ()  # the kernels of the bodies of a region
    in_place: bool = False  # whether the result overwrites the first operand, which no later kernel reads: an update
    # buffers among ``reads`` and ``writes`` that stay in registers, or that another kernel reads (``compiled_kernels``)
    spared: frozenset[Value] = frozenset()
    carried: tuple[Value, ...] = ()  # buffers that it reads or writes for another kernel
    spares_rows: bool = False  # whether it spares them only if no dimension that it reduces is split
    returns: bool = False  # whether it writes a result of the program, which no other kernel can compute for itself
    copied: tuple[int, ...] = ()  # bytes of the arrays that are copied into another layout before or after a collective
    slices: tuple[StackSlice, ...] = ()  # slices of a loop's stacks that an iteration copies or fills for it
    joined: int = 0  # of a collective that joins a message: bytes of one device's operands in it so far

    @property
    def starts(self) -> bool:
        """Whether it is launched however few bytes it moves, because it writes a result of the program."""
        return self.returns and not self.spared.issuperset(self.writes)

    @property
    def product_flops(self) -> int:
        """Operations of products in one run."""
        rule = self.equation.rule
        if rule is not None and rule.products is not None:
            return rule.products
        return flops(self.equation) if self.kind == PRODUCT else 0

    @property
    def vector_flops(self) -> int:
        """Other operations in one run."""
        own = 0 if self.kind in (REGION, COLLECTIVE) else flops(self.equation) - self.product_flops
        return own + sum(map(flops, self.fused))

    @property
    def moved(self) -> int:
        """Bytes read from memory and written to it in one run. Of an array with look-ups, only the elements found.

        Of an array that is updated in place, as many bytes as the largest of the other operands has.
        """
        if self.kind == REGION:
            return 0
        if self.in_place and self.spared.isdisjoint(self.writes):
            first, *others = self.equation.inputs
            return self._bytes_read({*self.reads} - {first}) + max(x.bytes for x in others)
        written = [v for v in self.writes if v not in self.spared]
        return self._bytes_read({*self.reads} - self.spared) + sum(v.bytes for v in (*written, *self.carried))

    def _bytes_read(self, values: Set[Value | Constant]) -> int:
        users: dict[Any, dict[Equation, None]] = {}
        whole = set()
        for e in (self.equation, *self.fused):
            for i, x in enumerate(e.inputs):
                if x in values:
                    users.setdefault(x, {})[e] = None
                    if e.rule is None or not (is_looked_up(e.rule, i) or moves_elements(e.rule)):
                        whole.add(x)
        found = {v: sum(x.bytes for e in users[v] for x in e.outputs) for v in users.keys() - whole}
        return sum(min(v.bytes, found.get(v, v.bytes)) for v in values)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of a block, in order."""

    block: Block  # the block
    kernels: tuple[Kernel, ...]  # its kernels
    home: dict[Value, Value]  # for each value that is a view, the buffer that holds it

    @property
    def results(self) -> frozenset[Value]:
        """The buffers of the results of the block."""
        return frozenset(self.home.get(v, v) for v in self.block.outputs if isinstance(v, Value))

    def walk(self, times: int = 1) -> Iterator[tuple[Kernel, int]]:
        """All kernels with their number of runs: all branches, and one iteration of a loop of unknown length."""
        for kernel in self.kernels:
            yield kernel, times
            for body in kernel.bodies:
                yield from body.walk(times * kernel.equation.trip_count)


def readers_of(program: Kernels) -> dict[Value, list[Kernel]]:
    """The kernels of a block that read each buffer."""
    found: dict[Value, list[Kernel]] = {}
    for kernel in program.kernels:
        for v in kernel.reads:
            found.setdefault(v, []).append(kernel)
    return found


def is_looked_up(rule: Rule, operand: int) -> bool:
    """Whether an equation reads only some elements of an operand, by indices."""
    return any(rule.factors[f].monoid == "pick" for dim in rule.operands[operand] for f in dim)


def looks_up(kernel: Kernel, v: Value, home: Mapping[Value, Value]) -> bool:
    """Whether a kernel reads only some elements of a buffer, by indices. ``home`` is that of its block."""
    operands = ((e, i, x) for e in (kernel.equation, *kernel.fused) for i, x in enumerate(e.inputs))
    uses = [(e, i) for e, i, x in operands if isinstance(x, Value) and home.get(x, x) is v]
    return bool(uses) and all(e.rule is not None and is_looked_up(e.rule, i) for e, i in uses)


@tabulated(4096)
def moves_elements(rule: Rule) -> bool:
    """Whether each result element is an element of an operand at another place: windows, paddings, reversals."""
    if not rule.known or _MONOIDS - {monoid for monoid, _ in rule.linear}:
        return False
    # A look-up at many places is a kernel of its own, and an update does not move elements.
    moved = frozenset.union(*(operands for _, operands in rule.linear))
    looked_up = any(dims for i, dims in enumerate(rule.operands) if i not in moved)
    placed = any(rule.factors[f].kind != PARALLEL for dims in rule.results for dim in dims for f in dim)
    summed = any(f.kind == REDUCE and f.monoid != "pick" for f in rule.factors)
    return placed and not looked_up and not summed


def only_moves(e: Equation) -> bool:
    """Whether each result element is an operand's element: a reshape, a broadcast, a window, a mark."""
    return e.rule is not None and _MOVES.issubset(e.rule.linear)


def is_product(rule: Rule) -> bool:
    """Whether an equation multiplies arrays and sums the products."""
    if rule.products is not None:
        return rule.products > 0
    return len(rule.operands) > 1 and any(f.kind == REDUCE for f in rule.factors)


def products_of(e: Equation) -> int:
    """Operations of matrix products of one run of an equation."""
    if e.rule is None:
        return 0
    own = e.rule.products
    return own if own is not None else flops(e) if kind_of(e) == PRODUCT else 0


def flops(e: Equation) -> int:
    """Operations of one run of an equation."""
    return e.rule.flops if e.rule is not None else 0


def device_program(spmd: SpmdProgram) -> Kernels:
    """Reads the per-device program."""
    return kernels_of_mapped(spmd.jaxpr, spmd.program)


def kernels_of_mapped(jaxpr: Any, program: Program | None = None) -> Kernels:
    """The kernels of a closed jaxpr with one ``shard_map``: the per-device program of ``program``, if given."""
    (body,) = (e.params["jaxpr"] for e in jaxpr.jaxpr.eqns if "mesh" in e.params and "jaxpr" in e.params)
    return kernels_of(block_of(body, program))


def kind_of(e: Equation) -> str:
    """The kind of kernel that XLA makes of an equation, from its rule."""
    if e.name in KINDS:
        return COLLECTIVE
    if e.rule is None:
        return REGION
    if changes_memory(e) or e.rule.products is not None:
        return OPERATOR
    kind = _kind_of_rule(e.rule)
    return PRODUCT if kind == OPERATOR and _multiplies(e, e.rule) else kind


def _multiplies(e: Equation, rule: Rule) -> bool:
    """Whether an equation multiplies and adds for each result and each element over which two operands are summed.

    A convolution is a product too, although its window cannot be split. A scatter adds, but multiplies nothing.
    """
    held = [{f for dim in dims for f in dim} for dims in rule.operands]
    shared = [
        factor.size
        for f, factor in enumerate(rule.factors)
        if factor.kind == REDUCE and factor.monoid == "add" and sum(f in some for some in held) > 1
    ]
    # A group's sum is over its own rows only.
    return bool(shared) and rule.flops * rule.groups >= 2 * math.prod(shared) * math.prod(e.outputs[0].shape) > 0


@tabulated(4096)
def _kind_of_rule(rule: Rule) -> str:
    if rule.passes and len(rule.operands) > 1:
        return PASSING
    # A sum over one element only changes the shape.
    kinds = {PARALLEL if f.kind == REDUCE and f.size == 1 else f.kind for f in rule.factors}
    reduced = {f for f, factor in enumerate(rule.factors) if factor.kind == REDUCE and factor.size > 1}
    if kinds <= {PARALLEL} and rule.known:
        return FUSED
    holders = [dims for dims in rule.operands if reduced & {f for dim in dims for f in dim}]
    if reduced and kinds <= {PARALLEL, REDUCE, COMMUNICATE}:
        return PRODUCT if len(holders) > 1 else REDUCTION
    return OPERATOR


def kernels_of(block: Block, *, windows: bool = True, inside: bool = False) -> Kernels:
    """Groups the equations of a block into kernels."""
    kinds = {e: kind_of(e) for e in block.equations}
    fusible = {e for e, kind in kinds.items() if kind == FUSED or (windows and e.rule and moves_elements(e.rule))}
    producer = {v: e for e in block.equations for v in e.outputs}
    home: dict[Value, Value] = {}
    for e in block.equations:
        if kinds[e] == PASSING or (kinds[e] == FUSED and _is_view(e)):
            home.update({v: home.get(x, x) for v, x in zip(e.outputs, e.inputs) if isinstance(x, Value)})
    roots = _roots(block, kinds, fusible, home)

    def is_buffer(v: Value) -> bool:
        return v not in producer or producer[v] in roots

    kernels: list[Kernel] = []
    results = {home.get(v, v) for v in block.outputs if isinstance(v, Value)}
    for e in block.equations:
        if e in roots:
            fused: dict[Equation, None] = {}
            reads: dict[Value, None] = {}
            _collect(e, producer, is_buffer, home, fused, reads)
            bodies = tuple(kernels_of(body, windows=windows, inside=True) for body in e.blocks)
            returns = not inside and not results.isdisjoint(e.outputs)
            kernel = Kernel(e, kinds[e], tuple(reversed(fused)), tuple(reads), e.outputs, bodies, returns=returns)
            kernels.append(kernel)
    read_later = set(results)
    read_later.update(() if inside else block.inputs)
    for i, kernel in reversed(list(enumerate(kernels))):
        e = kernel.equation
        if kernel.kind == OPERATOR and is_update(e) and e.inputs[0] in kernel.reads and e.inputs[0] not in read_later:
            kernels[i] = dataclasses.replace(kernel, in_place=True)
        read_later.update(kernel.reads)
    return Kernels(block, tuple(kernels), home)


def is_update(e: Equation) -> bool:
    """Whether a result is the first operand with some elements replaced."""
    if e.rule is None or not isinstance(e.inputs[0] if e.inputs else None, Value):
        return False
    return len(e.inputs) > 1 and e.rule.operands[0] == e.rule.results[0] and not moves_elements(e.rule)


def _roots(
    block: Block, kinds: Mapping[Equation, str], fusible: set[Equation], home: Mapping[Value, Value]
) -> set[Equation]:
    """The equations whose results reach memory.

    A fusible equation becomes part of the kernel that reads it, if only one kernel does, and reads it in any order.
    Each reader computes arrays without operands (counters, constants) again.
    """
    from_nothing: set[Value] = set()
    for e in block.equations:
        if kinds[e] == FUSED and all(_is_small(x) or x in from_nothing for x in e.inputs):
            from_nothing.update(e.outputs)
    roots: set[Equation] = set()
    uses: dict[Value, set[Equation]] = {}
    written_whole = {v for v in block.outputs if isinstance(v, Value)}
    for e in reversed(block.equations):
        operands = [x for x in e.inputs if isinstance(x, Value)]
        if e.outputs and all(v in home for v in e.outputs):
            for v, x in zip(e.outputs, e.inputs):
                if isinstance(x, Value):
                    uses.setdefault(x, set()).update(uses.get(v, ()))
                    written_whole.update({x} if v in written_whole else ())
            continue
        if e in fusible:
            users = {root for v in e.outputs for root in uses.get(v, ())}
            if not written_whole & set(e.outputs) and (len(users) <= 1 or from_nothing >= set(e.outputs)):
                for x in operands:
                    uses.setdefault(x, set()).update(users)
                continue
        roots.add(e)
        for x in operands:
            uses.setdefault(x, set()).add(e)
        if e not in fusible and kinds[e] != REDUCTION:
            looked_up = {x for i, x in enumerate(e.inputs) if e.rule is not None and is_looked_up(e.rule, i)}
            written_whole.update(
                x for x in operands if not looked_up or x in looked_up
            )  # indices are computed where they are read
    return roots


def _is_small(x: Value | Constant) -> bool:
    return isinstance(x, Constant) or math.prod(x.shape) == 1


def _is_view(e: Equation) -> bool:
    """Whether a result has the bytes of its operand, perhaps in another shape: a reshape, a squeeze, a mark."""
    if len(e.inputs) != 1 or not e.outputs or not isinstance(e.inputs[0], Value) or e.rule is None:
        return False
    if e.rule.flops and not only_moves(e):
        return False  # the equation changes elements
    before = [f for dim in e.rule.operands[0] for f in dim if e.rule.factors[f].size > 1]
    after = [f for dim in e.rule.results[0] for f in dim if e.rule.factors[f].size > 1]
    same = e.inputs[0].shape == e.outputs[0].shape and e.rule.flops > 0  # a copy
    return before == after and not same and e.inputs[0].dtype == e.outputs[0].dtype


def _collect(
    e: Equation,
    producer: Mapping[Value, Equation],
    is_buffer: Callable[[Value], bool],
    home: Mapping[Value, Value],
    fused: dict[Equation, None],
    reads: dict[Value, None],
) -> None:
    """Finds the equations that are fused into ``e``, and the buffers that they read."""
    operands = [iter(e.inputs)]
    while operands:
        x = next(operands[-1], None)
        if x is None:
            operands.pop()
        elif isinstance(x, Value):
            v = home.get(x, x)
            if is_buffer(v):
                reads[v] = None
            elif v in producer and producer[v] not in fused:
                fused[producer[v]] = None
                operands.append(iter(producer[v].inputs))
