"""Constraints at expressions: what is compiled takes what the function takes in which the constraint is written."""

import linecache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gshard
from explanation.advised_steps import given, mesh_of_devices
from gshard.explanation.traced_expressions import Constraint, TracedProgram

P = PartitionSpec
MESH = mesh_of_devices()
W, X = given(MESH, (8, 8), "data", "model"), given(MESH, (16, 8), None, "model")


def plain(w, x, mark):
    h = mark(x @ w)
    return jnp.sin(h)


def loop(w, x, mark):
    for _ in range(3):
        x = mark(x @ w)
    return x


def scanned(w, x, mark):
    def body(x, _):
        return mark(x @ w), None

    return jax.lax.scan(body, x, None, length=3)[0]


def recomputed(w, x, mark):
    return jax.checkpoint(lambda x: jnp.sin(mark(x @ w)))(x)


def jitted(w, x, mark):
    layer = jax.jit(lambda x: jnp.sin(mark(x @ w)))
    return layer(layer(x))


def added(w, x, mark):
    for _ in range(2):
        x = mark(x + jnp.tanh(x @ w))
    return x


def biased(w, x, mark):
    return mark(x @ w + w[0])


def normalised(w, x, mark):
    return mark(jax.nn.softmax(x @ w)) @ w


def squared(w, x, mark):
    x = x @ w
    return x / jnp.sqrt(mark(x * x).mean(-1, keepdims=True))


def branch(w, x, mark):
    return jax.lax.cond(x.sum() > 0, lambda x: mark(x @ w), lambda x: x, x)


def own_gradient(w, x, mark):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return mark(f(x)) @ w


def of_library(w, x, mark):
    return mark(jax.nn.gelu(x)) @ w


def with_own_gradient_of_library(w, x, mark):
    return mark(jax.nn.relu(x)) @ w


def einsum(w, x, mark):
    return mark(jnp.einsum("bi,ij,jk->bk", x, w, w))


def residual(w, x):
    return x + jnp.tanh(x @ w)


def called(w, x, mark):
    return mark(residual(w, residual(w, x))) @ w


def called_in_layers(w, x, mark):
    for _ in range(2):
        x = mark(residual(w, jnp.sin(residual(w, x)))) * 2
    return x


PROGRAMS = [
    plain, loop, scanned, recomputed, jitted, branch, own_gradient, of_library, with_own_gradient_of_library, einsum,
    added, biased, normalised, squared, called, called_in_layers,
]  # fmt: skip


def explained(f, mark, *, gradient):
    def whole(w, x):
        return f(w, x, mark)

    function = jax.grad(lambda w, x: (whole(w, x) ** 2).sum()) if gradient else whole
    found = gshard.explain(jax.jit(function), W, X)
    assert found.is_compiled
    return found


def program_of(f, *arguments):
    return TracedProgram(jax.jit(f).trace(*arguments).jaxpr)


def unmarked(x):
    return x


def the_one_in(f, expressions):
    lines = f.__code__.co_firstlineno, max(line for _, _, line in f.__code__.co_lines() if line)
    here = [e for e in expressions if e.place.file == __file__ and lines[0] <= e.place.line <= lines[1] + 3]
    return max((e for e in here if marked_text(e)), key=lambda e: e.place)  # x @ w begins where x @ w + b does


def marked_text(e):
    return linecache.getline(__file__, e.place.line)[: e.place.column].endswith("mark(")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_it_is_compiled_as_if_it_were_written(f, gradient):
    spec = P("data", "model")

    def written(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, spec))

    found, expected = (explained(f, mark, gradient=gradient) for mark in (unmarked, written))
    program = TracedProgram(found.source.again.traced())
    changed = program.with_constraints([Constraint(the_one_in(f, program.expressions), spec)], MESH)
    made = found.source.again.compiled({}, lambda _: changed)
    assert made.figures(found.machine) == expected.source.figures(found.machine)
    counts = [str(jaxpr).count("sharding_constraint[") for jaxpr in (changed, expected.source.again.traced())]
    assert counts[0] == counts[1] > 0
    if not gradient:
        assert str(changed) == str(expected.source.again.traced())


def test_a_constraint_is_removed_as_if_it_were_not_written():
    def program(mark):
        return program_of(jax.grad(lambda w, x: (mark(x @ w) ** 2).sum()), W, X)

    made = program(lambda h: jax.lax.with_sharding_constraint(h, NamedSharding(MESH, P("model"))))
    [own] = [e for e in made.expressions if e.spec is not None]
    assert own.spec == P("model")
    assert str(made.with_constraints([Constraint(own, None)], MESH)) == str(program(unmarked).jaxpr)


def test_a_constraint_of_several_arrays_is_one_expression():
    def f(w, x):
        pair = jax.lax.with_sharding_constraint({"a": x @ w, "b": w @ w}, NamedSharding(MESH, P("data")))
        return pair["a"].sum() + pair["b"].sum()

    program = program_of(f, W, X)
    [own] = [e for e in program.expressions if e.spec is not None]
    assert own.shape is None
    assert "sharding_constraint" not in str(program.with_constraints([Constraint(own, None)], MESH))


def test_expressions_read_others():
    found = explained(plain, unmarked, gradient=True)
    program = TracedProgram(found.source.again.traced())
    expressions = program.expressions
    product = the_one_in(plain, expressions)
    [sine] = [e for e in expressions if e.place.line == product.place.line + 1]
    assert program.values_at(__file__, sine.place.line) >= {*sine.values, *product.values}
    assert Constraint(sine, P("data")).text.endswith("(jnp.sin(h), P('data')) instead of jnp.sin(h)")
    assert (product.shape, product.type) == ((16, 8), "float32[16,8]")


def double(x):
    return x + x


def test_where_a_line_makes_several_values_the_calls_of_its_function_are_expressions():
    def f(w, x):
        a, b = double(w), double(x)  # of two shapes, in one line
        return a @ b.T + double(a @ b.T)

    texts = {Constraint(e, P()).text.partition(" instead of ")[2] for e in program_of(f, W, X).expressions}
    assert texts >= {"double(w)", "double(x)", "double(a @ b.T)"}
    assert "x + x" not in texts


def test_a_call_in_a_loop_has_a_value_in_each_round():
    def layer(w, x):
        y = double(x @ w)
        return double(y) * y

    def f(w, x):
        for _ in range(3):
            x = layer(w, x)
        return x

    program = program_of(f, W, X)
    named = {Constraint(e, P()).text.partition(": ")[2].partition(" =")[0]: e for e in program.expressions}
    assert len(named["y"].values) == 3


def test_what_is_in_vmap_is_left_out():
    """Its arrays have a dimension more than those of the user. A constraint in it can be removed."""

    def f(w, x):
        def row(x):
            return jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("model")))

        return jax.vmap(row)(x)

    program = program_of(f, W, X)
    [own] = program.expressions
    assert own.spec is not None
    assert own.shape is None
    assert "sharding_constraint" not in str(program.with_constraints([Constraint(own, None)], MESH))


def test_the_body_of_a_shard_map_has_none():
    def f(w, x):
        inside = jax.shard_map(lambda x: jax.lax.sin(x), mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        return inside(x) @ w

    texts = [Constraint(e, P("data")).text for e in program_of(f, W, X).expressions]
    assert [text.partition(" instead of ")[2] for text in texts] == ["inside(x)", "inside(x) @ w"]


def test_what_is_written_for_statements(tmp_path):
    path = tmp_path / "step.py"
    path.write_text("\n".join(["def f(w, x):", *(f"    {line}" for line in STATEMENTS)]))
    names = {"g": jax.lax.sin}
    exec(compile(path.read_text(), str(path), "exec"), names)
    texts = [Constraint(e, P()).text for e in program_of(names["f"], W, X).expressions]
    assert texts == [
        "after step.py:2: h = jax.lax.with_sharding_constraint(h, P())",
        "after step.py:3: h = jax.lax.with_sharding_constraint(h, P())",
        "after step.py:4: k = jax.lax.with_sharding_constraint(k, P())",
        "step.py:6: jax.lax.with_sharding_constraint(g(k), P()) instead of g(k)",
        "step.py:5: jax.lax.with_sharding_constraint(..., P()) around what makes this value",
        "after step.py:7: m = jax.lax.with_sharding_constraint(m, P())",
        "step.py:8: jax.lax.with_sharding_constraint(m @ w, P()) instead of m @ w",
    ]


STATEMENTS = """h = x @ w  # a product
h *= 2.0
k: object = g(h)
m = g(
    x=g(k)
) + h
return m @ w""".splitlines()
