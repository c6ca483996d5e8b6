"""The law: an equation run on shards, in every way its rule allows, computes what it computes whole.

Each way of splitting is put into a plan by hand, emitted by the partitioner as in a real program, and simulated for all
devices. Padding of uneven shards is poisoned on the way in, so that a mask that is missing shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emitted import emitted, reported
from gshard.comm.simulate import simulate
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program import Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid, place
from gshard.passes.partition import partition
from gshard.passes.trace import trace
from gshard.rules.registry import known_primitives
from harness import Row, elementwise, rows

MESH = Mesh.abstract(a=2, b=3)
ATOMS: tuple[Atoms, ...] = ((), ("a",), ("b",), ("a", "b"), ("b", "a"))
SPLITS = 8  # of each row, drawn with a fixed seed where there are more
SPLITS_ELEMENTWISE = 3  # of rows that differ in the primitive only: one rule serves them all
ROWS = {r.name: r for r in rows()}
ELEMENTWISE = {r.name for r in elementwise()}


def the_equation(program: Program, primitive: str) -> Equation | None:
    return next((e for e in program.block.walk() if e.name == primitive), None)


def splits_of(equation: Equation, most: int) -> list[Split]:
    """Ways to split an equation: all of them, or a sample."""
    rule = equation.rule
    assert rule is not None
    ways: list[Split] = []
    choices = [ATOMS if f.kind != "whole" else ((),) for f in rule.factors]
    for chosen in itertools.product(*choices):
        split = {f: atoms for f, atoms in enumerate(chosen) if atoms}
        if split and is_valid(rule, split, MESH):
            ways.append(split)
    return ways if len(ways) <= most else random.Random(0).sample(ways, most)


def plan_of(program: Program, equation: Equation, split: Split) -> Plan:
    """One equation is split, everything else is whole on every device."""
    assert equation.rule is not None
    shardings = {v: Sharding.replicated(len(v.shape)) for v in program.block.inputs}
    for e in program.block.walk():
        shardings |= {v: Sharding.replicated(len(v.shape)) for v in e.outputs}
    for value, dims in zip(equation.inputs, equation.rule.operands, strict=True):
        if isinstance(value, Value) and not any(value in e.outputs for e in program.block.walk()):
            shardings[value] = Sharding(place(dims, split))
    splits = {e: split if e is equation else {} for e in program.block.walk()}
    return Plan(program, MESH, shardings, splits, {})


def run_everywhere(plan: Plan, arguments: Sequence[Any]) -> list[list[np.ndarray]]:
    """The results on every device."""
    spmd = partition(plan)
    assert emitted(spmd.jaxpr, MESH.atom_sizes) == reported(spmd.collectives)
    (equation,) = (e for e in spmd.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    consts = dict(zip(spmd.jaxpr.jaxpr.constvars, spmd.jaxpr.consts, strict=True))
    given = dict(zip(spmd.jaxpr.jaxpr.invars, arguments, strict=True))
    stacked = []
    for var, names in zip(equation.invars, [None] * len(equation.invars), strict=True):
        del names
        if var in given:
            at = list(given).index(var)
            stacked.append(parts_of(given[var], spmd.in_shardings[at]))
        else:
            stacked.append([consts[var]] * MESH.size)
    results = simulate(equation.params["jaxpr"], (), MESH.atom_sizes, stacked)
    return [[np.asarray(r) for r in result] for result in results]


def parts_of(x: Any, sharding: Sharding) -> list[Any]:
    """Each device's part of a whole array that divides evenly."""
    parts = []
    for at in itertools.product(*(range(n) for n in MESH.atom_sizes.values())):
        place_of = dict(zip(MESH.atoms, at, strict=True))
        cut = []
        for n, atoms in zip(np.shape(x), sharding.dims, strict=True):
            number = 0
            for a in atoms:
                number = number * MESH.atom_sizes[a] + place_of[a]
            size = n // MESH.count(atoms)
            cut.append(slice(number * size, (number + 1) * size))
        parts.append(x[tuple(cut)] if cut else x)
    return parts


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that a move makes is filled with values that spoil whatever they are mixed into."""

    def pad(x: Any, dim: int, size: int) -> Any:
        missing = size - x.shape[dim]
        if not missing or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x if not missing else real(x, dim, size)
        poison = (
            jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype == jnp.bool_ or jnp.iinfo(x.dtype).max // 3
        )
        width = [(0, missing if d == dim else 0) for d in range(x.ndim)]
        return jnp.pad(x, width, constant_values=jnp.asarray(poison, x.dtype))

    from gshard.comm import steps

    real = steps._pad
    monkeypatch.setattr(steps, "_pad", pad)


@pytest.mark.parametrize("name", ROWS)
def test_every_split_computes_the_whole(name: str, poisoned: None) -> None:
    check(ROWS[name], SPLITS_ELEMENTWISE if name in ELEMENTWISE else SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_very_many_splits_compute_the_whole(name: str, poisoned: None) -> None:
    check(ROWS[name], 40)


def check(row: Row, most: int) -> None:
    """Compares every split of a row's equation with the whole."""
    program = trace(row.function, *row.arguments)
    equation = the_equation(program, row.primitive)
    if equation is None:
        pytest.skip(f"this JAX has no primitive {row.primitive} here")
    assert equation.rule is not None
    assert equation.rule.known
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(row.function)(*row.arguments))]
    arguments = [*program.captured, *(_array(x) for x in jax.tree.leaves(row.arguments))]
    for split in splits_of(equation, most):
        results = run_everywhere(plan_of(program, equation, split), arguments)
        for result, want in zip(results, expected, strict=True):
            for got in result:
                compare(got, want, row.tolerance, f"{equation.rule}; split {split}")


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(jnp.asarray(x))


def compare(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Equal bits, or close where sums may be made in another order."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)


def test_every_rule_has_a_row() -> None:
    """A primitive that the table does not reach is named here with the reason."""
    without = {
        "log2", "one_minus_square", "polynomial",  # only in newer JAX; elementwise
        "add_any", "eq_to", "le_to", "lt_to",  # made by JAX itself; elementwise
        "copy_p", "name", "random_gamma_grad", "igamma_grad_a", "polygamma", "regularized_incomplete_beta",
        "auto_to_manual", "manual_to_auto", "part_index", "shard_map",  # one split only; see tests/rules/test_manual.py
        "platform_index",  # no arrays; see "calls" in tests/passes/test_programs.py
        "sharding_constraint", "device_put",  # need a mesh; see tests/passes/test_programs.py
        "select_and_scatter",  # made by JAX itself while lowering; batch dimensions only
        "cholesky_update", "eig", "hessenberg", "householder_product", "lu_pivots_to_permutation", "geqrf", "geqp3",
        "schur", "symmetric_product", "tridiagonal",  # batch dimensions only, as qr
        "stack", "unstack", "split", "tile", "square", "copy", "stop_gradient",  # written otherwise by some JAX
    }  # fmt: skip
    reached = {r.primitive for r in ROWS.values()}
    assert set(known_primitives()) - reached - without == set()
