"""jax.debug.inspect_array_sharding and visualize_array_sharding inside of a partitioned function."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

X = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)
F = Callable[..., Any]


def mesh(kind: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def doubled(look: F, x: Any) -> Any:
    y = jnp.sin(x) * 2
    look(y)
    return y


def product(look: F, x: Any) -> Any:
    h = gshard.split(jnp.tanh(x @ x.T), 1, 4)
    look(h)
    return (h @ x).sum()


def scan(look: F, x: Any) -> Any:
    return lax.scan(lambda c, _: (doubled(look, c) + 1, None), x, None, length=3)[0]


def loop(look: F, x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: doubled(look, c) + i, x)


def branch(look: F, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: doubled(look, x), lambda x: x, x)


def twice(look: F, x: Any) -> Any:
    inner = jax.jit(lambda x: doubled(look, x))
    return inner(inner(x))


def mapped(look: F, x: Any) -> Any:
    return jax.vmap(lambda row: doubled(look, row))(x)


def gradient(look: F, x: Any) -> Any:
    return jax.grad(lambda x: product(look, x))(x)


def again(look: F, x: Any) -> Any:
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(doubled(look, jnp.sin(x))).sum())(x))(x)


def unread(look: F, x: Any) -> Any:
    look(jnp.cos(x) @ gshard.split(x.T, 1, 8))
    return x + 1


def region(look: F, x: Any) -> Any:
    def body(x: Any) -> Any:
        look(x)
        return x * 2

    return jax.shard_map(body, mesh=mesh(d=8), in_specs=P("d"), out_specs=P("d"))(x)


def partly_manual(look: F, x: Any) -> Any:
    """A look at an array that is computed there, in a loop too; and at one that only the look reads."""

    def body(x: Any) -> Any:
        h = gshard.split(jnp.tanh(x), 1, "b")
        look(h)
        h = lax.scan(lambda c, _: (doubled(look, c), None), h, length=2)[0]
        look(jnp.cos(h))
        return h

    split = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
    return jax.shard_map(body, mesh=mesh(a=4, b=2), **split)(x)


def nested_with_shardings(look: F, x: Any) -> Any:
    shardings = NamedSharding(mesh(d=8), P("d"))
    return jax.jit(lambda x: doubled(look, x), in_shardings=shardings, out_shardings=shardings)(x)


def reference(look: F, x: Any) -> Any:
    r = jax.new_ref(x)
    r[...] *= 2
    look(r[...])
    return r[...]


def rewritten(look: F, x: Any) -> Any:
    """The padding and the slice are nothing together, and both slices become one move."""
    y = jnp.pad(x, ((1, 1), (0, 0)))[1:-1]
    look(y)
    return jnp.concatenate([y[1:], y[:1]])


CASES: list[tuple[F, list[P]]] = [
    (doubled, [P("d")]),
    (product, [P(None, ("d.0", "d.1"))]),
    (scan, [P("d")]),
    (loop, [P("d")]),
    (branch, [P("d")]),
    (twice, [P("d"), P("d")]),
    (mapped, [P("d")]),
    (gradient, [P(None, ("d.0", "d.1"))]),
    (again, [P("d")]),
    (unread, [P(None, "d")]),
    (region, [P()]),
    (nested_with_shardings, [P("d")]),
    (reference, [P("d")]),
    (rewritten, [P("d")]),
]


@pytest.mark.parametrize("f, expected", CASES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.one_in(2)
def test_a_look_tells_the_plan_once_and_changes_nothing(f: F, expected: list[P]) -> None:
    seen: list[NamedSharding] = []
    x = jax.device_put(X, NamedSharding(mesh(d=8), P("d")))
    looking = gshard.jit(lambda x: f(lambda y: jax.debug.inspect_array_sharding(y, callback=seen.append), x), mesh(d=8))
    plain = gshard.jit(lambda x: f(lambda y: None, x), mesh(d=8))
    lowered = looking.lower(x)
    lowered.as_text()
    bytes_sent = gshard.explain(looking, x).bytes_by_kind
    assert seen == []  # nothing is told while it is planned
    compiled = lowered.compile()
    told = [s.spec for s in seen]
    for _ in range(3):
        result = looking(x)
    assert len(seen) == len(told)  # once for each compiled program
    shape = (16, 16) if f in (product, gradient, unread) else (2, 8) if f is region else (16, 8)
    for s, spec in zip(seen, expected, strict=True):
        assert s.is_equivalent_to(NamedSharding(s.mesh, spec), len(shape)), seen
    by_jax: list[Any] = []
    wanted = jax.jit(lambda x: f(lambda y: jax.debug.inspect_array_sharding(y, callback=by_jax.append), x))(x)
    assert len(by_jax) == len(told)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert bytes_sent == gshard.explain(plain, x).bytes_by_kind
    without = plain.lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == without.memory_analysis().temp_size_in_bytes
    assert compiled.cost_analysis().get("flops") == without.cost_analysis().get("flops")


def test_a_look_in_a_region_tells_the_plan_over_automatic_axes(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[NamedSharding] = []
    looking = gshard.jit(
        lambda x: partly_manual(lambda y: jax.debug.inspect_array_sharding(y, callback=seen.append), x), mesh(a=4, b=2)
    )
    for place in (P(), P("a"), P(None, "b"), P("b", "a")):
        del seen[:]
        with caplog.at_level(logging.WARNING, logger="gshard"):
            result = looking(jax.device_put(X, NamedSharding(mesh(a=4, b=2), place)))
        np.testing.assert_allclose(result, np.sin(np.sin(np.tanh(X)) * 2) * 2, rtol=1e-5, atol=1e-6)
        assert [s.spec for s in seen] in ([P(None, "b")] * 3, [])  # nothing where an executable serves already
        assert caplog.text.count("is not computed as such") == (1 if seen else 0)
        caplog.clear()


@pytest.mark.parametrize(
    "axes, spec",
    [({"a": 2, "b": 4}, P("a", "b")), ({"a": 2, "b": 2, "c": 2}, P(("a", "b"), "c")), ({"a": 3}, P("a"))],
    ids=str,
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shardings_are_over_the_users_mesh(axes: dict[str, int], spec: P, kind: AxisType) -> None:
    seen: list[Any] = []
    own = jax.sharding.Mesh(
        np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(*axes.values()),
        tuple(axes),
        axis_types=(kind,) * len(axes),
    )

    def f(x: Any) -> Any:
        jax.debug.inspect_array_sharding({"x": x, "y": x * 2}, callback=seen.append)
        return x * 2

    with jax.set_mesh(own):
        x = jax.device_put(jnp.ones((24, 8)), NamedSharding(own, spec))
        gshard.jit(f)(x)
    assert [(s.spec, s.mesh) for s in seen] == [(spec, own)] * 2


def test_an_unreduced_value_is_told_as_it_is_once_reduced() -> None:
    seen: list[Any] = []

    def f(x: Any, w: Any) -> Any:
        u = x @ w
        jax.debug.inspect_array_sharding(u, callback=seen.append)
        return u + x @ (w * 2)

    x = jax.device_put(jnp.ones((8, 64)), NamedSharding(mesh(d=8), P(None, "d")))
    w = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh(d=8), P("d")))
    g = gshard.jit(f, mesh(d=8))
    assert any(s.unreduced for s in g.lower(x, w).plan.shardings.values())
    np.testing.assert_array_equal(g(x, w), np.full((8, 8), 192))
    assert [s.spec for s in seen] == [P()]


def test_partitioned_functions_in_transformations_tell_it_too() -> None:
    seen: list[Any] = []
    f = gshard.jit(lambda x: product(lambda y: jax.debug.inspect_array_sharding(y, callback=seen.append), x), mesh(d=8))
    for around in (jax.grad(f), jax.jit(f)):
        seen.clear()
        around(X)
        assert [s.spec for s in seen] == [P(None, ("d.0", "d.1"))]


def test_what_is_not_computed_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    f = gshard.jit(lambda x: unread(lambda y: jax.debug.inspect_array_sharding(y, callback=lambda s: None), x), mesh=8)
    with caplog.at_level(logging.WARNING, "gshard"):
        f(X)
    (record,) = caplog.records
    assert "is not computed as such; if it were, it would be sharded P" in record.getMessage()
    assert "test_looks.py" in record.getMessage()


def drawn(f: F, *args: Any) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        f(*args)
    return out.getvalue()


def test_a_sharding_is_drawn(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("rich")

    def f(x: Any) -> Any:
        y = gshard.split(jnp.sin(x), 0, 8)
        jax.debug.visualize_array_sharding(y)
        return y

    assert drawn(gshard.jit(f, mesh=8), X).count("CPU") == 8
    # JAX draws equal parts only: what it cannot draw is told in the log, and the program runs.
    uneven = gshard.jit(f, mesh=8, uneven="keep")
    with caplog.at_level(logging.WARNING, "gshard"):
        assert drawn(uneven, X[:10]) == ""
    assert "cut into unequal parts" in caplog.text
    assert drawn(jax.debug.visualize_array_sharding, uneven(X[:10]).padded).count("CPU") == 8


def test_an_error_of_the_callback_is_the_users() -> None:
    def refuse(_: Any) -> None:
        raise ValueError("mine")

    f = gshard.jit(lambda x: doubled(lambda y: jax.debug.inspect_array_sharding(y, callback=refuse), x), mesh=8)
    with pytest.raises(ValueError, match="mine"):
        f(X)


def test_a_scan_that_is_one_operator_is_one_with_a_look_inside() -> None:
    seen: list[Any] = []

    def f(look: F, x: Any) -> Any:
        def add(a: Any, b: Any) -> Any:
            look(a + b)
            return a + b

        return lax.associative_scan(add, x)

    looking = gshard.jit(lambda x: f(lambda y: jax.debug.inspect_array_sharding(y, callback=seen.append), x), mesh=8)
    plain = gshard.jit(lambda x: f(lambda y: None, x), mesh=8)
    names = [[e.name for e in g.lower(X).program.block.walk()] for g in (looking, plain)]
    assert names[0] == names[1]
    np.testing.assert_allclose(looking(X), np.cumsum(X, 0), rtol=1e-5, atol=1e-5)
    assert len(seen) == 8  # one for each level up and down, as under jax.jit
