"""What routing costs: each dispatch of the MoE layer beside a dense layer that does the same products.

A token that visits k experts of H hidden units takes the products of a dense layer of k * H, whatever E. What is above
the dense layer is routing, moving rows, empty slots, and products that a form makes for nothing. Rows: the dense layer,
``einsum`` and ``gather`` with slots for 1.25 times an even load (they drop tokens), ``gather`` with slots for all,
``blocks``, which drops nothing, and ``ragged_all_to_all`` with room for 1.25 times an even load and for
all.

Columns: FLOPs a token that XLA counts in the compiled program (a scan's body counts once there, so ``blocks`` has none;
with its rounds it comes to about k * R/(R-1) of the dense layer's), bytes of temporaries a token, microseconds a token,
and the time as a ratio to the dense layer: medians of pairs that ran in turns. On CPU ``ragged_dot`` multiplies every
row with every expert; where there is a kernel for it, it does not.

    python benchmarks/routing.py [--tokens 2048] [--model 256] [--hidden 512] [--experts 8] [--top-k 2] [--pairs 7]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe import TransformerConfig, expert_layer, expert_specs, init_params

Layer = Callable[[Any, jax.Array], jax.Array]
ROWS = {
    "einsum, 1.25": {"dispatch": "einsum", "capacity_factor": 1.25},
    "gather, 1.25": {"dispatch": "gather", "capacity_factor": 1.25},
    "gather, all": {"dispatch": "gather", "capacity_factor": math.inf},
    "blocks": {"dispatch": "blocks"},
    "all-to-all, 1.25": {"dispatch": "ragged_all_to_all", "capacity_factor": 1.25},
    "all-to-all, all": {"dispatch": "ragged_all_to_all", "capacity_factor": math.inf},
}


def dense(params: dict[str, jax.Array], x_BLM: jax.Array) -> jax.Array:
    """A SwiGLU layer with the products of all experts of a token."""
    return (jax.nn.silu(x_BLM @ params["wi_gate"]) * (x_BLM @ params["wi"])) @ params["wo"]


def with_gradients(layer: Layer) -> Layer:
    return jax.grad(lambda params, x_BLM: jnp.sum(jnp.sin(layer(params, x_BLM))), argnums=(0, 1))


def layers(options: argparse.Namespace) -> dict[str, tuple[Layer, Any]]:
    """The function of each row, and its parameters."""
    M, H, k = options.model, options.hidden, options.top_k
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = {"wi": (M, k * H), "wi_gate": (M, k * H), "wo": (k * H, M)}
    weights = {n: jax.random.normal(key, s) / s[0] ** 0.5 for key, (n, s) in zip(keys, shapes.items(), strict=True)}
    base = TransformerConfig.decoder_only(
        9, 1, model_dim=M, hidden_dim=H, experts=options.experts, top_k=k, normalise_gates=k > 1,
        group_size=min(options.tokens, 1024),
    )  # fmt: skip
    experts = init_params(expert_specs(base), jax.random.key(0))
    found: dict[str, tuple[Layer, Any]] = {"dense": (dense, weights)}
    for name, change in ROWS.items():
        factor = change.get("capacity_factor", math.inf)
        config = dataclasses.replace(base, **(change | {"capacity_factor": k * factor}))
        found[name] = (lambda params, x_BLM, config=config: expert_layer(config, params, x_BLM)[0]), experts
    return found


def seconds(run: Any, arguments: tuple[Any, ...]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - begin


def measure(rows: dict[str, tuple[Layer, Any]], x_BLM: jax.Array, pairs: int) -> None:
    """Compiles, checks that dispatches which drop nothing agree, runs in turns and prints."""
    made = {name: jax.jit(f).lower(params, x_BLM).compile() for name, (f, params) in rows.items()}
    taken: dict[str, list[float]] = {name: [] for name in made}
    for pair in range(pairs + 1):
        for name in sorted(made, reverse=pair % 2 == 1):
            spent = seconds(made[name], (rows[name][1], x_BLM))
            if pair:  # the first round warms up
                taken[name].append(spent)
    tokens = x_BLM.shape[0] * x_BLM.shape[1]
    for name, run in made.items():
        flops = "-" if name == "blocks" else f"{run.cost_analysis()['flops'] / tokens / 1e6:.2f}"
        temporaries = run.memory_analysis().temp_size_in_bytes / tokens
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken["dense"], strict=True))
        microseconds = statistics.median(taken[name]) / tokens * 1e6
        print(f"  {name:<18}{flops:>12}{temporaries:>14,.0f}{microseconds:>14.2f}{ratio:>10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("tokens", 2048), ("model", 256), ("hidden", 512), ("experts", 8), ("top-k", 2), ("pairs", 7)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    rows = layers(options)
    x_BLM = jax.random.normal(jax.random.key(2), (1, options.tokens, options.model))
    with jax.default_matmul_precision("highest"):  # on a GPU the default is TF32
        dropless = ("gather, all", "blocks", "all-to-all, all")
        full = [f(params, x_BLM) for name, (f, params) in rows.items() if name in dropless]
    assert all(jnp.allclose(full[0], other, rtol=1e-3, atol=1e-4) for other in full[1:]), "dropless forms disagree"
    print(f"{options.tokens} tokens, M={options.model}, H={options.hidden}, E={options.experts}, k={options.top_k}, "
          f"{jax.devices()[0].device_kind}, jax {jax.__version__}")  # fmt: skip
    for what, change in (("forward", lambda f: f), ("forward and backward", with_gradients)):
        print(f"\n{what:<20}{'MFLOP/token':>12}{'B/token':>14}{'us/token':>14}{'dense':>10}")
        measure({name: (change(f), params) for name, (f, params) in rows.items()}, x_BLM, options.pairs)


if __name__ == "__main__":
    main()
