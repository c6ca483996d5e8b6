"""The nouns and verbs of the picture are public, and one program goes through them by hand as through jit."""

import ast
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import gshard


def test_what_is_exported_is_documented():
    own = {name: getattr(gshard, name) for name in gshard.__all__}
    assert len(own) >= 25
    assert not [name for name, thing in own.items() if not thing.__doc__]
    folders = {path.name for path in Path(gshard.__file__).parent.iterdir() if path.is_dir()}
    assert len(folders) > 10
    assert folders & own.keys() == {"search", "rules", "testing"}, "a folder hides the public function of its name"


def test_completion_lists_the_public_names_only():
    listed = {name for name in dir(gshard) if not name.startswith("__")}
    assert listed - {"moe"} == set(gshard.__all__)
    assert sorted(gshard.__all__) == gshard.__all__
    bound = {name for name in vars(gshard) if not name.startswith("_")}
    modules = {name for name in bound if isinstance(vars(gshard)[name], types.ModuleType)}
    assert bound - modules <= set(gshard.__all__)
    assert {"core", "planning", "api"} <= modules - listed
    with pytest.raises(AttributeError, match="has no attribute 'jitt'"):
        gshard.jitt  # noqa: B018


def test_a_name_is_the_same_for_type_checkers():
    """They read imports that do not run. What runs imports a name from the same module when it is first read."""
    tree = ast.parse(Path(gshard.__file__).read_text("utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute))
    pairs = [(alias.asname, f"{node.module}.{alias.name}") for node in checked.body if isinstance(node, ast.ImportFrom)
        for alias in node.names]  # fmt: skip
    for name, origin in pairs:
        assert vars(gshard)["__getattr__"](name) is pkgutil.resolve_name(origin), name
    assert {name for name, _ in pairs} == set(gshard.__all__)


def test_the_folder_search_does_not_hide_the_function():
    for first in ("import gshard.api.explained\nfrom gshard import *", "from gshard.search import find"):
        again = "pickle.loads(pickle.dumps(gshard.search)) is gshard.search"
        program = f"{first}\nimport gshard, pickle\nprint(gshard.search.__module__, {again})"
        found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        assert found == "gshard.api.search True\n"
