"""Array names: the names of a program's arrays in reports, and the module of each equation.

A collective moves a weight, its gradient or what a layer computes, and rarely the argument itself: a cast of it, or one
layer's slice. The name follows the array through these. Where a framework has one function for all products, they all
have the same line; the name of the weight and the module tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import jax

from gshard.comm.collectives import KINDS
from gshard.core.jax_adapter import is_transposed, scopes_of
from gshard.core.mark import Mark
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import REDUCE
from gshard.language.low_precision import steps_of_rounding
from gshard.naming.short_names import Path, ShortName, equal_layers, short_names, tokens_of, without_number

GRADIENT, UPDATE = "gradient of ", "update of "


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """Where in the model an equation is: ``decoder/layers_0/mlp``.

    Attributes:
        text: from the named scopes; without any, from the weight that it reads.
        alike: with ``*`` for the number of a layer, where there are several.
    """

    text: str = ""
    alike: str = ""

    @property
    def any_number(self) -> str:
        """With ``*`` for the number of each word: which layers are alike is known by other things."""
        return "/".join(map(without_number, self.text.split("/")))


class ArrayNames:
    """Names for one program.

    Args:
        program: the program of a plan.
        called: a name for each of its inputs; without, short forms of the program's names.

    Attributes:
        arguments: what each argument is called.
        read: the arguments that products and look-ups read: weights and data, not biases or moments.
    """

    def __init__(self, program: Program, called: Sequence[ShortName] = ()) -> None:
        self._producers = {v: e for e in program.block.walk() for v in e.outputs}
        self._scopes: dict[Equation, Path] = {}
        self._backward: set[Equation] = set()
        self._note_scopes(program.block, (), False)
        self._roots: dict[Value, Value] = {v: v for v in program.block.inputs}
        self._inside: dict[Value, Equation] = {}  # inputs of bodies: the region
        self._outside: dict[Value, Value] = {}  # of those that no round changes: what they are outside
        self._follow(program.block)
        kinds = {name: (v.shape, v.dtype) for v, name in zip(program.block.inputs, program.names, strict=True)}
        self.read = frozenset(self._read_by_products(program.block))
        weights = [name for v, name in zip(program.block.inputs, program.names, strict=True) if v in self.read]
        short = {} if called else short_names(kinds, weights)
        called = called or [short[name] for name in program.names]
        self.arguments: dict[Value, ShortName] = dict(zip(program.block.inputs, called, strict=True))
        self._module_of = {v: _module(self.arguments[v], name) for v, name in zip(program.block.inputs, program.names)}
        self._gradients: set[Value] = set()
        self._plain: set[Value] = set()  # arrays of numbers alone: scales, zeros, and sums that begin as zeros
        self._follow_gradients(program.block)
        self._made: dict[Value, Value] = {}  # what becomes of an argument, or is added to it: the argument
        self._follow_back(program)
        self._is_scoped = any(self._scopes.values())
        self._folded = equal_layers(dict.fromkeys(self._scopes.values()), same_inside=False)

    @staticmethod
    def of_devices(block: Block, program: Program, names: ArrayNames | None = None) -> ArrayNames:
        """Names for the arrays of a per-device program; its arguments are called as those of ``program``.

        Args:
            block: one device's equations, collectives among them.
            program: the program that it runs.
            names: those of ``program``, where they are known.
        """
        known = ArrayNames(program) if names is None else names
        called = [known.arguments[v] for v in program.block.inputs]
        constants = len(block.inputs) - len(called)  # the partitioner's own stand in front: tables of device positions
        block = dataclasses.replace(block, inputs=block.inputs[constants:])
        return ArrayNames(dataclasses.replace(program, block=block), called)

    def array(self, v: Value | None) -> ShortName:
        """What an array is called; empty for what is no value of the program."""
        if v is None:
            return ShortName("", "")
        if (root := self._roots.get(v)) is not None:
            return self.arguments[root]
        if (state := self._made.get(v)) is not None:
            what = GRADIENT if v in self._gradients else UPDATE
            name = self.arguments[state]
            return ShortName(what + name.text, what + name.alike)
        text = self._made_by(v)
        return ShortName(text, text)

    def is_named(self, v: Value | None) -> bool:
        """Whether it is called after an argument."""
        return v in self._roots or v in self._made

    def module(self, e: Equation | None) -> Module:
        """The module of an equation."""
        if e is None:
            return Module()
        path = self._scopes.get(e) or scopes_of(e.source_info)
        if path:
            return Module("/".join(path), "/".join(self._folded.get(path, path)))
        if self._is_scoped:
            return Module()
        read = {self._roots[x] for x in e.inputs if isinstance(x, Value) and x in self._roots}
        return max(
            (self._module_of[root] for root in read), key=lambda m: m.text.count("/") + bool(m.text), default=Module()
        )

    def _made_by(self, v: Value) -> str:
        """The operation that makes what this is another form of."""
        seen: set[Value] = set()
        while v not in seen:
            seen.add(v)
            e = self._producers.get(v)
            if e is None:
                if v in self._outside:
                    v = self._outside[v]
                    continue
                return f"carry of {self._inside[v].name}" if v in self._inside else ""
            if e.blocks:
                v = next((edge.inner for edge in e.edges if edge.outer is v), v)
            elif (sources := _in_another_form(e)) and (source := sources[e.outputs.index(v)]) is not None:
                v = source
        e = self._producers.get(v)
        return "" if e is None else f"{e.name}, backward" if self._is_backward(e) else e.name

    def _is_backward(self, e: Equation) -> bool:
        return e in self._backward or is_transposed(e.source_info)

    def _note_scopes(self, block: Block, outer: Path, backward: bool) -> None:
        for e in block.equations:
            own = scopes_of(e.source_info)
            self._scopes[e] = path = own if own[: len(outer)] == outer else (*outer, *own)
            within = backward or is_transposed(e.source_info)
            if within:
                self._backward.add(e)
            for body in e.blocks:
                self._note_scopes(body, path, within)

    def _follow(self, block: Block) -> None:
        """Notes which values are an argument in another form, or a part of it."""
        for e in block.equations:
            carried = {edge.outer for edge in e.edges}
            made = set(e.outputs)
            for body in e.blocks:
                self._inside.update(dict.fromkeys(body.inputs, e))
            for edge in e.edges:
                if edge.inner in self._inside and edge.inner not in carried and edge.outer not in made:
                    self._outside.setdefault(edge.inner, edge.outer)
                    if edge.outer in self._roots:
                        self._roots.setdefault(edge.inner, self._roots[edge.outer])
            for body in e.blocks:
                self._follow(body)
            if e.mark is not None and e.mark.send:
                self._follow_rounded(e, e.mark)
            for v, source in zip(e.outputs, _in_another_form(e), strict=False):
                if source in self._roots:
                    self._roots[v] = self._roots[source]

    def _follow_rounded(self, e: Equation, mark: Mark) -> None:
        """Notes the argument that a mark with ``send`` rounds for the values in between, scales among them."""
        rounded = narrow = e.inputs[0]
        for _ in range(steps_of_rounding(mark)):
            producer = self._producers.get(rounded) if isinstance(rounded, Value) else None
            operands = () if producer is None else producer.inputs
            rounded = next((x for x in operands if x.shape == narrow.shape), rounded)
        root = self._roots.get(rounded) if isinstance(rounded, Value) else None
        waiting = [narrow] if root is not None else []
        while waiting:
            v = waiting.pop()
            if root is not None and isinstance(v, Value) and v not in self._roots:
                self._roots[v] = root
                waiting += self._producers[v].inputs if v in self._producers else ()

    def _read_by_products(self, block: Block) -> Iterator[Value]:
        """The arguments that equations read which are neither elementwise nor another form of one array."""
        for e in block.walk():
            if e.rule is None or _is_elementwise(e) or any(_in_another_form(e)):
                continue
            arrays = [x for x in e.inputs if isinstance(x, Value) and x.shape]
            if len(arrays) > 1:
                yield from (self._roots[x] for x in arrays if x in self._roots)

    def _follow_back(self, program: Program) -> None:
        """Notes, for the values that lead to a result, the argument that the result replaces in the next step.

        It is the nearest argument that elementwise equations bring into the result. Where there is none, as for a
        gradient that is itself a result, it is the argument at the same path.
        """
        by_path = _by_path(program)
        found: dict[Value, list[tuple[bool, int, int]]] = {}
        states: list[Value] = []
        for i, result in enumerate(program.block.outputs):
            if not isinstance(result, Value) or not result.shape or result in self._roots:
                continue
            met, nearest = self._cone(result)
            state = nearest if nearest is not None else by_path.get(i)
            if state is not None:
                for v, far in met.items():
                    found.setdefault(v, []).append((state not in self.read, far, len(states)))
                states.append(state)
        # A gradient is that of a weight, though it is added to moments too; else the result that is nearest counts.
        used = self._read_besides(found.keys())
        for v, rows in found.items():
            if v in self._gradients:
                *_, first = min((other, states[i] not in used, far, i) for other, far, i in rows)
            else:
                *_, first = min((far, other, i) for other, far, i in rows)
            self._made[v] = states[first]

    def _read_besides(self, updates: Collection[Value]) -> set[Value]:
        """The arguments that equations read which make none of these values: biases, but not moments."""
        return {
            self._roots[x]
            for e in self._producers.values()
            if not e.blocks and not any(v in updates or v in self._roots for v in e.outputs)
            for x in e.inputs
            if isinstance(x, Value) and x in self._roots
        }

    def _follow_gradients(self, block: Block) -> None:
        """Notes the gradients, and what they become as they are scaled, joined, and added up over micro-batches."""
        for e in block.equations:
            for body in e.blocks:
                self._plain.update(v for v in body.inputs if self._begins_plain(v))
                self._follow_gradients(body)
            if e.blocks:
                self._gradients.update(edge.outer for edge in e.edges if edge.inner in self._gradients)
            if self._is_backward(e):
                self._gradients.update(e.outputs)
            elif not e.blocks:
                arrays = {
                    i for i, x in enumerate(e.inputs) if isinstance(x, Value) and x not in self._plain and x.shape
                }
                if not arrays:
                    self._plain.update(e.outputs)
                elif self._gradients.issuperset(e.inputs[i] for i in arrays) and _adds(e, arrays):
                    self._gradients.update(e.outputs)

    def _begins_plain(self, v: Value) -> bool:
        """Whether a value of a body that rounds change comes into the loop as zeros, or as other numbers alone."""
        region = self._inside[v]
        come = {edge.outer for edge in region.edges if edge.inner is v} - {*region.outputs}
        changes = v not in self._outside and v not in self._roots
        return changes and all(x in self._plain for x in come if self._inside.get(x) is not region)

    def _cone(self, result: Value) -> tuple[dict[Value, int], Value | None]:
        """What elementwise equations and changes of form make a result of, how far away, and the nearest argument."""
        met: dict[Value, int] = {}
        nearest: Value | None = None
        waiting = deque([(result, 0)])
        while waiting:
            v, far = waiting.popleft()
            if v in met:
                continue
            root = self._roots.get(v)
            if root is not None:
                nearest = root if nearest is None and root.shape == result.shape else nearest
                continue
            met[v] = far
            read: list[Value] = []
            e = self._producers.get(v)
            if e is None:
                continue
            if e.blocks:
                read = [edge.inner for edge in e.edges if edge.outer is v and edge.inner not in self._inside]
            elif (sources := _in_another_form(e)) and (source := sources[e.outputs.index(v)]) is not None:
                read = [source]
            elif _is_elementwise(e):
                read = [x for x in e.inputs if isinstance(x, Value) and x.shape == v.shape]
            waiting += [(x, far + 1) for x in read]
        return met, nearest


def _module(short: ShortName, name: str) -> Module:
    """The module of an argument: its name without the last word, if more than the argument itself is left."""
    text, alike = (name.rpartition(".")[0].replace(".", "/") for name in (short.text, short.alike))
    return Module(text, alike) if text != tokens_of(name)[0] else Module()


def _in_another_form(e: Equation) -> tuple[Value | None, ...]:
    """For each result, the operand that the equation casts, reshapes, slices or sends; () if it computes new values."""
    if e.rule is None:
        return ()
    if e.rule.passes or (e.name in KINDS and len(e.inputs) == len(e.outputs)):
        return tuple(x if isinstance(x, Value) else None for x in e.inputs)
    arrays = [(i, x) for i, x in enumerate(e.inputs) if isinstance(x, Value) and x.shape]
    if len(arrays) != 1 or len(e.outputs) != 1:
        return ()
    if any(f.kind == REDUCE and f.size > 1 and f.monoid != "pick" for f in e.rule.factors):
        return ()
    ((i, source),) = arrays
    alone = len(e.inputs) == 1
    ways = [monoid for monoid, operands in e.rule.linear if operands == {i}]
    return (source,) if "add" in ways or (alone and ways) or e.mark is not None else ()


def _adds(e: Equation, operands: set[int]) -> bool:
    """Whether the results of a sum of these operands are the sum of their results."""
    return e.rule is not None and any(monoid == "add" and operands <= some for monoid, some in e.rule.linear)


def _is_elementwise(e: Equation) -> bool:
    """Whether each element of the result follows from one of each operand; operands may be broadcast."""
    if e.rule is None or len(e.outputs) != 1 or not e.rule.known:
        return False
    (dims,) = e.rule.results
    arrays = zip(e.inputs, e.rule.operands, strict=True)
    return all(
        not x.shape or (len(own) == len(dims) and all(a == b or not a for a, b in zip(own, dims, strict=True)))
        for x, own in arrays
    )


def _by_path(program: Program) -> dict[int, Value]:
    """For each result the argument of the same type at the most similar path, where that is one."""
    tree: Any = program.out_tree
    if tree is None:
        return {}
    outputs = program.block.outputs[: tree.num_leaves]
    if len(outputs) != tree.num_leaves:
        return {}
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(len(outputs)))))
    except Exception:  # a class of the user's that refuses anything but arrays
        return {}
    named: dict[Hashable, list[tuple[Path, Value]]] = {}
    for v, name in zip(program.block.inputs, program.names, strict=True):
        named.setdefault((v.shape, v.dtype), []).append((tokens_of(name), v))
    found = {}
    for path, i in leaves:
        tokens, v = tokens_of(jax.tree_util.keystr(path)), outputs[i]
        near = sorted((_common(tokens, own), k) for k, (own, _) in enumerate(named.get((v.shape, v.dtype), ())))
        if near and near[-1][0] and (len(near) < 2 or near[-2][0] < near[-1][0]):
            found[i] = named[v.shape, v.dtype][near[-1][1]][1]
    return found


def _common(a: Path, b: Path) -> int:
    """How many of the last parts of two paths are the same."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n
