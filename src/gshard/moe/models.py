"""Models by name: those of the paper's Table 1, and decoders by the names of their model cards.

Sizes are those of the publishers' configurations: ``MODELS["Mixtral-8x7B"].experts`` is 8. ``DeepSeek-V3-like`` has
grouped queries in place of latent attention. Derive smaller ones with ``dataclasses.replace``.
"""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType

from gshard.moe.config import TABLE_1, TransformerConfig

_decoder = functools.partial(TransformerConfig.decoder_only, head_dim=128, group_size=4096, dtype="bfloat16")

# Jiang et al. 2024, "Mixtral of Experts": 46.7e9 weights, 12.9e9 of them for a token.
_MIXTRAL = _decoder(
    32_000,
    32,
    model_dim=4096,
    hidden_dim=14_336,
    heads=32,
    kv_heads=8,
    experts=8,
    top_k=2,
    capacity_factor=2.5,
    aux_weight=0.02,
    rotary_base=1e6,
)

DECODERS = MappingProxyType(
    {
        "Mixtral-8x7B": _MIXTRAL,
        # The same authors, 2024: 141e9 weights, 39e9 of them for a token.
        "Mixtral-8x22B": dataclasses.replace(
            _MIXTRAL, decoder_layers=56, model_dim=6144, hidden_dim=16_384, heads=48, aux_weight=0.001
        ),
        # Dai et al. 2024, "DeepSeekMoE": 16.4e9 weights, 2.8e9 of them for a token.
        "DeepSeekMoE-16B": _decoder(
            102_400,
            28,
            model_dim=2048,
            hidden_dim=1408,
            heads=16,
            experts=64,
            top_k=6,
            shared_experts=2,
            dense_first=1,
            dense_hidden_dim=10_944,
            normalise_gates=False,
            capacity_factor=7.5,
            aux_weight=0.001,
        ),
        # DeepSeek-AI 2024, "DeepSeek-V3": 671e9 weights, 37e9 of them for a token. Ours has 4e9 more, because eight
        # heads of keys and values stand in for the latent attention. Routing by groups of experts is left out.
        "DeepSeek-V3-like": _decoder(
            129_280,
            61,
            model_dim=7168,
            hidden_dim=2048,
            heads=128,
            kv_heads=8,
            experts=256,
            top_k=8,
            shared_experts=1,
            dense_first=3,
            dense_hidden_dim=18_432,
            gates="sigmoid",
            gate_scale=2.5,
            balance="bias",
            capacity_factor=10.0,
        ),
    }
)

MODELS = MappingProxyType({**TABLE_1, **DECODERS})
