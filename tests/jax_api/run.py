"""Claim: what JAX's own tests of ``jax.jit`` ask, ``gshard.jit`` does.

JAX's ``tests/api_test.py`` runs three times: as it is, with ``gshard.jit`` on one device in the place of ``jax.jit``,
and with ``gshard.jit`` on eight virtual devices and the first dimension of every array argument split over them. What
counts is the share, of the tests that ``jax.jit`` passes here, that still pass. The tests are not part of JAX's wheel
nor of this repository, and nothing is fetched: name the folder of a checkout of the release in use.

    python tests/jax_api/run.py ~/jax/tests
    python tests/jax_api/run.py ~/jax/tests --classes JitTest --side ours --only donate --json out.json

``cannot_apply.toml`` names tests that ask for what only ``jax.jit`` can have, each with its reason. They run all the
same, and are counted apart. Each class runs in a child process; when one dies, another goes on after the test.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLASSES = ("JitTest", "APITest", "RematTest", "JaxprTest", "BufferDonationTest", "NamedCallTest")
SIDES = ("jax", "ours", "split")
SECONDS = 300  # after which a child that says nothing is stopped
PASSED, SKIPPED, FAILED, DIED = "passed", "skipped", "failed", "died"


class Reporter(unittest.TestResult):
    """Prints one line of JSON for each test."""

    def startTest(self, test):
        super().startTest(test)
        self.said: dict[str, Any] = {"status": PASSED}
        self.begin = time.perf_counter()

    def addError(self, test, err):
        self.fail(err)

    def addFailure(self, test, err):
        self.fail(err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.fail(err)

    def addSkip(self, test, reason):
        self.said = {"status": SKIPPED, "error": reason}

    def addUnexpectedSuccess(self, test):
        self.said = {"status": FAILED, "error": "unexpected success"}

    def fail(self, err):
        if self.said["status"] == PASSED:  # the first of several subtests
            kind, error, _ = err
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = "".join(traceback.format_exception(*err))
            self.said = {"status": FAILED, "error": f"{kind.__name__}: {lines[0] if lines else ''}", "traceback": text}

    def stopTest(self, test):
        seconds = round(time.perf_counter() - self.begin, 2)
        say({"test": name_of(test), **self.said, "seconds": seconds})
        super().stopTest(test)


def say(result):
    print("\n" + json.dumps(result), file=sys.__stdout__, flush=True)


def name_of(test):
    """Class and method, without the parameters that absl adds: they may hold addresses."""
    return ".".join(test.id().split(" ")[0].split(".")[-2:])


def child(folder, side, name, only, done):
    """Runs the tests of a class that are not done yet."""
    sys.argv = sys.argv[:1]  # JAX's tests read flags of their own
    sys.path.insert(0, str(HERE))
    import substitute

    module = substitute.load(folder / "api_test.py", side)
    tests = list(unittest.defaultTestLoader.loadTestsFromTestCase(getattr(module, name)))
    say({"all": [name_of(t) for t in tests if re.search(only, name_of(t))]})
    for test in tests:
        if name_of(test) not in done and re.search(only, name_of(test)):
            say({"begin": name_of(test)})
            test.run(Reporter())


def parent(folder, side, name, only):
    """The results of a class by test; a child that dies is followed by another."""
    found, every = {}, []
    while True:
        current, last_words = "", ""
        command = [sys.executable, __file__, str(folder), "--child", side, name, "--only", only, "--done", *found]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            assert process.stdout is not None
            watch = threading.Timer(SECONDS, process.kill)
            watch.start()
            for line in process.stdout:
                watch.cancel()
                watch = threading.Timer(SECONDS, process.kill)
                watch.start()
                result = read(line)
                if "all" in result:
                    every = result["all"]
                elif "begin" in result:
                    current = result["begin"]
                elif "test" in result:
                    found[result.pop("test")] = result
                    current = ""
            watch.cancel()
            process.wait()
            errors.seek(0)
            last_words = errors.read()
        if current:
            text = f"the process ended with {process.returncode}"
            found[current] = {"status": DIED, "error": text, "traceback": last_words[-4000:]}
        elif process.returncode:
            raise SystemExit(f"{name} on {side} could not be run:\n{last_words[-4000:]}")
        if set(every) <= set(found):
            return found


def read(line):
    """What a child said, if it was the child and not a test of JAX's."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def cannot_apply(side):
    """Reasons by test; some hold on one side only."""
    table = tomllib.loads((HERE / "cannot_apply.toml").read_text())
    own = table.pop("split", {})
    both = [*table.items(), *(own.items() if side == "split" else ())]
    return {f"{name}.{test}": reason for name, tests in both for test, reason in tests.items()}


def report(results):
    """Prints, for each class, how many of the tests that jax.jit passes still do, and then those that do not."""
    sides = [s for s in SIDES[1:] if s in results]
    reasons = {side: cannot_apply(side) for side in sides}
    failures, needless = [], []
    print(f"\n{'class':<22}{'jax.jit':>8}" + "".join(f"{s:>8}{'':<28}" for s in sides))
    for name in next(iter(results.values())):
        passed = [t for t, r in results["jax"][name].items() if r["status"] == PASSED]
        row = f"{name:<22}{len(passed):>8}"
        for side in sides:
            mine, known = results[side][name], reasons[side]
            bad = [t for t in passed if mine[t]["status"] != PASSED]
            lost = [t for t in bad if t not in known]
            row += f"{len(passed) - len(bad):>8} {f'{len(lost)} to do, {len(bad) - len(lost)} cannot apply':<27}"
            failures += [f"{side:<6}{t}  {mine[t]['status']}  {mine[t].get('error', '')[:200]}" for t in lost]
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
    parser.add_argument("--only", default="", help="tests whose name matches")
    parser.add_argument("--json", type=Path, help="write all results, with tracebacks")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.folder / "api_test.py").is_file():
        parser.error(f"{options.folder} holds no api_test.py: name the folder tests/ of a checkout of JAX")
    if options.child:
        child(options.folder, *options.child, options.only, options.done)
        return
    results = {}
    for side in ("jax", *(options.side or SIDES[1:])):
        results[side] = {}
        for name in options.classes:
            begin = time.perf_counter()
            results[side][name] = parent(options.folder, side, name, options.only)
            found = Counter(result["status"] for result in results[side][name].values())
            counts = ", ".join(f"{count} {status}" for status, count in found.items())
            print(f"{side:<6}{name:<22}{counts}  {time.perf_counter() - begin:.0f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    report(results)


if __name__ == "__main__":
    main()
