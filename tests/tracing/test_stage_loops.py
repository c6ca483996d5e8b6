"""Chains of ``gshard.stage`` as pipelines: the numbers of every call, what moves, and refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.core.mesh import Mesh
from gshard.tracing.equal_bodies import first_difference
from placed import mesh_of, three_calls

RNG = np.random.default_rng(5)
ROWS, UNITS, LAYERS = 24, 6, 8


def normal(*shape: int) -> Any:
    return (RNG.standard_normal(shape) / 3).astype(np.float32)


X, MASK = normal(ROWS, UNITS), RNG.random(ROWS) < 0.7
PARAMS = {
    "first": normal(UNITS, UNITS),
    "layers": [{"a": normal(UNITS, 10), "b": normal(10, UNITS), "g": normal(UNITS) + 1} for _ in range(LAYERS)],
}

Stage = Callable[[Callable[..., Any]], Callable[..., Any]]


def layer(x: Any, w: Any) -> Any:
    return x + jax.nn.silu((x - x.mean(1, keepdims=True)) * w["g"] @ w["a"]) @ w["b"]


def of_plain(stage: Stage, params: Any) -> Any:
    x = X @ params["first"]
    for w in params["layers"]:
        x = stage(layer)(x, w)
    return x


def of_constants(stage: Stage, params: Any) -> Any:
    """Layers whose weights are constants, each with a function of its own that has a derivative rule."""
    constants = [jax.tree.map(jnp.asarray, w) for w in PARAMS["layers"]]
    x = X @ params["first"]
    for own in constants:

        @jax.custom_jvp
        def activation(x: Any) -> Any:
            return jnp.sin(x)

        activation.defjvps(lambda t, _, x: t * jnp.cos(x))
        run = lambda x, activation=activation, own=own: activation(layer(x, own))  # noqa: E731
        x = stage(jax.checkpoint(run))(x)
    return x


def of_data(stage: Stage, params: Any) -> Any:
    """No derivative is by what the first layer reads, and the last layer has a result that nothing reads."""
    run = stage(lambda x, total, w: (layer(x, w), total + (x**2).mean()))
    x, total = X, jnp.zeros(())
    for w in params["layers"]:
        x, total = run(x, total, w)
    return x


def of_remat(stage: Stage, params: Any) -> Any:
    """Weights first, and by name."""
    run = stage(jax.checkpoint(lambda w, x: layer(x, w)))
    x = X @ params["first"]
    for w in params["layers"]:
        x = run(w, x=x)
    return x


def of_several(stage: Stage, params: Any) -> Any:
    """Two carried arrays, a sum that is carried, second results in use between the calls, and a shared mask."""

    def several(carry: Any, w: Any, mask: Any) -> Any:
        x, y, total = carry
        new = jnp.where(mask[:, None], layer(x, w), x)
        return (new + 0.1 * y, jnp.tanh(y) + x, total + (x**2).mean()), {"squares": (new**2).sum(), "rows": new[:, 0]}

    carry, squares, rows = (X @ params["first"], X @ params["first"].T, jnp.zeros(())), 0.0, []
    for w in params["layers"]:
        carry, more = stage(several)(carry, w, MASK)
        squares = squares + 0.01 * more["squares"]
        rows.append(more["rows"])
    return *carry, squares, jnp.stack(rows), rows[3]


def of_dropped(stage: Stage, params: Any) -> Any:
    def dropped(x: Any, w: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), layer(x, w), x)

    x = X @ params["first"]
    for key, w in zip(jax.random.split(jax.random.key(1), LAYERS), params["layers"], strict=True):
        x = stage(jax.checkpoint(dropped))(x, w, key)
    return x


def of_numbered(stage: Stage, params: Any) -> Any:
    """Numbers and names that stay, constants of each layer, and the number of the layer as an array."""
    x = X @ params["first"]
    for i, w in enumerate(params["layers"]):
        own = np.linspace(0, i, UNITS, dtype=np.float32)
        run = lambda x, w, number, power, kind: layer(x, w) * (kind == "tanh") + own * number**power  # noqa: B023, E731
        x = stage(run)(x, w, np.float32(i / 9), 2, kind="tanh")
    return x


def of_two_towers(stage: Stage, params: Any) -> Any:
    """Encoder and decoder: the layers of the second chain read the result of the first one."""
    x, y = X @ params["first"], X @ params["first"].T
    for w in params["layers"][:4]:
        x = stage(layer)(x, w)
    for w in params["layers"][4:]:
        y = stage(lambda y, w, x: layer(y, w) + jnp.cos(x))(y, w, x)
    return x, y


def of_called(stage: Stage, params: Any) -> Any:
    """The chain is in the body of a call."""
    return jax.jit(lambda params: of_plain(stage, params))(params)


def of_accumulated(stage: Stage, params: Any) -> Any:
    """The chain is in the body of a loop."""

    def one(total: Any, scale: Any) -> Any:
        x = X @ params["first"] * scale
        for w in params["layers"]:
            x = stage(layer)(x, w)
        return total + x, None

    return jax.lax.scan(one, jnp.zeros_like(X), jnp.array([0.5, -1.0, 2.0]))[0]


def of_mapped(stage: Stage, params: Any) -> Any:
    """Each layer is on one row, and ``vmap`` adds the batch."""

    def one(x: Any) -> Any:
        for w in params["layers"]:
            x = stage(lambda x, w: layer(x[None], w)[0])(x, w)
        return x

    return jax.vmap(one)(X @ params["first"])


PROGRAMS: dict[str, Callable[[Stage, Any], Any]] = {
    "plain": of_plain,
    "data": of_data,
    "remat": of_remat,
    "constants": of_constants,
    "several": of_several,
    "dropped": of_dropped,
    "numbered": of_numbered,
    "two_towers": of_two_towers,
    "called": of_called,
    "accumulated": of_accumulated,
    "mapped": of_mapped,
}


def in_stages(micro_batches: int = 6, **arguments: Any) -> Stage:
    return lambda f: gshard.stage(f, "stage", micro_batches=micro_batches, **arguments)


def loss_of(program: Callable[[Stage, Any], Any], stage: Stage = lambda f: f) -> Callable[[Any], Any]:
    """The value of a program and its gradient."""

    def loss(params: Any) -> Any:
        return sum((x**2).mean() for x in jax.tree.leaves(program(stage, params)))

    return jax.value_and_grad(loss)


def check_equal(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(np.abs(np.asarray(y)).max())
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5 * max(scale, 1e-3))


def check_calls(function: Callable[..., Any], want: Any, *arguments: Any, mesh: Any) -> None:
    for got in three_calls(gshard.jit(function, mesh=mesh), mesh, *arguments):
        check_equal(got, want)


@functools.cache
def wanted(name: str) -> Any:
    return jax.jit(loss_of(PROGRAMS[name]))(PARAMS)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_calls(name: str, rounds: int) -> None:
    stages = 2 if name == "two_towers" else 4
    function = loss_of(PROGRAMS[name], in_stages(rounds=rounds))
    found = gshard.explain(function, PARAMS, mesh=Mesh.abstract(stage=stages))
    assert len(found.plan.program.pipelines) == (4 if name == "two_towers" else 2)
    check_calls(function, wanted(name), PARAMS, mesh=mesh_of(stage=stages, other=8 // stages))


def test_under_jax_the_calls_are_calls() -> None:
    check_equal(jax.jit(loss_of(of_several, in_stages()))(PARAMS), wanted("several"))
    check_calls(loss_of(of_several, in_stages()), wanted("several"), PARAMS, mesh=mesh_of(stage=1, data=8))


def test_weights_move_once_each_way() -> None:
    """As for a stack that the program makes: in planning, both are the same program."""

    def scanned(params: Any) -> Any:
        layers = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
        layers = gshard.pipeline(layers, "stage", micro_batches=6)
        x = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), X @ params["first"], layers)[0]
        return (x**2).mean()

    mesh = Mesh.abstract(stage=4)
    found = gshard.explain(loss_of(of_remat, in_stages()), PARAMS, mesh=mesh)
    other = gshard.explain(jax.value_and_grad(scanned), PARAMS, mesh=mesh)
    assert found.bytes_by_kind == other.bytes_by_kind
    assert found.bytes_by_kind["all_to_all"]
    assert found.plan.program.pipelines[0].startswith("8 layers in 4 stages, 6 micro-batches of 4 rows: 9 turns")


def test_a_training_step_of_separate_layers() -> None:
    optimizer = optax.adamw(1e-2)

    def step(params: Any, state: Any, stage: Stage = lambda f: f) -> Any:
        value, gradient = loss_of(of_remat, stage)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    run = gshard.jit(functools.partial(step, stage=in_stages(4)), mesh=mesh_of(stage=4, data=2))
    want = got = (PARAMS, optimizer.init(PARAMS))
    for _ in range(3):
        *want, value = jax.jit(step)(*want)
        *got, other = run(*got)
        check_equal((got, other), (want, value))


class EqxLayer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any):
        one, two = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(UNITS, 10, key=one), eqx.nn.Linear(10, UNITS, key=two)

    def __call__(self, x: Any) -> Any:
        return x + jax.vmap(self.down)(jnp.tanh(jax.vmap(self.up)(x)))


def test_layers_of_equinox() -> None:
    layers = [EqxLayer(key) for key in jax.random.split(jax.random.key(0), LAYERS)]

    def loss(model: Any, stage: Stage = lambda f: f) -> Any:
        layers, first = model
        x = X @ first
        for own in layers:
            x = stage(own)(x)
        return (x**2).mean()

    model = layers, PARAMS["first"]
    want = jax.jit(jax.value_and_grad(loss))(model)
    check_calls(jax.value_and_grad(functools.partial(loss, stage=in_stages())), want, model, mesh=mesh_of(stage=4, b=2))


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(UNITS, 10, rngs=rngs), nnx.Linear(10, UNITS, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


def test_layers_of_flax() -> None:
    graph, state = nnx.split([NnxLayer(nnx.Rngs(i)) for i in range(LAYERS)])

    def loss(model: Any, stage: Stage = lambda f: f) -> Any:
        state, first = model
        x = X @ first
        for own in nnx.merge(graph, state):
            x = stage(own)(x)
        return (x**2).mean()

    model = nnx.to_pure_dict(state), PARAMS["first"]
    want = jax.jit(jax.value_and_grad(loss))(model)
    check_calls(jax.value_and_grad(functools.partial(loss, stage=in_stages())), want, model, mesh=mesh_of(stage=4, b=2))


def refused(program: Callable[[Stage, Any], Any], *, grad: bool = True, **arguments: Any) -> str:
    function = loss_of(program, in_stages(**arguments)) if grad else functools.partial(program, in_stages(**arguments))
    with pytest.raises(gshard.ShardingError) as error:
        gshard.explain(function, PARAMS, mesh=Mesh.abstract(stage=4))
    return str(error.value)


def test_layers_that_differ_are_refused_with_what_differs() -> None:
    def numbered(stage: Stage, params: Any) -> Any:
        x = X @ params["first"]
        for i, w in enumerate(params["layers"]):
            x = stage(lambda x, w: layer(x, w) * (1 + i))(x, w)  # noqa: B023
        return x

    text = refused(numbered)
    assert "no equal stage directly before or after" in text
    assert "mul at test_stage_loops.py" in text
    assert "reads 1.0 in one, and 2.0 in the other" in text


def test_operations_between_stages_are_refused() -> None:
    def between(stage: Stage, params: Any) -> Any:
        x = X @ params["first"]
        for w in params["layers"]:
            x = jnp.tanh(stage(layer)(x, w))
        return x

    assert "Put what is computed in between into the stages" in refused(between)

    def beside(stage: Stage, params: Any) -> Any:
        x = X @ params["first"]
        offset = jnp.zeros(UNITS)
        for w in params["layers"]:
            x, mean = stage(lambda x, w, offset: (layer(x, w) + offset, x.sum(0)))(x, w, offset)
            offset = jnp.tanh(mean)
        return x

    text = refused(beside, grad=False)
    assert "computed from an earlier stage outside of the stages" in text
    assert "tanh at test_stage_loops.py" in text


def test_results_of_earlier_stages_are_refused() -> None:
    def skipping(stage: Stage, params: Any) -> Any:
        states = [X, X @ params["first"]]
        for w in params["layers"]:
            states.append(stage(lambda x, w, before: layer(x, w) + before)(states[-1], w, states[-2]))
        return states[-1]

    assert "not directly before it" in refused(skipping, grad=False)


def test_equal_operands_are_refused() -> None:
    def shared(stage: Stage, params: Any) -> Any:
        x = X @ params["first"]
        for _ in range(4):
            x = stage(layer)(x, params["layers"][0])
        return x

    assert "all stages have the same operands" in refused(shared, grad=False)


def test_a_first_stage_without_a_derivative_needs_its_weights_as_arguments() -> None:
    def of_data(stage: Stage, params: Any) -> Any:
        x = X
        for w in params["layers"]:
            x = stage(functools.partial(layer, w=w))(x)
        return x

    assert "Give weights as arguments if the first stage" in refused(of_data)


def test_recomputing_all_stages_together_is_refused() -> None:
    """JAX leaves out of the last call what only its results need, so this call is no equal stage."""
    text = refused(lambda stage, params: jax.checkpoint(functools.partial(of_plain, stage))(params))
    assert "Give jax.checkpoint(layer) to gshard.stage" in text


def test_nested_stages_are_refused() -> None:
    def nested(stage: Stage, params: Any) -> Any:
        x = X @ params["first"]
        for w in params["layers"]:
            x = stage(lambda x, w: stage(layer)(x, w))(x, w)
        return x

    assert "nor inside of another stage" in refused(nested, grad=False)
    with jax.disable_jit():
        assert "no effect under jax.disable_jit()" in refused(of_plain, grad=False)


def test_layers_and_stages_that_do_not_fit() -> None:
    text = refused(of_plain, rounds=3)
    assert "a loop over 8 layers cannot be cut into 12 equal parts" in text
    assert "test_stage_loops.py" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"f": 3}, "a stage is a function, not int"),
        ({"micro_batches": 0}, "micro_batches is a positive integer"),
        ({"rounds": 1.5}, "rounds is a positive integer"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {"f": layer, "over": "stage", "micro_batches": 2, **arguments}
    with pytest.raises(gshard.ShardingError, match=what):
        gshard.stage(**given)


def test_a_stage_returns_arrays() -> None:
    with pytest.raises(gshard.ShardingError, match="a stage without arrays"):
        jax.jit(gshard.stage(lambda x: None, "stage", micro_batches=2))(X)


def test_without_a_trace_the_function_is_called() -> None:
    seen = []
    gshard.stage(seen.append, "stage", micro_batches=2)(X)
    assert seen[0] is X


def test_bodies_are_compared_by_what_they_compute() -> None:
    def body(f: Callable[..., Any], *arguments: Any) -> Any:
        return jax.make_jaxpr(f)(*arguments)

    silu = lambda x: jax.nn.silu(x) * 2  # noqa: E731
    assert not first_difference(body(jax.checkpoint(silu), X), body(jax.checkpoint(silu), X))
    assert (
        first_difference(body(jnp.sin, X), body(jnp.sin, X[0, :1].repeat(8)))
        == "one has the operands f32[24,6], the other f32[8]"
    )
    assert first_difference(body(jnp.sin, X), body(jnp.cos, X)).startswith("one has sin")
    assert "branches" not in first_difference(body(lambda x: -0.0 * x, X), body(lambda x: -0.0 * x, X))
    assert "reads -0.0 in one, and 0.0 in the other" in first_difference(
        body(lambda x: x * -0.0, X), body(lambda x: x * 0.0, X)
    )
    in_order = lambda x, y: x - y, lambda x, y: y - x
    assert "another value" in first_difference(*(body(f, X, X) for f in in_order))
    loops = [body(lambda x, n=n: jax.lax.fori_loop(0, 3, lambda i, x: x * n, x), X) for n in (2.0, 3.0)]
    assert "reads 2.0 in one, and 3.0 in the other" in first_difference(*loops)
    assert not first_difference(loops[0], loops[0])
