"""The law: threads change nothing. Plans made at once are those made alone, and calls made at once compute the same."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard import split
from marked_chains import text_of

THREADS = 6
MESH = gshard.Mesh.abstract(a=2, b=2, c=2)


@pytest.fixture(autouse=True)
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(tasks):
    barrier, results = threading.Barrier(len(tasks)), [None] * len(tasks)
    errors = []

    def run(i):
        barrier.wait(60)
        try:
            results[i] = tasks[i]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"
    if errors:
        raise errors[0]
    return results


def program(m):
    def f(x, w1, w2, v):
        x = split(x, 0, "a")
        h = jnp.tanh(x @ split(w1, 1, "b"))
        y = h @ w2
        z = split(y.T, 0, "c") @ v
        return (z * z).sum(), jnp.sin(z.reshape(-1)).sum(), (y + 1).T @ x

    return f, [jax.ShapeDtypeStruct(shape, "float32") for shape in ((m, 64), (64, 128), (128, m), (m, 32))]


def traced_program(m):
    f, arguments = program(m)
    return gshard.stages.trace(f, *arguments)


@pytest.mark.parametrize("axes", [
    pytest.param({"a": 2, "b": 2, "c": 2}, id="three"),
    pytest.param({"a": 2, "b": 2, "c": 2, "d": 2}, id="four", marks=pytest.mark.slow),
])  # fmt: skip
def test_plans_made_at_once_are_those_made_alone(axes):
    mesh = gshard.Mesh.abstract(**axes)
    for first in (16, 64, 112):
        traced = [traced_program(first + 8 * k) for k in range(THREADS)]
        found = at_once([lambda p=p: str(gshard.stages.propagate(p, mesh)) for p in traced])
        assert found == [str(gshard.stages.propagate(p, mesh)) for p in traced]
    again = at_once([lambda: str(gshard.stages.propagate(traced[0], mesh)) for _ in range(THREADS)])
    assert again == found[:1] * THREADS, "one traced program"


def test_functions_are_traced_and_planned_at_once():
    def plan(m):
        f, arguments = program(m)
        return text_of(gshard.jit(f, mesh=MESH, machine="h100:1x8").lower(*arguments))

    sizes = [24 + 8 * k for k in range(THREADS)]
    assert at_once([lambda m=m: plan(m) for m in sizes]) == [plan(m) for m in sizes]


def test_one_function_is_called_at_once_with_arguments_of_many_shapes():
    """The program sends nothing: JAX promises nothing of collectives that several threads begin."""
    jitted = gshard.jit(lambda x, y: (split(x, 0, 8) * 3 - y, y.reshape(x.shape)), mesh=8)

    def calls(n):
        x, y = np.arange(n * 8, dtype=np.int32).reshape(n, 8) - 5, np.full((n, 8), n, np.int32)
        places = x, jax.device_put(x, jax.devices()[n % 8]), jnp.asarray(x)
        return [[np.asarray(r) for r in jitted(place, y)] for place in places]

    for found, n in zip(at_once([lambda n=n: calls(n) for n in range(3, 3 + THREADS)]), range(3, 9), strict=True):
        x = np.arange(n * 8, dtype=np.int32).reshape(n, 8) - 5
        for product, other in found:
            np.testing.assert_array_equal(product, x * 3 - n)
            np.testing.assert_array_equal(other, np.full((n, 8), n))


def test_one_function_is_called_at_once_with_arguments_of_one_shape():
    """It is traced and compiled once, and every thread gets the results of its own numbers."""
    traced = []

    @gshard.jit(mesh=8)
    def f(x):
        traced.append(1)
        return split(x, 0, 8) * 2 + 1

    arrays = [np.arange(16, dtype=np.int32) * (k + 1) for k in range(THREADS)]
    for _ in range(3):
        for got, x in zip(at_once([lambda x=x: np.asarray(f(x)) for x in arrays]), arrays, strict=True):
            np.testing.assert_array_equal(got, x * 2 + 1)
    assert len(traced) == 1
