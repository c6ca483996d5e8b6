"""What ``jax.jit`` was given counts: of a nested call as marks, of a wrapped function as if given to gshard.jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.errors import PlanError

MESHES = {
    "d": jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)),
    "ab": jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
}
SHARDINGS = {"d": NamedSharding(MESHES["d"], P("d")), "ab": NamedSharding(MESHES["ab"], P("b", "a"))}
D = SHARDINGS["d"]
X = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


def with_rule(g):
    f = jax.custom_vjp(g)
    f.defvjp(lambda x: (g(x), x), lambda x, ct: (g(ct) * x,))
    return jax.grad(lambda x: f(x).sum())


CONTAINERS = {
    "scan": lambda g: lambda x: jax.lax.scan(lambda c, _: (c * 1.5, g(c)), x, None, length=3)[1],
    "cond": lambda g: lambda x: jax.lax.cond(x[0, 0] > 0, g, lambda y: y, x),
    "grad": lambda g: jax.grad(lambda x: g(x).sum()),
    "custom_vjp": with_rule,
}


def step(x):
    return jnp.sin(x) * 2


@pytest.mark.parametrize("side", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize(("container", "axes"), list(zip(CONTAINERS, ["ab", "d"] * 2, strict=True)))
def test_shardings_of_a_nested_jit_are_constraints(container, axes, side):
    around, sharding = CONTAINERS[container], SHARDINGS[axes]
    constrained = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    nested = around(jax.jit(step, **{side: sharding}))
    marked = around(lambda x: constrained(step(x)) if side == "out_shardings" else step(constrained(x)))
    ours, theirs = (gshard.jit(f, mesh=MESHES[axes]).lower(X) for f in (nested, marked))
    assert ours.out_info == theirs.out_info
    assert any(ours.out_info.sharding.spec)
    assert [(c.kind, c.total_bytes) for c in ours.spmd.collectives] == [
        (c.kind, c.total_bytes) for c in theirs.spmd.collectives
    ]


def update(w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


GIVEN = [
    {"in_shardings": (D, D), "out_shardings": D, "donate_argnums": 0},
    {"in_shardings": (D, None), "keep_unused": True},
    {"out_shardings": D, "donate_argnames": "w", "compiler_options": {"xla_cpu_enable_fast_math": False}},
]


@pytest.mark.parametrize("given", GIVEN)
def test_what_jax_jit_was_given_counts_as_if_given_to_gshard(given):
    w, x = np.ones((64, 64), np.float32), np.ones((128, 64), np.float32)
    wrapped, plain = gshard.jit(jax.jit(update, **given)), gshard.jit(update, mesh=D.mesh, **given)
    ours, theirs = wrapped.lower(w, x), plain.lower(w, x)
    assert (ours.argument_shardings, ours.out_info) == (theirs.argument_shardings, theirs.out_info)
    assert (str(ours.spmd), ours.donated) == (str(theirs.spmd), theirs.donated)
    assert wrapped.options == plain.options
    found = gshard.explain(jax.jit(update, **given), w, x, partitioner="gshard")
    assert found.bytes_by_kind == gshard.explain(plain, w, x).bytes_by_kind
    assert found.argument_bytes[1] < found.argument_bytes[0]


def test_a_search_keeps_them():
    w = jax.ShapeDtypeStruct((64, 64), "float32")
    wanted = jax.jit(update, in_shardings=(D, D), out_shardings=D)
    found = gshard.search(wanted, w, w, machine="h100:1x8", budget_seconds=0.1)
    assert {found.plan.format(v) for v in found.plan.program.block.inputs} == {"f32[64@d,64]"}


class Model:
    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1, out_shardings=D)
    def update(self, x, times):
        return x * times

    @functools.partial(jax.jit, in_shardings=(None, D))
    def call(self, x):
        return x + 1


def test_a_method_counts_without_the_object():
    lowered = gshard.jit(Model().update).lower(X, 3)
    assert (lowered.out_info.sharding, lowered.donated) == (D, {0})
    assert gshard.jit(Model().call).lower(X).argument_shardings == (D,)


def test_where_both_have_shardings_those_of_jax_are_inside():
    across = NamedSharding(D.mesh, P(None, "d"))
    lowered = gshard.jit(jax.jit(step, in_shardings=D), in_shardings=across).lower(X)
    assert lowered.argument_shardings == (across,)
    assert [c.kind for c in lowered.spmd.collectives] == ["all_to_all"]


def test_a_mesh_that_is_set_is_meant_by_bare_specs():
    with jax.set_mesh(D.mesh):
        assert gshard.jit(lambda x: jax.jit(step, out_shardings=P("d"))(x)).lower(X).out_info.sharding == D
        assert gshard.jit(jax.jit(step, out_shardings=P("d"))).lower(X).out_info.sharding == D


def test_explain_takes_the_mesh_that_is_meant():
    with pytest.raises(gshard.MeshError, match="no mesh was given"):
        gshard.explain(lambda x: jax.jit(step)(x), X)
    found = gshard.explain(jax.jit(lambda x: x.sum()), jax.device_put(X, D), partitioner="gshard")
    assert (found.mesh.size, found.bytes_by_kind) == (8, {"all_reduce": 7})
    assert gshard.explain(jax.jit(gshard.jit(lambda x: x.sum(), mesh=8)), X).mesh.size == 8


@pytest.mark.parametrize("mesh", ["d", "ab"])
def test_a_sharding_may_be_over_another_mesh_of_the_devices(mesh):
    theirs = SHARDINGS[mesh]
    other = MESHES["ab" if mesh == "d" else "d"]
    found = gshard.jit(lambda x: jax.jit(step, out_shardings=theirs)(x), mesh=other)(X)
    assert found.sharding.is_equivalent_to(theirs, 2)
    one = SingleDeviceSharding(jax.devices()[0])
    assert (gshard.jit(jax.jit(step, out_shardings=one), mesh=1)(X) == jax.jit(step)(X)).all()


AWAY = NamedSharding(jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)), P("d"))
REFUSED = {
    "one device": (SingleDeviceSharding(jax.devices()[0]), "a sharding over 1 devices cannot be one over 8"),
    "other devices": (AWAY, "a sharding over 4 devices cannot be one over 8"),
    "layout": (Format(Layout((1, 0)), D), "has a layout in memory"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_line(why):
    sharding, text = REFUSED[why]
    with pytest.raises(gshard.ShardingError, match=rf"(?s){text}.*at test_wrapped.py:\d+"):
        gshard.jit(lambda x: jax.jit(step, out_shardings=sharding)(x) + 1, mesh=8)(X)


def test_a_layout_that_arrays_have_anyway_is_no_layout():
    given = Format(Layout((0, 1)), D)
    assert gshard.jit(jax.jit(step, out_shardings=given)).lower(X).out_info.sharding == D


@pytest.mark.filterwarnings("ignore:backend and device argument:DeprecationWarning")
def test_a_device_is_refused():
    with pytest.raises(gshard.ArgumentError, match=r"(?s)jax.jit was given a device.*at test_wrapped.py"):
        gshard.jit(jax.jit(step, backend="cpu"), mesh=8)


# Options of a ``gshard.jit`` that another one calls: kept where both have the same, else listed with the line.
H100 = "h100:1x8"
OPTIONS = {
    "machine": {"machine": H100},
    "search": {"machine": H100, "search": True},
    "strict": {"strict": True},
    "collective_matmul": {"collective_matmul": True},
    "finite": {"finite": True},
    "compiler_options": {"compiler_options": {"xla_cpu_enable_fast_math": False}},
}
OTHER = {
    "machine": {"machine": "v5e:2x4"},
    "search": {"machine": H100},
    "collective_matmul": {"collective_matmul": gshard.stages.CollectiveMatmul(above=1)},
}


def body(x):
    return jnp.sin(x) @ x


AROUND = {
    "as it is": lambda inner: lambda x: inner(x) + 1,
    "scan": lambda inner: lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
    "grad": lambda inner: jax.grad(lambda x: inner(x).sum()),
    "jax.jit": lambda inner: jax.jit(lambda x: inner(x) * 2),
}


def dropped(container, inner, outer):
    f = AROUND[container](gshard.jit(body, mesh=8, **inner))
    explained = gshard.explain(gshard.jit(f, mesh=8, **outer), jnp.ones((8, 8)))
    return [line for line in map(str, explained.lists["dropped"]) if "inner gshard.jit" in line]


@pytest.mark.parametrize(("option", "container"), list(zip(OPTIONS, [*AROUND, *AROUND], strict=False)))
def test_an_option_that_the_outer_one_does_not_have_is_listed(option, container):
    listed = dropped(container, OPTIONS[option], {})
    assert any(f"{option} of an inner gshard.jit is" in line for line in listed), listed
    assert all("test_wrapped.py" in line for line in listed)
    assert dropped(container, OPTIONS[option], OPTIONS[option]) == dropped(container, {}, OPTIONS[option]) == []
    if option in OTHER:
        listed = dropped(container, OPTIONS[option], OTHER[option])
        assert any(f"{option} of an inner gshard.jit is" in line for line in listed)


def test_strict_refuses_them_with_the_line():
    inner = gshard.jit(body, mesh=8, machine=H100)
    outer = gshard.jit(lambda x: inner(x) + 1, mesh=8, strict=True)
    with pytest.raises(PlanError, match=r"machine of an inner gshard\.jit is not kept") as error:
        outer(jnp.ones((8, 8)))
    assert "test_wrapped.py" in str(error.value)
    gshard.jit(lambda x: inner(x) + 1, mesh=8, strict=True, machine=H100)(jnp.ones((8, 8)))


@pytest.mark.parametrize("inner", [{"data": 4, "model": 2}, {"data": 2, "model": 4}, 8])
def test_the_mesh_of_an_inner_one_is_listed_unless_it_is_the_same(inner):
    """The same mesh is used; another one is replaced by the mesh of the outer ``gshard.jit``, and strict refuses it."""
    f = gshard.jit(lambda x: gshard.split(jnp.sin(x), 0, 2), mesh=inner)
    mesh = {"data": 4, "model": 2}
    explained = gshard.explain(gshard.jit(lambda x: f(x) * 2, mesh=mesh), jnp.ones((8, 8)))
    listed = [line for line in map(str, explained.lists["dropped"]) if "mesh of an inner gshard.jit" in line]
    is_other = inner != mesh
    assert len(listed) == is_other
    if is_other:
        assert "test_wrapped.py" in listed[0]
        with pytest.raises(PlanError, match="mesh of an inner"):
            gshard.jit(lambda x: f(x) * 2, mesh=mesh, strict=True)(jnp.ones((8, 8)))
    np.testing.assert_allclose(
        gshard.jit(lambda x: f(x) * 2, mesh=mesh)(jnp.ones((8, 8))), 2 * np.sin(np.ones((8, 8))), rtol=1e-6
    )
