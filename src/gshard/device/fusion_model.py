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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from gshard.comm.steps import ALL_GATHER, KINDS, is_strided, is_turned
from gshard.core.jax_adapter import scan_counts
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Constant, Equation, Program, Value, short_dtype
from gshard.core.rule import COMMUNICATE, MONOIDS, PARALLEL, REDUCE, Rule, moves
from gshard.core.spmd import SpmdProgram
from gshard.device.machine import Compiler
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
    # buffers among ``reads`` and ``writes`` that stay in registers, or that another kernel reads (``fusion_model``)
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


class Buffers:
    """The buffers of a block: which kernels write and read them, and which outlive the block."""

    def __init__(self, program: Kernels, kernels: Sequence[Kernel] | None = None):
        self.kernels = program.kernels if kernels is None else kernels
        self.block, self.home, self.kept = program.block, program.home, program.results
        self.place = {kernel: i for i, kernel in enumerate(self.kernels)}
        self.made: dict[Value, int] = {}  # for each buffer, the position of the kernel that writes it
        self.users: dict[Value, list[int]] = {}  # for each buffer, the positions of the kernels that read it
        for i, kernel in enumerate(self.kernels):
            for v in kernel.reads:
                self.users.setdefault(v, []).append(i)
            self.made.update(dict.fromkeys(kernel.writes, i))
        # for each buffer, the position of the last kernel that reads it, or -1; after the last kernel if it outlives
        self.last = dict.fromkeys(self.made, -1) | {v: at[-1] for v, at in self.users.items()}
        self.last |= dict.fromkeys(self.kept, len(self.kernels))

    def buffer(self, v: Value) -> Value:
        """The buffer that holds a value."""
        return self.home.get(v, v)

    def writer(self, v: Value) -> Kernel | None:
        """The kernel that writes a buffer; None for an input of the block."""
        return self.kernels[self.made[v]] if v in self.made else None

    def readers(self, v: Value) -> list[Kernel]:
        """The kernels that read a buffer."""
        return [self.kernels[i] for i in self.users.get(v, ())]

    def only_reader(self, kernel: Kernel) -> Kernel | None:
        """The only reader of the only result of a kernel, if there is one."""
        readers = self.readers(kernel.writes[0]) if len(kernel.writes) == 1 else []
        return readers[0] if len(readers) == 1 and kernel.writes[0] not in self.kept else None

    def only_within(self, v: Value, group: Iterable[Kernel]) -> bool:
        """Whether only the group reads a buffer."""
        return v not in self.kept and set(self.readers(v)) <= set(group)

    def epilogue(self, product: Kernel) -> Kernel | None:
        """The elementwise kernel that a compiler can fuse into a product, because only it reads the result."""
        reader = self.only_reader(product) if product.kind == PRODUCT else None
        if reader is None or reader.kind != FUSED:
            return None
        place = self.place[product]
        return reader if all(self.made.get(v, -1) <= place for v in reader.reads) else None


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


def as_kernel(e: Equation) -> Kernel:
    """An equation as a kernel that reads and writes only its own operands and results."""
    reads = tuple(dict.fromkeys(v for v in e.inputs if isinstance(v, Value)))
    return Kernel(e, kind_of(e), (), reads, e.outputs)


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
    arrays, left = {tuple(dims) for dims in rule.operands if dims}, {f for r in rule.results for dim in r for f in dim}
    is_searched = rule.known and len(arrays) == 1 and all(rule.factors[f].kind == PARALLEL for f in left)
    return REDUCTION if is_searched and not reduced else OPERATOR  # an argmax, or a reduction by another function


def kernels_of(block: Block, *, windows: bool = True, inside: bool = False) -> Kernels:
    """Groups the equations of a block into kernels."""
    kinds = {e: kind_of(e) for e in block.equations}
    fusible = {e for e, kind in kinds.items() if kind == FUSED or (windows and e.rule and moves_elements(e.rule))}
    producer = {v: e for e in block.equations for v in e.outputs}
    home: dict[Value, Value] = {}
    others = {x for e in block.equations if kinds[e] != PRODUCT for x in e.inputs if isinstance(x, Value)}
    others.update(x for x in block.outputs if isinstance(x, Value))
    for e in block.equations:
        is_folded = others.isdisjoint(e.outputs) and _is_view(e, turned=True)
        if kinds[e] == PASSING or (kinds[e] == FUSED and (is_folded or _is_view(e))):
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


def _is_view(e: Equation, *, turned: bool = False) -> bool:
    """Whether a result has the bytes of its operand, perhaps in another shape: a reshape, a squeeze, a mark.

    With ``turned``, also a transposed matrix, which every compiler folds into the products that read it.
    """
    if len(e.inputs) != 1 or not e.outputs or not isinstance(e.inputs[0], Value) or e.rule is None:
        return False
    if e.rule.flops and not only_moves(e):
        return False  # the equation changes elements
    before = [f for dim in e.rule.operands[0] for f in dim if e.rule.factors[f].size > 1]
    after = [f for dim in e.rule.results[0] for f in dim if e.rule.factors[f].size > 1]
    same = e.inputs[0].shape == e.outputs[0].shape and e.rule.flops > 0  # a copy
    same_order = before == after or (turned and len(after) == 2 and before == after[::-1])
    return same_order and not same and e.inputs[0].dtype == e.outputs[0].dtype


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


# Models what a compiler does with kernels and collectives: it merges, copies, stacks and combines them.

# The number of kernels, or groups of them, in which a partner is searched: merged kernels are near each other.
_NEAR = 64


def as_compiled(
    program: Kernels, compiler: Compiler, slices: Mapping[Kernel, Sequence[StackSlice]] = MappingProxyType({})
) -> Kernels:
    """The kernels, with the buffers that the compiler spares, arrays that it copies, and messages that it joins.

    ``slices`` are the slices of the loop whose body this is.
    """
    merged, copied, joined = _merged(program, compiler), _layout_copies(program, compiler), _messages(program, compiler)
    kernels = []
    for kernel in program.kernels:
        bodies = tuple(as_compiled(body, compiler, _slices_of(kernel, body, compiler)) for body in kernel.bodies)
        changed = dataclasses.replace(
            merged.get(kernel, kernel), bodies=bodies, copied=copied.get(kernel, ()),
            slices=tuple(slices.get(kernel, ())), joined=joined.get(kernel, 0),
        )  # fmt: skip
        kernels.append(changed)
    return dataclasses.replace(program, kernels=tuple(kernels))


def _merged(program: Kernels, compiler: Compiler) -> dict[Kernel, Kernel]:
    """The kernels of a block that share buffers with others, by the kernels as they were."""
    buffers = Buffers(program)
    changed: dict[Kernel, Kernel] = {}
    merged: set[Kernel] = set()
    for group in _rows(buffers, compiler.fused_row):
        merged.update(group)
        _merge(group, group[-1], buffers, changed, spares_rows=True)
    if compiler.fuses_epilogues:
        _merge_epilogues(buffers, changed)
    if compiler.fuses_elementwise:
        for kernel in reversed(program.kernels):
            if kernel not in merged and _is_recomputed(kernel, buffers):
                _recompute(kernel, buffers, changed)
                merged.add(kernel)
        for group in _read_together(buffers, merged):
            _merge(group, group[-1], buffers, changed)
    return changed


def _elements(kernel: Kernel) -> int:
    return math.prod(kernel.writes[0].shape) if kernel.writes else 0


def _row(kernel: Kernel) -> int:
    """The length of the rows that a kernel reduces; 0 if it does not reduce the last dimension alone."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or len(kernel.writes) != 1:
        return 0
    reduced = [f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE and factor.size > 1]
    last = e.rule.operands[0][-1:] if e.rule.operands else ()
    return e.rule.factors[reduced[0]].size if [list(dim) for dim in last] == [reduced] and len(reduced) == 1 else 0


def _rows(buffers: Buffers, longest: int) -> list[tuple[Kernel, ...]]:
    """Groups of kernels that XLA merges: statistics of rows, each computed from the one before, and their readers."""
    groups, merged = [], set[Kernel]()
    for kernel in buffers.kernels:
        if kernel in merged or not 0 < _row(kernel) <= longest:
            continue
        following = _following(kernel, _row(kernel), buffers)
        preceding = [k for k in _producers(kernel, buffers) if buffers.only_within(k.writes[0], [k, *following])]
        group = [*preceding, *following]
        while group and not all(buffers.only_within(v, group) for k in group[:-1] for v in k.writes):
            group = group[:-1]
        if len(group) > 1 and not merged & set(group) and _reads_one_array(group):
            groups.append(tuple(group))
            merged.update(group)
    return groups


def _following(first: Kernel, row: int, buffers: Buffers) -> list[Kernel]:
    """The kernels that are merged with a statistic of rows, as far as their order allows."""
    elements = row * _elements(first)
    group, written = [first], set(first.writes)
    after: set[Value] = set()  # results of other kernels that depend on the group
    since = set(first.writes)  # the last statistic, and values computed from it
    start = buffers.place[first] + 1
    for kernel in buffers.kernels[start : start + _NEAR]:
        reads = set(kernel.reads)
        joins = bool(reads & since) and not reads & after
        if joins and kernel.kind == REDUCTION and _row(kernel) == row and _elements(kernel) * row == elements:
            since = set(kernel.writes)
        elif joins and kernel.kind == FUSED and len(kernel.writes) == 1 and _elements(kernel) == elements:
            since |= set(kernel.writes)
        else:
            if reads & (written | after):
                after |= set(kernel.writes)
            continue
        group.append(kernel)
        written |= set(kernel.writes)
    return group


def _producers(first: Kernel, buffers: Buffers) -> list[Kernel]:
    """Elementwise kernels whose results the first statistic reads, such as a conversion."""
    writers = (buffers.writer(v) for v in first.reads)
    return [k for k in writers if k is not None and k.kind == FUSED and len(k.writes) == 1]


def _reads_one_array(group: Sequence[Kernel]) -> bool:
    """Whether a group reads at most one large array: one operand fills the registers."""
    written = {v for k in group for v in k.writes}
    reads = {v for k in group for v in k.reads} - written
    elements = max(_elements(k) for k in group)
    return sum(math.prod(v.shape) >= elements for v in reads) <= 1


def _merge(
    group: Sequence[Kernel], carrier: Kernel, buffers: Buffers, changed: dict[Kernel, Kernel], *,
    spares_rows: bool = False,
) -> None:  # fmt: skip
    """Merges a group: one of its kernels carries the buffers that the group reads and writes."""
    others = [kernel for kernel in group if kernel is not carrier]
    results = {v for k in group for v in k.writes}
    reads: dict[Value, None] = {}
    for kernel in group:
        compiled = changed.get(kernel, kernel)
        inputs = (v for v in (*compiled.reads, *compiled.carried) if v not in results and v not in compiled.spared)
        reads.update(dict.fromkeys(inputs))
    for kernel in others:
        spared = frozenset((*kernel.reads, *kernel.writes))
        changed[kernel] = dataclasses.replace(kernel, spared=spared, spares_rows=spares_rows)
    written = (v for k in others for v in k.writes if not buffers.only_within(v, group))
    inside = (v for v in carrier.writes if carrier is not group[-1] and buffers.only_within(v, group))
    changed[carrier] = dataclasses.replace(
        carrier,
        spared=frozenset((*(v for v in carrier.reads if v not in reads), *inside)),
        carried=(*(v for v in reads if v not in carrier.reads), *written),
        spares_rows=spares_rows and carrier is not group[-1],
    )


def _is_recomputed(kernel: Kernel, buffers: Buffers) -> bool:
    """Whether it moves fewer bytes to compute an elementwise result in each reader than to store it."""
    if kernel.kind != FUSED or len(kernel.writes) != 1 or kernel.writes[0] in buffers.kept:
        return False
    (result,) = kernel.writes
    readers = buffers.readers(result)
    if readers and all(looks_up(k, result, buffers.home) for k in readers):
        return True
    if len(readers) < 2 or not all(k.kind in (FUSED, REDUCTION) for k in readers):
        return False
    read = sum(v.bytes for v in kernel.reads)
    return len(readers) * read <= read + (1 + len(readers)) * result.bytes


def _recompute(kernel: Kernel, buffers: Buffers, changed: dict[Kernel, Kernel]) -> None:
    compiled = changed.get(kernel, kernel)
    reads = [v for v in (*compiled.reads, *compiled.carried) if v not in compiled.spared]
    changed[kernel] = dataclasses.replace(
        compiled, spared=frozenset((*compiled.reads, *compiled.carried, *compiled.writes)), carried=()
    )
    for reader in buffers.readers(kernel.writes[0]):
        other = changed.get(reader, reader)
        # A look-up computes only the elements that it finds.
        new_reads = (
            () if looks_up(reader, kernel.writes[0], buffers.home) else (v for v in reads if v not in other.reads)
        )
        carried = dict.fromkeys((*other.carried, *new_reads))
        changed[reader] = dataclasses.replace(other, spared=other.spared | {kernel.writes[0]}, carried=tuple(carried))


class _Group:
    """Kernels that iterate over the same elements once, and the results of other kernels that depend on them."""

    def __init__(self, kernel: Kernel):
        self.kernels = [kernel]
        self.elements, self.reduced = _space(kernel)
        self.reads, self.writes = set(kernel.reads), set(kernel.writes)
        self.after = set(kernel.writes) if self.reduced else set[Value]()  # a sum is complete after all reads

    def joins(self, other: _Group) -> bool:
        """Whether one kernel can do the work of both: one reads a result of the other, or reduces a shared array."""
        if self.elements != other.elements or (self.reduced and other.reduced and self.reduced != other.reduced):
            return False
        if self.after & other.reads or other.after & self.reads:
            return False  # another kernel must run in between
        shared = other.reads & (self.writes | self.reads if self.reduced or other.reduced else self.writes)
        return any(math.prod(v.shape) >= self.elements for v in shared)

    def add(self, other: _Group) -> None:
        """Adds the kernels of another group."""
        self.kernels += other.kernels
        self.reads |= other.reads
        self.writes |= other.writes
        self.after |= other.after
        self.reduced = self.reduced or other.reduced


def _space(kernel: Kernel) -> tuple[int, tuple[int, ...]]:
    """The number of elements over which a kernel iterates, and the dimensions that it reduces."""
    e = kernel.equation
    if kernel.kind != REDUCTION or e.rule is None or not e.rule.operands:
        return _elements(kernel), ()
    reduced = {f for f, factor in enumerate(e.rule.factors) if factor.kind == REDUCE}
    return max(math.prod(x.shape) for x in e.inputs), tuple(
        i for i, dim in enumerate(e.rule.operands[0]) if reduced & set(dim)
    )


def _read_together(buffers: Buffers, merged: set[Kernel]) -> list[tuple[Kernel, ...]]:
    """Groups of elementwise kernels and reductions that XLA merges into one kernel with several results."""
    groups: list[_Group] = []  # groups that may still grow
    complete: list[_Group] = []
    for kernel in buffers.kernels:
        own_group = None
        if kernel.kind in (FUSED, REDUCTION) and kernel not in merged and len(kernel.writes) == 1:
            own_group = _Group(kernel)
            for group in list(groups):
                if group.joins(own_group):
                    group.add(own_group)
                    own_group = group
                    groups.remove(group)
            groups.append(own_group)
            if len(groups) > _NEAR:
                complete.append(groups.pop(0))
        for group in groups:
            if group is not own_group and not (
                group.after.isdisjoint(kernel.reads) and group.writes.isdisjoint(kernel.reads)
            ):
                group.after.update(kernel.writes)
    ordered = (sorted(group.kernels, key=buffers.place.__getitem__) for group in (*complete, *groups))
    return [tuple(group) for group in ordered if len(group) > 1]


# Finds epilogues: elementwise work on the result of a product that the compiler fuses into the product.


def _merge_epilogues(buffers: Buffers, changed: dict[Kernel, Kernel]) -> None:
    """Merges products with the elementwise kernels after them, and with updates that write their results elsewhere."""
    for product in buffers.kernels:
        last, epilogue = product, buffers.epilogue(product)
        if epilogue is not None and _elements(epilogue) == _elements(product):
            _merge((product, epilogue), product, buffers, changed, spares_rows=True)
            last = epilogue
        update = buffers.only_reader(last) if product.kind == PRODUCT else None
        if update is not None and _updates(update, last.writes[0], buffers):
            changed[update] = dataclasses.replace(update, spared=frozenset((*update.reads, *update.writes)))


def _updates(kernel: Kernel, value: Value, buffers: Buffers) -> bool:
    """Whether a kernel overwrites a window of an array with ``value``."""
    e = kernel.equation
    if kernel.kind != OPERATOR or kernel.fused or not is_update(e) or not isinstance(e.inputs[1], Value):
        return False
    return buffers.buffer(e.inputs[1]) is value


# Models the stacks of loops: the slices that XLA copies out of them and into them, and the zeros that it fills in.


def _slices_of(loop: Kernel, body: Kernels, compiler: Compiler) -> dict[Kernel, list[StackSlice]]:
    """The slices that an iteration copies or fills, one of each stack, by the kernel that reads or writes it."""
    found: dict[Kernel, list[StackSlice]] = {}
    if loop.equation.name != "scan":
        return found
    consts, carry = scan_counts(loop.equation.params)
    buffers = Buffers(body)
    for v in body.block.inputs[consts + carry :]:
        kernels = [k for k in buffers.readers(v) if not looks_up(k, v, body.home)]
        copying = [k for k in kernels if k.kind not in (FUSED, REDUCTION)]
        if compiler.products_slice_stacks and len(copying) == 1 and copying[0].kind == PRODUCT:
            continue
        if copying:
            found.setdefault(copying[0], []).append(StackSlice(v, copied=True, filled=False))
    filled = not compiler.products_slice_stacks or bool(loop.equation.params["reverse"])
    for output in body.block.outputs[carry:]:
        if not isinstance(output, Value):
            continue
        v = buffers.buffer(output)
        writer, readers = buffers.writer(v), buffers.readers(v)
        kernel = writer or next(iter(readers or body.kernels), None)
        copied = not _writes_in_place(writer, readers, compiler)
        if kernel is not None and (copied or filled):
            found.setdefault(kernel, []).append(StackSlice(v, copied, filled))
    return found


def _writes_in_place(writer: Kernel | None, readers: Sequence[Kernel], compiler: Compiler) -> bool:
    """Whether a kernel writes its result into a stack, and not into an array that is copied there."""
    if writer is None:  # the slice is an array from before the iteration
        return False
    if compiler.products_slice_stacks:
        return writer.kind in (FUSED, REDUCTION, PRODUCT)
    return writer.kind == FUSED and not readers


# Models layout copies: the arrays that XLA copies into another memory layout before or after a collective.

_ALONG = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


def _layout_copies(program: Kernels, compiler: Compiler) -> dict[Kernel, tuple[int, ...]]:
    """For each collective, the bytes of the arrays that are copied into another layout."""
    buffers = Buffers(program)
    copies: dict[Kernel, tuple[int, ...]] = {}
    for kernel in program.kernels:
        if kernel.kind != COLLECTIVE:
            continue
        operand, (result,) = kernel.equation.inputs[0], kernel.writes[:1]
        assert isinstance(operand, Value)
        before, after = _layouts(kernel, operand, result, compiler)
        home = buffers.buffer(operand)
        writer = buffers.writer(home)
        any_layout = compiler.products_take_layouts
        writing_kinds = {FUSED, REDUCTION, PRODUCT} if any_layout else {FUSED, REDUCTION}
        reading_kinds = writing_kinds if any_layout else {FUSED}
        is_free = writer is not None and writer.kind in writing_kinds and buffers.readers(home) == [kernel]
        arrays = [operand.bytes] if before and not is_free else []
        users = buffers.readers(result)
        shares_layout = len(users) == 1 or any_layout
        if after and (
            result in buffers.kept or not users or not shares_layout or any(k.kind not in reading_kinds for k in users)
        ):
            arrays.append(result.bytes)
        copies[kernel] = tuple(arrays)
    return copies


def _layouts(kernel: Kernel, operand: Value, result: Value, compiler: Compiler) -> tuple[bool, bool]:
    """Whether a collective needs its operand, and makes its result, in a layout of its own."""
    params: Mapping[str, Any] = kernel.equation.params
    kind = KINDS[kernel.equation.name]
    if "split_axis" in params:
        cut, joined = params["split_axis"], params["concat_axis"]
        part = tuple(min(a, b) for a, b in zip(operand.shape, result.shape, strict=True))
        return False, math.prod(operand.shape) > 0 and is_turned(part, cut, joined)
    copies = kind in _ALONG and compiler.copies_for_collectives and is_strided(operand.shape, params[_ALONG[kind]])
    return copies, copies


# Models the combiner: the collectives that XLA sends in one message.


class Messages:
    """Assigns collectives to messages. Call ``send`` in the order in which they run."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._bytes: list[int] = []
        self._latest: dict[object, int] = {}

    def send(self, key: object, operand_bytes: int, needed: frozenset[int]) -> tuple[int, int]:
        """Adds a collective to a message."""
        message = self._latest.get(key)
        is_full = message is not None and self._bytes[message] + operand_bytes > self._largest
        # If the collective depends on a later message, the two messages would depend on each other.
        if message is None or is_full or max(needed, default=-1) >= message:
            message = self._latest[key] = len(self._bytes)
            self._bytes.append(0)
        before = self._bytes[message]
        self._bytes[message] += operand_bytes
        return message, before


def _messages(program: Kernels, compiler: Compiler) -> dict[Kernel, int]:
    """The collectives that join a message, with the bytes of one device's operands in it so far."""
    joined: dict[Kernel, int] = {}
    messages = Messages(compiler.combined_bytes)
    needs: dict[Value, frozenset[int]] = {}  # for each value, the messages on which it depends
    for kernel in program.kernels:
        needed = frozenset[int]().union(*(needs.get(program.home.get(v, v), frozenset()) for v in kernel.reads))
        if kernel.kind == COLLECTIVE and KINDS[kernel.equation.name] in compiler.combines:
            e = kernel.equation
            operand_bytes = sum(v.bytes for v in e.inputs if isinstance(v, Value))
            among = str(e.params.get("axes", e.params.get("axis_name")))
            added = "" if KINDS[e.name] == ALL_GATHER else short_dtype(kernel.writes[0].dtype)
            message, joined[kernel] = messages.send((e.name, among, added), operand_bytes, needed)
            needed |= {message}
        needs.update((program.home.get(v, v), needed) for v in kernel.writes)
    return joined
