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

GROUPS = 8


def kept_share(config: TransformerConfig, skew: float, groups: int, tokens: int) -> float:
    """The share of choices that reach their expert, of tokens that prefer some experts."""
    small = dataclasses.replace(config, model_dim=config.experts, hidden_dim=8)
    params = init_params(expert_specs(small), jax.random.key(0))
    params["wg"] = jnp.eye(config.experts)
    rng = np.random.default_rng(0)
    preferred = rng.normal(size=config.experts) * skew
    x = (rng.normal(size=(groups, tokens, config.experts)) + preferred).astype(np.float32)
    return float(jax.jit(lambda p, x: expert_layer(small, p, x)[1]["kept_share"])(params, x))


def gradients(config: TransformerConfig) -> Any:
    """The layer with its gradients."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(expert_layer(config, params, x)[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1))


def explained(config: TransformerConfig, x: Any, mesh: Any) -> gshard.stages.Explanation:
    return gshard.explain(gradients(config), shapes(expert_specs(config)), x, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("experts", 64), ("top-k", 6), ("model", 1024), ("hidden", 2048)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a group")
    parser.add_argument("--factor", type=float, default=1.25, help="slots or rows, of an even load")
    parser.add_argument("--machine", default="v5e:2x4", help="eight TPU cores")
    parser.add_argument("--data", type=int, default=1, help="replicas of the experts")
    options = parser.parse_args()
    base = TransformerConfig.decoder_only(
        9, 1, model_dim=options.model, hidden_dim=options.hidden, experts=options.experts, top_k=options.top_k,
        expert_axis="expert", replicas=options.data, data_axis="data", dtype="bfloat16", group_size=None,
        capacity_factor=options.factor * options.top_k,
    )  # fmt: skip
    devices = topologies.get_topology_desc(options.machine, platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(options.data, -1), ("data", "expert"))
    base = dataclasses.replace(base, partitions=mesh.size // options.data, groups=GROUPS)
    x = jax.ShapeDtypeStruct((GROUPS, options.tokens, options.model), "bfloat16")
    print(
        f"{GROUPS * options.tokens} tokens, M={options.model}, H={options.hidden}, E={options.experts}, "
        f"k={options.top_k}, {options.machine}, data={options.data} expert={mesh.size // options.data}, "
        f"jax {jax.__version__}"
    )
    print(f"{'':<26}{'MiB sent':>10}{'ms':>8}{'temporaries':>14}{'kept':>8}{'kept, uneven':>14}")
    rows = {
        "gather": {"dispatch": "gather"},
        "ragged_all_to_all": {"dispatch": "ragged_all_to_all"},
        "gather, all": {"dispatch": "gather", "capacity_factor": math.inf},
        "ragged_all_to_all, all": {"dispatch": "ragged_all_to_all", "capacity_factor": math.inf},
    }
    for name, change in rows.items():
        config = dataclasses.replace(base, **change)  # type: ignore[arg-type]
        lowered = gshard.jit(gradients(config), mesh=mesh).lower(shapes(expert_specs(config)), x)
        cost = explained(config, x, mesh).cost()
        sent = sum(c.total_bytes for c in lowered.spmd.collectives) / 2**20
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes / 2**20
        shares = [kept_share(config, skew, GROUPS, options.tokens) for skew in (0.0, 0.5)]
        print(
            f"{name:<26}{sent:>10.1f}{cost.seconds * 1e3:>8.2f}{temporaries:>10.0f} MiB"
            f"{shares[0]:>8.1%}{shares[1]:>14.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
