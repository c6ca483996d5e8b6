"""Notation: rules written as text, the form in which they print.

    a b, b c -> a c; add over b        factors (any words) with kinds after semicolons; parallel where nothing is said
    (a b) c -> a b c                   a dimension that is a product of factors, major to minor
    ... a, a -> ... a                  the same further dimensions in front, however many
    a b -> a c; replicate b c              dimensions that are never split
    a 1, () -> a                       a dimension of size 1 may be 1; an array without dimensions is ()

The sizes come from the equation to which a rule is applied. A factor that stands only in products may need its size
written after it, ``replicate a=4``, or ``a=4`` alone.

    >>> call = Call("my_matmul", {}, ((8, 6), (6, 4)), ((8, 4),), ("f4", "f4"))
    >>> print(parse("rows in, in out -> rows out; add over in").rule(call))
    a b, b c -> a c; add over b=6
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gshard.core.errors import RuleError
from gshard.core.rule import COMMUNICATE, MONOIDS, PARALLEL, REDUCE, REPLICATE, Rule, RuleMaker
from gshard.language.registry import Call

Words = tuple[str, ...]

_DIMENSION = re.compile(r"\(([^()]+)\)|(\.\.\.)|([^\s()]+)")
_WORD = re.compile(r"[A-Za-z]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
    """A rule as text, read but not yet applied to an equation.

    Attributes:
        text: as it was written.
        operands, results: for each array, for each dimension, its factors; ``("...",)`` for all further dimensions.
        kinds: the kind of every factor that is not parallel, with the monoid of one that is reduced.
        sizes: those that are written down.
    """

    text: str
    operands: tuple[tuple[Words, ...], ...]
    results: tuple[tuple[Words, ...], ...]
    kinds: Mapping[str, tuple[str, str | None]]
    sizes: Mapping[str, int]

    def rule(self, call: Call, local: Callable[..., Any] | None = None) -> Rule:
        """The rule of one application of a primitive.

        Raises:
            RuleError: the text does not fit the number of arrays, their dimensions or sizes.
        """
        shapes = (*call.in_shapes, *call.out_shapes)
        for what, written, given in (
            ("operand", self.operands, call.in_shapes),
            ("result", self.results, call.out_shapes),
        ):
            if len(written) != len(given):
                raise self._misfit(call, f"is for {_count(len(written), what)}, and there are {len(given)}")
        tensors, sizes = self._spread(call, shapes), dict(self.sizes)
        self._find_sizes(call, tensors, shapes, sizes)
        make = RuleMaker()
        factor: dict[str, int] = {}
        for word in dict.fromkeys(w for tensor in tensors for dim in tensor for w in dim):
            if word not in sizes:
                raise self._misfit(call, f"leaves the size of {word!r} open", f"Write it down: ...; {word}=4.")
            kind, monoid = self.kinds.get(word, (PARALLEL, None))
            (factor[word],) = make.factor(sizes[word], kind, monoid)
        dims = [[tuple(factor[w] for w in dim) for dim in tensor] for tensor in tensors]
        at = len(call.in_shapes)
        return make.rule(dims[:at], dims[at:], local=local)

    def _spread(self, call: Call, shapes: Sequence[tuple[int, ...]]) -> list[list[Words]]:
        """The arrays with ``...`` written out, checked for the number of their dimensions."""
        tensors, more = [], {}
        for i, (tensor, shape) in enumerate(zip((*self.operands, *self.results), shapes, strict=True)):
            rest = len(shape) - sum(dim != ("...",) for dim in tensor)
            if ("...",) in tensor:
                more[_name(i, call)] = rest
            if rest < 0 or (rest and ("...",) not in tensor):
                wanted = _count(len(tensor) - (("...",) in tensor), "dimension")
                raise self._misfit(call, f"gives {_name(i, call)} {wanted}, and it has {len(shape)}")
            spread = tuple((f"...{d}",) for d in range(rest))
            tensors.append([word for dim in tensor for word in (spread if dim == ("...",) else (dim,))])
        if len(set(more.values())) > 1:
            counts = ", ".join(f"{n} in {name}" for name, n in more.items())
            raise self._misfit(call, f"has '...' stand for different numbers of dimensions: {counts}")
        return tensors

    def _find_sizes(
        self, call: Call, tensors: Sequence[Sequence[Words]], shapes: Sequence[tuple[int, ...]], sizes: dict[str, int]
    ) -> None:
        """Adds the sizes of all factors that the shapes determine: alone in a dimension, or the last unknown in one."""
        where = dict.fromkeys(sizes, "the text")
        dims = [
            (dim, n, f"dimension {d} of {_name(i, call)}")
            for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
            for d, (dim, n) in enumerate(zip(tensor, shape, strict=True))
        ]
        for dim, n, here in dims:
            if len(dim) != 1:
                continue
            (word,) = dim
            any_size = self.kinds.get(word, (PARALLEL,))[0] in (COMMUNICATE, REPLICATE)
            if not any_size and sizes.get(word, n) != n:
                raise self._misfit(call, f"has {word!r} be {sizes[word]} in {where[word]} and {n} in {here}")
            sizes[word] = max(n, sizes.get(word, n))
            where.setdefault(word, here)
        for _ in dims:
            for dim, n, _here in dims:
                unknown = [w for w in dim if w not in sizes]
                known = math.prod(sizes[w] for w in dim if w in sizes)
                if len(unknown) == 1 and known and n % known == 0:
                    sizes[unknown[0]] = n // known
        for dim, n, here in dims:
            if len(dim) != 1 and all(w in sizes for w in dim) and math.prod(sizes[w] for w in dim) != n:
                product = " * ".join(f"{w}={sizes[w]}" for w in dim) or "1"
                raise self._misfit(call, f"has {here} be {product}, and it is {n}")

    def _misfit(self, call: Call, what: str, hint: str | None = None) -> RuleError:
        return RuleError(f"the rule of '{call.name}' {what}.", got=f"rule: {self.text}\n  {call}", hint=hint)


def parse(text: str) -> Notation:
    """Reads the text of a rule.

    Raises:
        RuleError: it is not written as the notation asks, or contradicts itself.
    """
    arrays, *clauses = text.split(";")
    sides = arrays.split("->")
    if len(sides) != 2:
        raise _unreadable(text, "it needs one arrow between operands and results")
    operands, results = (tuple(_tensor(text, word) for word in _arrays(side)) for side in sides)
    kinds: dict[str, tuple[str, str | None]] = {}
    sizes: dict[str, int] = {}
    for clause in clauses:
        kind, monoid, words = _clause(text, clause.replace(",", " ").split())
        for word in words:
            word, _, size = word.partition("=")
            if size and not size.isdecimal():
                raise _unreadable(text, f"{size!r} is no size")
            if size:
                sizes[word] = int(size)
            if kind != PARALLEL and kinds.get(word, (kind, monoid)) != (kind, monoid):
                raise _unreadable(text, f"{word!r} is of two kinds")
            if kind != PARALLEL:
                kinds[word] = (kind, monoid)
    read = Notation(text, operands, results, kinds, sizes)
    _check(read)
    return read


def check_without_local(read: Notation) -> None:
    """Refuses what needs the rule's own way to run on shards, where there is none.

    Raises:
        RuleError: something is communicated, or made from nothing in parallel.
    """
    used = {w for tensor in read.operands for dim in tensor for w in dim}
    for word in dict.fromkeys(w for tensor in read.results for dim in tensor for w in dim):
        if word not in used and word not in read.kinds:
            raise _unreadable(
                read.text, f"{word!r} stands in a result only",
                f"Say 'replicate {word}', or give the rule a local= that makes one device's part of it.",
            )  # fmt: skip
    communicated = [word for word, (kind, _) in read.kinds.items() if kind == COMMUNICATE]
    if communicated:
        hint = "Give the rule a local= that communicates with the other devices, or say 'replicate'."
        raise _unreadable(read.text, f"{communicated[0]!r} is communicated, and nothing says how", hint)


def _check(read: Notation) -> None:
    tensors = (*read.operands, *read.results)
    known = {w for tensor in tensors for dim in tensor for w in dim}
    kept = {w for tensor in read.results for dim in tensor for w in dim}
    for word in dict.fromkeys((*read.kinds, *read.sizes)):
        if word not in known:
            raise _unreadable(read.text, f"no array has a factor {word!r}")
    for tensor in tensors:
        words = [w for dim in tensor for w in dim]
        if twice := [w for w in words if words.count(w) > 1]:
            raise _unreadable(read.text, f"{twice[0]!r} stands twice in one array")
        if ("...",) not in tensor and any("..." in dim for dim in tensor):
            raise _unreadable(read.text, "'...' is a dimension by itself")
    for word in dict.fromkeys(w for tensor in tensors for dim in tensor for w in dim):
        kind = read.kinds.get(word, (PARALLEL, None))[0]
        if kind == REDUCE and word in kept:
            raise _unreadable(read.text, f"{word!r} is reduced and stands in a result")
        if kind == PARALLEL and word not in kept:
            hint = f"Say what becomes of it: 'add over {word}' ({', '.join(MONOIDS)}), or 'replicate {word}'."
            raise _unreadable(read.text, f"{word!r} stands in no result", hint)


def _arrays(side: str) -> list[str]:
    return side.split(",") if side.strip() else []


def _tensor(text: str, words: str) -> tuple[Words, ...]:
    """The dimensions of one array."""
    if words.strip() == "()":
        return ()
    if not words.strip():
        raise _unreadable(text, "an array is missing", "An array without dimensions is written ().")
    dims: list[Words] = []
    rest = _DIMENSION.sub(" ", words)
    for product, further, word in _DIMENSION.findall(words):
        inside = (further,) if further else tuple(product.split()) or (word,)
        if inside != ("1",) and not all(w == "..." or _WORD.fullmatch(w) for w in inside):
            rest += " ".join(inside)
        dims.append(() if inside == ("1",) else inside)
    if rest.strip():
        raise _unreadable(text, f"{words.strip()!r} is no array", "Write factors as words: a, b, (a b), 1, ...")
    return tuple(dims)


def _clause(text: str, words: list[str]) -> tuple[str, str | None, list[str]]:
    """The meaning of a clause for its factors: kind, monoid, words with their sizes."""
    if len(words) > 2 and words[1] == "over" and words[0] in MONOIDS:
        return REDUCE, words[0], words[2:]
    if len(words) > 1 and words[0] in (REPLICATE, COMMUNICATE):
        return words[0], None, words[1:]
    if words and all("=" in word for word in words):
        return PARALLEL, None, words
    hint = f"After a semicolon comes 'add over b' ({', '.join(MONOIDS)}), 'replicate b', 'communicate b' or 'b=4'."
    raise _unreadable(text, f"{' '.join(words)!r} says nothing of a factor", hint)


def _unreadable(text: str, why: str, hint: str | None = None) -> RuleError:
    hint = hint or "A rule looks like 'a b, b c -> a c; add over b'."
    return RuleError(f"the rule {text!r} cannot be: {why}.", hint=hint)


def _name(i: int, call: Call) -> str:
    inputs = len(call.in_shapes)
    return f"operand {i}" if i < inputs else f"result {i - inputs}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
