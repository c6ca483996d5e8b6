"""How many of JAX's own tests of ``jax.jit`` pass with ``gshard.jit`` in its place: ``make jax-tests``.

Runs classes of JAX's ``tests/api_test.py`` three times: as they are; with ``jax.jit`` replaced by ``gshard.jit`` on one
device; and with ``gshard.jit`` on eight virtual devices and the first dimension of every array argument split over
them. What counts is the share, of the tests that ``jax.jit`` passes here, that still pass. The tests are not part of
JAX's wheel nor of this repository, and nothing is fetched: name the folder of a checkout of the release in use.

    python tests/jax_api/run.py ~/jax/tests
    python tests/jax_api/run.py ~/jax/tests --classes JitTest --side ours --only donate

``cannot_apply.toml`` names tests that ask for what only ``jax.jit`` can have, each with its reason. They run all the
same, and are counted apart. pytest runs the tests of a side in another process, and in a new one when a test ends it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLASSES = ("JitTest", "APITest", "RematTest", "JaxprTest", "BufferDonationTest", "NamedCallTest")
SIDES = ("jax", "ours", "split")
SECONDS = 300  # after which a test is stopped
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
# What pytest collects. JAX's tests read flags of their own.
MODULE = """
import sys
from pathlib import Path

sys.argv = sys.argv[:1]
sys.path.insert(0, {here!r})
import substitute

loaded = substitute.load(Path({path!r}), {side!r})
globals().update({{name: getattr(loaded, name) for name in {classes!r}}})
"""


def outcomes(path, side, classes, only):
    """By test, whether it passed, and why not."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with tempfile.TemporaryDirectory() as folder:
        file, written = Path(folder) / "test_api.py", Path(folder) / "found.xml"
        file.write_text(MODULE.format(here=str(HERE), path=str(path), side=side, classes=tuple(classes)))
        options = ["--numprocesses", "1", "--timeout", str(SECONDS), "--junitxml", str(written), "-k", only]
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, str(file), *options]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not written.exists() or done.returncode > 1:
            raise SystemExit(f"the tests could not be run on {side}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        cases = list(ET.parse(written).iter("testcase"))
    found = {}
    for case in cases:
        wrong = [part for part in case if part.tag in ("failure", "error")]
        status = FAILED if wrong else SKIPPED if case.find("skipped") is not None else PASSED
        name = f"{case.get('classname').rpartition('.')[2]}.{case.get('name')}"
        if found.get(name, ("", ""))[0] != FAILED:  # the first of several subtests
            found[name] = status, " ".join(part.get("message", "") for part in wrong)
    return found


def cannot_apply(side):
    """Reasons by test; some hold on one side only."""
    table = tomllib.loads((HERE / "cannot_apply.toml").read_text())
    own = table.pop("split", {})
    both = [*table.items(), *(own.items() if side == "split" else ())]
    return {f"{name}.{test}": reason for name, tests in both for test, reason in tests.items()}


def report(results, classes):
    """Prints, for each class, how many of the tests that jax.jit passes still do, and then those that do not."""
    sides = [s for s in SIDES[1:] if s in results]
    failures, needless = [], []
    print(f"\n{'class':<22}{'jax.jit':>8}" + "".join(f"{s:>8}{'':<28}" for s in sides))
    for name in classes:
        passed = [t for t, (status, _) in results["jax"].items() if t.startswith(f"{name}.") and status == PASSED]
        row = f"{name:<22}{len(passed):>8}"
        for side in sides:
            mine, known = results[side], cannot_apply(side)
            bad = [t for t in passed if mine.get(t, (FAILED,))[0] != PASSED]
            lost = [t for t in bad if t not in known]
            row += f"{len(passed) - len(bad):>8} {f'{len(lost)} to do, {len(bad) - len(lost)} cannot apply':<27}"
            failures += [f"{side:<6}{t}  {' '.join(mine.get(t, ['not run']))[:200]}" for t in lost]
            needless += [f"{side:<6}{t}" for t in passed if t in known and t not in bad]
        print(row.rstrip())
    print(f"\n{len(failures)} that fail and should not:")
    print("\n".join(failures))
    for test in needless:
        print(f"passes, and need not be in cannot_apply.toml: {test}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder tests/ of a checkout of JAX")
    parser.add_argument("--classes", nargs="+", default=CLASSES, help="classes of api_test.py")
    parser.add_argument("--side", action="append", choices=SIDES[1:], help="which; both unless named")
    parser.add_argument("--only", default="", help="tests whose name matches, as pytest's -k")
    options = parser.parse_args()
    path = options.folder.resolve() / "api_test.py"
    if not path.is_file():
        parser.error(f"{options.folder} holds no api_test.py: name the folder tests/ of a checkout of JAX")
    results = {}
    for side in ("jax", *(options.side or SIDES[1:])):
        results[side] = outcomes(path, side, options.classes, options.only)
        counts = Counter(status for status, _ in results[side].values())
        print(f"{side:<6}{', '.join(f'{count} {status}' for status, count in counts.items())}", flush=True)
    report(results, options.classes)


if __name__ == "__main__":
    main()
