"""Models the bytes that a device holds at each moment of a program, and names the arrays of the peak."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

import jax

from gshard.comm.steps import KINDS
from gshard.core.jax_adapter import scan_counts
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Program, Value, itemsize
from gshard.device.fusion_model import (
    COLLECTIVE,
    FUSED,
    OPERATOR,
    PRODUCT,
    REGION,
    Buffers,
    Kernel,
    Kernels,
    is_update,
    moves_elements,
    only_moves,
)
from gshard.device.machine import COMPILERS, Compiler
from gshard.naming.array_names import ArrayNames

# Models the float32 values that the TPU compiler stores in bfloat16 between kernels.

_MOVING = ("all_to_all", "collective_permute", "all_gather")


def stored_in_bfloat16(program: Kernels) -> set[Value]:
    """The float32 values of a block that only products and conversions to smaller types read, perhaps moved."""
    buffers = Buffers(program)
    narrow: set[Value] = set()
    for v in (v for kernel in reversed(program.kernels) for v in kernel.writes):
        if v.dtype == "float32" and v not in buffers.kept and v in buffers.users:
            if all(_reads_bfloat16(kernel, v, program.home, narrow) for kernel in buffers.readers(v)):
                narrow.add(v)
    return narrow


def _reads_bfloat16(kernel: Kernel, v: Value, home: Mapping[Value, Value], narrow: Set[Value]) -> bool:
    """Whether a kernel can read a value in bfloat16, if it writes those of ``narrow`` so."""
    pending = [v]
    seen = {v}
    while pending:
        x = pending.pop()
        for e in (*kernel.fused, kernel.equation):
            if not any(isinstance(y, Value) and home.get(y, y) is x for y in e.inputs):
                continue
            if e is kernel.equation:
                if not _ends_in_bfloat16(kernel, narrow):
                    return False
            elif only_moves(e):
                pending += [y for y in e.outputs if y not in seen]
                seen.update(e.outputs)
            elif len(e.inputs) != 1 or itemsize(e.outputs[0].dtype) >= 4:
                return False
    return True


def _ends_in_bfloat16(kernel: Kernel, narrow: Set[Value]) -> bool:
    """Whether the last equation of a kernel reads float32 operands in bfloat16."""
    e = kernel.equation
    if kernel.kind == PRODUCT:
        precision = e.params.get("precision")
        every = precision if isinstance(precision, tuple) else (precision,)
        return all(p is None or p == jax.lax.Precision.DEFAULT for p in every)
    moves = KINDS[e.name] in _MOVING if kernel.kind == COLLECTIVE else only_moves(e)
    return moves and e.outputs[0] in narrow


def _with_epilogues(program: Kernels) -> list[Kernel]:
    """The kernels in order, with the epilogue of a product merged into it."""
    kernels, buffers = list(program.kernels), Buffers(program)
    for i, kernel in enumerate(program.kernels):
        if (epilogue := buffers.epilogue(kernel)) is not None:
            others = (v for v in epilogue.reads if v not in kernel.writes)
            reads = tuple(dict.fromkeys((*kernel.reads, *others)))
            kernels[i] = dataclasses.replace(kernel, reads=reads, writes=epilogue.writes)
            kernels[buffers.place[epilogue]] = dataclasses.replace(epilogue, reads=(), writes=())
    return kernels


def _on_device(value: Value) -> int:
    """Bytes of device memory that a value takes: none if it is in host memory."""
    return 0 if value.on_host else value.bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """A kernel, with the bytes of temporaries while it runs. In loops, they include those around the loop."""

    equation: Equation
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryTotals:
    """The bytes that one device holds in a call."""

    arguments: int  # bytes of arguments
    results: int  # bytes of results
    shared: int  # bytes of results that take the memory of donated arguments
    temporaries: int  # the most bytes of all other arrays at one moment

    @property
    def fixed(self) -> int:
        """Bytes that are held for the whole call."""
        return self.arguments + self.results - self.shared

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return self.fixed + self.temporaries


@dataclasses.dataclass(frozen=True)
class Memory(MemoryTotals):
    """The memory of one device at each moment."""

    moments: tuple[Moment, ...]  # all kernels, in the order in which they run
    # the temporaries at the peak, largest first, with the equation that computes each
    alive: tuple[tuple[Value, Equation], ...]
    # the block and the index of the kernel at the peak; if that is a loop, its body and the kernel there, and so on
    path: tuple[tuple[Kernels, int], ...] = ()


@with_tables
def memory_of(program: Kernels, donated: Iterable[int] = (), compiler: Compiler = COMPILERS["cpu"]) -> Memory:
    """Computes the memory of a per-device program."""
    block = program.block
    results = [v for v in dict.fromkeys(block.outputs) if isinstance(v, Value)]
    donated_sizes = [_on_device(block.inputs[i]) for i in donated]
    shared, in_donated = 0, set()
    for v in results:
        if v not in block.inputs and _on_device(v) in donated_sizes:
            donated_sizes.remove(_on_device(v))
            shared += _on_device(v)
            in_donated.add(v)
    own_results = [program.home.get(v, v) for v in results if v not in block.inputs and v not in in_donated]
    elsewhere = program.results | _in_places(program, own_results)
    moments: list[Moment] = []
    peak, alive, path = _follow(program, elsewhere, 0, moments, compiler)
    return Memory(
        sum(map(_on_device, block.inputs)), sum(map(_on_device, results)), shared, peak, tuple(moments),
        tuple(sorted(alive, key=lambda pair: -_on_device(pair[0]))), path,
    )  # fmt: skip


def _in_places(program: Kernels, results: Sequence[Value]) -> frozenset[Value]:
    """Temporaries that use the memory of results until these are computed: largest first, then longest-lived."""
    buffers = Buffers(program)
    written_at, last_read = buffers.made, buffers.last
    result_buffers = sorted((v for v in results if v in written_at), key=_on_device)
    sizes = list(map(_on_device, result_buffers))
    spans_in: dict[Value, list[tuple[int, int]]] = {v: [] for v in result_buffers}
    reusing = set()
    spans = {v: (i, max(i, last_read[v])) for v, i in written_at.items()}
    for v in sorted(written_at, key=lambda v: (-_on_device(v), spans[v][0] - spans[v][1])):
        first, end = spans[v]
        for place in result_buffers[bisect.bisect_left(sizes, _on_device(v)) :] if _on_device(v) else ():
            if end < written_at[place] and all(end < a or first > b for a, b in spans_in[place]):
                spans_in[place].append((first, end))
                reusing.add(v)
                break
    return frozenset(reusing)


# Bytes at the peak, the arrays, and the path to the kernel.
_Peak = tuple[int, list[tuple[Value, Equation]], tuple[tuple[Kernels, int], ...]]


def _follow(
    program: Kernels,
    elsewhere: frozenset[Value],
    below: int,
    moments: list[Moment],
    compiler: Compiler,
    carried: Mapping[Value, Equation] = MappingProxyType({}),
) -> _Peak:
    """The most bytes of temporaries on top of ``below``, the arrays, and the path to the kernel."""
    narrows = compiler.keeps_low_precision_copies
    copies = _low_precision_copies(program) if narrows else []
    narrow = stored_in_bfloat16(program) if narrows else set()
    kernels = _with_epilogues(program) if narrows else program.kernels
    last = Buffers(program, kernels).last
    elsewhere = _overwritten(kernels, last, elsewhere)
    bytes_held = {v: _on_device(v) for v in carried}
    alive_values: dict[Value, Equation] = dict(carried)
    bytes_now = peak = sum(bytes_held.values())
    alive: list[tuple[Value, Equation]] = list(alive_values.items())
    path: tuple[tuple[Kernels, int], ...] = ()
    for i, kernel in enumerate(kernels):
        written = [v for v in kernel.writes if v not in elsewhere]
        bytes_held.update((v, _on_device(v) // (2 if v in narrow else 1)) for v in written)
        dying = [v for v in kernel.reads if last[v] == i and v in alive_values]
        growth = sum(bytes_held[v] for v in written)
        if _may_overwrite(kernel):
            other_places = _read_elsewhere(kernel)
            growth -= max(
                (bytes_held[v] for v in dying if bytes_held[v] <= growth and v not in other_places), default=0
            )
        elif kernel.bodies:
            growth -= sum(
                bytes_held[after] for before, after in _carried(kernel) if before in dying and after in written
            )
        growth += sum(n for first, end, n in copies if first <= i <= end)
        inner, inner_alive, inner_path = _bodies(kernel, below + bytes_now + growth, moments, compiler)
        total = bytes_now + growth + inner
        moments.append(Moment(kernel.equation, below + total))
        for v in written:
            alive_values[v] = kernel.equation
            bytes_now += bytes_held[v]
        if total > peak:
            peak = total
            alive = [*alive_values.items(), *inner_alive]
            path = ((program, i), *inner_path)
        for v in (*dying, *(v for v in written if last[v] < 0)):
            del alive_values[v]
            bytes_now -= bytes_held[v]
    return peak, alive, path


def _overwritten(kernels: Sequence[Kernel], last: Mapping[Value, int], elsewhere: frozenset[Value]) -> frozenset[Value]:
    """The values counted elsewhere, with values that these overwrite: they share their memory."""
    found = set(elsewhere)
    for i, kernel in reversed(list(enumerate(kernels))):
        if kernel.kind == OPERATOR and _may_overwrite(kernel) and found & set(kernel.writes):
            first = kernel.equation.inputs[0]
            if (
                isinstance(first, Value)
                and first in kernel.reads
                and last[first] == i
                and _on_device(first) == _on_device(kernel.writes[0])
            ):
                found.add(first)
        found.update(before for before, after in _carried(kernel) if after in found and last[before] == i)
    return frozenset(found)


def _may_overwrite(kernel: Kernel) -> bool:
    """Whether a result may overwrite an operand without later readers.

    This holds for elementwise kernels, reductions over devices, and updates, whose result overwrites the first operand.
    """
    e = kernel.equation
    if kernel.kind == OPERATOR and e.rule is not None:
        return is_update(e)
    return kernel.kind == FUSED or (kernel.kind == COLLECTIVE and KINDS[e.name] == "all_reduce")


def _read_elsewhere(kernel: Kernel) -> set[Value]:
    """Values that a kernel reads at other places than it writes: through a slice or a padding."""
    found: set[Value] = set()
    for e in reversed(kernel.fused):
        if (e.rule is not None and moves_elements(e.rule)) or found & set(e.outputs):
            found.update(x for x in e.inputs if isinstance(x, Value))
    return found


def _carried(kernel: Kernel) -> list[tuple[Value, Value]]:
    """Pairs of the initial value of a carried value, if it is a buffer, and the result that takes its memory."""
    e = kernel.equation
    pairs: list[tuple[Value, Value]] = []
    for body in kernel.bodies:
        for held, after in _held(e, body.block).items():
            begins = [edge.outer for edge in e.edges if edge.inner is held and edge.outer in kernel.reads]
            ends = [edge.outer for edge in e.edges if edge.outer in e.outputs and edge.inner in (held, after)]
            pairs += zip(begins, ends, strict=False)
    return pairs


def _held(e: Equation, body: Block) -> dict[Value, Value]:
    """The inputs of a body that its outputs replace."""
    inputs, outputs = set(body.inputs), set(body.outputs)
    return {edge.outer: edge.inner for edge in e.edges if edge.outer in inputs and edge.inner in outputs}


def _bodies(kernel: Kernel, below: int, moments: list[Moment], compiler: Compiler) -> _Peak:
    """The temporaries of a region's bodies: of branches the largest, of a loop those of one iteration.

    An iteration takes a slice of stacked operands. Carried values use the memory of the loop's results.
    """
    found: _Peak = (0, [], ())
    e = kernel.equation
    for body in kernel.bodies:
        held = dict.fromkeys(_held(e, body.block), e)
        place = sum(map(_on_device, held))
        inner, alive, path = _follow(body, frozenset(), below - place, moments, compiler, held)
        alive = [x for x in alive if x[0] not in held]
        found = max(found, (inner - place, alive, path), key=lambda peak: peak[0])
    return found


def _low_precision_copies(program: Kernels) -> list[tuple[int, int, int]]:
    """The bfloat16 copies of float32 stacks: for each the first and the last kernel, and its bytes."""
    spans: dict[Value, tuple[int, int]] = {}
    stacked: set[Value] = set()  # stacks that loops write, in the type in which others read them
    for i, kernel in enumerate(program.kernels):
        e = kernel.equation
        if kernel.kind != REGION or len(kernel.bodies) != 1 or "reverse" not in e.params or e.trip_count < 2:
            continue
        (body,) = kernel.bodies
        stacked.update(kernel.writes)
        multiplied = {v for inner in body.kernels if inner.kind == PRODUCT for v in inner.reads}
        before = sum(scan_counts(e.params))
        for x, v in zip(e.inputs[before:], body.block.inputs[before:], strict=True):
            if isinstance(x, Value) and v in multiplied and x.dtype == "float32":
                home = program.home.get(x, x)
                if home not in stacked:
                    spans[home] = (spans.get(home, (i, i))[0], i)
    return [(first, end, _on_device(v) // 2) for v, (first, end) in spans.items()]


# Lists the arrays that a device holds at its memory peak, with the names of reports.


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Arrays of one type and name that one line computes."""

    type: str  # the type of one device's part, such as ``f32[64,128]``
    name: str  # the argument whose part, cast or gradient they are, or the operation that computes them
    equation: Equation  # the equation that computes the first of them
    bytes: int  # the bytes of all of them
    count: int  # the number of arrays

    def __str__(self) -> str:
        many = f" x{self.count}" if self.count > 1 else ""
        return f"{self.type}{many} {self.name} at {self.equation.line}"


def held_at_peak(memory: Memory, block: Block, program: Program, names: ArrayNames | None = None) -> tuple[Held, ...]:
    """The arrays at the peak, largest first."""
    array_names = ArrayNames.of_devices(block, program, names)
    rows: dict[tuple[str, str, str], Held] = {}
    for v, e in memory.alive:
        name = array_names.array(v)
        row = Held(f"{v.dtype_name}[{','.join(map(str, v.shape))}]", name.text or e.name, e, v.bytes, 1)
        key = row.type, name.alike or e.name, e.line
        if key in rows:  # arrays of equal layers: keep the name that they share
            earlier = rows[key]
            row = Held(row.type, key[1], earlier.equation, earlier.bytes + row.bytes, earlier.count + 1)
        rows[key] = row
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))
