"""An axis of the mesh that marks part in many: plans stay small, and compute the same."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.mesh import Mesh
from gshard.planning.propagate import propagate
from gshard.planning.reshard_costs import axes_of, is_considered
from gshard.planning.strategies import shardings
from gshard.testing.rule_checks import emit, parts_of, run_on_all
from gshard.tracing.trace import trace

SHAPES = ((16, 6), (2, 12), (4, 6), (8, 5))


def step(devices: int, weights: Any, x: Any) -> Any:
    """Weights less their gradients, which are split in as many parts as rows and devices have in common."""

    def loss(weights: Any) -> Any:
        return sum(jnp.sum(jnp.tanh(x[:, : w.shape[0]] @ w) ** 2) for w in weights)

    gradients = jax.grad(loss)(weights)
    parts = [math.gcd(g.shape[0], devices) for g in gradients]
    return [w - 0.1 * gshard.split(g, 0, n) for w, g, n in zip(weights, gradients, parts, strict=True)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 6])
def test_ways_grow_slowly_with_the_parts_of_an_axis(parts: int) -> None:
    """Of a product of all places and parts there would be 5 to the power of parts."""
    mesh = Mesh.abstract(devices=2**parts)
    given = tuple((atom,) for atom in mesh.atoms)
    found = shardings((64, 64, 64), mesh, given, unreduced="add")
    assert len(found) <= min(5**parts, 5 + 5 * 4 * (parts - 1))
    assert len(found) >= 1 + 4  # none, and all of it in any place


def test_what_is_considered_is_so_of_operands_too() -> None:
    """An operand that lacks a dimension has no parts there: the rest is considered as well."""
    for k in range(6):
        both = [0] * k + [1] * (5 - k)
        assert is_considered(both)
        assert is_considered([None if p == 0 else p for p in both])
        assert is_considered([None if p == 1 else p for p in both])


@pytest.mark.parametrize("times", [1, 128])
def test_gradients_in_many_parts(times: int, rng: np.random.Generator) -> None:
    """On 16 devices and on 2,048: each gradient is split as is said, and what leaves is right."""
    mesh = Mesh.abstract(devices=16 * times)
    weights = [rng.standard_normal((n * times, m)).astype(np.float32) / 9 for n, m in SHAPES]
    x = rng.standard_normal((6, 16 * times)).astype(np.float32)
    program = trace(functools.partial(step, mesh.size), weights, x)
    plan = propagate(program, mesh)
    said = [plan.shardings[e.outputs[0]] for e in plan.program.block.walk() if e.mark is not None]
    assert [mesh.count(s.dims[0]) for s in said] == [16 * times, 2 * times, 4 * times, 8 * times]
    assert len(axes_of(mesh, said)) == 4
    if times == 1:
        spmd = emit(plan)
        found, expected = run_on_all(spmd, [*weights, x]), step(16, weights, x)
        for parts, whole, sharding in zip(found, expected, spmd.out_shardings, strict=True):
            for got, want in zip(parts, parts_of(whole, sharding, mesh), strict=True):
                np.testing.assert_allclose(got, want, 1e-5, 1e-5)
