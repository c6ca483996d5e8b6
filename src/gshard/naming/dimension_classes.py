"""Finds the dimensions of a program that are the same, and joins them to classes: those with the same factor in an
equation, such as the columns of ``x`` and the rows of ``w`` in ``x @ w``. Products of dimensions, such as ``(batch
length)`` after a reshape, have their own classes; equal products that are split in equal sizes have the same factors.
The iterations of a loop are one dimension, with the stacked dimensions of all its operands and results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from gshard.core.program import Program, Value
from gshard.core.rule import Dims, Rule, UnionFind
from gshard.naming.argument_names import path_of_name


class DimensionClasses(UnionFind[Hashable]):
    """The classes of the dimensions ``(value, d)`` and of the factors of a program. A dimension may be a product."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        # dimensions that are products of factors: the dimension, its factors, and their sizes
        self.products: list[tuple[Hashable, tuple[Hashable, ...], tuple[int, ...]]] = []
        for e in program.block.walk():
            if e.rule is not None:
                for x, dims in zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True):
                    self._read(x, dims, e.rule, e)
            for edge in e.edges:
                edge_key = (e, edge.outer, edge.inner)
                self._read(edge.outer, edge.rule.operands[0], edge.rule, edge_key)
                self._read(edge.inner, edge.rule.results[0], edge.rule, edge_key)
                for d in range(edge.stacked):
                    self.join((e, "iteration", d), (edge.outer, d))
        self._join_products()

    def _read(self, value: Any, dims: Dims, rule: Rule, of: Hashable) -> None:
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

    def _join_products(self) -> None:
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


def most_common_dimension(program: Program) -> dict[int, int]:
    """The positions, by argument, of the dimension that most bytes of arguments have and that is no product.

    Arguments are counted without captured arrays. Corresponding dimensions of equal layers count as one: those at the
    same paths of arguments, except for numbers in the paths, if no argument has two of them.
    """
    classes, first = DimensionClasses(program), len(program.captured)
    products = {classes.root(whole) for whole, *_ in classes.products}
    arguments = program.block.inputs[first:]
    dims_of: dict[Hashable, dict[int, int]] = {}
    for i, v in enumerate(arguments):
        for d, size in enumerate(v.shape):
            if size != 1 and (root := classes.root((v, d))) not in products:
                dims_of.setdefault(root, {}).setdefault(i, d)
    layers: dict[Hashable, list[Hashable]] = {}  # classes that only differ in the layer
    for root, dims in dims_of.items():
        places = {(_without_numbers(program.names[first + i]), d, arguments[i].shape[d]) for i, d in dims.items()}
        layers.setdefault(frozenset(places), []).append(root)
    uses = Counter(classes.root((v, d)) for v in program.block.values() for d in range(len(v.shape)))
    best: tuple[int, int, dict[int, int]] = 0, 0, {}
    for roots in layers.values():
        are_separate = sum(len(dims_of[root]) for root in roots) == len({i for root in roots for i in dims_of[root]})
        for some in [roots] if are_separate else [[root] for root in roots]:
            dims = {i: d for root in some for i, d in dims_of[root].items()}
            found = sum(arguments[i].bytes for i in dims), sum(uses[root] for root in some), dims
            best = max(best, found, key=lambda one: one[:2])
    return best[2]


def _without_numbers(name: str) -> str:
    return "/".join("*" if word.isdecimal() else word for word in path_of_name(name).split("/"))
