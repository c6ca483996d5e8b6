"""Marks of arguments are written at the top of the function, for every kind of pytree, and the plan is the same."""

import subprocess

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.api.search import paths_of_arguments
from gshard.core.mark import mark_of_cut
from gshard.core.paths import place_of_definition
from gshard.core.sharding import Sharding
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.search.as_marks import FoundMark
from gshard.search.patch import argument_statements, patch_of
from search.test_patch import loaded
from search.test_search import shape
from training_files import TRAINING

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
    written = [FoundMark("weights", "", 0.0, {v: s}) for v, s in marks.items()]
    paths = paths_of_arguments(program, lowered.in_tree)
    told = patch_of(written, program, MESH, paths, place_of_definition(step))
    assert "not written" not in told
    assert "by_path" in told
    dims = '"model", None' if form == "Equinox" else 'None, "model"'
    assert f'"{pattern}": jax.P({dims})' in told, "equal layers in one pattern"
    (tmp_path / "marks.diff").write_text(told)
    subprocess.run(["git", "apply", "marks.diff"], cwd=tmp_path, check=True)
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
        told, unsaid = argument_statements(calls, inputs, list(paths))
        return told, len(unsaid)

    def by_path(*rows):
        return {"p": ["p = gshard.shard_by_path(p, {", *(f"    {row}," for row in rows), "})"]}, 0

    assert statements({"x": cut}) == ({"x": ['x = gshard.shard(x, P("model", None))']}, 0)
    two = by_path('"l/0/w": P("model", None)', '"l/1/w": P("model", None)')
    assert statements({"p/l/0/w": cut, "p/l/1/w": cut, "p/l/2/w": None, "p/l/2/b": None}) == two
    every = {"p": ['p = gshard.shard_by_path(p, {"l/*/w": P("model", None)})']}
    assert statements({f"p/l/{i}/{w}": cut if w == "w" else None for i in range(3) for w in "wb"}) == (every, 0)
    assert statements({"p/a*": cut, "p/ab": other}) == ({}, 2), "the first pattern would say it of both"
    assert statements({"p/ab": other, "p/a*": cut}) == by_path('"ab": P(None, "model")', '"a*": P("model", None)')
    assert statements({"p/a/*": cut, "p/a/b": None}) == ({}, 1)
    stages = {"p": ['p = gshard.pipeline(p, "stage", paths=["s"])']}
    assert statements({"xs[0]": cut, "p/s": "pipeline(x, 'stage')"}) == (stages, 1)


def test_what_is_in_no_file_is_told_with_the_statement(tmp_path):
    def loss(params, x):
        return jnp.sum(x @ params["w"])

    program = gshard.stages.trace(loss, {"w": shape(64, 64)}, shape(8, 64))
    mark = FoundMark("w", "", 0.0, {program.block.inputs[0]: Sharding((MODEL, ()))})
    told = patch_of([mark], program, MESH, ("params/w", "x"), ("<string>", 1))
    assert "loss is in no file" in told
    assert '#   params = gshard.shard_by_path(params, {"w": jax.P("model", None)})' in told
    (tmp_path / "one.py").write_text("loss = lambda params, x: params\ndef other(params, x): return x\n")
    for line in (1, 2):
        assert "write in front of" in patch_of(
            [mark], program, MESH, ("params/w", "x"), (str(tmp_path / "one.py"), line)
        )


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
