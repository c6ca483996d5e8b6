"""One warning for a function that is split otherwise than it may seem, with the line, and none for other functions."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from placed import in_every_way, mesh_of

MESH = {"data": 4, "model": 2}
X = np.arange(-63.0 * 4, 63 * 4, dtype=np.float32).reshape(63, 8) / 8
TYPO, OTHERS = gshard.Layout(batc="data"), gshard.Layout(batch="data", heads="model")


def on(**axes: int) -> NamedSharding:
    return NamedSharding(mesh_of(**axes), P(next(iter(axes))))


def twice(x: Any) -> Any:
    return gshard.split(gshard.split(x, 0, "data"), 1, "model")


def named(x: Any) -> Any:
    return 2 * gshard.name(x, "batch _")


def reshard(x: Any) -> Any:
    """The first split decides how the value is computed that two operations read, or how it travels."""
    y = gshard.split(x, 0, "data")
    return gshard.split(y, 1, "model") + y, gshard.split(gshard.split(x, 0, "data"), 1, "data")


# The function, its options, its argument, and what the warning has.
WARNED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Any, str]] = {
    "uneven": (
        lambda x: gshard.split(x, 0, "data") * 2, {}, X,
        r'x: f32\[63@data,8\] inside \(512 B a device\), f32\[63,8\] returned .*uneven="keep" returns',
    ),
    "a second split": (
        twice, {}, X[:8],
        r"test_unexpected.py:\d+ \(twice\): split\(x, 1, 'model'\) makes dimension 0 of split\(x, 0, 'data'\) whole "
        r"again: write split\(x, {0: 'data', 1: 'model'}\)",
    ),
    "a row of the layout": (
        named, {"layout": TYPO}, X, "batc='data': nothing is called 'batc'. Did you mean 'batch'\\?|Names are 'batch'",
    ),
    "a constraint on another mesh": (
        lambda x: jax.lax.with_sharding_constraint(x, on(a=2, b=4)) * 2, {}, X[:8],
        r"test_unexpected.py:\d+ .*: shard\(x, P\('a'.*on a mesh of a=2 b=4 splits over parts of the axes of data=4",
    ),
    "a mark that nothing reads": (
        lambda x: (gshard.split(x, 0, "data"), x * 2)[1], {}, X, "nothing reads the result of split",
    ),
}  # fmt: skip
SILENT: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Any]] = {
    "even": (lambda x: gshard.split(x, 0, "data") * 2, {}, X[:8]),
    "kept": (lambda x: gshard.split(x, 0, "data") * 2, {"uneven": "keep"}, X),
    "a reshard": (reshard, {}, X[:8]),
    "a row for another function": (named, {"layout": OTHERS}, X[:8]),
    "other names": (lambda x: jax.lax.with_sharding_constraint(x, on(a=4, b=1, c=2)) * 2, {}, X[:8]),
    "a gradient": (jax.grad(lambda x: jnp.sum(gshard.split(gshard.split(x, 0, "data") ** 2, 1, "model"))), {}, X[:8]),
}  # fmt: skip


def called(f: Callable[[Any], Any], options: dict[str, Any], x: Any) -> list[str]:
    """What three calls warn of whose arguments are in different places, and compiling ahead of time."""
    run = gshard.jit(f, mesh=MESH, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for result in in_every_way(run, (x,), mesh_of(**MESH)):
            jax.tree.map(np.testing.assert_allclose, result, f(jnp.asarray(x)))
        run.lower(x).compile()
    return [str(one.message) for one in found if "moves arguments" not in str(one.message)]


@pytest.mark.parametrize("case", WARNED)
def test_one_warning_with_the_line(case: str) -> None:
    f, options, x, text = WARNED[case]
    found = called(f, options, x)
    assert len(found) == 1, found
    assert re.search(text, found[0]), found[0]
    assert re.search(r"is compiled at \w+.py:\d+ \(", found[0])
    assert "To silence this: warnings.filterwarnings('ignore', category=gshard.ShardingWarning)." in found[0]
    with pytest.warns(gshard.ShardingWarning, match=text), gshard.instead_of_jit(MESH, layout=options.get("layout")):
        jax.jit(f)(x)


@pytest.mark.parametrize("case", SILENT)
def test_no_warning_of_what_is_meant(case: str) -> None:
    assert called(*SILENT[case]) == []


def test_explain_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gshard.explain(twice, X, mesh=MESH)
    assert "whole again" in found.unused[0]
