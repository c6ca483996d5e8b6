"""What passes while a device computes: one thing fetched ahead, in the order of the links, beside what may hide it."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard import split
from gshard.device.async_overlap import Step, overlapped
from gshard.device.machine import KINDS, Machine

BOTH = KINDS["v5e"].compiler
ONE_WAY = KINDS["v5p"].compiler


def gather(seconds, of, to):
    return Step(seconds, (of,), (to,), "all_gather")


def product(seconds, *reads, to="y"):
    return Step(seconds, reads, (to,), product=True)


def permute(seconds, of, to, sign=1):
    return Step(seconds, (of,), (to,), "collective_permute", way=frozenset((i, (i + sign) % 4) for i in range(4)))


FSDP = [gather(3, "w1", "W1"), product(5, "x", "W1", to="y"), gather(4, "w2", "W2"), product(5, "y", "W2", to="z")]


def test_a_gather_passes_beside_the_product_before_the_one_that_needs_it():
    assert overlapped(FSDP, BOTH) == [0, 0, 4, 0]
    assert overlapped(FSDP, ONE_WAY) == [0, 0, 0, 0]
    longer = [FSDP[0], product(1, "x", "W1"), *FSDP[2:]]
    assert overlapped(longer, BOTH) == [0, 0, 1, 0], "the rest is waited for"
    # The third gather begins when the second product does, and not beside the first one, which has time to spare.
    third = [gather(8, "w3", "W3"), product(5, "z", "W3", to="u")]
    assert overlapped([FSDP[0], product(20, "x", "W1"), *FSDP[2:], *third], BOTH) == [0, 0, 4, 0, 5, 0]
    made = [product(9, "x", to="a"), gather(4, "a", "A"), product(5, "A", to="z")]
    assert overlapped(made, BOTH) == [0, 0, 0], "what is sent must have been made"


def test_gathers_become_part_of_products_alone():
    others = [Step(7, ("x",), ("y",))]
    assert overlapped([*others, gather(4, "w", "W"), product(5, "y", "W")], BOTH) == [0, 0, 0]
    assert overlapped([*others, permute(4, "w", "W"), product(5, "y", "W")], BOTH) == [0, 4, 0]


@pytest.mark.parametrize("between", [Step(2, ("x",), ("g",), "all_reduce"), Step(0, ("x",), ("g",), region=True)])
def test_nothing_is_under_way_around_other_collectives_and_loops(between):
    steps = [product(3, "x"), between, permute(9, "w", "W"), product(5, "W")]
    assert overlapped(steps, BOTH) == [0, 0, 3, 0]


def test_there_and_back_at_the_same_time():
    """Halves that go around a ring in both directions use different links; in one direction they follow each other."""
    for sign, passed in ((-1, [4, 4]), (1, [4, 1])):
        steps = [permute(4, "a", "A"), permute(4, "b", "B", sign), product(5, "x", to="y"), product(1, "A", "B")]
        assert overlapped(steps, BOTH) == [*passed, 0, 0]


def test_halves_that_take_turns():
    """The body of a ring whose sums rotate: each half passes while the other's product is computed."""
    steps = [
        permute(3, "a", "arriving"), product(4, "x", to="p"), Step(1, ("b", "p"), ("made",)),
        permute(3, "made", "sent"), product(2, "x", to="q"), Step(0, ("arriving", "q"), ("next",)),
    ]  # fmt: skip
    assert overlapped(steps, BOTH) == [3, 0, 0, 2, 0, 0]


def mlp(x, w, v):
    """Weights split where they are stored; the second gather need not wait."""
    h = split(jnp.tanh(split(x, 0, 8) @ split(w, 0, 8)), 0, 8)
    return split(h @ split(v, 0, 8), 0, 8)


def test_the_cost_of_a_program_leaves_out_what_is_hidden():
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((65536, 4096), (4096, 4096), (4096, 4096))]
    found = gshard.explain(gshard.jit(mlp, mesh=gshard.Mesh.abstract(d=8)), *arguments)
    costs = {name: found.cost(name) for name in ("v5e:2x4", "v5p:2x2x2")}
    gathers = {name: [k for k in cost.kernels if k.name == "all_gather"] for name, cost in costs.items()}
    assert [len(x) for x in gathers.values()] == [2, 2]
    first, second = gathers["v5e:2x4"]
    assert (first.overlapped, second.seconds) == (0, 0)
    assert second.overlapped == pytest.approx(first.seconds)
    assert costs["v5e:2x4"].overlapped == second.overlapped
    assert costs["v5p:2x2x2"].overlapped == 0
    assert "of network beside them" in str(costs["v5e:2x4"])
    assert "of network beside them" not in str(costs["v5p:2x2x2"])

    # A round of a loop begins with what nothing hides.
    def layers(x, ws, vs):
        return jax.lax.scan(lambda x, wv: (mlp(x, *wv), None), x, (ws, vs))[0]

    stacked = [arguments[0], *(jax.ShapeDtypeStruct((3, 4096, 4096), jnp.bfloat16) for _ in "wv")]
    found = gshard.explain(gshard.jit(layers, mesh=gshard.Mesh.abstract(d=8)), *stacked).cost("v5e:2x4")
    rows = [(k.times, k.overlapped > 0) for k in found.kernels if k.name == "all_gather"]
    assert rows == [(3, False), (3, True)]


def test_what_follows_a_product_is_its_end():
    """What else an activation reads counts; an update writes its window; what others read too reaches memory."""

    def f(x, w, b, y):
        h = jnp.tanh(x @ w) + b
        return jax.lax.dynamic_update_slice(y, h, (3, 0))

    def twice(x, w):
        h = x @ w
        return jnp.tanh(h), h

    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 8192), (64, 8192), (512, 8192))]
    found = gshard.explain(gshard.jit(f, mesh=gshard.Mesh.abstract(d=1)), *arguments)
    v5e, cpu = found.cost(Machine.of("v5e:1x1")), found.cost("cpu:1")
    rows, others = ([c.kernels[0], c.kernels[1], c.kernels[-1]] for c in (v5e, cpu))
    assert [k.name for k in rows] == ["dot_general", "add", "dynamic_update_slice"]
    part, rate = 64 * 8192 * 4, Machine.of("v5e:1x1").memory_bandwidth
    inside = 64 * 64 * 4 + 3 * part  # x, w, b and the result, which the product writes where the update puts it
    assert [k.moved for k in rows] == [inside, 0, 0]
    assert rows[0].seconds * rate == pytest.approx(inside, rel=1e-6)
    assert rows[1].bound == "compute"
    assert others[2].seconds * cpu.machine.memory_bandwidth > 512 * 8192 * 4
    apart = gshard.explain(gshard.jit(twice, mesh=gshard.Mesh.abstract(d=1)), *arguments[:2]).cost(v5e.machine)
    assert apart.kernels[1].seconds * rate == pytest.approx(2 * part, rel=1e-6)
