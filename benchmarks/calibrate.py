"""Calibrate: measures products, memory and collectives of virtual CPU devices, for a machine like them.

Each figure is the best of some runs, with all devices at work. They become one switch whose latency and bandwidth give
the two measured times of an all-to-all.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gshard.core.mesh import Mesh
from gshard.device.machine import SWITCH, Dimension, Machine

_RUNS = 5


def calibrate(devices: Sequence[Any] | None = None, *, side: int = 1024, elements: int = 1 << 24) -> Machine:
    """Measures the devices; takes some seconds."""
    devices = tuple(jax.devices() if devices is None else devices)
    mesh = Mesh.of(devices)
    rates = {
        name: 2 * side**3 / _best(_everywhere(mesh, lambda a: a @ a, (side, side), dtype))
        for name, dtype in _DTYPES.items()
    }
    copied = _best(_everywhere(mesh, lambda x: x + 1.0, (elements,)))
    # Small enough for a cache, with many operations an element: arithmetic, not memory.
    vector = 16 * _FEW / _best(_everywhere(mesh, lambda x: _polynomial(x, 8), (_FEW,)))
    return dataclasses.replace(
        Machine.of("cpu", len(devices)), name=f"{len(devices)} measured CPU devices", flops=rates, vector_flops=vector,
        memory_bandwidth=2 * 4 * elements / copied, network=(_network(mesh, elements),),
    )  # fmt: skip


_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


_FEW = 1 << 16


def _everywhere(
    mesh: Mesh, f: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any = jnp.float32
) -> Callable[[], Any]:
    """Runs ``f`` on an array of ones of this shape on every device at once."""
    parts = PartitionSpec(mesh.atoms, *(None,) * (len(shape) - 1))
    run = jax.shard_map(f, mesh=mesh.jax_mesh, in_specs=parts, out_specs=parts, check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh.jax_mesh, parts)
    whole = (shape[0] * mesh.size, *shape[1:])
    return _ready(jax.jit(run), jax.jit(lambda: jnp.ones(whole, dtype), out_shardings=sharding)())


def _polynomial(x: Any, terms: int) -> Any:
    for _ in range(terms):
        x = x * x + 0.5
    return x


def _network(mesh: Mesh, elements: int) -> Dimension:
    """Two sizes of an all-to-all give latency and bandwidth."""
    n = mesh.size
    if n == 1:
        return Dimension(1, SWITCH, 1e12, 0.0)
    sizes = [max(count // n, 1) * n for count in (n, elements // 16)]
    exchange = functools.partial(jax.lax.all_to_all, axis_name=mesh.atoms, split_axis=0, concat_axis=0, tiled=True)
    times = [_best(_everywhere(mesh, exchange, (count,))) for count in sizes]
    sent = 4 * sizes[1] * (n - 1) / n
    return Dimension(n, SWITCH, sent / max(times[1] - times[0], 1e-9), times[0])


def _ready(f: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(f(*args))


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, the first left out."""
    run()
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
