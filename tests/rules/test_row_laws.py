"""Laws of what rules say: where elements move, and the bytes that a program sends."""

import jax
import numpy as np
import pytest

from gshard.comm.shards import Shards
from gshard.core.jax_adapter import bind
from gshard.core.mesh import Mesh
from gshard.core.rule import REPLICATE, place
from gshard.rules.shape import elements, index_of
from harness import rows
from laws.test_rules_sound import the_equation
from simulated import local_jaxpr

OPERATORS = ("concatenate", "concatenate_slices", "pad", "slice", "split")
ROWS = [row for row in rows() if row.primitive in OPERATORS]


def moved(row):
    """Compares the equations of a program that move elements; how many there are."""
    count = 0
    for e in row.program.block.walk():
        if (index := index_of(e)) is None:
            continue
        sizes = [int(np.prod(x.shape)) for x in e.inputs]
        arrays = [np.arange(n, dtype=np.int32).reshape(x.shape) + np.int32(sum(sizes[:i]))
                  for i, (n, x) in enumerate(zip(sizes, e.inputs, strict=True))]  # fmt: skip
        for own, want in zip(index, bind(e.primitive, e.params, arrays), strict=True):
            np.testing.assert_array_equal(elements(own, arrays), want)
        count += 1
    return count


@pytest.mark.parametrize("primitive", OPERATORS)
def test_elements_lie_where_the_index_says(primitive):
    assert sum(moved(row) for row in ROWS if row.primitive == primitive)


MESH = Mesh.abstract(a=2, b=3)


def splits_of(equation):
    """Each factor over one axis, and each pair of factors over one axis each; factors of products in equal parts."""
    rule = equation.rule
    assert rule is not None
    in_products = {f for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1 for f in dim}
    sizes = [factor.size for factor in rule.factors]

    def over(axis):
        atoms = MESH.atoms_of[axis]
        factors = [f for f, factor in enumerate(rule.factors) if factor.kind != REPLICATE and factor.size > 1]
        return [{f: atoms} for f in factors if f not in in_products or sizes[f] % MESH.count(atoms) == 0]

    yield from (*over("a"), *over("b"))
    yield from (first | second for first in over("a") for second in over("b") if first.keys() != second.keys())


def noted_bytes(equation, split):
    """The bytes that the collectives of the equation's program on one device send."""
    rule = equation.rule
    assert rule is not None
    assert rule.local is not None
    sent = []
    shards = Shards(equation, split, MESH, lambda kind, atoms, size, x, times=1: sent.append(size * times))
    parts = []
    for x, dims in zip(equation.inputs, rule.operands, strict=True):
        sharding = place(dims, split)
        shape = tuple(-(-n // MESH.count(atoms)) for n, atoms in zip(x.shape, sharding, strict=True))
        parts.append(jax.ShapeDtypeStruct(shape, x.dtype))
    local_jaxpr(lambda *arrays: list(rule.local(shards, *arrays)), MESH.atom_sizes, *parts)
    return sum(sent)


def sending_rows():
    """The rows of the harness whose rules communicate."""
    found = []
    for row in rows():
        equation = the_equation(row.program, row.primitive)
        if equation is not None and equation.rule is not None and equation.rule.sends is not None:
            found.append(row)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("row", sending_rows(), ids=lambda row: row.name)
def test_a_rule_states_the_bytes_that_its_program_sends(row):
    equation = the_equation(row.program, row.primitive)
    assert equation is not None
    assert equation.rule is not None
    assert equation.rule.sends is not None
    for split in splits_of(equation):
        assert equation.rule.sends(MESH, split) == noted_bytes(equation, split), split
