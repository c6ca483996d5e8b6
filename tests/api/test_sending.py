"""Marks with ``send``: the numbers on any mesh, what the compiled program sends, reports, and mistakes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.errors import ShardingError
from gshard.language.mark_primitive import SENT
from gshard.xla.hlo_collectives import collectives
from placed import in_every_way, mesh_of
from sampled import crossed

BATCH, SIZE, LAYERS = 512, 64, 5
ELEMENT = {None: 4, "bfloat16": 2, "int8": 1}  # bytes
SCALE = {None: 0, "bfloat16": 0, "int8": 4}  # bytes for each row


def product(w, x, send):
    w, x = gshard.split(w, 0, "data", send=send), gshard.split(x, 0, "data")
    return jnp.tanh(x @ w)


def _layers(w, x, mark, checkpoint):
    def layer(x, w):
        return gshard.split(jnp.tanh(x @ mark(w)), 0, "data"), None

    return jax.lax.scan(checkpoint(layer), gshard.split(x, 0, "data"), w)[0]


def marked_inside(w, x, send):
    return _layers(w, x, lambda w: gshard.split(w, 0, "data", send=send), lambda f: f)


def marked_inside_and_recomputed(w, x, send):
    return _layers(w, x, lambda w: gshard.split(w, 0, "data", send=send), jax.checkpoint)


def marked_outside(w, x, send):
    return _layers(gshard.split(w, 1, "data", send=send), x, lambda w: w, lambda f: f)


def marked_outside_and_recomputed(w, x, send):
    return _layers(gshard.split(w, 1, "data", send=send), x, lambda w: w, jax.checkpoint)


LOOPS = (marked_inside, marked_inside_and_recomputed, marked_outside, marked_outside_and_recomputed)


def step_of(f, send):
    return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x, send) ** 2))


@pytest.fixture
def x(rng):
    return rng.standard_normal((BATCH, SIZE)).astype(np.float32)


@pytest.fixture
def w(rng):
    return (rng.standard_normal((SIZE, SIZE)) / 8).astype(np.float32)


@pytest.fixture
def stack(rng):
    return (rng.standard_normal((LAYERS, SIZE, SIZE)) / 8).astype(np.float32)


def compiled(f, *args):
    return collectives(gshard.jit(f, mesh={"data": 8}).lower(*args).compile().as_text())


def gathered_bytes(f, *args):
    """Bytes that each device sends in the all-gathers of the compiled program."""
    return sum(c.total_bytes for c in compiled(f, *args) if c.kind == "all_gather")


MARKS = {
    "rows": lambda w, send: gshard.split(w, 0, "data", send=send),
    "columns": lambda w, send: gshard.split(w, 1, ("data", "model"), send=send),
    "both": lambda w, send: gshard.split(w, {0: "data", 1: "model"}, send=send),
    "parts": lambda w, send: gshard.split(w, 0, 8, send=send),
    "replicated": lambda w, send: gshard.replicate(gshard.split(w, 0, "data"), send=send),
    "moved": lambda w, send: gshard.shard(gshard.split(w, 0, 8), P(None, "data"), send=send),
    "ids": lambda w, send: gshard.shard(w, np.arange(8).reshape(4, 2), send=send),
    "twice": lambda w, send: gshard.split(gshard.split(w, 0, "data", send=send), 1, "model", send=send),
}


@pytest.mark.optimised
@pytest.mark.parametrize("mark, send, shape", crossed(list(MARKS), list(SENT), [(16, 24), (13, 9), (3, 5)], one_in=8))
def test_the_mark_has_the_same_bits_on_any_mesh(rng, mark, send, shape):
    w = rng.standard_normal(shape).astype(np.float32)
    w[1] = 0
    w[2, :3] = np.nan, np.inf, -np.inf
    one = MARKS[mark](w, send)
    assert not (np.asarray(one) == w).all()
    mesh = mesh_of(data=4, model=2)
    f = gshard.jit(lambda w: gshard.replicate(MARKS[mark](w, send)), mesh=mesh)
    for got in in_every_way(f, (w,), mesh):
        np.testing.assert_array_equal(got, one)
    np.testing.assert_array_equal(jax.jit(lambda w: MARKS[mark](w, send))(w), one)
    (plain,) = in_every_way(gshard.jit(lambda w: MARKS[mark](w, None), mesh=mesh), (w,), mesh, ("numpy",))
    (marked,) = in_every_way(gshard.jit(lambda w: MARKS[mark](w, send), mesh=mesh), (w,), mesh, ("numpy",))
    assert marked.sharding.is_equivalent_to(plain.sharding, 2)
    if mark not in ("parts", "moved", "ids"):
        np.testing.assert_array_equal(
            gshard.jit(MARKS[mark], mesh={"data": 1, "model": 1}, static_argnums=1)(w, send), one
        )


@pytest.mark.parametrize("send", SENT)
@pytest.mark.parametrize("f", LOOPS)
@pytest.mark.one_in(3)
def test_a_step_computes_what_one_device_does(f, send, stack, x):
    step = step_of(f, send)
    want_value, want = jax.jit(step)(stack, x)
    plain, _ = jax.jit(step_of(f, None))(stack, x)
    assert want_value != plain
    np.testing.assert_allclose(want_value, plain, rtol=1e-2)
    mesh = mesh_of(data=8)
    for value, gradient in in_every_way(gshard.jit(step, mesh=mesh), (stack, x), mesh):
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_that_of_the_rounded_weights(w, x):
    """Straight through: the gradient at the rounded weights, in full precision."""
    for send in SENT:
        _, got = jax.jit(step_of(product, send))(w, x)
        _, want = jax.jit(step_of(product, None))(gshard.replicate(w, send=send), x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("send", [None, *SENT])
def test_a_weight_is_gathered_in_low_precision(send, w, x):
    size = SIZE * (SIZE * ELEMENT[send] + SCALE[send])
    assert gathered_bytes(lambda w, x: product(w, x, send), w, x) == size * 7 // 8
    kinds = {c.kind: c.total_bytes for c in compiled(step_of(product, send), w, x)}
    assert kinds["reduce_scatter"] == SIZE * SIZE * 4 * 7 // 8  # gradients are summed in full precision


@pytest.mark.parametrize("send", [None, *SENT])
@pytest.mark.parametrize("f", LOOPS)
@pytest.mark.one_in(4)
def test_each_layer_is_gathered_in_low_precision_forward_and_backward(f, send, stack, x):
    size = LAYERS * SIZE * (SIZE * ELEMENT[send] + SCALE[send]) * 7 // 8
    assert gathered_bytes(lambda w, x: f(w, x, send), stack, x) == size
    assert gathered_bytes(step_of(f, send), stack, x) == 2 * size
    scattered = [c for c in compiled(step_of(f, send), stack, x) if c.kind == "reduce_scatter"]
    assert [(c.bytes_moved, c.executions) for c in scattered] == [(SIZE * SIZE * 4 * 7 // 8, LAYERS)]


@pytest.mark.parametrize("send", SENT)
def test_a_move_by_the_mark_itself_is_in_low_precision(send, w):
    def moved(w, send):
        return gshard.split(gshard.split(w, 0, "data"), 1, "data", send=send)

    def gathered(w, send):
        return gshard.replicate(gshard.split(w, 0, "data"), send=send)

    for f in (moved, gathered):
        jitted = gshard.jit(f, mesh={"data": 8}, static_argnums=1)
        found, plain = (gshard.explain(jitted, w, s).bytes_by_kind for s in (send, None))
        ((kind, size),) = plain.items()
        scales = SIZE * SCALE[send] * 7 // 8  # gathered
        assert found == {kind: size * ELEMENT[send] // 4 + scales * (kind == "all_gather")} | (
            {"all_gather": scales} if scales and kind != "all_gather" else {}
        )


def test_a_narrow_row_is_gathered_as_it_is_if_that_sends_less(x):
    """A scale for each element costs more than the element."""
    w = np.ones((SIZE, 1), np.float32)
    found = gshard.explain(lambda w, x: product(w, x, "int8"), w, x, mesh={"data": 8})
    assert found.total_bytes <= SIZE * 4 * 7 // 8


def test_bfloat16_weights_are_sent_as_int8(w, x):
    half, same = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    assert gathered_bytes(lambda w, x: product(w, x, "int8"), half, same) == SIZE * (SIZE + 4) * 7 // 8
    assert gathered_bytes(lambda w, x: product(w, x, None), half, same) == SIZE * SIZE * 2 * 7 // 8


@pytest.mark.parametrize("send", SENT)
def test_an_open_mark_rounds_what_a_layout_shards(send, stack, x):
    is_open = P(P.UNCONSTRAINED, P.UNCONSTRAINED)

    def f(w, x):
        def layer(x, w):
            w = gshard.shard(gshard.name(w, "embed hidden"), is_open, send=send)
            return gshard.name(jnp.tanh(x @ w), "batch hidden"), None

        return jax.lax.scan(layer, gshard.name(x, "batch hidden"), gshard.name(w, "_ embed hidden"))[0]

    layout = gshard.Layout(embed="data", batch="data")
    found = gshard.explain(gshard.jit(f, mesh={"data": 8}, layout=layout), stack, x)
    assert found.bytes_by_kind == {"all_gather": LAYERS * SIZE * (SIZE * ELEMENT[send] + SCALE[send]) * 7 // 8}
    assert found.lists["low_precision"]


@pytest.mark.parametrize("send", SENT)
def test_layers_inside_of_a_loop_over_micro_batches(send, stack, x):
    """The marked stack is a constant of the outer loop."""

    def accumulated(w, x, send):
        w = gshard.split(w, 1, "data", send=send)

        def add(total, x):
            return total + _layers(w, x, lambda w: w, jax.checkpoint).sum(), None

        batches = gshard.split(x.reshape(2, -1, SIZE), 1, "data")
        return jax.lax.scan(add, jnp.float32(0), batches)[0]

    sizes = {
        s: gathered_bytes(jax.value_and_grad(lambda w, x, s=s: accumulated(w, x, s)), stack, x) for s in (send, None)
    }
    narrow = ELEMENT[send] + SCALE[send] / SIZE
    assert sizes[send] <= sizes[None] * narrow / 4 * 1.01


@pytest.mark.optimised
def test_marks_that_differ_in_precision_only(w):
    """No cache takes one for the other."""

    def f(w):
        return [gshard.split(w, 0, "data", send=send) for send in (None, "int8", "bfloat16", None, "bfloat16")]

    def looped(w):
        return jax.lax.map(f, jnp.stack([w, 2 * w]))

    for g in (looped, jax.vmap(lambda w: f(w[None])), lambda w: jax.jvp(f, (w,), (w,))[0]):
        want = [np.asarray(v) for v in g(w)]
        assert len({v.tobytes() for v in want}) == 3
        for got in (jax.jit(g)(w), gshard.jit(g, mesh={"data": 8})(w)):
            assert [np.asarray(v).tobytes() for v in got] == [v.tobytes() for v in want]


@pytest.mark.parametrize("send", [*SENT, jnp.int8, np.dtype("int8"), jnp.bfloat16])
@pytest.mark.one_in(2)
def test_of_a_pytree_floats_are_rounded_and_nothing_else(rng, send):
    given = {
        "w": rng.standard_normal((16, 8)).astype(np.float32),
        "table": rng.integers(0, 9, (8, 3)).astype(np.int32),
        "mask": rng.integers(0, 2, (8, 3)).astype(bool),
        "count": np.int32(3),
        "rate": 0.3,
        "key": jax.random.key(0),
    }
    for mark in (lambda t: gshard.replicate(t, send=send), lambda t: gshard.split(t, 0, "data", send=send)):
        got = jax.jit(mark)(given)
        partitioned = gshard.jit(mark, mesh={"data": 8})(given)
        assert not (np.asarray(got["w"]) == given["w"]).all()
        np.testing.assert_array_equal(got["w"], partitioned["w"])
        for one in (got, partitioned):
            for name in ("table", "mask", "count"):
                np.testing.assert_array_equal(one[name], given[name])
            assert float(one["rate"]) == np.float32(0.3)
            assert jax.random.key_data(one["key"]).tolist() == jax.random.key_data(given["key"]).tolist()


def test_an_array_that_has_the_precision_stays(w):
    half = w.astype(jnp.bfloat16)
    assert (gshard.split(half, 0, "data", send="bfloat16") == half).all()
    got = gshard.split({"w": w, "half": half}, 0, "data", send="bfloat16")
    assert (got["half"] == half).all()
    assert got["w"].dtype == np.float32
    np.testing.assert_array_equal(got["w"], half.astype(np.float32))


def test_by_path(w):
    params = {"layers": {"w": w, "count": np.arange(16, dtype=np.int32)}, "head": w}
    got = gshard.shard_by_path(params, {"layers/*": P("data")}, send="int8")
    np.testing.assert_array_equal(got["layers"]["w"], gshard.split(w, 0, "data", send="int8"))
    np.testing.assert_array_equal(got["layers"]["count"], params["layers"]["count"])
    np.testing.assert_array_equal(got["head"], w)
    with pytest.raises(ShardingError, match="no array has floats to round"):
        gshard.shard_by_path(params, {"layers/count": P("data")}, send="int8")
    with pytest.raises(ShardingError, match="cannot be sent as int7"):
        gshard.shard_by_path(params, {"layers/*": P("data")}, send="int7")


def test_explain_names_the_array_the_dtype_and_the_error(w, x):
    found = gshard.explain(lambda w, x: product(w, x, "int8"), w, x, mesh={"data": 8})
    (line,) = found.lists["low_precision"]
    assert re.fullmatch(
        r"test_sending.py:\d+ \(product\): w as int8, with a float32 scale for each row: "
        r"the error is at most 0.40 % of the largest absolute value of its row",
        line,
    )
    assert line in str(found)
    assert {row.array for row in found.collectives} == {"w"}
    assert {row.shape.partition("[")[0] for row in found.collectives} == {"s8", "f32"}
    half = gshard.explain(lambda w, x: product(w, x, "bfloat16"), w, x, mesh={"data": 8})
    assert half.lists["low_precision"][0].endswith("w as bfloat16: the error is at most 0.40 % of its absolute value")
    assert not gshard.explain(lambda w, x: product(w, x, None), w, x, mesh={"data": 8}).lists["low_precision"]
    assert "marked split(x, 0, 'data'" in found.why("w")
    assert "marked split(x, 0, 'data', send='bfloat16')" in half.why("w")


@pytest.mark.parametrize(("x", "send", "what", "hint"), [
    (np.ones(8, np.float32), "int4", "cannot be sent as int4", "Use 'bfloat16', 'int8'"),
    (np.ones(8, np.float32), "bfloat", "cannot be sent as bfloat", "Did you mean 'bfloat16'?"),
    (np.ones(8, np.float32), np.float32, "cannot be sent as float32", "Use"),
    (np.ones(8, np.float32), 8, "cannot be sent as 8", "Use"),
    (np.ones(8, np.int32), "int8", "no array has floats to round", "it rounds floats"),
    (3, "int8", "no array has floats to round", "it rounds floats"),
    (0.5, "int8", "no array has floats to round", "it rounds floats"),
    (np.ones(8, bool), "bfloat16", "no array has floats to round", "it rounds floats"),
    ({"a": np.ones(8, np.int32)}, "int8", "no array has floats", "Leave out send='int8'"),
    (np.ones(8, np.complex64), "int8", "complex numbers cannot be sent as int8", "real"),
    (np.ones(8, np.float16), "bfloat16", "float16 has no wider elements than bfloat16", "Leave out"),
    ({"a": np.ones(8, np.float16)}, "bfloat16", "float16 has no wider elements", "Leave out"),
])  # fmt: skip
def test_a_mistake_is_an_error_with_the_line(x, send, what, hint):
    for call in (
        lambda: gshard.split(x, 0, "data", send=send) if np.ndim(x) else gshard.replicate(x, send=send),
        lambda: gshard.jit(lambda x: gshard.shard(x, P("data") if np.ndim(x) else P(), send=send), mesh={"data": 8})(x),
    ):
        with pytest.raises(ShardingError) as error:
            call()
        assert what in error.value.what
        assert hint in error.value.hint
        assert "test_sending.py:" in error.value.where


def test_parts_of_a_sum_are_not_sent_in_low_precision():
    with pytest.raises(ShardingError, match="parts of a sum cannot be sent as int8"):
        gshard.shard(np.ones((8, 8), np.float32), P("data", unreduced={"model"}), send="int8")
