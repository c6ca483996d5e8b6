"""One call, and all that must hold of it whatever was called before and wherever its arguments lie.

- The results are those of ``jax.jit`` of the same function on one device, bit for bit.
- Each result is sharded as ``.lower(...).compile().output_shardings`` says.
- An argument that is not donated is there afterwards, unchanged; a donated one is gone, or unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import gshard


def unpartitioned(f: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What a function of NumPy arrays gives on one device, as NumPy arrays."""
    return jax.tree.map(np.asarray, jax.jit(f)(*arguments))


def leaves_of(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, gshard.stages.UnevenArray))


def assert_same(got: Any, want: Any, where: str = "") -> None:
    """Compares two pytrees bit for bit."""
    ours, theirs = leaves_of(got), leaves_of(want)
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where}: result {i}"
        a, b = np.asarray(a), np.asarray(b)
        different = np.flatnonzero((a != b).reshape(-1))
        assert not different.size, f"{where}: result {i}: {different.size} of {a.size} elements are wrong:\n{a}\n{b}"
        assert a.tobytes() == b.tobytes(), f"{where}: result {i}: the signs of zeros"


def assert_sharded(got: Any, said: Any, where: str = "") -> None:
    """Compares where results are with what was said of them."""
    for i, (x, sharding) in enumerate(zip(leaves_of(got), leaves_of(said), strict=True)):
        assert sharding.is_equivalent_to(x.sharding, x.ndim), f"{where}: result {i} is {x.sharding}, said: {sharding}"


def called(
    call: Callable[..., Any],
    arguments: Sequence[Any],
    want: Any,
    *,
    donated: Sequence[int] = (),
    said: Callable[[], Any] | None = None,
    where: str = "",
) -> Any:
    """Calls and compares.

    Args:
        call: a function.
        arguments: placed ones.
        want: what it must give.
        donated: arguments that it may overwrite.
        said: gives the shardings of the results, if they are to be compared.
        where: what the call is called in messages.
    """
    before = [jax.tree.map(np.array, leaves_of(x)) for x in arguments]
    got = call(*arguments)
    assert_same(got, want, where)
    if said is not None:
        assert_sharded(got, said(), where)
    for i, (x, copies) in enumerate(zip(arguments, before, strict=True)):
        for leaf, copy in zip(leaves_of(x), copies, strict=True):
            array = getattr(leaf, "padded", leaf)
            if isinstance(array, jax.Array) and array.is_deleted():
                assert i in donated, f"{where}: argument {i} is gone, and was not donated"
            else:
                assert np.array_equal(np.asarray(leaf), copy), f"{where}: argument {i} has changed"
    return got


def said_by(jitted: Any, arguments: Sequence[Any]) -> Callable[[], Any]:
    """The shardings of a call's results as the compiled program states them."""
    return lambda: jitted.lower(*arguments).compile().output_shardings


@contextlib.contextmanager
def allowed_to_refuse(
    f: Callable[..., Any], arguments: Sequence[Any], under: jax.sharding.Mesh | None = None
) -> Iterator[None]:
    """Takes an error for an answer where ``jax.jit`` refuses the arguments too; results have to be right all the same.

    JAX refuses some for the sharding in their types (Explicit meshes) or because they are in two memories; under a mesh
    that is set, also those whose devices are in another order than the mesh's.
    """
    arrays = [x.whole() if isinstance(x, gshard.stages.UnevenArray) else x for x in arguments]
    refuses = False
    try:
        if under is None:
            jax.eval_shape(f, *arrays)
        else:
            with jax.set_mesh(under):
                jax.jit(f).lower(*arrays)
    except Exception:  # ShardingTypeError has no public name
        refuses = True
    try:
        yield
    except AssertionError:
        raise
    except Exception:
        if not refuses:
            raise
