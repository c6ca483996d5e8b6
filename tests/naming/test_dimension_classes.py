"""Classes of dimensions: what one factor runs over is one dimension, all through a program."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.naming.argument_names import path_of_name
from gshard.naming.dimension_classes import DimensionClasses, most_common_dimension
from gshard.tracing.trace import trace


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def members(f, *arguments):
    """The classes of the dimensions of arguments."""
    program = trace(f, *arguments)
    classes, found = DimensionClasses(program), {}
    for name, v in zip(program.names, program.block.inputs, strict=True):
        for d in range(len(v.shape)):
            found.setdefault(classes.root((v, d)), set()).add(f"{path_of_name(name)}.{d}")
    return {frozenset(dims) for dims in found.values()}


def gpt(params, tokens):
    def block(x, p):
        def heads(name):
            return (x @ p[name]).reshape(*x.shape[:2], 4, 8)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), heads("k"))
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads("v")).reshape(*x.shape[:2], 32)
        x = x + read @ p["o"]
        return x + jax.nn.gelu(x @ p["w1"]) @ p["w2"], None

    x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
    logits = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()


SQUARE, LAYERS = 40, 3  # 4 heads of 8 are 32 columns


@pytest.mark.parametrize("transformed", [lambda f: f, jax.grad, jax.checkpoint])
def test_the_dimensions_of_a_transformer(transformed):
    blocks = {n: shape(LAYERS, SQUARE, 32) for n in "qkv"} | {"o": shape(LAYERS, 32, SQUARE)}
    blocks |= {"w1": shape(LAYERS, SQUARE, 128), "w2": shape(LAYERS, 128, SQUARE)}
    arguments = {"table": shape(50, SQUARE), "blocks": blocks}, shape(6, 16, dtype="int32")
    paths = [f"params/blocks/{name}" for name in blocks]
    embed = {"params/blocks/o.2", "params/blocks/w2.2", "params/table.1"}
    assert members(transformed(gpt), *arguments) == {
        frozenset({"tokens.0"}), frozenset({"tokens.1"}), frozenset({"params/table.0"}),
        frozenset(f"{path}.0" for path in paths),
        frozenset(embed | {f"params/blocks/{name}.1" for name in ("q", "k", "v", "w1")}),
        frozenset({"params/blocks/w1.2", "params/blocks/w2.1"}),
        frozenset({"params/blocks/q.2", "params/blocks/k.2"}), frozenset({"params/blocks/v.2", "params/blocks/o.1"}),
    }  # fmt: skip


def test_the_closure_by_hand():
    """What is elementwise, transposed, contracted, sliced and joined; what never meets stays apart."""
    f = lambda a, b, c: (jnp.sin(a).T @ b, c[:, 1:].sum(0), jnp.concatenate([b, b * 2], 1))  # noqa: E731
    assert members(f, shape(3, 4), shape(3, 5), shape(6, 7)) == {
        frozenset({"a.0", "b.0"}), frozenset({"a.1"}), frozenset({"b.1"}), frozenset({"c.0"}), frozenset({"c.1"})
    }  # fmt: skip


def test_a_product_is_taken_apart_as_it_was_made():
    """To (batch length) and back: the batch that comes out is the one that went in."""

    def f(x, w, y):
        flat = x.reshape(6 * 5, 7) @ w
        return flat.reshape(6, 5, 8) + y, flat.reshape(10, 3, 8)

    assert members(f, shape(6, 5, 7), shape(7, 8), shape(6, 5, 8)) == {
        frozenset({"x.0", "y.0"}), frozenset({"x.1", "y.1"}), frozenset({"x.2", "w.0"}), frozenset({"w.1", "y.2"})
    }  # fmt: skip


def test_loops_and_branches():
    def f(xs, ys, c):
        c, out = jax.lax.scan(lambda c, xy: (c + xy[0] @ xy[1], c.sum()), c, (xs, ys))
        c = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, c)
        return jax.lax.cond(c[0] > 0, lambda a, b: a, lambda a, b: -a, c, out), out

    found = members(f, shape(5, 3, 4), shape(5, 4), shape(3))
    assert found == {frozenset({"xs.0", "ys.0"}), frozenset({"xs.1", "c.0"}), frozenset({"xs.2", "ys.1"})}


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("in_lists", [True, False], ids=["lists of weights", "a list of layers"])
def test_equal_layers_have_one_dimension_with_their_moments(layers, in_lists):
    adam = optax.adam(1e-3)
    sizes = {"up": (24, 64), "down": (64, 24)}
    if in_lists:
        params = {name: [shape(*size)] * layers for name, size in sizes.items()}
    else:
        params = {"blocks": [{name: shape(*size) for name, size in sizes.items()} for _ in range(layers)]}
    params["head"] = shape(64, 24)
    state = {"params": params, "adam": jax.eval_shape(adam.init, params)}

    def step(state, x):
        def loss(params):
            y = x
            blocks = params.get("blocks") or [{k: params[k][i] for k in sizes} for i in range(layers)]
            for block in blocks:
                y = jnp.tanh(jnp.tanh(y @ block["up"]) @ block["down"]) @ jnp.ones((24, 24))
            return (y * y).mean() + params["head"].sum()

        updates, moments = adam.update(jax.grad(loss)(state["params"]), state["adam"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "adam": moments}

    program = gshard.stages.trace(step, state, shape(16, 24))
    found = most_common_dimension(program)
    names = [name for name, v in zip(program.names, program.block.inputs, strict=True) if v.shape in sizes.values()]
    assert {program.names[i] for i in found} == {name for name in names if "head" not in name}
    shapes = [(program.block.inputs[i].shape, d) for i, d in found.items()]
    assert all(shape[d] == shapes[0][0][shapes[0][1]] for shape, d in shapes)
    assert len(found) == layers * 2 * 3, "up and down, each with two moments"


def test_dimensions_of_one_layer_stay_apart():
    """Two dimensions at the same paths but for numbers, of which one array has both, are not those of two layers."""
    program = gshard.stages.trace(lambda ws, x: x @ ws[0] @ ws[1] @ ws[2], [shape(8, 8)] * 3, shape(4, 8))
    assert len(most_common_dimension(program)) == 2
