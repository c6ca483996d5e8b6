"""Claim: of two ways to mark a model, the one that `cost` prefers is the faster one in at least 90 % of measured pairs.

Nine models, products of several shapes and gradients of layers, are marked in four or five ways each for 8 virtual CPU
devices. Each way is compiled and run here, in turns; times are medians. A pair counts if the two times differ by more
than the noise: by `--least` (1.2 by default), and in the same direction in nine of ten turns. The machine is
measured at the start.

With `--searched` the plan that `gshard.search` finds for each model is one way more, and the search is told by itself:
of the pairs of that way and another whose modelled times differ by a tenth, in how many the faster one is predicted.

    python benchmarks/order.py [--turns 15] [--least 1.2] [--searched]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_timeout_seconds=600"
)

import jax
import jax.numpy as jnp
import numpy as np
from calibrate import calibrate
from jax.sharding import PartitionSpec as P

import gshard
from gshard.device.cost import cost
from gshard.device.machine import Machine

SEARCHED = "searched"
APART = 1.1  # modelled times that are nearer than that do not count

Marks = dict[str, P]
Model = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, Marks]]


def product(a: Any, b: Any) -> Any:
    return a @ b


def perceptron(x: Any, wi: Any, wo: Any) -> Any:
    return jnp.mean((x + jax.nn.relu(x @ wi) @ wo) ** 2)


def attention(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
    heads = [jnp.einsum("bsm,mhd->bshd", x, w) for w in (q, k, v)]
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", heads[0], heads[1]), -1)
    return jnp.mean(jnp.einsum("bhst,bthd,hdm->bsm", weights, heads[2], o) ** 2)


def loop(x: Any, ws: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def vocabulary(x: Any, w: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])


def experts(x: Any, wi: Any, wo: Any) -> Any:
    return jnp.mean(jnp.einsum("egh,ehm->egm", jax.nn.relu(jnp.einsum("egm,emh->egh", x, wi)), wo) ** 2)


ROWS, COLUMNS, WHOLE = P("d", None), P(None, "d"), P(None, None)
_PRODUCT = {"nothing": {}, "rows": {"a": ROWS}, "columns": {"b": COLUMNS}, "contracted": {"a": COLUMNS},
            "rows whole": {"a": ROWS, "result": WHOLE}}  # fmt: skip
_LAYERS = {
    "nothing": {},
    "data": {"x": ROWS},
    "model": {"wi": COLUMNS, "wo": ROWS},
    "weights": {"wi": ROWS, "wo": COLUMNS},
}

MODELS: dict[str, Model] = {
    "square product": (product, ((1024, 1024), (1024, 1024)), _PRODUCT),
    "flat product": (product, ((4096, 64), (64, 2048)), _PRODUCT),
    "deep product": (product, ((256, 8192), (8192, 256)), _PRODUCT),
    "perceptron, large batch": (jax.grad(perceptron, (1, 2)), ((8192, 128), (128, 512), (512, 128)), _LAYERS),
    "perceptron, large weights": (jax.grad(perceptron, (1, 2)), ((64, 1024), (1024, 4096), (4096, 1024)), _LAYERS),
    "attention": (
        jax.grad(attention, (1, 2, 3, 4)), ((32, 128, 128), *[(128, 8, 16)] * 3, (8, 16, 128)),
        {
            "nothing": {}, "data": {"x": P("d", None, None)}, "heads": {n: P(None, "d", None) for n in "qkv"},
            "sequence": {"x": P(None, "d", None)},
        },
    ),
    "loop": (
        jax.grad(loop, 1), ((2048, 256), (8, 256, 256)),
        {
            "nothing": {}, "data": {"x": ROWS}, "columns": {"ws": P(None, None, "d")},
            "layers": {"ws": P("d", None, None)},
        },
    ),
    "vocabulary": (
        jax.grad(vocabulary, (0, 1)), ((512, 128), (128, 8192)),
        {"nothing": {}, "data": {"x": ROWS}, "words": {"w": COLUMNS}, "contracted": {"x": COLUMNS}},
    ),
    "experts": (
        jax.grad(experts, (1, 2)), ((8, 512, 128), (8, 128, 512), (8, 512, 128)),
        {
            "nothing": {}, "experts": {"x": P("d", None, None)}, "groups": {"x": P(None, "d", None)},
            "hidden": {"wi": P(None, None, "d")},
        },
    ),
}  # fmt: skip


def marked(f: Callable[..., Any], marks: Marks, names: tuple[str, ...]) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        given = [gshard.shard(x, marks[n]) if n in marks else x for n, x in zip(names, arrays, strict=True)]
        out = f(*given)
        return gshard.shard(out, marks["result"]) if "result" in marks else out

    return run


class Way:
    """One way to mark a model: what it should take and what it takes."""

    def __init__(self, name: str, f: Callable[..., Any], shapes: Any, marks: Marks | None, machine: Machine):
        inner = getattr(f, "__wrapped__", f)
        names = inner.__code__.co_varnames[: inner.__code__.co_argcount]
        arrays = [np.random.default_rng(i).standard_normal(s).astype(np.float32) * 0.1 for i, s in enumerate(shapes)]
        mesh = jax.make_mesh((8,), ("d",))
        if marks is None:  # it is searched
            found = gshard.search(f, *arrays, mesh=mesh, machine=machine)
            lowered = gshard.jit(f, mesh=mesh, plan=found.plan).lower(*arrays)
        else:
            lowered = gshard.jit(marked(f, marks, names), mesh=mesh).lower(*arrays)
        self.name, self.modelled = name, cost(lowered.spmd, machine)
        self.compiled = lowered.executable.compiled
        self.arrays = [jax.device_put(x, s) for x, s in zip(arrays, lowered.argument_shardings, strict=True)]
        self.times: list[float] = []

    def run(self) -> None:
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arrays))
        self.times.append(time.perf_counter() - start)


def pairs(ways: list[Way], least: float) -> Iterator[tuple[Way, Way]]:
    """The pairs whose times differ, the faster one first."""
    for a, b in itertools.combinations(ways, 2):
        a, b = sorted((a, b), key=lambda way: statistics.median(way.times))
        ratio = statistics.median(b.times) / statistics.median(a.times)
        agreed = sum(x < y for x, y in zip(a.times, b.times, strict=True))
        if ratio >= least and agreed >= 0.9 * len(a.times):
            yield a, b


def against_searched(ways: list[Way]) -> Iterator[tuple[Way, float, float]]:
    """The ways whose modelled time is a tenth away from that of what was searched; modelled and measured ratio."""
    searched = {way.name: way for way in ways}.get(SEARCHED)
    for way in ways if searched is not None else ():
        modelled = searched.modelled.seconds / way.modelled.seconds
        if not 1 / APART < modelled < APART:
            yield way, modelled, statistics.median(a / b for a, b in zip(searched.times, way.times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--least", type=float, default=1.2, help="pairs that differ by less do not count")
    parser.add_argument("--searched", action="store_true", help="search a plan for each model as well")
    options = parser.parse_args()
    machine = calibrate()
    print(f"{machine}; jax {jax.__version__}")
    right = counted = 0
    signs: list[tuple[str, float, float]] = []
    for name, (f, shapes, marks) in MODELS.items():
        alternatives: dict[str, Marks | None] = {**marks, **({SEARCHED: None} if options.searched else {})}
        ways = [Way(way, f, shapes, given, machine) for way, given in alternatives.items()]
        for way in ways:
            way.run()
            way.run()
            way.times.clear()
        for _ in range(options.turns):
            for way in ways:
                way.run()
        signs += [(f"{name}, {way.name}", *ratios) for way, *ratios in against_searched(ways)]
        found = list(pairs(ways, options.least))
        good = [a.modelled.seconds < b.modelled.seconds for a, b in found]
        right, counted = right + sum(good), counted + len(good)
        print(f"\n{name}: {sum(good)} of {len(good)} pairs")
        for way in sorted(ways, key=lambda way: statistics.median(way.times)):
            by = ", ".join(f"{kind} {1e3 * s:.2f}" for kind, s in list(way.modelled.by_kind.items())[:4])
            print(f"  {way.name:12} measured {1e3 * statistics.median(way.times):8.2f} ms   modelled "
                  f"{1e3 * way.modelled.seconds:8.2f} ms   {by}")  # fmt: skip
        for (a, b), fine in zip(found, good, strict=True):
            if not fine:
                print(f"  wrong: {a.name} is faster than {b.name}")
    for name, modelled, taken in signs:
        wrong = "" if (modelled < 1) == (taken < 1) else "  WRONG"
        print(f"searched / {name:<42} modelled {modelled:6.2f}, measured {taken:6.2f}{wrong}")
    if signs:
        alike = sum((modelled < 1) == (taken < 1) for _, modelled, taken in signs)
        print(f"{alike} of {len(signs)} times what was searched is faster, or slower, as it was modelled")
    print(f"\n{right} of {counted} pairs: {100 * right / max(counted, 1):.0f} %   (target at least 90)")


if __name__ == "__main__":
    main()
