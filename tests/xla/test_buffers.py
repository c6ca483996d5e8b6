"""What devices hold, read from the schedule, against what the compiler reports."""

import jax
import jax.numpy as jnp
import pytest

from gshard.xla.buffers import aliased_results, held_by
from gshard.xla.hlo_parser import read_module


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()


def written_out(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


def attention(x, ws):
    q, k, v = (x @ w for w in ws[:3])
    return (jax.nn.softmax(q @ k.T) @ v).sum()


@pytest.mark.optimised
@pytest.mark.parametrize("f", [layers, written_out, attention])
@pytest.mark.parametrize("differentiated", [False, True])
def test_temporaries_are_near_those_of_the_compiler(f, differentiated):
    run = jax.grad(f, (0, 1)) if differentiated else f
    compiled = jax.jit(run).lower(jnp.ones((256, 256)), jnp.ones((6, 256, 256))).compile()
    held, report = held_by(read_module(compiled.as_text())), compiled.memory_analysis()
    assert held.arguments == report.argument_size_in_bytes
    assert held.results == pytest.approx(report.output_size_in_bytes, abs=64)
    assert held.temporaries == pytest.approx(report.temp_size_in_bytes, rel=0.3, abs=300_000)
    assert sum(h.bytes for h in held.alive) == held.temporaries


def test_donated_arguments_hold_the_results():
    f = jax.jit(lambda x, y: (y * 2, x + 1, x.sum()), donate_argnums=(0, 1))
    module = read_module(f.lower(jnp.ones(1000), jnp.ones((500, 3))).compile().as_text())
    assert aliased_results(module) == {0: 1, 1: 0}
    held = held_by(module)
    assert held.shared == 4 * 1000 + 4 * 1500
    assert held.peak - held.temporaries == 4 * 1000 + 4 * 1500 + 4


def test_what_updates_in_place_takes_no_second_buffer():
    text = """HloModule m, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[100,10], y: f32[1,10]) -> f32[] {
  %x = f32[100,10]{1,0} parameter(0)
  %y = f32[1,10]{1,0} parameter(1)
  %i = s32[] constant(3)
  %c = f32[100,10]{1,0} copy(%x)
  %u = f32[100,10]{1,0} dynamic-update-slice(%c, %y, %i, %i)
  %unread = f32[50,10]{1,0} slice(%u), slice={[0:50], [0:10]}
  %n = f32[100,10]{1,0} negate(%u)
  ROOT %r = f32[] custom-call(%n), custom_call_target="sum"
}
"""
    held = held_by(read_module(text))
    # The copy, updated and negated in place, and the slice that nothing reads while it is made.
    assert held.temporaries == 4000 + 2000
    assert [h.array.name for h in held.alive] == ["c", "unread"]


def test_arrays_on_the_chip_and_on_the_host_do_not_count():
    text = """HloModule m, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[100,10]) -> f32[100,10] {
  %x = f32[100,10]{1,0} parameter(0)
  %c = f32[100,10]{1,0:S(1)} copy(%x)
  %d = f32[100,10]{1,0} negate(%c)
  ROOT %r = f32[100,10]{1,0} negate(%d)
}
"""
    assert held_by(read_module(text)).temporaries == 4000
