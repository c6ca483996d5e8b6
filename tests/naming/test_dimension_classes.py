"""Classes of dimensions: what one factor runs over is one dimension, all through a program."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.api.names import names_of_arguments, with_names_of_arguments
from gshard.core.paths import positional_names
from gshard.naming.argument_names import path_of_name
from gshard.naming.dimension_classes import dimensions_of, of_equal_layers
from gshard.tracing.trace import trace


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def dimensions(f, *arguments, names=None):
    """The classes of a function with named arguments, and the labels of each argument."""
    said = names_of_arguments(positional_names(f, len(arguments)), names, arguments, {})
    program = with_names_of_arguments(trace(f, *arguments), said, ())
    found = dimensions_of(program)
    paths = zip(map(path_of_name, program.names), program.block.inputs, strict=True)
    return found, {path: " ".join(found.labels[v]) for path, v in paths}


def members(found):
    return {frozenset(f"{path}.{d}" for path, d in c.arguments) for c in found.classes if c.arguments}


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


@pytest.fixture
def arguments():
    blocks = {n: shape(LAYERS, SQUARE, 32) for n in "qkv"} | {"o": shape(LAYERS, 32, SQUARE)}
    blocks |= {"w1": shape(LAYERS, SQUARE, 128), "w2": shape(LAYERS, 128, SQUARE)}
    return {"table": shape(50, SQUARE), "blocks": blocks}, shape(6, 16, dtype="int32")


NAMES = {"tokens": "batch length", "params/table": "vocabulary embed", "params/blocks/w1": "layers _ hidden"}


@pytest.mark.parametrize("transformed", [lambda f: f, jax.grad, jax.checkpoint])
def test_a_few_names_name_a_transformer(transformed, arguments):
    def loss(params, tokens):
        return gpt(params, tokens)

    found, labels = dimensions(transformed(loss), *arguments, names=NAMES)
    columns, read = (labels[f"params/blocks/{name}"].split()[-1] for name in ("q", "v"))
    blocks = {
        "k": f"embed {columns}", "o": f"{read} embed", "q": f"embed {columns}", "v": f"embed {read}",
        "w1": "embed hidden", "w2": "hidden embed",
    }  # fmt: skip
    weights = {f"params/blocks/{name}": f"layers {dims}" for name, dims in blocks.items()}
    assert labels == {"params/table": "vocabulary embed", "tokens": "batch length", **weights}
    assert columns != read
    products = {c.label for c in found.classes if c.is_product}
    assert {columns, read} <= products
    assert products.isdisjoint({"batch", "length", "embed", "hidden"})
    assert any("length'" in words for words in found.labels.values()), "scores have it twice"


def test_the_closure_by_hand():
    """What is elementwise, transposed, contracted, sliced and joined; what never meets stays apart."""
    f = lambda a, b, c: (jnp.sin(a).T @ b, c[:, 1:].sum(0), jnp.concatenate([b, b * 2], 1))  # noqa: E731
    found, _ = dimensions(f, shape(3, 4), shape(3, 5), shape(6, 7))
    assert members(found) == {frozenset({"a.0", "b.0"}), frozenset({"a.1"}), frozenset({"b.1"}), frozenset({"c.0"}),
        frozenset({"c.1"})}  # fmt: skip


def test_a_product_is_taken_apart_as_it_was_made():
    """To (batch length) and back: the batch that comes out is the one that went in."""

    def f(x, w, y):
        flat = x.reshape(6 * 5, 7) @ w
        return flat.reshape(6, 5, 8) + y, flat.reshape(10, 3, 8)

    found, _ = dimensions(f, shape(6, 5, 7), shape(7, 8), shape(6, 5, 8))
    assert members(found) == {
        frozenset({"x.0", "y.0"}), frozenset({"x.1", "y.1"}), frozenset({"x.2", "w.0"}), frozenset({"w.1", "y.2"})
    }  # fmt: skip
    (flat,) = (c for c in found.classes if c.size == 30)
    assert flat.is_product
    assert {c.size for c in found.classes} == {6, 5, 7, 8, 30, 10, 3}


def test_loops_and_branches():
    def f(xs, ys, c):
        c, out = jax.lax.scan(lambda c, xy: (c + xy[0] @ xy[1], c.sum()), c, (xs, ys))
        c = jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, c)
        return jax.lax.cond(c[0] > 0, lambda a, b: a, lambda a, b: -a, c, out), out

    found, _ = dimensions(f, shape(5, 3, 4), shape(5, 4), shape(3))
    assert members(found) == {frozenset({"xs.0", "ys.0"}), frozenset({"xs.1", "c.0"}), frozenset({"xs.2", "ys.1"})}


def test_what_people_say_against_each_other():
    f = lambda x, y: gshard.name(x + y, "_ z")  # noqa: E731
    found, labels = dimensions(f, shape(3, 1), shape(3, 4), names={"x": "a _", "y": "b c"})
    assert {c.label: set(c.names) for c in found.classes} == {"a": {"a", "b"}, "c": {"c", "z"}}
    assert labels == {"x": "a _", "y": "a c"}


def test_names_inside_under_vmap_are_placed_and_letters_are_none_of_the_names():
    _, labels = dimensions(jax.vmap(lambda x: gshard.name(x * 2, "rows columns"), in_axes=1), shape(3, 4, 5))
    assert labels["x"].split()[::2] == ["rows", "columns"]
    found, _ = dimensions(lambda x, y: x @ y, shape(3, 4), shape(4, 5), names={"x": "_ a"})
    assert sorted(c.label for c in found.classes) == ["a", "b", "c"]
    (a,) = (c for c in found.classes if c.label == "a")
    assert a.arguments == (("x", 1), ("y", 0))


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("in_lists", [True, False], ids=["lists of weights", "a list of layers"])
def test_equal_layers_have_one_class_with_their_moments(layers, in_lists):
    adam = optax.adam(1e-3)
    sizes = {"up": (24, 64), "down": (64, 24)}
    if in_lists:
        params = {name: [shape(*size)] * layers for name, size in sizes.items()}
    else:
        params = {"blocks": [{name: shape(*size) for name, size in sizes.items()} for _ in range(layers)]}
    state = {"params": params, "adam": jax.eval_shape(adam.init, params)}

    def step(state, x):
        def loss(params):
            y = x
            blocks = params.get("blocks") or [{k: params[k][i] for k in sizes} for i in range(layers)]
            for block in blocks:
                y = y + jnp.tanh(y @ block["up"]) @ block["down"]
            return (y * y).mean()

        updates, moments = adam.update(jax.grad(loss)(state["params"]), state["adam"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "adam": moments}

    found = of_equal_layers(dimensions_of(gshard.stages.trace(step, state, shape(16, 24))))
    hidden = [c for c in found.classes if c.size == 64]
    assert len(hidden) == 1
    assert len(hidden[0].arguments) == layers * 2 * 3  # up and down, each with two moments
    marked = {v for v, labels in found.labels.items() if hidden[0].label in labels}
    assert sum(v in marked for v in found.labels if v.shape in sizes.values()) >= layers * 2 * 3


def test_dimensions_of_one_layer_stay_apart():
    """Two dimensions at the same paths but for numbers, of which one array has both, are not those of two layers."""

    def f(ws, x):
        return x @ ws[0] @ ws[1] @ ws[2]

    program = gshard.stages.trace(f, [shape(8, 8)] * 3, shape(4, 8))
    found = of_equal_layers(dimensions_of(program))
    assert all(a != b for a, b in (found.labels[v] for v in program.block.inputs[:3]))
