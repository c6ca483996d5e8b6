"""HLO collectives: reads the collectives of a compiled program.

Reads the text of any compiled JAX program, whoever partitioned it, so that programs are compared by what they
execute and by one definition of a byte moved. With g devices in a group, each device sends in one execution:

    all_gather            result * (g - 1) / g          what it does not yet have arrives
    reduce_scatter        operand * (g - 1) / g         all but its own part leaves
    all_reduce            2 * operand * (g - 1) / g     a reduce_scatter and an all_gather
    all_to_all            operand * (g - 1) / g         all but its own part leaves
    collective_permute    operand                       0 if every device sends to itself

    >>> import jax
    >>> text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    >>> collectives(text)
    ()
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gshard.comm.steps import sent_bytes, sent_sizes
from gshard.core.spmd import by_kind
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, trip_count, type_bytes

_OPCODES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
OPCODE = re.compile(rf"({'|'.join(_OPCODES)})(-start)?")
KINDS = tuple(opcode.replace("-", "_") for opcode in _OPCODES)  # of collectives

_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s*)+)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective of a compiled program, where it runs."""

    # all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, ragged_all_to_all (counted as if all
    # devices received the same) and the rarer collective_broadcast (as if everything were sent)
    kind: str
    operand_bytes: int  # on one device, all operands of a combined collective together
    group_size: int  # how many devices communicate (the largest group; all devices for a permutation)
    bytes_moved: int  # bytes that each device sends in one execution
    executions: int  # how often it runs in one call of the program
    # False if ``executions`` depends on data: inside a conditional (counted as taken) or a loop whose length the text
    # does not tell (counted as one round)
    exact: bool
    groups: Groups  # the devices that communicate, each group in rising order; none for a permutation
    computation: str  # where it is scheduled;
    made: Instruction  # the instruction there, which may be a fusion;
    ends: Instruction  # and the one with which it ends; the same for one that stops everything
    inside: str  # the computation that lists the collective itself;
    itself: Instruction  # and the collective
    arrays: tuple[
        tuple[int, str], ...
    ]  # the numbers of the operands that it moves, and the types in which it moves them

    @property
    def key(self) -> int:
        """A number that it shares with its other runs in the program."""
        return hash((id(self.itself), self.kind))

    @property
    def is_asynchronous(self) -> bool:
        """Whether other instructions run between its start and its end."""
        return self.made is not self.ends

    @property
    def group(self) -> tuple[int, ...]:
        """The devices with which the first device communicates, itself included."""
        return next((group for group in self.groups if 0 in group), ())

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call of the program."""
        return self.bytes_moved * self.executions


def collectives(text: str) -> tuple[CompiledCollective, ...]:
    """The collectives of ``jax.jit(f).lower(...).compile().as_text()``, in the order of the program.

    A computation that is called from two places gives its collectives twice. The two halves of an asynchronous
    collective count once, and so do the fusions that carry one on while they compute.
    """
    return collectives_of(read_module(text))


def collectives_of(module: Module) -> tuple[CompiledCollective, ...]:
    """The collectives of a program in the order in which they start."""
    return tuple(c for name, times, exact in computations_run(module) for c in sent_in(module, name, times, exact))


def summary(found: Iterable[CompiledCollective]) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind a device runs in one call, and the bytes it sends in them."""
    rows = [*found]
    runs, sizes = by_kind((c.kind, c.executions) for c in rows), by_kind((c.kind, c.total_bytes) for c in rows)
    return {kind: (number, sizes[kind]) for kind, number in sorted(runs.items())}


def computations_run(module: Module) -> Iterator[tuple[str, int, bool]]:
    """The computations that run as programs of their own, loops' bodies and branches."""

    def walk(name: str, times: int, exact: bool) -> Iterator[tuple[str, int, bool]]:
        yield name, times, exact
        computation = module.computations[name]
        for made in computation.instructions.values():
            if made.bodies:
                for inner, inner_times, inner_exact in _calls(module, computation, made):
                    yield from walk(inner, times * inner_times, exact and inner_exact)

    if module.entry:
        yield from walk(module.entry, 1, True)


def sent_in(module: Module, name: str, times: int = 1, exact: bool = True) -> list[CompiledCollective]:
    """The collectives that start in one computation, in order."""
    computation = module.computations[name]
    rows = [
        (made, inside, itself, channel)
        for made in computation.instructions.values()
        for inside, itself, channel in _held(module, name, made)
    ]
    # Fusions that carry one collective on share its channel.
    last = {channel: made for made, _, _, channel in rows if channel}
    done = {m.operands[0]: m for m in computation.instructions.values() if m.opcode.endswith("-done") and m.operands}
    found: list[CompiledCollective] = []
    seen: set[str] = set()
    for made, inside, itself, channel in rows:
        if channel not in seen:
            ends = last.get(channel) or done.get(made.name) or made
            kind, operand, size, moved, groups = _read(module, inside, itself)
            made_here = module.computations[inside].instructions
            types = [made_here[o].type for o in itself.operands if o in made_here]
            arrays = tuple(enumerate(types)) or ((0, itself.literal or itself.type),)
            found.append(
                CompiledCollective(
                    kind, operand, size, moved, times, exact, groups, name, made, ends,
                    inside, itself, arrays,
                )
            )  # fmt: skip
        seen |= {channel} if channel else set()
    return found


def _held(module: Module, name: str, made: Instruction) -> Iterator[tuple[str, Instruction, str]]:
    """The collectives that an instruction is, or that a fusion or an asynchronous call holds."""
    if OPCODE.fullmatch(made.opcode):
        yield name, made, ""
    elif made.opcode in ("fusion", "async-start", "call-start"):  # the last is what TPUs start on another core
        for inner in (*made.called("calls"), *made.called("to_apply")):
            for part in module.computations[inner].instructions.values():
                if OPCODE.fullmatch(part.opcode):
                    channel = _CHANNEL.search(part.attributes) if made.opcode == "fusion" else None
                    yield inner, part, channel[1] if channel else ""


def _calls(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[str, int, bool]]:
    """The computations that one instruction runs: name, how often, and whether that is certain."""
    if instruction.opcode == "while":
        count = trip_count(module, computation, instruction)
        rounds, known = (1, False) if count is None else (count, True)
        yield from ((inner, rounds + known, known) for inner in instruction.called("condition"))
        yield from ((inner, rounds, known) for inner in instruction.called("body"))
    else:
        yield from ((inner, 1, instruction.opcode == "call") for inner in instruction.bodies)


def _read(module: Module, inside: str, made: Instruction) -> tuple[str, int, int, int, Groups]:
    """Of a collective the kind, the bytes of its operands, the size of groups, the bytes sent, and the groups."""
    kind = made.opcode.removesuffix("-start").replace("-", "_")
    if kind == "all_reduce" and inside.startswith("all-reduce-scatter"):
        kind = "reduce_scatter"  # as libtpu writes it: each device keeps a part of the result
    instructions = module.computations[inside].instructions
    sizes = sent_sizes(kind, [type_bytes(instructions[o].type) for o in made.operands if o in instructions])
    operand = sum(sizes) if sizes else type_bytes(made.literal)
    groups = () if kind == "collective_permute" else groups_of(made, module)
    size = max(map(len, groups), default=module.devices)
    moved = operand if kind == "collective_broadcast" else sent_bytes(kind, operand, size)
    pairs = pairs_of(made)
    return kind, operand, size, 0 if pairs and all(a == b for a, b in pairs) else moved, groups


def groups_of(made: Instruction, module: Module, *, ordered: bool = False) -> Groups:
    """The groups of devices of a collective, each in rising order, or ``ordered`` as XLA counts their members.

    Without ``use_global_device_ids``, groups consist of replicas: of all their partitions if there is a channel.
    """
    _, given, text = made.attributes.partition("replica_groups=")
    groups, partitions = _read_groups(text) if given else (), module.devices // module.replicas
    groups = groups if ordered else tuple(tuple(sorted(group)) for group in groups)
    if not groups:
        return (tuple(range(module.devices)),)
    if "use_global_device_ids=true" in text or max(map(max, groups)) >= module.replicas:
        return groups
    if _CHANNEL.search(made.attributes):
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in groups)
    return tuple(tuple(r * partitions + p for r in group) for group in groups for p in range(partitions))


def _read_groups(text: str) -> Groups:
    """The groups at the start of a text, in any notation of XLA; () if none are listed.

    >>> _read_groups("{{0,2},{1,3}}, dimensions={0}")
    ((0, 2), (1, 3))
    >>> _read_groups("[2,2]<=[2,2]T(1,0), dimensions={0}")
    ((0, 2), (1, 3))
    >>> _read_groups("mesh['a'=2,'b'=4] {'b':(2)2,'a'}, dimensions={0}")
    ((0, 4, 1, 5), (2, 6, 3, 7))
    >>> _read_groups("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, dimensions={0}")
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    if found := re.match(r"\{(\{[\d,]*\},?)*\}", text):
        listed = re.findall(r"\{([\d,]+)\}", found[0])
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    if found := _IOTA.match(text):
        return _rows(_iota(found))
    if not (found := re.match(r"@?mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text)):
        raise ValueError(f"the groups of a collective cannot be read: replica_groups={text[:80]}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
    strides, stride = {}, math.prod(sizes.values())
    ids = positions = np.arange(stride)
    if found[2]:
        ids = numbers_in(found[2])
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    first, member, members = positions.copy(), 0 * positions, 1
    for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found[3]):
        # 'b':(2)4 is the part of size 4 of 'b' that stands after a part of size 2.
        count = int(part or sizes[name])
        step = strides[name] * (sizes[name] // (int(before or 1) * count))
        first -= positions // step % count * step
        member = member * count + positions // step % count
        members *= count
    return _rows(ids[np.lexsort((member, first))].reshape(-1, members))


_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _iota(found: re.Match[str]) -> np.ndarray[Any, Any]:
    """``[shape]<=[sizes]T(permutation)``: the numbers from 0, in an array of these sizes, permuted and reshaped."""
    shape, sizes, permutation = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
    assert sizes is not None
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(permutation).reshape(shape or -1)


def numbers_in(text: str) -> np.ndarray[Any, Any]:
    """The numbers of devices, which are listed or ``[sizes]T(permutation)``, maybe after ``[shape]<=``.

    >>> numbers_in("[2,2]T(1,0)"), numbers_in("0,1,3,2")
    (array([0, 2, 1, 3]), array([0, 1, 3, 2]))
    """
    iota = _IOTA.match(text)
    return np.array([int(n) for n in text.split(",")]) if iota is None else _iota(iota).ravel()


def _rows(ids: np.ndarray[Any, Any]) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def pairs_of(made: Instruction) -> list[tuple[int, int]]:
    """Which device sends to which in a permutation."""
    found = _PAIRS.search(made.attributes)
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])] if found else []
