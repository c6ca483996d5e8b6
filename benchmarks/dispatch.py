"""Claim: a call of ``gshard.jit`` costs the host at most 1.1 times a call of ``jax.jit`` where nothing has to move.

The program adds one to every leaf of a pytree of small arrays, so that the time of a call is what Python and the
runtime spend on handing arguments over. Both sides run the same function on the same placed arrays; a row is a number
of leaves, a number of virtual devices, and a way in which the arguments are placed:

    whole     by the user, with ``NamedSharding(mesh, P())``
    batch     by the user, with ``NamedSharding(mesh, P("data"))``
    state     by the function itself: its results are donated to the next call
    moved     by the user, with ``NamedSharding(mesh, P())``, though ``in_shardings=P("data")`` wants them otherwise, so
              that each call moves them. ``jax.jit`` refuses such arguments: its side calls ``jax.device_put`` first

Sides run in turns, a batch of calls each, after both have been called before; the order within a pair changes. ``host``
is the time until the last call of a batch has returned, ``all`` the time until its results are there, each a ratio of
pairs that ran next to each other, of which the median stands here. Microseconds are medians of a single call.

    python benchmarks/dispatch.py [--pairs 15] [--leaves 1 10 100 400] [--devices 1 8]
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

TARGET = 1.1  # of rows in which nothing moves
PLACEMENTS = {"whole": P(), "batch": P("data"), "state": P("data"), "moved": P()}
SECONDS = 0.03  # of one batch of calls
SHAPE = (16, 2)

Step = Callable[[Any], Any]


def step(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, tree)


def batch_of(f: Step, tree: Any, is_state: bool, calls: int) -> tuple[Any, float, float]:
    """Runs some calls: what a next batch begins with, seconds until all have returned, and until all are done."""
    gc.collect()
    jax.block_until_ready(tree)
    begin = time.perf_counter()
    if is_state:
        for _ in range(calls):
            tree = f(tree)
        returned = time.perf_counter()
        jax.block_until_ready(tree)
    else:
        for _ in range(calls):
            result = f(tree)
        returned = time.perf_counter()
        jax.block_until_ready(result)
    return tree, returned - begin, time.perf_counter() - begin


def measure(leaves: int, devices: int, placement: str, pairs: int) -> dict[str, float]:
    """Medians of pairs of batches, ours and JAX's in turns."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    sharding, is_state = NamedSharding(mesh, PLACEMENTS[placement]), placement == "state"
    donate = (0,) if is_state else ()
    if placement == "moved":
        there = NamedSharding(mesh, P("data"))
        by_jax = jax.jit(step, in_shardings=there)
        sides: dict[str, Step] = {
            "ours": gshard.jit(step, mesh=mesh, in_shardings=P("data")),
            "jax": lambda tree: by_jax(jax.device_put(tree, there)),
        }
    else:
        sides = {
            "ours": gshard.jit(step, mesh=mesh, donate_argnums=donate),
            "jax": jax.jit(step, donate_argnums=donate),
        }
    # Each side has arrays of its own: a donated one is gone.
    trees = {
        name: {f"leaf{i}": jax.device_put(jnp.full(SHAPE, i, jnp.float32), sharding) for i in range(leaves)}
        for name in sides
    }
    done = dict.fromkeys(sides, 0)
    for name, f in sides.items():  # a program for what was given, and for what comes back
        trees[name], _, _ = batch_of(f, trees[name], is_state, 3)
        done[name] += 3
    _, _, once = batch_of(sides["jax"], jax.tree.map(jnp.copy, trees["jax"]), is_state, 3)
    calls = max(2, int(3 * SECONDS / once))
    host: dict[str, list[float]] = {name: [] for name in sides}
    whole: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sorted(sides, reverse=pair % 2 == 1):
            trees[name], returned, finished = batch_of(sides[name], trees[name], is_state, calls)
            host[name].append(returned / calls)
            whole[name].append(finished / calls)
            done[name] += calls
    for name, tree in trees.items():
        assert float(tree["leaf0"][0, 0]) == (done[name] if is_state else 0), "a call was lost"
        assert is_state or float(sides[name](tree)["leaf0"][0, 0]) == 1
    return {
        "jax": statistics.median(host["jax"]),
        "ours": statistics.median(host["ours"]),
        "host": ratio(host["ours"], host["jax"]),
        "all": ratio(whole["ours"], whole["jax"]),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="batches of calls of each side")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 10, 100, 400])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    print(f"{'devices':>7}{'leaves':>8}  {'placed':<8}{'jax µs':>10}{'ours µs':>10}{'host':>8}{'all':>8}")
    ratios: list[float] = []
    for devices in options.devices:
        for leaves in options.leaves:
            for placement in PLACEMENTS:
                found = measure(leaves, devices, placement, options.pairs)
                if placement != "moved":
                    ratios.append(found["host"])
                above = placement != "moved" and found["host"] > TARGET
                print(
                    f"{devices:>7}{leaves:>8}  {placement:<8}{found['jax'] * 1e6:>10.0f}{found['ours'] * 1e6:>10.0f}"
                    f"{found['host']:>8.2f}{found['all']:>8.2f}{'  above' if above else ''}",
                    flush=True,
                )
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"\nwhere nothing moves: geometric mean of host ratios {mean:.2f}, worst {max(ratios):.2f} (target {TARGET})")
    print(f"rows above the target: {sum(r > TARGET for r in ratios)} of {len(ratios)}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
