"""What the cost model expects of a program is what its compiled program costs, kernel by kernel and copy by copy."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32
from gshard.device.cost import cost
from gshard.device.fusion_model import kernels_of
from gshard.device.machine import Machine
from gshard.tracing.trace import trace

PRICED = Path(__file__).resolve().parents[2] / "benchmarks" / "priced_hlo.py"
NEAR = (
    0.02  # of the time; a kernel of these programs is at least a twentieth of it on a GPU, where it has to be started
)
GPU = Machine.of("h100:1x8")


@pytest.fixture(scope="module")
def seconds() -> Any:
    """``seconds`` of the benchmark."""
    spec = importlib.util.spec_from_file_location("priced_hlo", PRICED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["priced_hlo"] = module
    spec.loader.exec_module(module)
    return module.seconds


def softmax(x: Any) -> Any:
    e = jnp.exp(x)
    return e / jnp.sum(e, 1, keepdims=True)


def norm(x: Any, square: Any) -> Any:
    return x * jax.lax.rsqrt(square + 1e-3)


def convolution(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


TWO, THREE = (64, 128), (16, 32, 64)
CASES: dict[str, tuple[Any, Any, Any, tuple[Any, ...]]] = {
    # name: a function, shardings of arguments and of results, shapes
    "a gather of rows for a product": (jnp.dot, (P("x"), P()), P(), (TWO, (128, 32))),
    "a gather of columns for a product": (jnp.dot, (P(None, "x"), P("x")), P("x"), (TWO, (128, 48))),
    "a gather along the second of three": (jnp.sin, (P(None, "x"),), P(), (THREE,)),
    "a gather along the last of three": (lambda x: x, (P(None, None, "x"),), P(), (THREE,)),
    "a gather behind a dimension of one": (lambda x: x, (P(None, "x"),), P(), ((1, 64, 16),)),
    "sums scattered behind a dimension of one": (
        lambda x, w: jnp.einsum("ij,jk->ik", x, w)[None], (P(None, "x"), P("x")), P(None, "x"), (TWO, (128, 32))
    ),
    "sums scattered by rows": (jnp.dot, (P(None, "x"), P("x")), P("x"), (TWO, (128, 32))),
    "sums scattered by columns": (jnp.dot, (P(None, "x"), P("x")), P(None, "x"), (TWO, (128, 32))),
    "rows become columns": (lambda x: x, (P("x"),), P(None, "x"), (TWO,)),
    "columns become rows": (lambda x: x, (P(None, "x"),), P("x"), (TWO,)),
    "columns become rows of a sum": (lambda x: jnp.sum(x, 1), (P(None, "x"),), P("x"), ((64, 512),)),
    "a division for each row": (softmax, (P("x"),), P("x"), (TWO,)),
    "a root for each row": (norm, (P("x"), P("x")), P("x"), (TWO, (64, 1))),
    "a division for each row, sums over devices": (softmax, (P(None, "x"),), P(None, "x"), (TWO,)),
    "a convolution": (convolution, (P("x"), P()), P("x"), ((16, 32, 32, 16), (3, 3, 16, 16))),
    "two sums": (lambda x, y: (jnp.sum(x, 0), jnp.sum(y, 0)), (P("x"), P("x")), P(), (TWO, TWO)),
    "two gathers": (lambda x, y: (x, y), (P("x"), P("x")), P(), (TWO, (16, 8))),
}  # fmt: skip


@pytest.mark.parametrize("machine", ["h100:1x8", "cpu:8"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_the_model_is_the_price_of_the_compiled_program(seconds: Any, name: str, machine: str):
    function, arguments, results, shapes = CASES[name]
    where = Machine.of(machine)
    # XLA compiles the program for CPUs, whatever machine it is planned for.
    compiler = dataclasses.replace(
        where.compiler, fused_row=0, fuses_elementwise=False, products_take_layouts=False
    )  # fmt: skip
    where = dataclasses.replace(where, compiler=compiler)
    lowered = gshard.jit(function, mesh={"x": 8}, machine=where, in_shardings=arguments, out_shardings=results).lower(
        *map(lambda shape: f32(*shape), shapes)
    )
    price = seconds(lowered.executable.compiled.as_text(), where)
    assert cost(lowered.spmd, where).seconds == pytest.approx(price, rel=NEAR)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_such_programs_are_right(rng: np.random.Generator, name: str):
    function, arguments, results, shapes = CASES[name]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    if name == "a root for each row":
        arrays[1] = jnp.abs(arrays[1])
    planned = gshard.jit(function, mesh={"x": 8}, machine=GPU.name, in_shardings=arguments, out_shardings=results)
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    for found, want in zip(jax.tree.leaves(planned(*arrays)), expected, strict=True):
        # Sums of numbers of both signs in another order: relative to the largest.
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


def test_an_update_of_what_nobody_needs_any_more_moves_what_it_writes() -> None:
    """What is needed again, and what may be the caller's, is copied."""
    here = (1, 0)

    def written(x: Any) -> Any:
        return lax.dynamic_update_slice(lax.sort(x), jnp.sin(x[:1]), here)

    def needed(x: Any) -> Any:
        y = lax.sort(x)
        return lax.dynamic_update_slice(y, jnp.sin(x[:1]), here), y

    def argument(x: Any) -> Any:
        return lax.dynamic_update_slice(x, jnp.sin(x[:1]), here)

    def moved(f: Any) -> tuple[bool, int]:
        every = kernels_of(trace(f, f32(64, 32)).block).kernels
        (kernel,) = (k for k in every if k.equation.name == "dynamic_update_slice")
        return kernel.in_place, kernel.moved

    row, whole = 32 * 4, 64 * 32 * 4
    assert moved(written) == (True, 2 * row)
    assert moved(needed) == (False, 2 * whole + row)
    assert moved(argument)[0] is False
