"""Names of dimensions: a layout is so many marks, and nothing where it says nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near_largest
from gshard import Layout, name
from gshard.core.errors import PlanError, ShardingError
from gshard.core.layout import Names

U = P.UNCONSTRAINED
MESH = {"data": 2, "model": 4}
LAYOUT = Layout(batch="data", hidden="model", embed=None)


def mlp(params, x):
    h = name(jnp.sin(x @ params["w1"]), "batch hidden")
    return name(h @ params["w2"], "batch embed")


def named_mlp(params, x):
    """The same with names of its arguments."""
    return mlp(name(params, {"w1": "embed hidden", "w2": "hidden embed"}), name(x, "batch embed"))


def marked_mlp(params, x):
    params = gshard.shard(params, SPECS[0])
    x = gshard.shard(x, SPECS[1])
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


def test_a_layout_is_the_marks_it_stands_for(arguments):
    named = gshard.jit(named_mlp, mesh=MESH, layout=LAYOUT)
    marked = gshard.jit(marked_mlp, mesh=MESH)
    ours, theirs = named.lower(*arguments), marked.lower(*arguments)
    assert shardings_of(ours) == shardings_of(theirs)
    sent = [[(c.kind, c.atoms, c.bytes) for c in made.spmd.collectives] for made in (ours, theirs)]
    assert sent[0] == sent[1]
    assert ours.argument_shardings == theirs.argument_shardings
    assert np.asarray(named(*arguments)).tobytes() == np.asarray(marked(*arguments)).tobytes()
    near_largest(named(*arguments), mlp(*arguments))


def test_it_is_the_identity_outside(arguments):
    params, x = arguments
    assert name(x, "batch embed").tobytes() == x.tobytes()
    plain = np.sin(x @ params["w1"]) @ params["w2"]
    near_largest([mlp(*arguments), jax.jit(mlp)(*arguments)], [plain, plain])
    near_largest(jax.vmap(mlp, (None, 0))(params, x[None]), plain[None])


def test_without_a_layout_names_are_nothing(arguments):
    plain = lambda p, x: jnp.sin(x @ p["w1"]) @ p["w2"]  # noqa: E731
    found = gshard.jit(named_mlp, mesh=MESH, in_shardings=(None, P("data"))).lower(*arguments)
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


def test_the_cotangent_has_the_same_names(arguments):
    f = jax.grad(lambda params, x: jnp.sum(jnp.sin(mlp(params, x))))
    lowered = gshard.jit(f, mesh=MESH, layout=LAYOUT).lower(*arguments)
    assert sorted(said(lowered)) == sorted(["name(x, 'batch hidden') by batch='data', hidden='model'"] * 2
        + ["name(x, 'batch embed') by batch='data', embed=None"] * 2)  # fmt: skip


def test_a_derivative_from_outside_is_split_as_the_layout_says(rng):
    """Also where only one of its halves has what the layout names, and ``strict`` is asked for."""
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((8, 16), (12, 8)))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(w, x):
        mask = name(jax.lax.stop_gradient(jnp.floor(x)), "masked _")
        return jnp.sum(jnp.sin((x * mask) @ name(w, "embed hidden")))

    layout = Layout(hidden="model", masked="data", embed=None)
    step = gshard.jit(loss, mesh=mesh, layout=layout, strict=True)
    gradient = jax.grad(step)(w, x)
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    near_largest(gradient, jax.grad(loss)(w, x), 1e-4)


def test_a_layout_under_vmap_leaves_the_new_dimension_open(arguments):
    params, x = arguments
    xs = np.stack([x, -x, 2 * x])
    f = jax.vmap(lambda x: name(mlp(params, x), "batch embed"), out_axes=1)
    lowered = gshard.jit(f, mesh=MESH, layout=LAYOUT).lower(xs)
    data = lowered.mesh.atoms_of["data"]
    of_marks = [lowered.plan.sharding(e.outputs[0]).dims for e in lowered.program.block.walk() if e.mark is not None]
    assert all(dims.count(data) == 1 and len(dims) == 3 for dims in of_marks)
    around = jax.vmap(gshard.jit(named_mlp, mesh=MESH, layout=LAYOUT), (None, 0))
    near_largest(around(params, xs), jax.vmap(mlp, (None, 0))(params, xs))


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


def test_the_layout_and_the_names_belong_to_the_cache(arguments):
    makers = [
        lambda: gshard.jit(named_mlp, mesh=MESH, layout=LAYOUT),
        lambda: gshard.jit(named_mlp, mesh=MESH, layout=Layout(batch="model")),
        lambda: gshard.jit(named_mlp, mesh=MESH),
    ]
    plans = [shardings_of(make().lower(*arguments)) for make in makers]
    assert len({str(p) for p in plans}) == 3
    assert [shardings_of(make().lower(*arguments)) for make in makers] == plans
    assert makers[0]().lower(*arguments) is makers[0]().lower(*arguments)
    swapped = Layout(embed=None, hidden="model", batch="data")
    assert (swapped, hash(swapped)) == (LAYOUT, hash(LAYOUT))
    assert Layout(batch="data") != LAYOUT


@pytest.mark.parametrize(("names", "layout", "words"), [
    ("batch other", Layout(batch="data", other="data"),
        ["axis 'data' splits dimensions 0 and 1", "other='data'"]),
    ("batch batch", Layout(batch="data"), ["axis 'data' splits dimensions 0 and 1", "'batch batch'"]),
    ("batch other", Layout(batch="data", other=2), ["axis 'data' splits dimensions 0 and 1", "other=2"]),
])  # fmt: skip
def test_two_dimensions_on_one_axis(names, layout, words, arguments):
    mesh = {"one": 1, **MESH}
    f = gshard.jit(lambda x: name(x, names), mesh=mesh, layout=layout)
    with pytest.raises(ShardingError) as error:
        f(arguments[1])
    for word in [*words, "test_layout.py", "array of shape [9,10]", "mesh: one=1 data=2 model=4", "batch="]:
        assert word in str(error.value)


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
    (lambda: Layout({"params:embed": "x"}), ["'params:embed' is no name of dimensions", "without ':'"]),
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


def test_what_is_not_used_is_told_and_refused(arguments):
    layout = Layout(batch="data", vocabulary="data", embed=None)
    f = gshard.jit(named_mlp, mesh=MESH, layout=layout)
    found = gshard.explain(f, *arguments)
    assert found.lists["unused"] == (
        "vocabulary='data': nothing is called 'vocabulary'",
        "axis 'model' of the mesh: no row and no mark of this program uses it",
    )
    assert all(line in str(found) for line in found.lists["unused"])
    with pytest.raises(PlanError, match=r"(?s)does not use all of its layout.*nothing is called 'vocabulary'"):
        gshard.jit(named_mlp, mesh=MESH, layout=layout, strict=True).lower(*arguments).plan  # noqa: B018
    strict = gshard.jit(named_mlp, mesh=MESH, layout=LAYOUT, strict=True)
    near_largest(strict(*arguments), mlp(*arguments))
    loss = gshard.jit(lambda params, x: named_mlp(params, x).sum(), mesh=MESH, layout=LAYOUT, strict=True)
    near_largest(jax.grad(loss)(*arguments), jax.grad(lambda p, x: mlp(p, x).sum())(*arguments))


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
    names = nn.get_partition_spec(boxed)
    f = lambda variables, x: Block().apply(name(variables, names), name(x, "batch embed"))  # noqa: E731
    lowered = gshard.jit(f, mesh=MESH, layout=layout).lower(nn.unbox(boxed), x)
    assert [n.names.dims for n in lowered.program.named] == [(None,), ("embed", "mlp"), ("batch", "embed")]
    kernel = lowered.program.block.inputs[1]
    assert lowered.plan.sharding(kernel).dims == ((), lowered.mesh.atoms_of["model"])
