"""The rule of a kernel: which loops of its plain function are found, and which splits are proven."""

import functools

import jax
import jax.numpy as jnp
import pytest

from api.test_kernel_function import plain_attention, plain_rms_norm
from gshard.core.mesh import Mesh
from gshard.language.kernel_loops import call_of
from gshard.language.kernel_primitive import Kernel, kernel_p, kernel_rule

MESH = Mesh.abstract(a=2, b=3)


def attention(causal):
    return functools.partial(plain_attention, causal=causal)


def scan(x):
    return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(x.shape[1:]), x)[1]


def recurrent(x, w):
    """Rows of dimension 1 are time steps; each has a product, whose features are summed over."""
    step = lambda h, row: (jnp.tanh(row + h @ w), h)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0), reverse=True)[1]


def nested(x):
    """A scan in a scan, whose carry is a sum over the inner one."""

    def inner(total, row):
        return total + jnp.where(row > 0, row, 0), None

    return jax.lax.scan(lambda c, rows: (c + jax.lax.scan(inner, c, rows)[0], c), jnp.zeros(x.shape[2:]), x)


def transposing(x):
    """A carry whose dimensions change places in each iteration."""
    return jax.lax.scan(lambda c, row: (c.T + row, None), jnp.zeros(x.shape[1:]), x)[0]


def summed_inside(x, w):
    """What each iteration stacks is a sum over a dimension of its rows."""
    return jax.lax.scan(lambda c, row: (c, jnp.sum(row * w)), 0.0, x)[1]


FLOAT = "float32"
HEADS = (4, 6, 8, 16), (4, 10, 4, 16), (4, 10, 4, 16)
# The function, its arguments, the rule on the mesh, and that of its gradient.
CASES = {
    "attention": (
        attention(False), HEADS,
        "a b (c d) e, a f c e, a f c g -> a b (c d) g; replicate e f",
        "a b (c d) e, a f c e, a f c g, a b (c d) g -> a b (c d) e, a f c e, a f c g; add over b=6; replicate d e f g",
    ),
    "causal attention": (
        attention(True), HEADS,
        "a b (c d) e, a f c e, a f c g -> a b (c d) g; replicate b e f",
        "a b (c d) e, a f c e, a f c g, a b (c d) g -> a b (c d) e, a f c e, a f c g; replicate b d e f g",
    ),
    "product": (
        lambda x, w: x @ w, ((4, 6), (6, 8)),
        "a b, b c -> a c; add over b=6",
        "a b, b c, a c -> a b, b c; add over a=4; add over c=8",
    ),
    "norm": (plain_rms_norm, ((4, 6, 8), (8,)), "a b c, c -> a b c; replicate c",
             "a b c, c, a b c -> a b c, c; add over a=4; add over b=6; replicate c"),
    "sum": (lambda x: x.sum(0), ((4, 6),), "a b -> b; add over a=4", "a b, b -> a b"),
    "largest": (lambda x: x.max(1), ((4, 6),), "a b -> a; max over b=6", ""),
    "own word of a vocabulary": (
        lambda x, labels, words: jnp.sum(jnp.where(words[None] == labels[:, None], x, 0), 1), ((4, 6), (4,), (6,)),
        "a b, a, b -> a; add over b=6", "",
    ),
    "number of rows": (lambda x: x / x.shape[0], ((4, 6),), "a b -> a b; replicate a", "a b, a b -> a b; replicate a"),
    "mean of rows": (lambda x: x.mean(0), ((4, 6),), "a b -> b; replicate a", "a b, b -> a b; replicate a"),
    "square of a sum": (lambda x: x.sum(0) ** 2, ((4, 6),), "a b -> b; replicate a", "a b, b -> a b; replicate a"),
    "merged dimensions": (lambda x: jnp.sin(x).reshape(-1), ((4, 6),), "a b -> (a b)", "a b, (a b) -> a b"),
    "with itself": (lambda x: x @ x.T, ((4, 6),), "a b -> a a; add over b=6; replicate a", ""),
    "neighbours": (lambda x: jnp.roll(x, 1, 0), ((4, 6),), "a b -> a b; replicate a", "a b, a b -> a b; replicate a"),
    "halves": (
        lambda x: jnp.concatenate([x[:, :3] * 2, x[:, 3:]], 1), ((4, 6),), "a (b c) -> a (b c); replicate b c", ""
    ),
    "a row of some columns": (lambda x: x[:, 1:2, 1:3], ((4, 6, 5),), "a b c -> a 1 c; replicate b c", ""),
    "loop": (scan, ((4, 6),), "a b -> a b; replicate a", "a b, a b -> a b; replicate a"),
    "recurrent": (
        recurrent, ((4, 5, 6), (6, 6)), "a b c, c c -> b a c; replicate b c",
        "a b c, c c, b a c -> a b c, c c; replicate a b c",
    ),
    "nested loops": (nested, ((3, 5, 6),), "a b c -> c, a c; replicate a b", ""),
    "loop that transposes": (transposing, ((3, 6, 6),), "a b b -> b b; replicate a b", ""),
    "loop with a sum": (summed_inside, ((3, 6), (6,)), "a b, b -> a; replicate a b", ""),
}  # fmt: skip


def rule_of(kernel, *shapes):
    args = [x if hasattr(x, "dtype") else jax.ShapeDtypeStruct(x, FLOAT) for x in shapes]
    (equation,) = jax.make_jaxpr(lambda *xs: kernel_p.bind(*xs, kernel=kernel))(*args).eqns
    rule = kernel_rule(call_of(equation))
    assert rule.on_mesh is not None
    return str(rule.on_mesh(MESH))


def kernel_of(function):
    return Kernel("test", lambda *xs: (function(*xs),), lambda *xs: (function(*xs),))


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    function, shapes, wanted, of_gradient = CASES[name]
    kernel = kernel_of(function)
    assert rule_of(kernel, *shapes) == wanted
    if of_gradient:
        arguments = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes]
        gradient = kernel.tangent(tuple(range(len(shapes))), len(shapes), (0,)).transposed
        assert gradient is not None
        assert rule_of(gradient, *shapes, jax.eval_shape(function, *arguments)) == of_gradient


def test_what_a_function_reads_of_shapes_and_constants_is_whole():
    """The first function is another one on shards of two rows."""
    scaled = lambda x: x * jnp.asarray([1.0, 2.0, 3.0, 4.0])[:, None]  # noqa: E731
    for function in (lambda x: 2 * x if x.shape[0] > 2 else x, scaled):
        assert rule_of(kernel_of(function), (4, 6)) == "a b -> a b; replicate a"


def test_each_split_is_proven_by_itself():
    """Heads may be split as far as keys have some: the rest of a group shares them."""
    kernel = kernel_of(attention(False))
    args = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in HEADS]
    (equation,) = jax.make_jaxpr(lambda *xs: kernel_p.bind(*xs, kernel=kernel))(*args).eqns
    made = kernel_rule(call_of(equation))
    assert made.on_mesh is not None
    mesh = Mesh.abstract(a=4, b=2)
    rule = made.on_mesh(mesh)
    heads = rule.operands[1][2][0]
    allowed = rule.allowed
    assert allowed is not None
    assert allowed(mesh, {heads: mesh.atoms_of["b"]})
    assert allowed(mesh, {heads: mesh.atoms_of["a"]})  # one head of keys on each device
    assert not allowed(mesh, {rule.operands[0][2][1]: mesh.atoms_of["b"]})
