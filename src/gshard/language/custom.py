"""Custom rules: registers the rules of users for primitives and FFI calls.

As text, where the primitive means the same on smaller arrays:

    gshard.rule("my_matmul")("a b, b c -> a c; add over b")
    gshard.rule("ffi_call", target="my_softmax")("... a -> ... a; replicate a")

As a function of the equation, where more must be looked at:

    @gshard.rule("my_cumsum")
    def my_cumsum(call: gshard.Call):
        make = gshard.RuleMaker()
        dims = make.parallel(call.in_shapes[0])
        dims[call.params["axis"]] = make.replicate(call.in_shapes[0][call.params["axis"]])
        return make.rule([dims], [dims])

Whether a rule is true ``gshard.testing.check_rule`` finds out.
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
    """Registers how a primitive may be split.

    A rule as text names the loops of the computation by words, writes each dimension of operands and results as a
    product of them, and says after semicolons what is not simply independent::

        a b, b c -> a c; add over b     parts are combined by add, max, min, mul, or, and, xor
        a b -> a c; replicate b c           never split
        (a b) c -> a b c; a=4           a dimension made of two; a size that the shapes leave open
        ... a -> ... a                  further dimensions in front, however many
        a 1, () -> a                    a dimension of size 1, an array without dimensions
        a b -> a b; communicate b          ``local`` communicates with the other devices

    Args:
        primitive: its name, or the ``jax.extend.core.Primitive``.
        target: what an FFI call (``"ffi_call"``) names as its target, or the function that a ``"pure_callback"``
            calls; None for all equations of the primitive.
        replace: whether a rule of gshard's own may be replaced. A rule of your own is always replaced; functions that
            ``gshard.jit`` has planned already are planned again when they are called next.

    Returns:
        a function that takes the rule: its text; or a function from a ``gshard.Call`` to what ``RuleMaker.rule`` gives.
        With text, ``local=`` may say how to run the primitive on one device's parts, ``local(shards, *arrays) ->
        results`` with a ``gshard.Shards``; otherwise it runs unchanged on smaller arrays.

    Raises:
        RuleError: the text is no rule, or gshard has a rule for the primitive. When a function is planned: the rule
            does not fit the equation.

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
    def enter(what: str | RuleFunction, local: Callable[..., Any] | None = None) -> str | RuleFunction:
        if isinstance(what, str):
            read = parse(what)
            if local is None:
                check_without_local(read)
            register_custom(name, target, _checked(lambda call: read.rule(call, local)))
        elif callable(what) and local is None:
            register_custom(name, target, _checked(what))
        else:
            raise RuleError(
                f"the rule of {name!r} is neither text nor a function of the equation: {what!r}.",
                hint="A function gives its local to RuleMaker.rule; text takes it beside it: (text, local=...).",
            )
        return what

    return enter


def _checked(function: RuleFunction) -> RuleFunction:
    """A user's rule, believed only where it fits its equation."""

    def checked(call: Call) -> Rule:
        try:
            found = function(call)
        except GShardError:
            raise
        except Exception as error:
            what = f"the rule of '{call.name}' failed: {type(error).__name__}: {error}"
            raise RuleError(what, got=str(call)) from error
        if not isinstance(found, Rule):
            raise RuleError(
                f"the rule of '{call.name}' gave {type(found).__name__}.",
                got=str(call),
                hint="Return what RuleMaker().rule(...) gives.",
            )
        wrong = contradiction(found, call)
        if wrong:
            raise RuleError(f"the rule of '{call.name}' does not fit: {wrong}.", got=f"rule: {found}\n  {call}")
        if found.local is None and "result_avals" in call.params:
            return dataclasses.replace(found, local=_with_smaller_results)
        return found

    return checked


def _with_smaller_results(shards: Shards, *arrays: Any) -> list[Any]:
    """FFI calls and callbacks are told the shapes of their results."""
    avals = shards.params["result_avals"]
    return shards.bind(
        *arrays, result_avals=tuple(aval.update(shape=shards.out_shape(i)) for i, aval in enumerate(avals))
    )
