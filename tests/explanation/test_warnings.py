"""What collectives move with tensor parallelism and FSDP; one warning for a function that is split otherwise."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import gshard
from placed import in_every_way, mesh_of

array = jax.ShapeDtypeStruct
BLOCK = {
    "qkv": array((3, 1024, 16, 64), "float32"), "out": array((16, 64, 1024), "float32"),
    "up": array((1024, 4096), "float32"), "down": array((4096, 1024), "float32"),
}  # fmt: skip
MEGATRON_AND_FSDP = {
    "*/qkv": P(None, "data", "model"), "*/out": P("model", None, "data"),
    "*/up": P("data", "model"), "*/down": P("model", "data"),
}  # fmt: skip


def block(x, p):
    q, k, v = jnp.einsum("btd,cdhk->cbthk", x, p["qkv"])
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 8, -1)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", scores, v, p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def step(params, x):
    params, x = gshard.shard_by_path(params, MEGATRON_AND_FSDP), gshard.split(x, 0, "data")

    def loss(params):
        y = x
        for p in params:
            y = block(y, p)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def moved(rows, **mesh):
    """What the largest collective of each kind over the same axes moves."""
    x = array((rows, 512, 1024), "float32")
    explained = gshard.explain(step, [BLOCK] * 2, x, mesh=gshard.Mesh.abstract(**mesh))
    return {(row.kind, row.axes): row.array for row in reversed(explained.collectives)}


def test_tensor_parallelism_beside_fsdp():
    found = moved(2, data=2, model=4)
    assert found["all_reduce", "model"] in ("dot_general", "dot_general, backward")
    assert found["all_gather", "data"].startswith("params/")
    assert found["reduce_scatter", "data"].startswith("gradient of params/")


def test_large_batches_gather_weights_instead():
    """Where activations are larger than weights, weights marked over the tensor axis are gathered over it."""
    assert moved(256, data=2, model=4)["all_gather", "model"].startswith("params/")


@pytest.mark.parametrize(("mark", "kind", "name"), [
    (lambda p: p, "all_reduce", "result"), (lambda p: gshard.split(p, 0, "data"), "all_gather", "p"),
])  # fmt: skip
def test_data_parallelism(mark, kind, name):
    def ours(p, x):
        p, x = mark(p), gshard.split(x, 0, "data")
        return jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p) ** 2))(p)

    shapes = array((256, 256), "float32"), array((4096, 256), "float32")
    explained = gshard.explain(ours, *shapes, mesh=gshard.Mesh.abstract(data=8))
    assert (kind, name) in [(row.kind, row.array) for row in explained.collectives]


# One warning for a function that is split otherwise than it may seem, with the line, and none for other functions.
AXES = {"data": 4, "model": 2}
X = np.arange(-63.0 * 4, 63 * 4, dtype=np.float32).reshape(63, 8) / 8
TYPO, OTHERS = gshard.Layout(batc="data"), gshard.Layout(batch="data", heads="model")


def on(**axes):
    return NamedSharding(mesh_of(**axes), P(next(iter(axes))))


def twice(x):
    return gshard.split(gshard.split(x, 0, "data"), 1, "model")


def named(x):
    return 2 * gshard.name(x, "batch _")


def reshard(x):
    """The first split decides how the value is computed that two operations read, or how it travels."""
    y = gshard.split(x, 0, "data")
    return gshard.split(y, 1, "model") + y, gshard.split(gshard.split(x, 0, "data"), 1, "data")


# The function, its options, its argument, and what the warning has.
WARNED = {
    "uneven": (
        lambda x: gshard.split(x, 0, "data") * 2, {}, X,
        r'x: f32\[63@data,8\] inside \(512 B a device\), f32\[63,8\] returned .*pad the array',
    ),
    "a second split": (
        twice, {}, X[:8],
        r"test_warnings.py:\d+ \(twice\): split\(x, 1, 'model'\) makes dimension 0 of split\(x, 0, 'data'\) whole "
        r"again: write split\(x, {0: 'data', 1: 'model'}\)",
    ),
    "a row of the layout": (
        named, {"layout": TYPO}, X, "batc='data': nothing is called 'batc'. Did you mean 'batch'\\?|Names are 'batch'",
    ),
    "a constraint on another mesh": (
        lambda x: jax.lax.with_sharding_constraint(x, on(a=2, b=4)) * 2, {}, X[:8],
        r"test_warnings.py:\d+ .*: shard\(x, P\('a'.*on a mesh of a=2 b=4 splits over parts of the axes of data=4",
    ),
    "a mark that nothing reads": (
        lambda x: (gshard.split(x, 0, "data"), x * 2)[1], {}, X, "nothing reads the result of split",
    ),
}  # fmt: skip
SILENT = {
    "even": (lambda x: gshard.split(x, 0, "data") * 2, {}, X[:8]),
    "a reshard": (reshard, {}, X[:8]),
    "a row for another function": (named, {"layout": OTHERS}, X[:8]),
    "other names": (lambda x: jax.lax.with_sharding_constraint(x, on(a=4, b=1, c=2)) * 2, {}, X[:8]),
    "a gradient": (jax.grad(lambda x: jnp.sum(gshard.split(gshard.split(x, 0, "data") ** 2, 1, "model"))), {}, X[:8]),
}  # fmt: skip


def called(f, options, x):
    """What three calls warn of whose arguments are in different places, and compiling ahead of time."""
    run = gshard.jit(f, mesh=AXES, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for result in in_every_way(run, (x,), mesh_of(**AXES)):
            jax.tree.map(np.testing.assert_allclose, result, f(jnp.asarray(x)))
        run.lower(x).compile()
    return [str(one.message) for one in found if "moves arguments" not in str(one.message)]


@pytest.mark.parametrize("case", WARNED)
def test_one_warning_with_the_line(case):
    f, options, x, text = WARNED[case]
    found = called(f, options, x)
    assert len(found) == 1, found
    assert re.search(text, found[0]), found[0]
    assert re.search(r"is compiled at \w+.py:\d+ \(", found[0])
    assert "To silence this: warnings.filterwarnings('ignore', category=gshard.ShardingWarning)." in found[0]
    with pytest.warns(gshard.ShardingWarning, match=text), gshard.instead_of_jit(AXES, layout=options.get("layout")):
        jax.jit(f)(x)


@pytest.mark.parametrize("case", SILENT)
def test_no_warning_of_what_is_meant(case):
    assert called(*SILENT[case]) == []


def test_explain_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gshard.explain(twice, X, mesh=AXES)
    assert "whole again" in found.lists["unused"][0]
