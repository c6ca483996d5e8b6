"""As on accelerators: the collectives of a program for CPU, as XLA sends them on GPUs and TPUs.

XLA for CPU differs from XLA for accelerators in three ways that change what a device sends:

- It converts bfloat16 to float32, and floats of 8 bits to float16, around collectives. The array was converted from
  such a dtype before the collective, or all that reads the result converts it to one first (XLA leaves out the first
  conversion where a product made the operand).
- It leaves two all-reduces whose results are only added to each other. XLA for accelerators adds first, except where a
  scatter made an operand.
- It leaves an all-reduce whole if each device reads a slice of its own of the result. XLA for accelerators makes a
  reduce-scatter of both, which sends half.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gshard.comm.steps import sent_bytes
from gshard.xla.dataflow import CALLING, MOVES, Array, Dataflow, is_move
from gshard.xla.hlo_collectives import CompiledCollective
from gshard.xla.hlo_parser import Instruction, arrays_of, type_bytes

_NARROW = {"f32": ("bf16",), "f16": ("f8",)}  # what XLA for CPU widens to a dtype
_WRITTEN = jax.lax.convert_element_type.__name__  # JAX's name of a conversion; XLA's own have another one, or none
_FORMS = frozenset("bitcast copy reshape transpose convert opt-barrier".split())  # leave all elements of an array
_CHANGES = MOVES - _FORMS  # leave a part of them, or have others, too


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """One array that a collective moves."""

    sent: CompiledCollective
    number: int  # of its operand
    type: str
    result: Array  # what it becomes; of sums that are added to each other all of them


def as_on_accelerators(flow: Dataflow, found: Sequence[CompiledCollective]) -> tuple[CompiledCollective, ...]:
    """The same collectives as GPUs and TPUs send them.

    A collective becomes two if the kind of only some of its arrays changes.
    """
    every = [_Moved(sent, i, kind, _result(sent, i)) for sent in found for i, kind in sent.arrays]
    kinds: dict[int, dict[str, list[tuple[int, str]]]] = {}
    for one in _added_first(flow, every):
        dtype = _own_dtype(flow, one)
        is_cut = one.sent.kind == "all_reduce" and _is_cut(flow, one)
        kind = "reduce_scatter" if is_cut else one.sent.kind
        moved = one.number, re.sub(r"^\w+", dtype, one.type) if dtype else one.type
        kinds.setdefault(id(one.sent), {}).setdefault(kind, []).append(moved)
    return tuple(_with(sent, kind, tuple(arrays)) for sent in found for kind, arrays in kinds.get(id(sent), {}).items())


def _result(sent: CompiledCollective, number: int) -> Array:
    return Array(sent.computation, sent.ends.name, number if len(sent.arrays) > 1 else None)


def _with(sent: CompiledCollective, kind: str, arrays: tuple[tuple[int, str], ...]) -> CompiledCollective:
    """A collective of a kind that moves these arrays."""
    if (kind, arrays) == (sent.kind, sent.arrays):
        return sent
    size = sum(type_bytes(text) for _, text in arrays)
    moved = sent_bytes(kind, size, sent.group_size) if sent.bytes_moved else 0
    return dataclasses.replace(sent, kind=kind, arrays=arrays, operand_bytes=size, bytes_moved=moved)


# Sums: all-reduces whose results are added to each other, which send once.


def _added_first(flow: Dataflow, every: Sequence[_Moved]) -> list[_Moved]:
    """The same arrays, with one in place of two whose results are only added to each other."""
    kept = list(every)
    while True:
        pairs: dict[Any, list[int]] = {}
        for i, one in enumerate(kept):
            adds = list(_readers(flow, one.result, _CHANGES)) if one.sent.kind == "all_reduce" else []
            if len(adds) == 1 and adds[0][1].opcode == "add" and _is_plain_sum(flow, one):
                (computation, made) = adds[0]
                pairs.setdefault((computation, made.name, one.sent.groups, one.type), []).append(i)
        both = {i: Array(*key[:2]) for key, (i, *others) in pairs.items() if len(others) == 1}
        if not both:
            return kept
        gone = {others[0] for first, *others in pairs.values() if first in both}
        kept = [
            dataclasses.replace(one, result=both[i]) if i in both else one
            for i, one in enumerate(kept)
            if i not in gone
        ]


def _is_plain_sum(flow: Dataflow, one: _Moved) -> bool:
    """Whether an all-reduce adds, and no scatter made its operand: XLA for accelerators scatters into another sum."""
    (body,) = one.sent.itself.called("to_apply") or ("",)
    computation = flow.module.computations.get(body)
    made = flow.made(flow.source(Array(one.sent.inside, one.sent.itself.operands[one.number])))
    is_sum = computation is not None and computation.instructions[computation.root].opcode == "add"
    return is_sum and (made is None or "scatter" not in made.op_name)


# Dtypes: which one the program has where XLA for CPU has a wider one.


def _own_dtype(flow: Dataflow, one: _Moved) -> str:
    """The narrower dtype that the program has; empty if it has none."""
    arrays, sent = arrays_of(one.type), one.sent
    if len(arrays) != 1 or arrays[0].dtype not in _NARROW or not sent.itself.operands:
        return ""
    operand, wide = Array(sent.inside, sent.itself.operands[one.number]), arrays[0].dtype
    return _widened_from(flow, operand, wide) or _narrowed_to(flow, _result(sent, one.number), wide)


def _widened_from(flow: Dataflow, array: Array | None, wide: str) -> str:
    """The narrow dtype from which XLA converted an array that was only moved since then; empty if it did not."""
    seen = set[Array]()
    while array is not None and array not in seen:
        seen.add(array)
        made = flow.made(array)
        if made is not None and made.opcode == "convert":
            before = flow.module.computations[array.computation].instructions.get(made.operands[0])
            return _dtype_widened(before, made, wide)
        array = flow.before(array)
    return ""


def _dtype_widened(before: Instruction | None, made: Instruction, wide: str) -> str:
    dtype = "" if before is None else arrays_of(before.type)[0].dtype
    return dtype if dtype.startswith(_NARROW[wide]) and not _is_written(made) else ""


def _narrowed_to(flow: Dataflow, result: Array, wide: str) -> str:
    """The narrow dtype to which XLA converts a result wherever it is read; empty if some reader takes all of it."""
    found = set[str]()
    for _, made in _readers(flow, result, frozenset(("convert",))):
        dtype = arrays_of(made.type)[0].dtype if made.opcode == "convert" and not _is_written(made) else ""
        if not dtype.startswith(_NARROW[wide]):
            return ""
        found.add(dtype)
    return found.pop() if len(found) == 1 else ""


def _readers(flow: Dataflow, array: Array, stops: frozenset[str]) -> Iterator[tuple[str, Instruction]]:
    """What reads an array, or is the program's result, with its computation; moves that are no stops are passed."""
    entry = flow.module.entry
    for computation, made, _ in flow.walk(array, (), stops):
        is_result = computation == entry and made.name == flow.module.computations[entry].root
        if is_result or made.opcode in stops or not is_move(made):
            yield computation, made


def _is_written(made: Instruction) -> bool:
    """Whether the user's program converts here."""
    return made.op_name.rpartition("/")[2] == _WRITTEN


# Slices: whether each device of a group reads another part of the result of an all-reduce.


def _is_cut(flow: Dataflow, one: _Moved) -> bool:
    """Whether all that reads a result takes a slice, at which the parts of the group's devices make up the whole."""
    sent, readers = one.sent, 0
    if len(arrays_of(one.type)) != 1 or sent.group_size < 2 or flow.module.replicas > 1:
        return False
    for computation, made in _readers(flow, one.result, _CHANGES):
        readers += 1
        operand = flow.module.computations[computation].instructions.get(made.operands[0]) if made.operands else None
        if made.opcode != "dynamic-slice" or operand is None:
            return False
        whole, part = arrays_of(operand.type)[0].shape, arrays_of(made.type)[0].shape
        cut = [d for d, (n, own) in enumerate(zip(whole, part, strict=True)) if own < n]
        if len(cut) != 1 or part[cut[0]] * sent.group_size != whole[cut[0]]:
            return False
        starts = _Offsets(flow).of(Array(computation, made.operands[1 + cut[0]]))
        every = np.arange(sent.group_size) * part[cut[0]]
        if starts is None or any(not np.array_equal(np.sort(starts[list(group)]), every) for group in sent.groups):
            return False
    return readers > 0


_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.floordiv,
    "remainder": operator.mod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shift-right-logical": operator.rshift, "shift-left": operator.lshift, "minimum": np.minimum,
    "maximum": np.maximum, "clamp": lambda least, x, most: np.clip(x, least, most),
}  # fmt: skip


class _Offsets:
    """Integers that depend on the number of the device alone, for all devices."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._known: dict[Array, np.ndarray[Any, Any] | None] = {}

    def of(self, array: Array) -> np.ndarray[Any, Any] | None:
        """A number for each device; None if it depends on more, or on a table that the text leaves out."""
        if array not in self._known:
            self._known[array] = None  # of what depends on itself
            self._known[array] = self._computed(array)
        return self._known[array]

    def _computed(self, array: Array) -> np.ndarray[Any, Any] | None:
        made, devices = self._flow.made(array), self._flow.module.devices
        if made is None:
            return None
        inputs = [Array(array.computation, name) for name in made.operands]
        if made.opcode == "partition-id":
            return np.arange(devices)
        if made.opcode == "constant":
            numbers = _numbers(made)
            return None if numbers is None or len(numbers) != 1 else np.repeat(numbers, devices)
        if made.opcode == "dynamic-slice" and len(inputs) == 2:
            table, number = self._table(inputs[0]), self.of(inputs[1])
            return None if table is None or number is None else table[np.clip(number, 0, len(table) - 1)]
        if made.opcode in _COMPUTED:
            both = [self.of(one) for one in inputs]
            return None if any(one is None for one in both) else _COMPUTED[made.opcode](*both)
        if made.opcode in (*_FORMS, *CALLING, "parameter", "get-tuple-element", "tuple", "while"):
            before = self._flow.before(array)
            return None if before is None else self.of(before)
        return None

    def _table(self, array: Array) -> np.ndarray[Any, Any] | None:
        made = self._flow.made(self._flow.source(array))
        return _numbers(made) if made is not None and made.opcode == "constant" else None


def _numbers(made: Instruction) -> np.ndarray[Any, Any] | None:
    """The integers of a constant of one dimension at most; None if the text leaves them out, or they are none."""
    text = made.literal.strip("{} ")
    is_whole = re.fullmatch(r"-?\d+(, ?-?\d+)*", text)
    return np.array([int(n) for n in text.split(",")]) if is_whole else None
