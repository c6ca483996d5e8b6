"""Shardings: the text form reads back, local shapes are ceilings, unreduced atoms survive."""

import math
import re

import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gshard.core.errors import ShardingError
from gshard.core.mesh import Mesh
from gshard.core.number_text import format_ms, format_seconds, significant
from gshard.core.program import format_bytes, format_flops, short_dtype
from gshard.core.sharding import Sharding

MESH = Mesh.abstract(data=2, expert=4, model=3)
MONOIDS = ("add", "max", "min", "mul", "and", "or", "xor")


@st.composite
def shardings(draw):
    """Any sharding on the mesh (atoms in any order, some unreduced) with a shape that it may cut unevenly."""
    rank = draw(st.integers(0, 4))
    dims = [[] for _ in range(rank)]
    unreduced = {}
    for atom in draw(st.permutations(MESH.atoms)):
        at = draw(st.integers(-2, rank - 1))
        if at >= 0:
            dims[at].append(atom)
        elif at == -2:
            unreduced[atom] = draw(st.sampled_from(MONOIDS))
    shape = tuple(draw(st.lists(st.integers(0, 50), min_size=rank, max_size=rank)))
    return Sharding(tuple(map(tuple, dims))).with_unreduced(unreduced), shape


@given(shardings(), st.sampled_from(["f32", "bf16", "s8", "pred", "c64", "", "key<fry>"]))  # brackets of its own
def test_the_text_form_reads_back(drawn, dtype):
    sharding, shape = drawn
    assert Sharding.parse(sharding.format(MESH, shape, dtype), MESH) == (sharding, shape, dtype)


@pytest.mark.parametrize(
    ("sharding", "shape", "text"),
    [
        (Sharding(()), (), "f32[]"),
        (Sharding(((), ())), (3, 4), "f32[3,4]"),
        (Sharding((("data",), ("expert.0", "expert.1"))), (3, 4), "f32[3@data,4@expert]"),
        (Sharding((("expert.0",), ("expert.1",))), (3, 4), "f32[3@expert.0,4@expert.1]"),
        (Sharding((("expert.1", "expert.0"),)), (8,), "f32[8@(expert.1,expert.0)]"),
        (Sharding((("model", "expert.0", "expert.1"),)), (12,), "f32[12@(model,expert)]"),
        (Sharding(((),)).with_unreduced({"model": "add"}), (4,), "f32[4]{U:model}"),
        (Sharding(()).with_unreduced({"data": "max", "expert.0": "max"}), (), "f32[]{U max:data,expert.0}"),
        (Sharding(()).with_unreduced({"data": "max", "model": "add"}), (), "f32[]{U max:data U:model}"),
    ],
    ids=str,
)
def test_text(sharding, shape, text):
    assert sharding.format(MESH, shape, "f32") == text
    assert Sharding.parse(text, MESH)[0] == sharding


@pytest.mark.parametrize(("text", "what"), [
    ("f32[8@nope]", "the mesh has no axis 'nope'"), ("f32[8]{U:nope}", "the mesh has no axis 'nope'"),
    ("f32 8", "is not the text of a sharding"), ("f32[8", "is not the text of a sharding"),
    ("f32[8@]", "is not the text of a sharding"), ("f32[a,b]", "is not the text of a sharding"),
    ("f32[8@data data]", "is not the text of a sharding"),
])  # fmt: skip
def test_what_is_no_text_of_a_sharding_is_refused(text, what):
    with pytest.raises(ShardingError, match=what):
        Sharding.parse(text, MESH)


@given(shardings())
def test_local_shapes_are_ceilings(drawn):
    sharding, shape = drawn
    parts = [MESH.count(atoms) for atoms in sharding.dims]
    local = sharding.local_shape(MESH, shape)
    for n, m, p in zip(shape, local, parts, strict=True):
        assert m * p >= n > (m - 1) * p
    assert sharding.is_even(MESH, shape) == all(m * p == n for n, m, p in zip(shape, local, parts, strict=True))


@given(shardings())
def test_atoms_are_counted_once(drawn):
    sharding, _ = drawn
    assert len(set(sharding.atoms)) == len(sharding.atoms)


def test_unreduced_is_kept_sorted_so_that_equal_shardings_are_equal():
    one = Sharding(()).with_unreduced({"model": "add", "data": "max"})
    other = Sharding(()).with_unreduced({"data": "max", "model": "add"})
    assert one == other
    assert hash(one) == hash(other)


def test_names_of_dtypes():
    short = {jnp.bfloat16: "bf16", jnp.float32: "f32", jnp.int8: "s8", jnp.uint32: "u32", jnp.complex64: "c64"}
    for dtype, name in {**short, jnp.bool_: "pred"}.items():
        assert short_dtype(jnp.dtype(dtype)) == name


# Numbers as text: no exponent, few digits, and no more than a unit holds.
SIZES = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "FLOP": 1}
SIZES |= {f"{prefix}FLOP": 1000**k for k, prefix in enumerate("kMGTP", 1)}
SIZES |= {unit: 1024**k for k, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
POWERS = [base**k for base, k in [*((10, k) for k in range(-12, 20)), *((1024, k) for k in range(6))]]
# Near a power of the base numbers round into the next unit, or just do not.
near_powers = st.builds(lambda power, off: power * (1 + off), st.sampled_from(POWERS), st.floats(-1e-2, 1e-2))


@pytest.mark.parametrize(("text_of", "base", "off", "whole"), [
    (format_seconds, 1000, 5e-3, False), (format_flops, 1000, 5e-4, False), (format_bytes, 1024, 5e-2, True),
    (format_ms, math.inf, 5e-4, False),
])  # fmt: skip
@given(st.one_of(near_powers, st.floats(1e-12, 1e20)))
@example(0.9996)
@example(999.6e-6)
@example(1234.5)
@example(1024**2 - 1)
def test_a_number_fills_its_unit_but_not_the_next(text_of, base, off, whole, x):
    x = float(math.floor(x)) if whole else x
    number, unit = text_of(x).split()
    assert re.fullmatch(r"\d+(\.\d+)?", number)
    assert float(number) * SIZES[unit] == pytest.approx(x, rel=off)
    assert float(number) < base or unit in ("s", "PFLOP", "TiB")
    assert float(number) >= 1 or unit in ("ns", "FLOP", "B", "ms")


@given(st.floats(-1e20, 1e20), st.integers(1, 6))
def test_significant_digits(x, digits):
    text = significant(x, digits)
    assert float(text) == float(f"{x:.{digits}g}")
    assert "e" not in text.lower()
    assert significant(x, digits, "+").lstrip("+-") == text.lstrip("-")
