"""The law: memory is given back. What was planned is gone when its function is, or after ``jax.clear_caches()``.

Measured by the objects that Python's garbage collector knows, which are the same at every run; the slow tests count
bytes as well (tracing allocations takes three times as long).
"""

import gc
import tracemalloc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard import split

ON = {
    "two axes, a machine": ({"a": 4, "b": 2}, "h100:1x8"),
    "three axes": ({"a": 2, "b": 2, "c": 2}, None),
    "four axes": ({"a": 2, "b": 2, "c": 2, "d": 2}, None),
}
PLANNED = gshard.stages.Program, gshard.stages.Plan, gshard.stages.Lowered, gshard.stages.SpmdProgram
KIB = 2**10


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_do_not_count():
    jax.clear_caches()
    gc.collect()
    gc.freeze()


def block(x, w1, w2):
    x = split(x, 0, "a")
    h = jnp.tanh(jnp.einsum("bsd,dhf->bshf", x, split(w1, 1, "b")))
    return jnp.einsum("bshf,hfd->bsd", h, w2)


def shapes(length):
    return [jax.ShapeDtypeStruct(s, "float32") for s in ((8, length, 64), (64, 8, 32), (8, 32, 64))]


def held():
    gc.collect()
    return Counter(type(x).__name__ for x in gc.get_objects())


def left_by(work, rounds=3):
    """What so many rounds leave behind when caches are cleared, beyond what the first two left."""
    for i in range(2):
        work(i)
    jax.clear_caches()
    before = held()
    for i in range(2, 2 + rounds):
        work(i)
    jax.clear_caches()
    return held() - before


def assert_nothing(left):
    """Some objects come and go by themselves: weak references, what a cache of JAX's is made of."""
    assert not any(left[kind.__name__] for kind in PLANNED), left.most_common(9)
    assert sum(left.values()) < 300, left.most_common(9)


def lowered_anew(on):
    axes, machine = ON[on]

    def work(i):
        f = lambda *arguments: block(*arguments)  # noqa: E731
        assert gshard.jit(f, mesh=gshard.Mesh.abstract(**axes), machine=machine).lower(*shapes(16 + 8 * i)).spmd

    return work


@pytest.mark.parametrize("on", [pytest.param(on, marks=[pytest.mark.slow] if "three" in on else []) for on in ON])
def test_nothing_is_left_of_functions_that_are_gone(on):
    assert_nothing(left_by(lowered_anew(on)))


@pytest.mark.parametrize("on", [on if "three" in on else pytest.param(on, marks=pytest.mark.slow) for on in ON])
def test_clearing_empties_a_function_that_stays(on):
    axes, machine = ON[on]
    jitted = gshard.jit(block, mesh=gshard.Mesh.abstract(**axes), machine=machine)

    def work(i):
        assert jitted.lower(*shapes(16 + 8 * i)).spmd

    assert_nothing(left_by(work))


def test_search_and_explain_leave_nothing():
    def work(i):
        mesh = gshard.Mesh.abstract(a=4, b=2)
        f = lambda x, w: jnp.tanh(x @ split(w, 1, "a")).sum(0)  # noqa: E731
        arguments = [jax.ShapeDtypeStruct(s, "float32") for s in ((16 + 8 * i, 64), (64, 32))]
        assert gshard.search(f, *arguments, mesh=mesh, machine="h100:1x8", budget_seconds=0.2).plan
        assert str(gshard.explain(f, *arguments, mesh=mesh))

    assert_nothing(left_by(work))


def test_calls_leave_nothing_of_functions_that_are_gone():
    def work(i):
        jitted = gshard.jit(lambda x: jnp.cumsum(split(x, 0, 8), 0), mesh=8)
        x = np.arange(8 * (i + 3), dtype=np.int32).reshape(8, -1)
        for place in (x, jax.device_put(x, jax.devices()[3]), jnp.asarray(x)):
            np.testing.assert_array_equal(jitted(place), np.cumsum(x, 0))

    assert_nothing(left_by(work))


def bytes_in(work):
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_each_length_of_a_function_takes_little():
    axes, machine = ON["two axes, a machine"]
    jitted = gshard.jit(block, mesh=gshard.Mesh.abstract(**axes), machine=machine)
    jitted.lower(*shapes(16)).spmd  # noqa: B018
    assert bytes_in(lambda: [jitted.lower(*shapes(24 + 8 * k)).spmd for k in range(3)]) < 3 * 200 * KIB


@pytest.mark.slow
@pytest.mark.parametrize("on", ON)
def test_bytes_are_given_back(on):
    work = lowered_anew(on)

    def and_cleared():
        for i in range(2, 12):
            work(i)
        jax.clear_caches()

    for i in range(2):
        work(i)
    jax.clear_caches()
    assert bytes_in(and_cleared) < 100 * KIB
