"""Splits and shardings say the same thing in two ways: what is put on dimensions can be read back from them."""

import itertools
import math

from hypothesis import assume, given
from hypothesis import strategies as st

from gshard.core.mesh import Mesh
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Factor, Rule, fits, is_valid, place, project

MESH = Mesh.abstract(a=2, b=3, c=4)


@st.composite
def arrays(draw):
    """Factors of all kinds and sizes, laid out on the dimensions of one array, each once."""
    kinds = st.sampled_from([PARALLEL, PARALLEL, PARALLEL, REDUCE, COMMUNICATE, REPLICATE])
    factors = tuple(
        Factor(size, kind, "add" if kind == REDUCE else None)
        for size, kind in draw(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 5, 6, 12]), kinds), max_size=5))
    )
    dims = [[] for _ in range(draw(st.integers(1, 4)))]
    for f in draw(st.permutations(range(len(factors)))):
        dims[draw(st.integers(0, len(dims) - 1))].append(f)
    return factors, tuple(map(tuple, dims))


@st.composite
def shardings(draw, rank):
    dims = [[] for _ in range(rank)]
    for atom in draw(st.permutations(MESH.atoms)):
        at = draw(st.integers(-1, rank - 1))
        if at >= 0:
            dims[at].append(atom)
    return tuple(map(tuple, dims))


def rule_of(factors, dims):
    return Rule(factors, (dims,), (), component=(0,) * len(factors))


@st.composite
def splits(draw):
    factors, dims = draw(arrays())
    assume(factors)
    chosen = {}
    for atom in draw(st.permutations(MESH.atoms)):
        f = draw(st.integers(-1, len(factors) - 1))
        trial = {**chosen, f: [*chosen.get(f, []), atom]}
        if f >= 0 and is_valid(rule_of(factors, dims), {g: tuple(a) for g, a in trial.items()}, MESH):
            chosen = trial
    return factors, dims, {f: tuple(a) for f, a in chosen.items()}


@given(splits())
def test_a_valid_split_is_read_back_from_the_sharding_that_it_makes(drawn):
    factors, dims, split = drawn
    assert project(dims, place(dims, split), factors, MESH) == split


@given(st.data())
def test_what_is_read_off_any_sharding_fits_the_array(data):
    """Whatever the sharding, the split is valid, and puts back a beginning of what was there."""
    factors, dims = data.draw(arrays())
    sharding = data.draw(shardings(len(dims)))
    split = project(dims, sharding, factors, MESH)
    assert is_valid(rule_of(factors, dims), split, MESH)
    placed = place(dims, split)
    for got, given_ in zip(placed, sharding, strict=True):
        assert given_[: len(got)] == got
    assert project(dims, placed, factors, MESH) == split


@given(st.data())
def test_as_much_is_read_as_fits(data):
    """One more of the sharding's atoms on any dimension could not be put on its factors."""
    factors, dims = data.draw(arrays())
    sharding = data.draw(shardings(len(dims)))
    split = project(dims, sharding, factors, MESH)
    rule = rule_of(factors, dims)
    for own, got, given_ in zip(dims, place(dims, split), sharding, strict=True):
        for f, more in itertools.product(own, given_[len(got) : len(got) + 1]):
            larger = {**split, f: (*split.get(f, ()), more)}
            placed = place(dims, larger)[dims.index(own)]
            assert not (is_valid(rule, larger, MESH) and placed == given_[: len(placed)])


@given(splits())
def test_minor_factors_are_cut_only_when_major_ones_are_cut_completely(drawn):
    factors, dims, split = drawn
    for dim in dims:
        for major, minor in itertools.pairwise(dim):
            if split.get(minor):
                assert MESH.count(split.get(major, ())) == factors[major].size


@given(splits())
def test_the_parts_of_a_compound_dimension_are_equal_and_contiguous(drawn):
    """Counted out element by element: part ``i`` of the dimension is elements ``i * size`` to ``(i + 1) * size``."""
    factors, dims, split = drawn
    for dim in dims:
        if len(dim) < 2:
            continue
        sizes = [factors[f].size for f in dim]
        local = [-(-factors[f].size // MESH.count(split.get(f, ()))) for f in dim]
        counts = [MESH.count(split.get(f, ())) for f in dim]
        flat = list(itertools.product(*(range(n) for n in sizes)))
        owner = [tuple(i // m for i, m in zip(index, local, strict=True)) for index in flat]
        parts = list(itertools.product(*(range(p) for p in counts)))
        size = math.prod(sizes) // len(parts)
        assert owner == [part for part in parts for _ in range(size)]


@given(splits(), st.sampled_from(MESH.atoms), st.data())
def test_splits_that_break_a_law_are_not_valid(drawn, atom, data):
    factors, dims, split = drawn
    rule = rule_of(factors, dims)
    for f, factor in enumerate(factors):
        if factor.kind == REPLICATE:
            assert not is_valid(rule, {f: (atom,)}, MESH)
        if atom in itertools.chain(*split.values()):
            assert not is_valid(rule, {**split, f: (*split.get(f, ()), atom)}, MESH), "an atom twice"


def test_operands_side_by_side_and_compound_dimensions():
    """Factors that never meet may use one atom each; a compound dimension takes no uneven parts."""
    factors = (Factor(4), Factor(6))
    apart = Rule(factors, (((0,),), ((1,),)), (((0,),), ((1,),)), component=(0, 1))
    together = Rule(factors, (((0,), (1,)),), (), component=(0, 0))
    assert is_valid(apart, {0: ("a",), 1: ("a",)}, MESH)
    assert not is_valid(together, {0: ("a",), 1: ("a",)}, MESH)
    assert not fits(((0, 1),), {0: ("b",)}, factors, MESH)
    assert fits(((0,), (1,)), {0: ("b",)}, factors, MESH)
    assert project(((0, 1),), (("b",),), factors, MESH) == {}
    assert project(((0, 1),), (("a", "b"),), factors, MESH) == {0: ("a",)}
