"""Claim: with ``dispatch="ragged_all_to_all"`` devices send what is routed, and experts share one capacity.

One layer of experts with its gradients, tokens and experts split over eight TPU cores that need not exist, in each
dispatch that works on several devices. With ``--data 2`` there are two replicas of the experts, each on four cores. For
each dispatch: bytes that a device sends, the modelled time of a call, temporaries and collectives of the program that
libtpu compiles, and the share of choices that are kept where tokens choose unevenly (logits of a normal distribution
plus one of each expert, on CPU). Needs libtpu (``pip install libtpu``).

    python benchmarks/routed_experts.py [--experts 64] [--top-k 6] [--factor 1.25] [--machine v5e:2x4] [--data 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import gshard
from gshard.moe import TransformerConfig, expert_layer, expert_specs, init_params, shapes

GROUPS, TOKENS = 8, 1024


def kept_share(config: TransformerConfig, skew: float) -> float:
    """The share of choices that reach their expert, of tokens that prefer some experts."""
    small = dataclasses.replace(config, model_dim=config.experts, hidden_dim=8)
    params = init_params(expert_specs(small), jax.random.key(0))
    params["wg"] = jnp.eye(config.experts)
    rng = np.random.default_rng(0)
    preferred = rng.normal(size=config.experts) * skew
    x = (rng.normal(size=(GROUPS, TOKENS, config.experts)) + preferred).astype(np.float32)
    return float(jax.jit(lambda p, x: expert_layer(small, p, x)[1]["kept_share"])(params, x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("experts", 64), ("top-k", 6), ("model", 1024), ("hidden", 2048)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--factor", type=float, default=1.25, help="slots or rows, of an even load")
    parser.add_argument("--machine", default="v5e:2x4", help="eight TPU cores")
    parser.add_argument("--data", type=int, default=1, help="replicas of the experts")
    options = parser.parse_args()
    devices = topologies.get_topology_desc(options.machine, platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(options.data, -1), ("data", "expert"))
    base = TransformerConfig.decoder_only(
        9, 1, model_dim=options.model, hidden_dim=options.hidden, experts=options.experts, top_k=options.top_k,
        partitions=mesh.size // options.data, expert_axis="expert", replicas=options.data, data_axis="data",
        group_size=TOKENS, dtype="bfloat16", capacity_factor=options.factor * options.top_k,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((GROUPS, TOKENS, options.model), "bfloat16")
    print(
        f"{GROUPS * TOKENS} tokens, M={options.model}, H={options.hidden}, E={options.experts}, k={options.top_k}, "
        f"{options.machine}, data={options.data} expert={mesh.size // options.data}, jax {jax.__version__}"
    )
    print(f"{'':<26}{'MiB sent':>10}{'ms':>8}{'temporaries':>14}{'kept':>8}{'kept, uneven':>14}")
    rows = {
        "gather": {"dispatch": "gather"},
        "ragged_all_to_all": {"dispatch": "ragged_all_to_all"},
        "gather, all": {"dispatch": "gather", "capacity_factor": math.inf},
        "ragged, all": {"dispatch": "ragged"},
        "ragged_all_to_all, all": {"dispatch": "ragged_all_to_all", "capacity_factor": math.inf},
    }
    for name, change in rows.items():
        config = dataclasses.replace(base, **change)  # type: ignore[arg-type]

        def loss(params: Any, x: Any, config: TransformerConfig = config) -> Any:
            return jnp.sum(expert_layer(config, params, x)[0].astype(jnp.float32) ** 2)

        params = shapes(expert_specs(config))
        step = gshard.jit(jax.value_and_grad(loss, (0, 1)), mesh=mesh)
        lowered = step.lower(params, x)
        cost = gshard.explain(jax.value_and_grad(loss, (0, 1)), params, x, mesh=mesh).cost()
        sent = sum(c.total_bytes for c in lowered.spmd.collectives) / 2**20
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes / 2**20
        shares = [kept_share(config, skew) for skew in (0.0, 0.5)]
        print(
            f"{name:<26}{sent:>10.1f}{cost.seconds * 1e3:>8.2f}{temporaries:>10.0f} MiB"
            f"{shares[0]:>8.1%}{shares[1]:>14.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
