"""Equal problems get equal plans: a plan does not cost more because the mesh is written otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard

WEIGHTS, ROWS = (256, 3, 8, 32), (64, 512, 256)


def loss(w: Any, x: Any) -> Any:
    """One attention layer with a joint projection of queries, keys and values."""
    q, k, v = jnp.einsum("btd,dchk->cbthk", x, w)
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k), -1)
    return jnp.mean(jnp.einsum("bhqs,bshk->bqhk", weights, v) ** 2)


def explained(axes: Mapping[str, int], w_spec: P, x_spec: P, **options: Any) -> gshard.Explanation:
    """A training step whose weights, new weights and batch are marked so."""

    def step(w: Any, x: Any) -> Any:
        w, x = gshard.shard(w, w_spec), gshard.shard(x, x_spec)
        return gshard.shard(w - 0.1 * jax.grad(loss)(w, x), w_spec)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (WEIGHTS, ROWS))
    found = gshard.explain(step, w, x, mesh=gshard.Mesh.abstract(**axes), **options)
    assert isinstance(found, gshard.Explanation)
    return found


# For each row: the axes of weights and of the batch on a mesh, and the same on a mesh in which axes are divided.
CUTS: list[tuple[dict[str, int], Any, Any, dict[str, int], Any, Any]] = [
    ({"a": 8}, "a", "a", {"a": 4, "b": 2}, ("a", "b"), ("a", "b")),
    ({"a": 8}, "a", "a", {"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("a", "b", "c")),
    ({"a": 2, "b": 4}, "b", ("a", "b"), {"a": 2, "b": 2, "c": 2}, ("b", "c"), ("a", "b", "c")),
    ({"a": 8}, "a", "a", {"a": 2, "b": 2, "c": 2}, ("a", "c"), ("a", "b", "c")),
    ({"a": 16}, "a", "a", {"a": 2, "b": 2, "c": 2, "d": 2}, ("a", "b", "c", "d"), ("a", "b", "c", "d")),
    ({"a": 4, "m": 4}, "a", "a", {"a": 2, "b": 2, "m": 4}, ("a", "b"), ("a", "b")),
]


@pytest.mark.parametrize("whole, w, x, divided, w_cut, x_cut", CUTS)
def test_a_divided_axis_costs_no_more(whole: Any, w: Any, x: Any, divided: Any, w_cut: Any, x_cut: Any) -> None:
    assert math.prod(whole.values()) == math.prod(divided.values())
    one, other = explained(whole, P(w), P(x)), explained(divided, P(w_cut), P(x_cut))
    assert other.total_bytes <= 1.01 * one.total_bytes
    machine = f"h100:1x{math.prod(whole.values())}" if len(divided) < 4 else "h100:2x8"
    timed = [
        explained(axes, P(*spec), P(*batch), machine=machine).cost(machine).seconds
        for axes, spec, batch in ((whole, (w,), (x,)), (divided, (w_cut,), (x_cut,)))
    ]
    assert timed[1] <= 1.01 * timed[0]


# For each row: a mesh, the axes of weights and of the batch, and another order of all axes.
ORDERS: list[tuple[dict[str, int], str, str, str]] = [
    ({"a": 2, "b": 4}, "ab", "ab", "ba"),
    ({"a": 2, "b": 4}, "a", "ab", "ba"),
    ({"a": 2, "b": 2, "c": 2}, "bc", "abc", "cab"),
    ({"a": 2, "b": 2, "c": 2, "d": 2}, "abcd", "abcd", "bdac"),
]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("axes, w, x, order", ORDERS)
def test_another_order_of_axes_costs_no_more(axes: Any, w: str, x: str, order: str, timed: bool) -> None:
    """The order of a mesh's axes is one thing, the order in which marks name them another: neither costs anything."""

    machine = f"h100:1x{math.prod(axes.values())}" if timed else None

    def cost(axes: dict[str, int], w: Any, x: Any) -> float:
        found = explained(axes, P(w), P(x), machine=machine)
        return found.cost(machine).seconds if machine else found.total_bytes

    given = cost(axes, tuple(w), tuple(x))
    assert cost({axis: axes[axis] for axis in order}, tuple(w), tuple(x)) <= 1.01 * given, "of the mesh"
    named = [tuple(sorted(axes, key=order.index)) for axes in (w, x)]
    assert cost(axes, *named) <= 1.01 * given, "of the marks"


@pytest.mark.parametrize("ones", [1, 5, 11])
def test_axes_of_one_device_change_nothing(ones: int) -> None:
    axes = {"data": 4, "model": 2}
    more = {f"one{i}": 1 for i in range(ones // 2)} | axes | {f"one{i}": 1 for i in range(ones // 2, ones)}
    one, other = (explained(some, P("data", None, "model"), P("data")) for some in (axes, more))
    assert other.bytes_by_kind == one.bytes_by_kind
    assert other.plan.gap == one.plan.gap


def test_names_of_axes_change_nothing() -> None:
    one = explained({"a": 2, "b": 4}, P("b", None, "a"), P(("a", "b")))
    other = explained({"z": 2, "y": 4}, P("y", None, "z"), P(("z", "y")))
    assert other.bytes_by_kind == one.bytes_by_kind


def test_many_small_dimensions_are_planned() -> None:
    """An axis of two for each qubit of a state vector: choices grow with the dimensions, not with their products."""

    def circuit(state: Any, gate: Any) -> Any:
        state = gshard.shard(state, P("a", "b")).astype(jnp.float32)
        for q in range(3):
            state = jnp.moveaxis(jnp.tensordot(gate, state, ((1,), (q,))), 0, q)
        return state

    state, gate = jax.ShapeDtypeStruct((2,) * 5, jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.float32)
    found = gshard.explain(circuit, state, gate, mesh=gshard.Mesh.abstract(a=2, b=2))
    assert found.total_bytes <= 3 * 32 * 4
