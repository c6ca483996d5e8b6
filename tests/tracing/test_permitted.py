"""Parts of sums of floats pass products where the user permits it: by a mark, or for a whole program.

Numbers are those of the unpartitioned program, wherever a mark stands and whatever contains it; fewer bytes are sent;
nothing changes without a mark or option; and what cannot be unreduced is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near_largest
from gshard import replicate, shard, split
from gshard.core.errors import PlanError, ShardingError
from gshard.testing import assert_proved
from harness import normal

X, V, W = normal(16, 64), normal(64, 24), normal(24, 6)


def parts(x, *axes):
    return shard(x, P(*(None,) * x.ndim, unreduced=set(axes)))


def product(x, v):
    """In parts over ``a``."""
    return parts(split(x, 1, "a") @ v, "a")


def sent(f, *arguments, mesh=8, **options):
    found = gshard.explain(gshard.jit(f, mesh=mesh, **options), *arguments)
    return sorted((row.kind, row.times, row.bytes) for row in found.collectives)


def chain(u, v, w):
    return replicate((split(u, 1, 8) @ v) @ w)


def marked_chain(u, v, w):
    return replicate(shard(split(u, 1, 8) @ v, P(None, None, unreduced={"devices"})) @ w)


def low_rank(x, w, a, b):
    x = split(x, 1, 8)
    return replicate(x @ w + ((x @ a) @ b) * 0.5)


def loss_scaled(w, xs, scale):
    """Gradients of micro-batches, each divided by a scale that is known when the program runs."""

    def step(total, x):
        return total + jax.grad(lambda w, x: jnp.sum(jnp.tanh(split(x, 0, 8) @ w) ** 2) * scale)(w, x) / scale, None

    return lax.scan(step, jnp.zeros_like(w), xs)[0]


FEWER = {
    "U V W": (chain, (normal(64, 128), normal(128, 96), normal(96, 8)), [("all_reduce", 1, 2 * 64 * 8 * 4 * 7 // 8)]),
    "low rank": (
        low_rank, (normal(64, 128), normal(128, 64), normal(128, 4), normal(4, 64)),
        [("all_reduce", 1, 2 * 64 * 64 * 4 * 7 // 8)],
    ),
    "scaled losses": (
        loss_scaled, (normal(32, 32), normal(4, 64, 32), np.float32(1024)),
        [("all_reduce", 1, 2 * 32 * 32 * 4 * 7 // 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEWER)
def test_a_program_of_finite_numbers_adds_up_once(name):
    f, arguments, expected = FEWER[name]
    assert sent(f, *arguments, finite=True) == expected
    assert sum(row[2] for row in sent(f, *arguments)) > expected[0][2]
    assert_proved(gshard.jit(f, mesh=8, finite=True), arguments)


def test_a_mark_permits_what_the_option_permits():
    arguments = FEWER["U V W"][1]
    assert sent(marked_chain, *arguments) == FEWER["U V W"][2]
    assert_proved(gshard.jit(marked_chain, mesh=8), arguments)


def test_large_products_are_not_repeated_to_send_less():
    """A sum that is small is finished before what it is multiplied by makes a large product of it."""

    def f(x, v, w):
        return split(split(x, 1, 8) @ v @ w, 1, 8)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((2048, 2048), (2048, 2048), (2048, 32768))]
    mesh = gshard.Mesh.abstract(devices=8)
    costs = [
        gshard.explain(gshard.jit(f, mesh, finite=finite), *shapes).cost("h100:1x8").flops for finite in (False, True)
    ]
    assert costs[1] == costs[0]


def accumulated(v, xs, w):
    def loss(v, x):
        return jnp.mean((jnp.tanh(split(x, 0, "a") @ shard(v, P(None, None, reduced={"a"}))) @ w) ** 2)

    return lax.scan(lambda total, x: (total + jax.grad(loss)(v, x) * np.float32(3), None), jnp.zeros_like(v), xs)[0]


CONTAINERS = {
    "gradient": (
        jax.grad(lambda v, x, w: jnp.sum((product(x, v) @ w) ** 2), argnums=(0, 1, 2)), (V / 64, X, W),
    ),
    "vmap": (lambda xs, v, w: jax.vmap(lambda x: product(x, v) @ w)(xs), (normal(3, 16, 64), V, W)),
    "while": (
        lambda xs, v, w: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + product(xs[c[0]], v) @ w), (0, jnp.zeros((16, 6)))
        )[1],
        (normal(3, 16, 64), V, W),
    ),
    "remat": (
        jax.grad(lambda v, x, w: jnp.sum(jax.checkpoint(lambda v: jnp.sin(product(x, v) @ w))(v))), (V / 64, X, W),
    ),
    "reduced": (accumulated, (V / 8, normal(4, 48, 64), W)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_mark_changes_no_number(name):
    """Where tests/laws/test_any_program.py makes no programs: in derivatives, under vmap, in while loops."""
    f, arguments = CONTAINERS[name]
    assert_proved(gshard.jit(f, mesh={"b": 2, "a": 4}), arguments)


def test_a_value_that_is_whole_is_kept_by_one_device():
    """Signs of zeros included: the others hold the zero that changes nothing."""
    x = np.array([-0.0, 0.0, 3.0, -2.5], np.float32)
    got = gshard.jit(lambda x: jnp.sort(replicate(shard(x, P(None, unreduced={"devices"})) + -0.0)), mesh=8)(x)
    np.testing.assert_array_equal(got, np.sort(x))
    assert np.signbit(np.asarray(got)).sum() == np.signbit(x).sum()


def test_axes_of_another_mesh_are_found_by_their_devices():
    mesh = jax.make_mesh((2, 4), ("b", "a"), axis_types=(AxisType.Auto,) * 2)
    other = jax.make_mesh((4, 2), ("q", "r"), axis_types=(AxisType.Explicit,) * 2)
    third = jax.sharding.Mesh(np.array(jax.devices())[[0, 1, 2, 4, 3, 5, 6, 7]].reshape(2, 4), ("s", "t"))

    def f(x, v, sharding):
        return replicate(2.0 * shard(split(x, 1, "a") @ v, sharding))

    sharding = jax.NamedSharding(other, P(None, None, unreduced={"q"}))
    plan = gshard.jit(lambda x, v: f(x, v, sharding), mesh=mesh).lower(X, V).plan
    assert [plan.format(e.outputs[0]) for e in plan.program.block.walk() if e.mark][1] == "f32[16,24]{U:a.0,b}"
    near_largest(gshard.jit(lambda x, v: f(x, v, sharding), mesh=mesh)(X, V), 2 * X @ V, 2e-5)
    elsewhere = jax.NamedSharding(
        jax.sharding.Mesh(third.devices, third.axis_names, axis_types=(AxisType.Explicit,) * 2),
        P(None, None, unreduced={"t"}),
    )
    with pytest.raises(ShardingError, match="no axes of the mesh are the 4 devices along axis 't'"):
        gshard.jit(lambda x, v: f(x, v, elsewhere), mesh=mesh)(X, V)


def test_the_cotangent_of_a_reduced_value_is_in_parts():
    def f(w, x):
        def loss(w):
            return jnp.sum(jnp.tanh(split(x, 0, 8) @ shard(w, P(None, None, reduced={"devices"}))) ** 2)

        return 0.5 * jax.grad(loss)(w) @ jnp.ones((24, 1))

    mark = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(shard(x, P(reduced={"m"})) ** 2)))(jnp.ones(3))
    assert "unreduced={'m'}" in str(mark)
    back = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(shard(x, P("d", unreduced={"m"})) ** 2)))(jnp.ones(3))
    assert "P('d', reduced={'m'})" in str(back)
    w, x = normal(16, 24), normal(64, 16)
    assert sent(lambda w, x: replicate(f(w, x)), w, x) == [("all_reduce", 1, 2 * 16 * 4 * 7 // 8)]
    assert_proved(gshard.jit(f, mesh=8), (w, x))


def test_programs_with_and_without_it_share_nothing():
    arguments = FEWER["U V W"][1]
    for finite in (False, True, False):
        assert (sent(chain, *arguments, finite=finite) == FEWER["U V W"][2]) is finite
        assert_proved(gshard.jit(chain, mesh=8, finite=finite), arguments)
    plan = gshard.jit(chain, mesh=8, finite=True).lower(*arguments).plan
    recorded = gshard.SavedPlan.of_json(gshard.SavedPlan.of(plan).as_json())
    assert_proved(gshard.jit(chain, mesh=8, plan=recorded, finite=True), arguments)
    with pytest.raises(PlanError, match="made with finite=True"):
        gshard.jit(chain, mesh=8, plan=recorded)(*arguments)


def test_it_reaches_derivatives_and_a_program_around_it():
    u, v, w = normal(64, 512), normal(512, 256) / 20, normal(256, 2)

    def loss(u, v, w):
        return jnp.sum(jnp.tanh(chain(u, v, w)))

    want = jax.grad(loss, argnums=2)(u, v, w)
    near_largest(jax.grad(gshard.jit(loss, mesh=8, finite=True), argnums=2)(u, v, w), want, 1e-4)
    inner = gshard.jit(chain, mesh=8, finite=True)
    assert sum(row[2] for row in sent(lambda u, v, w: inner(u, v, w) + 1, u, v, w)) == 2 * 64 * 2 * 4 * 7 // 8


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)


def typed(x, w):
    return jnp.einsum("ab,bc->ac", x, w, out_sharding=P(None, None, unreduced={"m"}))


def test_types_that_say_unreduced_are_marks(explicit):
    with jax.set_mesh(explicit):
        x, w, ones = (jax.device_put(z, s) for z, s in ((X, P(None, "m")), (V, P("m", None)), (np.ones((16, 24)), P())))

        def f(x, w, ones):
            three = jax.sharding.reshard(3 * ones.astype("float32"), P(None, None, reduced={"m"}))
            return jax.sharding.reshard((typed(x, w) + typed(2 * x, w)) * three, P("m"))

        step = gshard.jit(f, mesh=explicit)
        for _ in range(3):
            near_largest(step(x, w, ones), 9 * (X @ V), 2e-5)
        found = gshard.explain(step, x, w, ones).collectives
        assert [row.kind for row in found if row.kind in ("all_reduce", "reduce_scatter")] == ["reduce_scatter"]


def test_gradients_by_type_are_added_up_once_after_a_loop(explicit):
    with jax.set_mesh(explicit):
        w, xs = jax.device_put(V / 64, P()), jax.device_put(normal(3, 32, 64), P(None, "d"))

        def f(w, xs):
            kept = jax.sharding.reshard(w, P(None, None, reduced={"d"}))

            def loss(w, x):
                return jnp.sum(jnp.einsum("ab,bc->ac", x, w, out_sharding=P("d")) ** 2)

            zeros = jax.sharding.reshard(jnp.zeros_like(w), P(None, None, unreduced={"d"}))
            total, _ = lax.scan(lambda t, x: (t + jax.grad(loss)(kept, x), None), zeros, xs)
            return jax.sharding.reshard(total, P())

        want = jax.grad(lambda w: sum(jnp.sum((x @ w) ** 2) for x in normal(3, 32, 64)))(V / 64)
        near_largest(gshard.jit(f, mesh=explicit)(w, xs), want, 2e-5)
        rows = gshard.explain(gshard.jit(f, mesh=explicit), w, xs).collectives
        assert [(row.kind, row.times) for row in rows if "reduce" in row.kind] == [("all_reduce", 1)]


def test_what_is_outside_of_a_program_is_finished(explicit):
    with jax.set_mesh(explicit):
        x, w = jax.device_put(X, P(None, "m")), jax.device_put(V, P("m", None))
        with pytest.raises(ShardingError, match="result 0 is unreduced"):
            gshard.jit(typed, mesh=explicit)(x, w)
        in_parts = jax.jit(typed)(x, w)
        with pytest.raises(ShardingError, match="argument y is unreduced"):
            gshard.jit(lambda y: jax.sharding.reshard(y, P()), mesh=explicit)(in_parts)
    for asked in ("in_shardings", "out_shardings"):
        with pytest.raises(ShardingError, match=f"{asked} cannot ask for unreduced"):
            gshard.jit(lambda x: x, mesh={"d": 2, "m": 4}, **{asked: P(None, unreduced={"m"})})(X)
    with pytest.raises(ShardingError, match="splits dimension 0, and is unreduced"):
        gshard.jit(lambda x: shard(x, P("m", unreduced={"m.0"})), mesh={"d": 2, "m": 4})(X)
