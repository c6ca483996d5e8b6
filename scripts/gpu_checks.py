"""Checks on an accelerator: what it is, and whether programs compute there what they compute on CPU.

Each function is a part of ``scripts/gpu.py``. A machine with one accelerator has no eight devices, so programs for
eight are run on it device after device (``gshard.testing.rule_checks``): what a device computes between two collectives
runs compiled on the accelerator, and what devices say to each other is done in numpy. Everything is compared at JAX's
highest precision of products; by default XLA takes TF32 for those of float32 on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from resumable import ROOT, Asked, Found, answer

import gshard
from gshard.api.jit import Jitted
from gshard.core.sharding import Sharding
from gshard.testing import rule_checks

NEAR = 1e-4  # of the largest element of a result
CALLS = 4  # of partitioned functions that are looked at in an example
EXACT = jax.default_matmul_precision("highest")


def accelerator() -> Any:
    """The GPU, or where there is none the CPU."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def machine(asked: Asked) -> Found:
    """What the devices are."""
    device = accelerator()
    stats = device.memory_stats() or {}
    driver = ""
    if device.platform == "gpu":
        driver = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "platform": device.platform, "kind": device.device_kind, "count": len(jax.devices(device.platform)),
        "memory": stats.get("bytes_limit", 0), "cores": os.cpu_count(), "processor": platform.machine(),
        "driver": driver, "runtime": device.client.platform_version.split("\n")[0][:80],
        "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib"), "python": platform.python_version(),
        "numpy": np.__version__, "gshard": importlib.metadata.version("gshard"),
        "commit": _printed("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }  # fmt: skip


def _printed(*line: str) -> str:
    """The first line that a command prints, if there is such a command."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(line, capture_output=True, text=True, timeout=20).stdout.strip().split("\n")[0]
    return ""


def is_key(x: Any) -> bool:
    """Whether an array is of random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def numbers(x: Any) -> np.ndarray:
    """An array in numpy; of keys the words that they are made of."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def whole(parts: Sequence[Any], sharding: Sharding, mesh: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array from the devices' parts of it."""
    if is_key(parts[0]):
        parts = [numbers(part) for part in parts]
        shape, sharding = (*shape, parts[0].shape[-1]), Sharding((*sharding.dims, ()))
    places = rule_checks.parts_of(np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape), sharding, mesh)
    made = np.empty(shape, np.asarray(parts[0]).dtype)
    for part, place in zip(parts, places, strict=True):
        made.reshape(-1)[place.reshape(-1)] = np.asarray(part).reshape(-1)
    return made


def device_after_device(lowered: Any, leaves: Sequence[Any], expected: Sequence[Any]) -> list[np.ndarray]:
    """The results of a partitioned program, computed for each of its devices on the default one."""
    spmd = lowered.spmd
    results = rule_checks.run_on_all(spmd, [*lowered.program.captured, *leaves])
    together = zip(results, spmd.out_shardings, expected, strict=True)
    return [whole(parts, sharding, spmd.mesh, np.shape(want)) for parts, sharding, want in together]


def difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference of any element, relative to the largest element of its array."""
    worst = 0.0
    for got, want in zip(found, expected, strict=True):
        got, want = (x.astype(np.result_type(x, np.float64)) for x in map(numbers, (got, want)))
        if got.size:
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            with np.errstate(invalid="ignore"):
                off = np.where(same, 0.0, np.abs(got - want))
            largest = np.max(np.abs(want), initial=1e-6, where=np.isfinite(want))
            worst = max(worst, float(np.max(off) / largest))
    return worst


def shuffled(names: Sequence[str]) -> list[str]:
    """The same order at every call, and no order of the alphabet: the first of them are a sample."""
    return random.Random(0).sample(sorted(names), len(names))


def told(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def laws(asked: Asked) -> Found:
    """Rules of operators: splits that the rule allows compute what the operator computes whole."""
    import pytest

    from laws.test_rules_sound import ROWS, check

    names = shuffled(ROWS)[: 6 if asked.tiny else None]
    wrong, tried = {}, 0
    with EXACT, jax.default_device(accelerator()):
        for name in names:
            if not asked.goes_on():
                break
            tried += 1
            print(name, flush=True)  # for the log: a row may end the process
            try:
                check(ROWS[name], 1)
            except pytest.skip.Exception:
                pass  # not an operator of this JAX
            except Exception as error:
                wrong[name] = told(error)
    return {"tried": tried, "of": len(ROWS), "wrong": wrong}


def programs(asked: Asked) -> Found:
    """Programs of ``tests/families``: one device's and eight devices' on the accelerator against ``jax.jit`` on CPU."""
    from families import CASES

    names = shuffled(CASES)[: 2 if asked.tiny else None]
    rows, wrong, far = [], {}, {}
    on = accelerator()
    with EXACT:
        for name in names:
            if not asked.goes_on():
                break
            case = CASES[name]
            print(name, flush=True)
            try:
                with jax.default_device(jax.devices("cpu")[0]):
                    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*case.arguments))]
                one = jax.sharding.Mesh(np.array([on]).reshape([1] * len(case.mesh)), tuple(case.mesh))
                alone = jax.tree.leaves(gshard.jit(case.function, mesh=one)(*case.arguments))
                eight = gshard.core.mesh.Mesh.abstract(**case.mesh)
                with jax.default_device(on):
                    lowered = gshard.jit(case.function, mesh=eight).lower(*case.arguments)
                    many = device_after_device(lowered, jax.tree.leaves(case.arguments), expected)
                rows.append([name, difference(alone, expected), difference(many, expected)])
                if not max(rows[-1][1:]) < NEAR:
                    # Whether eight CPUs are as far off: an optimizer may divide by what is nearly zero.
                    with jax.default_device(jax.devices("cpu")[0]):
                        on_cpu = device_after_device(lowered, jax.tree.leaves(case.arguments), expected)
                    far[name] = f"{max(rows[-1][1:]):.1e}, eight CPU devices {difference(on_cpu, expected):.1e}"
            except Exception as error:
                wrong[name] = told(error)
    return {"tried": len(rows) + len(wrong), "of": len(CASES), "wrong": wrong, "far": far, "rows": rows, "near": NEAR}


@contextlib.contextmanager
def calls_of_partitioned_functions(kept: list[tuple[Any, Any, Any, Any]]) -> Iterator[None]:
    """Keeps the first call of each program that ``gshard.jit`` runs: function, arguments, and results."""
    real: Callable[..., Any] = Jitted.__call__
    known: set[Any] = set()

    def call(self: Jitted, /, *args: Any, **kwargs: Any) -> Any:
        key = id(self), str(jax.tree.map(lambda x: (np.shape(x), str(getattr(x, "dtype", x))), (args, kwargs)))
        keep = len(kept) < CALLS and key not in known and not any(_is_traced(x) for x in jax.tree.leaves(args))
        # Copied first: the call may be given their memory.
        before = jax.tree.map(_copied, (args, kwargs)) if keep else None
        results = real(self, *args, **kwargs)
        if keep:
            known.add(key)
            arrays = [_copied(x) for x in jax.tree.leaves(results) if hasattr(x, "shape")]
            kept.append((self, *before, arrays))  # type: ignore[misc]
        return results

    Jitted.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Jitted.__call__ = real  # type: ignore[method-assign]


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _copied(x: Any) -> Any:
    if is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(np.array(numbers(x))), impl=jax.random.key_impl(x))
    return np.array(x) if isinstance(x, jax.Array) else x


def example(asked: Asked) -> Found:
    """Runs an example on eight CPU devices, and each partitioned program that it calls on the accelerator, too."""
    (name,) = asked.arguments
    path = ROOT / "examples" / f"{name}.py"
    sys.argv = [str(path)]
    kept: list[tuple[Any, Any, Any, Any]] = []
    begin = time.monotonic()
    with EXACT, contextlib.redirect_stdout(io.StringIO()), calls_of_partitioned_functions(kept):
        runpy.run_path(str(path), run_name="__main__")
    ran, rows, left = time.monotonic() - begin, [], 0
    for jitted, args, kwargs, expected in kept:
        if rows and not asked.goes_on():
            left += 1
            continue
        with EXACT, jax.default_device(accelerator()):
            lowered = jitted.lower(*args, **kwargs)
            leaves = jitted._read(args, kwargs).leaves  # what is static left out
            found = device_after_device(lowered, leaves, expected)
        rows.append([jitted.__name__, lowered.mesh.size, difference(found, expected)])
    return {"seconds": ran, "programs": rows, "left": left, "near": NEAR}


if __name__ == "__main__":
    answer({"machine": machine, "laws": laws, "programs": programs, "example": example})
