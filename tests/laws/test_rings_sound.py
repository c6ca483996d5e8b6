"""The law: a collective matmul, around any ring that its split allows, computes what it computes at once.

Plans are made by hand, as in the law of the rules: padding is poisoned, sums come as parts of both signs, all devices
are simulated, and what is sent is what is reported, part for part.
"""

import dataclasses
import itertools
import math
import random

import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.comm.steps import aligned
from gshard.core.mesh import Mesh
from gshard.core.plan import Ring, entering, leaving
from gshard.core.program import Value, itemsize
from gshard.core.rule import operand_sharding, result_sharding
from gshard.testing import rule_checks
from gshard.tracing.trace import trace
from sampled import crossed

MESHES = {
    "2x3": Mesh.abstract(a=2, b=3), "2x2": Mesh.abstract(a=2, b=2), "4x3": Mesh.abstract(a=4, b=3),
    "5": Mesh.abstract(a=5),
}  # fmt: skip
# Sizes that divide, that do not, that are below the number of devices, and 1.
PRODUCTS = {
    "even": ("ik,kj->ij", (12, 24), (24, 12)), "uneven": ("ik,kj->ij", (7, 11), (11, 13)),
    "short": ("ik,kj->ij", (3, 2), (2, 1)), "batched": ("bik,bkj->bij", (5, 4, 6), (5, 6, 7)),
    "two sums": ("aik,kjbi->baj", (3, 4, 6), (6, 5, 2, 4)), "vector": ("k,jk->j", (9,), (8, 9)),
}  # fmt: skip


def rings_of(e, split, mesh):
    rule = e.rule
    for f, factor in enumerate(rule.factors):
        for count in range(1, len(mesh.atoms) + 1):
            for atoms in itertools.permutations(mesh.atoms, count):
                if not aligned(factor.size, mesh.count(split.get(f, ())), mesh.count(atoms)):
                    continue
                for i, dims in enumerate(rule.operands):
                    whole = operand_sharding(rule, i, split)
                    if (f,) in dims and not set(atoms) & {*whole.atoms, *dict(whole.unreduced)}:
                        yield Ring(f, i, atoms)
                made = result_sharding(rule, 0, split)
                if (f,) in rule.results[0] and set(atoms) <= set(dict(made.unreduced)):
                    yield Ring(f, None, atoms)


def plan_of(alone, split, ring, mesh):
    """A plan in which operands are sharded as the ring takes them; the result goes to every device."""
    plan, e = rule_checks.plan_of(alone.program, alone.equation, split, mesh), alone.equation
    placed = {v: entering(e.rule, split, ring, i) for i, v in enumerate(e.inputs) if isinstance(v, Value)}
    return dataclasses.replace(plan, shardings={**plan.shardings, **placed}, rings={e: ring})


def sent_in(ring, e, split, mesh):
    """What each device is to send: every other part once."""
    if ring.operand is None:
        v, sharding = e.outputs[0], leaving(e.rule, split, ring, 0)
    else:
        v, sharding = e.inputs[ring.operand], entering(e.rule, split, ring, ring.operand)
    return math.prod(sharding.local_shape(mesh, v.shape)) * itemsize(v.dtype) * (ring.steps(mesh) - 1)


@pytest.mark.parametrize(("name", "on"), crossed(list(PRODUCTS), list(MESHES), one_in=3))
@pytest.mark.one_in(3)
def test_rings_of_every_kind_compute_the_whole(name, on):
    check(name, on, 1, np.int32)
    if name == "uneven":
        check(name, on, 1, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_very_many_rings_compute_the_whole(name, on, dtype):
    check(name, on, 6, dtype)


def check(name, on, most, dtype):
    text, lhs, rhs = PRODUCTS[name]
    rng, mesh = np.random.default_rng(len(name)), MESHES[on]
    arguments = [rng.integers(-9, 9, shape).astype(dtype) for shape in (lhs, rhs)]
    program = trace(lambda a, b: jnp.einsum(text, a, b), *arguments)
    (e,) = (e for e in program.block.equations if e.rule is not None and e.rule.part is not None)
    alone = rule_checks.Alone.of(program, e, arguments)
    splits = [{}, *rule_checks.splits_of(e.rule, mesh, 40), *alone.passing(mesh)]
    kinds = {}
    for split in splits:
        for ring, both_ways, two_steps in itertools.product(rings_of(e, split, mesh), (False, True), (False, True)):
            kind = ring.operand is None, (ring.factor,) in e.rule.results[0], two_steps
            way = dataclasses.replace(ring, both_ways=both_ways, two_steps=two_steps)
            if mesh.size > 4:  # the parts around the ring in an order of their own
                way = dataclasses.replace(way, order=tuple(random.Random(on).sample(range(n := ring.steps(mesh)), n)))
            kinds.setdefault(kind, []).append((split, way))
    assert len(kinds) > 1
    draw = random.Random(0)
    for split, ring in (way for ways in kinds.values() for way in draw.sample(ways, min(most, len(ways)))):
        spmd = rule_checks.emit(plan_of(alone, split, ring, mesh))
        told = sum(c.total_bytes for c in spmd.collectives if c.why == f"collective matmul of {e.name}")
        assert told == sent_in(ring, e, split, mesh), (split, ring)
        try:
            assert "rounding" not in alone.check(spmd, split, 0.0)
        except gshard.rules.RuleError as error:
            raise AssertionError(f"{ring}: {error}") from error
