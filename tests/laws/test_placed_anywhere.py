"""The law: wherever the arguments of a call lie, the first call, the second and the third compute the same.

JAX's dispatch in C++ takes the buffers of a committed array as they are. So the first call of a kind, which Python
sees, may be right, and later ones wrong: each kind is called three times, with those of all other kinds in between.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import allowed_to_refuse, called, said_by, unpartitioned
from placed import PLACES, every_way, mesh_of
from small_programs import PROGRAMS, named, numbers, register

# JAX says so of a donated argument that is cut otherwise than every result of its type.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

GRID = {"a": 2, "b": 4}
FAST = ("unmarked", "crossed", "ring product", "reductions")
FEW = (
    "numpy", "another device", "rows", "columns", "turned, rows", "other names", "reversed, whole", "shuffled, both",
    "half, rows", "result, rows", "an axis of size 1, named",
)  # fmt: skip
SHAPES = {"square": (8, 8), "uneven": (13, 11), "tall": (16, 8)}
ON = {"2x4": GRID, "8": {"a": 8}, "2x2x2": {"b": 2, "a": 2, "c": 2}}
OPTIONS = {
    "plain": {}, "in_shardings": {"in_shardings": P(None, "a")},
    "in_shardings, one left open": {"in_shardings": (P("a"), None)},
    "in and out": {"in_shardings": P("a"), "out_shardings": P()},
    "layout": {"layout": gshard.Layout(batch="a")},
    "donated": {"donate_argnums": 0}, "searched": {"search": 0.1, "machine": "h100:1x8"},
    "limited": {"memory_limit": "1MiB"}, "all arguments": {"keep_unused": True},
}  # fmt: skip


def as_they_come(arguments, in_shardings):
    """The arguments in the memories in which the program gets them: ``in_shardings`` name that of the devices."""
    leaves, tree = jax.tree.flatten(list(arguments))
    given = jax.tree.leaves(in_shardings, is_leaf=lambda spec: spec is None or isinstance(spec, P))
    specs = given if len(given) == len(leaves) else given * len(leaves)

    def on_device(x, spec):
        moves = spec is not None and isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host"
        return jax.numpy.asarray(np.asarray(x)) if moves else x

    return jax.tree.unflatten(tree, map(on_device, leaves, specs))


def check(name, ways, shape=(8, 8), axes=GRID, **options):
    register(0)
    small, mesh = PROGRAMS[name], mesh_of(**axes)
    if small.in_dictionary and type(options.get("in_shardings")) is tuple:
        options["in_shardings"] = small.arguments(*options["in_shardings"])
    x, y = numbers(shape, 1), numbers(shape, 2)
    want = unpartitioned(small.function, small.arguments(x, y))
    jitted = gshard.jit(named(small.function) if "layout" in options else small.function, mesh=mesh, **options)
    for i in range(3):
        for way, (a, b) in every_way(mesh, x, y, ways=ways):
            arguments = small.arguments(a, b)
            where = f"{name}, {way}, call {i}"
            with allowed_to_refuse(small.function, as_they_come(arguments, options.get("in_shardings"))):
                said, donated = said_by(jitted, arguments), (0,) if "donate_argnums" in options else ()
                called(jitted, arguments, want, donated=donated, said=said, where=where)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.one_in(2)
def test_arguments_may_lie_anywhere(name):
    check(name, tuple(PLACES))


@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "plain"])
@pytest.mark.one_in(2)
def test_whatever_the_options(option):
    check("unmarked", FEW, **OPTIONS[option])


def test_a_plan_that_was_found():
    small, shape = PROGRAMS["unmarked"], jax.ShapeDtypeStruct((8, 8), np.int32)
    found = gshard.search(small.function, shape, shape, mesh=mesh_of(a=2, b=4), machine="h100:1x8")
    check("unmarked", FEW, plan=found.plan)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("reads", ["nothing", "no element"])
def test_an_argument_without_readers_has_an_order_of_its_own(reads, keep):
    mesh, x, y = mesh_of(order=range(7, -1, -1), a=8), numbers((16, 8), 1), numbers((16, 8), 2)
    f = {"nothing": lambda x, y: y + 1, "no element": lambda x, y: y + 1 + x[:0].sum()}[reads]
    given = jax.NamedSharding(mesh, P("a")), None
    jitted = gshard.jit(f, mesh=mesh, in_shardings=given, keep_unused=keep)
    for _ in range(3):
        for way in FEW:
            placed = PLACES[way](x, mesh), PLACES["rows"](y, mesh_of(a=8))
            called(jitted, placed, y + 1, where=way)
    assert not gshard.explain(jitted, *placed).bytes_by_kind or reads == "no element"


@pytest.mark.parametrize("option", ["plain", "in_shardings"])
@pytest.mark.one_in(2)
def test_uneven_sizes(option):
    ways = "numpy", "columns", "reversed, rows", "half, whole"
    check("crossed", ways, (13, 11), **OPTIONS[option])
    for name in ("loop", "unread"):
        check(name, ways, (13, 11), {"a": 8}, **OPTIONS[option])


def test_a_donated_array_is_overwritten_only_where_it_is():
    """One that has to be moved is copied: it, and all that it shares memory with, stays."""
    mesh, x = mesh_of(d=8), numbers((16, 8), 1)
    jitted = gshard.jit(lambda x: gshard.split(x, 0, 8) + 1, mesh=mesh, donate_argnums=0)
    for _ in range(3):
        for way in FEW:
            (placed,) = (PLACES[way](x, mesh),)
            called(jitted, (placed,), x + 1, donated=(0,), where=way)
            if way in ("numpy", "another device", "half, rows"):
                np.testing.assert_array_equal(placed, x)
    state = jitted(x)
    for k in range(3):
        before, state = state, jitted(state)
        assert before.is_deleted()
        np.testing.assert_array_equal(state, x + k + 2)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_with_every_option(name, option):
    """Sizes and meshes in turn."""
    turn = list(PROGRAMS).index(name) + list(OPTIONS).index(option)
    shape, axes = [*SHAPES.values()][turn % 3], [*ON.values()][turn // 3 % 3]
    check(name, tuple(PLACES), shape, axes, **OPTIONS[option])
