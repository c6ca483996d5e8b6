"""Shardings: the text form reads back, local shapes are ceilings, unreduced atoms survive."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.core.errors import ShardingError
from gshard.core.mesh import Mesh
from gshard.core.program import short_dtype
from gshard.core.sharding import Sharding

MESH = Mesh.abstract(data=2, expert=4, model=3)
MONOIDS = ("add", "max", "min", "mul", "and", "or", "xor")


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Sharding, tuple[int, ...]]:
    """Any sharding on the mesh (atoms in any order, some unreduced) with a shape that it may cut unevenly."""
    rank = draw(st.integers(0, 4))
    dims: list[list[str]] = [[] for _ in range(rank)]
    unreduced: dict[str, str] = {}
    for atom in draw(st.permutations(MESH.atoms)):
        at = draw(st.integers(-2, rank - 1))
        if at >= 0:
            dims[at].append(atom)
        elif at == -2:
            unreduced[atom] = draw(st.sampled_from(MONOIDS))
    shape = tuple(draw(st.lists(st.integers(0, 50), min_size=rank, max_size=rank)))
    return Sharding(tuple(map(tuple, dims))).with_unreduced(unreduced), shape


@given(shardings(), st.sampled_from(["f32", "bf16", "s8", "pred", "c64", ""]))
def test_the_text_form_reads_back(drawn: tuple[Sharding, tuple[int, ...]], dtype: str) -> None:
    sharding, shape = drawn
    assert Sharding.parse(sharding.format(MESH, shape, dtype), MESH) == (sharding, shape, dtype)


def test_the_text_of_keys_reads_back() -> None:
    """The name of a key's dtype has brackets of its own."""
    sharding = Sharding((("data",), ()))
    text = sharding.format(MESH, (4, 3), "key<fry>")
    assert Sharding.parse(text, MESH) == (sharding, (4, 3), "key<fry>")


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
def test_text(sharding: Sharding, shape: tuple[int, ...], text: str) -> None:
    assert sharding.format(MESH, shape, "f32") == text
    assert Sharding.parse(text, MESH)[0] == sharding


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f32[8@nope]", "the mesh has no axis 'nope'"),
        ("f32[8]{U:nope}", "the mesh has no axis 'nope'"),
        ("f32 8", "is not the text of a sharding"),
        ("f32[8", "is not the text of a sharding"),
        ("f32[8@]", "is not the text of a sharding"),
        ("f32[a,b]", "is not the text of a sharding"),
        ("f32[8@data data]", "is not the text of a sharding"),
    ],
)
def test_what_is_no_text_of_a_sharding_is_refused(text: str, what: str) -> None:
    with pytest.raises(ShardingError, match=what):
        Sharding.parse(text, MESH)


@given(shardings())
def test_local_shapes_are_ceilings(drawn: tuple[Sharding, tuple[int, ...]]) -> None:
    sharding, shape = drawn
    parts = [MESH.count(atoms) for atoms in sharding.dims]
    local = sharding.local_shape(MESH, shape)
    for n, m, p in zip(shape, local, parts, strict=True):
        assert m * p >= n > (m - 1) * p
    assert sharding.is_even(MESH, shape) == all(m * p == n for n, m, p in zip(shape, local, parts, strict=True))


@given(shardings())
def test_atoms_are_counted_once(drawn: tuple[Sharding, tuple[int, ...]]) -> None:
    sharding, _ = drawn
    assert len(set(sharding.atoms)) == len(sharding.atoms)
    assert sharding.is_replicated == (not sharding.atoms)


def test_unreduced_is_kept_sorted_so_that_equal_shardings_are_equal() -> None:
    one = Sharding(()).with_unreduced({"model": "add", "data": "max"})
    other = Sharding(()).with_unreduced({"data": "max", "model": "add"})
    assert one == other
    assert hash(one) == hash(other)


def test_names_of_dtypes() -> None:
    short = {jnp.bfloat16: "bf16", jnp.float32: "f32", jnp.int8: "s8", jnp.uint32: "u32", jnp.complex64: "c64"}
    for dtype, name in {**short, jnp.bool_: "pred"}.items():
        assert short_dtype(jnp.dtype(dtype)) == name
