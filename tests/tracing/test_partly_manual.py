"""``shard_map`` that is manual over some axes: the others are partitioned like the rest of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard.core.errors import RuleError, ShardingError
from gshard.testing.rule_checks import emitted, reported
from harness import normal
from placed import mesh_of, put


def manual(f, mesh, specs, out, names, check=True):
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, axis_names=set(names), check_vma=check)


def flops(f, args):
    cost = f.lower(*args).compile().cost_analysis()
    return float((cost if isinstance(cost, dict) else cost[0])["flops"])


CUBE = mesh_of(a=2, b=2, c=2)
WIDE = mesh_of(a=2, c=4)


def collectives(x):
    y = lax.with_sharding_constraint(x, P(None, "c"))
    return (
        lax.all_gather(y, "a"),
        lax.all_gather(y, ("a", "b"), axis=1, tiled=True),
        lax.psum_scatter(y, "b", scatter_dimension=1, tiled=True),
        lax.psum_scatter(y.reshape(2, 2, 8), "a"),
        lax.all_to_all(y, "a", 1, 0, tiled=True),
        lax.all_to_all(y.reshape(2, 2, 8), "b", 0, 1),
        lax.pmax(y, ("b", "a")) + lax.pmin(y, "a") - lax.pmean(y, "b"),
        lax.pshuffle(y, "b", [1, 0]) + lax.axis_index(("a", "b")),
        lax.psum((x * 100).astype(jnp.int32), "a"),
    )


def in_the_other(x, w):
    def inner(x):
        return lax.psum(x * (lax.axis_index("b") + 1), "b") * (lax.axis_index("a") + 1)

    y = jnp.tanh(x @ w)
    z = jax.shard_map(inner, in_specs=P(None, "b"), out_specs=P(), axis_names={"b"}, check_vma=False)(y)
    return z + lax.psum(y[:, : z.shape[1]], "a")


def layers(x, ws):
    layer = manual(lambda x, w: lax.psum(jnp.tanh(x @ w), "a"), WIDE, (P(None, "a"), P("a")), P(), "a")
    return lax.scan(lambda c, w: (layer(c, w), c.sum(0)), x, ws)


def branches(x, w):
    y = lax.cond(lax.axis_index("a") == 0, lambda x: jnp.tanh(x @ w), lambda x: x * 2, x)
    return lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: jnp.cumsum(c, 1) * 0.1, y)


def marked(x, w):
    y = gshard.shard(x, P(None, "c")) @ w
    return lax.psum(y, "a"), gshard.replicate(y), gshard.split(y, 0, 2), gshard.split(y, 0, "c")


def total(f):
    return lambda *args: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(f(*args)))


def cases():
    square = put(normal(8, 8), WIDE, "a", "c")
    tall, weights = put(normal(8, 16), CUBE, "a", "c"), put(normal(16, 16), CUBE, None, "c")
    constrained = manual(
        lambda x, w: lax.psum(lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "c")), "a"),
        CUBE, (P("a"), P()), P(), "a",
    )  # fmt: skip
    nested = manual(in_the_other, CUBE, (P("a"), P()), P("a"), "a", False)
    stacked = (put(normal(8, 8), WIDE, "c"), put(normal(3, 8, 8), WIDE, None, "a", "c"))
    uneven = manual(
        lambda x: (lax.psum(jnp.cumsum(gshard.split(x, 1, 4), 1), "a"), lax.all_gather(x, "a", axis=1, tiled=True)),
        WIDE, P("a"), P(), "a", False,
    )  # fmt: skip
    return {
        "constraint": (CUBE, constrained, (tall, weights)),
        "collectives": (CUBE, manual(collectives, CUBE, P(("a", "b")), P(("a", "b")), "ab", False), (tall,)),
        "nested": (CUBE, nested, (tall, weights)),
        "in a scan, gradient": (WIDE, jax.grad(total(layers), (0, 1)), stacked),
        "branches": (WIDE, manual(branches, WIDE, (P("a"), P()), P("a"), "a"), (square, normal(8, 8))),
        "marks": (WIDE, manual(marked, WIDE, (P("a"), P()), (P(), *(P("a"),) * 3), "a"), (normal(8, 8), normal(8, 8))),
        "uneven": (WIDE, uneven, (normal(6, 7),)),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_and_what_is_counted_is_emitted(name):
    mesh, f, args = CASES[name]
    lowered = gshard.jit(f, mesh=mesh).lower(*args)
    near(lowered.compile()(*args), jax.jit(f)(*args), 3e-5)
    spmd = lowered.spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)
    assert gshard.prove(gshard.jit(f, mesh=mesh), *args)


def test_the_gradient_of_a_scan_sends_no_more_than_under_xla():
    mesh, f, args = CASES["in a scan, gradient"]
    assert gshard.explain(f, *args, mesh=mesh).total_bytes <= 1512  # XLA's, of JAX 0.10.2


@pytest.mark.parametrize("explicit", [False, True])
def test_automatic_axes_share_the_work_and_split_the_results(explicit):
    mesh = mesh_of(stage=2, fsdp=4, explicit=explicit)
    w, x = put(normal(2, 64, 64), mesh, "stage"), put(normal(2, 64, 64), mesh, "stage", "fsdp")

    def stage(w, x):
        return lax.ppermute(jnp.tanh(x[0] @ w[0]), "stage", [(0, 1), (1, 0)])[None]

    f = manual(stage, mesh, (P("stage"), P("stage")), P("stage"), ["stage"])
    ours, theirs = gshard.jit(f, mesh=mesh), jax.jit(f)
    near(ours(w, x), theirs(w, x), 3e-5)
    assert ours(w, x).sharding.is_equivalent_to(theirs(w, x).sharding, 3)
    assert ours(w, x).sharding.is_equivalent_to(NamedSharding(mesh, P("stage", "fsdp")), 3)
    assert flops(ours, (w, x)) <= 1.05 * flops(theirs, (w, x))
    assert gshard.explain(f, w, x, mesh=mesh).total_bytes == 16 * 64 * 4  # the batch of a device, to the next stage


def test_marks_inside_say_how_automatic_axes_split():
    mesh = mesh_of(stage=2, fsdp=4)

    def f(w, x, mark):
        return manual(
            lambda w, x: mark(x[0] @ w[0])[None], mesh, (P("stage"), P("stage")), P("stage"), ["stage"]
        )(w, x)  # fmt: skip

    args = put(normal(2, 64, 64), mesh, "stage"), put(normal(2, 64, 64), mesh, "stage")
    marks = (
        lambda y: lax.with_sharding_constraint(y, P(None, "fsdp")),
        lambda y: lax.with_sharding_constraint(y, NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "fsdp"))),
        lambda y: gshard.split(y, 1, 4),
        lambda y: gshard.shard(y, P(None, "fsdp")),
        lambda y: gshard.shard(y, NamedSharding(mesh, P(None, "fsdp"))),
    )
    for mark in marks:
        got = gshard.jit(lambda w, x, mark=mark: f(w, x, mark), mesh=mesh)
        near(got(*args), np.asarray(args[1]) @ np.asarray(args[0]), 3e-5)
        assert got(*args).sharding.spec == P("stage", None, "fsdp")
        assert flops(got, args) <= 1.1 * 2 * 64**3 / 4


def rolled(x):
    y = lax.with_sharding_constraint(x * 2, P("b", "c"))
    return jnp.roll(y, 1, 1) + lax.with_sharding_constraint(y, P("c", "b"))


DIVERGING = {
    "cond": lambda x: lax.cond(lax.axis_index("a") == 0, rolled, lambda x: x * 2, x),
    "cond, gradient": lambda x: jax.grad(
        lambda x: jnp.sum(jnp.sin(lax.cond(lax.axis_index("a") == 0, rolled, lambda x: x * 2, x)))
    )(x),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 2 * lax.axis_index("a") + 2,
        lambda c: (c[0] + 1, rolled(c[1]) * 0.2),
        (lax.pcast(0, "a", to="varying"), x),
    )[1],
    "mapped while": lambda x: jax.vmap(
        lambda n, x: lax.fori_loop(0, n, lambda i, c: jnp.roll(c, 1) * 0.5 + c.sum(), x)
    )(lax.axis_index("a") * 2 + 2 + jnp.arange(8) % 3, x * 0.01),
}


@pytest.mark.parametrize("name", DIVERGING)
@pytest.mark.one_in(2)
def test_where_devices_go_different_ways_nothing_waits_for_those_that_do_not_come(name):
    x = normal(16, 8)
    want = manual(DIVERGING[name], mesh_of(a=2, b=1, c=1), P("a"), P("a"), "a")(x)
    f = manual(DIVERGING[name], CUBE, P("a"), P("a"), "a")
    lowered = gshard.jit(f, mesh=CUBE).lower(put(x, CUBE, ("a", "b"), "c"))
    near(lowered.compile()(put(x, CUBE, ("a", "b"), "c")), want, 3e-5)
    assert "collective_permute" not in str(lowered.as_text())
    spmd = lowered.spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)


def test_callbacks_see_what_one_position_along_manual_axes_holds():
    seen = []

    def part(x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return lax.psum(jax.pure_callback(lambda v: np.cumsum(v, 1), jax.typeof(x), x), "a")

    x = put(np.arange(16, dtype=np.float32).reshape(2, 8), WIDE, "a", "c")
    got = gshard.jit(manual(part, WIDE, P("a"), P(), "a", False), mesh=WIDE)(x)
    near(got, np.cumsum(np.asarray(x), 1).sum(0, keepdims=True), 3e-5)
    jax.effects_barrier()
    assert sorted(seen) == [28, 92]


BAD = {
    "shard": (lambda x: gshard.shard(x, P("a")), "a", "axis 'a' is manual"),
    "shard, over a mesh": (lambda x: gshard.shard(x, NamedSharding(WIDE, P("a"))), "a", "axis 'a' is manual"),
    "split": (lambda x: gshard.split(x, 0, "a"), "a", "axis 'a' is manual"),
    "too many parts": (lambda x: gshard.split(x, 0, 8), "a", "8 partitions were asked for"),
    "shard in a region without automatic axes": (lambda x: gshard.shard(x, P("c")), "ac", "cannot be split"),
    "split in a region without automatic axes": (lambda x: gshard.split(x, 0, 2), "ac", "cannot be split"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_marks_over_manual_axes_are_refused_with_their_line(name):
    body, names, message = BAD[name]
    f = manual(body, WIDE, P("a"), P("a"), names, False)
    with pytest.raises(ShardingError, match=rf"(?s){message}.*test_partly_manual\.py:\d+"):
        gshard.jit(f, mesh=WIDE)(normal(8, 8))


@pytest.mark.parametrize("names", ["a", "ac"])
def test_another_mesh_is_refused_with_the_line(names):
    other = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "c"))

    def f(x):
        return manual(lambda x: lax.psum(x, "a"), other, P("a"), P(), names, False)(x)

    with pytest.raises(ShardingError, match=r"(?s)over other devices.*test_partly_manual\.py:\d+"):
        gshard.jit(f, mesh=WIDE)(normal(8, 8))


def ragged(names):
    """Each of two devices sends two rows to the first and one to the second."""

    def part(x):
        sizes, starts = jnp.array([2, 1], jnp.int32), jnp.array([0, 2], jnp.int32)
        to = jnp.full((2,), 2 * lax.axis_index("a"), jnp.int32)
        received = lax.all_to_all(sizes, "a", 0, 0, tiled=True)
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, to, received, axis_name="a")

    return manual(part, WIDE, P("a"), P("a"), names, False), normal(8, 8)


@pytest.mark.parametrize("names", ["a", "ac"])
def test_a_ragged_all_to_all_passes_and_is_counted(names):
    f, x = ragged(names)
    g = gshard.jit(f, mesh=WIDE)
    spmd = g.lower(x).spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)
    rows = [c for c in spmd.collectives if c.kind == "all_to_all" and "f32" in c.shape]
    assert [c.total_bytes for c in rows] == [4 * 8 * 4 // 2]
    assert gshard.explain(f, x, mesh=WIDE).cost("v5e:2x4").seconds > 0
    check = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    made = jax.export.export(jax.jit(g), platforms=["tpu"], disabled_checks=[check])(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(WIDE, P("a")))
    )
    assert "@ragged_all_to_all" in made.mlir_module()
    assert "dense<[[0, 4], [1, 5], [2, 6], [3, 7]]>" in made.mlir_module()


def test_all_of_jaxs_collectives_are_known_or_refused():
    refused = manual(lambda x: lax.pbroadcast(x, "a", 0), WIDE, P("a"), P("a"), "a", False)
    with pytest.raises(
        RuleError, match=r"(?s)'pbroadcast' inside a shard_map is not known.*test_partly_manual\.py:\d+"
    ):
        gshard.jit(refused, mesh=WIDE)(normal(8, 8))
