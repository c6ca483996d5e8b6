"""Finds names for the arrays of a program in reports, and the module of each equation.

A collective moves a weight, its gradient or an activation, and rarely the argument itself but a cast of it, or one
layer's slice. The name of an argument is therefore also the name of such forms of it. In frameworks with one function
for all products, all products have the same source line. The name of the weight and the module distinguish them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import jax

from gshard.core.jax_adapter import is_transposed, scopes_of
from gshard.core.mark import Mark
from gshard.core.program import Block, Equation, Program, Value, type_text
from gshard.core.spmd import Collective
from gshard.language.mark_primitive import steps_of_rounding
from gshard.naming.array_forms import adds_in, in_another_form, is_elementwise, joined_by, source_of
from gshard.naming.short_names import Path, ShortName, common_name, equal_layers, short_names, tokens_of

GRADIENT, UPDATE = "gradient of ", "update of "


class ArrayNames:
    """Names for the arrays of one program."""

    def __init__(self, program: Program, called: Sequence[ShortName] = ()) -> None:
        self._producers = {v: e for e in program.block.walk() for v in e.outputs}
        self._scopes: dict[Equation, Path] = {}
        self._backward: set[Equation] = set()
        self._note_scopes(program.block, (), False)
        # Values that are an argument in another form, or a part of it: the argument; or the array that joins some.
        self._roots: dict[Value, Value] = {v: v for v in program.block.inputs}
        self._joined: dict[Value, tuple[Value, ...]] = {}  # the arguments of each join
        self._region_of: dict[Value, Equation] = {}  # inputs of bodies: the region
        self._outside: dict[Value, Value] = {}  # inputs of bodies that iterations do not change: the value outside
        self._find_roots(program.block)
        kinds = {name: (v.shape, v.dtype) for v, name in zip(program.block.inputs, program.names, strict=True)}
        # the arguments that products and look-ups read: weights and data, but not biases or moments
        self.read = frozenset(v for root in self._read_by_products(program.block) for v in self._arguments_of(root))
        weights = [name for v, name in zip(program.block.inputs, program.names, strict=True) if v in self.read]
        short = {} if called else short_names(kinds, weights)
        called = called or [short[name] for name in program.names]
        # the name of each argument
        self.arguments: dict[Value, ShortName] = dict(zip(program.block.inputs, called, strict=True))
        self._module_of = {v: _module(self.arguments[v], name) for v, name in zip(program.block.inputs, program.names)}
        self._gradients: set[Value] = set()
        self._constants: set[Value] = set()  # values that depend on no array: scales, zeros, sums that begin as zeros
        self._find_gradients(program.block)
        # Values that lead to the next value of an argument, or of several: the arguments.
        self._updated: dict[Value, tuple[Value, ...]] = {}
        self._find_updates(program)
        self._is_scoped = any(self._scopes.values())
        self._equal_layers = equal_layers(dict.fromkeys(self._scopes.values()), same_inside=False)

    @staticmethod
    def of_devices(block: Block, program: Program, names: ArrayNames | None = None) -> ArrayNames:
        """Names for the arrays of a per-device program. Its arguments have the same names as those of ``program``."""
        whole = ArrayNames(program) if names is None else names
        called = [whole.arguments[v] for v in program.block.inputs]
        constants = len(block.inputs) - len(called)  # the first inputs are the partitioner's tables of device positions
        block = dataclasses.replace(block, inputs=block.inputs[constants:])
        return ArrayNames(dataclasses.replace(program, block=block), called)

    def array(self, v: Value | None) -> ShortName:
        """The name of an array; empty for a value that is not in the program."""
        if v is None:
            return ShortName()
        if (root := self._roots.get(v)) is not None:
            return common_name([self.arguments[x] for x in self._arguments_of(root)])
        if (arguments := self._updated.get(v)) is not None:
            prefix = GRADIENT if v in self._gradients else UPDATE
            name = common_name([self.arguments[x] for x in arguments])
            return ShortName(prefix + name.text, prefix + name.alike)
        text = self._operation_of(v)
        return ShortName(text, text)

    def moved(self, c: Collective) -> ShortName:
        """The name of what a collective moves: inside an equation, of those operands that have its dtype and rank."""
        if c.value is not None or c.cause is None:
            return self.array(c.value)
        arrays = sorted((x for x in c.cause.inputs if isinstance(x, Value)), key=lambda x: -x.bytes)
        like = [x for x in arrays if _form(type_text(x)) == _form(c.shape)]
        names = [name for name in map(self.array, like) if name.text]
        return common_name([*dict.fromkeys(names)]) if names else ShortName()

    def is_named(self, v: Value | None) -> bool:
        """Whether the name of an array contains the name of an argument."""
        return v in self._roots or v in self._updated

    def module(self, e: Equation | None) -> ShortName:
        """The module of the model that contains an equation, such as ``decoder/layers_0/mlp``.

        It is known from named scopes; without scopes, from the name of the weight that the equation reads.
        """
        if e is None:
            return ShortName()
        path = self._scopes.get(e) or scopes_of(e.source_info)
        if path:
            return ShortName("/".join(path), "/".join(self._equal_layers.get(path, path)))
        if self._is_scoped:
            return ShortName()
        values = (v for v in (*e.outputs, *e.inputs) if isinstance(v, Value))
        roots = dict.fromkeys(self._roots[v] for v in values if v in self._roots)
        modules = (common_name([self._module_of[x] for x in self._arguments_of(root)]) for root in roots)
        return max(modules, key=lambda module: module.text.count("/") + bool(module.text), default=ShortName())

    def _arguments_of(self, root: Value) -> tuple[Value, ...]:
        return self._joined.get(root, (root,))

    def _operation_of(self, v: Value) -> str:
        """The name of the operation that computes an array, or its source if it is another form of an array."""
        seen: set[Value] = set()
        while v not in seen:
            seen.add(v)
            e = self._producers.get(v)
            if e is None:
                if v in self._outside:
                    v = self._outside[v]
                    continue
                return f"carry of {self._region_of[v].name}" if v in self._region_of else ""
            if e.blocks:
                v = next((edge.inner for edge in e.edges if edge.outer is v), v)
            else:
                v = source_of(e, v) or v
        e = self._producers.get(v)
        if e is None:
            return ""
        return f"{e.name}, backward" if self._is_backward(e) else e.name

    def _is_backward(self, e: Equation) -> bool:
        return e in self._backward or is_transposed(e.source_info)

    def _note_scopes(self, block: Block, outer: Path, backward: bool) -> None:
        """Notes the scopes of all equations, and which of them belong to a backward pass."""
        for e in block.equations:
            path = scopes_of(e.source_info)
            if path[: len(outer)] != outer:
                path = (*outer, *path)
            self._scopes[e] = path
            is_backward = backward or is_transposed(e.source_info)
            if is_backward:
                self._backward.add(e)
            for body in e.blocks:
                self._note_scopes(body, path, is_backward)

    def _find_roots(self, block: Block) -> None:
        """Finds the values that are an argument in another form, or a part of it."""
        for e in block.equations:
            carried = {edge.outer for edge in e.edges}
            results = set(e.outputs)
            for body in e.blocks:
                self._region_of.update(dict.fromkeys(body.inputs, e))
            for edge in e.edges:
                if edge.inner in self._region_of and edge.inner not in carried and edge.outer not in results:
                    self._outside.setdefault(edge.inner, edge.outer)
                    if edge.outer in self._roots:
                        self._roots.setdefault(edge.inner, self._roots[edge.outer])
            for body in e.blocks:
                self._find_roots(body)
            if e.mark is not None and e.mark.send:
                self._follow_rounded(e, e.mark)
            for v, source in zip(e.outputs, in_another_form(e), strict=False):
                if source in self._roots:
                    self._roots[v] = self._roots[source]
            if (sources := joined_by(e)) and all(x in self._roots for x in sources):
                arguments = (v for x in sources for v in self._arguments_of(self._roots[x]))
                self._roots[e.outputs[0]], self._joined[e.outputs[0]] = e.outputs[0], tuple(dict.fromkeys(arguments))

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
        """The arguments that products and look-ups read: equations with several arrays that are not elementwise."""
        for e in block.walk():
            if e.rule is None or is_elementwise(e) or any(in_another_form(e)):
                continue
            arrays = [x for x in e.inputs if isinstance(x, Value) and x.shape]
            if len(arrays) > 1:
                yield from (self._roots[x] for x in arrays if x in self._roots)

    def _find_updates(self, program: Program) -> None:
        """Finds the values that lead to a result, and the argument that the result replaces in the next step.

        This is the nearest argument that elementwise equations combine into the result. If there is none, as for a
        gradient that is a result, it is the argument at the same path.
        """
        by_path = _by_path(program)
        # For each value the results that it leads to: whether the argument is no weight, the distance, and the number.
        candidates: dict[Value, list[tuple[bool, int, int]]] = {}
        arguments: list[Value] = []
        for i, result in enumerate(program.block.outputs):
            if not isinstance(result, Value) or not result.shape or result in self._roots:
                continue
            distances, nearest = self._values_before(result)
            argument = nearest if nearest is not None else by_path.get(i)
            if argument is not None:
                for v, distance in distances.items():
                    candidates.setdefault(v, []).append((argument not in self.read, distance, len(arguments)))
                arguments.append(argument)
        # A gradient belongs to a weight, although it is also added to moments. Other values belong to the nearest one.
        read_otherwise = self._read_besides(candidates.keys())
        for v, rows in candidates.items():
            ranks = [
                (no_weight, arguments[i] not in read_otherwise, distance)
                if v in self._gradients
                else (distance, no_weight)
                for no_weight, distance, i in rows
            ]
            first = (arguments[i] for rank, (*_, i) in zip(ranks, rows, strict=True) if rank == min(ranks))
            self._updated[v] = tuple(dict.fromkeys(first))

    def _read_besides(self, updates: Collection[Value]) -> set[Value]:
        """The arguments that equations read which compute none of these values: biases, but not moments."""
        return {
            argument
            for e in self._producers.values()
            if not e.blocks and not any(v in updates or v in self._roots for v in e.outputs)
            for x in e.inputs
            if isinstance(x, Value) and x in self._roots
            for argument in self._arguments_of(self._roots[x])
        }

    def _find_gradients(self, block: Block) -> None:
        """Finds gradients, also after they are scaled, concatenated, or added over micro-batches."""
        for e in block.equations:
            for body in e.blocks:
                self._constants.update(v for v in body.inputs if self._begins_constant(v))
                self._find_gradients(body)
            if e.blocks:
                self._gradients.update(edge.outer for edge in e.edges if edge.inner in self._gradients)
            if self._is_backward(e):
                self._gradients.update(e.outputs)
            elif not e.blocks:
                arrays = {
                    i for i, x in enumerate(e.inputs) if isinstance(x, Value) and x not in self._constants and x.shape
                }
                if not arrays:
                    self._constants.update(e.outputs)
                elif self._gradients.issuperset(e.inputs[i] for i in arrays) and adds_in(e, arrays):
                    self._gradients.update(e.outputs)

    def _begins_constant(self, v: Value) -> bool:
        """Whether a value of a loop's body that iterations change begins as a constant, for example zeros."""
        if v in self._outside or v in self._roots:
            return False
        region = self._region_of[v]
        sources = {edge.outer for edge in region.edges if edge.inner is v} - {*region.outputs}
        return all(x in self._constants for x in sources if self._region_of.get(x) is not region)

    def _values_before(self, result: Value) -> tuple[dict[Value, int], Value | None]:
        """The values that elementwise equations and changes of form combine into a result."""
        distances: dict[Value, int] = {}
        nearest: Value | None = None
        queue = deque([(result, 0)])
        while queue:
            v, distance = queue.popleft()
            if v in distances:
                continue
            root = self._roots.get(v)
            if root is not None:
                is_like = nearest is None and root not in self._joined and root.shape == result.shape
                nearest = root if is_like else nearest
                continue
            distances[v] = distance
            e = self._producers.get(v)
            if e is None:
                continue
            operands: list[Value] = []
            if e.blocks:
                operands = [edge.inner for edge in e.edges if edge.outer is v and edge.inner not in self._region_of]
            elif (source := source_of(e, v)) is not None:
                operands = [source]
            elif is_elementwise(e):
                operands = [x for x in e.inputs if isinstance(x, Value) and x.shape == v.shape]
            queue += [(x, distance + 1) for x in operands]
        return distances, nearest


def _form(array_type: str) -> tuple[str, int]:
    """The dtype and the number of dimensions of an array, from its type as text."""
    return array_type.partition("[")[0], array_type.count(",")


def _module(short: ShortName, name: str) -> ShortName:
    """The module of an argument: its name without the last word; empty if only the name of the argument is left."""
    text, alike = (name.rpartition(".")[0].replace(".", "/") for name in (short.text, short.alike))
    return ShortName(text, alike) if text != tokens_of(name)[0] else ShortName()


def _by_path(program: Program) -> dict[int, Value]:
    """For each result the argument of the same type at the most similar path, if there is exactly one."""
    tree: Any = program.out_tree
    if tree is None:
        return {}
    outputs = program.block.outputs[: tree.num_leaves]
    if len(outputs) != tree.num_leaves:
        return {}
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(len(outputs)))))
    except Exception:  # a class of the user that accepts only arrays
        return {}
    of_type: dict[Hashable, list[tuple[Path, Value]]] = {}
    for v, name in zip(program.block.inputs, program.names, strict=True):
        of_type.setdefault((v.shape, v.dtype), []).append((tokens_of(name), v))
    arguments = {}
    for path, i in leaves:
        tokens, v = tokens_of(jax.tree_util.keystr(path)), outputs[i]
        candidates = of_type.get((v.shape, v.dtype), [])
        similarity = [_common_parts(tokens, other) for other, _ in candidates]
        best = max(similarity, default=0)
        if best and similarity.count(best) == 1:
            arguments[i] = candidates[similarity.index(best)][1]
    return arguments


def _common_parts(a: Path, b: Path) -> int:
    """The number of equal parts at the ends of two paths."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n
