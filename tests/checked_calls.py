"""One call, and all that must hold of it whatever was called before and wherever its arguments lie.

- The results are those of ``jax.jit`` of the same function on one device, bit for bit.
- Each result is sharded as ``.lower(...).compile().output_shardings`` says.
- An argument that is not donated is there afterwards, unchanged; a donated one is gone, or unchanged.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np


def unpartitioned(f, arguments):
    """What a function of NumPy arrays gives on one device, as NumPy arrays."""
    return jax.tree.map(np.asarray, jax.jit(f)(*arguments))


def assert_same(got, want, where=""):
    """Compares two pytrees bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want), where
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where}: result {i}"
        a, b = np.asarray(a), np.asarray(b)
        different = np.flatnonzero((a != b).reshape(-1))
        assert not different.size, f"{where}: result {i}: {different.size} of {a.size} elements are wrong:\n{a}\n{b}"
        assert a.tobytes() == b.tobytes(), f"{where}: result {i}: the signs of zeros"


def near(got, want, rtol=1e-5, atol=None):
    """Compares two pytrees: integers exactly, other numbers up to a relative and an absolute tolerance, if None alike.

    Also the dtypes, if what is wanted is an array of JAX's.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(a) == np.shape(b)
        assert not isinstance(b, jax.Array) or a.dtype == b.dtype
        if not jnp.issubdtype(jnp.result_type(a, b), jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), rtol, rtol if atol is None else atol)


def near_largest(got, want, tolerance=1e-5):
    """Compares two pytrees up to a part of the largest number of each array: sums in another order round it away."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
        near(a, b, 0, tolerance * float(np.abs(np.asarray(b, wide)).max(initial=0)))


def assert_sharded(got, said, where=""):
    """Compares where results are with what was said of them."""
    for i, (x, sharding) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(said), strict=True)):
        assert sharding.is_equivalent_to(x.sharding, x.ndim), f"{where}: result {i} is {x.sharding}, said: {sharding}"


def called(call, arguments, want, *, donated=(), said=None, where=""):
    """Calls and compares.

    Args:
        call: a function.
        arguments: placed ones.
        want: what it must give.
        donated: arguments that it may overwrite.
        said: gives the shardings of the results, if they are to be compared.
        where: what the call is called in messages.
    """
    before = [jax.tree.map(np.array, jax.tree.leaves(x)) for x in arguments]
    got = call(*arguments)
    assert_same(got, want, where)
    if said is not None:
        assert_sharded(got, said(), where)
    for i, (x, copies) in enumerate(zip(arguments, before, strict=True)):
        for leaf, copy in zip(jax.tree.leaves(x), copies, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                assert i in donated, f"{where}: argument {i} is gone, and was not donated"
            else:
                assert np.array_equal(np.asarray(leaf), copy), f"{where}: argument {i} has changed"
    return got


def said_by(jitted, arguments):
    """The shardings of a call's results as the compiled program states them."""
    return lambda: jitted.lower(*arguments).compile().output_shardings


@contextlib.contextmanager
def allowed_to_refuse(f, arguments, under=None):
    """Takes an error for an answer where ``jax.jit`` refuses the arguments too; results have to be right all the same.

    JAX refuses some for the sharding in their types (Explicit meshes) or because they are in two memories; under a mesh
    that is set, also those whose devices are in another order than the mesh's.
    """
    refuses = False
    try:
        if under is None:
            jax.eval_shape(f, *arguments)
        else:
            with jax.set_mesh(under):
                jax.jit(f).lower(*arguments)
    except Exception:  # ShardingTypeError has no public name
        refuses = True
    try:
        yield
    except AssertionError:
        raise
    except Exception:
        if not refuses:
            raise
