"""Finds the dimensions of a program that are the same, and joins them to classes: those with the same factor in an
equation, such as the columns of ``x`` and the rows of ``w`` in ``x @ w``. Products of dimensions, such as ``(batch
length)`` after a reshape, have their own classes; equal products that are split in equal sizes have the same factors.
The iterations of a loop are one dimension, with the stacked dimensions of all its operands and results.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from gshard.core.program import Block, Program, Value
from gshard.core.rule import Dims, Rule, UnionFind
from gshard.naming.argument_names import path_of_name


@dataclasses.dataclass(frozen=True, slots=True)
class DimensionClass:
    """Dimensions that are the same."""

    label: str  # the user's name, or a letter
    names: tuple[str, ...]  # all names that the user gave; if there are several, they contradict each other
    size: int  # the most frequent size
    arguments: tuple[tuple[str, int], ...]  # path and position of the dimensions of arguments
    values: int  # the number of values with such a dimension
    is_product: bool  # whether it is a product of other dimensions, such as ``(batch length)`` after a reshape


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The dimensions of a program."""

    classes: tuple[DimensionClass, ...]  # the most frequent first. Dimensions of size 1 are in no class.
    labels: Mapping[
        Value, tuple[str, ...]
    ]  # for each value the labels of its dimensions; the second of one has a prime


def dimensions_of(program: Program) -> Dimensions:
    """The classes of the dimensions of a program."""
    classes = _Classes()
    _read(program.block, classes)
    classes.close()
    user_names: dict[Hashable, dict[str, None]] = {}
    for named in program.named:
        for d, name in enumerate(named.names.placed):
            if name is not None:
                user_names.setdefault(classes.root((named.value, d)), {})[name] = None

    members: dict[Hashable, list[tuple[Value, int]]] = {}
    for value in program.block.values():
        for d, size in enumerate(value.shape):
            if size != 1:
                members.setdefault(classes.root((value, d)), []).append((value, d))
    count = {root: len({v for v, _ in dims}) for root, dims in members.items()}
    ranked = sorted(members, key=lambda root: -count[root])  # stable: equal counts keep the order of the program
    taken = {name for names in user_names.values() for name in names}
    letters = (f"{letter}{n or ''}" for n in itertools.count() for letter in string.ascii_lowercase)
    free = (letter for letter in letters if letter not in taken)
    label = {root: next(iter(user_names[root])) if root in user_names else next(free) for root in ranked}
    labels = {v: _with_primes(v, classes, label) for v in program.block.values()}
    inputs = program.block.inputs[len(program.captured) :]
    names = program.names[len(program.captured) :]
    named_inputs = dict(zip(inputs, map(path_of_name, names), strict=True))
    products = {classes.root(whole) for whole, *_ in classes.products}

    def class_of(root: Hashable) -> DimensionClass:
        dims = members[root]
        sizes = Counter(v.shape[d] for v, d in dims)
        return DimensionClass(
            label=label[root],
            names=tuple(user_names.get(root, ())),
            size=max(sizes, key=lambda size: (sizes[size], size)),
            arguments=tuple((named_inputs[v], d) for v, d in dims if v in named_inputs),
            values=count[root],
            is_product=root in products,
        )

    return Dimensions(tuple(map(class_of, ranked)), labels)


def of_equal_layers(dimensions: Dimensions) -> Dimensions:
    """The dimensions, with one class for corresponding dimensions of equal layers.

    Without this, the hidden dimension of each layer has its own class. Classes are merged if their arguments have the
    same paths except for the number of the layer (``_is_another_layer``), their sizes are equal, the user gave them at
    most one name, and no value has both.
    """
    in_one_value = {pair for words in dimensions.labels.values() for pair in itertools.permutations(set(words), 2)}
    groups: dict[Hashable, list[list[DimensionClass]]] = {}
    for c in dimensions.classes:
        places = _places(c.arguments)
        key = tuple((path, d) for path, d, _ in places) or c.label, c.size, c.is_product
        candidates = groups.setdefault(key, [])
        for group in candidates:
            names = {name for member in (*group, c) for name in member.names}
            are_separate = not any((member.label, c.label) in in_one_value for member in group)
            if len(names) < 2 and are_separate and _is_another_layer(_places(group[0].arguments), places):
                group.append(c)
                break
        else:
            candidates.append([c])
    new_labels: dict[str, str] = {}
    classes = []
    for group in itertools.chain(*groups.values()):
        first = next((c for c in group if c.names), group[0])
        new_labels |= {c.label: first.label for c in group}
        merged = dataclasses.replace(
            first,
            arguments=tuple(argument for c in group for argument in c.arguments),
            values=sum(c.values for c in group),
        )
        classes.append(merged)
    labels = {v: tuple(_renamed(word, new_labels) for word in words) for v, words in dimensions.labels.items()}
    ranked = sorted(classes, key=lambda c: -c.values)
    return Dimensions(tuple(ranked), labels)


def _renamed(word: str, new_labels: Mapping[str, str]) -> str:
    """A label with its primes, after the label changes."""
    label = word.rstrip("'")
    return new_labels.get(label, label) + word[len(label) :]


_Place = tuple[str, int, tuple[str, ...]]  # a path with * for its numbers, the dimension, and the numbers


def _places(arguments: Sequence[tuple[str, int]]) -> list[_Place]:
    """The places of a class in the arguments, in an order that does not depend on the layer."""
    places = []
    for path, d in arguments:
        words = path.split("/")
        numbers = tuple(word for word in words if word.isdecimal())
        places.append(("/".join("*" if word.isdecimal() else word for word in words), d, numbers))
    return sorted(places, key=lambda place: (*place[:2], tuple(map(int, place[2]))))


def _is_another_layer(a: Sequence[_Place], b: Sequence[_Place]) -> bool:
    """Whether two classes at the same paths differ in the same numbers at all places.

    A weight and its moments are at different depths: ``state/0/blocks/3/up``, ``state/1/adam/0/mu/blocks/3/up``.
    """
    changes = {
        tuple((m, n) for m, n in zip(numbers_a, numbers_b, strict=True) if m != n)
        for (_, _, numbers_a), (_, _, numbers_b) in zip(a, b, strict=True)
    }
    return len(changes) == 1 and changes != {()}


class _Classes(UnionFind[Hashable]):
    """Classes of dimensions and factors. A dimension may be a product of factors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Hashable, tuple[Hashable, ...], tuple[int, ...]]] = []

    def array(self, value: Any, dims: Dims, rule: Rule, of: Hashable) -> None:
        """Joins the dimensions of an operand or result with the factors of the equation ``of``."""
        if not isinstance(value, Value):
            return
        for d, factors in enumerate(dims):
            real = [f for f in factors if rule.factors[f].size != 1]
            if len(real) == 1:
                self.join((value, d), (of, real[0]))
            elif real:
                parts = tuple((of, f) for f in real)
                self.products.append(((value, d), parts, tuple(rule.factors[f].size for f in real)))

    def close(self) -> None:
        """Joins the factors of one dimension that have the same sizes, and products of the same factors."""
        changed = True
        while changed:
            changed = False
            parts_of: dict[Hashable, tuple[Hashable, ...]] = {}
            whole_of: dict[Hashable, Hashable] = {}
            for whole, parts, sizes in self.products:
                for a, b in zip(parts_of.setdefault((self.root(whole), sizes), parts), parts, strict=True):
                    changed |= self.join(a, b)
                changed |= self.join(whole_of.setdefault((*map(self.root, parts), sizes), whole), whole)


def _read(block: Block, classes: _Classes) -> None:
    """Joins the dimensions of all equations, and of the edges of regions."""
    for e in block.walk():
        if e.rule is not None:
            for x, dims in zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True):
                classes.array(x, dims, e.rule, e)
        for edge in e.edges:
            edge_key = (e, edge.outer, edge.inner)
            classes.array(edge.outer, edge.rule.operands[0], edge.rule, edge_key)
            classes.array(edge.inner, edge.rule.results[0], edge.rule, edge_key)
            for d in range(edge.stacked):
                classes.join((e, "iteration", d), (edge.outer, d))


def _with_primes(v: Value, classes: _Classes, label: Mapping[Hashable, str]) -> tuple[str, ...]:
    words: list[str] = []
    for d, size in enumerate(v.shape):
        word = "_" if size == 1 else label[classes.root((v, d))]
        while word != "_" and word in words:
            word += "'"
        words.append(word)
    return tuple(words)
