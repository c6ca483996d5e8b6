"""Dimension classes: finds which dimensions of a program are the same.

An equation says so of the dimensions of its operands and results that one factor runs over: the columns of ``x`` and
the rows of ``w`` in ``x @ w``. The closure of that over a whole program leaves few classes, each of them one thing that
people have a name for: the batch, the length, the vocabulary. A few names, of some arguments say, then name all.

A dimension that is a product of others (``(batch length)`` of a reshape) is a class of its own: that of all products
of the same classes, and what is taken apart in the same sizes has the same factors. A loop runs over one dimension,
that of all it takes or makes slice by slice.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gshard.core.program import Block, Equation, Program, Value
from gshard.core.rule import Dims, Rule

SHOWN = 4  # arguments of a class


@dataclasses.dataclass(frozen=True, slots=True)
class DimensionClass:
    """Dimensions that are the same.

    Attributes:
        label: the name that it was given, or a letter.
        names: all names that it was given; more than one contradict each other.
        size: of most of its members.
        sizes: of all of them, the largest first: operators such as slices keep a dimension and change its size.
        arguments: path and position of dimensions of arguments.
        values: how many values of the program have such a dimension.
        product: labels of the classes that it is a product of, major to minor; () if of none.
        twice: values that have it twice, as text: the scores of self-attention meet the length with itself.
    """

    label: str
    names: tuple[str, ...]
    size: int
    sizes: tuple[int, ...]
    arguments: tuple[tuple[str, int], ...]
    values: int
    product: tuple[str, ...]
    twice: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The dimensions of a program; print it.

    Attributes:
        name: the function.
        classes: most used first; dimensions of size 1 are in none.
        arguments: for each argument, by its path, a word for each dimension: what ``names=`` of ``jit`` takes. The
            second of two dimensions that are the same has a prime, ``length'``, which no row of a layout mentions.
        labels: the same for each value of the program.
    """

    name: str
    classes: tuple[DimensionClass, ...]
    arguments: Mapping[str, str]
    labels: Mapping[Value, tuple[str, ...]] = dataclasses.field(repr=False)

    def __getitem__(self, label: str) -> DimensionClass:
        for found in self.classes:
            if found.label == label:
                return found
        raise KeyError(f"no class is called {label!r}; they are {', '.join(c.label for c in self.classes)}")

    def __str__(self) -> str:
        lines = [f"dimensions of {self.name}: {len(self.classes)} classes"]
        rows = [
            (c.label, "x".join(c.product), _sizes(c), f"{c.values} value{'s' * (c.values != 1)}", _arguments(c))
            for c in self.classes
        ]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, c in zip(rows, self.classes, strict=True):
            cells = [f"{cell:<{w}}" for cell, w in zip(row[:-1], wide, strict=False) if w]
            lines.append(f"  {'  '.join(cells)}  {row[-1]}".rstrip())
            if len(c.names) > 1:
                lines.append(f"    called {' and '.join(c.names)}, which are the same dimension")
            if c.twice:
                more = f" and {len(c.twice) - 1} more" if len(c.twice) > 1 else ""
                lines.append(f"    {c.label} and {c.label}' in one value: {c.twice[0]}{more}")
        return "\n".join(lines)


def dimensions_of(program: Program, paths: Sequence[str] = ()) -> Dimensions:
    """The classes of the dimensions of a program.

    Args:
        program: with the names that its values have (``Program.named``).
        paths: of its arguments; by default their names.
    """
    classes = _Classes()
    _read(program.block, classes)
    classes.close()
    given: dict[Hashable, dict[str, None]] = {}
    for named in program.named:
        for d, name in enumerate(named.names.placed):
            if name is not None:
                given.setdefault(classes.root((named.value, d)), {})[name] = None

    members: dict[Hashable, list[tuple[Value, int]]] = {}
    for value in program.block.values():
        for d, size in enumerate(value.shape):
            if size != 1:
                members.setdefault(classes.root((value, d)), []).append((value, d))
    count = {root: len({v for v, _ in found}) for root, found in members.items()}
    ranked = sorted(members, key=lambda root: -count[root])  # stable: as they are met
    label = _labels(ranked, given)
    labels = {v: _with_primes(v, classes, label) for v in program.block.values()}
    inputs = program.block.inputs[len(program.captured) :]
    named_inputs = dict(zip(inputs, paths or program.names[len(program.captured) :], strict=True))
    producers = {v: e for e in program.block.walk() for v in e.outputs}

    def described(root: Hashable) -> DimensionClass:
        found = members[root]
        sizes = Counter(v.shape[d] for v, d in found)
        twice = [v for v, n in Counter(v for v, _ in found).items() if n > 1]
        product = classes.product_of(root)
        return DimensionClass(
            label[root],
            tuple(given.get(root, ())),
            max(sizes, key=lambda size: (sizes[size], size)),
            tuple(sorted(sizes, reverse=True)),
            tuple((named_inputs[v], d) for v, d in found if v in named_inputs),
            count[root],
            tuple(label.get(classes.root(part), "1") for part in product),
            tuple(_text(v, labels[v], producers.get(v), named_inputs.get(v, "")) for v in twice),
        )

    return Dimensions(
        program.name,
        tuple(map(described, ranked)),
        {path: " ".join(labels[v]) for v, path in named_inputs.items()},
        labels,
    )


def of_equal_layers(found: Dimensions) -> Dimensions:
    """The same with one label for what equal layers have: the hidden dimension of each is a class of its own.

    Classes become one where their arguments are the same but for numbers that change alike in all of them
    (``_is_another_layer``), sizes are equal too, users gave them at most one name, and no value has both.
    """
    together = {pair for words in found.labels.values() for pair in itertools.permutations(set(words), 2)}
    groups: dict[Hashable, list[list[DimensionClass]]] = {}
    for c in found.classes:
        places = _places(c.arguments)
        key = tuple((path, d) for path, d, _ in places) or c.label, c.size, c.product == ()
        alike = groups.setdefault(key, [])
        for group in alike:
            names = {name for one in (*group, c) for name in one.names}
            separate = not any((one.label, c.label) in together for one in group)
            if len(names) < 2 and separate and _is_another_layer(_places(group[0].arguments), places):
                group.append(c)
                break
        else:
            alike.append([c])
    now: dict[str, str] = {}
    classes = []
    for group in itertools.chain(*groups.values()):
        first = next((c for c in group if c.names), group[0])
        now |= {c.label: first.label for c in group}
        merged = dataclasses.replace(
            first,
            sizes=tuple(sorted({size for c in group for size in c.sizes}, reverse=True)),
            arguments=tuple(argument for c in group for argument in c.arguments),
            values=sum(c.values for c in group),
            twice=tuple(text for c in group for text in c.twice),
        )
        classes.append(merged)
    renamed = {v: tuple(_renamed(word, now) for word in words) for v, words in found.labels.items()}
    arguments = {path: " ".join(_renamed(w, now) for w in words.split()) for path, words in found.arguments.items()}
    ranked = sorted(classes, key=lambda c: -c.values)
    return Dimensions(found.name, tuple(ranked), arguments, renamed)


def _renamed(word: str, now: Mapping[str, str]) -> str:
    label = word.rstrip("'")
    return now.get(label, label) + word[len(label) :]


_Place = tuple[str, int, tuple[str, ...]]  # a path with * for its numbers, the dimension, and the numbers


def _places(arguments: Sequence[tuple[str, int]]) -> list[_Place]:
    """Where a class is in the arguments, in an order that the layer does not change."""
    found = []
    for path, d in arguments:
        words = path.split("/")
        numbers = tuple(word for word in words if word.isdecimal())
        found.append(("/".join("*" if word.isdecimal() else word for word in words), d, numbers))
    return sorted(found, key=lambda place: (*place[:2], tuple(map(int, place[2]))))


def _is_another_layer(one: Sequence[_Place], other: Sequence[_Place]) -> bool:
    """Whether two classes at the same paths differ by the same numbers in all of them.

    A weight and its moments are at different depths: ``state/0/blocks/3/up``, ``state/1/adam/0/mu/blocks/3/up``.
    """
    changes = {
        tuple((a, b) for a, b in zip(mine, others, strict=True) if a != b)
        for (_, _, mine), (_, _, others) in zip(one, other, strict=True)
    }
    return len(changes) == 1 and changes != {()}


class _Classes:
    """Dimensions and factors, joined where they are the same; a dimension may be a product of factors."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}
        self.products: list[tuple[Hashable, tuple[Hashable, ...], tuple[int, ...]]] = []

    def root(self, x: Hashable) -> Hashable:
        path = []
        while (above := self.parent.get(x, x)) != x:
            path.append(x)
            x = above
        for passed in path:
            self.parent[passed] = x
        return x

    def join(self, a: Hashable, b: Hashable) -> bool:
        a, b = self.root(a), self.root(b)
        if a != b:
            self.parent[b] = a
        return a != b

    def array(self, value: Any, dims: Dims, rule: Rule, of: Hashable) -> None:
        """One operand or result of an equation."""
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

    def product_of(self, root: Hashable) -> tuple[Hashable, ...]:
        return next((parts for whole, parts, _ in self.products if self.root(whole) == root), ())


def _read(block: Block, classes: _Classes) -> None:
    for e in block.walk():
        if e.rule is not None:
            for x, dims in zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True):
                classes.array(x, dims, e.rule, e)
        for edge in e.edges:
            classes.array(edge.outer, edge.rule.operands[0], edge.rule, edge_key := (e, edge.outer, edge.inner))
            classes.array(edge.inner, edge.rule.results[0], edge.rule, edge_key)
            for d in range(edge.stacked):
                classes.join((e, "round", d), (edge.outer, d))


def _labels(roots: Iterable[Hashable], given: Mapping[Hashable, Mapping[str, None]]) -> dict[Hashable, str]:
    taken = {name for names in given.values() for name in names}
    free = (letter for letter in _letters() if letter not in taken)
    return {root: next(iter(given[root])) if root in given else next(free) for root in roots}


def _letters() -> Iterator[str]:
    for n in itertools.count():
        yield from (f"{letter}{n or ''}" for letter in string.ascii_lowercase)


def _with_primes(v: Value, classes: _Classes, label: Mapping[Hashable, str]) -> tuple[str, ...]:
    words: list[str] = []
    for d, size in enumerate(v.shape):
        word = "_" if size == 1 else label[classes.root((v, d))]
        while word != "_" and word in words:
            word += "'"
        words.append(word)
    return tuple(words)


def _text(v: Value, words: tuple[str, ...], producer: Equation | None, path: str) -> str:
    where = path or (f"{producer.name} at {producer.line}" if producer is not None else "inside of a loop")
    return f"{v.dtype_name}[{','.join(words)}] {where}"


def _sizes(c: DimensionClass) -> str:
    others = [str(size) for size in c.sizes if size != c.size]
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return f"{c.size} (also {shown})" if others else str(c.size)


def _arguments(c: DimensionClass) -> str:
    shown = [f"{path}.{d}" for path, d in c.arguments[:SHOWN]]
    return ", ".join(shown) + (f", ... {len(c.arguments) - SHOWN} more" if len(c.arguments) > SHOWN else "")
