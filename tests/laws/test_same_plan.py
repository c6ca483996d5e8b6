"""Equal problems get equal plans: a plan does not cost more because the mesh is written otherwise."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard

WEIGHTS, ROWS = (256, 3, 8, 32), (64, 512, 256)


def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k), -1)
    return jnp.mean(jnp.einsum("bhqs,bshk->bqhk", weights, v) ** 2)


def loss(w, x):
    return attention(*jnp.einsum("btd,dchk->cbthk", x, w))


def f32(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


JOINT, X = f32(*WEIGHTS), f32(*ROWS)


@functools.cache
def cost_of(axes, w_spec, x_spec, machine=None):
    """Bytes, or seconds on a machine: planned once for all tests that compare something with it."""
    found = explained(dict(axes), P(*w_spec), P(*x_spec), machine=machine)
    return found.cost(machine).seconds if machine else found.total_bytes


def explained(axes, w_spec, x_spec, loss=loss, w=JOINT, x=X, **options):
    """A training step whose weights, new weights and batch are marked so."""

    def marked(weights):
        specs = w_spec if isinstance(w_spec, dict) else jax.tree.map(lambda _: w_spec, weights)
        return jax.tree.map(gshard.shard, weights, specs)

    def step(w, x):
        w, x = marked(w), gshard.shard(x, x_spec)
        return marked(jax.tree.map(lambda a, da: a - 0.1 * da, w, jax.grad(loss)(w, x)))

    found = gshard.explain(step, w, x, mesh=gshard.Mesh.abstract(**axes), **options)
    assert not found.is_compiled
    return found


# For each row: the axes of weights and of the batch on a mesh, and the same on a mesh in which axes are divided.
CUTS = [
    ({"a": 8}, "a", "a", {"a": 4, "b": 2}, ("a", "b"), ("a", "b")),
    ({"a": 8}, "a", "a", {"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("a", "b", "c")),
    ({"a": 2, "b": 4}, "b", ("a", "b"), {"a": 2, "b": 2, "c": 2}, ("b", "c"), ("a", "b", "c")),
    ({"a": 8}, "a", "a", {"a": 2, "b": 2, "c": 2}, ("a", "c"), ("a", "b", "c")),
    ({"a": 16}, "a", "a", {"a": 2, "b": 2, "c": 2, "d": 2}, ("a", "b", "c", "d"), ("a", "b", "c", "d")),
    ({"a": 4, "m": 4}, "a", "a", {"a": 2, "b": 2, "m": 4}, ("a", "b"), ("a", "b")),
]


@pytest.mark.parametrize("whole, w, x, divided, w_cut, x_cut", CUTS)
@pytest.mark.one_in(2)
def test_a_divided_axis_costs_no_more(whole, w, x, divided, w_cut, x_cut):
    assert math.prod(whole.values()) == math.prod(divided.values())
    timed = f"h100:1x{math.prod(whole.values())}" if len(divided) < 4 else "h100:2x8"
    for machine in (None, timed):
        one = cost_of(tuple(whole.items()), (w,), (x,), machine)
        assert cost_of(tuple(divided.items()), (w_cut,), (x_cut,), machine) <= 1.01 * one


# For each row: a mesh, the axes of weights and of the batch, and another order of all axes.
ORDERS = [
    ({"a": 2, "b": 4}, "ab", "ab", "ba"),
    ({"a": 2, "b": 4}, "a", "ab", "ba"),
    ({"a": 2, "b": 2, "c": 2}, "bc", "abc", "cab"),
    ({"a": 2, "b": 2, "c": 2, "d": 2}, "abcd", "abcd", "bdac"),
]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("axes, w, x, order", ORDERS)
@pytest.mark.one_in(2)
def test_another_order_of_axes_costs_no_more(axes, w, x, order, timed):
    """The order of a mesh's axes is one thing, the order in which marks name them another: neither costs anything."""

    machine = f"h100:1x{math.prod(axes.values())}" if timed else None

    def cost(axes, w, x):
        return cost_of(tuple(axes.items()), (w,), (x,), machine)

    given = cost(axes, tuple(w), tuple(x))
    assert cost({axis: axes[axis] for axis in order}, tuple(w), tuple(x)) <= 1.01 * given, "of the mesh"
    named = [tuple(sorted(axes, key=order.index)) for axes in (w, x)]
    assert cost(axes, *named) <= 1.01 * given, "of the marks"


def test_axes_of_one_device_and_names_of_axes_change_nothing():
    axes = {"data": 4, "model": 2}
    one = explained(axes, P("data", None, "model"), P("data"))
    for ones in (1, 5, 11):
        more = {f"one{i}": 1 for i in range(ones // 2)} | axes | {f"one{i}": 1 for i in range(ones // 2, ones)}
        other = explained(more, P("data", None, "model"), P("data"))
        assert (other.bytes_by_kind, other.plan.gap) == (one.bytes_by_kind, one.plan.gap)
    other = explained({"z": 4, "y": 2}, P("z", None, "y"), P("z"))
    assert other.bytes_by_kind == one.bytes_by_kind


def test_many_small_dimensions_are_planned():
    """An axis of two for each qubit of a state vector: choices grow with the dimensions, not with their products."""

    def circuit(state, gate):
        state = gshard.shard(state, P("a", "b")).astype(jnp.float32)
        for q in range(3):
            state = jnp.moveaxis(jnp.tensordot(gate, state, ((1,), (q,))), 0, q)
        return state

    state, gate = jax.ShapeDtypeStruct((2,) * 5, jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.float32)
    found = gshard.explain(circuit, state, gate, mesh=gshard.Mesh.abstract(a=2, b=2))
    assert found.total_bytes <= 3 * 32 * 4


def perceptron(w, x):
    hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x, w["up"]))
    return jnp.mean(jnp.einsum("btf,fd->btd", hidden, w["down"]) ** 2)


@pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("axes, up, down, x", [
    ({"d": 8}, P("d"), P("d"), P("d")), ({"m": 8}, P(None, "m"), P("m"), P()),
    ({"d": 4, "m": 2}, P("d", "m"), P("m", "d"), P("d")), ({"d": 8}, P(), P(), P("d")),
    ({"d": 8}, P(), P(), P(None, "d")),
])  # fmt: skip
def test_a_size_that_does_not_divide_costs_what_padding_explains(axes, up, down, x, timed):
    options = {"machine": "h100:1x8"} if timed else {}

    def sent(b=64, t=128, d=256, f=512):
        weights = {"up": f32(d, f), "down": f32(f, d)}
        return explained(axes, {"up": up, "down": down}, x, perceptron, weights, f32(b, t, d), **options).total_bytes

    given = sent()
    for changed in ({"b": 62}, {"t": 126}, {"d": 254}, {"f": 510}):
        assert sent(**changed) <= 1.3 * given, changed


def rows(x, w):
    return jnp.einsum("btd,dhk->bthk", x, w)


D, C, H, K = WEIGHTS
EACH = (f32(D, H, K),) * C
# For each way to write the loss above: the function, its weights, and the dimension of the heads.
FORMS = {
    "separate": (lambda w, x: attention(*(rows(x, one) for one in w)), EACH, 1),
    "slices of one": (lambda w, x: attention(*(rows(x, w[:, c]) for c in range(C))), JOINT, 2),
    "concatenated": (lambda w, x: attention(*jnp.split(rows(x, jnp.concatenate(w, 1)), C, 2)), EACH, 1),
    "vmap over weights": (lambda w, x: attention(*jax.vmap(rows, (None, 1))(x, w)), JOINT, 2),
    "vmap over rows": (
        lambda w, x: attention(*jax.vmap(lambda y: jnp.einsum("td,dchk->cthk", y, w), 0, 1)(x)), JOINT, 2
    ),
    "jit inside": (lambda w, x: jax.jit(loss)(w, x), JOINT, 2),
    "heads in a row": (lambda w, x: attention(*jnp.split(rows(x, w), C, 2)), f32(D, C * H, K), 1),
}  # fmt: skip
KINDS = {  # axes; whether the batch, and the heads, are split
    "fsdp": ({"d": 8}, True, False),
    "tensor": ({"m": 8}, False, True),
    "both": ({"d": 4, "m": 2}, True, True),
}
# A row of 24 heads in 8 parts has other heads on a device than three rows of 8: all or part of the weights must move.
OTHER_HEADS = {("heads in a row", "tensor"), ("heads in a row", "both")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_another_way_to_write_it_costs_no_more(form, kind):
    axes, has_batch, has_heads = KINDS[kind]

    def spec(heads):
        dims = ["d" if has_batch else None, *(None,) * (heads - 1), "m" if has_heads else None]
        return P(*dims)

    function, w, heads = FORMS[form]
    x = P("d") if has_batch else P()
    sent = explained(axes, spec(heads), x, function, w).total_bytes
    given = cost_of(tuple(axes.items()), tuple(spec(2)), tuple(x))
    assert sent <= 1.05 * given or ((form, kind) in OTHER_HEADS and sent <= given + 2 * 4 * math.prod(WEIGHTS))
