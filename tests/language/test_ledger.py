"""What the installed JAX can write on an equation that gshard does not run whole has a row in the ledger."""

import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax._src.effects import Effect
from jax.sharding import NamedSharding, SingleDeviceSharding

import gshard
import gshard.rules
from gshard.core.errors import PlanError, ShardingError, TraceError
from gshard.core.jax_adapter_context import names_of_settings
from gshard.language import ledger
from gshard.language.ledger import EFFECTS, LEDGER, SETTINGS, check_arrays, dropped, row_of
from gshard.language.registry import is_our_own
from jax_primitives import is_of_kernels, parameters

X = jnp.arange(32.0).reshape(8, 4)


def missing(found):
    """Primitives that have a rule or rows, each with its parameters that have no row."""
    new = {name: tuple(p for p in sorted(keys) if row_of(name, p) is None) for name, keys in found.items()}
    known = {name for name in found if ledger.rows_of(name) is not None}
    read = [name for name in found if name in known or is_our_own(name)]
    return {name: new[name] if name in known else "no row" for name in read if new[name] or name not in known}


@pytest.fixture(scope="module")
def found():
    return parameters()


def test_every_parameter_of_jax_is_classified(found):
    assert len(found) > 300
    assert {"jit", "scan", "dot_general", "shard_map"} <= found.keys()
    assert {"jaxpr", "out_layouts", "compiler_options_kvs"} <= found["jit"]
    assert "out_sharding" in found["dot_general"]
    assert "unroll" in found["scan"]
    assert not missing(found)


def test_a_parameter_that_is_new_is_found(monkeypatch, found):
    rows = {k: v for k, v in LEDGER["scan"].items() if k != "unroll"}
    others = {k: v for k, v in LEDGER.items() if k not in ("scan", "cumsum")}
    monkeypatch.setattr(ledger, "LEDGER", {**others, "scan": rows})
    assert missing(found) == {"scan": ("unroll",), "cumsum": "no row"}
    assert missing({"add": {"accuracy", "speed"}}) == {"add": ("speed",)}


def test_contexts_and_effects_are_classified():
    assert {"compute_type", "xla_metadata", "threefry_partitionable"} <= set(names_of_settings()) <= SETTINGS.keys()
    gc.unfreeze()  # what conftest.py froze is not listed
    kinds = {o for o in gc.get_objects() if isinstance(o, type) and issubclass(o, Effect)}
    bases = {"Effect", "JaxprInputEffect"}
    boxes = {"BoxEffect"}  # mutable objects of arrays that may change their types: no equation of arrays
    assert len(kinds) > 10
    found = {k.__name__ for k in kinds if k.__module__.startswith("jax.") and not is_of_kernels(k.__module__)}
    assert found <= EFFECTS | bases | boxes


def _mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def _composite(x):
    return lax.composite(lambda x: jnp.sin(x), "my.sin")(x)


CONTAINERS = {
    "straight": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "while": lambda f: lambda x: lax.while_loop(lambda c: c.sum() < 3, f, x),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, jnp.cos, x),
    "remat": lambda f: jax.checkpoint(f),
    "jit": lambda f: jax.jit(f),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_dropped_is_listed_and_refused(container):
    f = CONTAINERS[container](_composite)
    found = gshard.explain(f, X, mesh=gshard.Mesh.abstract(d=4))
    assert [text.partition(". ")[0] for text in found.lists["dropped"]][:1] == [
        f"test_ledger.py:{_composite.__code__.co_firstlineno + 1} (_composite): name of composite is 'my.sin'"
    ]
    assert found.lists["dropped"][0] in str(found)
    assert len(set(found.lists["dropped"])) == len(found.lists["dropped"])
    with pytest.raises(PlanError, match=r"(?s)name of composite is not kept.*test_ledger.py.*'my.sin'.*strict=False"):
        gshard.jit(f, mesh=gshard.Mesh.abstract(d=4), strict=True).lower(X).plan  # noqa: B018


def test_what_is_dropped_is_on_the_page():
    found = gshard.explain(_composite, X, mesh=_mesh())
    assert list(found.lists["dropped"]) in [lines for *_, lines in found.data("h100:8")["lists"]]
    np.testing.assert_array_equal(gshard.jit(_composite, mesh=_mesh())(X), jnp.sin(X))


def test_ordinary_programs_drop_nothing():
    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * jnp.cos(x),))

    @jax.jit
    def loss(x):
        y = lax.with_sharding_constraint(x, NamedSharding(_mesh(), P("d")))
        policy = jax.checkpoint_policies.dots_saveable
        y = jax.checkpoint(lambda y: jnp.tanh(y @ y.T) @ y, policy=policy)(own(y))
        y = lax.scan(lambda c, _: (jax.nn.softmax(c), c.sum()), y, None, length=2, unroll=2)[0]
        y = y + jax.random.normal(jax.random.key(0), y.shape) + jnp.linalg.norm(jnp.sort(y), axis=0)
        return lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y).at[0].add(1.0).sum()

    step = jax.jit(jax.value_and_grad(loss), donate_argnums=0, inline=True, keep_unused=True)
    assert gshard.explain(step, X, mesh=_mesh()).lists["dropped"] == ()
    gshard.jit(step, mesh=_mesh(), strict=True).lower(X).plan  # noqa: B018


def test_a_parameter_without_a_row_is_listed(monkeypatch):
    rows = {k: v for k, v in LEDGER["scan"].items() if k != "unroll"}
    monkeypatch.setattr(ledger, "LEDGER", {**LEDGER, "scan": rows})
    f = CONTAINERS["scan"](jnp.sin)
    (text,) = gshard.explain(f, X, mesh=gshard.Mesh.abstract(d=4)).lists["dropped"]
    assert "unroll of scan is 1. This version of gshard does not read it." in text


@pytest.mark.parametrize("container", ["straight", "scan"])
def test_a_constraint_to_one_device_is_refused(container):
    def one(x):
        return lax.with_sharding_constraint(x, SingleDeviceSharding(jax.devices()[1]))

    with pytest.raises(ShardingError, match=r"(?s)over 1 devices.*test_ledger.py.*SingleDevice.*Make its"):
        gshard.jit(CONTAINERS[container](one), mesh=_mesh())(X)


def test_options_of_an_inner_jit_are_refused():
    (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(X).eqns
    assert list(dropped(eqn, None)) == []
    told = eqn.replace(params={**eqn.params, "compiler_options_kvs": (("xla_cpu_enable_fast_math", True),)})
    with pytest.raises(TraceError, match=r"(?s)compiler_options_kvs of 'jit'.*fast_math.*Give compiler_options"):
        list(dropped(told, None))


@pytest.mark.parametrize("kind", ["shard_map", "gshard.jit", "jax.jit"])
def test_an_exported_program_with_a_region_for_all_devices_is_refused(kind):
    mesh = _mesh()
    rows = NamedSharding(mesh, P("d"))
    f = {
        "shard_map": jax.shard_map(lambda x: x - lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d")),
        "gshard.jit": gshard.jit(lambda x: gshard.split(x, 0, 8) - x.sum(0), mesh=mesh),
        "jax.jit": lambda x: jnp.sin(x) - x.sum(0),
    }[kind]
    exported = jax.export.export(jax.jit(f, in_shardings=rows))(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows))
    jitted = gshard.jit(lambda x: exported.call(x) + 1, mesh=mesh)
    if kind == "jax.jit":
        np.testing.assert_allclose(jitted(X), f(X) + 1, rtol=1e-6)
        return
    with pytest.raises(TraceError, match=r"(?s)a region for all devices.*test_ledger.py.*outside of gshard.jit"):
        jitted(X)


def test_values_of_a_type_of_the_users_own_are_refused_with_their_line():
    (eqn,) = jax.make_jaxpr(jnp.sin)(X).eqns
    made = eqn.replace(outvars=[SimpleNamespace(aval="QArray")])
    check_arrays(eqn, None)
    with pytest.raises(TraceError, match="sin makes a value of the type QArray, which is no array"):
        check_arrays(made, eqn.source_info)
