"""Marks of arguments are written at the top of the function, for every kind of pytree, and the plan is the same."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.sharding import Sharding
from gshard.planning.added_marks import spec_of_cut
from gshard.search.argument_marks import argument_marks
from gshard.search.as_marks import FoundMark
from gshard.search.patch import patch_of
from search.test_search import shape

MESH = gshard.Mesh.abstract(data=4, model=2)
MODEL = MESH.atoms_of["model"]


def test_patterns_are_exact_where_others_would_say_too_much():
    """Layers that are not alike, keys with a star in them, and arrays that no pattern can tell apart."""
    mesh = gshard.Mesh.abstract(data=4, model=2)
    cut, other = Sharding((MODEL, ())), Sharding(((), MODEL))

    def statements(paths):
        inputs = gshard.stages.trace(lambda *xs: xs, *[shape(8, 8)] * len(paths)).block.inputs
        marks = {v: s for v, s in zip(inputs, paths.values(), strict=True) if s is not None}
        told, unsaid = argument_marks(marks, inputs, list(paths), mesh)
        return told, len(unsaid)

    assert statements({"x": cut}) == ({"x": 'x = gshard.shard(x, P("model", None))'}, 0)
    two = 'p = gshard.shard_by_path(p, {"l/0/w": P("model", None), "l/1/w": P("model", None)})'
    assert statements({"p/l/0/w": cut, "p/l/1/w": cut, "p/l/2/w": None, "p/l/2/b": None}) == ({"p": two}, 0)
    every = 'p = gshard.shard_by_path(p, {"l/*/w": P("model", None)})'
    assert statements({f"p/l/{i}/{w}": cut if w == "w" else None for i in range(3) for w in "wb"}) == ({"p": every}, 0)
    assert statements({"p/a*": cut, "p/ab": other}) == ({}, 2), "the first pattern would say it of both"
    last = 'p = gshard.shard_by_path(p, {"ab": P(None, "model"), "a*": P("model", None)})'
    assert statements({"p/ab": other, "p/a*": cut}) == ({"p": last}, 0)
    assert statements({"p/a/*": cut, "p/a/b": None}) == ({}, 1)


def test_what_is_in_no_file_is_told_with_the_statement(tmp_path):
    def loss(params, x):
        return jnp.sum(x @ params["w"])

    program = gshard.stages.trace(loss, {"w": shape(64, 64)}, shape(8, 64))
    mark = FoundMark("w", "", 0.0, {program.block.inputs[0]: Sharding((MODEL, ()))})
    told = patch_of([mark], program, ("params/w", "x"), ("<string>", 1), MESH)
    assert "loss is in no file" in told
    assert '#   params = gshard.shard_by_path(params, {"w": P("model", None)})' in told
    (tmp_path / "one.py").write_text("loss = lambda params, x: params\ndef other(params, x): return x\n")
    for line in (1, 2):
        assert "write in front of" in patch_of(
            [mark], program, ("params/w", "x"), (str(tmp_path / "one.py"), line), MESH
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
