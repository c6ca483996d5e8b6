"""HLO parser: reads the instructions of a compiled program, and which operator in which module each is of."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence

from gshard.core.jax_adapter import Frame, is_of_library

BRANCHES = ("branch_computations", "true_computation", "false_computation")  # attributes that name computations
_COMMENT = re.compile(r"/\*[^*]*\*/")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")  # %x#1: what a ``get-tuple-element`` of %x, which is not printed, takes
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$")
_PARENTHESIS = re.compile(r"[()]")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_INDEX = re.compile(r"\bindex=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"\bS\([1-4]\)")  # memory spaces beside the device's own memory; 5 is the host's


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str  # without ``%``
    type: str  # as printed: ``f32[8,4]{1,0}``, or several in parentheses
    opcode: str  # ``all-reduce``, ``while``, ..
    operands: tuple[str, ...]  # names; a constant or a parameter has none
    literal: str  # what stands between the parentheses
    attributes: str  # everything after them

    def called(self, attribute: str) -> tuple[str, ...]:
        """The computations that an attribute names, one or a list in braces."""
        if f"{attribute}=" not in self.attributes:  # most have none
            return ()
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return tuple(_NAME.findall(found[1])) if found else ()

    @property
    def bodies(self) -> tuple[str, ...]:
        """The computations that it runs as programs of their own: of a loop, of branches or of a call."""
        match self.opcode:
            case "while":
                attributes: Sequence[str] = ("condition", "body")
            case "conditional":
                attributes = BRANCHES
            case "call":
                attributes = ("to_apply",)
            case _:
                return ()
        return tuple(name for attribute in attributes for name in self.called(attribute))

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute: ``attribute={1,0}`` or ``attribute=1``; () without."""
        found = re.search(rf"\b{attribute}=\{{?([\d,]*)", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    def text(self, attribute: str) -> str:
        """The text of an attribute: ``attribute=LT``, ``attribute={size=3}`` or ``attribute="name"``; empty without."""
        found = re.search(rf'\b{attribute}=(?:\{{([^}}]*)\}}|"([^"]*)"|([\w.>\-]+))', self.attributes)
        return next((part for part in found.groups() if part), "") if found else ""

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operator that it comes from; of a parameter the argument's name. Empty without."""
        found = _OP_NAME.search(self.attributes) if "op_name=" in self.attributes else None
        return _ESCAPED.sub(r"\1", found[1]) if found else ""

    @property
    def number(self) -> int:
        """Which element of a tuple a ``get-tuple-element`` takes, or which parameter it is."""
        if self.opcode == "parameter":
            return int(self.literal)
        found = _INDEX.search(self.attributes)
        assert found is not None, f"{self.opcode} has no number"
        return int(found[1])


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module: its instructions by name, and its result."""

    instructions: Mapping[str, Instruction]
    root: str

    def behind(self, name: str, opcodes: Collection[str]) -> Instruction | None:
        """The instruction of a name; of one that has such an opcode what is behind its first operand, and so on."""
        made = self.instructions.get(name)
        while made is not None and made.opcode in opcodes:
            made = self.instructions.get(made.operands[0])
        return made


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]  # by name
    entry: str  # the name of the one that runs
    devices: int  # how many devices it runs on
    replicas: int  # how many replicas of the program these run, each on ``devices / replicas`` partitions
    # the user's frames, innermost first, by the number that instructions call ``stack_frame_id``
    frames: Mapping[int, tuple[Frame, ...]]
    header: str = ""  # the first line, with attributes of the module

    def frames_of(self, made: Instruction) -> tuple[Frame, ...]:
        """The user's frames of an instruction, innermost first; none if it does not tell."""
        if frame := re.search(r"\bstack_frame_id=(\d+)", made.attributes):
            return self.frames.get(int(frame[1]), ())
        found = re.search(r'\bsource_file="([^"]*)".*?\bsource_line=(\d+)', made.attributes)
        return ((found[1], int(found[2]), ""),) if found else ()

    def line_of(self, made: Instruction) -> str:
        """The user's ``file:line`` of an instruction, or empty."""
        return next((f"{path.rpartition('/')[2]}:{line}" for path, line, _ in self.frames_of(made)), "")


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


def elements_of(text: str) -> list[str]:
    """The types in a printed tuple type.

    >>> elements_of("((f32[8,4]{1,0}, s32[]), pred[2]{0})")
    ['(f32[8,4]{1,0}, s32[])', 'pred[2]{0}']
    """
    found, depth = [""], 0
    for character in text[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found]


def type_bytes(text: str) -> int:
    """Bytes of all arrays in a type; tokens have none.

    >>> type_bytes("(f32[8,4]{1,0}, bf16[3], pred[], s4[3])")
    137
    """
    return sum(a.bytes for a in arrays_of(text))


def read_module(text: str) -> Module:
    """Reads what ``jax.jit(f).lower(...).compile().as_text()`` gives."""
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    instructions: dict[str, Instruction] = {}
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw)
        if not name:
            if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                name, root, instructions = header[2], "", {}
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(instructions, root)
            name = ""
        elif found := _INSTRUCTION.match(line):
            made = _read_instruction(found[2], found[3])
            for name_of_part in made.operands:
                _add_parts(instructions, name_of_part)
            instructions[found[2]] = made
            root = found[2] if found[1] else root
    top = text.split("\n", 1)[0]
    counts = (re.search(rf"\b{key}=(\d+)", top) for key in ("replica_count", "num_partitions"))
    replicas, partitions = (int(c[1]) if c else 1 for c in counts)
    return Module(computations, entry, replicas * partitions, replicas, _read_frames(text), top)


def _read_instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    inside = rest[start + 1 : end - 1]
    return Instruction(name, result, rest[:start], tuple(_NAME.findall(inside)), inside, rest[end:])


def _add_parts(instructions: dict[str, Instruction], name: str) -> None:
    """Adds the ``get-tuple-element`` that an operand ``x#1`` stands for; of ``x#1#0`` that of ``x#1`` too."""
    whole, _, index = name.rpartition("#")
    if whole and name not in instructions:
        _add_parts(instructions, whole)
        of = instructions[whole]
        kind = elements_of(of.type)[int(index)]
        metadata = of.attributes[of.attributes.find(", metadata=") :] if ", metadata=" in of.attributes else ""
        instructions[name] = Instruction(
            name, kind, "get-tuple-element", (whole,), f"%{whole}", f", index={index}{metadata}"
        )


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _read_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """For each stack frame those from there outward that are outside of libraries, else itself.

    JAX leaves its own frames out. A frame names a line and its parent, the frame of the caller. XLA prints the number
    of the parent plus one, and 1 where there is none.
    """
    files, functions = (
        {int(i): name for i, name in re.findall(r'^(\d+) "([^"\n]*)"$', _section(text, title), re.M)}
        for title in ("FileNames", "FunctionNames")
    )
    row = r"^(\d+) \{file_name_id=(\d+)(?: function_name_id=(\d+))?.*?\bline=(\d+)"
    rows = (map(int, (n or 0 for n in found)) for found in re.findall(row, _section(text, "FileLocations"), re.M))
    lines = {i: (files[file], line, functions.get(f, "")) for i, file, f, line in rows if file in files}
    row = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    calls = [tuple(int(n or 1) for n in found) for found in re.findall(row, _section(text, "StackFrames"), re.M)]
    own = {i: lines[place] for i, place, _ in calls if place in lines}
    no_parent = min((parent for *_, parent in calls), default=1)
    parents = {i: parent - no_parent for i, _, parent in calls}
    libraries = frozenset(filter(is_of_library, files.values()))
    found: dict[int, tuple[Frame, ...]] = {}
    for number in own:
        chain, at = dict[int, Frame](), number
        while at in own and at not in chain:
            chain[at] = own[at]
            at = parents[at]
        frames = tuple(frame for frame in chain.values() if frame[0] not in libraries)
        found[number] = frames or (own[number],)
    return found


def _section(text: str, title: str) -> str:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
    return found[1] if found else ""


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a ``while`` runs, or None where only the data tell.

    XLA for CPU and GPU notes the count where it knows it, libtpu does not. Else a loop counts if its condition compares
    one element of the state with a constant, its body adds a constant to that element, and the state starts with a
    constant there.
    """
    if noted := re.search(r'known_trip_count"?[:=]\s*\{"?n"?[:=]\s*"?(\d+)', loop.attributes):
        return int(noted[1])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    step = functools.partial(_element, module, module.computations[body], None)
    first = functools.partial(_element, module, computation, loop.operands[0])
    match _value(module, module.computations[condition], None, ()):
        case ("compare", direction, ("element", int(i)), limit):
            pass
        case ("compare", direction, limit, ("element", int(i))):
            direction = _MIRRORED.get(direction, direction)
        case _:
            return None
    match limit:
        case ("element", int(j)) if step(j) == limit:  # the state carries it along unchanged
            limit = first(j)
    match first(i), limit, step(i):
        case ("constant", int(begin)), ("constant", int(end)), ("add", int(element), int(by)) if element == i and by:
            if by < 0:
                direction, begin, end, by = _MIRRORED.get(direction, direction), -begin, -end, -by
            if direction in ("LT", "LE"):
                return max(0, math.ceil((end + (direction == "LE") - begin) / by))
            if direction == "NE" and begin <= end and (end - begin) % by == 0:
                return (end - begin) // by
    return None


_MIRRORED: dict[object, object] = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
Value = tuple[object, ...] | None
"""``("constant", n)``; ``("element", i)`` of the state; ``("add", i, n)``; ``("compare", direction, left, right)``."""


def _element(module: Module, computation: Computation, of: str | None, i: int) -> Value:
    """Element ``i`` of a tuple, by default of the result."""
    made = computation.behind(of or computation.root, ("copy", "opt-barrier"))
    if made is None or made.opcode != "tuple":
        return None
    return _value(module, computation, made.operands[i], ())


def _value(
    module: Module, computation: Computation, name: str | None, arguments: tuple[Value, ...], depth: int = 8
) -> Value:
    """What a scalar is in terms of constants and of the state's elements; ``arguments`` inside a fusion.

    A scalar that takes more operations is not a count: it is None.
    """
    made = computation.behind(name or computation.root, ("copy", "bitcast", "convert", "reshape"))
    if made is None or not depth:
        return None
    value = functools.partial(_value, module, computation, arguments=arguments, depth=depth - 1)
    match made.opcode:
        case "constant":
            return ("constant", int(made.literal)) if re.fullmatch(r"-?\d+", made.literal.strip()) else None
        case "parameter":
            return arguments[int(made.literal)] if arguments else None
        case "get-tuple-element":
            whole = computation.instructions.get(made.operands[0])
            is_state = whole is not None and whole.opcode == "parameter" and not arguments
            return ("element", made.number) if is_state else None
        case "add":
            match value(made.operands[0]), value(made.operands[1]):
                case (("element", i), ("constant", n)) | (("constant", n), ("element", i)):
                    return ("add", i, n)
            return None
        case "compare":
            direction = re.search(r"\bdirection=(\w+)", made.attributes)
            return ("compare", direction[1] if direction else "", value(made.operands[0]), value(made.operands[1]))
        case "fusion" | "call":
            (inner,) = made.called("calls") or made.called("to_apply")
            operands = tuple(map(value, made.operands))
            return _value(module, module.computations[inner], None, operands, depth - 1)
    return None


# Op names: reads which operator, in which module, an instruction of a compiled program comes from.

# Parts of a name stack that name a call, a loop or a transformation of JAX's, and no module of the user's.
_CALLS = frozenset(
    "while body cond closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat "
    "remat2 rematted_computation shard_map pjit jit xla_call eval_jaxpr branch_0_fun branch_1_fun".split()
)
_NUMBERED = re.compile(r"\.\d+$")  # how XLA calls what it makes itself: broadcast.32
_RECOMPUTED = "rematted_computation"
_WRAPPED = re.compile(r"^([\w.\-]+)\((.*)\)$")
_TRANSFORMATIONS = frozenset("jvp transpose vmap remat checkpoint custom_jvp custom_vjp linearize".split())


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where an instruction comes from."""

    operation: str = ""  # the operator, by JAX's name of its primitive; empty if nothing tells
    module: str = ""  # the named scopes around it, joined by ``/``; empty without any
    is_backward: bool = False  # whether it is part of a gradient
    is_recomputed: bool = False  # whether ``jax.checkpoint`` computes it once more


def origin_of(op_name: str) -> Origin:
    """Reads the ``op_name`` of an instruction's metadata.

    >>> origin_of("jit(step)/jvp()/attn/reshape;attn/transpose")
    Origin(operation='reshape', module='attn', is_backward=False, is_recomputed=False)
    >>> origin_of("jit(f)/vmap(mlp)/(rematted_computation/up/dot_general:up/dot_general)").module
    'mlp/up'
    """
    words = _split(_first_alternative(op_name))
    if not words:
        return Origin()
    *scopes, operation = words
    found: list[str] = []
    is_backward = False
    for word in scopes:
        inner, transposed = _unwrapped(word)
        is_backward |= transposed
        # An einsum names its scope by its subscripts: ab,bc->ac.
        found += [part for part in _split(inner) if part not in _CALLS and "->" not in part]
    return Origin(_NUMBERED.sub("", operation.partition("[")[0]), "/".join(found), is_backward, _RECOMPUTED in scopes)


def _first_alternative(op_name: str) -> str:
    """One of the names that XLA merged: ``a;b`` are two, and so are ``x/(a/c:b/c)``."""
    text = op_name.partition(";")[0]
    start = text.find("/(")
    if start < 0:
        return text
    return f"{text[:start]}/{text[start + 2 :].partition(':')[0].rstrip(')')}"


def _split(text: str) -> list[str]:
    """The parts between slashes; a slash in parentheses or brackets separates nothing."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "/" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in (*parts, text[start:]) if part]


def _unwrapped(word: str) -> tuple[str, bool]:
    """What is inside of the transformations around a scope, and whether one of them transposes.

    Of ``jit(f)`` nothing is left: it is a call.
    """
    transposed = False
    while match := _WRAPPED.match(word):
        if match[1] not in _TRANSFORMATIONS:
            return ("", transposed) if match[1] in _CALLS else (word, transposed)
        transposed |= match[1] == "transpose"
        word = match[2]
    return word, transposed
