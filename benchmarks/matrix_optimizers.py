"""Claim: an optimizer with a function of each weight matrix costs what it costs on a stack of these matrices.

The update of Muon (five Newton-Schulz iterations) of N separate square matrices, whose weights, momenta and gradients
are split by rows over eight devices, as FSDP does. Beside it the same for one stack of the matrices, written by hand,
and both as XLA partitions them (``jax.jit``, the same shardings). Compiled for eight CPU devices, or for eight TPU
cores that need not exist (``--machine v5e:2x4``; needs ``pip install libtpu``). For each: bytes that a device sends,
operations of a device, modelled time, temporaries of the compiled program, collectives, and processor time of tracing,
planning and compiling.

    python benchmarks/matrix_optimizers.py [--matrices 16] [--size 1024] [--dtype float32] [--machine h100:1x8]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard


def orthogonal(x: jax.Array) -> jax.Array:
    """Muon's approximation of U V' of a matrix U S V' (Jordan et al., 2024)."""
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


def update(weights: Any, momenta: Any, gradients: Any, function: Any = orthogonal) -> Any:
    """New weights and momenta."""
    momenta = jax.tree.map(lambda m, g: 0.95 * m + g, momenta, gradients)
    return jax.tree.map(lambda w, m: w - 0.02 * function(m), weights, momenta), momenta


def stacked(weights: Any, momenta: Any, gradients: Any) -> Any:
    """The same for one array of all matrices."""
    return update(weights, momenta, gradients, jax.vmap(orthogonal))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--machine", default="h100:1x8", help="the machine of the modelled time, of eight devices")
    options = parser.parse_args()
    devices = jax.devices()
    if options.machine.startswith("v"):
        devices = topologies.get_topology_desc(options.machine, platform="tpu").devices
    mesh = Mesh(np.array(devices[:8]).reshape(-1), ("data",))
    count, size = options.matrices, options.size
    separate = [jax.ShapeDtypeStruct((size, size), options.dtype)] * count
    stack = jax.ShapeDtypeStruct((count, size, size), options.dtype)
    cases: tuple[tuple[str, Any, Any, P], ...] = (
        ("separate", update, separate, P("data")), ("stack", stacked, stack, P(None, "data")),
    )  # fmt: skip
    print(
        f"{count} matrices {options.dtype}[{size},{size}], compiled for {devices[0].device_kind}, "
        f"modelled {options.machine}, jax {jax.__version__}"
    )
    print(f"{'':<18}{'MiB sent':>10}{'GFLOP':>8}{'ms':>9}{'temporaries':>14}{'CPU s':>8}  collectives")
    for name, f, one, spec in cases:
        placed = jax.tree.map(lambda x, spec=spec: x.update(sharding=NamedSharding(mesh, spec)), one)
        arguments = (placed,) * 3
        shardings = jax.tree.map(lambda x: x.sharding, (placed, placed))
        for partitioner in ("gshard", "XLA"):
            start = time.process_time()
            if partitioner == "gshard":
                jitted: Any = gshard.jit(
                    f, mesh=mesh, machine=options.machine, donate_argnums=(0, 1), out_shardings=shardings
                )
            else:
                jitted = jax.jit(f, donate_argnums=(0, 1), out_shardings=shardings)
            lowered = jitted.lower(*arguments)
            compiled = lowered.compile()
            seconds = time.process_time() - start
            memory = compiled.memory_analysis()
            ours = partitioner == "gshard"
            found: Any = gshard.explain(lowered) if ours else gshard.explain(compiled, machine=options.machine)
            cost = found.cost()
            print(
                f"{name + ', ' + partitioner:<18}{cost.sent / 2**20:>10.1f}{cost.flops / 1e9:>8.1f}"
                f"{cost.seconds * 1e3:>9.3f}{memory.temp_size_in_bytes / 2**20:>10.1f} MiB{seconds:>8.1f}"
                f"  {', '.join(f'{kind} {n / 2**20:.1f}' for kind, n in found.bytes_by_kind.items())}",
                flush=True,
            )


if __name__ == "__main__":
    main()
