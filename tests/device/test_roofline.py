"""One roofline: whoever prices an equation gets the same digits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import pytest

import gshard
from gshard import Machine, Mesh, split
from gshard.comm.steps import ALL_SLICE, Step
from gshard.core.program import itemsize
from gshard.core.sharding import Sharding
from gshard.device.async_overlap import product_seconds
from gshard.device.compiled_kernels import epilogues
from gshard.device.cost import cost, kernel_cost
from gshard.device.fusion_model import PRODUCT, Kernels, device_program, kernels_of
from gshard.device.network import StepTimes
from gshard.device.roofline import INDICES, copy_seconds, launch_seconds, roofline
from gshard.planning.reshard_costs import axes_of
from gshard.search.seconds import Seconds

MACHINES = ("cpu:8", "v3:2x2", "v5e:2x4", "h100:1x8")
# Bound by arithmetic, by memory, by the launch; and so small that no kernel is launched for it.
SHAPES = ((4096, 4096, 4096), (4096, 8, 4096), (8, 8, 8), (8, 1, 1))


def product(m: int, k: int, n: int, dtype: str) -> Any:
    arrays = (jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n)))
    return gshard.jit(lambda x, w: split(x, 0, "d") @ w, mesh=Mesh.abstract(d=8)).lower(*arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_callers_price_a_product_the_same(shape: tuple[int, int, int], machine: str, dtype: str) -> None:
    m, k, n = shape
    lowered, on = product(*shape, dtype), Machine.of(machine)
    (planned,) = kernels_of(lowered.plan.program.block).kernels
    e = planned.equation
    (emitted,) = device_program(lowered.spmd).kernels
    parts, short = m // 8, {"float32": "f32", "bfloat16": "bf16"}[dtype]
    moved = itemsize(e.inputs[0].dtype) * (parts * k + k * n + parts * n)
    expected = roofline(on, short, 2 * parts * k * n, moved=moved, returns=True).seconds
    assert expected == max(2 * parts * k * n / on.rate(short), moved / on.memory_bandwidth) + (
        on.launch  # the product is the result of the program
    )
    mesh = lowered.mesh
    explained = cost(lowered.spmd, on)
    option = Seconds(mesh, on, axes_of(mesh)).split_costs(planned, [lowered.plan.splits[e]], 0.0)
    assert {
        "explained": explained.seconds,
        "recomputed": kernel_cost(emitted, 1, mesh, on).seconds,
        "searched": float(option[0]),
        "in a ring": product_seconds(e, lowered.plan, on),
    } == dict.fromkeys(("explained", "recomputed", "searched", "in a ring"), expected)


OCP = "float8_e4m3fn", "float8_e5m2"
FNUZ = "float8_e4m3fnuz", "float8_e5m2fnuz"
NARROW = {
    "h100 h200 b200 gb200 mi350x mi355x": ("int8", *OCP), "b300 gb300 tpu7x": OCP, "mi300x mi325x": ("int8", *FNUZ),
    "a100 v5e v5p v6e": ("int8",),
}  # fmt: skip


@pytest.mark.parametrize(("machine", "fast"), [(m, fast) for names, fast in NARROW.items() for m in names.split()])
def test_8_bit_products_run_at_the_rate_of_the_data_sheet(machine: str, fast: tuple[str, ...]) -> None:
    on = Machine.of(machine, 2)

    def seconds(*dtypes: str) -> float:
        arrays = (jax.ShapeDtypeStruct((8192, 8192), dtype) for dtype in dtypes)
        f = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
        found = cost(gshard.jit(f, mesh=Mesh.abstract(x=2)).lower(*arrays).spmd, on)
        return sum(dict(k.parts)["compute"] for k in found.kernels if k.kind == "product")

    wide = seconds("bfloat16", "bfloat16")
    for dtype in fast:
        assert seconds(dtype, dtype) == pytest.approx(wide / 2, rel=0.01)
        assert seconds(dtype, "bfloat16") == seconds("bfloat16", dtype) == wide
    for dtype in {*OCP, *FNUZ}.difference(fast):
        assert seconds(dtype, dtype) == wide


def test_a_measured_machine_keeps_the_ratios_that_were_not_measured() -> None:
    on = dataclasses.replace(Machine.of("h100:1x1"), flops={"f32": 3e14, "bf16": 6e14}, measured=True)
    assert [on.rate(dtype) / 1e14 for dtype in ("bf16", "f32", "f8_e4m3fn", "f4_e2m1fn")] == [6, 3, 6 * 2, 6]
    assert on.rate("s8") == pytest.approx(12e14, rel=1e-3)
    assert on.rate("f64") == pytest.approx(6e14 * 67 / 989)


def test_a_result_of_the_program_is_launched_for_however_small() -> None:
    """Parts of eight bytes: what only a kernel of the program reads starts none, and what is returned starts one."""
    mesh, on = Mesh.abstract(d=64), Machine.of("h100:8x8")
    b, x = jax.ShapeDtypeStruct((64,), "float32"), jax.ShapeDtypeStruct((1 << 20, 64), "float32")

    def updated(b: Any, g: Any) -> Any:
        return split(b, 0, "d") - 0.1 * split(g, 0, "d")

    def read(b: Any, x: Any) -> Any:  # the steps are read by a loop of a thousand times their size
        return split(x, 0, "d") * (b[:1] - 0.1 * b[1:2])

    lowered = gshard.jit(updated, mesh=mesh).lower(b, b)
    (kernel,) = device_program(lowered.spmd).kernels
    assert kernel.moved <= INDICES
    assert kernel.returns
    assert cost(lowered.spmd, on).seconds == pytest.approx(on.launch, rel=1e-3)
    (planned,) = kernels_of(lowered.plan.program.block).kernels
    whole, parts = Seconds(mesh, on, axes_of(mesh)).sharding_costs(
        planned, [Sharding(((),)), lowered.plan.shardings[planned.equation.outputs[0]]]
    )
    assert parts == pytest.approx(whole, rel=1e-3), "a split of so little saves no launch"
    inside = cost(gshard.jit(read, mesh=mesh).lower(b, x).spmd, on)
    assert sum(spent for k in inside.kernels for what, spent in k.parts if what == "launch") == on.launch


def test_the_end_of_a_product_takes_what_the_roofline_of_both_takes_more() -> None:
    arrays = (jax.ShapeDtypeStruct((4096, 4096), "float32") for _ in range(3))
    lowered = gshard.jit(lambda x, w, y: x @ w + y, mesh=Mesh.abstract(d=1)).lower(*arrays)
    on = Machine.of("v5e:1x1")
    program: Kernels = device_program(lowered.spmd)
    first, second = program.kernels
    assert first.kind == PRODUCT
    alone = {kernel: kernel_cost(kernel, 1, lowered.mesh, on).seconds for kernel in program.kernels}
    both = roofline(on, "f32", first.product_flops, second.vector_flops, 4 * 4 * 4096**2).seconds
    assert alone[first] + epilogues(program, alone, on)[second] == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("elements", [0, 4, 8, 1 << 20])
def test_a_step_that_only_cuts_is_a_copy(elements: int, machine: str) -> None:
    on = Machine.of(machine)
    mesh = Mesh.abstract(d=8)
    whole, cut = Sharding(((),)), Sharding((mesh.atoms,))
    step = Step(ALL_SLICE, mesh.atoms, whole, cut)
    taken = StepTimes(on).seconds(step, (8 * elements,), 4, mesh)
    assert copy_seconds(on, 4 * elements) == roofline(on, "f32", moved=8 * elements).seconds
    assert taken == copy_seconds(on, 4 * elements) + (on.launch if elements <= 4 else 0.0)
    assert launch_seconds(on, 8 * elements) == (on.launch if elements > 4 else 0.0)


@pytest.mark.parametrize("machine", [*MACHINES, "a100:1x8"])
def test_a_transfer_takes_the_link_to_the_host_in_prices_and_in_searches(machine: str) -> None:
    on = Machine.of(machine)
    mesh, rows = Mesh.abstract(d=on.size), 4096

    def step(m: Any, g: Any) -> Any:
        m = jax.device_put(split(m, 0, "d"), jax.memory.Space.Device) + g
        return jax.device_put(m, jax.memory.Space.Host)

    kind = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    m = jax.ShapeDtypeStruct((rows, 512), "float32", sharding=kind)
    g = jax.ShapeDtypeStruct((rows, 512), "float32")
    lowered = gshard.jit(step, mesh=mesh, machine=on).lower(m, g)
    found = cost(lowered.spmd, on)
    part = rows // on.size * 512 * 4
    link = on.host_link or on.memory_bandwidth / 2
    transfers = [k for k in found.kernels if k.name == "device_put"]
    assert len(transfers) == 2
    for kernel in transfers:
        assert kernel.seconds == pytest.approx(part / link + on.launch, rel=1e-12)
    assert found.by_bound.get("host", 0.0) == pytest.approx(2 * part / link if on.host_link else 0.0)
    objective = Seconds(mesh, on, axes_of(mesh))
    planned = [k for k in kernels_of(lowered.plan.program.block).kernels if k.equation.name == "device_put"]
    for kernel in planned:
        (seconds,) = objective.split_costs(kernel, [lowered.plan.splits[kernel.equation]], 1.0)
        assert seconds == pytest.approx(transfers[0].seconds, rel=1e-12)
