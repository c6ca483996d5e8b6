"""Finds names for the arrays of a program in rows, and the module of each equation.

A collective moves a weight, its gradient or an activation, and rarely the argument itself but a cast of it, or one
layer's slice. The path of an argument is therefore also the name of such forms of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Collection, Sequence

import jax

from gshard.comm.steps import KINDS
from gshard.core.jax_adapter import is_transposed, scopes_of
from gshard.core.mark import Mark
from gshard.core.program import Block, Equation, Program, Value, type_text
from gshard.core.rule import REDUCE
from gshard.core.spmd import Collective
from gshard.language.mark_primitive import steps_of_rounding
from gshard.naming.argument_names import ArrayName, Path, argument_names, common_name, equal_layers, module_of

GRADIENT, UPDATE = "gradient of ", "update of "


class ArrayNames:
    """Names for the arrays of one program."""

    def __init__(self, program: Program, called: Sequence[ArrayName] = ()) -> None:
        self._producers = program.producers
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
        paths = {} if called else argument_names(kinds)
        called = called or [paths[name] for name in program.names]
        # the name of each argument
        self.arguments: dict[Value, ArrayName] = dict(zip(program.block.inputs, called, strict=True))
        self._gradients: set[Value] = set()
        self._constants: set[Value] = set()  # values that depend on no array: scales, zeros, sums that begin as zeros
        self._find_gradients(program.block)
        # Values that lead to the next value of an argument, or of several: the arguments.
        self._updated: dict[Value, tuple[Value, ...]] = {}
        self._returned: dict[Value, ArrayName] = {}  # gradients that lead to another result: its name
        self._find_updates(program)
        self._equal_layers = equal_layers(dict.fromkeys(self._scopes.values()), same_inside=False)

    @staticmethod
    def of_devices(block: Block, program: Program, names: ArrayNames | None = None) -> ArrayNames:
        """Names for the arrays of a per-device program. Its arguments have the same names as those of ``program``."""
        whole = ArrayNames(program) if names is None else names
        called = [whole.arguments[v] for v in program.block.inputs]
        constants = len(block.inputs) - len(called)  # the first inputs are the partitioner's tables of device positions
        block = dataclasses.replace(block, inputs=block.inputs[constants:])
        return ArrayNames(dataclasses.replace(program, block=block), called)

    def array(self, v: Value | None) -> ArrayName:
        """The name of an array; empty for a value that is not in the program."""
        if v is None:
            return ArrayName()
        if (root := self._roots.get(v)) is not None:
            return common_name([self.arguments[x] for x in self._arguments_of(root)])
        if (arguments := self._updated.get(v)) is not None:
            prefix = GRADIENT if v in self._gradients else UPDATE
            name = common_name([self.arguments[x] for x in arguments])
            return ArrayName(prefix + name.text, prefix + name.alike)
        if v in self._returned:
            return self._returned[v]
        text = self._operation_of(v)
        return ArrayName(text, text)

    def moved(self, c: Collective) -> ArrayName:
        """The name of what a collective moves: inside an equation, of those operands that have its dtype and rank."""
        if c.value is not None or c.cause is None:
            return self.array(c.value)
        arrays = sorted((x for x in c.cause.inputs if isinstance(x, Value)), key=lambda x: -x.bytes)
        like = [x for x in arrays if _form(type_text(x)) == _form(c.shape)]
        names = [name for name in map(self.array, like) if name.text]
        return common_name([*dict.fromkeys(names)]) if names else ArrayName()

    def is_named(self, v: Value | None) -> bool:
        """Whether the name of an array contains the path of an argument or a result."""
        return v in self._roots or v in self._updated or v in self._returned

    def module(self, e: Equation | None) -> ArrayName:
        """The module of the model that contains an equation, from named scopes: ``decoder/layers_0/mlp``."""
        path = () if e is None else self._scopes.get(e) or scopes_of(e.source_info)
        return ArrayName("/".join(path), "/".join(self._equal_layers.get(path, path)))

    def module_or_weight(self, e: Equation) -> ArrayName:
        """The same; without named scopes the module whose weight is an operand of the equation."""
        return module_of(self.module(e), (self.array(v) for v in e.inputs if isinstance(v, Value) and v in self._roots))

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
            v = next(iter(made_inside(e, v)), v) if e.blocks else source_of(e, v) or v
        e = self._producers.get(v)
        if e is None:
            return ""
        return f"{e.name}, backward" if e in self._backward else e.name

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

    def _find_updates(self, program: Program) -> None:
        """Finds the values that lead to a result, and the argument that the result replaces in the next step.

        This is the nearest argument that elementwise equations combine into the result. A gradient belongs to a weight
        or a bias, although it is also added to moments, which nothing but updates reads. Other values belong to the
        nearest one. A gradient that is combined with no argument has the path of the result.
        """
        candidates: dict[Value, list[tuple[int, Value]]] = {}  # for each value: the distances of arguments
        for result, name in zip(program.block.outputs, _results(program), strict=True):
            if not isinstance(result, Value) or not result.shape or result in self._roots:
                continue
            distances, nearest = self._values_before(result)
            for v, distance in distances.items():
                if nearest is not None:
                    candidates.setdefault(v, []).append((distance, nearest))
                elif v in self._gradients:
                    self._returned.setdefault(v, name)
        read = self._read_besides(candidates.keys())
        for v, rows in candidates.items():
            is_gradient = v in self._gradients
            ranks = [(is_gradient and argument not in read, distance) for distance, argument in rows]
            first = (argument for rank, (_, argument) in zip(ranks, rows, strict=True) if rank == min(ranks))
            self._updated[v] = tuple(dict.fromkeys(first))

    def _read_besides(self, updates: Collection[Value]) -> set[Value]:
        """The arguments that equations read which compute none of these values: weights and biases, but not moments."""
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
            if e in self._backward:
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
            if e.blocks:
                operands = made_inside(e, v)
            elif (source := source_of(e, v)) is not None:
                operands = [source]
            else:
                operands = [x for x in e.inputs if isinstance(x, Value) and x.shape == v.shape and is_elementwise(e)]
            queue += [(x, distance + 1) for x in operands]
        return distances, nearest


def _form(array_type: str) -> tuple[str, int]:
    """The dtype and the number of dimensions of an array, from its type as text."""
    return array_type.partition("[")[0], array_type.count(",")


def _results(program: Program) -> list[ArrayName]:
    """The names of the results: their paths, such as ``result/params/w``."""
    tree, outputs = program.out_tree, program.block.outputs
    names = [f"result[{i}]" for i in range(len(outputs))]
    with contextlib.suppress(Exception):  # of a class of the user that accepts only arrays
        leaves = [] if tree is None else jax.tree.unflatten(tree, [0] * tree.num_leaves)
        paths = [f"result{jax.tree_util.keystr(keys)}" for keys, _ in jax.tree_util.tree_leaves_with_path(leaves)]
        names = [*paths, *names[len(paths) :]][: len(outputs)]
    found = argument_names({name: (v.shape, v.dtype) for name, v in zip(names, outputs, strict=True)})
    return [found[name] for name in names]


def made_inside(e: Equation, result: Value) -> list[Value]:
    """The values that the bodies of a region make of a result; of a loop's carry, that of the last iteration."""
    from_outside = {result, *(edge.inner for edge in e.edges if edge.outer is result)}
    inside = dict.fromkeys(edge.inner for edge in e.edges if edge.outer in from_outside)
    return [v for v in inside if all(v not in body.inputs for body in e.blocks)]


def source_of(e: Equation, result: Value) -> Value | None:
    """The operand that a result is another form of; None if the equation computes new values."""
    sources = in_another_form(e)
    return sources[e.outputs.index(result)] if sources else None


def in_another_form(e: Equation) -> tuple[Value | None, ...]:
    """For each result, the operand that the equation casts, reshapes, slices or sends; () if it computes new values."""
    if e.rule is None:
        return ()
    if e.rule.passes or (e.name in KINDS and len(e.inputs) == len(e.outputs)):
        return tuple(x if isinstance(x, Value) else None for x in e.inputs)
    arrays = [(i, x) for i, x in enumerate(e.inputs) if isinstance(x, Value) and x.shape]
    if len(arrays) != 1:
        return ()
    if any(f.kind == REDUCE and f.size > 1 and f.monoid != "pick" for f in e.rule.factors):
        return ()
    ((i, source),) = arrays
    monoids = [monoid for monoid, operands in e.rule.linear if operands == {i}]
    keeps_values = "add" in monoids or (len(e.inputs) == 1 and monoids) or e.mark is not None
    return (source,) * len(e.outputs) if keeps_values else ()


def joined_by(e: Equation) -> list[Value]:
    """The arrays that an equation puts beside each other; none if it does something else."""
    arrays = {i: x for i, x in enumerate(e.inputs) if isinstance(x, Value) and x.shape}
    size = sum(math.prod(x.shape) for x in arrays.values())
    is_whole = len(e.outputs) == 1 and len(arrays) > 1 and size == math.prod(e.outputs[0].shape)
    return [*arrays.values()] if is_whole and adds_in(e, {*arrays}) else []


def adds_in(e: Equation, operands: set[int]) -> bool:
    """Whether an equation is linear in these operands together."""
    return e.rule is not None and any(monoid == "add" and operands <= positions for monoid, positions in e.rule.linear)


def is_elementwise(e: Equation) -> bool:
    """Whether each element of the result depends on one element of each operand. Operands may be broadcast."""
    if e.rule is None or len(e.outputs) != 1 or not e.rule.known:
        return False
    (result,) = e.rule.results
    for x, dims in zip(e.inputs, e.rule.operands, strict=True):
        if not x.shape:
            continue
        if len(dims) != len(result) or any(dim and dim != other for dim, other in zip(dims, result, strict=True)):
            return False
    return True
