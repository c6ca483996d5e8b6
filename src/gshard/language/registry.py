"""Registry: the table of rules.

    @rule("transpose")
    def transpose(call):
        make = RuleMaker()
        dims = make.parallel(call.in_shapes[0])
        return make.rule([dims], [[dims[d] for d in call.params["permutation"]]])

A primitive without an entry is ``replicate`` in every factor, except for batch dimensions that its vmap rule proves
(``language.batch``): its operands are gathered and every device computes all of it. That is correct, listed in the plan
and refused under ``strict=True``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import jax

from gshard.core.errors import RuleError
from gshard.core.jax_adapter import user_line
from gshard.core.rule import COMMUNICATE, MONOIDS, REDUCE, REPLICATE, Rule
from gshard.language.batch import batch_rule
from gshard.language.call import Call as Call
from gshard.language.traits import set_traits

RuleFunction = Callable[[Call], Rule]
_RULES: dict[str, RuleFunction] = {}
# Those that users registered (``language.custom``), by primitive and by what it calls, if that matters. First.
_CUSTOM: dict[str, dict[Any, RuleFunction]] = {}


class _Version:
    """Counts the changes of ``_CUSTOM``, and tells others of each."""

    def __init__(self) -> None:
        self.number, self.followers = 0, weakref.WeakSet[Any]()

    def next(self) -> None:
        """Counts one, and clears what was made before."""
        self.number += 1
        for follower in list(self.followers):
            follower.clear()


_VERSION = _Version()


def rules_version() -> int:
    """Grows with every change of the rules that users registered: a program planned before is planned again."""
    return _VERSION.number


def cleared_with_rules(follower: Any) -> None:
    """Calls ``follower.clear()`` at every change of the rules that users registered, while it lives."""
    _VERSION.followers.add(follower)


def rule(*names: str, **traits: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Enters a function as the rule of the primitives of these names, and their traits (``language.traits``)."""

    def enter(function: RuleFunction) -> RuleFunction:
        set_traits(*names, **traits)
        for name in names:
            if name in _RULES:
                raise RuleError(f"primitive {name!r} has a rule already.", got=f"{_RULES[name]} and {function}")
            _RULES[name] = function
        return function

    return enter


def rule_of(call: Call, source: Any = None) -> Rule:
    """The rule of one application of a primitive; ``known`` is False if it is the made-up one.

    Args:
        call: the application.
        source: the equation's ``source_info``, to blame the user's line for a rule that does not fit.
    """
    function = _custom_rule(call.name, call.params) or _RULES.get(call.name, batch_rule)
    try:
        return function(call)
    except RuleError as error:
        if error.where or source is None:
            raise
        raise RuleError(error.what, user_line(source), error.got, error.hint) from error


def register_custom(name: str, target: Any, function: RuleFunction) -> None:
    """Enters a user's rule, for all equations of a primitive or for those that call ``target``.

    Programs that were planned before are planned again. One that stands for another also clears JAX's caches: programs
    of ``jax.jit`` around a partitioned function were made with the other one.
    """
    known = _CUSTOM.setdefault(name, {})
    replaces = target in known or (target is None and is_our_own(name))
    known[target] = function
    _VERSION.next()
    if replaces:
        jax.clear_caches()


def unregister(name: str) -> None:
    """Removes the rules that users registered for a primitive, and clears what was made with them."""
    if _CUSTOM.pop(name, None):
        _VERSION.next()
        jax.clear_caches()


def is_our_own(name: str) -> bool:
    """Whether the library itself has a rule for a primitive."""
    return name in _RULES


def has_rule(name: str, params: dict[str, Any]) -> bool:
    """Whether the library, or a user, knows a rule for an equation of a primitive with these parameters."""
    return name in _RULES or _custom_rule(name, params) is not None


def own_rule(name: str) -> RuleFunction:
    """The library's own rule of a primitive."""
    return _RULES[name]


def known_primitives() -> tuple[str, ...]:
    """Names of all primitives that the library has a rule for."""
    return tuple(sorted(_RULES))


def contradiction(rule: Rule, call: Call) -> str | None:
    """What in a rule's factors does not add up to the equation's shapes, as text; None if they do."""
    for what, tensors, shapes in (
        ("operand", rule.operands, call.in_shapes),
        ("result", rule.results, call.out_shapes),
    ):
        if len(tensors) != len(shapes):
            return f"it is for {len(tensors)} {what}s, and there are {len(shapes)}"
        for i, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            wrong = _of_one_array(rule, dims, shape)
            if wrong:
                return f"{what} {i}: {wrong}"
    for factor in rule.factors:
        if (factor.monoid in MONOIDS) != (factor.kind == REDUCE):
            return f"a factor that is {factor.kind} has the monoid {factor.monoid}, of {MONOIDS}"
    reduced = {f for f, factor in enumerate(rule.factors) if factor.kind == REDUCE}
    if kept := reduced & {f for dims in rule.results for dim in dims for f in dim}:
        return f"{rule.names[min(kept)]} is reduced and stands in a result"
    if any(f.kind == COMMUNICATE for f in rule.factors) and rule.local is None:
        return "a factor is communicated, and no local says how"
    return None


def _of_one_array(rule: Rule, dims: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> str | None:
    used = [f for dim in dims for f in dim]
    if any(not 0 <= f < len(rule.factors) for f in used):
        return f"it names a factor that does not exist: {max(used)}"
    if len(set(used)) != len(used):
        return "a factor stands in it twice"
    if len(dims) != len(shape):
        return f"the rule gives it {len(dims)} dimensions, and it has {len(shape)}"
    for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        size = math.prod(rule.factors[f].size for f in dim)
        kinds = {rule.factors[f].kind for f in dim}
        if len(dim) == 1 and kinds <= {COMMUNICATE, REPLICATE} and n <= size:
            continue  # what slides or is never split may stand for dimensions of several sizes
        if dim and size != n:
            product = " * ".join(f"{rule.names[f]}={rule.factors[f].size}" for f in dim)
            return f"dimension {d} is {n}, and its factors make {product}"
    return None


def _custom_rule(name: str, params: dict[str, Any]) -> RuleFunction | None:
    """A user's rule, best for exactly what an FFI call or a callback calls."""
    found = _CUSTOM.get(name)
    if not found:
        return None
    callback = params.get("callback")
    target = params.get("target_name", getattr(callback, "callback_func", callback))
    return next((f for t, f in found.items() if t is not None and t == target), found.get(None))
