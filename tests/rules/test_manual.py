"""Manual regions: the user's own per-device code in the middle of a partitioned program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from emitted import emitted, reported
from gshard.core.errors import ShardingError
from gshard.core.mesh import Mesh
from sampled import crossed


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


# -- auto_to_manual, manual_to_auto ----------------------------------------------------------------------------------


def in_parts(x: Any, w: Any, parts: int) -> tuple[Any, Any]:
    """Rows in parts, a weight that every part has, the number of the part; parts side by side, and their sum."""
    part, every = gshard.auto_to_manual(x, 0, parts), gshard.auto_to_manual(w, None, parts)
    y = jnp.tanh(part @ every) + gshard.part_index(parts)
    return gshard.manual_to_auto(y, 0, parts, x.shape[0]), gshard.manual_to_auto(jnp.sum(y, 0), None, parts)


def as_one(x: Any, w: Any, parts: int) -> tuple[Any, Any]:
    size = -(-x.shape[0] // parts)
    padded = jnp.pad(x, ((0, parts * size - x.shape[0]), (0, 0)))
    y = jnp.tanh(padded @ w) + jnp.arange(parts * size)[:, None] // size
    return y[: x.shape[0]], y.sum(0)


def scalar(f: Callable[..., tuple[Any, Any]], parts: int) -> Callable[..., Any]:
    def loss(x: Any, w: Any) -> Any:
        rows, total = f(x, w, parts)
        return jnp.sum(jnp.sin(rows)) + jnp.sum(jnp.cos(total))

    return loss


@pytest.mark.parametrize(("parts", "n"), crossed([2, 4, 8], [16, 10, 3], one_in=3))
@pytest.mark.one_in(3)
def test_parts_and_back(parts: int, n: int, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((n, 5), np.float32), rng.standard_normal((5, 7), np.float32)
    close(gshard.jit(lambda x, w: in_parts(x, w, parts), mesh=8)(x, w), as_one(x, w, parts))
    got = gshard.jit(jax.grad(scalar(in_parts, parts), argnums=(0, 1)), mesh=8)(x, w)
    close(got, jax.grad(scalar(as_one, parts), argnums=(0, 1))(x, w))


def test_parts_are_not_moved(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((16, 5), np.float32))
    found = gshard.explain(
        lambda x: gshard.manual_to_auto(jnp.cumsum(gshard.auto_to_manual(x, 0, 8), 0), 0, 8), x, mesh=8
    )
    assert found.total_bytes == 0


def test_loops_and_branches_on_parts(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 6), np.float32)

    def f(x: Any) -> Any:
        part = gshard.auto_to_manual(x, 0, 4)
        start = jnp.zeros((2,), jnp.float32)
        end, each = lax.scan(lambda c, column: (c * 0.5 + column, c), start, part.T)
        big = lax.cond(jnp.sum(part) > 0, lambda y: y * 2, lambda y: -y, end)
        until = lax.while_loop(lambda y: jnp.sum(jnp.abs(y)) < 100, lambda y: y * 3 + 1, big)
        return gshard.manual_to_auto(until, 0, 4), gshard.manual_to_auto(each.T, 0, 4)

    def part_by_part(x: Any) -> Any:
        found = [jax.jit(gshard_free)(x[2 * i : 2 * i + 2]) for i in range(4)]
        return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])

    def gshard_free(part: Any) -> Any:
        end, each = lax.scan(lambda c, column: (c * 0.5 + column, c), jnp.zeros((2,), jnp.float32), part.T)
        big = lax.cond(jnp.sum(part) > 0, lambda y: y * 2, lambda y: -y, end)
        return lax.while_loop(lambda y: jnp.sum(jnp.abs(y)) < 100, lambda y: y * 3 + 1, big), each.T

    close(gshard.jit(f, mesh=8)(x), part_by_part(x))


def test_vmap_over_parts(rng: np.random.Generator) -> None:
    xs, w = rng.standard_normal((3, 10, 5), np.float32), rng.standard_normal((5, 7), np.float32)
    mapped = jax.vmap(lambda x: in_parts(x, w, 4))
    close(gshard.jit(mapped, mesh=8)(xs), jax.vmap(lambda x: as_one(x, w, 4))(xs))


BAD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "returned": (lambda x, w: gshard.auto_to_manual(x, 0, 2), "returns one device's part"),
    "mixed": (lambda x, w: gshard.manual_to_auto(gshard.auto_to_manual(x, 0, 2) @ w, 0, 2), "mixes one device's part"),
    "mixed counts": (
        lambda x, w: gshard.manual_to_auto(
            gshard.auto_to_manual(x, 0, 2)[:2] + gshard.auto_to_manual(x, 0, 4)[:2], 0, 2
        ),
        "mixes one device's part of 4 with parts of 2",
    ),
    "marked": (
        lambda x, w: gshard.manual_to_auto(gshard.split(gshard.auto_to_manual(x, 0, 2), 1, 2), 0, 2),
        "cannot be marked",
    ),
    "twice": (lambda x, w: gshard.auto_to_manual(gshard.auto_to_manual(x, 0, 2), 0, 2), "already"),
    "never in": (lambda x, w: gshard.manual_to_auto(x, 0, 2), "is whole"),
    "wrong size": (lambda x, w: gshard.manual_to_auto(gshard.auto_to_manual(x, 0, 2), 0, 2, 99), "do not make 99"),
    "no such dimension": (lambda x, w: gshard.auto_to_manual(x, 2, 2), "no dimension 2"),
    "too many parts": (
        lambda x, w: gshard.manual_to_auto(gshard.auto_to_manual(x, 0, 16), 0, 16, 10),
        "the mesh has 8 devices",
    ),
    "a loop that mixes": (
        lambda x, w: lax.scan(lambda c, _: (gshard.auto_to_manual(c, None, 2), None), x, None, length=2)[0],
        "one device's part",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told(name: str, rng: np.random.Generator) -> None:
    function, message = BAD[name]
    x, w = rng.standard_normal((10, 5), np.float32), rng.standard_normal((5, 7), np.float32)
    with pytest.raises(ShardingError, match=message):
        gshard.jit(function, mesh=8)(x, w)


def test_outside_of_gshard_it_says_so() -> None:
    with pytest.raises(ShardingError, match=r"no meaning outside of gshard\.jit"):
        jax.jit(lambda x: gshard.auto_to_manual(x, 0, 2))(jnp.ones(4))
    assert jax.jit(lambda x: gshard.manual_to_auto(gshard.auto_to_manual(x, 0, 1), 0, 1))(jnp.ones(4)).shape == (4,)


# -- manual ----------------------------------------------------------------------------------------------------------


def test_a_function_of_parts_means_the_same_anywhere(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((6, 16), np.float32), rng.standard_normal((6, 5), np.float32)

    def f(x: Any, w: Any) -> Any:
        shifted = lax.ppermute(x, "parts", [(i, (i + 1) % 8) for i in range(8)])
        return jnp.cumsum(shifted, 1), lax.psum(x.T @ w, "parts") + lax.axis_index("parts")

    g = gshard.manual(f, num_partitions=8, in_dims=(1, None), out_dims=(1, 0))
    want = jax.jit(g)(x, w)
    rolled = np.roll(x, 2, 1).reshape(6, 8, 2)
    close(want[0], np.cumsum(rolled, 2).reshape(6, 16))
    close(gshard.jit(g, mesh=8)(x, w), want)
    for text, bad in {"in_dims has 2": (x,), "equal parts": (x[:, :15], w)}.items():
        with pytest.raises(ShardingError, match=text):
            g(*bad)


# -- shard_map -------------------------------------------------------------------------------------------------------


def talking(x: Any, w: Any) -> Any:
    y = x @ w
    z = lax.psum(y, "b") + lax.all_gather(y, "b").sum(0) + lax.pmax(lax.stop_gradient(y), "b")
    z += lax.psum_scatter(jnp.tile(y, (1, 4)), "b", scatter_dimension=1, tiled=True)
    z += lax.all_to_all(y.reshape(-1, 4, 4), "b", 1, 1, tiled=True).reshape(y.shape)
    z, _ = lax.scan(lambda c, _: (lax.ppermute(c, "b", [(k, (k + 1) % 4) for k in range(4)]), None), z, None, length=3)
    return jnp.where(lax.axis_index("b") == 1, z, -z)


def user_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("mesh", "some_axes", "check_vma"), crossed(["the same", 8], [False, True], [True, False], one_in=3)
)
def test_a_shard_map_inside(mesh: Any, some_axes: bool, check_vma: bool, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 16), np.float32)
    rows = None if some_axes else "a"
    region = jax.shard_map(
        talking,
        mesh=user_mesh(),
        in_specs=(P(rows, "b"), P("b")),
        out_specs=P(rows, "b"),
        check_vma=check_vma,
        **({"axis_names": {"b"}} if some_axes else {}),
    )

    def f(x: Any, w: Any) -> Any:
        return jnp.sin(region(jnp.cos(x), w))

    partitioned = gshard.jit(f, mesh=user_mesh() if mesh == "the same" else mesh)
    close(partitioned(x, w), jax.jit(f)(x, w))
    spmd = partitioned.lower(x, w).spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(f(x, w) ** 2)

    close(gshard.jit(jax.grad(loss, argnums=(0, 1)), mesh=8)(x, w), jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w))


def test_nested_shard_maps(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 8), np.float32)

    def inner(y: Any) -> Any:
        return y * lax.psum(jnp.sum(y), "b") + lax.axis_index("b")

    def outer(x: Any) -> Any:
        y = jax.shard_map(inner, in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"})(x)
        return y + lax.psum(jnp.sum(x), "a")

    region = jax.shard_map(outer, mesh=user_mesh(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    close(gshard.jit(region, mesh=8)(x), jax.jit(region)(x))


def test_axes_of_one_device(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 6), np.float32)
    mesh = jax.make_mesh((8, 1), ("a", "one"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(x: Any) -> Any:
        y = lax.psum(x, "one") + lax.all_gather(x, "one", axis=0, tiled=True) + lax.axis_index("one")
        y += lax.ppermute(x, "one", [(0, 0)]) + lax.all_to_all(x, "one", 0, 1, tiled=True)
        return y + lax.all_gather(x, "one")[0] + lax.psum_scatter(x, "one", tiled=True)

    region = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    close(gshard.jit(region, mesh=mesh)(x), 6 * x)


def test_a_shard_map_over_other_devices() -> None:
    other = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("a",))
    region = jax.shard_map(lambda x: x, mesh=other, in_specs=P("a"), out_specs=P("a"))
    with pytest.raises(ShardingError, match="over other devices"):
        gshard.jit(region, mesh=8)(jnp.ones(8))


def test_planned_for_a_mesh_without_devices() -> None:
    mesh = jax.sharding.AbstractMesh((16, 32), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    region = jax.shard_map(lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"))
    found = gshard.explain(region, jax.ShapeDtypeStruct((32, 64), jnp.float32), mesh=Mesh.abstract(a=16, b=32))
    assert found.bytes_by_kind == {"all_reduce": 2 * 2 * 2 * 4 * 31 // 32}
