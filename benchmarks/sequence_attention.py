"""Claim: attention along a split sequence sends and holds parts of it, and gshard takes the cheapest of three ways.

choice      bytes and modelled time on H100s of what gshard chooses for split sequences, beside two ways that marks
            force: heads instead of the sequence (Ulysses), and gathered keys and values; results are
                split by sequence
compiled    eight TPU cores, compiled by libtpu: gshard.attention, a ring written by hand in jax.shard_map and
            differentiated by JAX, and jax.jit with the same shardings of arguments; needs libtpu

python benchmarks/sequence_attention.py [--devices 8 64 256] [--length 32768] [--topology v5e:2x4 | --topology none]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import gshard
from gshard.xla.hlo_collectives import collectives

MIB = 2**20
Attention = Callable[[Any, Any, Any], Any]


def causal(q: Any, k: Any, v: Any) -> Any:
    """The way that gshard chooses."""
    return gshard.attention(q, k, v, is_causal=True)


def by_heads(q: Any, k: Any, v: Any) -> Any:
    """Heads are split instead of the sequence; keys and values are gathered where they have fewer heads."""
    return gshard.split(causal(gshard.split(q, 2, "context"), k, v), 2, "context")


def gathered(q: Any, k: Any, v: Any) -> Any:
    """Every device holds all keys and values."""
    return causal(q, gshard.replicate(k), gshard.replicate(v))


def step(attention: Attention) -> Callable[..., Any]:
    """A loss and its gradients."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.mean(attention(q, k, v).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))


def shapes(length: int, heads: int, key_heads: int, sharding: Any = None) -> list[Any]:
    """Queries, keys and values of one sequence, in bfloat16, with 128 features."""
    sizes = (heads, key_heads, key_heads)
    return [jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16, sharding=sharding) for n in sizes]


def choices(devices: list[int], length: int) -> None:
    """Prints what gshard chooses on H100s, for sequences of a length for each device."""
    print(f"{length} positions for each device, forward and backward, H100s; MiB sent by a device and modelled ms")
    print(f"{'devices':>7} {'heads':>6} {'chosen':>22} {'by heads':>22} {'gathered':>22}   the collectives chosen")
    for count in devices:
        machine = f"h100:{-(-count // 8)}x{min(count, 8)}"
        for heads, key_heads in ((64, 64), (64, 8), (8, 8), (64, 1)):
            cells, kinds = [], ""
            for attention in (causal, by_heads, gathered):
                if attention is by_heads and heads % count:
                    cells.append("-")
                    continue

                def marked(q: Any, k: Any, v: Any, attention: Attention = attention) -> Any:
                    q, k, v = (gshard.split(x, 1, "context") for x in (q, k, v))
                    return gshard.split(attention(q, k, v), 1, "context")

                mesh, arrays = gshard.Mesh.abstract(context=count), shapes(length * count, heads, key_heads)
                found = gshard.explain(step(marked), *arrays, mesh=mesh, machine=machine)
                cells.append(f"{found.total_bytes / MIB:.1f} {found.cost().seconds * 1e3:.2f}")
                kinds = kinds or ", ".join(sorted(found.bytes_by_kind))
            print(
                f"{count:7} {f'{heads}/{key_heads}':>6}" + "".join(f"{x:>23}" for x in cells) + f"   {kinds}",
                flush=True,
            )


def ring_by_hand(mesh: Any) -> Attention:
    """Ring attention written by hand: a scan permutes keys and values, and the backward pass recomputes scores."""
    n = mesh.size

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(state: Any, q: Any, k: Any, v: Any, behind: Any) -> Any:
        out, most, total = state
        here, size = lax.axis_index("context"), q.shape[1]
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        rows, columns = here * size + jnp.arange(size)[:, None], (here - behind) % n * size + jnp.arange(size)
        scores = jnp.where(columns <= rows, scores, -1e30)
        larger = jnp.maximum(most, scores.max(-1))
        weights, old = jnp.exp(scores - larger[..., None]), jnp.exp(most - larger)
        sums = jnp.einsum("bhts,bshd->bhtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out * old[..., None] + sums, larger, total * old + weights.sum(-1)

    def local(q: Any, k: Any, v: Any) -> Any:
        batch, size, heads, features = q.shape
        state = (
            jnp.zeros((batch, heads, size, features)),
            jnp.full((batch, heads, size), -1e30),
            jnp.zeros((batch, heads, size)),
        )

        def visit(carry: Any, behind: Any) -> Any:
            state, k, v = carry
            state = block(state, q, k, v, behind)
            k, v = (lax.ppermute(x, "context", [(d, (d + 1) % n) for d in range(n)]) for x in (k, v))
            return (state, k, v), None

        ((out, _, total), _, _), _ = lax.scan(visit, (state, k, v), jnp.arange(n))
        return jnp.swapaxes(out / total[..., None], 1, 2).astype(q.dtype)

    spec = PartitionSpec(None, "context")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def compiled(topology: str, length: int) -> None:
    """Prints what libtpu makes of a sequence over eight cores."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(8), ("context",))
    arrays = shapes(length, 8, 2, NamedSharding(mesh, PartitionSpec(None, "context")))
    of_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    rows: dict[str, Callable[[], Any]] = {
        "gshard.attention": lambda: gshard.jit(step(causal), mesh=mesh).lower(*arrays).compile(),
        "the same, no Pallas kernels": lambda: gshard.jit(
            step(lambda q, k, v: gshard.attention(q, k, v, is_causal=True, implementation="blocks")), mesh=mesh
        ).lower(*arrays).compile(),
        "ring by hand": lambda: jax.jit(step(ring_by_hand(mesh))).lower(*arrays).compile(),
        "jax.jit": lambda: jax.jit(step(of_jax)).lower(*arrays).compile(),
    }  # fmt: skip
    print(f"\njax {jax.__version__}, {topology}, {length} positions, 8 query heads, 2 key heads, forward and backward")
    print(f"{'':28} {'kernels':>8} {'sent':>12} {'temporaries':>14} {'compiled in':>12}")
    for name, make in rows.items():
        start = time.process_time()
        try:
            made = make()
        except Exception as error:  # the program does not fit, which is a result
            print(f"{name:28} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        text = made.as_text()
        sent = sum(c.total_bytes for c in collectives(text)) / MIB
        held = made.memory_analysis().temp_size_in_bytes / MIB
        kernels, seconds = text.count('custom_call_target="tpu_custom_call"'), time.process_time() - start
        print(f"{name:28} {kernels:8} {sent:8.1f} MiB {held:10.1f} MiB {seconds:10.1f} s", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--length", type=int, default=32768, help="positions of the compiled programs")
    parser.add_argument("--topology", default="v5e:2x4", help="eight TPU cores; none for no compilation")
    options = parser.parse_args()
    choices(options.devices, 4096)
    if options.topology != "none":
        compiled(options.topology, options.length)


if __name__ == "__main__":
    main()
