"""Mistakes of users: one error, with the cause, the user's line and the cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Shape
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

MESH = {"data": 4, "model": 2}
H100 = "h100:1x8"
X = np.arange(-32.0, 32, dtype=np.float32).reshape(8, 8)


def product(x, w):
    return x @ w


def on_explicit_axes(x):
    x = jax.sharding.reshard(x, jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a")))
    return jnp.vdot(x[:, 0], x[:, 0]) if x.ndim > 1 else jnp.vdot(x, x)


def left_over_from_pmap(x):
    return jax.lax.pmean(2 * x, "devices")


STORED = []


def storing(x):
    STORED.append(2 * x)
    return x


@gshard.jit(mesh={"rows": 8})
def on_rows(x):
    return gshard.split(jnp.tanh(x), 0, "rows")


MISTAKES = {
    "pmean left over from pmap": (
        lambda: gshard.jit(left_over_from_pmap, mesh=8)(X), NameError,
        "uses the axis 'devices' in a collective, and no jax.shard_map", "If jax.pmap needed the collective, remove it",
    ),
    "psum in a gradient": (
        lambda: gshard.jit(jax.grad(lambda x: jax.lax.psum((x * x).sum(), "data")), mesh=MESH)(X), NameError,
        "uses the axis 'data' in a collective", "remove it: here arrays are whole",
    ),
    "a mesh as jax.make_mesh makes it": (
        lambda: gshard.jit(on_explicit_axes, mesh=8)(X), Exception,
        "Contracting dimensions are sharded", "axis_types=(jax.sharding.AxisType.Auto,) * n",
    ),
    "a call with a shape": (
        lambda: gshard.jit(product, mesh=8)(X, w=Shape((8, 8), "float32")), TypeError,
        "product is called with a jax.ShapeDtypeStruct", "product.lower(...), .eval_shape(...) or gshard.explain",
    ),
    "no mesh": (lambda: gshard.jit(product)(X, X), gshard.MeshError, "no mesh was given", "Give mesh=8"),
    "marks for a mesh that the outer one replaces": (
        lambda: gshard.jit(lambda x: on_rows(x) * 2, mesh=MESH)(X), gshard.ShardingError,
        "the mesh has no axis 'rows'",
        "has mesh (rows=8), and runs on the mesh of the gshard.jit around it (data=4 model=2)",
    ),
    "an array that leaked from another function": (
        lambda: [gshard.jit(storing, mesh=8)(X), gshard.jit(lambda x: x + STORED[-1], mesh=8)(X)],
        jax.errors.UnexpectedTracerError, "reads an array that another function computed at test_mistakes.py",
        "Return this array from that function, and pass it as an argument",
    ),
    "pmap around it": (
        lambda: jax.pmap(gshard.jit(lambda x: 2 * x, mesh=8))(X), gshard.stages.TraceError,
        "is called inside jax.pmap, which is a jax.shard_map", "Leave out jax.pmap",
    ),
    "a machine with another number of devices": (
        lambda: gshard.jit(product, mesh=8, machine="h100:4x8"), gshard.stages.MachineError,
        "h100:4x8 has 32 devices, and the mesh has 8", "Write h100:1x8",
    ),
    "a leaf that is no array": (
        lambda: gshard.jit(lambda p: p["x"], mesh=8)({"x": X, "kind": "relu"}), TypeError,
        "passed to the function at path p['kind']", "Inside of an argument it is static with eqx.filter_jit",
    ),
    "a dimension of a row of a loop": (
        lambda: gshard.jit(lambda x: jax.lax.map(lambda row: gshard.split(row, 1, 8), x), mesh=8)(X),
        gshard.ShardingError, "an array of 1 dimension has no dimension 1", "Use a dimension from 0 to 0.",
    ),
    "one name for two dimensions": (
        lambda: gshard.jit(lambda x: gshard.name(x, "batch"), mesh=8)(X), gshard.ShardingError,
        "an array of 2 dimensions has 1 name.", "Name each dimension once",
    ),
    "the mesh in front": (
        lambda: gshard.jit(jax.make_mesh((8,), ("data",)), product), TypeError,
        "Expected a function, got a mesh: data=8.", "Write gshard.jit(f, mesh=8)",
    ),
    "explain of jax.jit without shardings": (
        lambda: gshard.explain(jax.jit(product), X, X), gshard.MeshError,
        "XLA compiles product for one device: no argument has a sharding over several devices", "sharding=...",
    ),
    "explain of jax.jit on one device": (
        lambda: gshard.explain(jax.jit(product), jax.device_put(X, jax.devices()[0]), Shape((8, 8), "float32")),
        gshard.MeshError, "XLA compiles product for one device", "With mesh=8, gshard.explain shows gshard's own plan.",
    ),
    "a partitioner by its name": (
        lambda: gshard.explain(jax.jit(product), X, X, partitioner="shardy"), TypeError,
        "there is no partitioner 'shardy'", '"xla" for the partitioner of jax.jit (Shardy)',
    ),
    "a machine that is not known": (
        lambda: gshard.explain(product, X, X, mesh=8, machine="H10:1x8"), gshard.stages.MachineError,
        "no machine is called 'H10:1x8'", "Did you mean 'h100'? ",
    ),
    "an array in front": (
        lambda: gshard.jit(X, mesh=8), gshard.ArgumentError, "got an array f32[8,8]", "",
    ),
    "a dimension that is an axis": (
        lambda: gshard.jit(lambda x: gshard.split(x, "data"), mesh=MESH)(X), gshard.ShardingError,
        "'data' is no dimension", "split(x, 0, 'data')",
    ),
}  # fmt: skip


def test_capitals_of_a_machine_do_not_matter():
    assert gshard.Machine.of("H100:1x8") == gshard.Machine.of(H100)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_error_with_cause_place_and_cure(case):
    make, kind, what, hint = MISTAKES[case]
    with pytest.raises(gshard.GShardError) as caught:
        make()
    error = caught.value
    assert isinstance(error, kind)
    assert what in error.what
    assert error.where is not None
    assert "test_mistakes.py" in error.where
    assert hint in (error.hint or "")


def test_errors_of_the_users_own_code_stay_as_they_are():
    def raising(x):
        raise ValueError("my own")

    def undefined(x):
        return y * x  # noqa: F821

    def called_wrongly(x):
        return product(x)

    for f, kind, text in (
        (raising, ValueError, "^my own"),
        (undefined, NameError, "^name 'y' is not defined"),
        (called_wrongly, TypeError, "missing 1 required positional argument: 'w'"),
        (lambda x: product(x, x[:3]), TypeError, "^dot_general requires contracting dimensions"),
        (lambda x: x if x.sum() > 0 else -x, jax.errors.TracerBoolConversionError, "boolean conversion of traced"),
    ):
        for call in (gshard.jit(f, mesh=8), lambda x, f=f: gshard.explain(f, x, mesh=8)):
            with pytest.raises(kind, match=text) as caught:
                call(X)
            assert type(caught.value) is kind


def test_explain_takes_the_options_of_jit():
    def f(x, w):
        return jnp.tanh(gshard.split(x, 0, 8) @ w).sum()

    shapes = Shape((4096, 512), "float32"), Shape((512, 512), "float32")
    mesh = gshard.Mesh.abstract(devices=8)
    plan = gshard.search(lambda x, w: jnp.tanh(x @ w).sum(), *shapes, mesh=[mesh], machine=H100).plan
    for made in (lambda x, w: jnp.tanh(x @ w).sum(), gshard.jit(lambda x, w: jnp.tanh(x @ w).sum(), mesh=mesh)):
        found = gshard.explain(made, *shapes, mesh=mesh, plan=plan)
        assert gshard.SavedPlan.of(found.plan) == gshard.SavedPlan.of(plan)
    for made in (f, gshard.jit(f, mesh=mesh), gshard.jit(f, mesh=mesh, memory_limit="1GiB")):
        with pytest.raises(gshard.stages.MemoryLimitError):
            gshard.explain(made, *shapes, mesh=mesh, memory_limit="1KiB")
        assert gshard.explain(made, *shapes, mesh=mesh, memory_limit="1GiB").source.size


# What ``explain`` takes: stages of functions from ``gshard.jit`` and ``jax.jit``, and shardings on abstract meshes.
NAMES = ("data", "model")
DEVICES = jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Auto,) * 2)
ABSTRACT = AbstractMesh((2, 4), NAMES)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def arguments(mesh):
    shapes = ((64, 128), P(None, "model")), ((32, 64), P("data"))
    return tuple(jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec)) for s, spec in shapes)


def told(found):
    return found.bytes_by_kind, found.argument_bytes, str(found.mesh), found.format()


@pytest.mark.parametrize("mesh", [DEVICES, ABSTRACT], ids=["devices", "abstract"])
def test_a_function_of_gshard_is_explained_at_each_stage(mesh):
    jitted, given = gshard.jit(step, mesh=DEVICES, donate_argnums=0), arguments(mesh)
    lowered = jitted.lower(*given)
    expected = gshard.explain(jitted, *given)
    assert expected.bytes_by_kind == {"all_reduce": 64 * 32 * 4}
    for stage in jitted.trace(*given), lowered, lowered.compile():
        found = gshard.explain(stage)
        assert not found.is_compiled
        assert told(found) == told(expected)
        assert found.cost().memory.shared == expected.cost().memory.shared == 64 * 32 * 4, "the donated argument"
        by_xla = gshard.explain(stage, partitioner="xla", machine="h100")
        assert by_xla.is_compiled
        assert by_xla.total_bytes == expected.total_bytes
        assert [a.name for a in by_xla.tensors] == ["w", "x"]
        assert "h100" in str(by_xla.machine)


@pytest.mark.parametrize(
    "options",
    [{"mesh": 8}, {"machine": "h100"}, {"memory_limit": "1GiB"}, {"y": None}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_function_that_is_lowered_are_refused(options):
    lowered = gshard.jit(step, mesh=DEVICES).lower(*arguments(DEVICES))
    for stage in lowered, lowered.compile():
        with pytest.raises(gshard.ArgumentError, match=f"(?s)has its arguments, its mesh.*{next(iter(options))}="):
            gshard.explain(stage, **options)
    with pytest.raises(gshard.ArgumentError, match="has its arguments"):
        gshard.explain(lowered, 3)


def test_a_function_that_jax_traced_is_compiled():
    jitted, given = jax.jit(step), arguments(DEVICES)
    assert told_by_xla(gshard.explain(jitted.trace(*given))) == told_by_xla(gshard.explain(jitted, *given))


def told_by_xla(found):
    return found.is_compiled, found.bytes_by_kind, found.peak


WAYS = {
    "jax.jit": lambda given: gshard.explain(jax.jit(step), *given, partitioner="gshard"),
    "function": lambda given: gshard.explain(step, *given),
    "axes": lambda given: gshard.explain(step, *given, mesh={"data": 2, "model": 4}),
    "other order": lambda given: gshard.explain(step, *given, mesh={"model": 4, "data": 2}),
    "other names": lambda given: gshard.explain(step, *given, mesh=8),
    "abstract": lambda given: gshard.explain(step, *given, mesh=ABSTRACT),
    "gshard.jit": lambda given: gshard.explain(gshard.jit(step, mesh=DEVICES), *given),
}


@pytest.mark.parametrize("way", WAYS)
def test_shardings_on_abstract_meshes_count(way):
    found = WAYS[way](arguments(ABSTRACT))
    assert found.argument_bytes == (64 * 128 * 4 + 32 * 64 * 4, 64 * 32 * 4 + 16 * 64 * 4)
    assert found.bytes_by_kind == {"all_reduce": 64 * 32 * 4}


def test_shardings_over_devices_count_on_an_abstract_mesh_of_their_axes():
    found = gshard.explain(step, *arguments(DEVICES), mesh=ABSTRACT)
    assert found.bytes_by_kind == {"all_reduce": 64 * 32 * 4}
    elsewhere = gshard.explain(step, *arguments(DEVICES), mesh=AbstractMesh((4, 4), NAMES))
    assert elsewhere.total_bytes == 0, "arrays on other devices are moved"


def test_axes_of_an_abstract_mesh_may_have_other_sizes_where_the_program_is_planned():
    found = gshard.explain(step, *arguments(AbstractMesh((8, 16, 1), (*NAMES, "x"))), mesh={"model": 2, "data": 4})
    assert found.argument_bytes[1] == 64 * 64 * 4 + 8 * 64 * 4


def test_a_sharding_over_another_number_of_abstract_devices_is_refused():
    with pytest.raises(gshard.ShardingError, match="a sharding over 64 devices cannot be one over 8"):
        gshard.explain(step, *arguments(AbstractMesh((8, 8), NAMES)), mesh=8)
