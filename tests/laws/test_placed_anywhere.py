"""The law: wherever the arguments of a call lie, the first call, the second and the third compute the same.

JAX's dispatch in C++ takes the buffers of a committed array as they are. So the first call of a kind, which Python
sees, may be right, and later ones wrong: each kind is called three times.
"""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import allowed_to_refuse, called, said_by, unpartitioned
from placed import PLACES, every_way, mesh_of
from small_programs import PROGRAMS, numbers, register

SHAPES = (8, 8), (13, 11), (16, 8)
ON = {"2x4": {"a": 2, "b": 4}, "8": {"d": 8}, "2x2x2": {"a": 2, "b": 2, "c": 2}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in_shardings": {"in_shardings": P(None, "a")},
    "in and out": {"in_shardings": P("b"), "out_shardings": P(None)},
    "layout": {"layout": gshard.Layout(batch="a", width="b"), "names": "width batch"},
    "donated": {"donate_argnums": 0},
    "search": {"search": 0.2, "machine": "h100:1x8"},
    "limited": {"memory_limit": "1MiB"},
    "kept": {"uneven": "keep"},
}


def check(name: str, way: str, shape: tuple[int, ...], axes: dict[str, int], **options: Any) -> None:
    small, mesh = PROGRAMS[name], mesh_of(**axes)
    x, y = numbers(shape, 1), numbers(shape, 2)
    want = unpartitioned(small.function, small.arguments(x, y))
    jitted = gshard.jit(small.function, mesh=mesh, **options)
    donated = (0,) if "donate_argnums" in options else ()
    for i in range(3):
        ((_, (a, b)),) = every_way(mesh, x, y, ways=[way])
        arguments = small.arguments(a, b)
        where = f"{name}, {way}, call {i}"
        with allowed_to_refuse(small.function, arguments):
            called(jitted, arguments, want, donated=donated, said=said_by(jitted, arguments), where=where)


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_three_calls(name: str, way: str) -> None:
    register(0)
    check(name, way, (8, 8), ON["2x4"])
