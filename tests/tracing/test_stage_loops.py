"""Chains of ``gshard.stage`` as pipelines: the numbers of every call, what moves, and refusals."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.mesh import Mesh
from placed import mesh_of, three_calls

RNG = np.random.default_rng(5)
ROWS, UNITS, LAYERS = 24, 6, 8


def normal(*shape):
    return (RNG.standard_normal(shape) / 3).astype(np.float32)


X, MASK = normal(ROWS, UNITS), RNG.random(ROWS) < 0.7
PARAMS = {
    "first": normal(UNITS, UNITS),
    "layers": [{"a": normal(UNITS, 10), "b": normal(10, UNITS), "g": normal(UNITS) + 1} for _ in range(LAYERS)],
}

Stage = Callable[[Callable[..., Any]], Callable[..., Any]]


def layer(x, w):
    return x + jax.nn.silu((x - x.mean(1, keepdims=True)) * w["g"] @ w["a"]) @ w["b"]


def of_plain(stage, params):
    x = X @ params["first"]
    for w in params["layers"]:
        x = stage(layer)(x, w)
    return x


def of_constants(stage, params):
    """Layers whose weights are constants, each with a function of its own that has a derivative rule."""
    constants = [jax.tree.map(jnp.asarray, w) for w in PARAMS["layers"]]
    x = X @ params["first"]
    for own in constants:

        @jax.custom_jvp
        def activation(x):
            return jnp.sin(x)

        activation.defjvps(lambda t, _, x: t * jnp.cos(x))
        run = lambda x, activation=activation, own=own: activation(layer(x, own))  # noqa: E731
        x = stage(jax.checkpoint(run))(x)
    return x


def of_data(stage, params):
    """No derivative is by what the first layer reads, and the last layer has a result that nothing reads."""
    run = stage(lambda x, total, w: (layer(x, w), total + (x**2).mean()))
    x, total = X, jnp.zeros(())
    for w in params["layers"]:
        x, total = run(x, total, w)
    return x


def of_remat(stage, params):
    """Weights first, and by name."""
    run = stage(jax.checkpoint(lambda w, x: layer(x, w)))
    x = X @ params["first"]
    for w in params["layers"]:
        x = run(w, x=x)
    return x


def of_several(stage, params):
    """Two carried arrays, a sum that is carried, second results in use between the calls, and a shared mask."""

    def several(carry, w, mask):
        x, y, total = carry
        new = jnp.where(mask[:, None], layer(x, w), x)
        return (new + 0.1 * y, jnp.tanh(y) + x, total + (x**2).mean()), {"squares": (new**2).sum(), "rows": new[:, 0]}

    carry, squares, rows = (X @ params["first"], X @ params["first"].T, jnp.zeros(())), 0.0, []
    for w in params["layers"]:
        carry, more = stage(several)(carry, w, MASK)
        squares = squares + 0.01 * more["squares"]
        rows.append(more["rows"])
    return *carry, squares, jnp.stack(rows), rows[3]


def of_dropped(stage, params):
    def dropped(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), layer(x, w), x)

    x = X @ params["first"]
    for key, w in zip(jax.random.split(jax.random.key(1), LAYERS), params["layers"], strict=True):
        x = stage(jax.checkpoint(dropped))(x, w, key)
    return x


def of_numbered(stage, params):
    """Numbers and names that stay, constants of each layer, and the number of the layer as an array."""
    x = X @ params["first"]
    for i, w in enumerate(params["layers"]):
        own = np.linspace(0, i, UNITS, dtype=np.float32)
        run = lambda x, w, number, power, kind: layer(x, w) * (kind == "tanh") + own * number**power  # noqa: B023, E731
        x = stage(run)(x, w, np.float32(i / 9), 2, kind="tanh")
    return x


def of_two_towers(stage, params):
    """Encoder and decoder: the layers of the second chain read the result of the first one."""
    x, y = X @ params["first"], X @ params["first"].T
    for w in params["layers"][:4]:
        x = stage(layer)(x, w)
    for w in params["layers"][4:]:
        y = stage(lambda y, w, x: layer(y, w) + jnp.cos(x))(y, w, x)
    return x, y


PROGRAMS = {
    "plain": of_plain, "data": of_data, "remat": of_remat, "constants": of_constants, "several": of_several,
    "dropped": of_dropped, "numbered": of_numbered, "two_towers": of_two_towers,
}  # fmt: skip


def in_stages(micro_batches=6, **arguments):
    return lambda f: gshard.stage(f, "stage", micro_batches=micro_batches, **arguments)


def loss_of(program, stage=lambda f: f):
    """The value of a program and its gradient."""

    return jax.value_and_grad(lambda params: sum((x**2).mean() for x in jax.tree.leaves(program(stage, params))))


def check_equal(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(np.abs(np.asarray(y)).max())
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5 * max(scale, 1e-3))


def check_calls(function, want, *arguments, mesh):
    for got in three_calls(gshard.jit(function, mesh=mesh), mesh, *arguments):
        check_equal(got, want)


@functools.cache
def wanted(name):
    return jax.jit(loss_of(PROGRAMS[name]))(PARAMS)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_calls(name, rounds):
    stages = 2 if name == "two_towers" else 4
    function = loss_of(PROGRAMS[name], in_stages(rounds=rounds))
    found = gshard.explain(function, PARAMS, mesh=Mesh.abstract(stage=stages))
    assert len(found.plan.program.pipelines) == (4 if name == "two_towers" else 2)
    check_calls(function, wanted(name), PARAMS, mesh=mesh_of(stage=stages, other=8 // stages))


def test_under_jax_the_calls_are_calls():
    check_equal(jax.jit(loss_of(of_several, in_stages()))(PARAMS), wanted("several"))
    check_calls(loss_of(of_several, in_stages()), wanted("several"), PARAMS, mesh=mesh_of(stage=1, data=8))


def test_weights_move_once_each_way():
    """As for a stack that the program makes: in planning, both are the same program."""

    def scanned(params):
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


def refused(program, *, grad=True, **arguments):
    function = loss_of(program, in_stages(**arguments)) if grad else functools.partial(program, in_stages(**arguments))
    with pytest.raises(gshard.ShardingError) as error:
        gshard.explain(function, PARAMS, mesh=Mesh.abstract(stage=4))
    return str(error.value)


def chain(step, first=True):
    """The program in which each layer is ``step(stage, x, w, i)``."""

    def program(stage, params):
        x = X @ params["first"] if first else X
        for i, w in enumerate(params["layers"]):
            x = step(stage, x, w, i)
        return x

    return program


def beside(stage, params):
    x, offset = X @ params["first"], jnp.zeros(UNITS)
    for w in params["layers"]:
        x, mean = stage(lambda x, w, offset: (layer(x, w) + offset, x.sum(0)))(x, w, offset)
        offset = jnp.tanh(mean)
    return x


def skipping(stage, params):
    states = [X, X @ params["first"]]
    for w in params["layers"]:
        states.append(stage(lambda x, w, before: layer(x, w) + before)(states[-1], w, states[-2]))
    return states[-1]


# Programs, whether the gradient is taken, and what is said of them.
REFUSED = {
    "layers that differ": (
        chain(lambda stage, x, w, i: stage(lambda x, w: layer(x, w) * (1 + i))(x, w)), True,
        ("no equal stage directly before or after", "mul at test_stage_loops.py", "reads 1.0 in one, and 2.0 in the"),
    ),
    "operations between stages": (
        chain(lambda stage, x, w, i: jnp.tanh(stage(layer)(x, w))), True,
        ("Put what is computed in between into the stages",),
    ),
    "operations beside stages": (
        beside, False, ("from an earlier stage outside of the stages", "tanh at test_stage_loops.py"),
    ),
    "results of earlier stages": (skipping, False, ("not directly before it",)),
    "equal operands": (
        lambda stage, params: chain(lambda s, x, w, i: stage(layer)(x, w))(
            stage, {**params, "layers": params["layers"][:1] * 4}
        ),
        False, ("all stages have the same operands",),
    ),
    "no derivative by the first": (
        chain(lambda stage, x, w, i: stage(functools.partial(layer, w=w))(x), first=False), True,
        ("Give weights as arguments if the first stage",),
    ),
    # JAX leaves out of the last call what only its results need, so this call is no equal stage.
    "recomputed together": (
        lambda stage, params: jax.checkpoint(functools.partial(of_plain, stage))(params), True,
        ("Give jax.checkpoint(layer) to gshard.stage",),
    ),
    "nested": (
        chain(lambda stage, x, w, i: stage(lambda x, w: stage(layer)(x, w))(x, w)), False,
        ("nor inside of another stage",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_chains_that_are_no_pipeline_are_refused_with_what_is_wrong(name):
    program, grad, words = REFUSED[name]
    text = refused(program, grad=grad)
    assert all(word in text for word in words), text


def test_layers_and_stages_that_do_not_fit():
    text = refused(of_plain, rounds=3)
    assert "a loop over 8 layers cannot be cut into 12 equal parts" in text
    assert "test_stage_loops.py" in text
    with jax.disable_jit():
        assert "no effect under jax.disable_jit()" in refused(of_plain, grad=False)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"f": 3}, "a stage is a function, not int"),
        ({"micro_batches": 0}, "micro_batches is a positive integer"),
        ({"rounds": 1.5}, "rounds is a positive integer"),
    ],
)
def test_arguments_are_checked(arguments, what):
    given = {"f": layer, "over": "stage", "micro_batches": 2, **arguments}
    with pytest.raises(gshard.ShardingError, match=what):
        gshard.stage(**given)


def test_a_stage_returns_arrays():
    with pytest.raises(gshard.ShardingError, match="a stage without arrays"):
        jax.jit(gshard.stage(lambda x: None, "stage", micro_batches=2))(X)
