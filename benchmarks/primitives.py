"""Claim: JAX's own primitive harnesses, split along any dimension: 0 wrong, 0 errors, fewer whole-operand gathers than
the 402 of XLA's partitioner.

Every harness that CPU runs (5,400 programs, nearly all of one operator), every operand, every dimension of more than
one element. The program that each of the devices would run is simulated, and its results are compared with those of
the whole: the same bits, except for sums in another order.

    python benchmarks/primitives.py                              float32 in 2 parts, as XLA was tested
    python benchmarks/primitives.py --all [--json out.json]      every dtype; 3 parts, 6 parts over two axes in either
                                                                 order, two dimensions at once

"gathers" counts runs of even float32 dimensions in which an all_gather makes an array as large as the operand that was
split. The column for XLA is what jax.jit of 0.10.2 compiles to for two CPU devices; "-" where its groups were not
counted apart. It had 13 wrong results and 6 aborts in that test, and 102, 2 and 4 errors in the uneven one.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

# Programs run once, on few numbers: what they cost is their compilation.
_QUICK = (
    " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax

from sweep.harnesses import excluded, harnesses
from sweep.runs import VARIANTS, Outcome, outcomes, whole

# Runs of even float32 dimensions with an all-gather of operand size, jax 0.10.2 on two CPU devices.
XLA = {
    "conv_general_dilated": 86, "gather": 60, "triangular_solve": 25, "fft": 9, "svd": 12, "qr": 8, "eig": 8, "eigh": 8,
    "cholesky": 5, "cumsum": 6, "cumprod": 6, "cummax": 6, "cummin": 6, "cumlogsumexp": 6, "concatenate": 4,
    "reshape": 4, "dynamic_slice": 2, "dynamic_update_slice": 4, "approx_top_k": 4, "reduce": 2,
    "select_and_scatter_add": 3,
}  # fmt: skip
XLA_SCATTERS, XLA_TOTAL = 118, 402
CHUNK = 12  # harnesses that a process takes at a time


def run(indices: tuple[int, ...], variants: tuple[str, ...]) -> tuple[list[Outcome], collections.Counter[str]]:
    """All runs of some harnesses, and why others were left out."""
    found: list[Outcome] = []
    left_out: collections.Counter[str] = collections.Counter()
    for i in indices:
        harness = harnesses()[i]
        reason = excluded(harness)
        if reason:
            left_out[reason] += 1
            continue
        every = list(outcomes(harness, [v for v in VARIANTS if v.name in variants]))
        found += [o for o in every if o.status != "left out"]
        left_out.update(f"XLA does not run it whole: {o.detail}" for o in every if o.status == "left out")
    return found, left_out


def runs_whole(index: int) -> bool:
    """Whether a harness runs as it is; the process may end."""
    whole(harnesses()[index])
    return True


class Worker:
    """A process of its own, and another one where it dies: what others do goes on."""

    starting = threading.Lock()  # a process gets the flags that are set when it starts

    def __init__(self, flags: str):
        self.flags = flags
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __call__(self, f: Any, *arguments: Any) -> Any:
        """What a function returns there, or None where the process died."""
        try:
            if self.pool is None:
                with self.starting:
                    os.environ["XLA_FLAGS"] = self.flags
                    self.pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                    self.pool.submit(os.getpid).result()
            return self.pool.submit(f, *arguments).result()
        except BrokenProcessPool:
            self.pool = None
            return None


def run_all(
    chunks: list[tuple[int, ...]], variants: tuple[str, ...], jobs: int, quick: str
) -> Iterable[tuple[list[Outcome], collections.Counter[str]]]:
    """Runs chunks in so many processes; where one dies its chunk is run again, harness by harness.

    What dies once more is compiled as usual: it may be the way in which XLA compiles with the flags ``quick``.
    """
    usual = os.environ.get("XLA_FLAGS", "")
    here = threading.local()

    def of_chunk(chunk: tuple[int, ...]) -> list[tuple[list[Outcome], collections.Counter[str]]]:
        if not hasattr(here, "worker"):
            here.worker = Worker(usual + quick)
        done = here.worker(run, chunk, variants)
        return [done] if done is not None else [of_harness(i) for i in chunk]

    def of_harness(i: int) -> tuple[list[Outcome], collections.Counter[str]]:
        for worker in (here.worker, Worker(usual)):
            if (done := worker(run, (i,), variants)) is not None:
                return done
        if not worker(runs_whole, i):
            return [], collections.Counter(("XLA does not run it whole: it aborts",))
        h = harnesses()[i]
        return [Outcome(h.group, h.name, str(h.dtype), "", (), "abort")], collections.Counter()

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(of_chunk, chunk) for chunk in chunks]):
            results = future.result()
            found = [o for outcomes, _ in results for o in outcomes]
            yield found, sum((reasons for _, reasons in results), collections.Counter())


def table(found: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """The figures of each group."""
    rows: dict[str, collections.Counter[str]] = {}
    for o in found:
        row = rows.setdefault(o.group, collections.Counter())
        row["runs"] += 1
        row[o.status] += 1
        if o.variant == "even" and o.dtype == "float32":
            row["even"] += 1
            row["gathers"] += o.gathers
    columns = ("runs", "wrong", "error", "abort", "even", "gathers")
    return {group: {c: row[c] for c in columns} for group, row in sorted(rows.items())}


def summary(rows: dict[str, dict[str, Any]], complete: bool) -> str:
    """The table as text: groups in which something is to be said, and the sum of all."""
    lines = [f"{'group':28}{'runs':>7}{'wrong':>7}{'errors':>7}{'aborts':>7}{'even f32':>10}{'gathers':>9}{'XLA':>6}"]

    def line(name: str, row: dict[str, Any], peer: object) -> str:
        return (
            f"{name:28}{row['runs']:7,}{row['wrong']:7,}{row['error']:7,}{row['abort']:7,}"
            f"{row['even']:10,}{row['gathers']:9,}{peer!s:>6}"
        )

    total: collections.Counter[str] = collections.Counter()
    for row in rows.values():
        total.update(row)
    scatters: collections.Counter[str] = collections.Counter()
    for group, row in rows.items():
        if group.startswith("scatter"):
            scatters.update(row)
        elif group in XLA or row["gathers"] or row["wrong"] or row["error"] or row["abort"]:
            lines.append(line(group, row, XLA.get(group, "-")))
    if scatters:
        lines.append(line("scatter and scatter_*", dict(scatters), XLA_SCATTERS))
    lines.append(line("all groups", dict(total), XLA_TOTAL if complete else "-"))
    return "\n".join(lines)


def accepted(flags: str) -> bool:
    """Whether this XLA knows the flags; it ends the process where it does not."""
    script = "import jax; jax.numpy.zeros(1).block_until_ready()"
    environment = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flags}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True).returncode == 0


def main() -> int:
    """Runs the sweep and prints the table; fails if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--groups", nargs="+", help="only these groups of harnesses")
    parser.add_argument("--all", action="store_true", help="every dtype in every variant")
    parser.add_argument("--variants", nargs="+", default=["even", "uneven"], choices=[v.name for v in VARIANTS])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--one-in", type=int, default=1, help="every so many harnesses only")
    parser.add_argument("--json", type=Path, help="where to write everything found")
    options = parser.parse_args()
    variants = tuple(v.name for v in VARIANTS) if options.all else tuple(options.variants)
    quick = _QUICK if accepted(_QUICK) else ""
    start = time.perf_counter()
    chosen = [
        i
        for i, h in enumerate(harnesses())
        if (not options.groups or h.group in options.groups) and (options.all or str(h.dtype) in options.dtypes)
    ][:: options.one_in]
    chunks = [tuple(chosen[at : at + CHUNK]) for at in range(0, len(chosen), CHUNK)]
    found: list[Outcome] = []
    left_out: collections.Counter[str] = collections.Counter()
    for n, (done, reasons) in enumerate(run_all(chunks, variants, options.jobs, quick), 1):
        found += done
        left_out += reasons
        if n % 20 == 0:
            print(f"{n} of {len(chunks)} parts, {len(found):,} runs", file=sys.stderr, flush=True)
    rows, seconds = table(found), time.perf_counter() - start
    complete = (
        options.one_in == 1
        and not options.groups
        and "even" in variants
        and (options.all or "float32" in options.dtypes)
    )
    print(f"jax {jax.__version__}, {len(found):,} runs of {len(chosen):,} harnesses in {seconds:.0f} s")
    print(summary(rows, complete))
    for reason, count in sorted(left_out.items()):
        print(f"left out: {count} harnesses, {reason}")
    unknown = sorted({name for o in found for name in o.without_rule})
    print(f"without a rule: {', '.join(unknown) or 'none'}")
    bad = [o for o in found if o.status != "right"]
    for o in bad[:40]:
        print(o)
    if options.json:
        said = {
            "jax": jax.__version__,
            "seconds": seconds,
            "groups": rows,
            "left_out": left_out,
            "without_rule": unknown,
            "failures": [dataclasses.asdict(o) for o in bad],
            "gathers": [
                dataclasses.asdict(o) for o in found if o.gathers and o.variant == "even" and o.dtype == "float32"
            ],
        }
        options.json.write_text(json.dumps(said, indent=1, default=str))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
