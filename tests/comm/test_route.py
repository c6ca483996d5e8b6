"""Chunks arrive where they are wanted, and in no more rounds than the busiest device has chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.comm.halo import Window, fetch_window
from gshard.comm.route import Chunk, carry, routed
from gshard.core.mesh import Mesh
from gshard.simulator.simulate import simulate_function

SIZE, ROOM = 5, 7
MESHES = [Mesh.abstract(a=2, b=3), Mesh.abstract(a=4), Mesh.abstract(a=1, b=2)]


@st.composite
def redistributions(draw: st.DrawFn) -> tuple[Mesh, tuple[Chunk, ...]]:
    """Some chunks, which do not overlap where they come to lie."""
    mesh = draw(st.sampled_from(MESHES))
    chunks = []
    for receiver in range(mesh.size):
        at = draw(st.integers(0, 2))
        while at < ROOM:
            length = draw(st.integers(1, min(SIZE, ROOM - at)))
            low = draw(st.integers(0, SIZE - length))
            chunks.append(Chunk(draw(st.integers(0, mesh.size - 1)), low, receiver, at, length))
            at += length + draw(st.integers(0, 2))
    return mesh, tuple(chunks)


@settings(max_examples=30, deadline=None)
@given(redistributions())
def test_chunks_arrive(drawn: tuple[Mesh, tuple[Chunk, ...]]) -> None:
    mesh, chunks = drawn
    route = routed(chunks)
    x = np.arange(1, mesh.size * 2 * SIZE + 1, dtype=np.int32).reshape(mesh.size, 2, SIZE)
    expected = np.zeros((mesh.size, 2, ROOM), np.int32)
    for p in chunks:
        expected[p.receiver, :, p.at : p.at + p.length] = x[p.source, :, p.low : p.low + p.length]
    got = simulate_function(lambda part: carry(part, 1, mesh.atoms, mesh, route, ROOM), mesh.atom_sizes, x)
    np.testing.assert_array_equal(np.stack(got[0]) if isinstance(got, list) else got, expected)


@settings(max_examples=200, deadline=None)
@given(redistributions())
def test_no_more_rounds_than_the_busiest_device_needs(drawn: tuple[Mesh, tuple[Chunk, ...]]) -> None:
    _, chunks = drawn
    for rounds, own in zip((routed(chunks).stay, routed(chunks).rounds), (True, False), strict=True):
        wanted = [p for p in chunks if (p.source == p.receiver) == own]
        assert sorted(wanted, key=repr) == sorted((p for chunks in rounds for p in chunks), key=repr)
        for together in rounds:
            assert max(Counter(p.source for p in together).values()) == 1
            assert max(Counter(p.receiver for p in together).values()) == 1
        busiest = max([0, *Counter(p.source for p in wanted).values(), *Counter(p.receiver for p in wanted).values()])
        assert len(rounds) == busiest


def test_what_stays_goes_along_where_all_parts_are_put_together_alike() -> None:
    """Blocks in another order, one of which stays: a single CollectivePermute, and nothing is masked."""
    mesh, order = Mesh.abstract(a=4), (3, 1, 0, 2)
    route = routed(tuple(Chunk(source, 0, receiver, 0, SIZE) for receiver, source in enumerate(order)))
    assert [len(chunks) for chunks in (*route.stay, *route.rounds)] == [1, 3]
    x = np.arange(-10, 4 * SIZE * 2 - 10, dtype=np.int32).reshape(4, 2, SIZE)

    def local(part: Any) -> Any:
        return carry(part, 1, mesh.atoms, mesh, route, SIZE)

    (found,) = simulate_function(local, mesh.atom_sizes, x)
    np.testing.assert_array_equal(found, x[list(order)])
    made = jax.make_jaxpr(local, axis_env=[(a, mesh.atom_sizes[a]) for a in mesh.atoms])(x[0])
    assert [e.primitive.name for e in made.eqns if e.primitive.name != "slice"] == ["ppermute"]


def test_windows_within_hold_elements_and_nothing_else() -> None:
    """By counting: every position of every part's window is one of the array's."""
    for n in (1, 7, 12):
        for first in range(-2, 4):
            for step in range(4):
                for extent in range(5):
                    w = Window(n, first, step, 3, extent)
                    positions = [first + step * i + k for i in range(3) for k in range(extent)]
                    held = all(0 <= p < n for p in positions)
                    assert w.within == held or not positions, w


def test_windows_that_begin_alike_are_cut_from_the_whole_part() -> None:
    """Halos to one side, to both and inside of parts, over even and uneven parts."""
    mesh = Mesh.abstract(a=2, b=2)
    for n in (16, 13):
        size = -(-n // 4)
        x = np.arange(1, 4 * size + 1, dtype=np.float32)
        x[n:] = np.nan  # padding
        for first in range(-size, size + 1):
            for extent in range(1, 2 * size):
                w = Window(n, first, size, 4, extent)
                parts = x.reshape(4, size)
                (got,) = simulate_function(
                    lambda part, w=w: [fetch_window(part, 0, mesh.atoms, mesh, w)], mesh.atom_sizes, parts
                )
                for i in range(4):
                    begin = first + size * i
                    for k in range(extent):
                        if 0 <= begin + k < n:
                            assert got[i][k] == x[begin + k], (w, i, k)
