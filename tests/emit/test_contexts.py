"""What compute_on and set_xla_metadata say of a part of a function stays on its operations, and on no others."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax._src.compute_on import compute_on_p
from jax.experimental import compute_on as compute_on_module
from jax.experimental.scheduling_groups import xla_metadata_call
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding

import gshard
from gshard.comm.steps import KINDS
from gshard.core.jax_adapter import closed, sub_jaxprs
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.program import NO_CONTEXT, Context
from gshard.device.cost import cost
from gshard.device.machine import Machine
from placed import mesh_of

W = jnp.arange(64.0).reshape(8, 8) % 3


def placed(mesh, shape=(24, 8)):
    x = jnp.arange(float(np.prod(shape))).reshape(shape) % 11 / 4
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


def straight(x):
    with set_xla_metadata(tag=3):
        y = x @ W
    return jnp.sin(y)


def in_scan(x):
    def body(c, _):
        with set_xla_metadata(tag=1, other="yes"):
            c = jnp.sin(c @ W)
        return jnp.cos(c), None

    return lax.scan(body, x, None, length=3)[0]


def in_cond(x):
    def true(x):
        with set_xla_metadata(tag=1):
            return jnp.sin(x)

    return lax.cond(x[0, 1] > 0, true, jnp.cos, x)


def in_remat(x):
    @jax.checkpoint
    def twice(x):
        with set_xla_metadata(tag=1):
            return jnp.sin(jnp.sin(x))

    return jax.grad(lambda x: twice(x).sum())(x)


def in_custom_vjp(x):
    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    def backward(x, g):
        with set_xla_metadata(tag=2):
            return (g * jnp.cos(x),)

    own.defvjp(lambda x: (own(x), x), backward)
    return jax.grad(lambda x: own(x).sum())(x)


def three_times(x):
    with set_xla_metadata(tag=1):
        a, b = jnp.sin(x), jnp.sin(x)
    with set_xla_metadata(tag=2):
        c = jnp.sin(x)
    return a + b + c + jnp.sin(x)


def nested(x):
    with set_xla_metadata(tag=1, outer=2):
        return jax.jit(straight)(x)


def on_the_host(x):
    """A part of a function for the host, as both versions of JAX write it."""
    make = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)
    host = make(lambda x: jnp.sin(x) * 3, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return host(x) * 2


def host_in_scan(x):
    return lax.scan(lambda c, _: (on_the_host(c), None), x, None, length=2)[0]


ALL = [
    straight, in_scan, in_cond, in_remat, in_custom_vjp, nested, on_the_host, host_in_scan,
]  # fmt: skip


def attributes(jitted, *arguments):
    """Which operations of a program for TPU have which attributes; what calls do is that of the functions called."""
    text = jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    found = Counter()
    for line in text.splitlines():
        said = re.search(r"mhlo.frontend_attributes = \{(.*?)\}", line)
        if said and "call @" not in line and "annotate_device_placement" not in line:
            operation = re.search(r"stablehlo\.(\w+)", line)
            found[operation[1] if operation else "with a body", said[1]] += 1
    return found


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.__name__)
def test_operations_have_the_attributes_that_jax_gives_them(f):
    mesh = mesh_of(a=8)
    ours, theirs = (attributes(jit(f), placed(mesh)) for jit in (lambda f: gshard.jit(f, mesh=mesh), jax.jit))
    assert ours
    assert ours == theirs


def test_numbers_and_attributes_on_another_mesh():
    mesh = mesh_of(a=2, b=4)

    def f(x):
        return in_remat(in_scan(x)) + straight(three_times(in_cond(x)))

    x, partitioned = placed(mesh), gshard.jit(f, mesh=mesh)
    expected = jax.jit(f)(np.asarray(x))
    for y in (x, jax.device_put(x, NamedSharding(mesh, P())), np.asarray(x)):
        np.testing.assert_allclose(partitioned(y), expected, rtol=2e-6)
        assert {said for _, said in attributes(partitioned, y)} == {
            'tag = "1"', 'tag = "2"', 'tag = "3"', 'other = "yes", tag = "1"'
        }  # fmt: skip


def test_equal_equations_in_other_contexts_are_others():
    program = gshard.jit(three_times, mesh=mesh_of(a=8)).lower(placed(mesh_of(a=8))).program
    found = [e.context for e in program.block.walk() if e.name == "sin"]
    assert found == [Context(metadata=(("tag", 1),)), Context(metadata=(("tag", 2),)), NO_CONTEXT]
    assert "sin{tag=2}" in str(program)


def test_nothing_is_rewritten_across_contexts():
    """Slices and paddings in a row are one equation, but those with and without a context stay apart."""

    def shifted(x, inner):
        y = x[1:]
        if not inner:
            return jnp.pad(y, ((0, 1), (0, 0)))
        with set_xla_metadata(tag=1):
            return jnp.pad(y, ((0, 1), (0, 0)))

    mesh = mesh_of(a=8)
    one, two = (gshard.jit(lambda x, i=i: shifted(x, i), mesh=mesh).lower(placed(mesh)).program for i in (False, True))
    names = [[(e.name, bool(e.context)) for e in p.block.walk() if e.name in ("slice", "pad")] for p in (one, two)]
    assert names == [[("pad", False)], [("slice", False), ("pad", True)]]


def equations(jaxpr):
    inner = [q for e in closed(jaxpr)[0].eqns for body in sub_jaxprs(e.params) for q in equations(body)]
    return [*closed(jaxpr)[0].eqns, *inner]


SENDING = {
    "product": lambda x: x.T @ x,
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "shift": lambda x: x[1:] - x[:-1],
    "convolution": lambda x: jnp.convolve(x[:, 0], jnp.ones(5)),
    "look-up": lambda x: jnp.take(x, jnp.array([3, 1, 17]), axis=0),
    "update": lambda x: lax.dynamic_update_slice(x, x[:5], (x[0, 0].astype(int), 0)),
    "norm": lambda x: jnp.linalg.qr(x)[1],
    "rows": lambda x: gshard.put_rows(x, jnp.arange(24), 24),
}


@pytest.mark.parametrize("name", SENDING)
def test_collectives_that_gshard_adds_have_no_context(name):
    def f(x):
        with set_xla_metadata(tag=1):
            return SENDING[name](x)

    spmd = gshard.jit(f, mesh=mesh_of(a=8)).lower(placed(mesh_of(a=8))).spmd
    every = equations(spmd.jaxpr)
    sent = [e for e in every if e.primitive.name in KINDS]
    assert sent
    assert [e.primitive.name for e in sent if context_of(e)] == []
    assert any(context_of(e) for e in every)


def test_collectives_of_the_user_keep_their_context():
    mesh = mesh_of(a=2, b=4)

    def part(x):
        with set_xla_metadata(_scheduling_group_id=5):
            y = lax.ppermute(x, "a", [(0, 1), (1, 0)])
        return lax.psum(y, "b")

    def f(x):
        return jax.shard_map(part, mesh=mesh, in_specs=P(("a", "b")), out_specs=P("a"))(x)

    spmd = gshard.jit(f, mesh=mesh).lower(placed(mesh)).spmd
    found = {e.primitive.name: context_of(e).metadata for e in equations(spmd.jaxpr) if e.primitive.name in KINDS}
    assert found == {"ppermute": (("_scheduling_group_id", 5),), "psum": ()}


def test_a_context_around_the_call_is_that_of_the_program_and_of_its_key():
    mesh = mesh_of(a=8)
    x = placed(mesh)
    partitioned = gshard.jit(lambda x: jnp.sin(x.T @ x).sum(), mesh=mesh)
    expected = partitioned(x)
    for tag in (1, None, 2, 1, None):
        with in_context(Context(metadata=() if tag is None else (("tag", tag),))):
            np.testing.assert_array_equal(partitioned(x), expected)
            found = attributes(partitioned, x)
            every = equations(partitioned.lower(x).spmd.jaxpr)
        assert {said for _, said in found} == (set() if tag is None else {f'tag = "{tag}"'})
        assert not any(context_of(e) for e in every if e.primitive.name in KINDS)


def test_a_function_is_called_with_metadata():
    """Where JAX annotates a call, which XLA passes on to what is inside, that is annotated at once."""

    def f(x):
        return xla_metadata_call(tag="g")(lambda x: jnp.sin(x) @ W)(x) + 1

    found = attributes(gshard.jit(f, mesh=mesh_of(a=8), strict=True), placed(mesh_of(a=8)))
    assert found == {("sine", 'tag = "g"'): 1, ("dot_general", 'tag = "g"'): 1}


def test_results_of_compute_on_are_put_where_it_says():
    """What is made on the host and stays there is a ``device_put`` to the host."""
    spaces = {"out_memory_spaces": (jax.memory.Space.Host,), "compiler_options_json": None}
    body = jax.make_jaxpr(jnp.sin)(jnp.ones((24, 8)))

    def f(x):
        (y,) = compute_on_p.bind(x, jaxpr=body, compute_type="device_host", **spaces)
        return y

    program = gshard.jit(f, mesh=mesh_of(a=8)).lower(placed(mesh_of(a=8))).program
    assert [(e.name, e.context.compute_type) for e in program.block.walk()] == [
        ("sin", "device_host"),
        ("device_put", None),
    ]


def test_contexts_stay_where_a_program_is_written_anew():
    """What is recomputed to fit in memory has the context of what it is recomputed of."""

    def body(x, w):
        with set_xla_metadata(tag=1):
            h = jax.nn.gelu(x @ w)
        return x + jnp.tanh(h) @ w.T, None

    def loss(ws, x):
        return jnp.mean(lax.scan(body, gshard.split(x, 0, 8), ws)[0] ** 2)

    arguments = jnp.ones((8, 64, 64)), jnp.ones((512, 64))
    plain = gshard.jit(jax.grad(loss), mesh=8).lower(*arguments).spmd
    memory = cost(plain, Machine.of("cpu:8")).memory
    limit = memory.peak - memory.temporaries // 2
    fits = gshard.jit(jax.grad(loss), mesh=8, memory_limit=limit).lower(*arguments).spmd
    assert fits.recomputed is not None
    before, after = (Counter(e.primitive.name for e in equations(s.jaxpr) if context_of(e)) for s in (plain, fits))
    assert after > before > Counter()
    assert {context_of(e).metadata for e in equations(fits.jaxpr)} == {(), (("tag", 1),)}


@pytest.mark.parametrize("where", ["straight", "jit"])
def test_random_bits_are_those_of_the_setting_that_they_are_drawn_in(where):
    def drawn(x):
        key = jax.random.key(1)
        with jax.threefry_partitionable(False):
            a = jax.random.normal(key, x.shape)
        return x + a + jax.random.normal(key, x.shape)

    f = {"straight": drawn, "jit": jax.jit(drawn)}[where]
    mesh = mesh_of(a=8)
    x = placed(mesh)
    expected = jax.jit(f)(np.asarray(x))
    np.testing.assert_allclose(gshard.jit(f, mesh=mesh)(x), expected, rtol=1e-6)


@pytest.mark.parametrize("where", ["straight", "scan"])
def test_a_part_of_a_function_in_64_bits(where):
    def straight(x):
        with jax.enable_x64(True):
            y = jnp.cumsum(x.astype(jnp.float64) + 1e-9, 0)
            y = y - jnp.flip(y, 0)[:, :1] + y.sum(0)
            return ((y - 2.0) * 1e3).astype(jnp.float32)

    f = straight if where == "straight" else lambda x: lax.scan(lambda c, _: (straight(c), None), x, None, length=2)[0]
    mesh = mesh_of(a=2, b=4)
    x, partitioned = placed(mesh), gshard.jit(f, mesh=mesh)
    for y in (x, jax.device_put(x, NamedSharding(mesh, P())), np.asarray(x)):
        np.testing.assert_allclose(partitioned(y), jax.jit(f)(np.asarray(x)), rtol=1e-6)


def test_precision_and_named_scopes_inside_of_bodies():
    def body(c, _):
        with jax.default_matmul_precision("float32"), jax.named_scope("deep"):
            return c @ W, None

    mesh = mesh_of(a=2, b=4)
    spmd = gshard.jit(lambda x: lax.scan(body, x, None, length=2)[0], mesh=mesh).lower(placed(mesh)).spmd
    (product,) = (e for e in equations(spmd.jaxpr) if e.primitive.name == "dot_general")
    assert product.params["precision"] == (lax.Precision.HIGHEST,) * 2
    assert "deep" in str(product.source_info.name_stack)
