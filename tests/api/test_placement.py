"""Arguments are brought to where the executable expects them, in every call, whatever JAX's dispatch takes as it is."""

import gc
import re
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType

import gshard
from gshard.api.lowered import placed_arguments

AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AUTO, AUTO))
X = np.arange(128, dtype=np.int32).reshape(8, 16) - 60


def other_mesh(sizes, names, order=range(8)):
    return jax.sharding.Mesh(np.array([jax.devices()[i] for i in order]).reshape(sizes), tuple(names))


TURNED = other_mesh((4, 2), ("b", "a"))  # the axes' names in another order: along other devices
WITH_ONE = other_mesh((2, 1, 4, 1), ("a", "one", "b", "last"))
REVERSED = other_mesh((2, 4), ("a", "b"), range(7, -1, -1))
COLUMNS_FIRST = Format(Layout(major_to_minor=(1, 0)), NamedSharding(MESH, P("a")))

PLACES = {
    "numpy": lambda: X,
    "not committed": lambda: jnp.asarray(X),
    "one device": lambda: jax.device_put(X, jax.devices()[5]),
    "rows": lambda: jax.device_put(X, NamedSharding(MESH, P("b"))),
    "whole": lambda: jax.device_put(X, NamedSharding(MESH, P())),
    "turned": lambda: jax.device_put(X, NamedSharding(TURNED, P("a"))),
    "turned columns": lambda: jax.device_put(X, NamedSharding(TURNED, P(None, ("b", "a")))),
    "an axis of one": lambda: jax.device_put(X, NamedSharding(WITH_ONE, P("one", ("last", "b")))),
    "reversed": lambda: jax.device_put(X, NamedSharding(REVERSED, P("a"))),
    "reversed, whole": lambda: jax.device_put(X, NamedSharding(REVERSED, P())),
    "host memory": lambda: jax.device_put(X, NamedSharding(MESH, P("a"), memory_kind="pinned_host")),
    "columns first": lambda: jax.jit(lambda x: x, out_shardings=COLUMNS_FIRST)(X),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_lies_where_it_is_expected_goes_through_dispatch(place):
    """So does what dispatch moves by itself, from the second time on, and nothing else."""
    x, expected = PLACES[place](), NamedSharding(MESH, P("a"))
    lowered = gshard.jit(lambda x: x + 1, mesh=MESH, in_shardings=P("a")).lower(x)
    _, placed = (placed_arguments(lowered, [x]) for _ in range(2))
    assert placed.arrays[0].sharding.is_equivalent_to(lowered.argument_shardings[0], 2)
    taken = isinstance(x, jax.Array) and x.committed and len(x.sharding.device_set) == 8
    there = taken and x.sharding.is_equivalent_to(expected, 2) and place != "columns first"
    assert placed.by_dispatch == (there or not taken)


@pytest.mark.parametrize("spec", [P("a"), P("b"), P(None, "a"), P("b", "a"), P(("a", "b")), P(("b", "a"))])
def test_an_argument_of_another_mesh_of_the_same_devices_is_not_moved(spec):
    for mesh in (TURNED, WITH_ONE, other_mesh((4, 2), ("p", "q"))):
        names = dict(zip(("a", "b"), mesh.axis_names if "p" in mesh.axis_names else ("a", "b"), strict=False))
        own = P(*(tuple(names[n] for n in ([e] if isinstance(e, str) else e or ())) for e in spec))
        x = jax.device_put(X, NamedSharding(mesh, own))
        lowered = gshard.jit(lambda x: x + 1, mesh=MESH).lower(x)
        assert x.sharding.is_equivalent_to(lowered.argument_shardings[0], 2), (mesh, own)


@pytest.mark.parametrize("place", ["rows", "one device"])
@pytest.mark.parametrize("donated", [None, 0])
def test_one_warning_of_an_argument_that_every_call_moves(place, donated):
    """From the second call on. A state that comes back where the next call expects it is moved once."""
    function = gshard.jit(lambda x, y: x + y, mesh=MESH, in_shardings=(P(None, "a"), None), donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = PLACES[place]()
        for _ in range(3):
            state = function(state, PLACES["whole"]())
            function(X, X)
    for call in range(3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            np.testing.assert_array_equal(function(PLACES[place](), X), 2 * X)
        assert [one.category for one in told] == [gshard.ShardingWarning] * (call == 1)
        text = r"(?s)moves arguments in each call:\n  x: from .* to .*P\(None, 'a'\).*test_placement.py:\d+ \(test_one"
        assert all(re.search(text + ".*category=gshard.ShardingWarning", str(one.message)) for one in told)


def test_a_program_that_planning_rewrites_is_compiled_once():
    def step(p, x):
        p, x = gshard.split((p, x), 0, 8)

        def loss(p):
            return jnp.sum(jnp.abs(jnp.fft.fft2(x * p["w"])))  # planning makes it two transforms, one by one

        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))

    train = gshard.jit(step, mesh=8)
    p, x = {"w": jnp.ones((64, 128))}, jnp.ones((64, 128))
    first = train.lower(p, x)
    assert first.plan.program.block is not first.program.block, "nothing was rewritten"
    for _ in range(3):
        p = train(p, x)
        assert train.lower(p, x) is first


def test_a_mesh_of_one_device():
    function = gshard.jit(lambda x: x + 1, mesh=[jax.devices()[3]])
    for place in ("numpy", "one device", "rows", "reversed"):
        for _ in range(2):
            result = function(PLACES[place]())
            assert result.devices() == {jax.devices()[3]}
            np.testing.assert_array_equal(np.asarray(result), X + 1)


def test_a_searched_plan_gives_whole_results_in_the_order_that_was_asked_for():
    asked = NamedSharding(REVERSED, P())
    function = gshard.jit(lambda x: x * 2, mesh=MESH, search=True, machine="h100:1x8", out_shardings=asked)
    for place in ("numpy", "rows", "reversed"):
        result = function(PLACES[place]())
        np.testing.assert_array_equal(np.asarray(result), X * 2)
        assert result.sharding.is_equivalent_to(asked, 2)


def test_donated_keys_are_given_once():
    """XLA:CPU would end the process, so calls through dispatch are checked too. A key and its data share memory."""

    def f(key, x):
        return jax.random.split(key)[0], x * 2

    call = gshard.jit(f, mesh=MESH, donate_argnums=(0, 1))
    keys, numbers = call.lower(jax.random.key(0), jax.random.key_data(jax.random.key(0))).argument_shardings
    key, x = jax.device_put(jax.random.key(1), keys), jax.device_put(np.ones(2, np.uint32), numbers)
    for _ in range(3):
        given = key
        key, x = call(key, x)
        assert given.is_deleted()
        with pytest.raises(gshard.ShardingError, match="an earlier call has overwritten, as key"):
            call(given, x)
        with pytest.raises(gshard.ShardingError, match="was given twice, as key and x"):
            call(key, jax.random.key_data(key))
    twice = gshard.jit(lambda a, b: (jax.random.split(a)[0], jax.random.split(b)[0]), mesh=MESH, donate_argnums=(0, 1))
    a, b = (jax.device_put(jax.random.key(i), NamedSharding(MESH, P())) for i in range(2))
    for _ in range(3):
        a, b = twice(a, b)
    with pytest.raises(gshard.ShardingError, match="was given twice, as a and b"):
        twice(a, a)


def test_what_is_overwritten_is_refused_by_every_function():
    """XLA:CPU would end the process: a function that donates nothing, and one that closes over the array."""
    for make in (lambda: jnp.arange(8.0), lambda: jax.random.key(0)):
        state, other = (jax.device_put(make(), NamedSharding(MESH, P())) for _ in range(2))

        def number(x):
            return jax.random.normal(x, (8,)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 2

        step = gshard.jit(lambda x: x[...] if x.ndim else jax.random.split(x)[0], mesh=MESH, donate_argnums=0)
        read = gshard.jit(number, mesh=MESH)
        closing = gshard.jit(lambda x: x + number(state), mesh=MESH)  # noqa: B023
        ones = jax.device_put(np.ones(8, np.float32), NamedSharding(MESH, P()))
        for _ in range(3):
            np.testing.assert_array_equal(read(state), jax.jit(number)(make()))
            np.testing.assert_allclose(closing(ones), 1 + jax.jit(number)(make()), rtol=1e-6)
            other = step(other)
        step(state)
        for _ in range(2):
            with pytest.raises(gshard.ShardingError, match="was given an array that an earlier call has overwritten"):
                read(state)
            with pytest.raises(gshard.ShardingError, match="closes over an array that an earlier call has overwritten"):
                closing(ones)
        np.testing.assert_array_equal(read(other), read(other))


def test_a_closed_over_array_is_not_given_to_be_overwritten():
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(TURNED, P()))
    adding = gshard.jit(lambda y: x + y, mesh=MESH, donate_argnums=0)
    y = adding(np.ones(8, np.float32))
    for _ in range(3):
        y = adding(y)
    with pytest.raises(gshard.ShardingError, match=r"given twice, as .* and y"):
        adding(x)


def test_what_a_function_closes_over_is_freed_with_its_programs():
    weights = jnp.arange(16.0).reshape(8, 2)
    scaled = gshard.jit(lambda x: x @ gshard.split(weights, 0, "a"), mesh=MESH)
    x = np.ones((3, 8), np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(scaled(x), x @ weights)
    placed = [weakref.ref(a) for a in scaled.lower(x).executable.captured]
    gc.collect()
    assert all(a() is not None for a in placed)
    jax.clear_caches()
    gc.collect()
    assert placed
    assert all(a() is None or a() is weights for a in placed)
    np.testing.assert_array_equal(scaled(x), x @ weights)


@pytest.mark.parametrize(("place", "donated"), [("numpy", 0), ("not committed", ()), ("one device", 0), ("whole", ())])
def test_a_transfer_guard_refuses_what_it_refuses_of_jit(place, donated):
    """Moves among the devices of the mesh are no transfers, as in a compiled program."""
    jitted = gshard.jit(lambda x: x * 2, mesh=MESH, in_shardings=P("a"), out_shardings=P("a"), donate_argnums=donated)
    for _ in range(3):
        x = PLACES[place]()
        with jax.transfer_guard("disallow"):
            if place == "whole":
                jitted(x)
                continue
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"Disallowed (host|device)-to-device transfer"):
                jitted(x)
        np.testing.assert_array_equal(jitted(x), X * 2)


# A given plan runs in every call, wherever the arguments are, on meshes of both types of axes.
RNG = np.random.default_rng(3)
W = RNG.standard_normal((16, 24)).astype(np.float32)
BATCH = RNG.standard_normal((8, 16)).astype(np.float32)


def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


TRACES = []


def typed(w, x):
    """A function that cannot be traced without the types of its arguments."""
    TRACES.append(1)
    assert jax.typeof(w).sharding.spec == P("d", None)
    return step(w, x)


def mesh_of(kind):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def placements(mesh, w):
    return [
        w,
        jnp.asarray(w),
        *(jax.device_put(w, NamedSharding(mesh, P(*spec))) for spec in ((), ("d",), (None, "d"))),
    ]


@pytest.mark.parametrize(("way", "kind"), [
    ("jit", AxisType.Auto), ("jit", AxisType.Explicit), ("block", AxisType.Auto)
])  # fmt: skip
def test_a_plan_runs_in_every_call(way, kind):
    mesh = mesh_of(kind)
    w = placements(mesh, W)[3]
    found = gshard.search(step, w, BATCH, mesh=mesh, machine="h100:1x8", progress=False)
    if way == "block":
        jitted, block = jax.jit(step), gshard.instead_of_jit(mesh=mesh, plan=found.plan)
    else:
        jitted, block = gshard.jit(step, mesh=mesh, plan=found.plan), gshard.instead_of_jit(mesh=mesh)
    expected = [W]
    for _ in range(3):
        expected.append(np.asarray(jax.jit(step)(expected[-1], BATCH)[0]))
    with block:
        state = w
        for value in expected[1:]:
            state, loss = jitted(state, BATCH)
            np.testing.assert_allclose(state, value, rtol=1e-5, atol=1e-6)
        assert np.isfinite(loss)
        for placed in placements(mesh, W):
            np.testing.assert_allclose(jitted(placed, BATCH)[0], expected[1], rtol=1e-5, atol=1e-6)
            lowered = jitted.lower(placed, BATCH)
            assert gshard.SavedPlan.of(lowered.plan) == gshard.SavedPlan.of(found.plan)


def test_a_function_that_needs_the_types_is_traced_with_them():
    """A block of ``instead_of_jit`` refuses its plan."""
    mesh = mesh_of(AxisType.Explicit)
    w = placements(mesh, W)[3]
    found = gshard.search(typed, w, BATCH, mesh=mesh, machine="h100:1x8", progress=False)
    with pytest.raises(gshard.PlanError, match="with axes of type Explicit, and a plan is for one program"):
        gshard.instead_of_jit(mesh=mesh, plan=found.plan)
    refused = pytest.raises(gshard.PlanError, match="with axes of type Explicit")
    with jax.set_mesh(mesh), gshard.instead_of_jit(plan=found.plan), refused:
        jax.jit(lambda w: w + 1)(jnp.ones(8))
    jitted = gshard.jit(typed, mesh=mesh, plan=found.plan)
    jitted(w, BATCH)
    traced = len(TRACES)
    for _ in range(3):
        jitted.lower(w, BATCH)
        assert len(TRACES) == traced, "what cannot be traced is not tried again"
        np.testing.assert_allclose(jitted(w, BATCH)[0], jax.jit(step)(W, BATCH)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_constant_with_which_a_gradient_begins_is_no_mark(kind):
    """JAX moves it to the mesh where arguments are on one."""
    mesh = mesh_of(kind)
    for placed in placements(mesh, W):
        jitted = gshard.jit(step, mesh=mesh)
        equations = [e for e in jitted.lower(placed, BATCH).program.block.walk() if e.name == "reshard"]
        assert not any(e.outputs[0].shape == () for e in equations)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        finished = gshard.jit(lambda x: jax.sharding.reshard(jnp.sum(x, 0), P()))
        np.testing.assert_array_equal(finished(jnp.arange(8.0)), 28.0)
