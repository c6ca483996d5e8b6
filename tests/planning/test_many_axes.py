"""Meshes of many axes: plans consider few of them away from what propagation says, and compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.planning.objective import Bytes
from gshard.planning.propagate import propagate
from gshard.planning.reshard_costs import axes_of, in_two, joined
from gshard.planning.strategies import shardings
from gshard.testing.rule_checks import emit, parts_of, run_on_all
from gshard.tracing.trace import trace


@pytest.mark.parametrize("axes", [4, 5, 6])
def test_ways_are_near_what_is_expected(axes: int) -> None:
    """Of 3 places and none for each axis there would be 4 to the power of axes."""
    mesh = Mesh.abstract(**{f"axis{i}": 2 for i in range(axes)})
    given = tuple(mesh.atoms_of.values())
    expected = Sharding((given[0], given[1], given[2]))
    found = shardings((64, 64, 64), mesh, given, near=(expected,), runs=())
    assert found[0] == Sharding(((), (), ()))
    assert expected in found
    assert len(found) <= 2 * (1 + 3 * axes + 9 * axes * (axes - 1) // 2)
    assert {*found} < {*shardings((64, 64, 64), mesh, given)}


def test_axes_that_are_one_move_as_several() -> None:
    """Those that nobody names stand apart in the mesh."""
    mesh = Mesh.abstract(a=2, b=3, c=2, d=5, e=2)
    apart = axes_of(mesh)
    together = joined(mesh, apart, [Sharding((("b",), ("d",)))])
    assert together == (("b",), ("d",), ("a", "c", "e"))
    partial = Sharding(((), ("d",))).with_unreduced(dict.fromkeys("abce", "add"))
    targets = Sharding(((), ())), Sharding((("a", "c", "e"), ("d",))), Sharding((("b",), ("d",)))
    for target in targets:
        one, several = (Bytes(mesh, axes).move(partial, target, (240, 60), 4) for axes in (together, apart))
        assert one == several


def test_axes_that_all_have_in_a_row_are_one() -> None:
    mesh = Mesh.abstract(a=2, b=3, c=2, d=5)
    rows = Sharding((("a", "b"), ("c",)))
    assert joined(mesh, axes_of(mesh), [rows]) == (("a", "b"), ("c",), ("d",))
    assert joined(mesh, axes_of(mesh), [rows.with_unreduced({"d": "add"})]) == (("a", "b"), ("c",), ("d",))
    for other in (Sharding((("a",), ())), Sharding((("b", "a"), ())), Sharding((("a",), ("b",)))):
        assert joined(mesh, axes_of(mesh), [rows, other]) == (("a",), ("b",), ("c",), ("d",))
    partial = Sharding(((), ())).with_unreduced({"a": "add"})
    assert joined(mesh, axes_of(mesh), [rows, partial]) == (("a",), ("b",), ("c",), ("d",))


@pytest.mark.parametrize(
    ("marked", "found"),
    [
        ((), [("a", "bcd"), ("ab", "cd"), ("abc", "d")]),
        (("c",), [("c", "a", "bd"), ("c", "ab", "d")]),
        (("c", "a"), [("a", "c", "bd")]),
    ],
)
def test_axes_without_a_mark_are_searched_as_two(marked: tuple[str, ...], found: list[tuple[str, ...]]) -> None:
    mesh = Mesh.abstract(a=2, b=3, c=2, d=5)
    said = [Sharding(((name,), ())) for name in marked]
    assert in_two(mesh, axes_of(mesh), said) == [tuple(map(tuple, axes)) for axes in found]


def experts(weights: Any, x: Any) -> Any:
    """A layer of experts: samples, positions, experts and hidden units, each over an axis of its own."""

    def loss(weights: Any) -> Any:
        gate, wi, wo = weights
        tokens = gshard.shard(x, P("data", "sequence"))
        g = jax.nn.softmax(tokens @ gate)
        h = jnp.einsum("bsm,emh->ebsh", tokens, gshard.shard(wi, P("expert", None, "model")))
        y = jnp.einsum("ebsh,ehm->ebsm", jnp.tanh(h), gshard.shard(wo, P("expert", "model")))
        return jnp.sum(jnp.einsum("ebsm,bse->bsm", y, g) ** 2)

    return jax.grad(loss)(weights)


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), ("pods", "hosts")])
def test_a_layer_over_four_axes(more: tuple[str, ...], rng: np.random.Generator) -> None:
    """With axes besides that no mark names, which are one."""
    mesh = Mesh.abstract(**dict.fromkeys(("data", "sequence", "expert", "model", *more), 2))
    shapes = (6, 4), (4, 6, 10), (4, 10, 6)
    weights = [rng.standard_normal(shape).astype(np.float32) / 3 for shape in shapes]
    x = rng.standard_normal((4, 8, 6)).astype(np.float32)
    plan = propagate(trace(experts, weights, x), mesh)
    said = [plan.shardings[e.outputs[0]] for e in plan.program.block.walk() if e.mark is not None]
    assert {mesh.format_atoms(a) for s in said for a in s.dims if a} == {"data", "sequence", "expert", "model"}
    assert len(axes_of(mesh, said)) == 4 + len(more)
    spmd = emit(plan)
    found, whole = run_on_all(spmd, [*weights, x]), experts(weights, x)
    for parts, want, sharding in zip(found, whole, spmd.out_shardings, strict=True):
        for got, own in zip(parts, parts_of(want, sharding, mesh), strict=True):
            np.testing.assert_allclose(got, own, 1e-4, 1e-4)
