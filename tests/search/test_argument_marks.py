"""Marks of arguments are written at the top of the function, for every kind of pytree, and the plan is the same."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.api.search import paths_of_arguments
from gshard.core.mark import mark_of_cut, text_of_spec
from gshard.core.sharding import Sharding
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.search.as_marks import argument_statements
from search.test_search import shape
from search.test_statements import write_statements
from training_files import TRAINING, loaded

MESH = gshard.Mesh.abstract(data=4, model=2)
MODEL = MESH.atoms_of["model"]

# Of training files (tests/training_files.py): the pattern of equal layers, and what is in the names of its weights.
FORMS = {
    "plain": ("*/up", ("params", "'up'")),
    "NNX": ("0/blocks/*/up/kernel/value", ("state[0]", "'up'", "kernel")),
    "Linen": ("params/params/up*/kernel", (".params['params']['up", "kernel")),
    "Equinox": ("*/up/weight", ("blocks", ".up.", "weight")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.one_in(2)
def test_the_patched_program_has_the_plan_of_the_marks(form, tmp_path, monkeypatch):
    """The hidden dimension over one axis, the batch over the other; moments are left to propagation."""
    pattern, words = FORMS[form]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TRAINING[form])
    module = loaded(tmp_path / "model.py", f"{form}_before")
    options = {"mesh": MESH} | ({"static_argnames": "graphdef"} if form == "NNX" else {})
    step = gshard.jit(module.step.__wrapped__, **options)
    lowered = step.lower(*module.made())
    program = lowered.program
    named = dict(zip(program.names, program.block.inputs, strict=True))
    weights = [v for name, v in named.items() if all(w in name for w in words)]
    marks = {v: Sharding(tuple(MODEL if n == module.HIDDEN else () for n in v.shape)) for v in weights}
    marks[named["x"]] = Sharding((MESH.atoms_of["data"], ()))
    assert len(marks) > 2
    if form == "plain":
        marks |= {v: Sharding(((), ())) for name, v in named.items() if "params" in name and "down" in name}
    paths = paths_of_arguments(lowered)
    specs = {v: spec_of_cut(s, MESH) if s.atoms else P() for v, s in marks.items()}
    texts = {v: f"shard(x, jax.{text_of_spec(spec)})" for v, spec in specs.items()}
    inputs = program.block.inputs[len(program.captured) :]
    told = [row for rows in argument_statements(texts, inputs, paths).values() for row in rows]
    assert "by_path" in str(told)
    dims = '"model", None' if form == "Equinox" else 'None, "model"'
    assert f'"{pattern}": jax.P({dims})' in "\n".join(told), "equal layers in one pattern"
    write_statements(tmp_path / "model.py", "step", SimpleNamespace(statements=told))
    after = loaded(tmp_path / "model.py", f"{form}_after")
    plan = gshard.jit(after.step.__wrapped__, **options).lower(*after.made()).plan
    marked = with_marks(program, {v: mark_of_cut(s.dims, MESH) for v, s in marks.items()})
    expected = gshard.stages.propagate(marked, MESH)
    shardings = [[p.format(v) for v in p.program.block.inputs] for p in (plan, expected)]
    assert shardings[0] == shardings[1]
    sent = [sum(c.total_bytes for c in gshard.stages.partition(p).collectives) for p in (plan, expected)]
    assert sent[0] == sent[1] > 0


def test_patterns_are_exact_where_others_would_say_too_much():
    """Layers that are not alike, keys with a star in them, and arrays that no pattern can tell apart."""
    cut, other = 'shard(x, P("model", None))', 'shard(x, P(None, "model"))'

    def statements(paths):
        inputs = gshard.stages.trace(lambda *xs: xs, *[shape(8, 8)] * len(paths)).block.inputs
        calls = {v: text for v, text in zip(inputs, paths.values(), strict=True) if text is not None}
        return argument_statements(calls, inputs, list(paths))

    def by_path(*rows):
        return {"p": ["p = gshard.shard_by_path(p, {", *(f"    {row}," for row in rows), "})"]}

    assert statements({"x": cut}) == {"x": ['x = gshard.shard(x, P("model", None))']}
    two = by_path('"l/0/w": P("model", None)', '"l/1/w": P("model", None)')
    assert statements({"p/l/0/w": cut, "p/l/1/w": cut, "p/l/2/w": None, "p/l/2/b": None}) == two
    every = {"p": ['p = gshard.shard_by_path(p, {"l/*/w": P("model", None)})']}
    assert statements({f"p/l/{i}/{w}": cut if w == "w" else None for i in range(3) for w in "wb"}) == every
    assert statements({"p/a*": cut, "p/ab": other}) == {}, "the first pattern would say it of both"
    assert statements({"p/ab": other, "p/a*": cut}) == by_path('"ab": P(None, "model")', '"a*": P("model", None)')
    assert statements({"p/a/*": cut, "p/a/b": None}) == {}
    stages = {"p": ['p = gshard.pipeline(p, "stage", paths=["s"])']}
    assert statements({"xs[0]": cut, "p/s": "pipeline(x, 'stage')"}) == stages


def test_marks_by_path():
    tree = {"layers": [{"w": jnp.ones((8, 8)), "b": jnp.ones(8)}] * 2, "f": jnp.tanh}

    def f(layers):
        marked = gshard.shard_by_path({**tree, "layers": layers}, {"layers/0/w": P("data"), "layers/*/w": P("model")})
        assert marked["f"] is jnp.tanh
        return marked["layers"]

    program = gshard.stages.trace(f, tree["layers"])
    assert [str(e.mark) for e in program.block.walk()] == ["shard(x, P('data'))", "shard(x, P('model'))"]
    for patterns, text in (
        ({"layers/*/v": P("data")}, "matches no path"),
        ({"layers": P(), "layers/0/w": P("data")}, "only what an earlier pattern matches"),
        ({"layers/*/b": P("data", "model")}, "names 2 dimensions"),
        ({"f": P("data")}, "layers|array"),
    ):
        with pytest.raises(gshard.ShardingError, match=text):
            gshard.shard_by_path(tree, patterns)
    assert spec_of_cut(Sharding((MODEL,)), MESH) == P("model")
