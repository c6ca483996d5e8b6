"""Kernels: operations, memory traffic, time and buffers of each instruction of a compiled program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gshard.device.async_overlap import Step, timed
from gshard.device.cost import Loop, PricedKernel, Run, Stretch
from gshard.device.fusion_model import COLLECTIVE, OPERATOR, PRODUCT
from gshard.device.machine import Machine
from gshard.device.memory import MemoryTotals
from gshard.device.roofline import roofline
from gshard.xla.dataflow import ELEMENTWISE
from gshard.xla.hlo_collectives import OPCODE, CompiledCollective
from gshard.xla.hlo_parser import Computation, Instruction, Module, arrays_of, trip_count

# Take no time of their own: names for what is there, or the other half of what started before.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast opt-barrier after-all partition-id replica-id iota "
    "add-dependency domain get-dimension-size rng-get-and-update-state".split()
)
# Custom calls that only tell the compiler something.
_MARKS = re.compile(
    r'custom_call_target="(Sharding|SPMD\w+|AllocateBuffer|AssumeGatherIndicesInBound|LayoutConstraint)"'
)
_PRODUCT_CALLS = re.compile(r'custom_call_target="(__cublas\$\w+(?:\$\w+)*|__onednn\$matmul|\w*[mM]at[mM]ul\w*)"')
_CUTS = ("dynamic-slice", "slice", "gather")
_FORMS = ("bitcast", "copy", "convert", "reshape", "transpose")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one run of an instruction takes."""

    products: int = 0  # operations of matrix products and convolutions
    others: int = 0  # operations of everything else
    moved: int = 0  # bytes that it reads from and writes to the device's memory
    dtype: str = "f32"  # in which products are computed: that of their first operand
    is_known: bool = True  # False for a custom call whose operations the text does not tell


def bytes_in_memory(text: str) -> int:
    """Bytes of the arrays of a type that are in the device's own memory."""
    return sum(a.bytes for a in arrays_of(text) if not a.is_on_chip)


def work_of(module: Module, computation: Computation, made: Instruction) -> Work | None:
    """What an instruction takes; None if it takes nothing, or is a loop, a branch or a collective."""
    if made.opcode in FREE or made.opcode.endswith(("-done", "-update")) or _MARKS.search(made.attributes):
        return None
    if made.opcode in ("fusion", "fusion-start"):
        (name,) = made.called("calls")
        return _of_fusion(module, computation, made, module.computations[name])
    products, others, dtype = operations(computation, made)
    is_known = made.opcode != "custom-call" or products > 0
    return Work(products, others, _moved(computation, made), dtype, is_known)


def _of_fusion(module: Module, computation: Computation, made: Instruction, inner: Computation) -> Work:
    products, others, dtype, is_known = 0, 0, "f32", True
    for part in _inside(module, inner):
        more, beside, own = operations(inner if part.name in inner.instructions else computation, part)
        products, others = products + more, others + beside
        dtype = own if more else dtype
    users: dict[str, list[Instruction]] = {}
    for part in inner.instructions.values():
        for operand in part.operands:
            users.setdefault(operand, []).append(part)
    read = 0
    for part in inner.instructions.values():
        if part.opcode == "parameter" and part.number < len(made.operands):
            given = computation.instructions.get(made.operands[part.number])
            whole = bytes_in_memory(part.type if given is None else given.type)
            cut = _cut(users, part)
            read += whole if cut is None else min(whole, cut)
    root = inner.instructions[inner.root]
    roots = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = sum(_written(inner, part) for part in roots)
    return Work(products, others, read + written, dtype, is_known)


def _inside(module: Module, computation: Computation) -> Iterator[Instruction]:
    for part in computation.instructions.values():
        yield part
        for name in part.called("calls") if part.opcode == "fusion" else ():
            yield from _inside(module, module.computations[name])


def _cut(users: dict[str, list[Instruction]], part: Instruction) -> int | None:
    """Bytes that a fusion reads of an operand that it only cuts slices from, or updates; None if it reads all."""
    total, forms = 0, [part]
    while forms:
        form = forms.pop()
        for user in users.get(form.name, ()):
            if user.opcode in _CUTS and user.operands[0] == form.name:
                total += bytes_in_memory(user.type)
            elif user.opcode in ("bitcast", "copy", "reshape"):
                forms.append(user)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != form.name:
                return None
        if not users.get(form.name):
            return None
    return total


def _written(inner: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes of one result: of one that it updates in place the update."""
    part = inner.behind(root.name, _FORMS)
    if part is not None and part.opcode == "dynamic-update-slice":
        return bytes_in_memory(inner.instructions[part.operands[1]].type)
    return bytes_in_memory(root.type)


def _moved(computation: Computation, made: Instruction) -> int:
    """Bytes that an instruction by itself reads and writes."""
    result = bytes_in_memory(made.type)
    if made.opcode in _CUTS:
        return 2 * result
    if made.opcode == "dynamic-update-slice":
        return 2 * bytes_in_memory(computation.instructions[made.operands[1]].type)
    types = (computation.instructions[name].type for name in made.operands if name in computation.instructions)
    return result + sum(map(bytes_in_memory, types))


def operations(computation: Computation, made: Instruction) -> tuple[int, int, str]:
    """Operations of products, of everything else, and the dtype of the product."""
    operands = [computation.instructions[name] for name in made.operands if name in computation.instructions]
    if made.opcode == "dot" and operands:
        return _dot(made, operands[0], made.attributes)
    if made.opcode == "ragged-dot" and len(operands) > 2:
        products, others, dtype = _dot(made, operands[0], made.attributes)
        ragged = re.search(r"\blhs_ragged_dims=\{(\d+)\}", made.attributes)
        summed = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", made.attributes)
        by_sums = ragged and summed and ragged[1] in summed[1].split(",")  # each row is in the sum of one group
        return products // (arrays_of(operands[2].type)[0].shape[-1] if by_sums else 1), others, dtype
    if made.opcode == "convolution" and len(operands) > 1:
        return _convolution(made, operands)
    if made.opcode == "custom-call" and operands and _PRODUCT_CALLS.search(made.attributes):
        return _dot(made, operands[0], made.attributes)
    if made.opcode in ELEMENTWISE:
        return 0, sum(a.elements for a in arrays_of(made.type)[:1]), "f32"
    if made.opcode in ("reduce", "reduce-window", "scatter", "map", "sort", "select-and-scatter"):
        return 0, sum(a.elements for o in operands[:1] for a in arrays_of(o.type)[:1]), "f32"
    return 0, 0, "f32"


def _dot(made: Instruction, operand: Instruction, attributes: str) -> tuple[int, int, str]:
    found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", attributes) or re.search(
        r'"lhs_contracting_dimensions":\[([\d",]*)\]', attributes
    )
    results, (first, *_) = arrays_of(made.type), arrays_of(operand.type)
    over = [int(d.strip('"')) for d in found[1].split(",") if d.strip('"')] if found else [len(first.shape) - 1]
    contracted = math.prod(first.shape[d] for d in over if -1 < d < len(first.shape))
    return 2 * results[0].elements * contracted, 0, first.dtype


def _convolution(made: Instruction, operands: list[Instruction]) -> tuple[int, int, str]:
    """The pairs that are multiplied: those with padding, or with the holes of a dilated operand, are none.

    libtpu writes a product with batch dimensions as a convolution whose window meets one element in each place.
    """
    (result, *_), (kernel, *_), (image, *_) = (arrays_of(t) for t in (made.type, operands[1].type, operands[0].type))
    labels = re.search(r"\bdim_labels=([\w?]+)_([\w?]+)->([\w?]+)", made.attributes)
    if labels is None:
        return 0, 0, image.dtype
    of_image, of_kernel, of_result = labels.groups()
    pairs = result.shape[of_result.index("b")] * kernel.shape[of_kernel.index("o")] * kernel.shape[of_kernel.index("i")]
    window = re.search(r"\bwindow=\{([^}]*)\}", made.attributes)
    settings = dict(word.split("=") for word in window[1].split()) if window else {}
    for d in range(sum(label.isdigit() for label in of_kernel)):
        stride, hole, step = (
            int(settings[name].split("x")[d]) if name in settings else 1
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        pad = int(settings["pad"].split("x")[d].split("_")[0]) if "pad" in settings else 0
        n, k, m = (
            shape[at.index(str(d))]
            for shape, at in ((image.shape, of_image), (kernel.shape, of_kernel), (result.shape, of_result))
        )
        place = np.arange(m)[:, None] * stride + np.arange(k)[None, :] * step - pad
        pairs *= int(np.count_nonzero((place >= 0) & (place <= (n - 1) * hole) & (place % hole == 0)))
    return 2 * pairs, 0, image.dtype


# Elapsed: the modelled time of a compiled program on a machine, instruction by instruction.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran(PricedKernel):
    """One instruction that takes time, with all its runs in one call."""

    computation: str  # computation, made: which
    made: Instruction
    work: Work | None = None  # of a kernel
    collective: CompiledCollective | None = None  # of a collective where it runs


Network = Callable[[CompiledCollective, int], float]
"""The seconds of one run of a collective, if its operands have so many bytes."""


def elapsed(module: Module, machine: Machine, network: Network, sent: Sequence[CompiledCollective]) -> Run:
    """One call of a program with these collectives in time."""
    of: dict[str, dict[int, CompiledCollective]] = {}  # a computation that runs in several places has them once
    for one in sent:
        of.setdefault(one.computation, {})[one.key] = one
    return _Clock(module, machine, network, of).run(module.entry, 1) if module.entry else Run(0.0)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Runs the computations of a program on a machine."""

    module: Module
    machine: Machine
    network: Network
    sent: Mapping[str, Mapping[int, CompiledCollective]]  # by computation

    def run(self, name: str, times: int) -> Run:
        """One computation, which runs so often in a call."""
        computation = self.module.computations[name]
        starts: dict[str, list[CompiledCollective]] = {}
        ends: dict[str, list[CompiledCollective]] = {}
        for sent in self.sent.get(name, {}).values():
            starts.setdefault(sent.made.name, []).append(sent)
            ends.setdefault(sent.ends.name, []).append(sent)
        run: list[tuple[Ran | Loop | None, Step]] = []  # what each step is; None for the end of a collective
        for made in computation.instructions.values():
            for sent in starts.get(made.name, ()):
                row = self._of_collective(sent, name, times)
                run.append((row, Step(row.seconds, (), (id(sent),), sent.kind)))
            what = self._kernel(computation, name, made, times) or self._loop(computation, made, times)
            if what is not None:
                run.append((what, Step(what.seconds, (), ())))
            run += [(None, Step(0.0, (id(sent),), ())) for sent in ends.get(made.name, ())]
        laid = timed([step for _, step in run], [[i] if step.kind else [] for i, (_, step) in enumerate(run)])
        stretches = [
            Stretch(start, step.seconds, one.beside(hidden) if isinstance(one, Ran) and step.kind else one)
            for (one, step), start, hidden in zip(run, laid.begins, laid.hidden, strict=True)
            if one is not None
        ]
        return Run(laid.seconds, sorted(stretches, key=lambda stretch: stretch.start))

    def _of_collective(self, sent: CompiledCollective, name: str, times: int) -> Ran:
        """One collective, as if nothing ran beside it."""
        taken = self.network(sent, sent.operand_bytes)
        latency = min(taken, self.network(sent, 1)) if taken else 0.0
        return Ran(
            computation=name, made=sent.made, kind=COLLECTIVE, times=times, sent=sent.bytes_moved,
            seconds=taken, parts=(("network", taken - latency), ("latency", latency)), collective=sent,
        )  # fmt: skip

    def _kernel(self, computation: Computation, name: str, made: Instruction, times: int) -> Ran | None:
        if OPCODE.fullmatch(made.opcode) or made.bodies:
            return None
        work = work_of(self.module, computation, made)
        if work is None:
            return None
        one = roofline(self.machine, work.dtype, work.products, work.others, work.moved)
        parts = ((one.bound, one.work), ("launch", one.launch))
        return Ran(
            computation=name, made=made, kind=PRODUCT if work.products else OPERATOR, times=times,
            flops=work.products + work.others, moved=work.moved, seconds=one.seconds, parts=parts, work=work,
        )  # fmt: skip

    def _loop(self, computation: Computation, made: Instruction, times: int) -> Loop | None:
        if not made.bodies:
            return None
        rounds = (trip_count(self.module, computation, made) or 1) if made.opcode == "while" else 1
        bodies = [self.run(body, times * rounds) for body in made.bodies]
        if made.opcode == "conditional":  # one of the branches runs; the longest counts
            bodies = [max(reversed(bodies), key=lambda body: body.seconds)]
        return Loop(made.opcode, self.module.line_of(made), rounds, tuple(bodies))


# Buffers: what a device holds while a compiled program runs, and which arrays make the peak.

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
_Buffers = tuple[int, ...]  # one for each element of a result; -1 for what takes no memory here


class Held(NamedTuple):
    """An array that a device holds."""

    made: Instruction  # what makes it
    bytes: int
    type: str  # ``f32[8,4]``


class Moment(NamedTuple):
    """What is held while an instruction runs."""

    bytes: int  # of temporaries
    made: Instruction


class _Peak(NamedTuple):
    """The most bytes of temporaries in a computation, those of the computations that it runs included."""

    bytes: int = 0
    alive: Sequence[Held] = ()
    moments: Sequence[Moment] = ()


@dataclasses.dataclass(frozen=True)
class HeldMemory(MemoryTotals):
    """What a device holds in one call."""

    alive: tuple[Held, ...]  # what makes the moment with most temporaries, largest first
    # the bytes of temporaries while each instruction runs, in order; each body of a loop once
    moments: tuple[Moment, ...] = ()


def held_by(module: Module) -> HeldMemory:
    """Reads what a scheduled program holds; arrays on the chip and on the host do not count."""
    entry = module.computations[module.entry]
    arguments = sum(bytes_in_memory(i.type) for i in entry.instructions.values() if i.opcode == "parameter")
    results = [a.bytes for a in arrays_of(entry.instructions[entry.root].type)]
    shared = sum(results[out] for out in aliased_results(module) if out < len(results))
    peak = _peak(module, module.entry)
    ordered = tuple(sorted(peak.alive, key=lambda h: -h.bytes))
    return HeldMemory(arguments, sum(results), shared, peak.bytes, ordered, tuple(peak.moments))


def aliased_results(module: Module) -> dict[int, int]:
    """The results that take the memory of an argument, by number, with the number of the argument."""
    start = module.header.find("input_output_alias={")
    if start < 0:
        return {}
    end = module.header.find("entry_computation_layout", start)
    found = _ALIAS.findall(module.header[start : end if end > 0 else None])
    return {int(out or 0): int(argument) for out, argument in found}


def _peak(module: Module, name: str) -> _Peak:
    """What one computation holds."""
    computation = module.computations[name]
    order = list(computation.instructions.values())
    held: list[Held] = []
    of: dict[str, _Buffers] = {}
    last: dict[int, int] = {}
    new: list[range] = []  # for each instruction, the buffers that it makes
    for i, made in enumerate(order):
        count = len(held)
        of[made.name] = _buffers(module, computation, made, of, held)
        new.append(range(count, len(held)))
        last.update(dict.fromkeys(new[-1], i))
        for operand in made.operands:
            last.update(dict.fromkeys(of.get(operand, ()), i))
    # The results of the whole program count by themselves; those of a body are the state that its caller holds.
    returned = set(of.get(computation.root, ()))
    elsewhere, kept = (returned, set[int]()) if name == module.entry else (set[int](), returned)
    ends: dict[int, list[int]] = {}
    for buffer, i in last.items():
        if buffer not in kept:
            ends.setdefault(i, []).append(buffer)
    now, most = 0, _Peak()
    live: set[int] = set()
    moments: list[Moment] = []
    for i, made in enumerate(order):
        for buffer in new[i]:
            if buffer in elsewhere:
                continue
            size = held[buffer].bytes
            if made.opcode == "fusion" or made.opcode in ELEMENTWISE:
                # Each element is read before it is written: an operand of that size that nothing else reads is the
                # buffer of the result.
                taken = next((b for b in ends.get(i, ()) if b in live and held[b].bytes == size), None)
                now -= 0 if taken is None else size
                live -= {taken}
            live.add(buffer)
            now += size
        # Of a loop the body, if its condition holds as much.
        bodies = (_peak(module, body) for body in reversed(made.bodies))
        inside = max(bodies, key=lambda found: found.bytes, default=_Peak())
        if now + inside.bytes > most.bytes:
            most = _Peak(now + inside.bytes, [*(held[b] for b in live), *inside.alive])
        if inside.moments:
            moments += [moment._replace(bytes=moment.bytes + now) for moment in inside.moments]
        elif made.opcode not in FREE:
            moments.append(Moment(now, made))
        dying = live.intersection(ends.get(i, ()))
        live -= dying
        now -= sum(held[b].bytes for b in dying)
    return most._replace(moments=moments)


def _buffers(
    module: Module, computation: Computation, made: Instruction, of: dict[str, _Buffers], held: list[Held]
) -> _Buffers:
    """The buffers of an instruction's result: those of its operands where it passes them on, and new ones."""
    operands = [of.get(operand, ()) for operand in made.operands]
    match made.opcode:
        case "parameter":
            return (-1,) * max(1, len(arrays_of(made.type)))
        case "tuple":
            return tuple(b for buffers in operands for b in buffers)
        case "get-tuple-element":
            source = computation.instructions[made.operands[0]]
            if len(operands[0]) <= 1 or "((" in source.type:
                return operands[0][-1:]
            return operands[0][made.number : made.number + 1]
        case "while" | "bitcast" | "opt-barrier" | "add-dependency" | "domain" | "copy-done" | "async-update":
            return operands[0]
        case "constant" | "after-all" | "partition-id" | "replica-id":
            return (-1,)
        case "dynamic-update-slice" | "scatter":
            return operands[0]
    if made.opcode.endswith("-done"):
        return operands[0][-1:] if len(arrays_of(made.type)) == 1 else operands[0]
    types = arrays_of(made.type)
    kept = types[-1:] if made.opcode.endswith("-start") else types  # what starts lists its operands, too
    updated = _updated(module, made) if made.opcode in ("fusion", "fusion-start") else {}
    found = []
    for i, array in enumerate(kept):
        given = updated.get(i)
        if given is not None and given < len(operands) and operands[given]:
            found.append(operands[given][0])
        elif array.is_on_chip or not array.bytes:
            found.append(-1)
        else:
            held.append(Held(made, array.bytes, str(array)))
            found.append(len(held) - 1)
    return tuple(found)


def _updated(module: Module, made: Instruction) -> dict[int, int]:
    """The results of a fusion that update an operand in place: the number of the operand."""
    (name,) = made.called("calls")
    inner = module.computations[name]
    root = inner.instructions[inner.root]
    roots = [inner.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    found = {}
    for i, result in enumerate(roots):
        part = inner.behind(result.name, ("bitcast", "copy", "convert"))
        if part is not None and part.opcode in ("dynamic-update-slice", "scatter"):
            updated = inner.behind(part.name, ("dynamic-update-slice", "scatter", "bitcast"))
            if updated is not None and updated.opcode == "parameter":
                found[i] = updated.number
    return found
