"""What all tests share: eight virtual CPU devices, seeded random numbers, golden files."""

import functools
import gc
import importlib.metadata
import itertools
import os
import zlib
from pathlib import Path

# Read when JAX starts its backend, so set before any test module can touch JAX. A collective whose
# device threads are late (eight of them on few cores) would abort the process after a minute; on a busy
# machine that proves nothing, so wait longer than a test may last. An unknown flag aborts too: these
# are known to every supported version.
_FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "--xla_cpu_collective_timeout_seconds": 3600,
}
# Most of the time of a test goes into compiling programs that run once. In the fast tests LLVM does not optimise them,
# but where every bit counts (``pytest.mark.optimised``). XLA writes all kernels of a program into one module of LLVM,
# and does so without MLIR if the version has that choice: this halves the time of compiling. `make test-full` and
# `make test-newest` compile everything as users do.
_UNOPTIMISED = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1"
_DEFAULTS = {"xla_cpu_parallel_codegen_split_count": 32}
if _UNOPTIMISED:
    _FLAGS["--xla_cpu_parallel_codegen_split_count"] = 1
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
        _DEFAULTS["xla_cpu_use_fusion_emitters"] = True
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["GSHARD_M4_COMPILATION_CACHE"] = "off"  # nothing of the user's is read or written

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402

import chromium  # noqa: E402

# The same cases at every run; no limit on time, since a first call compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing")
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="of the cases of a test, run the first and one in N; all of a test that is marked quick",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config, items):
    """Draws the sample of ``--one-in`` and, of a test that is marked ``one_in``, the cases that are not slow.

    Both are the same at every run.
    """
    n = config.getoption("--one-in")
    seen = set()
    kept, left_out = [], []
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        first, drawn_from = function not in seen, zlib.crc32(item.nodeid.encode())
        seen.add(function)
        marked = item.get_closest_marker("one_in")
        if marked is not None and not first and drawn_from // n % marked.args[0]:
            item.add_marker(pytest.mark.slow)
        drawn = first or item.get_closest_marker("quick") or drawn_from % n == 0
        (kept if drawn else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without garbage collection: modules and tests stay, and later collections need not look at them either."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def room_for_compiled_programs():
    """Forgets what is compiled before there is too much of it.

    Each compiled program takes some of the 65,530 mappings that Linux allows a process; LLVM aborts where there are no
    more. The slowest tests take half of that.
    """
    yield
    if next(_TESTS) % 10 == 0 and _mappings() > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def optimised_if_marked(request, monkeypatch):
    """Compiles as users do in tests that are marked ``optimised``."""
    marked = _UNOPTIMISED and request.node.get_closest_marker("optimised") is not None
    if marked:
        jax.config.update("jax_disable_most_optimizations", False)
        as_users_do = functools.partial(_as_users_do, compiler.get_compile_options)
        monkeypatch.setattr(compiler, "get_compile_options", as_users_do)
    yield
    if marked:
        jax.config.update("jax_disable_most_optimizations", True)


def _as_users_do(get_compile_options, *arguments, **options):
    """JAX's options of a program, with XLA's own choice of what ``XLA_FLAGS`` sets for the fast tests."""
    given = options.pop("env_options_overrides", None) or {}
    return get_compile_options(*arguments, **options, env_options_overrides=_DEFAULTS | given)


_TESTS = itertools.count()


def _mappings():
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # not Linux
        return 0


@pytest.fixture
def rng(request):
    """Random numbers that are the same at every run of a test, and others for every test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def golden(request):
    """``golden(name, text)`` compares ``text`` with ``tests/golden/<name>.txt`` (or writes it: --update-golden)."""

    def compare(name, text):
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"tests/golden/{name}.txt is missing: run this test with --update-golden and read it"
        assert text == path.read_text(), (
            f"differs from tests/golden/{name}.txt; if that is meant, run with --update-golden"
        )

    return compare


@pytest.fixture(scope="module")
def browser():
    """A page of a browser, if there is one."""
    if chromium.FOUND is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    with chromium.Chromium() as page:
        yield page


@pytest.fixture
def mesh_2x4():
    """Eight devices as data=2, model=4."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
