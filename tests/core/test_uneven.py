"""An array in padded parts is read, and computed with, as the whole array that it is."""

import copy
import functools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import gshard
from sampled import crossed

X = np.arange(-6, 20, dtype=np.int32).reshape(13, 2)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


@functools.cache
def in_parts(kind):
    return gshard.jit(lambda x: gshard.split(x, 0, 8), mesh_of(kind), uneven="keep")


def kept(x, kind):
    """The array in eight uneven parts."""
    made = in_parts(kind)(x)
    assert isinstance(made, gshard.stages.UnevenArray)
    return made


READINGS = {
    "np.asarray": np.asarray,
    "jnp.asarray": jnp.asarray,
    "whole": lambda r: r.whole() if isinstance(r, gshard.stages.UnevenArray) else r,
    "device_get": jax.device_get,
    "index": lambda r: r[3],
    "mask": lambda r: r[np.arange(13) % 3 == 1],
    "at": lambda r: r.at[2].set(5),
    "methods": lambda r: (r.sum(0), r.astype(np.float32), r.T, r.mean(), r.max(1), r.reshape(2, 13), r.argmin()),
    "unary": lambda r: (-r, +r, abs(r), ~r),
    "comparisons": lambda r: (r == 3, r != 3, r < 3, r <= 3, r > 3, r >= 3),
    "itself": lambda r: (r + r, r == r, r @ r.T, r - r),
    "numbers": lambda r: (r + 1, 1 + r, r - 2, 2 - r, r * 3, 3 * r, r / 4, 4 / (r * r + 1), r**2, 2 ** abs(r)),
    "whole numbers": lambda r: (
        r // 3,
        30 // (r * r + 1),
        r % 3,
        30 % (r * r + 1),
        *divmod(r, 4),
        *divmod(9, r * r + 1),
    ),
    "bits": lambda r: (r & 5, 5 & r, r | 5, 5 | r, r ^ 5, 5 ^ r, r << 1, 1 << abs(r), r >> 1, 99 >> abs(r)),
    "numpy on the left": lambda r: (
        X + r,
        X - r,
        X * r,
        operator.eq(X, r),
        X.T @ r,
        np.int32(2) * r,
        np.float32(2) / (r * r + 1),
    ),
    "jax on the left": lambda r: (jnp.asarray(X.T) @ r, jnp.int32(4) - r, operator.eq(jnp.int32(4), r)),
    "length": lambda r: (len(r), list(r)[4], next(iter(r)), next(reversed(r))),
    "facts": lambda r: (r.shape, r.ndim, r.size, r.nbytes, r.itemsize, str(r.dtype)),
}


@pytest.mark.parametrize("name, kind", crossed(list(READINGS), [AxisType.Auto, AxisType.Explicit], one_in=2))
@pytest.mark.one_in(3)
def test_it_reads_like_the_whole_array(name, kind):
    read = READINGS[name]
    want = jax.tree.map(np.asarray, read(jnp.asarray(X)))

    def compare(r):
        found = read(r)
        jax.tree.map(np.testing.assert_array_equal, found, want)
        assert [np.asarray(a).dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(want)]

    r = kept(X, kind)
    if name != "at":  # JAX writes to no array of an Explicit mesh where none is set
        compare(r)
    with jax.set_mesh(mesh_of(kind)):
        compare(r)
        compare(kept(X, kind))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_it_is_read_while_another_mesh_is_set(kind):
    r = kept(X, kind)
    for other in AxisType.Auto, AxisType.Explicit:
        with jax.set_mesh(jax.make_mesh((8,), ("c",), axis_types=(other,))):
            np.testing.assert_array_equal(np.asarray(r), X)
            np.testing.assert_array_equal(np.asarray(r.whole()), X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_one_number_is_a_number(kind):
    r = kept(np.array([3], np.int32), kind)
    assert bool(r)
    assert r.item() == 3
    for convert in (int, float, complex, operator.index):  # as of a jax.Array of one dimension
        with pytest.raises(TypeError):
            convert(r)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(kept(X, kind))


def test_it_has_no_hash_as_an_array_has_none():
    r = kept(X, AxisType.Auto)
    for x in (jnp.asarray(X), r):
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)
        with pytest.raises(TypeError):
            x[0] = 1
    with pytest.raises(AttributeError, match="no_such"):
        _ = r.no_such
    assert not hasattr(r, "__array_interface__")
    assert r.devices() == set(jax.devices()[:8])
    assert not r.is_deleted()


def test_copies():
    r = kept(X, AxisType.Auto)
    for copied in (copy.copy(r), copy.deepcopy({"r": r})["r"]):
        assert isinstance(copied, gshard.stages.UnevenArray)
        assert copied.sharding == r.sharding
        assert copied.padded is not r.padded
        np.testing.assert_array_equal(copied, X)
    np.testing.assert_array_equal(copy.deepcopy(np.asarray(r)), X)
    for pickled in (r, np.asarray(r)):
        loaded = pickle.loads(pickle.dumps(pickled))
        np.testing.assert_array_equal(loaded, X)
        assert isinstance(loaded, jax.Array if pickled is r else np.ndarray)
