"""Dataflow: follows arrays through a compiled program, to the argument they come from and to what reads them.

An array stays the same one where it is copied, converted, transposed, cut, gathered or handed to a loop or a fusion:
the bfloat16 copy of one layer's slice of a stacked weight is still that weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from gshard.xla.hlo_parser import BRANCHES, Instruction, Module

# What leaves an array the same one, or makes it another part of it: the result is that of the first operand.
MOVES = frozenset(
    "copy copy-start copy-done bitcast convert transpose reshape reverse slice dynamic-slice pad opt-barrier "
    "reduce-precision all-gather all-gather-start all-gather-done collective-permute collective-permute-start "
    "collective-permute-done all-reduce-done reduce-scatter-done all-to-all collective-broadcast async-start "
    "async-update async-done fusion-done call-done".split()
)
# Custom calls of XLA's that move an array, too: the two ends of what libtpu sends beside other fusions.
_MOVING_CALLS = re.compile(r'custom_call_target="(AsyncCollectiveStart|AsyncCollectiveDone|Sharding|SPMD\w+)"')
ELEMENTWISE = frozenset(
    "add subtract multiply divide maximum minimum power remainder negate abs sign sqrt rsqrt cbrt exponential "
    "exponential-minus-one log log-plus-one logistic tanh cosine sine tan atan2 erf floor ceil round-nearest-afz "
    "round-nearest-even select compare and or xor not clamp is-finite shift-left shift-right-logical "
    "shift-right-arithmetic".split()
)
PRODUCTS = frozenset(("dot", "convolution", "ragged-dot", "gather"))
CALLING = ("fusion", "call", "async-start", "fusion-start", "call-start")  # run a computation on their operands
_TAKING = ("calls", "to_apply", "body", *BRANCHES)  # attributes that name computations of an instruction's operands
_CALLS = (*_TAKING, "condition")
_CARRIED = ("all-reduce", "all-reduce-start", "reduce-scatter", "dynamic-update-slice", "concatenate")


class Array(NamedTuple):
    """One array of a program: an instruction's result, or an element of it."""

    computation: str  # computation, name: of the instruction
    name: str
    element: int | None = None  # which element of a tuple; None for the whole result


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """What an array becomes by operations on single elements."""

    results: frozenset[int]  # elements of the program's result
    beside: frozenset[int]  # numbers of the arguments that it is combined with


class Dataflow:
    """The arrays of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._sources: dict[Array, Array] = {}
        for name, computation in module.computations.items():
            users = self._users[name] = {}
            for made in computation.instructions.values():
                for operand in dict.fromkeys(made.operands):
                    users.setdefault(operand, []).append(made)
                if "=%" in made.attributes or "={%" in made.attributes:
                    for inner in dict.fromkeys(inner for a in _CALLS for inner in made.called(a)):
                        self._callers.setdefault(inner, []).append((name, made))
        self._parameters = {
            name: {made.number: made.name for made in computation.instructions.values() if made.opcode == "parameter"}
            for name, computation in module.computations.items()
        }

    def made(self, array: Array) -> Instruction | None:
        """The instruction that makes an array."""
        return self.module.computations[array.computation].instructions.get(array.name)

    def source(self, array: Array) -> Array:
        """The array that this is a copy or a part of: one that is computed, or a parameter of the program."""
        seen: dict[Array, None] = {}
        while array not in seen:
            if (known := self._sources.get(array)) is not None:
                array = known
                break
            seen[array] = None
            before = self.before(array)
            if before is None:
                break
            array = before
        self._sources |= dict.fromkeys(seen, array)
        return array

    def users(self, computation: str, name: str) -> Sequence[Instruction]:
        """The instructions that have an array as an operand, in order."""
        return self._users[computation].get(name, ())

    def arguments(self, array: Array) -> tuple[int, ...]:
        """The number of the argument that an array is a copy or part of, or of those that it joins; () if computed."""
        source = self.source(array)
        made = self.made(source)
        if made is not None and made.opcode == "concatenate":
            joined = [self.arguments(Array(source.computation, operand)) for operand in made.operands]
            return tuple(dict.fromkeys(number for numbers in joined for number in numbers)) if all(joined) else ()
        is_argument = source.computation == self.module.entry and made is not None and made.opcode == "parameter"
        return (made.number,) if is_argument and made is not None else ()

    def readers(self, array: Array) -> Iterator[tuple[str, Instruction]]:
        """What computes with an array, nearest first, with the computation it is in; copies and cuts are passed."""
        for computation, made, _ in self.walk(array, MOVES):
            if not is_move(made):
                yield computation, made

    def reach(self, array: Array) -> Reach:
        """Which results an array becomes by operations on single elements, and which arguments they combine it with."""
        results: set[int] = set()
        beside: set[int] = set()
        through = MOVES | ELEMENTWISE | frozenset(_CARRIED)
        for computation, made, element in self.walk(array, through):
            if computation == self.module.entry and made.name == self.module.computations[computation].root:
                results.add(0 if element is None else element)
            elif made.opcode in ELEMENTWISE:
                beside.update(*(self.arguments(Array(computation, operand)) for operand in made.operands))
        return Reach(frozenset(results), frozenset(beside))

    def before(self, array: Array) -> Array | None:
        """The array that this one is a copy or a part of, one step back; None if it is computed."""
        made = self.made(array)
        if made is None:
            return None
        computation, _, element = array
        if made.opcode == "parameter":
            return self._outside(array, made)
        if made.opcode == "get-tuple-element":
            return Array(computation, made.operands[0], made.number)
        if made.opcode == "tuple":
            return None if element is None else Array(computation, made.operands[element])
        if made.opcode == "while":
            return None if element is None else self._unchanged(computation, made, element)
        if made.opcode in CALLING:
            inner = next(iter((*made.called("calls"), *made.called("to_apply"))), "")
            body = self.module.computations.get(inner)
            if body is not None:
                root = body.instructions[body.root]
                is_tuple = root.opcode == "tuple" and element is not None
                return Array(inner, root.operands[element] if is_tuple and element is not None else root.name)
        if is_move(made) and made.operands:
            # One that is combined moves several arrays; one that has begun has its operands in its result, too.
            several = len(made.operands) > 1 and not made.opcode.startswith(("dynamic-slice", "pad"))
            at = element if several and element is not None and element < len(made.operands) else 0
            return Array(computation, made.operands[at])
        return None

    def _outside(self, array: Array, made: Instruction) -> Array | None:
        """What a parameter of a computation is where that is called."""
        callers = self._callers.get(array.computation, [])
        if len(callers) != 1:
            return None
        outer, caller = callers[0]
        if caller.opcode == "while":
            return None if array.element is None else self._unchanged(outer, caller, array.element)
        if caller.opcode == "conditional":
            branches = [b for a in BRANCHES for b in caller.called(a)]
            return Array(outer, caller.operands[1 + branches.index(array.computation)], array.element)
        if caller.opcode in CALLING and made.number < len(caller.operands):
            return Array(outer, caller.operands[made.number], array.element)
        return None

    def _unchanged(self, outer: str, loop: Instruction, element: int) -> Array | None:
        """What an element of a loop's state is before the loop, if no iteration changes it."""
        (name,) = loop.called("body")
        body = self.module.computations[name]
        root = body.instructions[body.root]
        if root.opcode != "tuple":
            return None
        carried = body.behind(root.operands[element], ("copy", "bitcast", "opt-barrier"))
        if carried is None or carried.opcode != "get-tuple-element" or carried.number != element:
            return None
        state = body.instructions[carried.operands[0]]
        return Array(outer, loop.operands[0], element) if state.opcode == "parameter" else None

    def walk(
        self, array: Array, through: Collection[str], stops: Collection[str] = ()
    ) -> Iterator[tuple[str, Instruction, int | None]]:
        """What reads an array, and the results of moves and of ``through``; of a tuple as a result its element.

        What reads the results of ``stops`` is left out.
        """
        waiting, seen = deque([array]), {array}
        while waiting and len(seen) < 4000:  # what is further away names nothing
            at = waiting.popleft()
            following: list[Array] = []
            body = self.module.computations[at.computation]
            if at.name == body.root:
                if at.computation == self.module.entry:
                    yield at.computation, body.instructions[at.name], at.element
                following += self._returned(at)
            for user in self._users[at.computation].get(at.name, ()):
                follows = list(self._into(at, user))
                if user.opcode not in stops and (user.opcode in through or is_move(user)):
                    yield at.computation, user, None
                    # An instruction with several operands makes an element of its result of each.
                    moves_several = len(user.operands) > 1 and user.type.startswith("(")
                    element = user.operands.index(at.name) if moves_several else None
                    follows.append(Array(at.computation, user.name, element))
                elif not follows and user.opcode not in ("get-tuple-element", "tuple"):
                    yield at.computation, user, None
                following += follows
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)

    def _into(self, at: Array, user: Instruction) -> Iterator[Array]:
        """The array as an element of a tuple, or as what a called computation takes."""
        if user.opcode == "get-tuple-element":
            if at.element is None or at.element == user.number:
                yield Array(at.computation, user.name)
        elif user.opcode == "tuple":
            yield from (Array(at.computation, user.name, i) for i, name in enumerate(user.operands) if name == at.name)
        elif user.opcode in (*CALLING, "while", "conditional"):
            inners = [inner for a in _TAKING for inner in user.called(a)]
            for i, name in enumerate(user.operands):
                for branch, inner in enumerate(inners):
                    number = i if user.opcode in CALLING else 0
                    is_taken = user.opcode != "conditional" or i == branch + 1
                    if name == at.name and is_taken and number in self._parameters.get(inner, {}):
                        yield Array(inner, self._parameters[inner][number], at.element)

    def _returned(self, at: Array) -> Iterator[Array]:
        """The result of a computation where that is called."""
        for outer, caller in self._callers.get(at.computation, ()):
            if caller.opcode in (*CALLING, "while", "conditional"):
                yield Array(outer, caller.name, at.element)


def is_move(made: Instruction) -> bool:
    """Whether the result of an instruction is its operand, or a part of it, in another form or place."""
    if made.opcode == "custom-call":
        return bool(made.operands) and _MOVING_CALLS.search(made.attributes) is not None
    return made.opcode in MOVES
