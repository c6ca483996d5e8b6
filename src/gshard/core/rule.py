"""Rules: the independent loops of an equation, and how they may be split.

A rule names the *factors* of one equation: the independent loops of its computation. Every dimension of every
operand and result is a product of factors, major to minor, in the notation of einsum:

    a b c, a c d -> a b d; add over c=8      a batched matmul
    (a b) c -> a b c                         a reshape that unmerges one dimension

Splitting an equation means giving atoms of the mesh to factors (``core.split``). What that costs is fixed by the
kind of the factor, so nothing outside ``rules/`` asks which primitive it is looking at:

    parallel       splitting costs nothing
    reduce         each device gets a part of the result, to be combined by the factor's monoid
    communicate    the equation's own way to run on shards communicates: a halo, a prefix sum, candidates
    replicate      cannot be split: the operand is gathered first
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

PARALLEL = "parallel"
REDUCE = "reduce"
COMMUNICATE = "communicate"
REPLICATE = "replicate"

Dims = tuple[tuple[int, ...], ...]
Way = tuple[str, frozenset[int]]  # of parts to pass an equation: the monoid, and the operands

# "pick" puts together what was looked up: one device holds an element, all others zero bits.
MONOIDS = ("add", "max", "min", "mul", "or", "and", "xor", "pick")


def moves(*positions: int) -> list[tuple[str, tuple[int, ...]]]:
    """``linear`` of a rule that only moves elements of these operands: parts of any kind may pass."""
    return [(monoid, positions) for monoid in MONOIDS]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Elements of an operand along one dimension: every ``step``-th from ``start`` on; of a number, copies of it."""

    operand: int
    start: int
    count: int
    step: int = 1


Index = tuple[tuple[Span, ...], ...]
"""For each dimension of a result the spans that it consists of, in order; none where nothing moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One loop: its global size, kind, and for a ``reduce`` factor the monoid that combines parts.

    A ``communicate`` factor may stand for dimensions of several sizes (a slice's operand and result); each is cut in
    parts of its own size, and ``size`` is the largest. So may a ``reduce`` factor of a rule that masks itself (a long
    kernel and what it slides over); ``size`` is that of what is summed over.
    """

    size: int
    kind: str = PARALLEL
    monoid: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Manual:
    """What an equation has to do with the axes over which a ``shard_map`` is manual, while others are automatic.

    Attributes:
        step: ``enter``: whole arrays become parts; ``leave``: parts become whole arrays; ``inside``: parts stay parts.
        atoms: ``atoms(mesh)``: the atoms of the axes that are manual there. No value inside is split over them.
        pinned: ``pinned(mesh)``: the factors that they split at the boundary. All other factors are free.
        differ: ``differ(mesh)``: the atoms along which results differ although operands do not.
        equal: ``equal(mesh)``: the atoms along which results are equal although operands are not.
    """

    step: str
    atoms: Callable[..., frozenset[str]]
    pinned: Callable[..., dict[int, tuple[str, ...]]]
    differ: Callable[..., frozenset[str]] = lambda mesh: frozenset()
    equal: Callable[..., frozenset[str]] = lambda mesh: frozenset()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The factors of one equation and how to run it on shards. Compared by identity.

    Attributes:
        factors: all factors; dimensions refer to them by position.
        operands: for each operand, for each dimension, its factors major to minor (none for a broadcast one).
        results: the same for the results.
        local: ``local(shards, *arrays) -> results``, run on one device's parts; None runs the same primitive
            with the same parameters.
        sends: ``sends(mesh, split)``: bytes that each device sends inside ``local``; None if it sends nothing.
        flops: floating-point operations of the whole equation.
        masks_itself: ``local`` copes with padding along split reduce factors; otherwise operands are filled with
            the monoid's identity there first.
        known: False for the rule made up for a primitive that has none.
        fixed: ``fixed(mesh)``: the one split that the equation can run in, if it has no choice: a manual region.
        linear: ways in which values still to be combined may pass: a monoid and the operands that must all be unreduced
            alike, so that the parts of the results, combined, are the results: also where parts are infinite, or so
            large that scaling them would overflow (``language.passing``). Way ``k`` of a split is key ``-1 - k``.
        finite: the ways in which parts may also pass where the user has said that they are finite (``permitting``).
        over: for each way in ``linear`` the mesh axes that it is limited to, None for any; ways after its end are
            not limited.
        component: for each factor a number; factors of arrays that have nothing to do with each other (the operands
            of a barrier) have different ones, and only those of one component compete for atoms.
        part: ``part(shards, *arrays) -> result``, run on a part of one factor after another while others are on their
            way (``core.ring``); what parts of a sum give may be of a wider dtype. None if it cannot be run so.
        passes: True if the results are the operands, as a barrier gives them.
        sums: True if what was picked, when it passes, is a part of a sum afterwards.
        slow: operands of an expensive computation: where one is repeated along a dimension,
            compilers compute it once for all repetitions.
        allowed: ``allowed(mesh, split)``: whether the equation can run in this split of its factors, where they alone
            do not tell; None if they do.
        on_mesh: ``on_mesh(mesh)``: the rule that takes this one's place on a mesh, where it depends on that.
        why: why nothing can be split, where ``known`` is False for another reason than that there is no rule.
        manual: what it has to do with the manual axes of a ``shard_map`` at whose boundary it is, or in which it
            communicates.
        index: for each result where its elements come from, if the equation does nothing but move them along
            dimensions, in order; None otherwise. Along several dimensions only those of one array move.
        products: of an equation that is a kernel of its own, the part of ``flops`` that are matrix products. No other
            equation becomes part of that kernel. None where XLA makes the kernels.
        groups: groups of rows of different sizes. A compiler without a kernel for them multiplies all rows with the
            matrix of each group (``Compiler.multiplies_groups``).
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
    over: tuple[frozenset[str] | None, ...] = ()
    part: Callable[..., Any] | None = None
    passes: bool = False
    sums: bool = False
    slow: frozenset[int] = frozenset()
    allowed: Callable[..., bool] | None = None
    on_mesh: Callable[..., Rule] | None = None
    why: str = ""
    manual: Manual | None = None
    index: tuple[Index, ...] | None = None
    products: int | None = None
    groups: int = 1

    def permitting(self, more: Iterable[tuple[Way, frozenset[str] | None]]) -> Rule:
        """The rule with more ways in which parts may pass, each limited to some mesh axes (None: to none).

        Ways that it has already are left out.
        """
        have = [*self.linear]
        over = [*self.over, *(None,) * (len(have) - len(self.over))]
        for way, axes in more:
            if way not in have:
                have.append(way)
                over.append(axes)
        if len(have) == len(self.linear):
            return self
        limits = tuple(over) if any(axes is not None for axes in over) else ()
        return dataclasses.replace(self, linear=tuple(have), over=limits)

    def limit(self, way: int) -> frozenset[str] | None:
        """The mesh axes that a way is limited to; None if it is not."""
        return self.over[way] if way < len(self.over) else None

    @property
    def is_free(self) -> bool:
        """Whether nothing but its factors decides how it may be split: it is no part of a manual region."""
        return self.fixed is None and self.manual is None

    def after(self, monoid: str) -> str:
        """The monoid of the results where parts of this one pass."""
        return "add" if self.sums and monoid == "pick" else monoid

    @property
    def names(self) -> tuple[str, ...]:
        """A letter for each factor, in the order in which the text of the rule mentions them."""
        seen = dict.fromkeys(f for tensor in (*self.operands, *self.results) for dim in tensor for f in dim)
        letters = dict(zip([*seen, *(f for f in range(len(self.factors)) if f not in seen)], map(_letter, range(9999))))
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
            found = sorted((names[i] for i, factor in enumerate(self.factors) if factor.kind == kind), key=_alphabetic)
            text += f"; {kind} {' '.join(found)}" if found else ""
        return text


def _letter(i: int) -> str:
    alphabet = string.ascii_lowercase
    return alphabet[i] if i < 26 else f"{alphabet[i % 26]}{i // 26}"


def _alphabetic(name: str) -> tuple[int, str]:
    return int(name[1:] or 0), name


class RuleMaker:
    """Collects factors while a rule is written; ``dims`` are lists that may share factors between tensors."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def factor(self, size: int, kind: str = PARALLEL, monoid: str | None = None) -> tuple[int, ...]:
        """A new factor, as the one-factor dimension it usually makes."""
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
        slow: Iterable[int] = (),
        index: Iterable[Index] | None = None,
        **others: Any,
    ) -> Rule:
        """The finished rule; ``flops`` defaults to one operation for each point of the largest tensor.

        Args:
            operands, results: the factors of each dimension.
            local, sends, flops: attributes of the rule.
            linear, finite, slow, index: the same, in any iterable.
            others: its other attributes.
        """
        if flops is None:
            sizes = [math.prod(self.factors[f].size for dim in t for f in dim) for t in (*operands, *results)]
            flops = max(sizes, default=0)
        ways, more = (tuple((monoid, frozenset(own)) for monoid, own in some) for some in (linear, finite))
        return Rule(
            tuple(self.factors),
            tuple(tuple(map(tuple, t)) for t in operands),
            tuple(tuple(map(tuple, t)) for t in results),
            local=local,
            sends=sends,
            flops=flops,
            component=_components(self.factors, (*operands, *results)),
            linear=ways,
            finite=tuple(way for way in more if way not in ways),
            slow=frozenset(slow),
            index=None if index is None else tuple(index),
            **others,
        )


def _components(factors: Sequence[Factor], tensors: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """For each factor the smallest factor that it shares arrays with, directly or through others.

    Where parts are combined or communicated all factors belong together: the atoms of a looked-up dimension, say, stand
    on every result although the dimension itself does not.
    """
    if any(factor.kind in (REDUCE, COMMUNICATE) for factor in factors):
        return (0,) * len(factors)
    component = list(range(len(factors)))

    def root(f: int) -> int:
        while component[f] != f:
            f = component[f]
        return f

    for tensor in tensors:
        together = [root(f) for dim in tensor for f in dim]
        for f in together:
            component[root(f)] = min(map(root, together))
    return tuple(root(f) for f in range(len(factors)))
