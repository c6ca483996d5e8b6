"""Costs: bytes are those of the emitted program, loops count by their number of rounds, memory is what XLA plans."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import MODELS, WITH_EXPERTS, lowered, model
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.search.seconds import Seconds
from gshard.testing.rule_checks import emitted, reported


def costed(name, machine="cpu:8"):
    found = lowered(name)
    return found, cost(found.spmd, Machine.of(machine), found.donated)


def costed_on_devices(name):
    f, args, axes, donated = model(name)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    found = gshard.jit(f, mesh=mesh, donate_argnums=donated).lower(*args)
    return found, cost(found.spmd, Machine.of("cpu:8"), found.donated)


@pytest.mark.parametrize("name", [*MODELS, "experts gradient"])
@pytest.mark.one_in(2)
def test_bytes_are_those_of_the_emitted_program(name):
    program, found = costed(name)
    by_kind = {}
    for k in found.kernels:
        if k.sent:
            by_kind[k.name] = by_kind.get(k.name, 0) + k.sent * k.times
    assert (
        by_kind
        == dict(emitted(program.spmd.jaxpr, program.mesh.atom_sizes))
        == dict(reported(program.spmd.collectives))
    )
    assert found.sent == sum(by_kind.values()) > 0


def xla_peak(program):
    found = program.executable.compiled.memory_analysis()
    whole = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return whole - found.alias_size_in_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_peak_memory_is_what_xla_plans(name):
    program, found = costed_on_devices(name)
    assert found.peak == pytest.approx(xla_peak(program), rel=0.15)


# XLA:CPU copies operands of products that it wants transposed, in recomputed layers long before they are read: 3 of the
# 22 MB at the peak, and others wait beside them. The model is a fifth too low there (docs/machines.md).
COPIED_EARLY = pytest.param(
    "experts recomputed", marks=pytest.mark.xfail(strict=True, reason="XLA:CPU copies transposed operands early")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [COPIED_EARLY if name == "experts recomputed" else name for name in WITH_EXPERTS])
def test_peak_memory_of_experts_is_what_xla_plans(name):
    program, found = costed_on_devices(name)
    assert found.peak == pytest.approx(xla_peak(program), rel=0.15)


def of(f, *args, mesh=None, machine="v3:2x2"):
    lowered = gshard.jit(f, mesh=mesh or gshard.Mesh.abstract(d=8)).lower(*args)
    return cost(lowered.spmd, Machine.of(machine))


@pytest.mark.parametrize("length", [1, 3, 12])
def test_loops_count_by_their_trips(length):
    def loop(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ gshard.split(w, 0, 8)), None), x, ws)[0]

    found = of(loop, jnp.ones((length, 64, 64)), jnp.ones((16, 64)))
    (product,) = [k for k in found.kernels if k.kind == "product"]
    assert (product.times, product.flops) == (length, 2 * 16 * 64 * 64 // 8)
    assert length in {k.times for k in found.kernels if k.sent} <= {1, length}


def test_what_is_elementwise_is_part_of_what_reads_it():
    found = of(
        lambda x, w: jnp.sum(jnp.exp(gshard.split(x, 0, 8) @ w) + 1.0, 1), jnp.ones((64, 32)), jnp.ones((32, 16))
    )
    assert [k.kind for k in found.kernels] == ["product", "reduction"]
    assert found.kernels[1].moved == (8 * 16 + 8) * 4


def test_a_donated_argument_lends_its_place():
    """Not donated, it may still be where what is needed before lies: less is saved than it is large."""
    f, args, axes, donated = model("descent")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    kept, lent = (gshard.jit(f, mesh=mesh, donate_argnums=given).lower(*args) for given in ((), donated))
    peaks = [cost(x.spmd, Machine.of("cpu:8"), x.donated).peak for x in (kept, lent)]
    assert peaks == pytest.approx([xla_peak(kept), xla_peak(lent)], rel=0.1)
    assert peaks[0] > peaks[1] * 1.05


def test_lines_are_those_of_the_user():
    _, found = costed("perceptron")
    assert all(k.line.startswith("models.py:") for k in found.kernels if k.total_seconds > 1e-6), found.by_line


def test_time_has_its_parts():
    _, found = costed("experts gradient", "v3:2x2")
    for parts in (found.by_bound, found.by_kind, found.by_line):
        assert sum(parts.values()) == pytest.approx(found.seconds)
    assert set(found.by_bound) == {"compute", "memory", "network", "latency"}, "a v3 starts kernels in no time"
    _, found = costed("experts gradient", "h100:1x8")
    assert set(found.by_bound) == {"compute", "memory", "network", "latency", "launch"}
    assert all(sum(spent for _, spent in k.parts) == pytest.approx(k.seconds) for k in found.kernels)
    assert found.memory.temporaries == max(m.bytes for m in found.memory.moments)


def gradient_of_weights(x, w, sizes):
    return jax.grad(lambda w: jnp.sum(jax.lax.ragged_dot(x, w, sizes)))(w)


def ragged(machine, rows, groups, inner, columns, dtype, f=jax.lax.ragged_dot):
    shapes = [((rows, inner), dtype), ((groups, inner, columns), dtype), ((groups,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    lowered = gshard.jit(f, mesh=gshard.Mesh.abstract(data=1)).lower(*arguments)
    return arguments, cost(lowered.spmd, Machine.of(machine), lowered.donated)


@pytest.mark.parametrize("f", [jax.lax.ragged_dot, gradient_of_weights])
@pytest.mark.parametrize("groups", [1, 5])
def test_a_product_of_groups_takes_as_many_products_as_the_compiler_makes(groups, f):
    rows, inner, columns = 4000, 1600, 2400
    arguments, found = ragged("h100:1x1", rows, groups, inner, columns, jnp.float32, f)
    needed = 2 * rows * inner * columns
    compiled = jax.jit(f).lower(*arguments).compile().cost_analysis()["flops"]
    assert groups * needed <= compiled < (groups + 0.5) * needed
    (product,) = [k for k in found.kernels if k.kind == "product"]
    assert product.flops == needed
    assert dict(product.parts)["compute"] == pytest.approx(groups * needed / Machine.of("h100:1x1").rate("f32"))


def test_experts_of_a_ragged_product_take_what_an_h100_took():
    """``experts, ragged`` on an H100 (benchmarks/RESULTS.md) took 1.465 ms."""
    _, found = ragged("h100:1x1", 16_384, 8, 1024, 4096, jnp.bfloat16)
    assert 0.8 < 1.465e-3 / found.seconds < 1.25
    _, on_tpu = ragged("v5p:1x1x1", 16_384, 8, 1024, 4096, jnp.bfloat16)
    assert on_tpu.flops == found.flops
    assert on_tpu.seconds < found.seconds / 4


@pytest.mark.parametrize(("machine", "times"), [("h100:1x1", 8), ("cpu:1", 8), ("v5p:1x1x1", 1)])
@pytest.mark.parametrize("f", [jax.lax.ragged_dot, gradient_of_weights])
def test_the_planner_prices_a_product_of_groups_as_the_program_is_priced(f, machine, times):
    arguments, found = ragged(machine, 16_384, 8, 1024, 4096, jnp.bfloat16, f)
    (product,) = [k for k in found.kernels if k.kind == "product"]
    kernel = next(k for k, _ in found.program.walk() if k.equation is product.equation)
    planned = Seconds(gshard.Mesh.abstract(data=1), found.machine, ()).split_costs(kernel, [{}], 1.0)
    assert planned[0] == pytest.approx(product.seconds)
    assert product.seconds == pytest.approx(2 * 16_384 * 1024 * 4096 * times / found.machine.rate("bf16"), rel=0.01)
    said = str(
        gshard.explain(f, *arguments, mesh=gshard.Mesh.abstract(data=1), machine=machine).verdict(machine, seconds=0)
    )
    assert (f"XLA for {machine.partition(':')[0]} has no kernel for ragged_dot_general" in said) == (times > 1)
