"""Limits of what a jitted function sends: exact numbers, ranges, bytes, memory, axes; what fails says why."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import gshard
from gshard.api.compiled_programs import on_first_devices
from gshard.testing import assert_collectives
from stepped import (
    BATCH,
    DATA,
    HIDDEN,
    LAYERS,
    MODEL,
    array,
    fsdp_arguments,
    marked_mlp,
    marked_step,
    mlp,
    step,
    tensor_parallel_arguments,
    without_lines,
)

pytestmark = pytest.mark.optimised  # what users get

WEIGHT = MODEL * MODEL * 4


@pytest.fixture(scope="module")
def fsdp():
    return assert_collectives(jax.jit(step), fsdp_arguments(), total=range(100))


def refused(*args, **limits):
    """The message of a check that fails."""
    with pytest.raises(AssertionError) as error:
        assert_collectives(*args, **limits)
    return str(error.value)


def test_an_fsdp_step_gathers_each_weight_twice_and_sums_its_gradient():
    found = assert_collectives(
        jax.jit(step), fsdp_arguments(), all_gather=2 * LAYERS, reduce_scatter=LAYERS, all_reduce=0, all_to_all=0,
        collective_permute=0, total=3 * LAYERS,
        max_bytes={"all_gather": 2 * LAYERS * WEIGHT * 7 // 8, "reduce_scatter": LAYERS * WEIGHT * 7 // 8},
    )  # fmt: skip
    assert found.total_bytes == 3 * LAYERS * WEIGHT * 7 // 8
    assert "found\n  bytes of all_gather" in refused(found, max_bytes={"all_gather": 2 * LAYERS * WEIGHT * 7 // 8 - 1})


def test_a_tensor_parallel_product_sums_once():
    sent = 2 * (BATCH // 2) * MODEL * 4 * 3 // 4
    found = assert_collectives(
        jax.jit(mlp), tensor_parallel_arguments(), all_reduce=1, total=1, max_bytes=sent, max_whole=0
    )
    assert found.total_bytes == sent
    assert "all_reduce  0        1" in refused(found, all_reduce=0)


@pytest.mark.parametrize(
    "xla, ours, arguments, sums",
    [
        (step, marked_step, fsdp_arguments, {"reduce_scatter": LAYERS}),
        (mlp, marked_mlp, tensor_parallel_arguments, {"all_reduce": 1}),
    ],
)
def test_both_jits_are_counted_in_one_way(xla, ours, arguments, sums):
    given = arguments()
    mesh = given[-1].sharding.mesh
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for jitted in (gshard.jit(ours, mesh=axes), gshard.jit(ours, mesh=mesh)):
        by_xla = assert_collectives(jax.jit(xla), given, **sums)
        by_gshard = assert_collectives(jitted, given, total=range(1, 100), max_bytes=by_xla.total_bytes)
        emitted = gshard.explain(jitted, *given)
        assert by_gshard.bytes_by_kind == {k: n for k, n in emitted.bytes_by_kind.items() if n}
        names = {a.short.text for a in by_gshard.tensors}
        assert names == {a.short.text for a in by_xla.tensors}, "the arguments are called as the function calls them"


def test_whatever_holds_the_program_is_counted_alike(tmp_path):
    args = fsdp_arguments()
    placed = tuple(jax.tree.map(lambda x: jnp.zeros(x.shape), a) for a in args)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = jax.tree.map(lambda x: jax.sharding.NamedSharding(mesh, x.sharding.spec), args)
    jitted = jax.jit(step, in_shardings=shardings)
    lowered = jitted.lower(*placed)
    compiled = lowered.compile()
    file = tmp_path / "step.after_optimizations.txt"
    file.write_text(compiled.as_text())
    ours = gshard.jit(marked_step, mesh=mesh)
    for f in (lowered, compiled, compiled.as_text(), file, str(file)):
        assert_collectives(f, all_gather=2 * LAYERS, reduce_scatter=LAYERS, total=3 * LAYERS, over="data", mesh=mesh)
    n = assert_collectives(ours, placed, total=range(100)).times_by_kind
    for stage in (ours.lower(*placed), ours.lower(*placed).compile()):
        assert assert_collectives(stage, total=range(100)).times_by_kind == n
    assert_collectives(jitted, placed, all_gather=2 * LAYERS)


def test_arguments_may_have_names():
    params, x = fsdp_arguments()
    assert_collectives(jax.jit(step), (params,), {"x": x}, all_gather=2 * LAYERS)
    assert refused(jax.jit(step), (), {"params": params, "x": x}, all_gather=0)


@pytest.mark.parametrize("limits, words", [
    ({"all_gather": range(12)}, "0 to 11"), ({"all_gather": range(13, 20)}, "13 to 19"),
    ({"all_gather": range(0, 20, 5)}, "0 to 15, in steps of 5"), ({"all_gather": range(3, 4)}, "3 "),
    ({"total": 17}, "collectives  17 "), ({"max_bytes": "1KiB"}, "at most 1.0 KiB (1,024 bytes)"),
    ({"max_bytes": 0}, "at most 0 B"), ({"max_peak": "1KiB"}, "peak memory"),
])  # fmt: skip
def test_limits_are_kept_or_told(fsdp, limits, words):
    assert words in refused(fsdp, **limits)


def test_limits_themselves_are_allowed(fsdp):
    assert_collectives(
        fsdp, all_gather=range(13), total=range(19),
        max_bytes=fsdp.total_bytes, max_peak=fsdp.peak, max_whole=0,
    )  # fmt: skip


def test_what_a_message_proposes_is_accepted(fsdp):
    text = refused(fsdp, all_gather=0, reduce_scatter=range(2), max_bytes=3, max_peak=5)
    (proposed,) = re.findall(r"If this is meant, allow it: (.*)\.$", text)
    assert_collectives(fsdp, **eval(f"dict({proposed})"))
    text = refused(fsdp, max_bytes={"all_gather": 3}, total=range(4))
    (proposed,) = re.findall(r"If this is meant, allow it: (.*)\.$", text)
    assert_collectives(fsdp, **eval(f"dict({proposed})"))


def test_only_collectives_over_an_axis_count():
    mesh = AbstractMesh((2, 4), ("data", "model"))

    def f(x, w):
        return x @ w, jnp.sum(x)

    found = assert_collectives(
        jax.jit(f), (array((8, 16), mesh, "data", "model"), array((16, 4), mesh, "model")), all_reduce=2, total=2
    )
    assert_collectives(found, over="data", total=1)
    assert_collectives(found, over="model", total=1)
    assert_collectives(found, over=("data", "model"), total=2)
    text = refused(found, over="data", total=0)
    assert "counted over data" in text
    assert text.count("all_reduce         x1") == 1
    text = refused(found, over="model", total=0)
    assert text.count("all_reduce         x1") == 2, "one message of the sum and the product"
    assert "moves several arrays has several rows, and counts once" in text
    with pytest.raises(gshard.MeshError, match="no axis 'dat'"):
        assert_collectives(found, over="dat", total=0)


def test_a_permutation_crosses_the_axis_along_which_it_sends():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data", "model")

    def shifted(x):
        return jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])

    jitted = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=spec, out_specs=spec))
    found = assert_collectives(jitted, (jnp.ones((4, 8)),), collective_permute=1, total=1)
    assert_collectives(found, over="model", collective_permute=1)
    assert_collectives(found, over="data", collective_permute=0)


def test_a_loop_of_unknown_length_is_marked():
    def f(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] / jnp.sum(c[0]), c[1] + 1), (x, 0))[0]

    n = array((), DATA, dtype=jnp.int32)
    text = refused(jax.jit(f), (array((16,), DATA, "data"), n), all_reduce=0)
    assert "x~1" in text
    assert "a loop as one iteration" in text


def test_an_argument_that_each_device_holds_whole_is_named():
    args = (array((64, 64), DATA, "data"), array((64, 32), DATA))
    assert_collectives(jax.jit(jnp.dot), args, total=0, max_whole=64 * 32 * 4)
    text = refused(jax.jit(jnp.dot), args, max_whole=64 * 32 * 4 - 1)
    silent = re.sub(r", sharding=\{[^}]*\}", "", jax.jit(jnp.dot).lower(*on_first_devices(args)).compile().as_text())
    with pytest.raises(gshard.ArgumentError, match="does not tell them"):
        assert_collectives(silent, max_whole=0)
    assert "arguments that every device holds whole, 8.0 KiB on each" in text
    assert "max_whole=8192" in text


def test_messages(golden, fsdp):
    whole = array((BATCH, MODEL), DATA, "data"), array((MODEL, HIDDEN), DATA), array((HIDDEN, MODEL), DATA)
    texts = [
        refused(fsdp, all_gather=0, max_bytes="100KiB", reduce_scatter=range(6)),
        refused(fsdp, all_to_all=2),
        refused(jax.jit(mlp), tensor_parallel_arguments(), total=0, over="model", max_bytes="1KiB"),
        refused(jax.jit(mlp), whole, max_whole="16KiB"),
    ]
    golden("asserted_collectives", without_lines("\n\n".join(texts)))


def test_mistakes_are_told(fsdp):
    def told(*args, **limits):
        with pytest.raises(gshard.GShardError) as error:
            assert_collectives(*args, **limits)
        return str(error.value)

    whole = tuple(jax.tree.map(lambda x: jnp.zeros(x.shape), a) for a in fsdp_arguments())
    assert "no limit, so it could not fail" in told(jax.jit(step), fsdp_arguments())
    assert "for one device, where no program sends" in told(jax.jit(step), whole, all_gather=0)
    assert_collectives(jax.jit(step), whole, max_peak="1GiB")
    assert "functions from jax.jit, not for <function step" in told(step, fsdp_arguments(), all_gather=0)
    assert "stand in a tuple" in told(jax.jit(jnp.sum), fsdp_arguments()[1], all_gather=0)
    assert "functions from jax.jit, not for" in told(fsdp, fsdp_arguments(), all_gather=0)
    assert "takes the devices and the options of jax.jit" in told(jax.jit(step), fsdp_arguments(), all_gather=0, mesh=8)
    assert "all_gather=True is no number of collectives" in told(fsdp, all_gather=True)
    assert "total=-1 is no number" in told(fsdp, total=-1)
    assert "is no number of collectives" in told(fsdp, all_gather=range(0))
    assert "Did you mean 'all_gather'?" in told(fsdp, max_bytes={"all_gathers": 1})
    assert "max_bytes='5 apples' is no number of bytes" in told(fsdp, max_bytes="5 apples")
    assert "max_peak=False is no number of bytes" in told(fsdp, max_peak=False)
    many = AbstractMesh((64,), ("data",))
    for jitted, given in (
        (jax.jit(jnp.sum), array((64,), many, "data")),
        (gshard.jit(lambda x: jnp.sum(gshard.split(x, 0, "data")), mesh=many), jax.ShapeDtypeStruct((64,), "float32")),
    ):
        text = told(jitted, (given,), all_gather=0)
        assert "the mesh has 64, and there are 8" in text
        assert "--xla_force_host_platform_device_count=64" in text
        assert 'jax.config.update("jax_num_cpu_devices", 64)' in text
    x = jax.ShapeDtypeStruct((64,), "float32")
    jitted = jax.jit(jnp.sum, in_shardings=array((64,), DATA, "data").sharding)
    assert "jax.set_mesh" in told(jitted, (x,), all_gather=0)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert_collectives(jitted, (x,), all_reduce=1)
