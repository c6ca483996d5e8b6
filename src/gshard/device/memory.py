"""Memory: the bytes that a device holds at each moment of a program, and the arrays at the peak.

XLA's way of counting: arguments and results take their place for the whole call (a donated argument lends its place to
a result of the same size), everything else from the kernel that makes it to the last one that reads it. Until a result
is made, its place is free for what is no longer needed by then. A loop's body
runs on top of what is alive around the loop; what it carries has one place, before, in every round, and after.

The TPU compiler keeps less of a value where less of it is read (``bf16_storage``), and adds copies: a float32
stack that products in loops read slice by slice is converted to bfloat16 as a whole, before the first loop, and kept
until the last one. With float32 weights that is half as much memory again as the layers' weights.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from gshard.comm.collectives import KINDS
from gshard.core.jax_adapter import scan_counts
from gshard.core.planning_tables import with_tables
from gshard.core.program import Block, Equation, Value
from gshard.device.bf16_storage import joined, narrow_forms
from gshard.device.fusion_model import (
    COLLECTIVE,
    FUSED,
    OPERATOR,
    PRODUCT,
    REGION,
    Kernel,
    Kernels,
    is_update,
    moves_elements,
    size,
)


def _on_device(value: Value) -> int:
    """Bytes of the device's memory that a value takes: none if it is in that of the host."""
    return 0 if value.on_host else size(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """A kernel and the bytes of temporaries while it runs; in loops those around the loop included."""

    equation: Equation
    depth: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds.

    Attributes:
        arguments, results: bytes; ``shared`` of the results are where donated arguments were.
        temporaries: the most bytes of everything else at one moment.
        moments: all kernels in the order in which they run.
        alive: the temporaries at the peak, largest first, with the equation that made each.
        path: the block and the kernel at the peak; where that is a loop, its body and the kernel there, and so on.
    """

    arguments: int
    results: int
    shared: int
    temporaries: int
    moments: tuple[Moment, ...]
    alive: tuple[tuple[Value, Equation], ...]
    path: tuple[tuple[Kernels, int], ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return self.arguments + self.results - self.shared + self.temporaries


@with_tables
def memory_of(program: Kernels, donated: Iterable[int] = (), *, keeps_low_precision_copies: bool = False) -> Memory:
    """Follows a per-device program.

    Args:
        program: its kernels.
        donated: positions of inputs whose place results may take.
        keeps_low_precision_copies: whether the compiler keeps bfloat16 copies of what loops read, as
            ``Compiler.keeps_low_precision_copies`` says.
    """
    block = program.block
    results = [v for v in dict.fromkeys(block.outputs) if isinstance(v, Value)]
    free = [_on_device(block.inputs[i]) for i in donated]
    shared, lent = 0, set()
    for v in results:
        if v not in block.inputs and _on_device(v) in free:
            free.remove(_on_device(v))
            shared += _on_device(v)
            lent.add(v)
    places = [program.home.get(v, v) for v in results if v not in block.inputs and v not in lent]
    elsewhere = frozenset(program.home.get(v, v) for v in results) | _in_places(program, places)
    moments: list[Moment] = []
    peak, alive, path = _follow(program, elsewhere, 0, 0, moments, keeps_low_precision_copies)
    return Memory(
        sum(map(_on_device, block.inputs)), sum(map(_on_device, results)), shared, peak, tuple(moments),
        tuple(sorted(alive, key=lambda pair: -_on_device(pair[0]))), path,
    )  # fmt: skip


def _in_places(program: Kernels, results: Sequence[Value]) -> frozenset[Value]:
    """The temporaries that take the places of results until these are made: largest first, then longest."""
    made = {v: i for i, kernel in enumerate(program.kernels) for v in kernel.writes}
    last = {v: i for i, kernel in enumerate(program.kernels) for v in kernel.reads}
    last.update({program.home.get(v, v): len(made) for v in program.block.outputs if isinstance(v, Value)})
    places = sorted((v for v in results if v in made), key=_on_device)
    sizes = list(map(_on_device, places))
    taken: dict[Value, list[tuple[int, int]]] = {v: [] for v in places}
    found = set()
    spans = {v: (i, last.get(v, i)) for v, i in made.items()}
    for v in sorted(made, key=lambda v: (-_on_device(v), spans[v][0] - spans[v][1])):
        first, end = spans[v]
        for place in places[bisect.bisect_left(sizes, _on_device(v)) :] if _on_device(v) else ():
            if end < made[place] and all(end < a or first > b for a, b in taken[place]):
                taken[place].append((first, end))
                found.add(v)
                break
    return frozenset(found)


# Bytes at the peak, what they are, and where it is.
_Peak = tuple[int, list[tuple[Value, Equation]], tuple[tuple[Kernels, int], ...]]


def _follow(
    program: Kernels,
    elsewhere: frozenset[Value],
    below: int,
    depth: int,
    moments: list[Moment],
    keeps_low_precision_copies: bool,
    carried: Mapping[Value, Equation] = MappingProxyType({}),
) -> _Peak:
    """The most bytes of temporaries on top of ``below``, what they are, and where.

    Args:
        program: a block's kernels.
        elsewhere: values that are counted elsewhere, such as the program's results.
        below: bytes alive around it.
        depth: how many loops are around it.
        moments: what has been seen; more is added.
        keeps_low_precision_copies: see ``memory_of``.
        carried: inputs that are there to be overwritten, and their loop.
    """
    copies = _low_precision_copies(program) if keeps_low_precision_copies else []
    narrow = narrow_forms(program) if keeps_low_precision_copies else {}
    kernels = joined(program) if keeps_low_precision_copies else program.kernels
    last: dict[Value, int] = {}
    for i, kernel in enumerate(kernels):
        for v in kernel.reads:
            last[v] = i
    for out in program.block.outputs:
        if isinstance(out, Value):
            last[program.home.get(out, out)] = len(kernels)
    elsewhere = _overwritten(kernels, last, elsewhere)
    narrowed: dict[int, list[Value]] = {}  # when no more than what is kept of it is left
    for v, kept in narrow.items():
        narrowed.setdefault(kept.whole_until, []).append(v)
    places = {v: _on_device(v) for v in carried}
    made: dict[Value, Equation] = dict(carried)
    now = peak = sum(places.values())
    alive: list[tuple[Value, Equation]] = list(made.items())
    path: tuple[tuple[Kernels, int], ...] = ()
    for i, kernel in enumerate(kernels):
        new = [v for v in kernel.writes if v not in elsewhere]
        places.update({v: narrow[v].bytes if v in narrow and narrow[v].whole_until < i else _on_device(v) for v in new})
        dying = [v for v in kernel.reads if last[v] == i and v in made]
        grown = sum(places[v] for v in new)
        if _may_overwrite(kernel):
            other_places = _read_elsewhere(kernel)
            grown -= max((places[v] for v in dying if places[v] <= grown and v not in other_places), default=0)
        elif kernel.bodies:
            grown -= sum(places[after] for before, after in _carried(kernel) if before in dying and after in new)
        grown += sum(n for first, end, n in copies if first <= i <= end)
        inner, inner_alive, inner_path = _bodies(
            kernel, below + now + grown, depth, moments, keeps_low_precision_copies
        )
        total = now + grown + inner
        moments.append(Moment(kernel.equation, depth, below + total))
        for v in new:
            made[v] = kernel.equation
            now += places[v]
        if total > peak:
            peak = total
            alive = [*made.items(), *inner_alive]
            path = ((program, i), *inner_path)
        for v in (*dying, *(v for v in new if v not in last)):
            del made[v]
            now -= places[v]
        for v in narrowed.get(i, ()):
            if v in made and places[v] == _on_device(v):
                now -= _on_device(v) - narrow[v].bytes
                places[v] = narrow[v].bytes
    return peak, alive, path


def _overwritten(kernels: Sequence[Kernel], last: Mapping[Value, int], elsewhere: frozenset[Value]) -> frozenset[Value]:
    """The values counted elsewhere, with those that are overwritten by them: they are where the later ones will be."""
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
    """Whether a result may take the place of an operand without later users.

    So it is with what runs element by element, with reductions over devices, and with updates, whose result is where
    the first operand was.
    """
    e = kernel.equation
    if kernel.kind == OPERATOR and e.rule is not None:
        return is_update(e)
    return kernel.kind == FUSED or (kernel.kind == COLLECTIVE and KINDS[e.name] == "all_reduce")


def _read_elsewhere(kernel: Kernel) -> set[Value]:
    """What a kernel reads at other places than it writes: through a slice, a padding."""
    found: set[Value] = set()
    for e in reversed(kernel.fused):
        if (e.rule is not None and moves_elements(e.rule)) or found & set(e.outputs):
            found.update(x for x in e.inputs if isinstance(x, Value))
    return found


def _carried(kernel: Kernel) -> list[tuple[Value, Value]]:
    """What a loop begins with, if it is a buffer, and the result that takes its place."""
    e = kernel.equation
    found: list[tuple[Value, Value]] = []
    for body in kernel.bodies:
        for held, after in _held(e, body.block).items():
            begins = [edge.outer for edge in e.edges if edge.inner is held and edge.outer in kernel.reads]
            ends = [edge.outer for edge in e.edges if edge.outer in e.outputs and edge.inner in (held, after)]
            found += zip(begins, ends, strict=False)
    return found


def _held(e: Equation, body: Block) -> dict[Value, Value]:
    """The inputs of a body that its outputs replace."""
    inputs, outputs = set(body.inputs), set(body.outputs)
    return {edge.outer: edge.inner for edge in e.edges if edge.outer in inputs and edge.inner in outputs}


def _bodies(kernel: Kernel, below: int, depth: int, moments: list[Moment], keeps_low_precision_copies: bool) -> _Peak:
    """The temporaries of a region's bodies: of branches the larger, of a loop those of one round.

    Of stacked operands a round takes a slice. What is carried is where the loop's results will be.
    """
    found: _Peak = (0, [], ())
    e = kernel.equation
    for body in kernel.bodies:
        held = dict.fromkeys(_held(e, body.block), e)
        place = sum(map(_on_device, held))
        inner, alive, path = _follow(
            body, frozenset(), below - place, depth + 1, moments, keeps_low_precision_copies, held
        )
        alive = [x for x in alive if x[0] not in held]
        found = max(found, (inner - place, alive, path), key=lambda peak: peak[0])
    return found


def _low_precision_copies(program: Kernels) -> list[tuple[int, int, int]]:
    """The copies of stacks in half the width: from which kernel to which, and bytes."""
    spans: dict[Value, tuple[int, int]] = {}
    stacked: set[Value] = set()  # by loops, which write what others read as that wants it
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
