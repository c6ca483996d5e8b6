"""The table of rules, and how a primitive gets into it.

    @rule("transpose")
    def transpose(call):
        make = RuleMaker()
        dims = make.parallel(call.in_shapes[0])
        return make.rule([dims], [[dims[d] for d in call.params["permutation"]]])

A primitive without an entry is ``whole`` in every factor: its operands are gathered and every device computes all
of it. That is correct, listed in the plan and refused under ``strict=True``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gshard.core.errors import RuleError
from gshard.core.rule import Rule, RuleMaker


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a rule is computed from: one application of a primitive, shapes known, values not."""

    name: str
    params: dict[str, Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[Any, ...]


    @property
    def on_keys(self) -> bool:
        """Whether the first operand holds PRNG keys, which can be moved but not computed with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], jax.dtypes.prng_key)


    @property
    def is_complex(self) -> bool:
        """Whether the first operand is complex: such numbers have no least and no greatest to fill padding with."""
        return bool(self.in_dtypes) and jax.dtypes.issubdtype(self.in_dtypes[0], np.complexfloating)


RuleFunction = Callable[[Call], Rule]
_RULES: dict[str, RuleFunction] = {}


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Enters a function as the rule of the primitives of these names."""

    def enter(function: RuleFunction) -> RuleFunction:
        for name in names:
            if name in _RULES:
                raise RuleError(f"primitive {name!r} has a rule already.", got=f"{_RULES[name]} and {function}")
            _RULES[name] = function
        return function

    return enter


def rule_of(call: Call) -> Rule:
    """The rule of one application of a primitive; ``known`` is False if it is the made-up one."""
    function = _RULES.get(call.name)
    return _all_whole(call) if function is None else function(call)


def known_primitives() -> tuple[str, ...]:
    """Names of all primitives that have a rule."""
    return tuple(sorted(_RULES))


def _all_whole(call: Call) -> Rule:
    make = RuleMaker()
    operands = [[make.whole(n) for n in shape] for shape in call.in_shapes]
    results = [[make.whole(n) for n in shape] for shape in call.out_shapes]
    return make.rule(operands, results, known=False)
