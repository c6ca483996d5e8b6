"""What the documentation shows runs: doctests, the README, the pages (``tests/pages.py``), the examples."""

import doctest
import functools
import importlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
import pages
from test_structure import FILES, name_of

ROOT = Path(__file__).resolve().parent.parent
WITH_DOCTESTS = [path for path in FILES if ">>> " in path.read_text()]
SITES = (ROOT / "docs", ROOT / "packages" / "m4" / "docs")
PAGES = [path for site in SITES for path in sorted(site.rglob("*.md")) if "_build" not in path.parts]
PAGES = [ROOT / "README.md", *PAGES]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What these show is tested elsewhere in the fast tests too.
LONG = """
    exporting.md moe.md translating.md
    beside_xla.py decoder_moe.py explained_transformer.py haiku_batch_norm.py layout_transformer.py local_gather.py
    pipeline.py sequence_parallel.py serve_exported.py spatial_unet.py
""".split()


def module_name(path):
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_DOCTESTS, ids=module_name)
def test_doctests(path):
    module = importlib.import_module(module_name(path))
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert tried, "has >>> but no doctest was found: is it in a docstring?"
    assert not failed, f"{failed} of {tried} examples fail; see the output above"


def skip_without_packages(code):
    packages = re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which the extra dev installs")


def each(paths):
    def marks(path):
        slow = [pytest.mark.slow] if path.name in LONG else []
        return slow + ([pytest.mark.optimised] if "compiled by XLA" in path.read_text() else [])  # as users get it

    return pytest.mark.parametrize(
        "path", [pytest.param(p, id=p.relative_to(ROOT).as_posix(), marks=marks(p)) for p in paths]
    )


@each([page for page in PAGES if pages.blocks(page)])
def test_page_runs_and_prints_what_it_shows(path, tmp_path, request):
    code = "\n".join(block.text for block in pages.blocks(path) if block.kind == "python")
    skip_without_packages(code)
    pages.run(path, tmp_path, update=request.config.getoption("--update-golden"))


ALONE = "import pathlib, sys, pages; pages.run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [page for page in PAGES if pages.blocks(page)], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_page_runs_in_a_process_of_its_own(path, tmp_path):
    """As someone pastes it: the page itself sets how many devices there are, before JAX starts."""
    skip_without_packages("\n".join(block.text for block in pages.blocks(path) if block.kind == "python"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "JAX_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ALONE, path, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-2000:]


@each(EXAMPLES)
def test_example_runs_and_is_in_the_gallery(path, tmp_path):
    skip_without_packages(path.read_text())
    command = [sys.executable, ROOT / "scripts" / "gallery.py", path]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.strip() in (ROOT / "docs" / "gallery.md").read_text(), f"run make gallery:\n{done.stdout}"
    page = ROOT / "docs" / "tutorials" / f"{path.stem}.md"
    shown = re.search(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S) if page.exists() else None
    assert shown is None or not pages.differs(f"[...]{shown[1]}[...]", done.stderr), done.stderr


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    told = re.findall(
        r"^\.\. auto(?:function|class|exception):: gshard\.((?:rules\.|stages\.)?\w+)$", text, flags=re.MULTILINE
    )
    public = [name for name in gshard.__all__ if name not in ("rules", "stages", "testing")]
    public += [f"stages.{name}" for name in gshard.stages.__all__]
    public += [f"rules.{name}" for name in ("Call", "Rule", "RuleError", "RuleMaker", "Shards")]
    assert sorted(told) == sorted(public), "docs/api.md lists each public name once"
    for path, members in re.findall(r"autoclass:: gshard\.(\S+)\n +:members: (.+)", text):
        cls = functools.reduce(getattr, path.split("."), gshard)
        wrong = [name for name in members.split(", ") if not hasattr(cls, name) and name not in cls.__annotations__]
        assert not wrong, f"docs/api.md lists what {path} does not have"


def test_figures_are_those_of_the_benchmarks():
    """The README and the comparison with other projects quote the table of the 228 programs."""
    rows = re.findall(r"^\| ([^|]+) \| \*\*([\d.]+)\*\*", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    table = {}
    for name, figure in rows:
        table.setdefault(name, figure)  # the first table is the one of the 228 programs
    memory = f"needs {table['geometric mean of temporary memory']} times"
    sent, more = table["geometric mean of bytes"], table["programs in which we send more"]
    readme, comparison = (ROOT / "README.md").read_text(), (ROOT / "docs" / "comparison.md").read_text()
    assert f"sends {sent} times the bytes over 228 programs" in readme
    assert f"sends more in {more}" in readme
    assert f"it sends {sent} times the bytes (geometric mean; more in {more})" in comparison
    assert f"computes {table['geometric mean of the FLOPs that a device executes']} times the FLOPs" in comparison
    assert memory in readme
    assert memory in comparison


def test_what_the_readme_says_of_sampling():
    mesh = jax.make_mesh((8,), ("vocabulary",), axis_types=(jax.sharding.AxisType.Auto,))
    logits, split = jax.ShapeDtypeStruct((64, 151936), "float32"), P(None, "vocabulary")

    def sample(logits):
        return jax.lax.top_k(logits, 64)

    ours = gshard.explain(gshard.jit(sample, mesh=mesh, in_shardings=split), logits)
    theirs = jax.jit(sample, in_shardings=jax.NamedSharding(mesh, split)).lower(logits).compile()
    sent = [found.total_bytes / 1e6 for found in (ours, gshard.explain(theirs))]
    assert f"sends {sent[0]:.2f} MB a device, and {sent[1]:.1f} MB under" in (ROOT / "README.md").read_text()


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.slow
def test_the_program_for_many_hosts_runs_in_two_processes(tmp_path):
    block = next(b.text for b in pages.blocks(ROOT / "docs" / "hosts.md") if b.text.startswith("# train_hosts.py"))
    (tmp_path / "train_hosts.py").write_text(block)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    four = {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "train_hosts.py", address, "2", str(index)],
            cwd=tmp_path, env=os.environ | four, stdout=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=250)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]

    rng = np.random.default_rng(0)
    weights, expected = rng.normal(size=(64, 16)).astype(np.float32), []
    for _ in range(3):
        x = rng.normal(size=(128, 64)).astype(np.float32)
        expected.append(np.mean((x @ weights) ** 2))
        weights -= 0.1 * 2 / (128 * 16) * x.T @ (x @ weights)
    losses = [float(line.removeprefix("loss ")) for line in printed[0].splitlines() if line.startswith("loss ")]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_an_output_or_a_line_that_is_not_true_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "COUNTED_BY", "another version")
    page = tmp_path / "page.md"
    code = "```python\ndef f():\n    return 1 / 0\n```\n\ntext\n\n```python\n"
    code += "try:\n    f()\nexcept ZeroDivisionError as error:\n"
    code += "    print('at line', error.__traceback__.tb_next.tb_lineno)\n    print(3, 'equations')\n```\n"
    page.write_text(f"{code}\n```output\nat line 2\n4 equations\n```\n")
    pages.run(page, tmp_path)
    page.write_text(f"{code}\n```output\nat [...]\n4 equations\n```\n")
    pages.run(page, tmp_path)
    page.write_text(f"{code}\n```output\nat line 1\n4 equations\n```\n")
    with pytest.raises(AssertionError, match="-at line 1"):
        pages.run(page, tmp_path)
    pages.run(page, tmp_path, update=True)
    assert "```output\nat line 2\n3 equations\n```" in page.read_text()


def test_numbers_of_equations_are_those_of_one_version_of_jax(monkeypatch):
    monkeypatch.setattr(pages, "COUNTED_BY", "another version")
    assert not pages.differs("f, 4 equations", "f, 3 equations")
    monkeypatch.setattr(pages, "COUNTED_BY", jax.__version__)
    assert pages.differs("f, 4 equations", "f, 3 equations")
    assert not pages.differs("f, 3 equations", "f, 3 equations")
