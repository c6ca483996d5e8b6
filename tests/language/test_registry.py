"""The table of rules, and what every rule owes whoever reads it: factors that add up to the shapes they stand for."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from gshard.core.errors import RuleError
from gshard.core.program import Equation
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Rule
from gshard.language.registry import Call, known_primitives, rule, rule_of
from gshard.passes.trace import trace
from harness import Row, rows
from invented import invented


def equations(row: Row) -> list[Equation]:
    return [e for e in trace(row.function, *row.arguments).block.walk() if e.rule is not None]


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in rows()])
def test_factors_add_up(row: Row) -> None:
    for e in equations(row):
        assert e.rule is not None
        tensors = list(zip((*e.inputs, *e.outputs), (*e.rule.operands, *e.rule.results), strict=True))
        for value, dims in tensors:
            assert len(value.shape) == len(dims)
            for n, dim in zip(value.shape, dims, strict=True):
                kinds = {e.rule.factors[f].kind for f in dim}
                size = math.prod(e.rule.factors[f].size for f in dim)
                if COMMUNICATE in kinds or (kinds == {REPLICATE} and size != n):
                    assert len(dim) == 1, "what is communicated (or would be, were it not of keys) is its own dimension"
                    assert n <= size
                elif not (e.rule.masks_itself and REDUCE in kinds):
                    assert size == n or not dim, e.rule
            used = [f for dim in dims for f in dim]
            assert len(set(used)) == len(used), "a factor stands once in an array"
        mentioned = {f for _, dims in tensors for dim in dims for f in dim}
        assert mentioned == set(range(len(e.rule.factors))), f"a factor that no array has: {e.rule}"


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in rows()])
def test_kinds_and_monoids(row: Row) -> None:
    for e in equations(row):
        assert e.rule is not None
        for f, factor in enumerate(e.rule.factors):
            assert factor.kind in (PARALLEL, REDUCE, COMMUNICATE, REPLICATE)
            assert (factor.monoid is not None) == (factor.kind == REDUCE)
            if factor.kind == REDUCE:
                assert not any(f in dim for dims in e.rule.results for dim in dims), "what is reduced is no result"
            others = [g for g in range(len(e.rule.factors)) if e.rule.component[g] != e.rule.component[f]]
            for dims in (*e.rule.operands, *e.rule.results):
                here = {g for dim in dims for g in dim}
                assert f not in here or not here & set(others), "factors of one array compete for atoms"
        assert e.rule.flops >= 0


def test_a_primitive_without_a_rule_is_whole_in_every_factor() -> None:
    (e,) = equations(Row("invented", "invented", invented, (jnp.ones((4, 3)),)))
    assert e.rule is not None
    assert not e.rule.known
    assert {factor.kind for factor in e.rule.factors} == {REPLICATE}
    assert str(e.rule) == "a b -> c d; replicate a b c d"


def test_a_primitive_has_one_rule() -> None:
    before = known_primitives()

    def again(call: Call) -> Rule:
        raise AssertionError("never asked")

    with pytest.raises(RuleError, match="'transpose' has a rule already"):
        rule("transpose")(again)
    assert known_primitives() == before


def test_keys_are_told_from_numbers() -> None:
    assert not Call("slice", {}, ((3,),), ((2,),), (jnp.dtype(jnp.float32),)).on_keys
    assert not rule_of(Call("nobody_knows", {}, ((3,),), ((2,),), ("f4",))).known
