"""Pipeline parallelism (GPipe) without a word of its own: stages are a dimension, and dimensions can be split.

The weights of all stages are stacked, the stack is split over devices, and ``state[i]`` is what stage i works on.
In each round all stages work at once (``vmap``), then everyone hands its result to the next: a shift along a dimension
that is split, which is one CollectivePermute.

    python examples/pipeline.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard

STAGES, MICRO_BATCHES, B, M = 8, 24, 4, 64


def stage(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def in_turn(params, x):
    """The model: one stage after the other, for every micro-batch."""
    return jax.lax.scan(lambda x, p: (stage(p, x), None), x, params)[0]


def pipeline(params, x):
    """The same numbers; ``x``: micro-batches, examples, units."""
    params = gshard.split(params, 0, STAGES)
    # Micro-batch i is in stage s in round i + s; what enters after the last one is nobody's.
    entering = jnp.concatenate([x, jnp.zeros((STAGES - 1, B, M))])

    def turn(state, new):
        handed_on = jnp.concatenate([new[None], state[:-1]])
        state = gshard.split(jax.vmap(stage)(params, handed_on), 0, STAGES)
        return state, state  # all of it, where it lies: to take the last stage's here would send it every round

    _, made = jax.lax.scan(turn, jnp.zeros((STAGES, B, M)), entering)
    return made[STAGES - 1 :, -1]


keys = jax.random.split(jax.random.key(0), 3)
params = {"w": jax.random.normal(keys[0], (STAGES, M, M)) / 8, "b": jax.random.normal(keys[1], (STAGES, M))}
x = jax.random.normal(keys[2], (MICRO_BATCHES, B, M))

on_eight = gshard.jit(pipeline, mesh=STAGES)
assert jnp.allclose(on_eight(params, x), jax.jit(in_turn)(params, x), atol=1e-4)
told = gshard.explain(on_eight, params, x)
print(told)

rounds = MICRO_BATCHES + STAGES - 1
in_the_loop = [row for row in told.collectives if row.times == rounds]
handed_on = ("collective_permute", rounds * 4 * B * M)
assert [(row.kind, row.bytes) for row in in_the_loop] == [handed_on], "one micro-batch a round"
assert sum(row.times for row in told.collectives) - rounds <= 2, "after the loop, the last stage's part is handed out"
idle = rounds * STAGES - MICRO_BATCHES * STAGES
assert idle / (rounds * STAGES) == (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
print(f"\n{rounds} rounds of {STAGES} stages, {idle} of {rounds * STAGES} turns idle: {idle / (rounds * STAGES):.0%}")


def loss(f):
    return lambda params, x: jnp.square(f(params, x)).mean()


gradient = gshard.jit(jax.grad(loss(pipeline)), mesh=STAGES)
expected = jax.jit(jax.grad(loss(in_turn)))(params, x)
for ours, theirs in zip(jax.tree.leaves(gradient(params, x)), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(ours, theirs, atol=1e-4)
backward = gshard.explain(gradient, params, x)
print(f"\nwith the backward pass\n{backward}")
