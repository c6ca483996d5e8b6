"""What is reported is what runs: the collectives of a plan, of the emitted program, and of the compiled one agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard, split
from gshard.analysis import hlo


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def contraction(x: Any, w: Any) -> Any:
    return shard(shard(x, P(None, "model")) @ shard(w, P("model", None)), P("data", None))


def to_experts(x: Any, w: Any) -> Any:
    tokens = split(x, 0, 8)
    return split(jnp.einsum("gsm,emh->gseh", tokens, split(w, 0, 8)), 2, 8)


def recurrent(x: Any, w: Any) -> Any:
    def step(carry: Any, a: Any) -> Any:
        carry = jnp.tanh(shard(carry, P("data", "model")) @ a)
        return carry, carry.sum()

    return jax.lax.scan(step, x, w)


def shifted(x: Any) -> Any:
    x = split(x, 0, 8)
    return jnp.concatenate([x[3:], x[:3]]) * x


def exchange(x: Any) -> Any:
    return split(jnp.sin(split(x, 0, 8)), 1, 8)


def moved(x: Any) -> Any:
    return shard(jnp.sin(shard(x, P("data", "model"))), P("model", "data"))


PROGRAMS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("contraction", contraction, (normal(8, 16), normal(16, 8))),
    ("contraction, gradient", jax.grad(lambda x, w: (contraction(x, w) ** 2).sum(), 1), (normal(8, 16), normal(16, 8))),
    ("experts", to_experts, (normal(8, 4, 6), normal(8, 6, 5))),
    ("scan", recurrent, (normal(8, 8), normal(5, 8, 8))),
    ("scan, gradient", jax.grad(lambda x, w: recurrent(x, w)[0].sum(), 1), (normal(8, 8), normal(5, 8, 8))),
    ("shifted", shifted, (normal(24, 3),)),
    ("exchange", exchange, (normal(16, 24),)),
    ("other axes", moved, (normal(8, 8),)),
]


@pytest.mark.parametrize(("name", "function", "arguments"), PROGRAMS, ids=[p[0] for p in PROGRAMS])
def test_bytes_by_kind(name: str, function: Any, arguments: Any, mesh_2x4: jax.sharding.Mesh) -> None:
    lowered = gshard.jit(function, mesh=mesh_2x4).lower(*arguments)
    reported: Counter[str] = Counter()
    for c in lowered.spmd.collectives:
        reported[c.kind] += c.total_bytes
    assert reported, "a program that sends nothing shows nothing"
    compiled = {kind: n for kind, (_, n) in hlo.summary(hlo.collectives(lowered.executable.compiled.as_text())).items()}
    # XLA may combine small collectives; it does not change what they send but for the rounding of each.
    assert compiled.keys() == reported.keys()
    for kind, sent in reported.items():
        assert abs(compiled[kind] - sent) <= len(lowered.spmd.collectives) * 8, kind
