"""Registers rules of users for primitives and FFI calls.

A rule is a text if the primitive runs unchanged on smaller arrays:

    gshard.rule("my_matmul")("a b, b c -> a c; add over b")
    gshard.rule("ffi_call", target="my_softmax")("... a -> ... a; replicate a")

It is a function of the equation if it depends on parameters or shapes:

    @gshard.rule("my_cumsum")
    def my_cumsum(call: gshard.rules.Call):
        make = gshard.rules.RuleMaker()
        dims = make.parallel(call.in_shapes[0])
        dims[call.params["axis"]] = make.replicate(call.in_shapes[0][call.params["axis"]])
        return make.rule([dims], [dims])

``gshard.testing.check_rule`` checks a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.errors import GShardError, RuleError
from gshard.core.jax_adapter import body_of_call
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.rule import Rule
from gshard.language.notation import check_without_local, parse
from gshard.language.region import REGIONS
from gshard.language.registry import Call, RuleFunction, contradiction, is_our_own, register_custom


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
