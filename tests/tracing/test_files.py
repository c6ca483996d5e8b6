"""Two files of one name are told apart in every line that is printed."""

import importlib.util
import json

import jax.numpy as jnp
import pytest

import gshard

DATA = "import gshard\ndef load(x):\n    return gshard.split(x, 0, 'data')\n"
MODEL = "import jax.numpy as jnp\ndef layer(x, w):\n    return jnp.sum(jnp.tanh(x @ w))\n"


@pytest.fixture
def functions(tmp_path):
    found = []
    for folder, text, name in (("data", DATA, "load"), ("model", MODEL, "layer")):
        path = tmp_path / folder / "utils.py"
        path.parent.mkdir()
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{folder}_utils", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(getattr(module, name))
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
