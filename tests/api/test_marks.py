"""Marks as users write them: twice in a row, on scalars, on pytrees, in JAX's words, and wrongly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import replicate, shard, split
from gshard.comm.steps import LOCAL
from gshard.core.errors import ShardingError
from placed import in_every_way

AUTO = jax.sharding.AxisType.Auto


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))


@pytest.fixture
def x(rng):
    return rng.standard_normal((16, 24)).astype(np.float32)


def sent(lowered):
    """The kinds of collectives of a program."""
    return [c.kind for c in lowered.spmd.collectives if c.kind not in LOCAL]


def is_sharded(x, mesh, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), x.ndim)


def by_constraints(x):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))
    for spec in (P(("data", "model")), P(None, ("data", "model"))):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x


@pytest.mark.parametrize(
    ("f", "kinds"),
    [
        (lambda x: split(split(x, 0, 8), 1, 8), ["all_to_all", "all_to_all"]),
        (lambda x: split(replicate(x), 1, 8), ["all_gather"]),
        (by_constraints, ["all_to_all", "all_to_all"]),
        (lambda x: shard(shard(x, P("data", "model")), P(None, ("data", "model"))), None),
        (lambda x: split(split(split(x, 1, 8), 0, 8), 1, 8), ["all_to_all", "all_to_all"]),
    ],
    ids=["there and back", "whole between", "constraints", "by spec", "three"],
)
def test_the_first_mark_is_obeyed_even_where_it_leads_away_and_back(f, kinds, x, mesh):
    """The argument comes as the second mark wants it, so that doing nothing would look right too."""
    jitted = gshard.jit(f, mesh=mesh, in_shardings=P(None, ("data", "model")))
    lowered = jitted.lower(x)
    assert sent(lowered) if kinds is None else sent(lowered) == kinds
    out = jitted(x)
    assert out.tobytes() == x.tobytes()
    assert is_sharded(out, mesh, None, ("data", "model"))


def test_a_mark_inside_against_one_at_the_boundary_is_a_reshard(x, mesh):
    both = ("data", "model")
    out = gshard.jit(lambda x: split(x, 0, both), mesh=mesh, out_shardings=P(None, both))
    assert sent(out.lower(x)) == ["all_to_all"]
    assert is_sharded(out(x), mesh, None, both)
    into = gshard.jit(lambda x: split(x, 1, both), mesh=mesh, in_shardings=P(both))
    assert sent(into.lower(x)) == ["all_to_all"]
    assert is_sharded(into(x), mesh, None, both)


@pytest.mark.parametrize("f", [
    lambda x: replicate(3.0) * x,
    lambda x: replicate({"a": x, "lr": 0.1})["lr"] * x,
    lambda x: jax.device_put(2.0) * x,
    lambda x: shard(-2.0, P()) * x,
    lambda x: jax.lax.with_sharding_constraint(2.0, NamedSharding(jax.make_mesh((8,), ("a",), (AUTO,)), P())) * x,
    lambda x: (replicate(2), replicate(True), replicate(1 - 2j), jax.device_put(-3), jnp.copy(0.5), x),
    lambda x: jax.lax.cond(x[0, 0] > 0, lambda a: a, lambda a: replicate(a * 2), 3.0) * x,
    lambda x: jax.lax.scan(lambda c, t: (replicate(c), c * t), replicate(2.0), x),
    lambda x: jax.checkpoint(lambda a, b: a * replicate(b))(x, 2.0),
    lambda x: jax.lax.stop_gradient(replicate(-0.0)) * x,
])  # fmt: skip
def test_literals_may_be_marked(f, x):
    found, expected = gshard.jit(f, mesh=8)(x), jax.jit(f)(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("value", [3.0, 3, True, 1j, np.float32(2), np.int64(3), np.float16(-0.0)], ids=repr)
@pytest.mark.parametrize("mark", [replicate, lambda v: shard(v, P()), lambda v: split([v, np.zeros(4)], 0, 2)[0]])
def test_outside_a_mark_on_a_scalar_changes_nothing(value, mark):
    for f in (lambda v: v, jax.jit):
        found, expected = jnp.asarray(f(mark)(value) if f is jax.jit else mark(value)), jnp.asarray(value)
        assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
        assert found.tobytes() == expected.tobytes()


def test_leaves_without_the_dimension_stay_open(x, mesh):
    """An optimizer's state: moments, a scalar count, None, a key."""
    state = {"m": x, "b": x[0], "count": np.int32(3), "none": None, "key": jax.random.key(1), "lr": 0.5}
    first = gshard.jit(lambda s: split(s, 0, "data"), mesh=mesh)(state)
    assert is_sharded(first["m"], mesh, "data")
    assert is_sharded(first["b"], mesh, "data")
    assert (int(first["count"]), first["none"], float(first["lr"])) == (3, None, 0.5)
    assert jax.random.key_data(first["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    program = gshard.jit(lambda s: split(s, -2, "data"), mesh=mesh).lower(state).program
    assert [e.mark.spec for e in program.block.equations] == [("data",)], "only one of them has two dimensions"


def test_gradients_of_integers_pass(x):
    grads = jax.grad(lambda p: (p["x"] * p["n"]).sum(), allow_int=True)({"x": x, "n": np.int32(2)})
    marked = split(grads, 0, 2)
    assert marked["n"].dtype == jax.dtypes.float0
    assert marked["x"].tobytes() == np.asarray(grads["x"]).tobytes()


def test_a_pytree_without_arrays_is_left_alone():
    assert split({"a": None, "b": ()}, 3, "data") == replicate({"a": None, "b": ()}) == {"a": None, "b": ()}


@pytest.mark.parametrize(("said", "spec"), [
    (lambda mesh: NamedSharding(mesh, P("data")), ("data",)),
    (lambda mesh: NamedSharding(mesh, P(None, ("model", "data"))), (None, ("model", "data"))),
    (lambda mesh: "model", ("model",)),
    (lambda mesh: P(None, "model"), (None, "model")),
])  # fmt: skip
def test_shard_takes_what_jax_takes(said, spec, x, mesh):
    out = gshard.jit(lambda x: shard(x, said(mesh)), mesh=mesh)(x)
    assert is_sharded(out, mesh, *spec)
    assert out.tobytes() == x.tobytes()


def test_an_unconstrained_dimension_is_open(x, mesh):
    f = gshard.jit(lambda x: shard(x, P(P.UNCONSTRAINED, "model")), mesh=mesh, in_shardings=P("data"))
    assert is_sharded(f(x), mesh, "data", "model")


def test_shard_takes_a_pytree_of_what_it_takes(x, mesh):
    tree = {"l": {"w": x, "b": x[0], "none": None}, "ids": x, "count": np.int32(2), "open": x}
    said = {
        "l": {"w": NamedSharding(mesh, P(None, "model")), "b": "data", "none": P("data", "data", "data")},
        "ids": np.arange(8).reshape(2, 4),
        "count": P(),
        "open": None,
    }
    f = gshard.jit(lambda t: shard(t, said), mesh=mesh)
    out = f(tree)
    assert is_sharded(out["l"]["w"], mesh, None, "model")
    assert is_sharded(out["l"]["b"], mesh, "data")
    assert is_sharded(out["ids"], mesh), "no axes of the user's mesh are these parts"
    parts = gshard.jit(lambda t: shard(t, said), mesh={"data": 4, "model": 2})(tree)
    assert parts["ids"].sharding.shard_shape((16, 24)) == (8, 6)
    assert [e.mark.leaf for e in f.lower(tree).program.block.equations] == [
        "x['count']", "x['ids']", "x['l']['b']", "x['l']['w']",
    ]  # fmt: skip
    prefix = gshard.jit(lambda t: shard(t, {"l": None, "ids": "data", "count": None, "open": P()}), mesh=mesh)
    assert [e.mark.leaf for e in prefix.lower(tree).program.block.equations] == ["x['ids']", "x['open']"]


@pytest.mark.parametrize("by", [{0: "data", 1: "model"}, {-1: ("model",), 0: ("data",)}], ids=["names", "tuples"])
def test_two_dimensions_are_split_by_one_mark(by, x, mesh):
    """As by a PartitionSpec; two marks in a row are a reshard."""
    f = gshard.jit(lambda x: split(x, by), mesh=mesh)
    for got in in_every_way(f, (x,), mesh):
        assert is_sharded(got, mesh, "data", "model")
        assert got.tobytes() == x.tobytes()
    assert sent(f.lower(x)) == []
    assert sent(gshard.jit(lambda x: split(split(x, 0, "data"), 1, "model"), mesh=mesh).lower(x)) != []
    assert f"split(x, {by!r})" in str(f.lower(x).program)


def tree_of(x):
    return {"l1": {"w": x, "b": x[0]}, "count": jnp.int32(3)}


WRONG = {
    "axis": (lambda x: split(x, 0, "dat"), "no axis 'dat'", "Did you mean 'data'? The mesh has 'data', 'model'."),
    "swapped": (lambda x: split(x, "data", 0), "'data' is no dimension", "dimension comes first"),
    "swapped names": (lambda x: split(x, ("data",), 1), "is no dimension", "dimension comes first"),
    "float": (lambda x: split(x, 0, 2.0), "2.0 is neither a number", "split(x, 0, 8)"),
    "float dimension": (lambda x: split(x, 1.0, 2), "1.0 is no dimension", "dimension comes first"),
    "bool dimension": (lambda x: split(x, True, 2), "True is no dimension", "dimension comes first"),
    "no axes": (lambda x: split(x, 0, ()), "() is neither", "tuple of them"),
    "sizes for names": (lambda x: split(x, 0, (4, 2)), "(4, 2) is neither", "tuple of them"),
    "nothing": (lambda x: split(x, 0, None), "None is neither", "split(x, 0, 'data') for a mesh axis"),
    "axis alone": (lambda x: split(x, "data"), "'data' is no dimension", "split(x, 0, 'data')"),
    "table of none": (lambda x: split(x, {}), "maps dimensions to mesh axes", "for two dimensions"),
    "table of parts": (lambda x: split(x, {0: 8}), "maps dimensions to mesh axes", "split(x, 0, 8)"),
    "table and axis": (lambda x: split(x, {0: "data"}, "model"), "maps dimensions", "for two dimensions"),
    "table of one axis": (lambda x: split(x, {0: "data", 1: "data"}), "splits dimensions 0 and 1", "axis once"),
    "dimension twice": (lambda x: split(x, {0: "data", -2: "model"}), "is split twice", "a tuple of axes"),
    "axis of table": (lambda x: split(x, {0: "dat"}), "no axis 'dat'", "Did you mean 'data'?"),
    "table too long": (lambda x: split(x, {0: "data", 2: "model"}), "no dimension 2", "from 0 to 1"),
    "a spec": (lambda x: split(x, 0, P("data")), "is neither a number", "shard(x, P(...))"),
    "one axis twice": (lambda x: split(x, 0, ("data", "data")), "splits dimension 0 twice", "axis once"),
    "dimension of none": (lambda x: split(tree_of(x), 2, 2), "no array of the pytree has a dimension 2", "0 to 1"),
    "a string": (lambda x: split("abc", 0, 2), "is of type str, not an array", "arrays only"),
    "a function": (lambda x: replicate(jnp.tanh), "not an array", "arrays only"),
    "specs first": (lambda x: shard(P("data"), x), "not an array", "arrays only"),
    "unreduced": (lambda x: shard(x, P("data", unreduced={"modle"})), "no axis 'modle'", "Did you mean 'model'?"),
    "unreduced truth": (lambda x: shard(x > 0, P(unreduced={"model"})), "pred cannot be unreduced", "Leave unreduced="),
    "reduced": (lambda x: shard(x, P("data", reduced={"modle"})), "no axis 'modle'", "Did you mean 'model'?"),
    "number in spec": (lambda x: shard(x, P(None, 1)), "1 is no name of a mesh axis", "for each dimension"),
    "names for a spec": (lambda x: shard(x, ("data", None)), "pytree of shardings", "write P('data', None)."),
    "ragged ids": (lambda x: shard(x, [[0], [1, 2]]), "an array of integers", "np.arange(8)"),
    "sizes": (lambda x: shard(x, {"data": 0}), "an array of integers", "P('data', 'model')"),
    "too many parts": (lambda x: split(x, 0, 16), "16 partitions were asked for", "Use at most 8 partitions."),
    "parts that do not fit": (lambda x: split(x, 1, 6), "cannot hold 6 partitions", "one of 1, 2, 4, 8 partitions."),
    "no parts": (lambda x: split(x, 1, 0), "0 is neither a number of parts, from 1 on", "split(x, 0, 8)"),
    "dimension above": (lambda x: split(x, 2, 2), "no dimension 2 to split", "Use a dimension from 0 to 1."),
    "dimension below": (lambda x: split(x, -3, 2), "no dimension -3 to split", "Use a dimension from 0 to 1."),
    "id twice": (lambda x: shard(x, np.array([[0, 1, 1, 2]])), "does not fit 8 devices", "0 to n-1 once"),
    "id missing": (lambda x: shard(x, np.array([[0, 1, 2, 4]])), "does not fit 8 devices", "0 to n-1 once"),
    "id too large": (lambda x: shard(x, np.arange(16).reshape(4, 4)), "does not fit 8 devices", "0 to n-1 once"),
    "ids not dividing": (lambda x: shard(x, np.arange(3).reshape(1, 3)), "does not fit 8 devices", "0 to n-1 once"),
    "no ids": (lambda x: shard(x, np.zeros((0, 2), int)), "does not fit 8 devices", "0 to n-1 once"),
    "rank of ids": (lambda x: shard(x, np.arange(8)), "rank 1 cannot cut", "for each dimension"),
    "rank of spec": (lambda x: shard(x, P(None, None, "data")), "names 3 dimensions", "most one entry"),
    "kind of ids": (lambda x: shard(x, [[0.0, 1.0]]), "array of integers or a PartitionSpec", "np.arange(8)"),
    "axis twice": (lambda x: shard(x, P("data", "data")), "axis 'data' splits dimensions 0 and 1", "axis once"),
    "rank below vmap": (jax.vmap(lambda x: split(x, 1, 2)), "no dimension 1", "Inside vmap the dimension"),
    "spec below vmap": (jax.vmap(lambda x: shard(x, P("data", "model"))), "names 2", "Inside vmap the dimension"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mark_gets_one_error(case, x, mesh):
    mark, what, hint = WRONG[case]
    with pytest.raises(ShardingError) as caught:
        gshard.jit(mark, mesh=mesh)(x)
    error = caught.value
    assert what in error.what
    assert error.where is not None
    assert "test_marks.py" in error.where
    assert error.got
    assert error.hint is not None
    assert hint in error.hint
    assert ("vmap" in error.hint) == ("vmap" in case)
    first, where, *rest = str(error).splitlines()
    assert [first, where.removeprefix("  at "), *(line.strip() for line in rest)] == [
        error.what, error.where, error.got, error.hint
    ]  # fmt: skip


@pytest.mark.parametrize(("mark", "leaf"), [
    (lambda x: split(tree_of(x), 0, "dat"), "x['l1']['b']"),
    (lambda x: split({"l1": {"w": "abc"}, "x": x}, 0, 2), "x['l1']['w']"),
    (lambda x: replicate([x, (jnp.tanh, x)]), "x[1][0]"),
    (lambda x: shard(tree_of(x), P(None, "data")), "x['count']"),
    (lambda x: shard(tree_of(x), {"l1": P("data", "model"), "count": None}), "x['l1']['b']"),
    (lambda x: shard({"a": x, "b": x}, np.arange(8)), "x['a']"),
    (lambda x: shard(tree_of(x), {"l1": {"w": P()}, "count": P()}), "at key path shardings['l1']"),
    (lambda x: shard({"a": [x]}, {"a": (P(),)}), "at key path shardings['a']"),
])  # fmt: skip
def test_a_wrong_mark_on_a_pytree_names_the_leaf(mark, leaf, x, mesh):
    with pytest.raises(ShardingError) as caught:
        gshard.jit(mark, mesh=mesh)(x)
    assert leaf in str(caught.value)


def test_a_traced_dimension_is_jaxs_error(x):
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(lambda x, d: split(x, d, 2))(x, 0)
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(lambda x, n: split(x, 0, n))(x, 2)


def test_a_sharding_of_jaxs_is_not_called_a_mark_of_ours(x):
    other = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("q",)), P("q"))
    with pytest.raises(ShardingError) as caught:
        gshard.jit(lambda x: jax.lax.with_sharding_constraint(x, other), mesh=8)(x)
    assert caught.value.got is not None
    assert "NamedSharding of JAX's over q=4: P('q'" in caught.value.got
    assert "shard(" not in caught.value.got
