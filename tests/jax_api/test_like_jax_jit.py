"""gshard.jit does what jax.jit does: each case runs under both, and values, types, trees and errors must agree.

A case is a function of ``t``: ``t.jit`` has the signature of ``jax.jit``, and ``t.split`` marks the first dimension of
an array (under ``jax.jit`` it is the identity). What the case returns is compared leaf by leaf: value, dtype, weak type
and shape of arrays, tree and plain values of the rest. With ``raises=`` it must raise that under ``jax.jit``, and an
error of that type under ours. The ideas are those of JAX's own tests of ``jax.jit``, which ``run.py`` runs themselves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import logging
import operator
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import gshard

MESHES = (1, 8)


@dataclasses.dataclass(frozen=True)
class Tools:
    """One way to jit, and a mark that fits it."""

    jit: Callable[..., Any]
    split: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program that uses ``jit``, and the error that it must end with, if any."""

    run: Callable[[Tools], Any]
    raises: type[Exception] | tuple[type[Exception], ...] | None
    meshes: tuple[int, ...]


CASES: dict[str, Case] = {}


def case(
    run: Callable[[Tools], Any] | None = None,
    *,
    raises: type[Exception] | tuple[type[Exception], ...] | None = None,
    meshes: tuple[int, ...] = MESHES,
) -> Any:
    """Adds a case to the table."""
    if run is None:
        return functools.partial(case, raises=raises, meshes=meshes)
    assert run.__name__ not in CASES
    CASES[run.__name__] = Case(run, raises, meshes)
    return run


def ours(mesh: int) -> Tools:
    return Tools(lambda *f, **options: gshard.jit(*f, mesh=mesh, **options), lambda x: gshard.split(x, 0, mesh))


JAX = Tools(jax.jit, lambda x: x)


def compare(found: Any, expected: Any) -> None:
    """Trees, arrays in all that JAX knows of them, and plain values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not isinstance(y, jax.Array):
            assert type(x) is type(y)
            np.testing.assert_equal(x, y)
            continue
        assert isinstance(x, jax.Array)
        assert (x.shape, x.dtype, x.aval.weak_type) == (y.shape, y.dtype, y.aval.weak_type)
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if jnp.issubdtype(y.dtype, jnp.inexact):
            # Sums of a few numbers may be taken in another order.
            np.testing.assert_allclose(np.asarray(x, np.complex128), np.asarray(y, np.complex128), 1e-5, 1e-6)
        else:
            np.testing.assert_array_equal(x, y)


# Functions, methods, callables


@case
def decorated(t: Tools) -> Any:
    @t.jit
    def f(x: Any) -> Any:
        return t.split(x) + 1

    return f(jnp.arange(8.0))


@case
def decorated_with_options(t: Tools) -> Any:
    @t.jit(static_argnames=["flag"])
    def f(x: Any, flag: bool) -> Any:
        return x if flag else -x

    return f(1, True), f(1, False), f(1, flag=True)


@case
def method_of_a_pytree(t: Tools) -> Any:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: Any

        @t.jit
        def __call__(self, x: Any) -> Any:
            return t.split(x) @ self.w

        @t.jit
        def named(self, x: Any, *, scale: Any = 2.0) -> Any:
            return x * scale + self.w.sum()

    layer = Layer(jnp.arange(12.0).reshape(4, 3))
    return layer(jnp.ones((8, 4))), layer.named(jnp.ones(3)), layer.named(jnp.ones(3), scale=3)


@case
def method_with_static_self(t: Tools) -> Any:
    class Scale:
        def __init__(self, by: float):
            self.by = by

        @functools.partial(t.jit, static_argnums=(0,))
        def apply(self, x: Any) -> Any:
            return x * self.by

    return Scale(2.0).apply(jnp.arange(3)), Scale(3.0).apply(jnp.arange(3))


@case
def method_from_the_class(t: Tools) -> Any:
    class A:
        @t.jit(static_argnums=0)
        def add(self, x: Any) -> Any:
            return x + 2

    return A.add(A(), 3)


@case
def bound_method(t: Tools) -> Any:
    class A:
        by = 3

        def add(self, x: Any) -> Any:
            return x + self.by

    return t.jit(A().add)(4)


@case
def static_and_class_methods(t: Tools) -> Any:
    class A:
        @staticmethod
        @t.jit
        def one(x: Any) -> Any:
            return x + 1

        @classmethod
        @functools.partial(t.jit, static_argnums=0)
        def two(cls, x: Any) -> Any:
            return x + 2

    return A.one(1), A().one(1), A.two(1), A().two(1)


@case
def partials(t: Tools) -> Any:
    def f(a: Any, b: Any, *, c: Any = 1) -> Any:
        return a + 2 * b + 4 * c

    return (
        t.jit(functools.partial(f, 1))(2),
        t.jit(functools.partial(f, c=5))(1, b=2),
        t.jit(functools.partial(f))(1, 2),
    )


@case
def callable_object(t: Tools) -> Any:
    class Plus:
        def __init__(self, n: int):
            self.n = n

        def __call__(self, x: Any) -> Any:
            return x + self.n

    return t.jit(Plus(1))(jnp.arange(3)), t.jit(Plus(2))(jnp.arange(3))


@case
def functions_of_jax(t: Tools) -> Any:
    return t.jit(jnp.sin)(1.0), t.jit(jnp.add)(1, 2.0), t.jit(jax.nn.relu)(-1.0), t.jit(jax.grad(jnp.sin))(1.0)


@case
def jit_of_jit(t: Tools) -> Any:
    return t.jit(t.jit(lambda x: x + 1))(2)


@case
def options_on_top_of_jit(t: Tools) -> Any:
    inner = t.jit(lambda x, n: x * n, static_argnums=1)
    return t.jit(inner, static_argnums=1)(jnp.arange(3), 2)


@case(raises=TypeError)
def jit_of_a_number(t: Tools) -> Any:
    t.jit(3)


@case(raises=TypeError)
def jit_of_a_generator(t: Tools) -> Any:
    def numbers(x: Any) -> Any:
        yield x

    t.jit(numbers)


@case(raises=TypeError)
def jit_of_a_staticmethod(t: Tools) -> Any:
    t.jit(staticmethod(lambda x: x))


@case(raises=TypeError)
def jit_of_a_classmethod(t: Tools) -> Any:
    t.jit(classmethod(lambda c, x: x))


@case(raises=TypeError)
def an_option_that_does_not_exist(t: Tools) -> Any:
    t.jit(lambda x: x, statc_argnums=0)


@case
def attributes_of_the_function(t: Tools) -> Any:
    def f(a: int, b: float = 2.0) -> float:
        """Adds."""
        return a + b

    g = t.jit(f)
    signature = str(inspect.signature(g))
    return g.__name__, g.__doc__, g.__module__, g.__qualname__, g.__wrapped__ is f, signature, callable(g), g in {g: 1}


@case
def attributes_can_be_set(t: Tools) -> Any:
    g = t.jit(lambda x: x)
    g.note = 3
    return g.note


@case
def repr_names_the_function(t: Tools) -> Any:
    def a_function_with_a_name(x: Any) -> Any:
        return x

    return "a_function_with_a_name" in repr(t.jit(a_function_with_a_name)), isinstance(repr(t.jit(lambda: 1)), str)


@case
def repr_of_a_callable_whose_repr_fails(t: Tools) -> Any:
    class Bad:
        def __call__(self) -> None:
            pass

        def __repr__(self) -> str:
            raise ValueError("no repr")

    return isinstance(repr(t.jit(Bad())), str)


@case
def copies(t: Tools) -> Any:
    g = t.jit(lambda x: copy.deepcopy(copy.copy(x)) + 1)
    return copy.copy(g)(1), copy.deepcopy(g)(1)


# Arguments: how they are given


@case
def defaults_and_names(t: Tools) -> Any:
    f = t.jit(lambda a, b=2, *, c=3, d: a + 10 * b + 100 * c + 1000 * d)
    return f(1, d=4), f(d=4, a=1), f(1, 5, d=1, c=0), f(b=7, d=0, a=1)


@case
def order_of_names_is_nothing(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda **kw: traced.append(1) or kw["a"] - kw["b"])
    return f(a=3, b=1), f(b=1, a=3), len(traced)


@case
def position_and_name_are_two_programs(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda x, y: traced.append(1) or x - y)
    return f(3, 1), f(3, y=1), f(y=1, x=3), f(3, y=2), len(traced)


@case
def var_arguments(t: Tools) -> Any:
    f = t.jit(lambda *args, **kwargs: (args, kwargs, sum(args) + sum(kwargs.values())))
    return f(), f(1), f(1, 2.0, z=3, a=jnp.arange(2))


@case
def positional_only(t: Tools) -> Any:
    def f(a: Any, /, b: Any, *, c: Any) -> Any:
        return a, b, c

    return t.jit(f)(1, 2, c=3), t.jit(f)(1, b=2, c=3)


@case
def five_hundred_arguments(t: Tools) -> Any:
    return t.jit(lambda xs: sum(xs))(list(range(500)))


@case
def unused_arguments(t: Tools) -> Any:
    f = t.jit(lambda x, y, z: y + 1)
    return f(1, 2, 3), f(jnp.arange(8), 2.0, None), f("".split(), 1, ())


@case
def keep_unused(t: Tools) -> Any:
    return t.jit(lambda x, y: y + 1, keep_unused=True)(jnp.arange(8), 2)


@case
def no_arguments_no_results(t: Tools) -> Any:
    return t.jit(lambda: None)(), t.jit(lambda: ())(), t.jit(lambda: jnp.ones(3))(), t.jit(lambda x: None)(1)


@case(raises=TypeError)
def too_few_arguments(t: Tools) -> Any:
    t.jit(lambda x, y: x)(1)


@case(raises=TypeError)
def too_many_arguments(t: Tools) -> Any:
    t.jit(lambda x: x)(1, 2)


@case(raises=TypeError)
def unknown_name(t: Tools) -> Any:
    t.jit(lambda x: x)(1, zz=2)


# Arguments: what they are


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_pytree_node_class
class Tagged:
    def __init__(self, value: Any, tag: str):
        self.value, self.tag = value, tag

    def tree_flatten(self) -> Any:
        return (self.value,), self.tag

    @classmethod
    def tree_unflatten(cls, tag: str, values: Any) -> Any:
        return cls(values[0], tag)


@case
def trees(t: Tools) -> Any:
    f = t.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))
    return f({"b": 1, "a": [jnp.arange(8), (2.0, None)], "c": ()}), f(Point(1, jnp.ones(2))), f(None), f([]), f({})


@case
def none_among_leaves(t: Tools) -> Any:
    f = t.jit(lambda a, b, c: (b, t.split(a["x"]) + 1, None, c))
    return f({"x": jnp.arange(8), "y": None}, None, (None, 3))


@case
def nodes_of_the_user(t: Tools) -> Any:
    traced = []

    def f(x: Tagged) -> Tagged:
        traced.append(x.tag)
        return Tagged(x.value * (2 if x.tag == "double" else 1), x.tag + "!")

    g = t.jit(f)
    found = g(Tagged(jnp.arange(8), "double")), g(Tagged(jnp.arange(8), "same")), g(Tagged(jnp.arange(8), "same"))
    return [(x.value, x.tag) for x in found], traced


@case
def scalars_of_all_kinds(t: Tools) -> Any:
    f = t.jit(lambda x: (x, x + 1))
    kinds = [1, 1.5, True, 1j, np.int8(1), np.float32(1), np.float64(1), np.bool_(True), np.complex64(1j)]
    return [f(x) for x in [*kinds, np.array(2), np.arange(3), jnp.int16(3), jnp.bfloat16(2), np.uint32(7)]]


@case
def weak_types_stay(t: Tools) -> Any:
    f = t.jit(lambda x: (x, x * 2, jnp.roll(x, 1), x[:2], jnp.concatenate([x, x]), x.astype(x.dtype)))
    weak = jnp.broadcast_to(2.0, (8,))
    return f(weak), [y + jnp.bfloat16(1) for y in f(weak)[:4]], t.jit(lambda: 1.0)(), t.jit(lambda x: 2 * x)(3)


@case
def weak_types_of_split_arrays(t: Tools) -> Any:
    weak = jnp.broadcast_to(2, (8,))
    return t.jit(lambda x: (t.split(x) * 2, jnp.sort(t.split(x)), jnp.cumsum(t.split(x)), t.split(x).sum()))(weak)


@case
def weak_and_strong_are_two_programs(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda x: traced.append(1) or x + jnp.bfloat16(1))
    return f(1.0), f(2.0), f(np.float32(1)), f(jnp.float32(2)), f(jnp.bfloat16(1)), len(traced)


@case
def types_of_all_widths(t: Tools) -> Any:
    f = t.jit(lambda x: (t.split(x), t.split(x) + x))
    names = ["int4", "int8", "uint16", "float8_e4m3fn", "bfloat16", "float16", "complex64", "bool"]
    return [f(jnp.arange(8).astype(name)) for name in names if name not in ("int4", "float8_e4m3fn")]


@case
def wide_types(t: Tools) -> Any:
    f = t.jit(lambda x: t.split(x) * 2)
    x = np.arange(8, dtype=np.float64) / 3
    with jax.enable_x64(True):
        wide = f(x)
    return f(x), wide.dtype.name, np.asarray(wide)


@case
def keys(t: Tools) -> Any:
    f = t.jit(lambda k: (jax.random.split(k, 4), jax.random.uniform(k, (8,)), jax.random.fold_in(k, 3)))
    return f(jax.random.key(0)), f(jax.random.PRNGKey(0)), f(jax.random.key(0, impl="rbg"))[0]


@case
def arrays_of_numpy_are_not_changed(t: Tools) -> Any:
    x = np.arange(8.0, dtype=np.float32)
    y = t.jit(lambda x: x + 1)(x)
    x[:] = 0
    return y


@case
def empty_arrays(t: Tools) -> Any:
    f = t.jit(lambda x: (t.split(x) + 1, x.sum(), x.reshape(-1)))
    return f(jnp.zeros((0, 3))), f(jnp.zeros((3, 0)))


@case(raises=TypeError)
def a_string(t: Tools) -> Any:
    t.jit(lambda x: x)("text")


@case(raises=TypeError)
def an_object(t: Tools) -> Any:
    t.jit(lambda x: 1)({"a": object()})


@case(raises=TypeError)
def a_type(t: Tools) -> Any:
    t.jit(lambda x: x)(jnp.int32)


@case(raises=TypeError)
def an_array_of_strings(t: Tools) -> Any:
    t.jit(lambda x: x)(np.array(["a"]))


@case(raises=ValueError)
def a_masked_array(t: Tools) -> Any:
    t.jit(lambda x: x)(np.ma.array([1, 2], mask=[True, False]))


@case(raises=OverflowError)
def a_number_too_large(t: Tools) -> Any:
    t.jit(lambda x: x)(2**70)


@case(raises=ValueError)
def keys_that_do_not_compare(t: Tools) -> Any:
    t.jit(lambda d: d[1])({1: 1.0, "a": 2.0})


# Results


@case
def results_of_all_kinds(t: Tools) -> Any:
    f = t.jit(lambda x: (1, 2.0, True, None, np.arange(3), np.float32(1), jnp.ones(2), [x, {"k": x}]))
    return f(3)


@case
def arguments_as_results(t: Tools) -> Any:
    x = jnp.arange(8)
    return t.jit(lambda x, y: (x, y, x))(x, 2.0), t.jit(lambda x: x)(x)


@case(raises=TypeError)
def a_string_as_result(t: Tools) -> Any:
    t.jit(lambda x: "text")(1)


@case(raises=TypeError)
def a_function_as_result(t: Tools) -> Any:
    t.jit(lambda x: (x, {"f": len}))(1)


@case
def results_under_jit_are_arrays(t: Tools) -> Any:
    def f(x: Any) -> Any:
        found = t.jit(lambda x, y: (y + 2 * x, 3, np.float32(1), None))(2, x)
        return found, isinstance(found[1], jax.Array)

    return t.jit(lambda x: f(x)[0])(3), jax.jit(lambda x: f(x)[0])(3)


@case
def results_go_on_into_jax(t: Tools) -> Any:
    y = t.jit(lambda x: t.split(x) * 2)(jnp.arange(8.0))
    return y + jnp.ones(8), float(y.sum()), jax.jit(jnp.sin)(y), np.asarray(y), y.tolist(), y[3:5]


# Static arguments


@case
def static_by_number_and_name(t: Tools) -> Any:
    def f(x: Any, n: int = 2, *, kind: str = "plus") -> Any:
        assert isinstance(n, int)
        return x + n if kind == "plus" else x - n

    g = t.jit(f, static_argnums=1, static_argnames="kind")
    return g(1), g(1, 3), g(1, 3, kind="minus"), t.jit(f, static_argnames=("n", "kind"))(1, n=5, kind="minus")


@case
def static_by_value_and_type(t: Tools) -> Any:
    traced = []

    def f(x: Any, n: Any) -> Any:
        traced.append(type(n))
        return x * 2 if n is True else x + n

    g = t.jit(f, static_argnums=1)
    x = jnp.arange(3)
    return [g(x, n) for n in (1, True, 1.0, np.int32(1), 1, True, 1.0)], len(traced)


@case
def static_result(t: Tools) -> Any:
    f = t.jit(lambda k: k, static_argnums=0)
    return [f(x) for x in (1, True, 1.0, 0, False, 0.0)]


@case
def static_equal_objects_share(t: Tools) -> Any:
    class Same:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same)

    traced = []
    f = t.jit(lambda x, s: traced.append(1) or x, static_argnums=1)
    return f(1, Same()), f(2, Same()), len(traced)


@case
def static_of_many_kinds(t: Tools) -> Any:
    f = t.jit(lambda s, x: (x, str(s)) and x + len(str(s)), static_argnums=0)
    return [f(s, 1) for s in (None, "abc", (1, (2, "x")), frozenset({1}), ..., 1 + 2j, b"xy", range(3))]


@case
def static_function(t: Tools) -> Any:
    f = t.jit(lambda g, x: g(x), static_argnums=0)
    return f(jnp.sin, 1.0), f(jnp.cos, 1.0), f(t.jit(jnp.tan), 1.0)


@case
def static_negative_number(t: Tools) -> Any:
    return t.jit(lambda x, y, n: x + y * n, static_argnums=-1)(1, 2, 3)


@case
def static_given_by_the_other_way(t: Tools) -> Any:
    def f(x: Any, y: Any) -> tuple[Any, ...]:
        return tuple(int(isinstance(v, jax.core.Tracer)) for v in (x, y))

    numbers, names = t.jit(f, static_argnums=1), t.jit(f, static_argnames="y")
    return numbers(1, 2), numbers(1, y=2), names(1, 2), names(1, y=2)


@case
def static_numbers_and_names_that_disagree(t: Tools) -> Any:
    def f(x: Any, y: Any) -> tuple[Any, ...]:
        return tuple(int(isinstance(v, jax.core.Tracer)) for v in (x, y))

    numbers = t.jit(f, static_argnums=1, static_argnames=())
    names = t.jit(f, static_argnums=(), static_argnames="y")
    mixed = t.jit(f, static_argnums=(1,), static_argnames="x")
    return numbers(1, 2), numbers(1, y=2), names(1, 2), names(1, y=2), mixed(2, 3), mixed(1, y=3), mixed(x=1, y=3)


@case
def static_beyond_what_is_given(t: Tools) -> Any:
    return t.jit(lambda x, n=3: x * n, static_argnums=1)(2), t.jit(lambda *a: sum(a), static_argnums=(0, 5))(1, 2)


@case(raises=ValueError)
def static_number_too_large(t: Tools) -> Any:
    t.jit(lambda a, b: a, static_argnums=(0, 2))


@case(raises=ValueError)
def static_number_too_small(t: Tools) -> Any:
    t.jit(lambda a, b: a, static_argnums=(-3,))


@case(raises=ValueError)
def static_number_of_a_name_only(t: Tools) -> Any:
    t.jit(lambda a, *, b: a, static_argnums=1)


@case(raises=ValueError)
def static_name_that_does_not_exist(t: Tools) -> Any:
    t.jit(lambda a, b: a, static_argnames=("b", "c"))


@case(raises=ValueError)
def static_name_of_the_rest(t: Tools) -> Any:
    t.jit(lambda a, *rest: a, static_argnames="rest")


@case
def static_name_among_the_rest(t: Tools) -> Any:
    return t.jit(lambda x, **kw: x * kw["n"] if kw["n"] > 1 else x, static_argnames="n")(2, n=3)


@case(raises=ValueError)
def static_that_cannot_be_hashed(t: Tools) -> Any:
    t.jit(lambda x, y: x, static_argnums=1)(1, np.arange(2))


@case(raises=ValueError)
def static_that_cannot_be_compared(t: Tools) -> Any:
    class Bad:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise NotImplementedError

    f = t.jit(lambda x, y: x, static_argnums=1)
    f(1, Bad())
    f(1, Bad())


@case(raises=ValueError)
def static_and_donated(t: Tools) -> Any:
    t.jit(lambda x: x, static_argnames="x", donate_argnames="x")


@case(raises=TypeError)
def static_numbers_that_are_no_numbers(t: Tools) -> Any:
    t.jit(lambda x: x, static_argnums="a")


@case(raises=TypeError)
def static_names_that_are_no_names(t: Tools) -> Any:
    t.jit(lambda x: x, static_argnames=1)


@case
def static_under_transformations(t: Tools) -> Any:
    f = t.jit(lambda x, n: x**n, static_argnums=1)
    x = jnp.arange(1.0, 4.0)
    return (
        jax.vmap(lambda x: f(x, 2))(x),
        jax.grad(f)(2.0, 3),
        jax.vmap(jax.grad(lambda x: f(x, 3)))(x),
        jax.jit(f, static_argnums=1)(x, 2),
    )


# Donation


@case
def donated_is_deleted(t: Tools) -> Any:
    f = t.jit(lambda x, y: (t.split(x) + 1, y * 2), donate_argnums=0)
    x, y = jnp.arange(8.0), jnp.ones(3)
    # What is where the program wants it is donated; a first call may have to move it.
    x, y = f(x, y)
    found = f(x, y)
    return found, x.is_deleted(), y.is_deleted()


@case(meshes=(1,))
def donated_at_the_first_call(t: Tools) -> Any:
    """On one device nothing has to be moved."""
    x, y = jnp.ones([]), jax.device_put(jnp.arange(8.0), jax.devices()[0])
    return t.jit(lambda x, y: (x + x - x, y * 2), donate_argnums=(0, 1))(x, y), x.is_deleted(), y.is_deleted()


@case
def donated_by_name(t: Tools) -> Any:
    f = t.jit(lambda x, y: (x + 1, y + 1), donate_argnames="y")
    x, y = f(jnp.arange(8.0), jnp.ones(3))
    found = f(x, y=y)
    return found, x.is_deleted(), y.is_deleted()


@case
def donated_number_given_by_name(t: Tools) -> Any:
    f = t.jit(lambda x: x + 1, donate_argnums=0)
    x = f(jnp.arange(8.0))
    return f(x=x), x.is_deleted()


@case
def donated_beside_static(t: Tools) -> Any:
    f = t.jit(lambda a, b, c: (a * b, c + a), static_argnums=0, donate_argnums=2)
    b, c = f(2, jnp.ones(4), jnp.ones(3))
    found = f(2, b, c)
    return found, b.is_deleted(), c.is_deleted()


@case
def donated_tree(t: Tools) -> Any:
    step = t.jit(lambda s, x: {k: v + x for k, v in s.items()}, donate_argnums=0)
    state = {"m": jnp.zeros(8), "v": jnp.ones((4, 2))}
    for i in range(4):
        before, state = state, step(state, float(i))
    return state, [x.is_deleted() for x in before.values()]


@case(raises=(ValueError, RuntimeError))
def donated_used_again(t: Tools) -> Any:
    f = t.jit(lambda x: x + 1, donate_argnums=0)
    x = f(jnp.arange(8.0))
    f(x)
    f(x)


@case
def donated_numpy_stays(t: Tools) -> Any:
    x = np.arange(8, dtype=np.float32)
    f = t.jit(lambda x: x * 2, donate_argnums=0)
    return f(x), f(x), x


@case
def donated_for_nothing_warns(t: Tools) -> Any:
    f = t.jit(lambda x, y: x.sum() + y.sum(), donate_argnums=(0, 1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = f(jnp.ones(2), jnp.ones(2))
    return result, any("donated buffers were not usable" in str(w.message) for w in found)


@case(raises=ValueError)
def donated_number_that_does_not_exist(t: Tools) -> Any:
    t.jit(lambda a: a, donate_argnums=1)


@case(raises=ValueError)
def donated_name_that_does_not_exist(t: Tools) -> Any:
    t.jit(lambda a: a, donate_argnames="b")


@case
def donated_inside_is_ignored(t: Tools) -> Any:
    inner = t.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(3.0)
    found = jax.jit(lambda x: inner(x) + x)(x), lax.scan(lambda c, _: (inner(c) + c, None), x, None, length=2)[0]
    return found, jax.grad(lambda x: inner(x).sum())(x + 1), x


ALIASED = """
import jax, jax.numpy as jnp, numpy as np, gshard

def tried(f, *arguments):
    try:
        return jax.tree.map(np.asarray, f(*arguments))
    except (RuntimeError, ValueError, gshard.ShardingError):
        return None  # refused: as good an answer

for mesh in (1, 8):
    for donated in (0, 1, (0, 1)):
        f = gshard.jit(lambda a, b: (a + 1, b * 2), mesh=mesh, donate_argnums=donated)
        for n in (8, 3):
            x = jnp.arange(1.0, n + 1)
            if found := tried(f, x, x):
                np.testing.assert_array_equal(found, (np.arange(1.0, n + 1) + 1, np.arange(1.0, n + 1) * 2))
    zeros = jnp.zeros((16, 4))
    step = gshard.jit(lambda s: {"m": s["m"] + 1, "v": s["v"] + 2}, mesh=mesh, donate_argnums=0)
    if state := tried(step, {"m": zeros, "v": zeros}):
        state = tried(step, state)
        np.testing.assert_array_equal(state["m"], np.full((16, 4), 2.0))
        np.testing.assert_array_equal(state["v"], np.full((16, 4), 4.0))
print("lived")
"""


def test_one_array_given_twice_and_donated() -> None:
    """Works or raises; it must not take the process down, which is why it runs in one of its own."""
    ended = subprocess.run([sys.executable, "-c", ALIASED], capture_output=True, text=True, check=False)
    assert ended.stdout == "lived\n", f"ended with {ended.returncode}: {ended.stderr[-1000:]}"


# When it traces


@case
def traces_once_for_a_kind_of_arguments(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda x: traced.append(1) or x["a"] + 1)
    for x in (np.zeros(3), np.ones(3), np.zeros(4), np.zeros(3, np.int32), jnp.ones(3), np.ones(3, np.float32)):
        f({"a": x})
    return len(traced)


@case
def two_of_one_function_share_their_trace(t: Tools) -> Any:
    traced = []

    def f(x: Any) -> Any:
        traced.append(1)
        return x + 1

    return t.jit(f)(1), t.jit(f)(2), len(traced)


@case
def traces_once_inside_and_outside(t: Tools) -> Any:
    traced = []

    @t.jit
    def inner(x: Any) -> Any:
        traced.append(1)
        return 2 * x

    @t.jit
    def outer(x: Any) -> Any:
        for _ in range(5):
            x = inner(x)
        return x

    x = jnp.arange(4)
    return outer(x), outer(x), inner(x), len(traced)


@case
def traces_again_when_cleared(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda x: traced.append(1) or x)
    f(1), f(2)
    f.clear_cache()
    f(1)
    jax.clear_caches()
    f(1), f(1)
    return len(traced)


@case
def configuration_is_part_of_the_kind(t: Tools) -> Any:
    f = t.jit(lambda x: (x.astype(float), jax.random.bits(jax.random.key(0), (2,))))
    x = jnp.arange(3)
    first = f(x)
    with jax.threefry_partitionable(False):
        second = f(x)
    with jax.enable_x64(True):
        third = f(x)
    return first, second, [(np.asarray(y), y.dtype.name) for y in third], f(x)


@case
def precision_is_part_of_the_kind(t: Tools) -> Any:
    traced = []
    f = t.jit(lambda x: traced.append(1) or x @ x)
    x = jnp.eye(3)
    for precision in ("float32", "bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            f(x)
    return len(traced)


@case(raises=ValueError)
def promotion_is_part_of_the_kind(t: Tools) -> Any:
    f = t.jit(lambda x: x + jnp.float32(1))
    x = jnp.arange(3)
    f(x)
    with jax.numpy_dtype_promotion("strict"):
        f(x)


@case
def sizes_of_named_axes_are_part_of_the_kind(t: Tools) -> Any:
    f = t.jit(lambda: lax.axis_size("i"))
    return [jax.vmap(f, axis_name="i", axis_size=n, out_axes=None)() for n in (2, 3, 2)]


@case
def a_global_is_read_once(t: Tools) -> Any:
    box = [1]
    f = t.jit(lambda x: x + box[0])
    first = f(1)
    box[0] = 100
    return first, f(1), f(1.0)


@case(raises=RuntimeError)
def no_tracing(t: Tools) -> Any:
    f = t.jit(lambda x: x + 1)
    f(jnp.arange(3))
    with jax.no_tracing():
        f(jnp.arange(4))


@case
def compilations_are_logged_by_name(t: Tools) -> Any:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def a_function_with_a_name(x: Any) -> Any:
        return x * 2 + 1

    handler, logger = Kept(), logging.getLogger("jax")
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        with jax.log_compiles(True):
            t.jit(a_function_with_a_name)(1)
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    return any("a_function_with_a_name" in line and "Compiling" in line for line in lines)


# Lowering and what comes after


def affine(x: Any, *, b: Any) -> Any:
    return {"y": jnp.sqrt(x**2) @ jnp.ones((4, 2)) + b}


X = np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)


@case
def lowered_compiled_called(t: Tools) -> Any:
    compiled = t.jit(affine).lower(X, b=1.0).compile()
    return compiled(X, b=2.0), compiled(X + 1, b=3.0)


@case
def lowered_of_scalars(t: Tools) -> Any:
    return t.jit(lambda x: x + 1).lower(1.0).compile()(4.0), t.jit(lambda x: x).lower(1).compile()(4)


@case
def lowered_of_shapes(t: Tools) -> Any:
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return t.jit(lambda x: t.split(x) * 2).lower(shape).compile()(X)


@case
def lowered_with_statics(t: Tools) -> Any:
    f = t.jit(lambda x, n: x * n, static_argnums=1)
    return f.lower(X, 3).compile()(X)


@case
def trees_of_what_is_lowered(t: Tools) -> Any:
    lowered = t.jit(affine).lower(X, b=1.0)
    compiled = lowered.compile()
    return [(x.in_tree == jax.tree.structure(((0,), {"b": 0})), str(x.out_tree)) for x in (lowered, compiled)]


@case
def types_of_what_is_lowered(t: Tools) -> Any:
    lowered = t.jit(affine).lower(X, b=1.0)
    compiled = lowered.compile()
    inputs = [[(a.shape, a.dtype.name, a.weak_type) for a in jax.tree.leaves(x.in_avals)] for x in (lowered, compiled)]
    out = [(s.shape, s.dtype.name) for s in jax.tree.leaves(lowered.out_info)]
    return inputs, out, str(jax.tree.structure(lowered.out_info))


@case
def donations_of_what_is_lowered(t: Tools) -> Any:
    f = t.jit(lambda a, b, *, c: (a, b, c), donate_argnums=0, donate_argnames="c")
    args, kwargs = f.lower({"x": 1.0}, 2.0, c=3.0).args_info
    return args[0]["x"].donated, args[1].donated, kwargs["c"].donated


@case
def texts_of_what_is_lowered(t: Tools) -> Any:
    lowered = t.jit(lambda x: jnp.cos(x) + 1).lower(X)
    texts = [lowered.as_text(), lowered.as_text("stablehlo"), lowered.as_text("hlo"), lowered.compile().as_text()]
    return [isinstance(text, str) and "cosine" in text for text in texts], "func" in str(lowered.compiler_ir())


@case
def analyses_of_what_is_compiled(t: Tools) -> Any:
    compiled = t.jit(lambda x: x @ x.T).lower(X).compile()
    memory = compiled.memory_analysis()
    return compiled.cost_analysis()["flops"] > 0, memory.argument_size_in_bytes > 0, memory.output_size_in_bytes > 0


@case
def costs_of_what_is_lowered(t: Tools) -> Any:
    return t.jit(lambda x: x @ x.T).lower(X).cost_analysis()["flops"] > 0


@case
def executable_of_what_is_compiled(t: Tools) -> Any:
    return t.jit(lambda x: x + 1).lower(X).compile().runtime_executable() is not None


@case
def shardings_of_what_is_compiled(t: Tools) -> Any:
    compiled = t.jit(affine).lower(X, b=1.0).compile()
    return len(jax.tree.leaves(compiled.input_shardings)), str(jax.tree.structure(compiled.output_shardings))


@case(raises=TypeError)
def compiled_with_another_tree(t: Tools) -> Any:
    t.jit(lambda x: x + 1).lower(1.0).compile()([1.0])


@case(raises=TypeError)
def compiled_with_another_type(t: Tools) -> Any:
    t.jit(lambda x: x + 1).lower(X).compile()(X.astype(np.int32))


@case(raises=TypeError)
def compiled_with_another_shape(t: Tools) -> Any:
    t.jit(lambda x: x + 1).lower(X).compile()(X[:2])


@case(raises=TypeError)
def compiled_under_vmap(t: Tools) -> Any:
    compiled = t.jit(lambda x: x + 4).lower(1.0).compile()
    jax.vmap(lambda x: compiled(x) + 2)(jnp.ones(3))


@case(raises=TypeError)
def compiled_under_grad(t: Tools) -> Any:
    jax.grad(t.jit(lambda x: x * 4).lower(1.0).compile())(1.0)


@case
def compiler_options(t: Tools) -> Any:
    options = {"xla_embed_ir_in_executable": True}
    f = t.jit(lambda x: x + 1, compiler_options=options)
    return f(1.0), t.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)(2.0)


@case(raises=jax.errors.JaxRuntimeError)
def compiler_options_of_jit_that_do_not_exist(t: Tools) -> Any:
    t.jit(lambda x: x + 1, compiler_options={"invalid_key": "invalid_value"})(1.0)


@case(raises=jax.errors.JaxRuntimeError)
def compiler_options_that_do_not_exist(t: Tools) -> Any:
    t.jit(lambda x: x + 1).lower(1.0).compile(compiler_options={"invalid_key": "invalid_value"})


@case
def traced(t: Tools) -> Any:
    stage = t.jit(affine).trace(X, b=1.0)
    avals = [(a.shape, a.dtype.name) for a in stage.jaxpr.out_avals]
    return avals, stage.fun_name, str(stage.out_info), stage.lower().compile()(X, b=2.0)


@case
def shapes_evaluated(t: Tools) -> Any:
    f = t.jit(affine)
    direct, around = f.eval_shape(X, b=1.0), jax.eval_shape(f, X, b=1.0)
    return [(s.shape, s.dtype.name) for s in (direct["y"], around["y"])]


@case
def exported(t: Tools) -> Any:
    found = jax.export.export(t.jit(lambda x: jnp.sin(x) + 1))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    return [(a.shape, a.dtype.name) for a in found.out_avals], found.fun_name


@case(meshes=(1,))
def exported_and_called(t: Tools) -> Any:
    return jax.export.export(t.jit(lambda x: jnp.sin(x) + 1))(jax.ShapeDtypeStruct(X.shape, X.dtype)).call(X)


@case
def inlined(t: Tools) -> Any:
    f = t.jit(lambda x: x * 2 + 1, inline=True)
    return f(3.0), jax.grad(f)(1.0), jax.jit(f)(2.0)


# Modes of JAX


@case
def jit_disabled(t: Tools) -> Any:
    ran = []

    def f(x: Any, n: int) -> Any:
        ran.append(1)
        return x + 1 if x > 0 else x - n

    g = t.jit(f, static_argnums=1)
    with jax.disable_jit():
        return g(1, 2), g(-1, 2), len(ran)


@case(raises=FloatingPointError)
def nans_found(t: Tools) -> Any:
    with jax.debug_nans(True):
        t.jit(lambda x: 0.0 / x)(jnp.zeros(3))


@case(raises=FloatingPointError)
def nans_found_in_split_arrays(t: Tools) -> Any:
    with jax.debug_nans(True):
        t.jit(lambda x: jnp.log(t.split(x)))(jnp.arange(-4.0, 4.0))


@case(raises=FloatingPointError)
def infinities_found(t: Tools) -> Any:
    with jax.debug_infs(True):
        t.jit(lambda x: 1.0 / x)(jnp.zeros(3))


@case
def no_nans_no_error(t: Tools) -> Any:
    with jax.debug_nans(True):
        return t.jit(lambda x: t.split(x) / 2)(jnp.arange(8.0))


@case
def checked_inside(t: Tools) -> Any:
    def f(x: Any) -> Any:
        checkify.check(x > 0, "not positive: {}", x)
        return x + 1

    g = t.jit(checkify.checkify(f))
    return [(error.get(), value) for error, value in (g(1.0), g(-1.0))]


@case
def checked_around(t: Tools) -> Any:
    def f(x: Any) -> Any:
        checkify.check(x > 0, "not positive")
        return jnp.log(x)

    g = checkify.checkify(t.jit(f), errors=checkify.all_checks)
    return [((error.get() or "").split(" (")[0], value) for error, value in (g(1.0), g(-1.0))]


@case
def leaks_not_found(t: Tools) -> Any:
    with jax.checking_leaks():
        return t.jit(lambda x: jnp.sin(t.split(x)))(jnp.arange(8.0))


@case(raises=Exception)
def leaks_found(t: Tools) -> Any:
    kept = []

    @t.jit
    def f(x: Any) -> Any:
        kept.append(x)
        return x

    with jax.checking_leaks():
        f(3)


@case(raises=jax.errors.UnexpectedTracerError)
def a_leaked_tracer(t: Tools) -> Any:
    kept = []
    t.jit(lambda x: kept.append(x) or x)(1.0)
    t.jit(lambda x: x + kept[0])(1.0)


@case(raises=jax.errors.UnexpectedTracerError)
def a_leaked_tracer_as_argument(t: Tools) -> Any:
    kept = []
    t.jit(lambda x: kept.append(x) or x)(1.0)
    t.jit(lambda x: x + 1)(kept[0])


@case(raises=jax.errors.UnexpectedTracerError)
def a_leaked_tracer_as_result(t: Tools) -> Any:
    kept = []
    t.jit(lambda x: kept.append(x) or x)(1.0)
    t.jit(lambda x: kept[0])(1.0)


@case
def computed_while_compiling(t: Tools) -> Any:
    def f(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            n = int(jnp.arange(4).sum())
        return x * n

    return t.jit(f)(2)


@case
def threads(t: Tools) -> Any:
    f = t.jit(lambda x, n: t.split(x) * n, static_argnums=1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda n: f(jnp.arange(8), n % 3), range(9)))


# Transformations and closures


def curve(t: Tools) -> Callable[..., Any]:
    return t.jit(lambda x, w: jnp.tanh(t.split(x) @ w).sum(-1))


W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@case
def derivatives(t: Tools) -> Any:
    f = curve(t)
    value, pull = jax.vjp(f, X, W)
    pushed = jax.jvp(f, (X, W), (jnp.ones_like(X), jnp.ones_like(W)))
    linear = jax.linearize(f, X, W)[1](jnp.ones_like(X), jnp.ones_like(W))
    return value, pull(jnp.ones(8)), pushed, linear, jax.grad(lambda w: f(X, w).sum())(W)


@case
def second_derivatives(t: Tools) -> Any:
    f = t.jit(lambda x: (jnp.sin(x) ** 2).sum())
    x = jnp.arange(3.0)
    return jax.hessian(f)(x), jax.jacfwd(f)(x), jax.jacrev(t.jit(jnp.cos))(x)


@case
def mapped(t: Tools) -> Any:
    f = curve(t)
    many = jnp.stack([X, X + 1])
    return jax.vmap(f, (0, None))(many, W), jax.vmap(f, (None, 1), out_axes=1)(X, W[:, None] + jnp.zeros((4, 2, 3)))


@case
def mapped_with_a_name(t: Tools) -> Any:
    f = t.jit(lambda x: x - lax.pmean(x, "i") + lax.axis_index("i"))
    return jax.vmap(f, axis_name="i")(jnp.arange(4.0)), jax.vmap(jax.vmap(f, axis_name="i"))(jnp.ones((2, 3)))


@case
def inside_of_everything(t: Tools) -> Any:
    f = t.jit(lambda x: jnp.sin(t.split(x)) * 2)
    x = jnp.arange(8.0)
    return (
        jax.jit(f)(x),
        lax.scan(lambda c, _: (f(c), c.sum()), x, None, length=3),
        lax.fori_loop(0, 3, lambda _, c: f(c), x),
        lax.while_loop(lambda c: c.sum() > 100.0, f, x),
        lax.cond(x.sum() > 0, f, jnp.cos, x),
        lax.map(f, jnp.stack([x, x])),
        jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x),
        lax.switch(1, [jnp.sin, f], x),
    )


@case
def everything_inside(t: Tools) -> Any:
    @jax.custom_jvp
    def g(x: Any) -> Any:
        return jnp.sin(x)

    g.defjvp(lambda xs, ts: (g(xs[0]), 3.0 * ts[0]))

    @jax.custom_vjp
    def h(x: Any) -> Any:
        return jnp.sin(x)

    h.defvjp(lambda x: (h(x), None), lambda _, ct: (5.0 * ct,))
    x = jnp.arange(8.0)
    f = t.jit(lambda x: (jax.grad(lambda x: g(t.split(x)).sum())(x), jax.grad(lambda x: h(t.split(x)).sum())(x)))
    return f(x), t.jit(jax.vmap(lambda x: lax.scan(lambda c, _: (c + x, c), 0.0, None, length=2)))(x)


@case
def closed_over_arrays(t: Tools) -> Any:
    a, b = jnp.arange(8.0), np.arange(8.0)
    f = t.jit(lambda x: t.split(a) * x + b)
    return f(2.0), jax.grad(lambda x: f(x).sum())(2.0), jax.vmap(f)(jnp.arange(3.0)), jax.jit(f)(2.0)


@case
def closed_over_tracer_of_jit(t: Tools) -> Any:
    x = jnp.arange(8.0)
    return jax.jit(lambda w, x: t.jit(lambda x: t.split(x) * w)(x))(3.0, x), t.jit(
        lambda w, x: t.jit(lambda x: x * w)(x)
    )(3.0, x)


@case
def closed_over_tracer_of_grad(t: Tools) -> Any:
    x = jnp.arange(8.0)
    return jax.grad(lambda w: t.jit(lambda x: t.split(x) * w * w)(x).sum())(3.0), jax.grad(
        lambda w: t.jit(lambda v: (x * v * w).sum())(w * 2)
    )(3.0)


@case
def closed_over_tracer_of_vmap(t: Tools) -> Any:
    x = jnp.arange(8.0)
    return jax.vmap(lambda w: t.jit(lambda x: t.split(x) * w)(x))(jnp.arange(3.0)), jax.vmap(
        lambda w: t.jit(lambda: w + 1)()
    )(jnp.arange(3.0))


@case
def closed_over_tracer_of_scan(t: Tools) -> Any:
    x = jnp.arange(8.0)
    return lax.scan(lambda c, w: (t.jit(lambda x: t.split(x) * w + c)(x), w), x, jnp.arange(3.0))


@case
def closed_over_changes_between_calls(t: Tools) -> Any:
    """One function of the user's, made once, that reads another tracer at each trace."""
    box: list[Any] = []
    f = t.jit(lambda x: x * box[0])

    def around(w: Any) -> Any:
        box[:] = [w]
        return f(2.0)

    return jax.jit(around)(3.0)


@case
def closed_over_key(t: Tools) -> Any:
    key = jax.random.key(3)
    return t.jit(lambda x: x + jax.random.normal(key, (8,)))(1.0)


@case
def effects(t: Tools) -> Any:
    seen: list[float] = []

    @t.jit
    def f(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        y = jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct((8,), np.float32), t.split(x))
        z = io_callback(lambda v: np.float32(v) + 1, jax.ShapeDtypeStruct((), np.float32), x[0], ordered=True)
        return y + z

    found = f(jnp.arange(8.0)), f(jnp.ones(8))
    jax.effects_barrier()
    return found, sorted(seen)


@case
def mutable_arrays(t: Tools) -> Any:
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[0] = 7.0
        ref[...] += 1
        return ref[...]

    return t.jit(f)(jnp.arange(8.0))


# Errors of a user's function


@case(raises=jax.errors.TracerBoolConversionError)
def truth_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda x: 1 if x > 0 else 0)(1)


@case(raises=jax.errors.TracerBoolConversionError)
def truth_of_a_tracer_inside(t: Tools) -> Any:
    jax.jit(lambda x: t.jit(lambda x: 1 if x > 0 else 0)(x))(1)


@case(raises=jax.errors.TracerIntegerConversionError)
def index_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda i: [1, 2, 3][i])(1)


@case(raises=jax.errors.TracerIntegerConversionError)
def range_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda n: sum(range(n)))(3)


@case(raises=jax.errors.ConcretizationTypeError)
def number_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda x: float(x))(1.0)


@case(raises=jax.errors.ConcretizationTypeError)
def item_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda x: x.item())(1.0)


@case(raises=jax.errors.TracerArrayConversionError)
def numpy_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda x: np.sin(x))(1.0)


@case(raises=jax.errors.NonConcreteBooleanIndexError)
def mask_as_an_index(t: Tools) -> Any:
    t.jit(lambda x: x[x > 1])(jnp.arange(3))


@case(raises=jax.errors.ConcretizationTypeError)
def shape_from_a_tracer(t: Tools) -> Any:
    t.jit(lambda n: jnp.nonzero(n))(jnp.arange(3))


@case(raises=TypeError)
def shape_of_a_tracer(t: Tools) -> Any:
    t.jit(lambda n: jnp.zeros(n))(3)


@case(raises=TypeError)
def conversion_of_an_array(t: Tools) -> Any:
    t.jit(int)(jnp.arange(3))


@case(raises=ValueError)
def truth_of_an_array(t: Tools) -> Any:
    t.jit(bool)(jnp.arange(3))


@case(raises=KeyError)
def error_of_the_user(t: Tools) -> Any:
    t.jit(lambda x: {}["missing"])(1)


@case(raises=ZeroDivisionError)
def error_of_the_user_inside(t: Tools) -> Any:
    jax.grad(t.jit(lambda x: x * (1 // 0)))(1.0)


@case(raises=TypeError)
def shapes_that_do_not_fit(t: Tools) -> Any:
    t.jit(lambda x, y: x @ y)(jnp.ones((2, 3)), jnp.ones((2, 3)))


@case
def works_again_after_an_error(t: Tools) -> Any:
    calls = []

    @t.jit
    def f(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return x + 1

    with contextlib.suppress(RuntimeError):
        f(1)
    return f(1), len(calls)


# The table


@functools.cache
def expected_of(name: str) -> Any:
    made = CASES[name]
    if made.raises is None:
        return made.run(JAX)
    with pytest.raises(made.raises):
        made.run(JAX)
    return None


@pytest.mark.parametrize("name, mesh", [(name, mesh) for name, made in CASES.items() for mesh in made.meshes])
@pytest.mark.one_in(8)
def test_like_jax_jit(name: str, mesh: int) -> None:
    made, expected = CASES[name], expected_of(name)
    if made.raises is None:
        compare(made.run(ours(mesh)), expected)
    else:
        with pytest.raises(made.raises):
            made.run(ours(mesh))


# What a function that is gone leaves behind


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.one_in(2)
def test_a_dropped_function_is_freed(mesh: int, derivative: bool) -> None:
    def dropped() -> list[weakref.ref[Any]]:
        weight = jnp.arange(8.0) + 1

        def f(x: Any) -> Any:
            return (gshard.split(x, 0, mesh) * weight).sum()

        g = gshard.jit(f, mesh=mesh)
        jax.block_until_ready((jax.grad(g) if derivative else g)(jnp.arange(8.0)))
        return [weakref.ref(f), weakref.ref(g), weakref.ref(weight)]

    left = dropped()
    gc.collect()
    assert [ref() is None for ref in left] == [True] * 3


@pytest.mark.parametrize("mesh", MESHES)
def test_a_dropped_function_is_freed_at_once(mesh: int) -> None:
    """Its arrays may be most of the memory: they must not wait for the next collection of garbage."""
    weight = jnp.arange(8.0) + 1
    f = (lambda weight: lambda: weight * 2)(weight)
    g = gshard.jit(f, mesh=mesh)
    g(), g()
    left = [weakref.ref(x) for x in (weight, f, g)]
    gc.collect()
    gc.disable()
    try:
        del weight, f, g
        assert [ref() is None for ref in left] == [True] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_come_and_go(mesh: int) -> None:
    token = jax.lax.create_token()
    f = gshard.jit(lambda x, t: (gshard.split(x, 0, mesh) + 1, t), mesh=mesh)
    for _ in range(2):
        result, new = f(jnp.arange(8), token)
        assert result.tolist() == list(range(1, 9))
        assert type(new) is type(token)
        assert new is not token
    result, captured = gshard.jit(lambda x: {"x": (x * 2, token)}, mesh=mesh)(jnp.arange(8))["x"]
    assert result.tolist() == list(range(0, 16, 2))
    assert type(captured) is type(token)
    with pytest.raises(gshard.TraceError, match="create_token makes a token"):
        gshard.jit(lambda x: jax.lax.optimization_barrier((x, jax.lax.create_token()))[0], mesh=mesh)(1)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)])
def test_an_inspection_is_refused(wrapped: Callable[..., Any]) -> None:
    def f(x: Any) -> Any:
        jax.debug.inspect_array_sharding(x, callback=print)
        return x

    with pytest.raises(gshard.TraceError, match=r"(?s)cannot see the plan.*test_like_jax_jit.py.*gshard.explain"):
        gshard.jit(wrapped(f), mesh=2)(jnp.arange(8.0))


@pytest.mark.parametrize("mesh", MESHES)
def test_arguments_and_results_are_freed(mesh: int) -> None:
    f = gshard.jit(lambda x: gshard.split(x, 0, mesh) + 1, mesh=mesh)
    x = jnp.arange(8.0)
    y = f(x)
    left = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert [ref() is None for ref in left] == [True, True]


@pytest.mark.parametrize("option", ["device", "backend"])
def test_device_and_backend_have_a_clear_answer(option: str) -> None:
    """JAX deprecates both. A mesh says where a program runs: they are refused, and the error names the mesh."""
    value = jax.devices()[0] if option == "device" else "cpu"
    with pytest.raises((gshard.GShardError, TypeError, ValueError), match=f"(?s){option}.*mesh"):
        gshard.jit(lambda x: x, mesh=1, **{option: value})


def test_every_case_can_fail() -> None:
    """A jit that forgets a result, or an error, is found."""
    assert len(CASES) > 100
    with pytest.raises(AssertionError):
        compare((jnp.ones(3),), (jnp.ones(3, jnp.int32),))
    with pytest.raises(AssertionError):
        compare(jnp.float32(1), jnp.asarray(1.0))
    assert operator.eq(expected_of("defaults_and_names")[0], 4321)
