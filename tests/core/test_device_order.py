"""Orders of devices: every part goes from the device that holds it to one that should, and to no other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gshard.core.mark import cut, order_for, permutation, positions_of_parts, table_of_ids
from gshard.core.mesh import Mesh

MESHES = (Mesh.abstract(devices=8), Mesh.abstract(a=2, b=6), Mesh.abstract(a=3, b=2, c=2), Mesh.abstract(a=1, b=5))


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Mesh, np.ndarray]:
    mesh = draw(st.sampled_from(MESHES))
    count = draw(st.sampled_from([n for n in range(1, mesh.size + 1) if mesh.size % n == 0]))
    rows = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    return mesh, np.array(draw(st.permutations(range(count)))).reshape(rows, -1)


@given(assignments())
def test_in_its_order_a_table_is_a_cut(drawn: tuple[Mesh, np.ndarray]) -> None:
    mesh, ids = drawn
    table = table_of_ids(ids, mesh)
    dims, order = order_for(table, mesh)
    assert sorted(order) == list(range(mesh.size))
    assert cut(table, mesh.reordered(order)) == dims
    np.testing.assert_array_equal(np.sort(np.asarray(order)[positions_of_parts(dims, mesh)]), np.sort(table))


@given(assignments(), st.data())
def test_moves_bring_every_part_home(drawn: tuple[Mesh, np.ndarray], data: st.DataObject) -> None:
    mesh, ids = drawn
    table = table_of_ids(ids, mesh)
    dims, order = order_for(table, mesh)
    home = mesh.reordered(tuple(data.draw(st.permutations(range(mesh.size)))))
    devices = home.order or tuple(range(mesh.size))
    part_of = {int(d): part for part in np.ndindex(*ids.shape) for d in table[part]}
    pairs = permutation(dims, order, home)
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(mesh.size))
    parts = {int(p): part for part in np.ndindex(*ids.shape) for p in positions_of_parts(dims, home)[part]}
    for source, target in pairs:
        assert part_of[devices[source]] == parts[target]
        holds_it_already = part_of[devices[target]] == parts[target]
        assert (source == target) == holds_it_already


def test_a_mesh_put_in_order_twice_is_in_the_second_order() -> None:
    mesh = Mesh((("d", 4),), tuple("abcd"))
    assert mesh.reordered((3, 1, 0, 2)).devices == tuple("dbac")
    assert mesh.reordered((3, 1, 0, 2)).reordered((1, 0, 2, 3)).devices == tuple("bacd")
    assert mesh.reordered((3, 1, 0, 2)).reordered(()) == mesh == mesh.reordered((0, 1, 2, 3))
    assert mesh.reordered((3, 1, 0, 2)).order_of(tuple("bacd")) == (1, 0, 2, 3)
    assert mesh.order_of(tuple("abcx")) == ()
