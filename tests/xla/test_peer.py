"""The peer: the same numbers under XLA's own partitioner, and what an expert's constraints spare it."""

import sys
from pathlib import Path

import jax
import numpy as np

import gshard
from gshard.emit.compile import named_sharding
from gshard.moe.config import TransformerConfig
from gshard.moe.experts import expert_layer, expert_specs
from gshard.moe.param import init_params
from gshard.xla import hlo_collectives

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from paper_against_xla import of_both_sides
from peer import xla_function

CONFIG = TransformerConfig(32, 24, model_dim=16, hidden_dim=32, heads=2, head_dim=8, encoder_layers=2,
    decoder_layers=2, experts=8, group_size=None, partitions=8, remat="branches")  # fmt: skip


def gradient(params, x_BLM):
    def loss(params, x_BLM):
        outputs_BLM, metrics = expert_layer(CONFIG, params, x_BLM)
        return (outputs_BLM**2).sum() + metrics["aux_loss"]

    return jax.grad(loss, argnums=(0, 1))(params, x_BLM)


def test_an_expert_says_both_sides_of_each_all_to_all(rng):
    """From the same plan: the same numbers, and fewer bytes than from marks alone, which XLA gathers for."""
    params = init_params(expert_specs(CONFIG), jax.random.key(0))
    args = params, rng.standard_normal((16, 8, 16)).astype(np.float32)
    lowered = gshard.jit(gradient, mesh=jax.make_mesh((4, 2), ("a", "b"))).lower(*args)
    flat = [*lowered.program.captured, *jax.tree.leaves(args)]
    where = [named_sharding(lowered.mesh, s) for s in lowered.spmd.in_shardings]
    want = jax.tree.leaves(jax.jit(gradient)(*args))
    sent = {}
    of_marks = xla_function(lowered.program, lowered.mesh)
    for name, f in (("marks", of_marks), ("expert", of_both_sides(lowered.program, lowered.mesh, lowered.plan))):
        made = jax.jit(f, in_shardings=where).lower(*flat).compile()
        sent[name] = hlo_collectives.summary(hlo_collectives.collectives(made.as_text()))
        found = made(*(jax.device_put(x, s) for x, s in zip(flat, where, strict=True)))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert "all_gather" not in sent["expert"]
    assert "all_to_all" in sent["expert"]
    total = {name: sum(size for _, size in kinds.values()) for name, kinds in sent.items()}
    assert total["expert"] < total["marks"]
