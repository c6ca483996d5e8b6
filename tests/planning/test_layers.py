"""Layers that are written out one after the other are planned alike, where that costs no more."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

import gshard
from gshard.planning import propagate as of_propagate
from gshard.solver.problem import Problem
from gshard.solver.solve import tied

MESH = gshard.Mesh.abstract(data=8)
WIDTH, HEADS = 256, 4


def f32(*shape):
    return ShapeDtypeStruct(shape, "float32")


def feed_forward(p, x):
    h = jax.nn.gelu(x @ p["up"].astype(x.dtype) + p["b_up"].astype(x.dtype))
    return x + h @ p["down"].astype(x.dtype) + p["b_down"].astype(x.dtype)


def normed(scale, x):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def block(p, x):
    batch, length, width = x.shape
    parts = jnp.split(normed(p["before"], x) @ p["qkv"].astype(x.dtype), 3, -1)
    q, k, v = (part.reshape(batch, length, HEADS, width // HEADS) for part in parts)
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / (width // HEADS) ** 0.5
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1).astype(x.dtype), v).reshape(x.shape)
    return feed_forward(p, normed(p["after"], x + mixed @ p["out"].astype(x.dtype)))


def weights(layer, count):
    own = {"up": f32(WIDTH, 4 * WIDTH), "down": f32(4 * WIDTH, WIDTH), "b_up": f32(4 * WIDTH), "b_down": f32(WIDTH)}
    if layer is block:
        own |= {"qkv": f32(WIDTH, 3 * WIDTH), "out": f32(WIDTH, WIDTH), "before": f32(WIDTH), "after": f32(WIDTH)}
    return [dict(own) for _ in range(count)]


def step_of(layer, dtype, accumulates):
    """Fully sharded data parallelism; two micro-batches if ``accumulates``."""

    def loss(layers, x):
        y = x.astype(dtype)
        for p in layers:
            y = layer(p, y)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(layers, x):
        layers, x = gshard.split(layers, 0, "data"), gshard.split(x, 1 if accumulates else 0, "data")

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(layers, part)), None

        if accumulates:
            gradients = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, layers), x)[0]
        else:
            gradients = jax.grad(loss)(layers, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients)

    return step


def lowered(layer, count, dtype, accumulates, machine=None):
    x = f32(2, 64, 128, WIDTH) if accumulates else f32(64, 128, WIDTH)
    step = gshard.jit(step_of(layer, dtype, accumulates), mesh=MESH, machine=machine)
    return step.lower(weights(layer, count), x)


@pytest.mark.parametrize(("layer", "count", "dtype", "accumulates", "machine"), [
    (feed_forward, 2, "bfloat16", True, None), (feed_forward, 4, "bfloat16", True, None),
    (feed_forward, 8, "bfloat16", True, None), (feed_forward, 4, "bfloat16", True, "h100:1x8"),
    (feed_forward, 4, "float32", False, None), (feed_forward, 4, "float32", True, None),
    (block, 2, "bfloat16", True, None), (block, 4, "bfloat16", True, None), (block, 4, "float32", False, None),
    pytest.param(block, 8, "bfloat16", True, None, marks=pytest.mark.slow),
    pytest.param(block, 4, "bfloat16", True, "v5e:2x4", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.one_in(5)
def test_all_layers_have_the_same_shardings_and_collectives(layer, count, dtype, accumulates, machine):
    found = lowered(layer, count, dtype, accumulates, machine)
    own = len(weights(layer, 1)[0])
    plan, program = found.plan, found.plan.program
    for values, ways in ((program.block.inputs[:-1], plan.entry[:-1]), (program.block.outputs, plan.leave)):
        every = [(plan.shardings[v].dims, way.dims) for v, way in zip(values, ways, strict=True)]
        assert every == every[:own] * count
    sent = Counter((c.kind, c.shape, c.line, c.times) for c in found.spmd.collectives if not c.shape.endswith("[]"))
    assert sent
    assert {row: n % count for row, n in sent.items()} == dict.fromkeys(sent, 0)


def test_of_plans_that_send_as_much_the_one_that_holds_less_is_taken():
    """A weight that is gathered in float32 before a loop is as many bytes as in bfloat16 in each of two rounds."""
    gathers = [c for c in lowered(feed_forward, 4, "bfloat16", True).spmd.collectives if c.kind == "all_gather"]
    weights = [c for c in gathers if "," in c.shape]
    assert len(weights) == 8
    assert {(c.shape[:4], c.times) for c in weights} == {("bf16", 2)}


def test_layers_that_are_alike_cost_nearly_what_the_best_cost(monkeypatch):
    """Weights that differ in turn have one sharding each: nothing else is asked of them."""

    def in_turn(ws, x):
        x = gshard.split(x, 0, "data")
        for i, w in enumerate(ws):
            x = jax.nn.relu(x @ (gshard.split(w, i % 2, "data")))
        return jnp.mean(x**2)

    def unmarked(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return jnp.mean(gshard.split(x, 0, "data") ** 2)

    solved = []
    chosen = of_propagate._chosen

    def both(graph, propagated):
        with monkeypatch.context() as patch:
            patch.setattr(of_propagate, "classes_of_layers", lambda graph: None)
            alone, states, _ = chosen(graph, propagated)
        found = chosen(graph, propagated)
        solved.append((found[0].problem.value(found[1]), alone.problem.value(states)))
        return found

    monkeypatch.setattr(of_propagate, "_chosen", both)
    for f in (in_turn, unmarked):
        for rows in (64, 4096):
            arguments = [f32(512, 512)] * 6, f32(rows, 512)
            assert gshard.jit(jax.grad(f), mesh=MESH).lower(*arguments).plan.gap is not None
    lowered(feed_forward, 4, "float32", True).plan  # noqa: B018  planned
    assert len(solved) == 5
    for alike, best in solved:
        assert alike <= best * of_propagate._SAME


def test_a_tied_problem_costs_what_its_states_cost_in_the_whole_one():
    random = np.random.default_rng(0)
    for _ in range(50):
        nodes = int(random.integers(2, 9))
        classes = np.unique(random.integers(0, 4, nodes), return_inverse=True)[1]
        sizes = random.integers(1, 4, classes.max() + 1)
        costs = [random.integers(0, 9, sizes[k]).astype(float) for k in classes]
        edges = [(u, v, random.integers(0, 9, (costs[u].size, costs[v].size)).astype(float))
                 for u in range(nodes) for v in range(nodes) if u != v and random.random() < 0.5]  # fmt: skip
        problem = Problem.of(costs, edges)
        states = np.array([random.integers(0, n) for n in sizes])
        assert tied(problem, classes).value(states) == problem.value(states[classes])
