"""``gshard.attention``: split in every way, it computes what it computes on one device, and sends what it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from checked_calls import near
from gshard.testing import assert_proved

SEQUENCE, HEADS = {1: "d"}, {2: "d"}


def arrays(queries, keys, dtype=np.float32, heads=4, key_heads=2):
    rng = np.random.default_rng(7)
    shapes = (2, queries, heads, 4), (2, keys, key_heads, 4), (2, keys, key_heads, 5), (2, queries, heads, 5)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def test_split_attention_is_attention():
    """Three calls, with arguments on the host, as JAX returned them, and split; the laws of rules have more masks."""
    q, k, v, weights = arrays(30, 30)

    def loss(q, k, v):
        return jnp.sum(gshard.attention(gshard.split(q, SEQUENCE), k, v, is_causal=True) * weights)

    step = gshard.jit(jax.value_and_grad(loss, (0, 1, 2)), mesh={"d": 4})
    assert_proved(step, (q, k, v))
    want, placed = jax.value_and_grad(loss, (0, 1, 2))(q, k, v), (q, k, v)
    for _ in range(3):
        _, gradient = found = step(*placed)
        near(found, want, 2e-4, 2e-5)
        placed = tuple(x * 0 + y for x, y in zip(gradient, (q, k, v), strict=True))


def explained(q, k, mark, **options):
    """The explanation of attention with its gradient on 8 devices; only shapes and dtypes count."""
    gradient = options.pop("gradient", True)

    def loss(q, k, v):
        q, k, v = (gshard.split(x, mark) for x in (q, k, v))
        return jnp.sum(gshard.attention(q, k, v, **options))

    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k))
    function = jax.grad(loss, (0, 1, 2)) if gradient else loss
    return gshard.explain(function, q, k, k, mesh=gshard.Mesh.abstract(d=8))


def test_a_ring_sends_the_keys_and_values_once_around():
    """And their gradients once back; no device holds more than its part of the sequence."""
    part = 2 * 512 * 64 * 2  # keys and values: bfloat16[1, 512, 1, 64]
    found = explained((1, 4096, 1, 64), (1, 4096, 1, 64), SEQUENCE, gradient=False)
    assert found.bytes_by_kind["collective_permute"] == 7 * part
    found = explained((1, 4096, 1, 64), (1, 4096, 1, 64), SEQUENCE)
    assert found.bytes_by_kind["collective_permute"] == 7 * part + 7 * part + 7 * part
    found = explained((1, 4096, 1, 64), (1, 4096, 1, 64), SEQUENCE, gradient=False, local_window_size=(600, 100))
    assert found.bytes_by_kind["collective_permute"] == 3 * part, "a window needs the parts within its reach"


def test_heads_are_split_instead_where_that_sends_less():
    """All-to-alls join the sequence and split the heads; 4 key heads take 4 groups of devices, each a ring of 2."""
    array = 512 * 16 * 64 * 2  # one device's part of the queries, and of the keys of 16 heads
    found = explained((1, 4096, 16, 64), (1, 4096, 16, 64), SEQUENCE)
    assert found.bytes_by_kind == {"all_to_all": 6 * array * 7 // 8}
    found = explained((1, 4096, 16, 64), (1, 4096, 4, 64), SEQUENCE)
    assert set(found.bytes_by_kind) <= {"all_to_all", "collective_permute"}
    around = 3 * 7 * 2 * (array // 4)  # keys, values and their gradients on a ring
    assert found.total_bytes < 0.55 * around


def test_causal_attention_balances_a_long_sequence():
    """Devices exchange halves of their parts, so that all have as many pairs of a query and a key to compute."""
    length = 12288
    rng = np.random.default_rng(3)
    q, k, v, weights = (rng.normal(size=(1, length, 1, 2)).astype(np.float32) for _ in range(4))

    def loss(q, k, v):
        q, k, v = (gshard.split(x, SEQUENCE) for x in (q, k, v))
        return jnp.sum(gshard.attention(q, k, v, is_causal=True) * weights)

    gradient = jax.value_and_grad(loss, (0, 1, 2))
    found = gshard.explain(gradient, q, k, v, mesh={"d": 8})
    part, row = length // 8 * 2 * 4, length // 8 * 4
    exchanged = (4 * part + row) + (7 * part + 2 * row)
    assert found.bytes_by_kind["collective_permute"] == 6 * 7 * part + exchanged
    want = gradient(q, k, v)
    near(gshard.jit(gradient, mesh={"d": 8})(q, k, v), want, 2e-3, 2e-4)


def test_decoding_merges_the_parts_of_a_cache():
    """A query of one position, keys and values split by position: no cache moves, only results are merged."""
    q, k, v, _ = arrays(1, 30)
    lengths = np.array([17, 29])

    def decode(q, k, v):
        k, v = gshard.split(k, SEQUENCE), gshard.split(v, SEQUENCE)
        return gshard.attention(q, k, v, key_value_seq_lengths=lengths)

    found = gshard.explain(decode, q, k, v, mesh={"d": 4})
    assert set(found.bytes_by_kind) <= {"all_reduce"}
    want = gshard.attention(q, k, v, key_value_seq_lengths=lengths, implementation="plain")
    step = gshard.jit(decode, mesh={"d": 4})
    for place in (np.asarray, jnp.asarray, np.asarray):
        np.testing.assert_allclose(step(place(q), place(k), v), want, rtol=1e-5, atol=1e-6)


def test_attention_outside_of_gshard_is_that_of_jax():
    q, k, v, weights = arrays(12, 12)
    v = v[..., :4]
    options = {"is_causal": True, "scale": 0.3}
    want = jax.nn.dot_product_attention(q, k, v, **options)
    ways = (gshard.attention, jax.jit(gshard.attention, static_argnames=("is_causal", "scale")))
    for attention in ways:
        np.testing.assert_allclose(attention(q, k, v, **options), want, rtol=1e-5, atol=1e-6)
    over_rows = jax.vmap(lambda q, k, v: gshard.attention(q, k, v, **options))
    np.testing.assert_allclose(over_rows(q, k, v), want, rtol=1e-5, atol=1e-6)
    of_queries = jax.vmap(jax.grad(lambda q: jnp.sum(gshard.attention(q, k[0], v[0], **options) ** 2)))(q)
    bias = jnp.zeros((1, 1, 12, 12))
    plain = jax.vmap(jax.grad(lambda q: jnp.sum(gshard.attention(q, k[0], v[0], bias[0], **options) ** 2)))(q)
    np.testing.assert_allclose(of_queries, plain, rtol=1e-4, atol=1e-6)


def test_a_bias_has_a_gradient():
    q, k, v, weights = arrays(8, 8)
    bias = np.random.default_rng(2).normal(size=(4, 8, 8)).astype(np.float32)

    def loss(bias):
        return jnp.sum(gshard.attention(gshard.split(q, HEADS), k, v, bias) * weights)

    jitted = gshard.jit(jax.grad(loss), mesh={"d": 2})
    for _ in range(3):
        np.testing.assert_allclose(jitted(bias), jax.grad(loss)(bias), rtol=1e-4, atol=1e-6)


def test_bfloat16_is_summed_in_float32():
    q, k, v, _ = arrays(64, 64)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    f = gshard.jit(lambda q, k, v: gshard.attention(gshard.split(q, SEQUENCE), k, v), mesh={"d": 4})
    want = gshard.attention(*(x.astype(np.float32) for x in low), implementation="plain")
    for _ in range(3):
        out = f(*low)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(np.float32), want, rtol=1e-2, atol=1e-2)


def test_derivatives_of_higher_order():
    q, k, v, _ = arrays(4, 4)

    def loss(q, implementation):
        return jnp.sum(gshard.attention(q, k, v, implementation=implementation) ** 2)

    second = jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, "plain") ** 2))(q)
    assert np.isfinite(second).all()
    with pytest.raises(gshard.ArgumentError, match='implementation="plain"'):
        jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, "auto") ** 2))(q)


Q, K = np.ones((2, 8, 4, 3), np.float32), np.ones((2, 8, 2, 3), np.float32)


def test_small_and_unsigned_integers():
    """Padding of uneven parts is in no segment, also in none of unsigned integers; positions do not wrap around."""
    q, k, v, _ = arrays(30, 21)
    options = {
        "query_segments": (np.arange(30) // 11).astype(np.uint8),
        "key_segments": (np.arange(21) // 9).astype(np.uint8),
        "query_positions": (np.arange(30) * 4).astype(np.int8),
        "key_positions": (np.arange(21) * 4).astype(np.uint8),
        "local_window_size": (40, 20),
    }  # fmt: skip
    wide = {name: x if name == "local_window_size" else x.astype(np.int32) for name, x in options.items()}
    want = gshard.attention(q, k, v, implementation="plain", **wide)

    def split(q, k, v):
        return gshard.attention(gshard.split(q, SEQUENCE), gshard.split(k, SEQUENCE), v, **options)

    step = gshard.jit(split, mesh={"d": 8})
    for place in (np.asarray, jnp.asarray, np.asarray):
        np.testing.assert_allclose(step(place(q), k, place(v)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("args", "options", "message"), [
    ((Q, K, K.astype(np.float16)), {}, "different dtypes"),
    ((Q, K[:1], K), {}, "different batch dimensions"),
    ((Q, K[..., :2], K), {}, "different numbers of features"),
    ((Q[:, :, :3], K, K), {}, "3 query heads cannot share 2 key heads"),
    ((Q[0, 0], K, K), {}, "fewer than three dimensions"),
    ((Q.astype(int), K, K), {}, "query has no floating-point dtype"),
    ((Q, K, K), {"implementation": "cudnn"}, "gshard.kernel"),
    ((Q, K, K), {"implementation": "block"}, "Did you mean 'blocks'"),
    ((Q, K, K), {"mask": np.ones((3, 8, 8), bool)}, "mask does not broadcast"),
    ((Q, K, K), {"query_segments": np.zeros(8, int)}, "query_segments are given without key_segments"),
    ((Q, K, K), {"query_positions": np.zeros(8, int)}, "nothing compares them"),
    ((Q, K, K), {"query_positions": np.zeros(7, int), "is_causal": True}, "query_positions are not integers"),
    ((Q, K, K), {"local_window_size": -1}, "local_window_size has -1"),
])  # fmt: skip
def test_mistakes(args, options, message):
    with pytest.raises(gshard.ArgumentError, match=message) as caught:
        gshard.attention(*args, **options)
    assert "test_attention_function.py" in str(caught.value)
