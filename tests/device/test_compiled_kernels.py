"""What XLA:GPU makes one kernel of is priced as one: counted in bytes and launches, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from families import CASES
from gshard.comm.reshard import axes_of
from gshard.core.sharding import Sharding
from gshard.device.cost import cost
from gshard.device.fusion_model import FUSED, REGION, as_compiled, device_program
from gshard.device.machine import COMPILERS, Machine
from gshard.device.memory import memory_of
from gshard.lowering.seconds import Seconds

GPU = COMPILERS["gpu"]
ROWS, ROW = 512, 1024
ARRAY = 4 * ROWS * ROW


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def priced(f, *arguments, devices=1, kind="h100"):
    lowered = gshard.jit(f, mesh=gshard.Mesh.abstract(d=devices)).lower(*arguments)
    return cost(lowered.spmd, Machine.of(f"{kind}:1x{devices}"))


def moved(found):
    return sum(k.moved * k.times for k in found.kernels)


def launches(found):
    return sum(k.times for k in found.kernels if dict(k.parts).get("launch"))


def layer_norm(x):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm(x, gain):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def adam(w, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.mark.parametrize("f, arguments, bytes_moved", [
    (jax.nn.softmax, (shape(ROWS, ROW),), 2 * ARRAY),
    (jax.nn.log_softmax, (shape(ROWS, ROW),), 2 * ARRAY),
    (layer_norm, (shape(ROWS, ROW, dtype=jnp.bfloat16),), ARRAY),
    (rms_norm, (shape(ROWS, ROW), shape(ROW)), 2 * ARRAY + 4 * ROW),
    (lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)), (shape(2, ROWS // 2, ROW),), 2 * ARRAY),
    (adam, (shape(ROWS, ROW),) * 4, 7 * ARRAY),
])  # fmt: skip
def test_one_kernel_reads_each_operand_once(f, arguments, bytes_moved):
    found = priced(f, *arguments)
    assert moved(found) == bytes_moved
    assert launches(found) == 1
    assert moved(priced(f, *arguments, kind="mi300x")) == bytes_moved
    on_tpu = priced(f, *arguments, kind="v5e")
    assert moved(on_tpu) > bytes_moved
    assert launches(on_tpu) == 0


@pytest.mark.parametrize("f, arguments, bytes_moved", [
    # Read for the maximum, for the sum, and for the result; the exponentials are computed twice.
    (lambda x: jax.nn.softmax(x, axis=0), (shape(ROWS, ROW),), 4 * ARRAY + 5 * 4 * ROW),
    # Rows that are too long for the registers.
    (jax.nn.softmax, (shape(16, 32_768),), 4 * 4 * 16 * 32_768 + 5 * 4 * 16),
    # Two large operands.
    (lambda y, g: (g - (g * y).sum(-1, keepdims=True)) * y, (shape(ROWS, ROW),) * 2, 5 * ARRAY + 2 * 4 * ROWS),
    # The sum is a result, too.
    (lambda x: (s := x.sum(-1, keepdims=True), x / s), (shape(ROWS, ROW),), 3 * ARRAY + 2 * 4 * ROWS),
    # Two independent statistics: one kernel reads x for both of them, another one reads x for the result.
    (lambda x: (x - x.mean(-1, keepdims=True)) / (x * x).sum(-1, keepdims=True), (shape(ROWS, ROW),),
     3 * ARRAY + 2 * 4 * ROWS),
])  # fmt: skip
def test_what_xla_does_not_make_one_kernel_of_is_not_priced_as_one(f, arguments, bytes_moved):
    found = priced(f, *arguments)
    assert moved(found) == bytes_moved
    assert launches(found) > 1


def test_a_row_that_devices_share_is_reduced_by_a_kernel_of_its_own():
    rows = priced(lambda x: jax.nn.softmax(gshard.split(x, 0, "d")), shape(ROWS, ROW), devices=8)
    columns = priced(lambda x: jax.nn.softmax(gshard.split(x, 1, "d")), shape(ROWS, ROW), devices=8)
    assert moved(rows) == 2 * ARRAY // 8
    assert launches(rows) == 1
    local = [k for k in columns.kernels if k.kind != "collective"]
    assert sum(k.moved for k in local) >= 4 * ARRAY // 8, "read for the maximum, for the sum, and for the result"


@pytest.mark.parametrize("f", [jax.nn.softmax, layer_norm, lambda x: jax.nn.softmax(x, axis=0)])
def test_what_planning_counts_is_what_is_priced(f):
    lowered = gshard.jit(f, mesh=gshard.Mesh.abstract(d=1)).lower(shape(ROWS, ROW))
    machine = Machine.of("h100:1x1")
    objective = Seconds(lowered.mesh, machine, axes_of(lowered.mesh))
    planned = 0.0
    for kernel, times in objective.kernels(lowered.plan.program.block):
        if kernel.kind == FUSED:
            whole = Sharding(((),) * len(kernel.equation.outputs[0].shape))
            planned += times * float(objective.sharding_costs(kernel, [whole])[0])
        else:
            planned += times * float(objective.split_costs(kernel, [{}], 0.0)[0])
    assert planned == pytest.approx(cost(lowered.spmd, machine).seconds, rel=1e-9)


def totals(program):
    return sum(k.moved * n for k, n in program.walk() if k.kind != REGION), memory_of(program).peak


@pytest.mark.parametrize("name", sorted(CASES)[::18])
def test_no_program_moves_more_and_all_hold_what_they_held(name):
    case = CASES[name]
    lowered = gshard.jit(case.function, mesh=gshard.Mesh.abstract(**case.mesh)).lower(*case.arguments)
    before = device_program(lowered.spmd)
    after = as_compiled(before, GPU)
    assert [k.equation for k, _ in after.walk()] == [k.equation for k, _ in before.walk()]
    (was, held), (now, holds) = totals(before), totals(after)
    assert now <= was
    assert holds == held


def test_a_kernel_between_two_of_a_group_keeps_them_apart():
    """The second elementwise kernel needs a product of the first: one kernel cannot write both."""

    def f(x, w):
        y = jnp.tanh(x)
        return y, jnp.sin(y) + y @ w

    found = priced(f, shape(ROWS, ROWS), shape(ROWS, ROWS))
    square = 4 * ROWS * ROWS
    assert moved(found) == (2 + 3 + 3) * square
    assert np.isclose(sum(k.total_seconds for k in found.kernels), found.seconds)
