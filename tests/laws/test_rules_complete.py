"""No split is missing that would cost nothing: a factor that rules call whole cannot simply be split.

Tried by force: the factor is declared parallel, one atom is put on it, and the equation runs with the same primitive on
the parts. Where every device then has the right part of the result, the rule forbids what is legal.
"""

import dataclasses

import jax
import pytest

from gshard.core.errors import GShardError
from gshard.core.rule import PARALLEL, REPLICATE
from gshard.testing.rule_checks import SMALL as MESH
from gshard.testing.rule_checks import Alone, emit, plan_of
from harness import rows
from laws.test_rules_sound import the_equation
from sampled import others_slow

# What is legal and not offered: (row, text of the rule, letter of the factor).
# Windows of forward derivatives stay whole: these that fit into parts could be split.
KNOWN_GAPS = {("select_and_gather_add, as far as large", "a b c, a b c -> a b c; replicate b c", "c")}


def factors_to_try(equation):
    rule = equation.rule
    tensors = (*rule.operands, *rule.results)
    found = []
    for f, factor in enumerate(rule.factors):
        alone = all(dim == (f,) for tensor in tensors for dim in tensor if f in dim)
        atom = next((a for a in MESH.atoms if factor.size > 1 and factor.size % MESH.atom_sizes[a] == 0), None)
        if factor.kind == REPLICATE and alone and atom is not None:
            found.append((f, atom))
    return found


def declared_parallel(rule, f):
    factors = tuple(dataclasses.replace(x, kind=PARALLEL) if i == f else x for i, x in enumerate(rule.factors))
    return dataclasses.replace(rule, factors=factors)


def is_right(row, f, atom):
    alone = Alone.of(row.program, the_equation(row.program, row.primitive), jax.tree.leaves(row.arguments))
    other = dataclasses.replace(alone.equation, rule=declared_parallel(alone.equation.rule, f))
    program = dataclasses.replace(alone.program, block=dataclasses.replace(alone.program.block, equations=(other,)))
    forced, split = dataclasses.replace(alone, program=program, equation=other), {f: (atom,)}
    try:
        forced.check(emit(plan_of(program, other, split, MESH)), split, 1e-4)
    except (AssertionError, GShardError, TypeError, ValueError):  # no rule is meant to be run like this
        return False
    # An empty result is right however it is made: it proves nothing.
    return any(0 not in v.shape for v in other.outputs)


@pytest.mark.parametrize("row", others_slow(rows(), "rules_complete"))
@pytest.mark.one_in(3)
def test_whole_factors_are_whole_for_a_reason(row):
    equation = the_equation(row.program, row.primitive)
    if equation is None:
        pytest.skip(f"this JAX has no primitive {row.primitive} here")
    gaps = {
        (row.name, str(equation.rule), equation.rule.names[f])
        for f, atom in factors_to_try(equation)
        if is_right(row, f, atom)
    }
    assert gaps == {gap for gap in KNOWN_GAPS if gap[0] == row.name}


def test_known_gaps_are_of_rows_that_exist():
    assert {name for name, _, _ in KNOWN_GAPS} <= {r.name for r in rows()}
