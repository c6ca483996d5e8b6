"""Loops that fetch ahead: the same bits and bytes, the gather beside a product, and only where that is faster."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from device.models import f32
from gshard.device.cost import cost
from gshard.device.fusion_model import device_program
from gshard.device.machine import Machine
from gshard.remat.prefetch import prefetched
from gshard.testing.rule_checks import emitted, reported

# Products take long enough to hide what is gathered.
SLOW = dataclasses.replace(
    Machine.of("v5e:2x4"), flops={dtype: 1e11 for dtype in Machine.of("v5e:2x4").flops}, launch=1e-8
)


def layer(x, w):
    """Weights are split where they are stored, tokens everywhere."""
    return gshard.split(jnp.tanh(x @ gshard.split(w, 0, 8)), 0, 8)


def pairs(x, ws, *, reverse=False, unroll=1):
    """Two layers a round; what each round begins with is kept."""

    def body(x, ws):
        return layer(layer(x, ws[0]), ws[1]), (x, jnp.float32(3))

    return jax.lax.scan(body, gshard.split(x, 0, 8), ws, reverse=reverse, unroll=unroll)


def single(x, ws):
    """One product a round, which reads what was gathered for it."""
    return jax.lax.scan(lambda x, w: (layer(x, w), None), gshard.split(x, 0, 8), ws[0])[0]


def nested(x, ws):
    """A loop of micro-batches around it."""
    return jax.lax.map(lambda x: pairs(x, ws)[0], jnp.stack([x, -x, x * x]))


def gradient(x, ws, again=True):
    """Of layers that are computed again."""

    def loss(ws):
        two = lambda x, ws: (layer(layer(x, ws[0]), ws[1]), None)  # noqa: E731
        two = jax.checkpoint(two) if again else two
        return jnp.mean(jax.lax.scan(two, gshard.split(x, 0, 8), ws)[0] ** 2)

    return jax.value_and_grad(loss)(ws)


CASES = {"forwards": pairs, "one product": single, "in a loop": nested, "gradient": gradient}
CASES = {"forwards": pairs, "one product": single, "in a loop": nested, "gradient": gradient}
ARGUMENTS = f32(256, 128), (f32(5, 128, 128), f32(5, 128, 128))


def lowered(f, machine=SLOW):
    return gshard.jit(f, mesh=8, machine=machine, collective_matmul=False).lower(*ARGUMENTS)


on_slow = functools.cache(lowered)  # several tests read the plan of one program


def waited(found):
    return sum(k.total_seconds for k in found.kernels if k.name == "all_gather")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_the_same_bits_and_bytes_in_less_time(name, rng):
    made = on_slow(CASES[name])
    kept, ahead = made._all_kept, made.spmd
    before, after = cost(kept, SLOW), cost(ahead, SLOW)
    assert ahead.prefetched is not None
    assert after.seconds == ahead.prefetched.seconds < ahead.prefetched.without == before.seconds
    assert waited(after) < waited(before)
    assert emitted(ahead.jaxpr, made.mesh.atom_sizes) == reported(ahead.collectives)
    loops = 3 if name == "in a loop" else 1  # one gather more for each run of a loop
    assert after.sent == before.sent + loops * 16 * 128 * 7 * 4
    assert sum(c.total_bytes for c in ahead.collectives) == after.sent
    arrays = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(s.dtype) / 8, ARGUMENTS)
    plain = lowered(CASES[name], None)
    for got, want in zip(*(jax.tree.leaves(x.compile()(*arrays)) for x in (made, plain)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("mesh", "n"), [(8, 125), ({"data": 2, "model": 4}, 128)])
def test_uneven_weights_and_one_of_two_axes(mesh, n, rng):
    """Of 125 rows some parts are shorter; what is gathered is cut to what there is."""
    axis, every = ("model", tuple(mesh)) if isinstance(mesh, dict) else ("devices", "devices")

    def f(x, ws):
        def body(x, ws):
            for w in ws:
                x = jnp.tanh(gshard.split(x @ gshard.split(w, 0, axis), 0, every))
            return x, None

        return jax.lax.scan(body, gshard.split(x, 0, every), ws)[0]

    x, ws = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((256, n), (2, 5, n, n)))
    made = gshard.jit(f, mesh=mesh, machine=SLOW, collective_matmul=False).lower(x, tuple(ws))
    assert made.spmd.prefetched is not None
    assert emitted(made.spmd.jaxpr, made.mesh.atom_sizes) == reported(made.spmd.collectives)
    np.testing.assert_allclose(made.compile()(x, tuple(ws)), jax.jit(f)(x, tuple(ws)), rtol=1e-5, atol=1e-6)


def test_the_gather_of_the_next_round_is_beside_a_product():
    """What is waited for is the first, before the loop."""
    explained = str(gshard.explain(on_slow(pairs)))
    _, _, line = explained.partition("gathered one iteration early, beside the products of the previous iteration")
    assert "test_prefetch.py:" in line
    found = cost(on_slow(pairs).spmd, SLOW)
    gathers = [k for k in found.kernels if k.name == "all_gather"]
    assert [(k.times, k.overlapped > 0, k.seconds == 0) for k in gathers] == [
        (1, False, False), (5, True, True), (5, True, True),
    ]  # fmt: skip


def test_a_product_that_reads_what_is_held_is_written_out_twice():
    """Otherwise what arrives is copied to where the other one was."""
    (loop,) = (e for e in device_program(on_slow(single).spmd).block.walk() if e.name == "scan")
    assert loop.params["unroll"] == 2
    (loop,) = (e for e in device_program(on_slow(pairs).spmd).block.walk() if e.name == "scan")
    assert loop.params["unroll"] == 1


def test_nothing_is_fetched_ahead_where_nothing_is_hidden_or_won():
    """A compiler that hides no gather; no machine; one round; products that are shorter than a copy."""
    assert lowered(pairs, "v3:2x2").spmd.prefetched is None
    assert lowered(pairs, None).spmd.prefetched is None
    kept = lowered(pairs, None)._all_kept
    hides = dataclasses.replace(SLOW, compiler=dataclasses.replace(SLOW.compiler, hides=("collective_permute",)))
    assert prefetched(kept, hides) is kept
    copies = dataclasses.replace(SLOW, memory_bandwidth=1e3)
    assert prefetched(kept, copies) is kept
    once = gshard.jit(pairs, mesh=8, machine=SLOW).lower(f32(256, 128), (f32(1, 128, 128), f32(1, 128, 128)))
    assert once.spmd.prefetched is None


def test_what_a_round_makes_is_not_stacked_beside_a_gather():
    """A product that carries a gather on does not write to the stack: a property of the compiler."""

    def kept(x, ws):
        return gradient(x, ws, again=False)

    assert lowered(kept).spmd.prefetched is None
    compiler = dataclasses.replace(SLOW.compiler, gathers_split_stack_writes=False)
    assert lowered(kept, dataclasses.replace(SLOW, compiler=compiler)).spmd.prefetched is not None


def test_a_limit_of_memory_is_kept():
    """What is held once more does not fit."""
    made = on_slow(single)
    held = cost(made.spmd, SLOW).peak
    assert prefetched(made._all_kept, SLOW, limit=held).prefetched is not None
    assert prefetched(made._all_kept, SLOW, limit=held - 1).prefetched is None
