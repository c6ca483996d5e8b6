"""What is reported is what runs: the collectives of a plan, of the emitted program, and of the compiled one agree."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard import shard, split
from gshard.testing.rule_checks import emitted, reported
from gshard.xla import hlo_collectives
from harness import normal
from placed import in_every_way


def contraction(x, w):
    return shard(shard(x, P(None, "model")) @ shard(w, P("model", None)), P("data", None))


def recurrent(x, w):
    def step(carry, a):
        carry = jnp.tanh(shard(carry, P("data", "model")) @ a)
        return carry, carry.sum()

    return jax.lax.scan(step, x, w)


def carried(x, w):
    """What comes out of a round is moved to how the next one takes it."""

    def step(carry, a):
        return shard(jnp.tanh(shard(carry, P("data", "model")) * a), P("model", "data")), None

    return jax.lax.scan(step, x, w)[0]


def combined(x, w):
    """Every way to combine parts: those that no collective knows are gathered and folded, and say so."""
    x, n = split(x, 0, 8), split((x * 9).astype(jnp.int32), 0, 8)
    folded = jnp.prod(x, 0), jnp.bitwise_xor.reduce(n, 0), jnp.bitwise_and.reduce(n, 0), jnp.bitwise_or.reduce(n, 0)
    return *folded, jnp.any(x > w, 0), jnp.all(x < 2, 0), x.max(0), n.min(0), (n > 3).max(0)


PROGRAMS = [
    ("contraction", contraction, (normal(8, 16), normal(16, 8))),
    ("contraction, gradient", jax.grad(lambda x, w: (contraction(x, w) ** 2).sum(), 1), (normal(8, 16), normal(16, 8))),
    (
        "experts", lambda x, w: split(jnp.einsum("gsm,emh->gseh", split(x, 0, 8), split(w, 0, 8)), 2, 8),
        (normal(8, 4, 6), normal(8, 6, 5)),
    ),
    ("scan", recurrent, (normal(8, 8), normal(5, 8, 8))),
    ("scan, gradient", jax.grad(lambda x, w: recurrent(x, w)[0].sum(), 1), (normal(8, 8), normal(5, 8, 8))),
    ("carried", carried, (normal(8, 8), normal(5, 8, 8))),
    ("shifted", lambda x: jnp.roll(split(x, 0, 8), -3, 0) * split(x, 0, 8), (normal(24, 3),)),
    ("exchange", lambda x: split(jnp.sin(split(x, 0, 8)), 1, 8), (normal(16, 24),)),
    ("every monoid", combined, (normal(16, 3), normal(1, 3))),
    ("other axes", lambda x: shard(jnp.sin(shard(x, P("data", "model"))), P("model", "data")), (normal(8, 8),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function", "arguments"), PROGRAMS, ids=[p[0] for p in PROGRAMS])
@pytest.mark.one_in(3)
def test_bytes_by_kind(name, function, arguments, mesh_2x4):
    jitted = gshard.jit(function, mesh=mesh_2x4)
    lowered = jitted.lower(*arguments)
    said = reported(lowered.spmd.collectives)
    assert said, "a program that sends nothing shows nothing"
    assert emitted(lowered.spmd.jaxpr, lowered.mesh.atom_sizes) == said
    text = lowered.executable.compiled.as_text()
    compiled = {kind: n for kind, (_, n) in hlo_collectives.summary(hlo_collectives.collectives(text)).items()}
    # XLA may combine small collectives; it does not change what they send but for the rounding of each.
    assert compiled.keys() == said.keys()
    for kind, sent in said.items():
        assert abs(compiled[kind] - sent) <= len(lowered.spmd.collectives) * 8, kind
    wanted = jax.jit(function)(*arguments)
    for got in in_every_way(jitted, arguments, mesh_2x4):
        near(got, wanted, 1e-5, 1e-4)
