"""Types of the public API: mypy and pyright find no error in a user's program in strict mode, and each wrong one.

``typed_program.py`` asserts types, and its mistakes are marked: mypy reports a mark that is not needed. Pyright is no
dependency, because it needs Node.js; without it its test is skipped.
"""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import jax
import pytest

import gshard
from gshard.api.jit import JitOptions

PROGRAM = Path(__file__).with_name("typed_program.py")
SRC = Path(gshard.__file__).parent.parent


@pytest.mark.slow
def test_pyright_in_strict_mode(tmp_path):
    pyright = shutil.which("pyright") or shutil.which("pyright", path=Path(sys.executable).parent)
    if pyright is None:
        pytest.skip("pyright is not installed: pip install pyright")
    shutil.copy(PROGRAM, tmp_path)
    options = {"include": [PROGRAM.name], "extraPaths": [str(SRC)], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [pyright, "--outputjson", "-p", str(tmp_path), "--pythonpath", sys.executable]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    assert found["generalDiagnostics"] == []


def test_the_options_for_type_checkers_are_those_of_jit():
    own = {name: p for name, p in inspect.signature(gshard.jit).parameters.items() if p.kind is p.KEYWORD_ONLY}
    hints, options = get_type_hints(gshard.jit), get_type_hints(JitOptions)
    assert {name: hints[name] for name in own} == {name: options.pop(name) for name in own}
    assert options.keys() == inspect.signature(jax.jit).parameters.keys() - {"fun", "in_shardings", "out_shardings"}


def test_jitted_is_a_type_that_can_be_named():
    f = gshard.jit(lambda x: x, mesh=8)
    assert isinstance(f, gshard.stages.Jitted)
    assert not isinstance(lambda x: x, gshard.stages.Jitted)
    assert isinstance(f.on(4), gshard.stages.Jitted)
    assert gshard.stages.Jitted[[int], str] is not None
