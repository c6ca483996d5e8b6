"""Holds the table of rules: gshard's own rules and rules of users.

All factors of a primitive without a rule are ``replicate``, except batch dimensions that its vmap rule proves
(``language.batch``): operands are gathered, the plan lists the equation, and ``strict=True`` refuses it.
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
# Rules of users (``language.custom``) by primitive and target (None: any). They take precedence over gshard's own
# rules.
_CUSTOM: dict[str, dict[Any, RuleFunction]] = {}


class _Version:
    """Counts the changes of ``_CUSTOM``, and clears caches at each change."""

    def __init__(self) -> None:
        self.number = 0
        self.followers = weakref.WeakSet[Any]()

    def next(self) -> None:
        """Counts a change, and clears all followers."""
        self.number += 1
        for follower in list(self.followers):
            follower.clear()


_VERSION = _Version()


def rules_version() -> int:
    """A number that increases with every change of the rules of users. gshard then plans programs again."""
    return _VERSION.number


def cleared_with_rules(follower: Any) -> None:
    """Calls ``follower.clear()`` at every change of the rules of users, as long as the follower lives."""
    _VERSION.followers.add(follower)


def rule(*names: str, **traits: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a function as the rule of primitives of these names, and their traits (``language.traits``)."""

    def enter(function: RuleFunction) -> RuleFunction:
        set_traits(*names, **traits)
        for name in names:
            if name in _RULES:
                raise RuleError(f"primitive {name!r} has a rule already.", got=f"{_RULES[name]} and {function}")
            _RULES[name] = function
        return function

    return enter


def rule_of(call: Call, source: Any = None) -> Rule:
    """The rule of one application of a primitive; ``known`` is False for the default rule."""
    function = _custom_rule(call.name, call.params) or _RULES.get(call.name, batch_rule)
    try:
        return function(call)
    except RuleError as error:
        if error.where or source is None:
            raise
        raise RuleError(error.what, user_line(source), error.got, error.hint) from error


def register_custom(name: str, target: Any, function: RuleFunction) -> None:
    """Registers a user's rule, for all equations of a primitive or for those that call ``target``.

    gshard then plans programs again. A rule that replaces another one also clears JAX's caches, because they may
    contain programs of ``jax.jit`` around a partitioned function that were made with the other rule.
    """
    rules_of_name = _CUSTOM.setdefault(name, {})
    replaces = target in rules_of_name or (target is None and is_our_own(name))
    rules_of_name[target] = function
    _VERSION.next()
    if replaces:
        jax.clear_caches()


def unregister(name: str) -> None:
    """Removes the rules of users for a primitive, and clears programs that were made with them."""
    if _CUSTOM.pop(name, None):
        _VERSION.next()
        jax.clear_caches()


def is_our_own(name: str) -> bool:
    """Whether gshard has its own rule for a primitive."""
    return name in _RULES


def has_rule(name: str, params: dict[str, Any]) -> bool:
    """Whether gshard or a user has a rule for an equation of a primitive with these parameters."""
    return name in _RULES or _custom_rule(name, params) is not None


def own_rules() -> dict[str, RuleFunction]:
    """gshard's own rules by the names of their primitives, in the order of the names."""
    return dict(sorted(_RULES.items()))


def contradiction(rule: Rule, call: Call) -> str | None:
    """A text that states why a rule does not fit an equation; None if it fits."""
    for what, tensors, shapes in (
        ("operand", rule.operands, call.in_shapes),
        ("result", rule.results, call.out_shapes),
    ):
        if len(tensors) != len(shapes):
            return f"it is for {len(tensors)} {what}s, and there are {len(shapes)}"
        for i, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            problem = _contradiction_in_array(rule, dims, shape)
            if problem:
                return f"{what} {i}: {problem}"
    for factor in rule.factors:
        if (factor.monoid in MONOIDS) != (factor.kind == REDUCE):
            return f"a factor that is {factor.kind} has the monoid {factor.monoid}, of {MONOIDS}"
    reduced = {f for f, factor in enumerate(rule.factors) if factor.kind == REDUCE}
    if in_results := reduced & {f for dims in rule.results for dim in dims for f in dim}:
        return f"{rule.names[min(in_results)]} is reduced and stands in a result"
    if any(f.kind == COMMUNICATE for f in rule.factors) and rule.local is None:
        return "a factor is communicated, and no local says how"
    return None


def _contradiction_in_array(rule: Rule, dims: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> str | None:
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
            continue  # such a factor may stand for dimensions of several sizes
        if dim and size != n:
            product = " * ".join(f"{rule.names[f]}={rule.factors[f].size}" for f in dim)
            return f"dimension {d} is {n}, and its factors make {product}"
    return None


def _custom_rule(name: str, params: dict[str, Any]) -> RuleFunction | None:
    """A user's rule for the target of an FFI call or a callback, or for all equations of the primitive."""
    rules_of_name = _CUSTOM.get(name)
    if not rules_of_name:
        return None
    callback = params.get("callback")
    target = params.get("target_name", getattr(callback, "callback_func", callback))
    for rule_target, function in rules_of_name.items():
        if rule_target is not None and rule_target == target:
            return function
    return rules_of_name.get(None)
