"""Dimensions smaller than the mesh: idle devices, copies and cuts of other dimensions cost what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from families import SMALL
from gshard.core.mesh import Mesh
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import cost
from gshard.device.machine import Machine
from gshard.planning.strategies import share

LINE = Mesh.abstract(x=8)
# What XLA's partitioner sends for the same marks and executes on the busiest device (jax 0.10.2), in bytes and FLOPs.
XLA = {
    "small/linear_vit": (120, 124_701_160),
    "small/linear_vit_step": (1_587_292, 378_471_872),
    "small/linear_vit_both_step": (2_922_240, 220_281_312),
    "small/neural_operator": (14_026_752, 471_579_904),
    "small/vorticity_of_one": (1_850_240, None),
    "small/unet_step": (20_034, None),
    "small/graphs_step": (29_568, None),
    "small/lstm_step": (1_731_072, None),
    "small/experts_step": (259_392, None),
    "small/sampled_batch_1": (1_403_136, None),
    "small/protein_on_cube_step": (391_488, None),
}
SLOW = {"small/protein_on_cube_step"}  # to plan


def sent(spmd: SpmdProgram) -> int:
    return sum(c.total_bytes for c in spmd.collectives)


def lowered(f: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    return gshard.jit(f, mesh=LINE).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in XLA])
def test_no_more_is_sent_than_by_xla(name: str) -> None:
    case = SMALL[name]
    spmd = gshard.jit(case.function, mesh=Mesh.abstract(**case.mesh)).lower(*case.arguments).spmd
    bytes_of_xla, flops_of_xla = XLA[name]
    assert sent(spmd) <= bytes_of_xla
    if flops_of_xla is not None:
        # An operation of an exponential counts as one here, and as none there.
        assert cost(spmd, Machine.of("h100:1x8")).flops <= 1.05 * flops_of_xla


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 8, 12])
def test_a_batch_is_data_parallel_whatever_its_size(batch: int) -> None:
    """Products of each example by itself send nothing, though some devices have no example."""

    def f(x: Any, w: Any) -> Any:
        x = gshard.split(x, 0, "x")
        return gshard.split(jnp.tanh(jnp.tanh(x @ w) @ w), 0, "x").sum((1, 2))

    assert sent(lowered(f, (batch, 256, 512), (512, 512)).spmd) <= batch * 4 * 8, "only sums of examples may move"


def shares(lowered: Any) -> list[float]:
    """Of the work of each product, the share of the busiest device."""
    plan = lowered.plan
    return [share(e.rule, plan.splits[e], LINE) for e in plan.program.block.walk() if e.name == "dot_general"]


@pytest.mark.parametrize("batch", [4, 12])
def test_no_device_computes_more_than_the_busiest_one_of_the_marks(batch: int) -> None:
    def f(x: Any, w: Any) -> Any:
        return gshard.split(x, 0, "x") @ w

    (product,) = shares(lowered(f, (batch, 256, 512), (512, 512)))
    assert product <= -(-batch // 8) / batch


def test_weights_in_parts_ask_for_no_other_cut_of_a_small_batch() -> None:
    """The weights are gathered, as with a large batch: they are smaller than what the other devices would need."""

    def f(x: Any, w: Any) -> Any:
        return gshard.split(gshard.split(x, 0, "x") @ gshard.split(w, 0, "x"), 0, "x")

    made = lowered(f, (4, 4096, 512), (512, 512))
    assert shares(made) == [1 / 4]
    weights = [c for c in made.spmd.collectives if c.value is not None and c.value.shape == (512, 512)]
    assert [(c.kind, c.total_bytes) for c in weights] == [("all_gather", 7 * 512 * 512 * 4 // 8)]


def test_idle_devices_are_used_where_that_is_worth_it() -> None:
    """Rows are moved once, for eight products of half the time: an operation counts a thousandth of a byte."""

    def f(x: Any, w: Any) -> Any:
        y = gshard.split(x, 0, "x")
        for _ in range(8):
            y = jnp.tanh(y @ w)
        return y.sum()

    made = lowered(f, (4, 8192, 1024), (1024, 1024))
    assert shares(made) == [1 / 8] * 8
    assert sent(made.spmd) < 8 * (2 * 4 * 8192 * 1024 * 1024) * (1 / 4 - 1 / 8) / 1000


@pytest.mark.parametrize(("rows", "parts"), [(12, 4), (4, 4), (6, 2), (13, 1)])
def test_a_result_leaves_in_as_many_equal_parts_as_there_can_be(rows: int, parts: int) -> None:
    def f(x: Any) -> Any:
        return jnp.tanh(gshard.split(x, 0, "x"))

    x = np.linspace(-1, 1, rows * 7, dtype=np.float32).reshape(rows, 7)
    y = gshard.jit(f, mesh={"x": 8})(x)
    assert y.sharding.shard_shape(y.shape) == (rows // parts, 7)
    np.testing.assert_allclose(np.asarray(y), np.tanh(x), rtol=1e-5)
