"""Kernels: the operations and memory traffic of each instruction of a compiled program that runs by itself.

A fusion computes what its instructions compute, and reads and writes its operands and results once: of an operand that
it only cuts a slice from, that slice, and of a result that it updates in place, the update. A product counts two
operations for each pair that is multiplied, however the compiler writes it: as ``dot``, as ``convolution`` (TPU), or as
a call of a library (GPU and CPU).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from gshard.xla.dataflow import ELEMENTWISE
from gshard.xla.hlo_parser import Computation, Instruction, Module

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
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"\bS\([1-4]\)")  # memory spaces beside the device's own memory; 5 is the host's
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


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """One array of a printed type."""

    dtype: str  # ``f32``
    shape: tuple[int, ...]  # its dimensions
    bytes: int  # of all of it
    is_on_chip: bool  # whether it is in a memory on the chip, and not in the device's own memory

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def arrays_of(text: str) -> list[ArrayType]:
    """The arrays of a printed type.

    >>> [str(a) for a in arrays_of("(f32[8,4]{1,0:T(8,128)S(1)}, pred[])")]
    ['f32[8,4]', 'pred[]']
    """
    found = []
    for dtype, dimensions, layout in _ARRAY.findall(text):
        shape = tuple(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
        bits = re.search(r"\d+", dtype)
        width = 8 if dtype == "pred" else int(bits[0]) if bits else 0
        size = (math.prod(shape) * width + 7) // 8
        found.append(ArrayType(dtype, shape, size, bool(layout and _ON_CHIP.search(layout))))
    return found


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
    part = root
    while part.opcode in _FORMS and part.operands[0] in inner.instructions:
        part = inner.instructions[part.operands[0]]
    if part.opcode == "dynamic-update-slice":
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
        stride, hole, step = (_setting(settings, name, d) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        pad = int(settings["pad"].split("x")[d].split("_")[0]) if "pad" in settings else 0
        n, k, m = (
            shape[at.index(str(d))]
            for shape, at in ((image.shape, of_image), (kernel.shape, of_kernel), (result.shape, of_result))
        )
        place = np.arange(m)[:, None] * stride + np.arange(k)[None, :] * step - pad
        pairs *= int(np.count_nonzero((place >= 0) & (place <= (n - 1) * hole) & (place % hole == 0)))
    return 2 * pairs, 0, image.dtype


def _setting(settings: Mapping[str, str], name: str, d: int) -> int:
    """What a window has along one of its dimensions; 1 if it is not told."""
    return int(settings[name].split("x")[d]) if name in settings else 1
