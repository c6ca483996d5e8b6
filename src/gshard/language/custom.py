"""Registers rules of users for primitives and FFI calls, also rules that are written as text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.errors import GShardError, RuleError, counted
from gshard.core.jax_adapter import body_of_call
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.rule import COMMUNICATE, MONOIDS, PARALLEL, REDUCE, REPLICATE, Rule, RuleMaker
from gshard.language.region import REGIONS
from gshard.language.registry import Call, RuleFunction, contradiction, is_our_own, register_custom

# Parses rules that are written as text, in the form in which rules print.

Words = tuple[str, ...]

_DIMENSION = re.compile(r"\(([^()]+)\)|(\.\.\.)|([^\s()]+)")
_WORD = re.compile(r"[A-Za-z]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
    """A parsed rule that is not yet applied to an equation."""

    text: str  # the text of the rule
    # operands, results: for each dimension of each array its factors; ``("...",)``, or another word that begins so,
    # stands for further dimensions
    operands: tuple[tuple[Words, ...], ...]
    results: tuple[tuple[Words, ...], ...]
    # kind and monoid of each factor that is not parallel; the monoid is None unless the kind is ``reduce``
    kinds: Mapping[str, tuple[str, str | None]]
    sizes: Mapping[str, int]  # the explicit sizes of factors
    differ: bool = False  # whether dimensions of one factor may have different sizes; the largest is that of the factor

    def rule(self, call: Call, local: Callable[..., Any] | None = None) -> Rule:
        """The rule of one application of a primitive."""
        tensors, sizes = self.factors(call)
        make = RuleMaker()
        factor = {word: make.factor(n, *self.kinds.get(word, (PARALLEL, None)))[0] for word, n in sizes.items()}
        dims = [[tuple(factor[w] for w in dim) for dim in tensor] for tensor in tensors]
        count = len(call.in_shapes)
        return make.rule(dims[:count], dims[count:], local=local)

    def factors(self, call: Call) -> tuple[list[list[Words]], dict[str, int]]:
        """For each dimension of each array its factors, and the sizes of all factors, in their order in the text."""
        shapes = (*call.in_shapes, *call.out_shapes)
        for what, tensors_of_rule, shapes_of_call in (
            ("operand", self.operands, call.in_shapes),
            ("result", self.results, call.out_shapes),
        ):
            if len(tensors_of_rule) != len(shapes_of_call):
                counts = f"is for {counted(len(tensors_of_rule), what)}, and there are {len(shapes_of_call)}"
                raise self._misfit(call, counts)
        tensors = self._expand_ellipses(call, shapes)
        sizes = dict(self.sizes)
        self._find_sizes(call, tensors, shapes, sizes)
        words = dict.fromkeys(w for tensor in tensors for dim in tensor for w in dim)
        for word in words:
            if word not in sizes:
                raise self._misfit(call, f"leaves the size of {word!r} open", f"Write it down: ...; {word}=4.")
        return tensors, {word: sizes[word] for word in words}

    def _expand_ellipses(self, call: Call, shapes: Sequence[tuple[int, ...]]) -> list[list[Words]]:
        """The arrays with a factor for each dimension that ``...`` stands for."""
        tensors: list[list[Words]] = []
        further_dims: dict[str, dict[str, int]] = {}  # for each ellipsis and array
        for i, (tensor, shape) in enumerate(zip((*self.operands, *self.results), shapes, strict=True)):
            name, ellipses = _name(i, call), [dim for dim in tensor if _is_ellipsis(dim)]
            further = len(shape) - len(tensor) + len(ellipses)
            for (word,) in ellipses:
                further_dims.setdefault(word, {})[name] = further
            if further < 0 or (further and not ellipses):
                dimensions = counted(len(tensor) - len(ellipses), "dimension")
                raise self._misfit(call, f"gives {name} {dimensions}, and it has {len(shape)}")
            expanded = [
                tuple((f"{dim[0]}{d}",) for d in range(further)) if _is_ellipsis(dim) else (dim,) for dim in tensor
            ]
            tensors.append([factors for dims in expanded for factors in dims])
        for counts in further_dims.values():
            if len(set(counts.values())) > 1:
                text = ", ".join(f"{n} in {name}" for name, n in counts.items())
                raise self._misfit(call, f"has '...' stand for different numbers of dimensions: {text}")
        return tensors

    def _find_sizes(
        self, call: Call, tensors: Sequence[Sequence[Words]], shapes: Sequence[tuple[int, ...]], sizes: dict[str, int]
    ) -> None:
        """Adds the sizes of factors that the shapes determine.

        A factor has a known size if it is alone in a dimension, or if it is the only unknown factor of a product.
        """
        origin = dict.fromkeys(sizes, "the text")
        dims = [
            (dim, n, f"dimension {d} of {_name(i, call)}")
            for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
            for d, (dim, n) in enumerate(zip(tensor, shape, strict=True))
        ]
        for dim, n, location in dims:
            if len(dim) != 1:
                continue
            (word,) = dim
            may_differ = self.differ or self.kinds.get(word, (PARALLEL,))[0] in (COMMUNICATE, REPLICATE)
            if not may_differ and sizes.get(word, n) != n:
                raise self._misfit(call, f"has {word!r} be {sizes[word]} in {origin[word]} and {n} in {location}")
            sizes[word] = max(n, sizes.get(word, n))
            origin.setdefault(word, location)
        for _ in dims:
            for dim, n, _ in dims:
                unknown = [w for w in dim if w not in sizes]
                known_product = math.prod(sizes[w] for w in dim if w in sizes)
                if len(unknown) == 1 and known_product and n % known_product == 0:
                    sizes[unknown[0]] = n // known_product
        for dim, n, location in dims:
            if len(dim) != 1 and all(w in sizes for w in dim) and math.prod(sizes[w] for w in dim) != n:
                product = " * ".join(f"{w}={sizes[w]}" for w in dim) or "1"
                raise self._misfit(call, f"has {location} be {product}, and it is {n}")

    def _misfit(self, call: Call, what: str, hint: str | None = None) -> RuleError:
        return RuleError(f"the rule of '{call.name}' {what}.", got=f"rule: {self.text}\n  {call}", hint=hint)


def _is_ellipsis(dim: Words) -> bool:
    return len(dim) == 1 and dim[0].startswith("...")


def parse(text: str) -> Notation:
    """Parses the text of a rule."""
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
    notation = Notation(text, operands, results, kinds, sizes)
    _check(notation)
    return notation


def check_without_local(notation: Notation) -> None:
    """Checks that a rule does not need a ``local`` function."""
    words_of_operands = {w for tensor in notation.operands for dim in tensor for w in dim}
    for word in dict.fromkeys(w for tensor in notation.results for dim in tensor for w in dim):
        if word not in words_of_operands and word not in notation.kinds:
            hint = f"Say 'replicate {word}', or give the rule a local= that makes one device's part of it."
            raise _unreadable(notation.text, f"{word!r} stands in a result only", hint)
    communicated = [word for word, (kind, _) in notation.kinds.items() if kind == COMMUNICATE]
    if communicated:
        hint = "Give the rule a local= that communicates with the other devices, or say 'replicate'."
        raise _unreadable(notation.text, f"{communicated[0]!r} is communicated, and nothing says how", hint)


def _check(notation: Notation) -> None:
    """Checks that the parts of a rule agree."""
    tensors = (*notation.operands, *notation.results)
    words_of_arrays = {w for tensor in tensors for dim in tensor for w in dim}
    words_of_results = {w for tensor in notation.results for dim in tensor for w in dim}
    for word in dict.fromkeys((*notation.kinds, *notation.sizes)):
        if word not in words_of_arrays:
            raise _unreadable(notation.text, f"no array has a factor {word!r}")
    for tensor in tensors:
        words = [w for dim in tensor for w in dim]
        if repeated := [w for w in words if words.count(w) > 1]:
            raise _unreadable(notation.text, f"{repeated[0]!r} stands twice in one array")
        if ("...",) not in tensor and any("..." in dim for dim in tensor):
            raise _unreadable(notation.text, "'...' is a dimension by itself")
    for word in dict.fromkeys(w for tensor in tensors for dim in tensor for w in dim):
        kind = notation.kinds.get(word, (PARALLEL, None))[0]
        if kind == REDUCE and word in words_of_results:
            raise _unreadable(notation.text, f"{word!r} is reduced and stands in a result")
        if kind == PARALLEL and word not in words_of_results:
            hint = f"Say what becomes of it: 'add over {word}' ({', '.join(MONOIDS)}), or 'replicate {word}'."
            raise _unreadable(notation.text, f"{word!r} stands in no result", hint)


def _arrays(side: str) -> list[str]:
    return side.split(",") if side.strip() else []


def _tensor(text: str, words: str) -> tuple[Words, ...]:
    """The dimensions of one array."""
    if words.strip() == "()":
        return ()
    if not words.strip():
        raise _unreadable(text, "an array is missing", "An array without dimensions is written ().")
    dims: list[Words] = []
    unreadable = _DIMENSION.sub(" ", words)
    for product, ellipsis, word in _DIMENSION.findall(words):
        factors = (ellipsis,) if ellipsis else tuple(product.split()) or (word,)
        if factors != ("1",) and not all(w == "..." or _WORD.fullmatch(w) for w in factors):
            unreadable += " ".join(factors)
        dims.append(() if factors == ("1",) else factors)
    if unreadable.strip():
        raise _unreadable(text, f"{words.strip()!r} is no array", "Write factors as words: a, b, (a b), 1, ...")
    return tuple(dims)


def _clause(text: str, words: list[str]) -> tuple[str, str | None, list[str]]:
    """The kind, the monoid and the words (with their sizes) of a clause."""
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


@without_our_frames
def rule(primitive: Any, *, target: Any = None, replace: bool = False) -> Callable[..., Any]:
    """Registers the rule of a primitive, which states how the primitive can be split.

    The text of a rule names the loops of the computation (factors) by words, and writes each dimension of operands and
    results as a product of factors. Clauses after semicolons state the kinds of factors that are not parallel::

        a b, b c -> a c; add over b     add, max, min, mul, or, and, xor combine parts
        a b -> a c; replicate b c       factors that are never split
        (a b) c -> a b c; a=4           a product of two factors; a size that the shapes do not determine
        ... a -> ... a                  any number of further leading dimensions
        a 1, () -> a                    a dimension of size 1, an array without dimensions
        a b -> a b; communicate b       ``local`` communicates with the other devices

    Args:
        primitive: the name of the primitive, or the ``jax.extend.core.Primitive``.
        target: the target name of an FFI call (``"ffi_call"``), or the function that a ``"pure_callback"`` calls; None
            for all equations of the primitive.
        replace: whether to replace gshard's own rule of the primitive. A user's rule can always be replaced. gshard
            plans functions that it has planned before again at their next call.

    Returns:
        a function that registers the rule. Its argument is the text of the rule, or a function from a
        ``gshard.rules.Call`` to the result of ``RuleMaker.rule``. With a text, ``local=`` may be a function
        ``local(shards, *arrays) -> results`` that runs the primitive on one device's parts, with a
        ``gshard.rules.Shards``. Without ``local=`` the
        primitive runs unchanged on smaller arrays.

    Raises:
        RuleError: the text is not a rule, or gshard has its own rule for the primitive. When gshard plans a function:
            the rule does not fit the equation.

    >>> rule("my_matmul")("a b, b c -> a c; add over b")
    'a b, b c -> a c; add over b'
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str):
        raise RuleError(f"{primitive!r} is no primitive.", hint="Give its name or the primitive itself.")
    if name in REGIONS or body_of_call(name, {"jaxpr": name}) is not None:
        raise RuleError(
            f"{name!r} takes no rule: what is inside it is split by itself.",
            hint="Register rules of the primitives inside, or wrap a function in a primitive of your own.",
        )
    if is_our_own(name) and target is None and not replace:
        raise RuleError(
            f"gshard has a rule for primitive {name!r}.",
            hint="Say gshard.rule(..., replace=True) if yours is to take its place.",
        )

    @without_our_frames
    def enter(definition: str | RuleFunction, local: Callable[..., Any] | None = None) -> str | RuleFunction:
        if isinstance(definition, str):
            notation = parse(definition)
            if local is None:
                check_without_local(notation)
            register_custom(name, target, _checked(lambda call: notation.rule(call, local)))
        elif callable(definition) and local is None:
            register_custom(name, target, _checked(definition))
        else:
            raise RuleError(
                f"the rule of {name!r} is neither text nor a function of the equation: {definition!r}.",
                hint="A function gives its local to RuleMaker.rule; text takes it beside it: (text, local=...).",
            )
        return definition

    return enter


def _checked(function: RuleFunction) -> RuleFunction:
    """A user's rule function that raises if its rule does not fit the equation."""

    def checked(call: Call) -> Rule:
        try:
            rule = function(call)
        except GShardError:
            raise
        except Exception as error:
            what = f"the rule of '{call.name}' failed: {type(error).__name__}: {error}"
            raise RuleError(what, got=str(call)) from error
        if not isinstance(rule, Rule):
            raise RuleError(
                f"the rule of '{call.name}' gave {type(rule).__name__}.",
                got=str(call),
                hint="Return what RuleMaker().rule(...) gives.",
            )
        problem = contradiction(rule, call)
        if problem:
            raise RuleError(f"the rule of '{call.name}' does not fit: {problem}.", got=f"rule: {rule}\n  {call}")
        if rule.local is None and "result_avals" in call.params:
            return dataclasses.replace(rule, local=_with_smaller_results)
        return rule

    return checked


def _with_smaller_results(shards: Shards, *arrays: Any) -> list[Any]:
    """Runs an FFI call or a callback, whose parameters contain the shapes of the results, on one device's parts."""
    avals = shards.params["result_avals"]
    return shards.bind(
        *arrays, result_avals=tuple(aval.update(shape=shards.out_shape(i)) for i, aval in enumerate(avals))
    )
