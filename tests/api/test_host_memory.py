"""Host memory: values and results are in the memory in which ``jax.jit`` has them, and move where the program says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P, lax
from jax.ad_checkpoint import checkpoint_name

import gshard
from checked_calls import near
from gshard.core.jax_adapter import no_mesh_set, shapes_of
from gshard.core.memory_kinds import memory_of

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
ROWS = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
GRID = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AUTO, AUTO))
TYPED = jax.make_mesh((8,), ("d",), axis_types=(EXPLICIT,))
RNG = np.random.default_rng(7)
X = RNG.normal(size=(16, 8)).astype(np.float32)
N = np.arange(128, dtype=np.int32).reshape(16, 8) - 60
STACK = RNG.normal(size=(4, 16, 16)).astype(np.float32) / 4
SPECS = {ROWS: P("d"), GRID: P("a", "b"), TYPED: P("d")}


def on(mesh, kind="device", spec=None):
    return NamedSharding(mesh, SPECS[mesh] if spec is None else spec, memory_kind=kind)


def on_host(mesh, x=X, spec=None):
    return jax.device_put(x, on(mesh, "pinned_host", spec))


def kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def check(ours, theirs, name=""):
    assert kinds(ours) == kinds(theirs), name
    near(ours, theirs)


def moved(function, *args):
    """To the host or from it, and how often, for each transfer of the per-device program."""
    host = gshard.explain(function, *args).source.host
    return [(t.kind == "to_host", t.times) for t in host.transfers]


def sizes(found):
    """Bytes that a device fetches from the host, and that it sends to it."""
    return [sum(t.bytes for t in found.source.host.transfers if t.kind == kind) for kind in ("from_host", "to_host")]


def step(state, g):
    new = jax.device_put(state, DEVICE) * 0.9 + g
    return jax.device_put(new, HOST), new.sum()


def fetched_in_rounds(ws, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ jax.device_put(w, DEVICE)), None), x, ws)[0]


def unrolled(ws, x):
    for i in range(4):
        x = jnp.tanh(x @ jax.device_put(ws[i], DEVICE))
    return x


# Functions of a mesh; functions of one array on the host and one on the devices, and what moves.
FORMS = {
    "an argument returned": (lambda m: lambda h, x: h, []),
    "space": (lambda m: lambda h, x: jax.device_put(x * 2, HOST), [(True, 1)]),
    "sharding": (lambda m: lambda h, x: jax.device_put(x * 2, on(m, "pinned_host")), [(True, 1)]),
    "fetched by space": (lambda m: lambda h, x: jax.device_put(h, DEVICE) + x, [(False, 1)]),
    "fetched by sharding": (lambda m: lambda h, x: jax.device_put(h, on(m)) + x, [(False, 1)]),
    "neither": (lambda m: lambda h, x: (jax.device_put(h, HOST), jax.device_put(h), jax.device_put(x, DEVICE)), []),
    "a step": (lambda m: step, [(False, 1), (True, 1)]),
    "computed": (lambda m: lambda h, x: jnp.sin(h) * 2, [(False, 1), (True, 1), (False, 1), (True, 1)]),
    "summed": (lambda m: lambda h, x: h.sum(0), [(False, 1), (True, 1)]),
    "unpinned": (lambda m: lambda h, x: jax.device_put(x * 2, on(m, "unpinned_host")), []),
    "constraint": (lambda m: lambda h, x: lax.with_sharding_constraint(x * 2, on(m, "pinned_host")), []),
    "cond": (lambda m: lambda h, x: lax.cond(x.sum() > 0, lambda: jax.device_put(x, HOST), lambda: h), [(True, 1)]),
    "while": (
        lambda m: lambda h, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1], x)[0]), (0, h)),
        [(False, 1), (True, 1)],
    ),
    "scan": (lambda m: lambda h, x: lax.scan(lambda c, _: step(c, x), h, None, length=3), [(False, 3), (True, 3)]),
    "remat": (
        lambda m: (
            lambda h, x: jax.grad(
                lambda x: jax.checkpoint(lambda h, x: (jnp.sin(x) * jnp.sin(jax.device_put(h, DEVICE))).sum())(h, x)
            )(x)
        ),
        [(False, 1)],
    ),
    "grad": (
        lambda m: lambda h, x: jax.grad(lambda h: (jax.device_put(h, DEVICE) ** 2).sum())(h),
        [(False, 1), (True, 1)],
    ),
    "shard_map": (
        lambda m: jax.shard_map(lambda h, x: step(h, x)[0], mesh=m, in_specs=(SPECS[m],) * 2, out_specs=SPECS[m]),
        [(False, 1), (True, 1)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_results_are_where_jax_has_them(form):
    make, expected = FORMS[form]
    mesh = TYPED if form in ("fetched by sharding", "a step", "grad") else GRID
    with jax.set_mesh(mesh):
        f, h, x = make(mesh), on_host(mesh), jax.device_put(X, on(mesh))
        ours, theirs = gshard.jit(f, mesh=mesh), jax.jit(f)(h, x)
        for call in range(3):
            check(ours(h, x), theirs, f"{form}, call {call}")
        assert moved(ours, h, x) == expected


def test_operands_in_two_memories_are_refused_as_by_jax():
    for f in (lambda h, x: h + x, lambda h, x: jnp.where(x > 0, h, x)):
        with pytest.raises(ValueError, match="memory_space of all inputs"):
            gshard.jit(f, mesh=ROWS)(on_host(ROWS), X)


def test_results_leave_in_the_memory_that_out_shardings_names():
    h, x = on_host(GRID), jax.device_put(X, on(GRID))
    for kind in ("device", "pinned_host", "unpinned_host"):
        f = lambda h, x: {"h": h, "x": (x * 2, h)}  # noqa: E731
        for out in (on(GRID, kind), {"h": None, "x": (on(GRID, kind), on(GRID, kind, P()))}):
            check(gshard.jit(f, mesh=GRID, out_shardings=out)(h, x), jax.jit(f, out_shardings=out)(h, x), kind)
    assert kinds(gshard.jit(lambda h: h, mesh=GRID, out_shardings=P("b"))(h)) == ["device"]  # as under jax.set_mesh


PLACES = {
    "numpy": lambda: N, "not committed": lambda: jnp.asarray(N), "one host": lambda: jax.device_put(N, HOST),
    "one device": lambda: jax.device_put(N, jax.devices()[3]), "as it is": lambda: jax.device_put(N, on(GRID)),
    "whole": lambda: jax.device_put(N, on(GRID, spec=P())), "host": lambda: on_host(GRID, N),
    "host, other cut": lambda: on_host(GRID, N, spec=P("b")),
    "unpinned": lambda: jax.device_put(N, on(GRID, "unpinned_host")),
}  # fmt: skip


@pytest.mark.parametrize("asked", [None, P("a"), on(GRID, "pinned_host")], ids=str)
def test_every_call_is_right_wherever_its_argument_is(asked):
    """What ``in_shardings`` names is where an argument is moved; ``jax.jit`` refuses one that is elsewhere."""
    function = gshard.jit(lambda x: jax.device_put(x, DEVICE) * 3 - 1, mesh=GRID, in_shardings=asked)
    for place in (*PLACES, *reversed(PLACES)):
        x = PLACES[place]()
        for _ in range(2):
            result = function(x)
            np.testing.assert_array_equal(np.asarray(result), N * 3 - 1, place)
            assert kinds(result) == ["device"]
        (expected,) = function.lower(x).compile().input_shardings[0]
        own = x.sharding.memory_kind if isinstance(x, jax.Array) and x.committed else "device"
        assert expected.memory_kind == (own if asked is None else memory_of(asked)), place


def test_an_optimizer_state_on_the_host_stays_there():
    """Written as MaxText writes it: shardings of the state with ``pinned_host``, fetched in the step, donated."""
    rows = on(ROWS)
    host = on(ROWS, "pinned_host")
    state_shardings = {"params": {"w": rows, "b": rows}, "m": {"w": host, "b": host}, "step": on(ROWS, spec=P())}

    def train(state, x):
        def loss(p):
            return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)

        value, g = jax.value_and_grad(loss)(state["params"])
        m = jax.device_put(state["m"], jax.tree.map(lambda s: s.with_memory_kind("device"), state_shardings["m"]))
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)
        return {"params": params, "m": m, "step": state["step"] + 1}, value

    def start():
        p = {"w": np.ones((8, 16), np.float32) / 8, "b": np.zeros(16, np.float32)}
        return jax.device_put({"params": p, "m": jax.tree.map(np.zeros_like, p), "step": np.int32(0)}, state_shardings)

    placing = {"in_shardings": (state_shardings, None), "out_shardings": (state_shardings, None), "donate_argnums": 0}
    ours, theirs = gshard.jit(train, mesh=ROWS, **placing), jax.jit(train, **placing)
    a, b = start(), start()
    for _ in range(4):
        before = a
        (a, value), (b, wanted) = ours(a, X), theirs(b, X)
        check((a, value), (b, wanted))
        assert kinds(a["m"]) == ["pinned_host"] * 2
        assert before["m"]["w"].is_deleted()
    assert ours._cache_size() <= 2
    explained = gshard.explain(ours, a, X)
    assert explained.source.host.arguments == (4 * (8 * 16 + 16), 4 * (8 * 16 + 16) // 8)
    assert sizes(explained) == 2 * [explained.source.host.arguments[1]]
    assert explained.argument_bytes[0] == 4 * (8 * 16 + 16) + 4 + X.nbytes


def offloading(policy):
    if policy == "names":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["kept"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


@pytest.mark.parametrize("policy", ["names", "dots"])
def test_activations_are_offloaded_as_the_policy_says(policy):
    def layer(c, w):
        return jnp.tanh(jnp.sin(checkpoint_name(c, "kept") @ w)), None

    def loss(ws, x):
        return (lax.scan(jax.checkpoint(layer, policy=offloading(policy)), x, ws)[0] ** 2).sum()

    x = jax.device_put(RNG.normal(size=(32, 16)).astype(np.float32), on(ROWS))
    gradient = jax.grad(loss, (0, 1))
    ours = gshard.jit(gradient, mesh=ROWS)
    check(ours(STACK, x), jax.jit(gradient)(STACK, x))
    assert moved(ours, STACK, x) == [(True, 4), (False, 4)]  # in the loops, and not of whole stacks around them


@pytest.mark.parametrize("f", [fetched_in_rounds, unrolled])
@pytest.mark.parametrize("spec", [P(None, "a"), P("b", "a")], ids=str)
def test_weights_are_fetched_layer_by_layer(f, spec):
    ws, x = on_host(GRID, STACK, spec), jax.device_put(STACK[0], on(GRID))
    function = gshard.jit(f, mesh=GRID)
    check(function(ws, x), jax.jit(f)(ws, x))
    if spec[0] is None:  # the layers of a stack that is split by layers are moved on the devices
        assert sum(times for _, times in moved(function, ws, x)) == 4
        whole, local = gshard.explain(function, ws, x).source.host.arguments
        assert sizes(gshard.explain(function, ws, x))[0] == local


@pytest.mark.parametrize("size", [16, 13])
def test_rounds_that_need_nothing_of_each_other_fetch_their_own_slices(size):
    """In each round one; of uneven parts, too."""

    def f(ws):
        ws = ws if size == 16 else gshard.split(ws, 0, 8)
        return lax.map(lambda w: (jax.device_put(jnp.sin(jax.device_put(w, DEVICE)), HOST), w * 2, w[:1]), ws)

    ws = on_host(ROWS, RNG.normal(size=(size, 4, 4)).astype(np.float32), P("d") if size == 16 else P())
    function = gshard.jit(f, mesh=ROWS)
    check(function(ws), jax.jit(f)(ws))
    if size == 16:
        assert moved(function, ws) == [(False, 2), (True, 2)] * 2


def test_a_value_on_the_host_is_resharded_on_the_devices():
    def f(x):
        rows = jax.device_put(gshard.split(x, 0, 8), HOST)
        columns = gshard.split(rows, 1, 8)
        return columns, jax.device_put(columns, DEVICE) + 1

    function = gshard.jit(f, mesh=ROWS)
    check(function(X), (jax.device_put(X, HOST), jnp.asarray(X + 1)))
    assert [c.kind for c in function.lower(X).spmd.collectives] == ["all_to_all"]
    assert moved(function, X) == [(True, 1), (False, 1), (True, 1), (False, 1)]


def test_sizes_that_do_not_divide():
    devices, x = 3, RNG.normal(size=(13, 5)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))

    def f(x):
        h = jax.device_put(gshard.split(x, 0, devices), HOST)
        d = jax.device_put(h, DEVICE)
        return h, h[2:9], h.sum(0), jnp.concatenate([h, h]), d[::-1], d.max(0)

    check(gshard.jit(f, mesh=mesh)(x), jax.jit(f)(x))
    kept = gshard.jit(
        lambda x: jax.device_put(gshard.split(jax.device_put(x, DEVICE), 0, devices) * 2, HOST), mesh=mesh
    )
    y = x
    for n in range(1, 4):
        y = kept(y)
        assert kinds([y]) == ["pinned_host"]
        np.testing.assert_array_equal(np.asarray(y), x * 2**n)


def test_captured_arrays_stay_on_the_host():
    table = on_host(GRID)
    function = gshard.jit(lambda x: (jax.device_put(table, DEVICE) + x, table), mesh=GRID)
    for _ in range(3):
        total, same = function(X)
        assert kinds((total, same)) == ["device", "pinned_host"]
        np.testing.assert_array_equal(np.asarray(total), X + X)
    assert function.lower(X).executable.captured[0].sharding.memory_kind == "pinned_host"


def test_transformations_of_a_partitioned_function():
    h, x = on_host(GRID), jax.device_put(X, on(GRID))
    to_host = lambda x: jax.device_put(jnp.sin(x), HOST)  # noqa: E731
    squares = lambda h: (jax.device_put(h, DEVICE) ** 2).sum()  # noqa: E731
    ours = gshard.jit(to_host, mesh=GRID), gshard.jit(squares, mesh=GRID)
    check(jax.grad(ours[1])(h), jax.grad(jax.jit(squares))(h))
    check(jax.vmap(ours[0])(x), jax.vmap(jax.jit(to_host))(x))
    check(jax.jit(lambda x: ours[0](x))(x), jax.jit(to_host)(x))
    check(gshard.jit(lambda x: ours[0](x), mesh=GRID)(x), jax.jit(to_host)(x))
    check(jax.jit(lambda h: ours[1](h))(h), jax.jit(squares)(h))


@pytest.mark.parametrize("form", ["sharding", "fetched by space", "scan", "computed"])
def test_the_compiler_of_a_tpu_is_told_of_every_transfer(form):
    """XLA's annotations, as many as explained; on CPU, whose devices have no memory of their own, there are none."""
    f, h, x = FORMS[form][0](ROWS), on_host(ROWS), jax.device_put(X, on(ROWS))
    lowered = gshard.jit(f, mesh=ROWS).lower(h, x)
    program = lowered.executable
    with no_mesh_set(), jax.sharding.use_abstract_mesh(lowered.mesh.abstract_jax_mesh):
        shapes = shapes_of(lowered.spmd.jaxpr.in_avals)
        text = program.function.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    head, *body = text[text.index("@main") :].splitlines()
    results = kinds(jax.jit(f)(h, x))
    used = form not in ("space", "sharding")  # else the argument on the host is left out
    assert head.count('mhlo.memory_kind = "pinned_host"') == used + results.count("pinned_host")
    transfers = gshard.explain(f, h, x, mesh=ROWS).source.host.transfers
    for kind, to_host in (("pinned_host", True), ("device", False)):
        told = sum(f'_xla_buffer_placement = "{kind}"' in line for line in body)
        assert told == sum((t.kind == "to_host") is to_host for t in transfers) + results.count(kind)


def test_searches_presets_and_recorded_plans_keep_memories():
    def f(p, m, x):
        g = jax.grad(lambda p: (jnp.tanh(x @ p) ** 2).mean())(p)
        m = jax.device_put(m, DEVICE) * 0.9 + g
        return p - 0.1 * m, jax.device_put(m, HOST)

    p, m, x = STACK[0], on_host(ROWS, STACK[1], P()), STACK[2]
    want = jax.jit(f)(p, jax.device_put(STACK[1], HOST), x)
    plan = gshard.jit(f, mesh=ROWS).lower(p, m, x).plan
    found = gshard.search(f, p, m, x, mesh=ROWS, machine="h100:1x8")
    ways = [{"search": True, "machine": "h100:1x8"}, {"machine": "h100:1x8"}]
    for options in (*ways, {"plan": plan}, {"plan": found.plan}, {"memory_limit": "1GiB"}):
        function = gshard.jit(f, mesh=ROWS, **options)
        for _ in range(3):
            check(function(p, m, x), want, str(options))


def test_memory_on_the_host_is_none_of_a_device():
    ws, x = on_host(ROWS, np.zeros((8, 64, 64), np.float32), P(None, "d")), jax.device_put(np.zeros((64, 64)), on(ROWS))
    found = gshard.explain(fetched_in_rounds, ws, x.astype(jnp.float32), mesh=ROWS)
    whole, each = 8 * 64 * 64 * 4, 64 * 64 * 4 // 8
    assert found.source.host.arguments == (whole, whole // 8)
    assert sizes(found)[0] == whole // 8
    assert found.argument_bytes == (8 * each, each)
    assert found.cost("h100:1x8").memory.arguments == each
    assert "each device fetches 16.0 KiB from the host and sends 0 B to it in one call" in str(found)
    assert "ws  f32<host>[8,64@d,64]" in found.format(tensors=12)


def test_recomputation_fetches_round_by_round():
    """A limit of memory recomputes what was computed of a fetched value from the host's copy."""

    def loss(ws, x):
        def layer(c, w):
            w = jax.device_put(w, DEVICE)
            return jnp.tanh(jnp.sin(c @ w) @ w.T), None

        return (lax.scan(layer, x, ws)[0] ** 2).mean()

    ws = on_host(ROWS, RNG.normal(size=(6, 64, 64)).astype(np.float32) / 8, P(None, "d"))
    x = jax.device_put(RNG.normal(size=(1024, 64)).astype(np.float32), on(ROWS))
    function = gshard.jit(jax.grad(loss), mesh=ROWS, memory_limit="768KiB")
    check(function(ws, x), jax.jit(jax.grad(loss))(ws, x))
    assert function.lower(ws, x).spmd.recomputed is not None
    assert sorted(moved(function, ws, x)) == [(False, 6), (False, 6), (False, 6), (True, 6)]


def test_the_gradient_of_an_unread_argument_is_in_its_memory():
    function = gshard.jit(lambda x, y: 2 * x, mesh=ROWS)
    x, y = jax.device_put(X, on(ROWS)), on_host(ROWS, X, P("d"))
    for _ in range(3):
        results, back = jax.vjp(function, x, y)
        of_x, of_y = back(results)
        np.testing.assert_array_equal(of_x, 4 * X)
        np.testing.assert_array_equal(of_y, np.zeros_like(X))
        assert of_y.sharding.memory_kind == y.sharding.memory_kind


def test_shardings_that_are_not_read_are_refused_with_the_line():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    columns_first = jax.experimental.layout.Format(jax.experimental.layout.Layout((1, 0)), on(ROWS))
    for target, what in (
        (jax.memory.Space.Any, "memory space Any is none"),
        (columns_first, "does not read a Format"),
        (one, "a sharding over 1 devices cannot be one over 8"),
    ):
        with pytest.raises(gshard.ShardingError, match=what) as raised:
            gshard.jit(lambda x, target=target: jax.device_put(x, target), mesh=ROWS)(X)
        assert raised.value.where is not None
        assert raised.value.where.startswith("test_host_memory.py:")


def test_a_constraint_that_names_the_host_is_told_of():
    found = gshard.explain(lambda x: lax.with_sharding_constraint(x, on(ROWS, "pinned_host")), X, mesh=ROWS)
    (told,) = found.source.host.without_effect
    assert "sharding_constraint at test_host_memory.py" in told
    assert "names memory 'pinned_host', which has no effect" in told
    assert told in str(found)
