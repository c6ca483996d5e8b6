"""Claim: a fused attention kernel is split over batch and heads, forward and backward, and nothing is gathered.

JAX's flash attention for TPU (Pallas) is compiled by libtpu for a TPU that need not exist, with a loss and its
gradients: through ``gshard.kernel`` and ``gshard.jit``, and through ``jax.jit`` with the same shardings of arguments.
Beside both stands the attention in JAX operators that describes the kernel. There are no times: the compiler's estimate
leaves out what a Pallas kernel computes. Needs libtpu (``pip install libtpu``).

    python benchmarks/fused_attention.py [--length 4096] [--topology v5e:2x4]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import NamedSharding, PartitionSpec

import gshard
from gshard.xla.hlo_collectives import collectives


def plain(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [batch, head, position, feature]."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(q.shape[2])[:, None] >= jnp.arange(k.shape[2])
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)


def flash(q: Any, k: Any, v: Any) -> Any:
    """The same, as a Pallas kernel for TPU."""
    return flash_attention(q, k, v, causal=True)


def row(name: str, compiled: Callable[[], Any]) -> str:
    """What libtpu makes of one program."""
    try:
        made = compiled()
    except NotImplementedError as error:
        return f"{name:28} {str(error).splitlines()[0]}"
    text = made.as_text()
    sent = sum(c.total_bytes for c in collectives(text))
    temporaries = made.memory_analysis().temp_size_in_bytes / 2**20
    kernels = text.count('custom_call_target="tpu_custom_call"')
    return f"{name:28} {kernels:7} {sent:12,} B {temporaries:9.1f} MiB"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="positions")
    parser.add_argument("--topology", default="v5e:2x4", help="eight TPU cores")
    options = parser.parse_args()
    devices = topologies.get_topology_desc(options.topology, platform="tpu").devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))
    q = jax.ShapeDtypeStruct((8, 16, options.length, 128), jnp.bfloat16, sharding=split)

    def step(attention: Callable[..., Any]) -> Callable[..., Any]:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return jnp.mean(attention(q, k, v).astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1, 2))

    kernel = gshard.kernel(flash, like=plain, platforms="tpu")
    print(f"jax {jax.__version__}, {options.topology}, q, k, v: {q.dtype}{list(q.shape)}")
    print(f"{'':28} kernels         sent   temporaries")
    for name, attention in (("flash", kernel), ("plain", plain)):
        print(row(f"gshard.jit, {name}", gshard.jit(step(attention), mesh=mesh).lower(q, q, q).compile))
    for name, attention in (("flash", flash), ("plain", plain)):
        print(row(f"jax.jit, {name}", lambda f=attention: jax.jit(step(f)).lower(q, q, q).compile()))  # type: ignore[misc]


if __name__ == "__main__":
    main()
