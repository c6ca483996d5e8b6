"""What the documentation shows runs: doctests, the README, the examples."""

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gshard

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
WITH_DOCTESTS = [path for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text()]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "_build" not in path.parts]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What these show is tested elsewhere in the fast tests too.
LONG = {
    "haiku_batch_norm.py",
    "orbax_restore.py",
    "local_gather.py",
    "pipeline.py",
    "layout_transformer.py",
    "explained_transformer.py",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=module_name)
def test_doctests(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert tried, "has >>> but no doctest was found: is it in a docstring?"
    assert not failed, f"{failed} of {tried} examples fail; see the output above"


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    if not hasattr(gshard, "jit"):
        pytest.skip("gshard.jit does not exist yet")
    namespace = {"__name__": "__main__"}
    for number, block in enumerate(python_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.name in LONG else []) for p in EXAMPLES]
)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    packages = re.findall(r"^(?:import|from) (\w+)", path.read_text(), flags=re.MULTILINE)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which the extra dev installs")
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
