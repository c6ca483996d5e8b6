"""What is reported is what runs: the collectives of a plan, of the emitted program, and of the compiled one agree."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near_largest
from families import CASES, SMALL
from families.case import GRID, Case
from gshard import shard, split
from gshard.testing.rule_checks import emitted, reported
from gshard.xla import hlo_collectives
from placed import in_every_way
from sampled import sampled


def carried(x, w):
    """What comes out of a round is moved to how the next one takes it."""

    def step(carry, a):
        return shard(jnp.tanh(shard(carry, P("x", "y")) * a), P("y", "x")), None

    return jax.lax.scan(step, x, w)[0]


def combined(x, w):
    """Every way to combine parts: those that no collective knows are gathered and folded, and say so."""
    x, n = split(x, 0, 8), split((x * 9).astype(jnp.int32), 0, 8)
    folded = jnp.prod(x, 0), jnp.bitwise_xor.reduce(n, 0), jnp.bitwise_and.reduce(n, 0), jnp.bitwise_or.reduce(n, 0)
    return *folded, jnp.any(x > w, 0), jnp.all(x < 2, 0), x.max(0), n.min(0), (n > 3).max(0)


OWN = [
    Case("own/carried", GRID, carried, ((8, 8), (5, 8, 8))), Case("own/every monoid", GRID, combined, ((16, 3), (1, 3)))
]  # fmt: skip
PROGRAMS = {**CASES, **SMALL, **{case.name: case for case in OWN}}
FAST = sampled(PROGRAMS, lambda name: name.partition("/")[0], lambda name: 60, "compiled") | {case.name for case in OWN}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_bytes_by_kind(name):
    """Every operator has a rule, and sampled programs run with arguments in all places."""
    case = PROGRAMS[name]
    jitted = gshard.jit(case.function, mesh=case.jax_mesh, strict=True)
    lowered = jitted.lower(*case.arguments)
    said = reported(lowered.spmd.collectives)
    assert emitted(lowered.spmd.jaxpr, lowered.mesh.atom_sizes) == said
    text = lowered.executable.compiled.as_text()
    compiled = {kind: n for kind, (_, n) in hlo_collectives.summary(hlo_collectives.collectives(text)).items()}
    # XLA may combine small collectives; it does not change what they send but for the rounding of each.
    assert compiled.keys() == said.keys()
    for kind, sent in said.items():
        assert abs(compiled[kind] - sent) <= len(lowered.spmd.collectives) * 8, kind
    wanted = jax.jit(case.function)(*case.arguments)
    for got in in_every_way(jitted, case.arguments, case.jax_mesh) if name in FAST else ():
        near_largest(got, wanted, 1e-3)  # normalization by a small variance enlarges what is rounded
