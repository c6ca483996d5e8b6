"""Names of dimensions: a layout is so many marks, and nothing where it says nothing."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import Layout, name
from gshard.core.errors import PlanError, ShardingError
from gshard.core.layout import Names

U = P.UNCONSTRAINED
MESH = {"data": 2, "model": 4}
LAYOUT = Layout(batch="data", hidden="model", embed=None)
NAMES = {"params/w1": "embed hidden", "params/w2": "hidden embed", "x": "batch embed"}


def mlp(params, x):
    h = name(jnp.sin(x @ params["w1"]), "batch hidden")
    return name(h @ params["w2"], "batch embed")


def marked_mlp(params, x):
    h = gshard.shard(jnp.sin(x @ params["w1"]), P("data", "model"))
    return gshard.shard(h @ params["w2"], P("data", None))


SPECS = ({"w1": P(None, "model"), "w2": P("model", None)}, P("data", None))


@pytest.fixture
def arguments(rng):
    w1, w2, x = (rng.standard_normal(s).astype(np.float32) for s in ((10, 22), (22, 10), (9, 10)))
    return {"w1": w1, "w2": w2}, x


def shardings_of(lowered):
    """The sharding of every value, in order."""
    return [lowered.plan.shardings[v].dims for v in lowered.program.block.values()]


def said(lowered):
    """What the marks that a layout made say."""
    return [e.mark.source_text for e in lowered.program.block.walk() if e.mark is not None and e.mark.source_text]


def close(found, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # What sums in another order round away is a part of the largest of them, not of what is left of them.
        largest = float(np.abs(np.asarray(b)).max(initial=1.0))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance * largest)


def test_a_layout_is_the_marks_it_stands_for(arguments):
    named = gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names=NAMES)
    marked = gshard.jit(marked_mlp, mesh=MESH, in_shardings=SPECS)
    ours, theirs = named.lower(*arguments), marked.lower(*arguments)
    assert shardings_of(ours) == shardings_of(theirs)
    sent = [[(c.kind, c.atoms, c.bytes) for c in made.spmd.collectives] for made in (ours, theirs)]
    assert sent[0] == sent[1]
    assert ours.argument_shardings == theirs.argument_shardings
    assert np.asarray(named(*arguments)).tobytes() == np.asarray(marked(*arguments)).tobytes()
    close(named(*arguments), mlp(*arguments))


def test_it_is_the_identity_outside(arguments):
    params, x = arguments
    assert name(x, "batch embed").tobytes() == x.tobytes()
    plain = np.sin(x @ params["w1"]) @ params["w2"]
    close([mlp(*arguments), jax.jit(mlp)(*arguments)], [plain, plain])
    close(jax.vmap(mlp, (None, 0))(params, x[None]), plain[None])


def test_without_a_layout_names_are_nothing(arguments):
    plain = lambda p, x: jnp.sin(x @ p["w1"]) @ p["w2"]  # noqa: E731
    found = gshard.jit(mlp, mesh=MESH, names=NAMES, in_shardings=(None, P("data"))).lower(*arguments)
    expected = gshard.jit(plain, mesh=MESH, in_shardings=(None, P("data"))).lower(*arguments)
    assert [e.name for e in found.program.block.walk()] == [e.name for e in expected.program.block.walk()]
    assert shardings_of(found) == shardings_of(expected)


def test_open_closed_and_split(rng):
    """``length`` is not mentioned, so the mark that comes after may split it; ``embed`` is closed."""
    x = rng.standard_normal((6, 8, 10)).astype(np.float32)
    f = lambda x: gshard.shard(name(x, "batch length embed") * 2, P(None, "model", "data"))  # noqa: E731
    lowered = gshard.jit(f, mesh=MESH, layout=Layout(batch="data", embed=None)).lower(x)
    first = next(e for e in lowered.program.block.walk() if e.mark is not None)
    mesh = lowered.mesh
    assert lowered.plan.sharding(first.outputs[0]).dims == (mesh.atoms_of["data"], mesh.atoms_of["model"], ())
    made = Layout(batch=("model", "data"), embed=None).mark(Names(("batch", "length", "embed")))
    assert made is not None
    assert made.spec == (("model", "data"), U, None)


def test_a_number_of_parts_is_that_of_split(rng):
    x = rng.standard_normal((13, 3)).astype(np.float32)
    named = gshard.jit(lambda x: name(jnp.cumsum(x, 0), "rows columns"), mesh=8, layout=Layout(rows=4, columns=None))
    marked = gshard.jit(lambda x: gshard.split(jnp.cumsum(x, 0), 0, 4), mesh=8)
    assert shardings_of(named.lower(x)) == shardings_of(marked.lower(x))


def test_a_row_for_some_arguments_goes_before_one_for_all(arguments):
    layout = Layout({"params:embed": "data", "params/w2:embed": "data"}, batch="data", hidden="model", embed=None)
    lowered = gshard.jit(mlp, mesh=MESH, layout=layout, names=NAMES).lower(*arguments)
    data, model = lowered.mesh.atoms_of["data"], lowered.mesh.atoms_of["model"]
    w1, w2, x = (lowered.plan.sharding(v).dims for v in lowered.program.block.inputs)
    assert (w1, w2, x) == ((data, model), (model, data), (data, ()))


def test_the_cotangent_has_the_same_names(arguments):
    f = jax.grad(lambda params, x: jnp.sum(jnp.sin(mlp(params, x))))
    lowered = gshard.jit(f, mesh=MESH, layout=LAYOUT, names=NAMES).lower(*arguments)
    assert sorted(said(lowered)) == sorted(["name(x, 'batch hidden') by batch='data', hidden='model'"] * 2
        + ["name(x, 'batch embed') by batch='data', embed=None"] * 2)  # fmt: skip


def test_a_derivative_from_outside_is_split_as_the_layout_says(rng):
    """Also where only one of its halves has what the layout names, and ``strict`` is asked for."""
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16), (12, 8)))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(w, x):
        mask = name(jax.lax.stop_gradient(jnp.floor(x)), "masked _")
        return jnp.sum(jnp.sin((x * mask) @ w))

    layout = Layout(hidden="model", masked="data", embed=None)
    step = gshard.jit(loss, mesh=mesh, layout=layout, names={"w": "embed hidden"}, strict=True)
    gradient = jax.grad(step)(w, x)
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    close(gradient, jax.grad(loss)(w, x), 1e-4)


def test_a_layout_under_vmap_leaves_the_new_dimension_open(arguments):
    params, x = arguments
    xs = np.stack([x, -x, 2 * x])
    f = jax.vmap(lambda x: name(mlp(params, x), "batch embed"), out_axes=1)
    lowered = gshard.jit(f, mesh=MESH, layout=LAYOUT).lower(xs)
    data = lowered.mesh.atoms_of["data"]
    of_marks = [lowered.plan.sharding(e.outputs[0]).dims for e in lowered.program.block.walk() if e.mark is not None]
    assert all(dims.count(data) == 1 and len(dims) == 3 for dims in of_marks)
    around = jax.vmap(gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names=NAMES), (None, 0))
    close(around(params, xs), jax.vmap(mlp, (None, 0))(params, xs))


def test_a_function_inside_keeps_its_own_layout(arguments):
    inner = gshard.jit(mlp, mesh=MESH, layout=Layout(batch="model"))
    f = lambda p, x: name(inner(p, x), "batch embed") * 2  # noqa: E731
    lowered = gshard.jit(f, mesh=MESH, layout=Layout(batch="data")).lower(*arguments)
    assert said(lowered) == [
        "name(x, 'batch hidden') by batch='model'",
        "name(x, 'batch embed') by batch='model'",
        "name(x, 'batch embed') by batch='data'",
    ]
    found = gshard.explain(gshard.jit(f, mesh=MESH, layout=Layout(batch="data", hidden="model")), *arguments)
    assert found.lists["layout"] == ("batch='data': 1 value", "open, since no row mentions them: embed")
    assert found.lists["unused"] == ("hidden='model': nothing is called 'hidden'",)
    unsaid = gshard.jit(mlp, mesh=MESH)
    g = lambda p, x: unsaid(p, x) * 2  # noqa: E731
    assert len(said(gshard.jit(g, mesh=MESH, layout=Layout(batch="data")).lower(*arguments))) == 2


def test_pytrees_and_prefixes(arguments):
    params, x = arguments

    def names(tree, said):
        program = gshard.stages.trace(lambda t: jax.tree.map(lambda a: a * 2, name(t, said)), tree)
        return [n.names.dims for n in program.named]

    tree = {"a": params, "b": x}
    assert names(tree, {"a": "one two", "b": None}) == [("one", "two")] * 2
    assert names(tree, "one ...") == [("one", None)] * 3
    assert names(tree, {"a": P("one"), "b": P(None, "two")}) == [("one", None)] * 2 + [(None, "two")]
    assert names(3.0, "") == [()]
    with pytest.raises(ShardingError, match="3 names"):
        names(tree, "one two three")
    with pytest.raises(ShardingError, match="pytree of names"):
        names(tree, {"a": "one two"})


def test_names_of_arguments(arguments):
    params, x = arguments
    f = lambda params, *, batch: jnp.sum(mlp(params, batch["x"])) + params["layers"][0]["w1"].sum()  # noqa: E731
    tree = {**params, "layers": [{"w1": x}]}

    def found(names):
        lowered = gshard.jit(f, mesh=MESH, layout=Layout(a="data"), names=names).lower(tree, batch={"x": x})
        return {n.names.at: str(n.names) for n in lowered.program.named if n.names.at}

    assert found({"**/w1": "a b"}) == {"params/layers/0/w1": "a b", "params/w1": "a b"}
    assert found({"params/w*": "a b"}) == {"params/w1": "a b", "params/w2": "a b"}
    assert found({"batch/x": "a _"}) == {"batch/x": "a _"}
    assert found({"params": {"w1": "a b", "w2": None, "layers": "c d"}}) == {
        "params/layers/0/w1": "c d",
        "params/w1": "a b",
    }
    assert found(({"w1": "a b", "w2": None, "layers": [{"w1": None}]},)) == {"params/w1": "a b"}
    assert found({"params/w1": "a b", "params/**/w1": "a b"}) == {"params/layers/0/w1": "a b", "params/w1": "a b"}


def test_paths_of_static_arguments_keywords_and_objects(arguments):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        params: Any
        count: Any

    def f(n, state, *, batch):
        return mlp(state.params, batch * n) + state.count

    params, x = arguments
    names = {"state/params/w*": "a b", "state/count": "", "batch": "c d"}
    for static in ({"static_argnums": 0}, {"static_argnames": "n"}):
        jitted = gshard.jit(f, mesh=MESH, layout=Layout(a="data", c="model"), names=names, **static)
        lowered = jitted.lower(2, State(params, np.float32(1)), batch=x)
        said = {n.names.at: n.names.dims for n in lowered.program.named if n.names.at}
        assert said == {
            "state/params/w1": ("a", "b"), "state/params/w2": ("a", "b"), "state/count": (), "batch": ("c", "d")
        }  # fmt: skip


def test_the_layout_and_the_names_belong_to_the_cache(arguments):
    makers = [
        lambda: gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names=NAMES),
        lambda: gshard.jit(mlp, mesh=MESH, layout=Layout(batch="model"), names=NAMES),
        lambda: gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names={"params/w1": "hidden embed"}),
        lambda: gshard.jit(mlp, mesh=MESH),
    ]
    plans = [shardings_of(make().lower(*arguments)) for make in makers]
    assert len({str(p) for p in plans}) == 4
    assert [shardings_of(make().lower(*arguments)) for make in makers] == plans
    assert makers[0]().lower(*arguments) is makers[0]().lower(*arguments)
    swapped = Layout(embed=None, hidden="model", batch="data")
    assert (swapped, hash(swapped)) == (LAYOUT, hash(LAYOUT))
    assert Layout(batch="data") != LAYOUT


@pytest.mark.parametrize(("names", "layout", "words"), [
    ("batch other", Layout(batch="data", other="data"),
        ["'batch' (dimension 0) and 'other' (dimension 1)", "axis 'data'"]),
    ("batch batch", Layout(batch="data"), ["dimensions 0 and 1 are both called 'batch'", "write '_'"]),
    ("batch other", Layout(batch="data", other=2), ["both want 2 parts: the same devices"]),
    ("batch other", Layout(batch="one", other="one"), ["both want axis 'one'"]),
])  # fmt: skip
def test_two_dimensions_on_one_axis(names, layout, words, arguments):
    mesh = {"one": 1, **MESH}
    f = gshard.jit(lambda x: name(x, names), mesh=mesh, layout=layout)
    with pytest.raises(ShardingError) as error:
        f(arguments[1])
    for word in [*words, "test_layout.py", "array of shape [9,10]", "mesh: one=1 data=2 model=4", "batch="]:
        assert word in str(error.value)
    with pytest.raises(ShardingError, match="both") as error:
        gshard.jit(lambda x: x, mesh=mesh, layout=layout, names={"x": names})(arguments[1])
    assert "argument x" in str(error.value)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: gshard.jit(mlp, mesh=MESH, layout=Layout(batch="dta")),
        ["no axis 'dta'", "batch='dta'", "Did you mean 'data'"]),
    (lambda: gshard.jit(mlp, mesh=8, layout=Layout(batch=3)), ["3 partitions", "batch=3", "1, 2, 4, 8"]),
    (lambda: gshard.jit(mlp, mesh=8, layout=Layout(batch=16)), ["16 partitions", "8 devices"]),
    (lambda: gshard.jit(mlp, mesh=8, layout={"batch": "data"}), ["takes a gshard.Layout, not a dict"]),
    (lambda: Layout([("batch", "data")]), ["logical_to_mesh_axes(names, rules)"]),
    (lambda: Layout({"a": "x"}, a="y"), ["two rows for 'a'"]),
    (lambda: Layout(a=("x", "x")), ["stands twice"]),
    (lambda: Layout(a=0), ["nothing that 'a' can be split over"]),
    (lambda: Layout(a=("x", 2)), ["no tuple of mesh axes"]),
    (lambda: Layout({"two words": "x"}), ["no name of dimensions"]),
    (lambda: name(jnp.zeros((2, 3)), "a b c"), ["2 dimensions has 3 names", "f32[2,3]"]),
    (lambda: name(jnp.zeros((2, 3)), "a"), ["2 dimensions has 1 name."]),
    (lambda: name(jnp.zeros((2, 3)), "... a ..."), ["'...' stands twice"]),
    (lambda: name(jnp.zeros((2, 3)), "a b c ..."), ["2 dimensions has"]),
    (lambda: name(jnp.zeros((2, 3)), "params:a b"), ["'params:a' is no name"]),
    (lambda: name(jnp.zeros((2, 3)), 3), ["int names no dimensions"]),
    (lambda: name("text", "a"), ["is of type str"]),
    (lambda: jax.vmap(lambda x: name(x, "a b"))(jnp.zeros((2, 3))), ["1 dimension has 2 names", "vmap"]),
])  # fmt: skip
def test_mistakes_are_told(make, words):
    with pytest.raises(ShardingError) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("names", "words"), [
    ({"param/w1": "a b"}, ["no argument is at 'param/w1'", "'params/w1'"]),
    ({"params": "a b"}, ["no argument is at 'params'", "'params/**'"]),
    ({"params/w1": "a b c"}, ["2 dimensions has 3 names", "params/w1", "f32[10,22]"]),
    ({"params/*": "a b", "**/w1": "a c"},
        ["params/w1 is named in two ways", "'params/*': 'a b'", "'**/w1': 'a c'"]),
    ({"params": {"w1": "a b"}}, ["pytree of names['params']"]),
    (({"w1": "a b"}, None), ["pytree of names"]),
    ({"x": 3}, ["int names no dimensions", "x"]),
])  # fmt: skip
def test_mistakes_in_names_of_arguments_are_told(names, words, arguments):
    with pytest.raises(ShardingError) as error:
        gshard.jit(mlp, mesh=MESH, names=names).lower(*arguments)
    for word in words:
        assert word in str(error.value)


def test_names_against_in_shardings(arguments):
    f = gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names=NAMES, in_shardings=(None, P("data")))
    with pytest.raises(ShardingError, match=r"(?s)x is marked by in_shardings and by its names.*P\('data'\)"):
        f(*arguments)
    apart = gshard.jit(mlp, mesh=MESH, layout=Layout(hidden="model"), names=NAMES, in_shardings=(None, P("data")))
    close(apart(*arguments), mlp(*arguments))


def test_rows_that_disagree_about_an_argument(arguments):
    layout = Layout({"params:embed": "data", "**/w1:embed": "model"})
    with pytest.raises(ShardingError, match=r"two rows .* disagree about 'embed' of params/w1"):
        gshard.jit(mlp, mesh=MESH, layout=layout, names=NAMES)(*arguments)


def test_what_is_not_used_is_told_and_refused(arguments):
    layout = Layout({"x:hidden": "model"}, batch="data", vocabulary="data", embed=None)
    f = gshard.jit(mlp, mesh=MESH, layout=layout, names=NAMES)
    found = gshard.explain(f, *arguments)
    assert found.lists["layout"] == (
        "batch='data': 3 values",
        "embed=None: 4 values",
        "open, since no row mentions them: hidden",
    )
    assert found.lists["unused"] == (
        "x:hidden='model': never applies, no argument below 'x' has that name",
        "vocabulary='data': nothing is called 'vocabulary'",
        "axis 'model' of the mesh: no row and no mark of this program uses it",
    )
    assert all(line in str(found) for line in (*found.lists["layout"], *found.lists["unused"]))
    with pytest.raises(PlanError, match=r"(?s)does not use all of its layout.*nothing is called 'vocabulary'"):
        gshard.jit(mlp, mesh=MESH, layout=layout, names=NAMES, strict=True).lower(*arguments).plan  # noqa: B018
    strict = gshard.jit(mlp, mesh=MESH, layout=LAYOUT, names=NAMES, strict=True)
    close(strict(*arguments), mlp(*arguments))
    loss = gshard.jit(lambda params, x: mlp(params, x).sum(), mesh=MESH, layout=LAYOUT, names=NAMES, strict=True)
    close(jax.grad(loss)(*arguments), jax.grad(lambda p, x: mlp(p, x).sum())(*arguments))
    assert not gshard.explain(mlp, *arguments, mesh=MESH).lists["layout"]


def test_names_that_come_with_flax():
    nn = pytest.importorskip("flax.linen")
    layout = Layout(batch="data", mlp="model", embed=None)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return jnp.sin(nn.Dense(22, kernel_init=init)(x))

    x = np.ones((9, 10), np.float32)
    boxed = jax.eval_shape(Block().init, jax.random.key(0), x)
    names = {"variables": nn.get_partition_spec(boxed), "x": "batch embed"}
    f = gshard.jit(lambda variables, x: Block().apply(variables, x), mesh=MESH, layout=layout, names=names)
    lowered = f.lower(nn.unbox(boxed), x)
    said = {n.names.at: n.names.dims for n in lowered.program.named}
    assert said == {
        "variables/params/Dense_0/bias": (None,),
        "variables/params/Dense_0/kernel": ("embed", "mlp"),
        "x": ("batch", "embed"),
    }
    kernel = lowered.program.block.inputs[1]
    assert lowered.plan.sharding(kernel).dims == ((), lowered.mesh.atoms_of["model"])
