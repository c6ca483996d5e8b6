"""Defines rules: the factors of an equation, how splits of factors shard operands and results, and the consequences."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gshard.core.mesh import Atoms, Mesh
from gshard.core.sharding import Sharding

PARALLEL = "parallel"
REDUCE = "reduce"
COMMUNICATE = "communicate"
REPLICATE = "replicate"

_T = TypeVar("_T", bound=Hashable)
Dims = tuple[tuple[int, ...], ...]
Way = tuple[str, frozenset[int]]  # a way in which unreduced parts pass an equation: the monoid and the operands

# "pick" combines looked-up elements: one device holds the element, all others hold zero bits.
MONOIDS = ("add", "max", "min", "mul", "or", "and", "xor", "pick")


def moves(*positions: int) -> list[tuple[str, tuple[int, ...]]]:
    """The value of ``linear`` for a rule that only moves elements of these operands: parts of any monoid may pass."""
    return [(monoid, positions) for monoid in MONOIDS]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Elements of an operand along one dimension: ``count`` elements with step ``step`` from ``start`` on.

    If the operand is a scalar, the span consists of copies of the scalar.
    """

    operand: int
    start: int
    count: int
    step: int = 1


Index = tuple[tuple[Span, ...], ...]
"""For each dimension of a result its spans, in order; () for a dimension along which nothing moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an equation.

    A ``communicate`` factor may stand for dimensions of different sizes (the operand and the result of a slice). Each
    dimension is split into parts of its own size, and ``size`` is the largest size. The same holds for a ``reduce``
    factor of a rule that masks itself (a long convolution kernel and its operand); there ``size`` is the size of the
    summed dimension.
    """

    size: int  # the global size
    kind: str = PARALLEL  # ``parallel``, ``reduce``, ``communicate`` or ``replicate``
    monoid: str | None = None  # the monoid that combines parts, for a ``reduce`` factor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Manual:
    """The role of an equation in a ``shard_map`` that is manual over some axes and automatic over others."""

    # ``enter``: whole arrays become parts; ``leave``: parts become whole arrays; ``inside``: parts stay parts
    step: str
    # ``atoms(mesh)`` returns the atoms of the manual axes. No value inside is split over them.
    atoms: Callable[..., frozenset[str]]
    # ``pinned(mesh)`` returns the factors that these atoms split at the boundary. Other factors are free.
    pinned: Callable[..., dict[int, tuple[str, ...]]]
    # ``differ(mesh)`` returns the atoms along which results differ although operands do not
    differ: Callable[..., frozenset[str]] = lambda mesh: frozenset()
    # ``equal(mesh)`` returns the atoms along which results are equal although operands are not
    equal: Callable[..., frozenset[str]] = lambda mesh: frozenset()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The factors of one equation, and how the equation runs on shards. Compared by identity.

    Attributes:
        factors: all factors; dimensions refer to them by position.
        operands: for each dimension of each operand its factors, major to minor (none for a broadcast dimension).
        results: the same for the results.
        local: ``local(shards, *arrays) -> results`` runs the equation on one device's parts; None runs the same
            primitive with the same parameters.
        sends: ``sends(mesh, split)`` returns the bytes that each device sends inside ``local``, if this is faster than
            to trace ``local`` (``comm.shards.sent_inside``); otherwise None.
        flops: floating-point operations of the whole equation.
        masks_itself: whether ``local`` handles padding along split reduce factors. Otherwise gshard first fills the
            padding of operands with the identity of the monoid.
        known: False for the default rule of a primitive without a rule.
        fixed: ``fixed(mesh)`` returns the only possible split of the equation; None if there is a choice. A manual
            region has a fixed split.
        linear: the ways in which unreduced parts may pass: a monoid, and the operands that must all be unreduced over
            the same atoms. Then the combined parts of the results are the results, also if parts are infinite, or so
            large that scaling them overflows (``language.traits``). Way ``k`` has key ``-1 - k`` in a split.
        finite: the ways in which parts may also pass if the user states that they are finite (``permitting``).
        rounded: the ways in which finite parts may pass if, besides, each of them may be rounded.
        over: for each way in ``linear`` the mesh axes to which it is limited; None for any. Ways beyond the end of this
            tuple are not limited.
        component: a number for each factor. Factors of unrelated arrays (the operands of a barrier) have different
            numbers. Only factors of one component compete for atoms.
        part: ``part(shards, *arrays) -> result`` runs the equation on one part of a factor, while the network moves the
            other parts (``core.plan``). Parts of a sum may have a wider dtype. None if the equation cannot run so.
        passes: whether the results are the operands, as for a barrier.
        sums: whether picked values that pass become parts of a sum.
        allowed: ``allowed(mesh, split)`` returns whether the equation can run with a split. None if the factors alone
            determine this.
        on_mesh: ``on_mesh(mesh)`` returns the rule that replaces this rule on a mesh; None if it is the same for all.
        why: the reason why nothing can be split, if ``known`` is False for another reason than a missing rule.
        manual: the role of an equation at the boundary of a ``shard_map`` with manual axes, or of one that
            communicates inside it.
        index: for each result the spans of its elements, if the equation only moves elements along dimensions without
            changing their order; None otherwise. If several dimensions move, all elements come from one array.
        products: for an equation that is a kernel of its own, the part of ``flops`` that are matrix products; XLA fuses
            no other equation into it. None if XLA makes the kernels.
        groups: the number of row groups of different sizes. A compiler without a kernel for groups multiplies all rows
            by the matrix of each group (``Compiler.multiplies_groups``).
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    local: Callable[..., Any] | None = None
    flops: int = 0
    masks_itself: bool = False
    known: bool = True
    sends: Callable[..., int] | None = None
    component: tuple[int, ...] = ()
    fixed: Callable[..., dict[int, tuple[str, ...]]] | None = None
    linear: tuple[Way, ...] = ()
    finite: tuple[Way, ...] = ()
    rounded: tuple[Way, ...] = ()
    over: tuple[frozenset[str] | None, ...] = ()
    part: Callable[..., Any] | None = None
    passes: bool = False
    sums: bool = False
    allowed: Callable[..., bool] | None = None
    on_mesh: Callable[..., Rule] | None = None
    why: str = ""
    manual: Manual | None = None
    index: tuple[Index, ...] | None = None
    products: int | None = None
    groups: int = 1

    def permitting(self, more: Iterable[tuple[Way, frozenset[str] | None]]) -> Rule:
        """The rule with additional ways in which parts may pass.

        Args:
            more: pairs of a way and the mesh axes to which it is limited (None for any axes). Ways that the rule
                already has are ignored.
        """
        linear = [*self.linear]
        over = [*self.over, *(None,) * (len(linear) - len(self.over))]
        for way, axes in more:
            if way not in linear:
                linear.append(way)
                over.append(axes)
        if len(linear) == len(self.linear):
            return self
        limits = tuple(over) if any(axes is not None for axes in over) else ()
        return dataclasses.replace(self, linear=tuple(linear), over=limits)

    @property
    def is_free(self) -> bool:
        """Whether the factors alone determine the possible splits: the equation is not part of a manual region."""
        return self.fixed is None and self.manual is None

    def after(self, monoid: str) -> str:
        """The monoid of the results if parts of this monoid pass."""
        return "add" if self.sums and monoid == "pick" else monoid

    @property
    def names(self) -> tuple[str, ...]:
        """A letter for each factor. Letters are assigned in the order of the factors in the text of the rule."""
        in_text = dict.fromkeys(f for tensor in (*self.operands, *self.results) for dim in tensor for f in dim)
        others = [f for f in range(len(self.factors)) if f not in in_text]
        letters = {f: f"{string.ascii_lowercase[i % 26]}{i // 26 or ''}" for i, f in enumerate([*in_text, *others])}
        return tuple(letters[f] for f in range(len(self.factors)))

    def __str__(self) -> str:
        names = self.names

        def tensor(dims: Dims) -> str:
            parts = []
            for dim in dims:
                word = " ".join(names[f] for f in dim)
                parts.append(f"({word})" if len(dim) > 1 else word or "1")
            return " ".join(parts) or "()"

        text = f"{', '.join(map(tensor, self.operands))} -> {', '.join(map(tensor, self.results))}"
        for i, factor in enumerate(self.factors):
            if factor.kind == REDUCE:
                text += f"; {factor.monoid} over {names[i]}={factor.size}"
        for kind in (COMMUNICATE, REPLICATE):
            of_kind = [names[i] for i, f in enumerate(self.factors) if f.kind == kind]
            of_kind.sort(key=lambda name: (int(name[1:] or 0), name))
            text += f"; {kind} {' '.join(of_kind)}" if of_kind else ""
        return text


class RuleMaker:
    """Builds a rule: creates factors, and assembles them to the dimensions of operands and results.

    Each method that creates a factor returns a dimension of this factor. Several tensors may contain one dimension.
    """

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def factor(self, size: int, kind: str = PARALLEL, monoid: str | None = None) -> tuple[int, ...]:
        """A dimension that consists of a new factor."""
        self.factors.append(Factor(int(size), kind, monoid))
        return (len(self.factors) - 1,)

    def replicate(self, size: int) -> tuple[int, ...]:
        """A new dimension that cannot be split."""
        return self.factor(size, REPLICATE)

    def communicate(self, size: int) -> tuple[int, ...]:
        """A new dimension over which shards communicate inside ``local``."""
        return self.factor(size, COMMUNICATE)

    def parallel(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """New parallel dimensions of these sizes."""
        return [self.factor(n) for n in shape]

    def rule(
        self,
        operands: Sequence[Sequence[tuple[int, ...]]],
        results: Sequence[Sequence[tuple[int, ...]]],
        *,
        local: Callable[..., Any] | None = None,
        sends: Callable[..., int] | None = None,
        flops: int | None = None,
        linear: Iterable[tuple[str, Iterable[int]]] = (),
        finite: Iterable[tuple[str, Iterable[int]]] = (),
        index: Iterable[Index] | None = None,
        **others: Any,
    ) -> Rule:
        """The rule over the factors of this maker.

        Args:
            operands, results: the factors of each dimension of each tensor.
            local, sends: attributes of the rule.
            flops: floating-point operations; None means one operation for each element of the largest tensor.
            linear, finite, index: attributes of the rule, as any iterables.
            others: other attributes of the rule.
        """
        if flops is None:
            sizes = [math.prod(self.factors[f].size for dim in t for f in dim) for t in (*operands, *results)]
            flops = max(sizes, default=0)
        linear_ways = tuple((monoid, frozenset(positions)) for monoid, positions in linear)
        finite_ways = tuple((monoid, frozenset(positions)) for monoid, positions in finite)
        return Rule(
            tuple(self.factors),
            tuple(tuple(map(tuple, t)) for t in operands),
            tuple(tuple(map(tuple, t)) for t in results),
            local=local,
            sends=sends,
            flops=flops,
            component=_components(self.factors, (*operands, *results)),
            linear=linear_ways,
            finite=tuple(way for way in finite_ways if way not in linear_ways),
            index=None if index is None else tuple(index),
            **others,
        )


def _components(factors: Sequence[Factor], tensors: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """For each factor the smallest factor that is connected with it by common arrays.

    If parts are combined or communicated, all factors are in one component. For example, the atoms of a looked-up
    dimension concern every result, although the results do not have this dimension.
    """
    if any(factor.kind in (REDUCE, COMMUNICATE) for factor in factors):
        return (0,) * len(factors)
    classes = UnionFind[int]()
    for tensor in tensors:
        together = sorted({classes.root(f) for dim in tensor for f in dim})
        for f in together[1:]:
            classes.join(together[0], f)
    return tuple(map(classes.root, range(len(factors))))


class UnionFind(Generic[_T]):
    """Disjoint sets, each with a representative."""

    def __init__(self) -> None:
        self._parent: dict[_T, _T] = {}

    def root(self, x: _T) -> _T:
        """The representative of the set of ``x``."""
        while (parent := self._parent.get(x, x)) != x:
            self._parent[x] = x = self._parent.get(parent, parent)
        return x

    def join(self, a: _T, b: _T) -> bool:
        """Joins the set of ``b`` to that of ``a``, whose representative stays; returns whether they were different."""
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parent[b] = a
        return a != b


# Converts between splits of an equation (atoms of factors) and shardings of arrays (atoms of dimensions).

Split = dict[int, Atoms]


def project(dims: Dims, sharding: Sequence[Atoms], factors: Sequence[Factor], mesh: Mesh) -> Split:
    """The atoms that the sharding of an array assigns to each factor, as far as the laws allow."""
    sizes = mesh.atom_sizes
    split: Split = {}
    for dim, atoms in zip(dims, sharding, strict=True):
        if not atoms or not dim:
            continue
        if len(dim) == 1:
            if factors[dim[0]].kind != REPLICATE:
                split[dim[0]] = tuple(atoms)
            continue
        next_atom = 0
        for f in dim:
            if factors[f].kind == REPLICATE and factors[f].size > 1:
                break
            local_size = factors[f].size
            atoms_of_factor: list[str] = []
            while next_atom < len(atoms) and local_size > 1 and local_size % sizes[atoms[next_atom]] == 0:
                local_size //= sizes[atoms[next_atom]]
                atoms_of_factor.append(atoms[next_atom])
                next_atom += 1
            if atoms_of_factor:
                split[f] = tuple(atoms_of_factor)
            if local_size > 1:
                break
    return split


def place(dims: Dims, split: Mapping[int, Atoms]) -> tuple[Atoms, ...]:
    """The atoms of each dimension of an array under a split of the equation."""
    return tuple(
        [split.get(dim[0], ()) if len(dim) == 1 else tuple([a for f in dim for a in split.get(f, ())]) for dim in dims]
    )


def operand_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """The sharding of operand ``i`` under a split of the equation; it may be unreduced."""
    unreduced = {a: monoid for monoid, operands, atoms in passing(rule, split) if i in operands for a in atoms}
    return Sharding(place(rule.operands[i], split)).with_unreduced(unreduced)


def result_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """The sharding of result ``i`` under a split of the equation; it may be unreduced."""
    unreduced = {a: rule.after(monoid) for monoid, _, atoms in passing(rule, split) for a in atoms}
    for f, factor in enumerate(rule.factors):
        if factor.kind == REDUCE and not any(f in dim for dim in rule.results[i]):
            unreduced.update(dict.fromkeys(split.get(f, ()), factor.monoid or "add"))
    return Sharding(place(rule.results[i], split)).with_unreduced(unreduced)


def passing(rule: Rule, split: Mapping[int, Atoms]) -> Iterator[tuple[str, frozenset[int], Atoms]]:
    """The unreduced parts that pass an equation under a split: monoid, operands and atoms."""
    for way, (monoid, operands) in enumerate(rule.linear):
        if atoms := split.get(-1 - way):
            yield monoid, operands, atoms


def parts(split: Mapping[int, Atoms], mesh: Mesh) -> int:
    """The number of parts into which a split divides an equation."""
    return mesh.count([a for f, atoms in split.items() if f >= 0 for a in atoms])


def fits(dims: Dims, split: Mapping[int, Atoms], factors: Sequence[Factor], mesh: Mesh) -> bool:
    """Whether the parts of every dimension of an array are contiguous and equal under a split."""
    for dim in dims:
        if len(dim) < 2:
            continue
        major_is_complete = True  # whether all more major factors are split completely
        for f in dim:
            atoms = split.get(f, ())
            if atoms and (not major_is_complete or factors[f].size % mesh.count(atoms)):
                return False
            major_is_complete = major_is_complete and mesh.count(atoms) == factors[f].size
    return True


def is_valid(rule: Rule, split: Mapping[int, Atoms], mesh: Mesh) -> bool:
    """Whether an equation can run with a split.

    Each atom may occur once, replicated factors may have no atoms, and the split must fit every array. A rule may add
    conditions (``Rule.allowed``), and may limit the axes over which parts pass (``Rule.over``).
    """
    factor_atoms = [(rule.component[f], a) for f, atoms in split.items() if f >= 0 for a in atoms]
    if len(set(factor_atoms)) != len(factor_atoms):
        return False
    if any(split[f] and rule.factors[f].kind == REPLICATE for f in split if f >= 0):
        return False
    passing_atoms = [a for f, atoms in split.items() if f < 0 for a in atoms]
    if len(set(passing_atoms)) != len(passing_atoms) or set(passing_atoms) & {a for _, a in factor_atoms}:
        return False
    for way in range(len(rule.over)):
        atoms_of_way = split.get(-1 - way)
        if atoms_of_way and passable(rule, way, atoms_of_way, mesh) != atoms_of_way:
            return False
    if not all(fits(dims, split, rule.factors, mesh) for dims in (*rule.operands, *rule.results)):
        return False
    return rule.allowed is None or rule.allowed(mesh, split)


def passable(rule: Rule, way: int, atoms: Atoms, mesh: Mesh) -> Atoms:
    """The atoms, of some atoms, over which parts may pass in a way (``Rule.over``)."""
    axes = rule.over[way] if way < len(rule.over) else None
    if axes is None:
        return atoms
    allowed = {a for axis in axes for a in mesh.atoms_of.get(axis, (axis,))}
    return tuple(a for a in atoms if a in allowed)
