"""Lines that are printed: files of one name, and marks whose result nothing reads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from placed import in_every_way, mesh_of
from training_files import loaded

DATA = "import gshard\ndef load(x):\n    return gshard.split(x, 0, 'data')\n"
MODEL = "import jax.numpy as jnp\ndef layer(x, w):\n    return jnp.sum(jnp.tanh(x @ w))\n"


@pytest.fixture
def functions(tmp_path):
    found = []
    for folder, text, name in (("data", DATA, "load"), ("model", MODEL, "layer")):
        path = tmp_path / folder / "utils.py"
        path.parent.mkdir()
        path.write_text(text)
        found.append(getattr(loaded(path, f"{folder}_utils"), name))
    return found


def test_files_of_one_name_are_called_by_their_folders_too(functions):
    load, layer = functions
    found = gshard.explain(
        lambda x, w: layer(load(x), w), jnp.ones((16, 8)), jnp.ones((8, 4)), mesh=gshard.Mesh.abstract(data=8)
    )
    printed = found.format(tensors=12)
    assert "marked split(x, 0, 'data') at data/utils.py:3 (load)" in printed
    assert "tanh at model/utils.py:3 (layer)" in printed
    assert " utils.py" not in printed
    assert "model/utils.py:3 (layer)" in str(found.verdict())
    assert found.why("model/utils.py:3").startswith("%")
    shown = found.data()
    assert sorted(f["name"] for f in shown["files"]) == ["data/utils.py", "model/utils.py"]
    assert '"utils.py' not in json.dumps(shown)


def test_a_file_of_a_name_of_its_own_is_called_by_that(functions):
    load, _ = functions
    found = gshard.explain(load, jnp.ones((16, 8)), mesh=gshard.Mesh.abstract(data=8))
    assert "at utils.py:3 (load)" in found.format(tensors=12)


MESH = {"data": 4, "model": 2}
X = np.arange(-32.0, 32, dtype=np.float32).reshape(8, 8) / 8


def forgotten(x):
    gshard.split(x, 0, "data")
    return 2 * x


def named(x):
    gshard.name(x, "batch _")
    return 2 * x


def loss(x):
    """Its marks are dead in the gradient, and those of the cotangents are not."""
    y = gshard.split(x @ x, 0, "data")
    return gshard.replicate(gshard.split(y.sum(1), 0, "data").sum())


def part(tree):
    tree = gshard.split(tree, 0, "data")
    return tree[0] * 2


first = gshard.jit(lambda a, b: a * 2, mesh=MESH, in_shardings=jax.P("data"))


def loop(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


FORGOTTEN = {
    "plain": forgotten,
    "in a loop": loop(forgotten),
    "in a call": jax.jit(forgotten),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, forgotten, lambda x: x, x),
    "for each row": jax.vmap(lambda row: forgotten(row[:, None])[:, 0]),
    "in a derivative": jax.grad(lambda x: forgotten(x).sum()),
    "in another partitioned function": lambda x: gshard.jit(forgotten, mesh=MESH)(x),
    "a name": named,
}
READ = {
    "result": lambda x: gshard.split(x, 0, "data"),
    "gradient": jax.grad(loss),
    "in a loop": loop(lambda x: gshard.split(x * 2, 0, "data")),
    "one leaf of two": lambda x: part((x, x)),
    "argument that nothing reads": lambda x: first(x, x),
}


def forgiven(x):
    return 2 * x, gshard.split(x, 0, "data")


READ["only in one of two calls"] = lambda x: forgiven(x)[0] + forgiven(x)[1]


@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_mark_without_effect_is_listed_and_refused(case):
    f = FORGOTTEN[case]
    found = gshard.explain(f, X, mesh=MESH)
    assert len(found.lists["unused"]) == 1
    where, _, what = found.lists["unused"][0].partition(": ")
    assert where.startswith("test_printed_lines.py:")
    mark = "name(x, 'batch _')" if case == "a name" else "split(x, 0, 'data')"
    assert what == f"nothing reads the result of {mark}: write x = {mark}, or leave it out"
    assert found.lists["unused"][0] in str(found)
    assert list(found.lists["unused"]) in [lines for *_, lines in found.data("cpu:8")["lists"]]
    with pytest.raises(gshard.PlanError, match="has no effect") as caught:
        gshard.jit(f, mesh=MESH, strict=True)(X)
    assert caught.value.where == where
    for got in in_every_way(gshard.jit(f, mesh=MESH), (X,), mesh_of(**MESH)):
        np.testing.assert_allclose(got, f(X), rtol=1e-6)


@pytest.mark.parametrize("case", READ)
@pytest.mark.one_in(3)
def test_all_others_have_one(case):
    f = READ[case]
    assert gshard.explain(f, X, mesh=MESH).lists["unused"] == ()
    for got in in_every_way(gshard.jit(f, mesh=MESH, strict=True), (X,), mesh_of(**MESH)):
        np.testing.assert_allclose(got, f(jnp.asarray(X)), rtol=1e-4, atol=1e-4)
