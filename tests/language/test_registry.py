"""The table of rules, and what every rule owes whoever reads it: factors that add up to the shapes they stand for."""

import math

import jax.numpy as jnp
import pytest

from gshard.core.errors import RuleError
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE
from gshard.language.registry import known_primitives, rule
from harness import Row, rows
from invented import invented


def equations(row):
    return [e for e in row.program.block.walk() if e.rule is not None]


@pytest.fixture(scope="module")
def traced():
    """The equations of every row of the table that have a rule."""
    return {row.name: equations(row) for row in rows()}


def check(traced, wrong_with):
    """Fails with all that is wrong with the rule of any equation."""
    assert len(traced) > 400
    wrong = [
        f"{name}: {found}: {e.rule}"
        for name, own in traced.items()
        for e in own
        if e.rule is not None
        for found in wrong_with(e, e.rule)
    ]
    assert not wrong, "\n".join(wrong)


def test_factors_add_up(traced):
    def wrong(e, rule):
        arrays = list(zip((*e.inputs, *e.outputs), (*rule.operands, *rule.results), strict=True))
        for value, dims in arrays:
            if len(value.shape) != len(dims):
                yield f"{value} has {len(dims)} dimensions"
            for n, dim in zip(value.shape, dims, strict=False):
                kinds = {rule.factors[f].kind for f in dim}
                size = math.prod(rule.factors[f].size for f in dim)
                if COMMUNICATE in kinds or (kinds == {REPLICATE} and size != n):
                    if len(dim) != 1:
                        yield "what is communicated (or would be, were it not of keys) is its own dimension"
                    if n > size:
                        yield f"a factor of {size} has {n} elements"
                elif not (rule.masks_itself and REDUCE in kinds) and dim and size != n:
                    yield f"factors of a dimension of {n} multiply to {size}"
            used = [f for dim in dims for f in dim]
            if len(set(used)) != len(used):
                yield f"a factor stands twice in {value}"
        if {f for _, dims in arrays for dim in dims for f in dim} != set(range(len(rule.factors))):
            yield "a factor that no array has"

    check(traced, wrong)


def test_kinds_and_monoids(traced):
    def wrong(e, rule):
        for f, factor in enumerate(rule.factors):
            if factor.kind not in (PARALLEL, REDUCE, COMMUNICATE, REPLICATE):
                yield f"a kind {factor.kind}"
            if (factor.monoid is not None) != (factor.kind == REDUCE):
                yield f"a {factor.kind} factor has the monoid {factor.monoid}"
            # It may be a dimension of some results and be summed over for others, as in a gradient.
            if factor.kind == REDUCE and all(any(f in dim for dim in dims) for dims in rule.results):
                yield f"the factor {f} is reduced and in every result"
            others = {g for g in range(len(rule.factors)) if rule.component[g] != rule.component[f]}
            for dims in (*rule.operands, *rule.results):
                here = {g for dim in dims for g in dim}
                if f in here and here & others:
                    yield "factors of one array do not compete for atoms"
        if rule.flops < 0:
            yield f"{rule.flops} FLOPs"

    check(traced, wrong)


def test_a_primitive_without_a_rule_is_whole_in_every_factor():
    (e,) = equations(Row("invented", "invented", invented, (jnp.ones((4, 3)),)))
    assert e.rule is not None
    assert not e.rule.known
    assert {factor.kind for factor in e.rule.factors} == {REPLICATE}
    assert str(e.rule) == "a b -> c d; replicate a b c d"


def test_a_primitive_has_one_rule():
    before = known_primitives()

    def again(call):
        raise AssertionError("never asked")

    with pytest.raises(RuleError, match="'transpose' has a rule already"):
        rule("transpose")(again)
    assert known_primitives() == before
