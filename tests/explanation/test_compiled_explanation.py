"""Programs as XLA compiled them: what is sent, why, what is held, and in which forms they can be given."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import gshard
from explanation.advised_steps import given
from gshard.xla.hlo_collectives import collectives

P = PartitionSpec
WIDE, NARROW = 2048, 512
NAMES = ("data", "model")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def step(params, x):
    def loss(p):
        with jax.named_scope("mlp"):
            h = jnp.tanh(x @ p["up"])
        with jax.named_scope("head"):
            return jnp.mean((h @ p["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def tensor_parallel(mesh):
    params = {"up": given(mesh, (NARROW, WIDE), None, "model"), "down": given(mesh, (WIDE, NARROW), "model")}
    return params, given(mesh, (256, NARROW), "data")


@pytest.fixture(scope="module")
def found(mesh):
    return gshard.explain(jax.jit(step), *tensor_parallel(mesh))


def unoptimised(mesh):
    """What XLA dumps as ``before_optimizations.txt``: shardings are annotations, and there are no collectives."""
    return str(jax.jit(step).lower(*tensor_parallel(mesh)).compiler_ir("hlo").as_hlo_text())


def test_each_collective_has_its_axes_array_module_and_line(found):
    assert found.is_compiled
    rows = {row.array: row for row in found.collectives}
    up, down = rows["gradient of params/up"], rows["gradient of params/down"]
    assert (up.kind, up.axes, up.module, up.why) == ("all_reduce", "data", "mlp", "result of dot_general, backward")
    assert (down.kind, down.axes, down.module) == ("all_reduce", "data", "head")
    assert up.bytes == down.bytes == 2 * (NARROW * WIDE // 4 * 4) * (2 - 1) // 2
    product = rows["dot_general"]
    assert (product.axes, product.module, product.times) == ("model", "head", 1)
    assert product.bytes == 2 * (128 * NARROW * 4) * 3 // 4
    assert all(re.fullmatch(r"test_compiled_explanation\.py:\d+", row.line) for row in found.collectives)
    assert all(row.line or row.module for row in found.collectives)
    text = found.format(tensors=8)
    assert "gradient of params/up" in text
    assert "P(None, model)" in text
    assert "whole" not in text


def test_a_combined_collective_has_a_row_for_each_array(found):
    combined = [sent for sent in found.source.program.sent if len(sent.itself.operands) > 1]
    assert combined, "XLA combines the two gradients"
    moved = [one for row in found.collectives for one in row.moved if one.source is combined[0]]
    assert {one.array.text for one in moved} >= {"gradient of params/up", "gradient of params/down"}
    messages = sum(row.times / row.sharing for row in found.collectives)
    assert messages == pytest.approx(sum(found.times_by_kind.values()))
    shared = max(row.sharing for row in found.collectives)
    assert f" x1/{shared} " in str(found)
    assert str(found).count("x1/2 is one message with arrays of 2 rows") == 1


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "context": 2}, {"data": 2, "model": 4}])
@pytest.mark.parametrize("order", [range(8), [0, 4, 1, 5, 2, 6, 3, 7], [5, 2, 7, 0, 3, 6, 1, 4]])
def test_axes_are_those_of_the_gathered_array_in_any_order_of_devices(sizes, order):
    devices = np.array(jax.devices()[:8])[list(order)].reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    both = jax.jit(lambda x: (jnp.tanh(x), jnp.sum(jnp.tanh(x))), out_shardings=NamedSharding(mesh, P()))
    for axes in itertools.chain.from_iterable(itertools.permutations(sizes, k) for k in range(1, len(sizes) + 1)):
        found = gshard.explain(both, given(mesh, (64, 8), axes))
        for kind in ("all_gather", "all_reduce"):
            rows = [row for row in found.collectives if row.kind == kind]
            assert {axis for row in rows for axis in row.axes.split(",")} == {*axes}, kind


def test_one_program_in_all_its_forms(mesh, found, tmp_path):
    """Bytes are those of the text, and memory is what the compiler reports."""
    arguments, jitted = tensor_parallel(mesh), jax.jit(step)
    lowered = jitted.lower(*arguments)
    compiled = lowered.compile()
    file = tmp_path / "step.after_optimizations.txt"
    file.write_text(compiled.as_text(), "utf-8")
    forms = [
        found,
        gshard.explain(jitted, *arguments, partitioner="xla"),
        gshard.explain(lowered),
        gshard.explain(compiled),
        gshard.explain(compiled.as_text(), mesh=mesh),
        gshard.explain(file, mesh={"data": 2, "model": 4}, machine="cpu"),
        gshard.explain(jitted, *tensor_parallel(AbstractMesh((2, 4), ("data", "model")))),
    ]
    told = [
        [(r.kind, r.axes, r.times, r.bytes, r.array, r.module, r.line, r.why) for r in f.collectives] for f in forms
    ]
    assert all(rows == told[0] for rows in told)
    exported = gshard.explain(jax.jit(jax.export.export(jitted)(*arguments).call), *arguments)
    read = collectives(compiled.as_text())
    assert {f.total_bytes for f in (*forms, exported)} == {sum(c.total_bytes for c in read)} != {0}
    assert abs(sum(row.bytes for row in found.collectives) - found.total_bytes) <= len(found.collectives)
    assert sum(found.times_by_kind.values()) == sum(c.executions for c in read)
    donated = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    report, whole = donated.memory_analysis(), gshard.explain(donated)
    held = report.argument_size_in_bytes + report.output_size_in_bytes - report.alias_size_in_bytes
    assert whole.peak == held + report.temp_size_in_bytes
    assert "as the compiler reports" in str(whole)
    assert "as read from the schedule" in str(gshard.explain(donated.as_text()))


def test_gshard_partitions_where_it_is_told_to(mesh):
    arguments = tensor_parallel(mesh)
    for options in ({"partitioner": "gshard"}, {"mesh": mesh}, {"memory_limit": "1GiB"}):
        assert not gshard.explain(jax.jit(step), *arguments, **options).is_compiled
    one_device = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    assert not gshard.explain(jax.jit(jnp.matmul), *one_device, mesh=8).is_compiled


def test_arrays_that_every_device_holds_come_first(mesh):
    params = {"up": given(mesh, (NARROW, WIDE)), "down": given(mesh, (WIDE, NARROW), "model")}
    found = gshard.explain(jax.jit(step), params, given(mesh, (256, NARROW), "data"))
    assert [line.split("  ")[1] for line in found.lists["whole"]] == ["params/up"]
    lines = str(found).splitlines()
    assert lines[3] == "arguments that every device holds whole, 4.0 MiB on each"
    assert lines.index(lines[3]) < next(i for i, line in enumerate(lines) if line.startswith("collectives"))


def test_equal_layers_are_one_row(mesh):
    def f(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w["up"]) @ w["down"]
        return x

    layer = {"up": given(mesh, (64, 128), None, "model"), "down": given(mesh, (128, 64), "model")}
    found = gshard.explain(jax.jit(f), [layer] * 3, given(mesh, (32, 64), "data"))
    (row,) = found.collectives
    assert (row.kind, row.axes, row.times, row.module, row.arrays) == ("all_reduce", "model", 3, "layer_*", 3)
    assert "dot_general  x3" in str(found)


def test_a_collective_that_may_run_has_its_time(mesh):
    """In a branch, and in a loop whose length depends on data: rows are marked as uncertain, and have seconds."""

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x * 2)

    def loop(x, w):
        return jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: jnp.tanh(y @ w) - 1, x)

    for f in (branch, loop):
        arrays = given(mesh, (64, 64), None, "model"), given(mesh, (64, 64), "model")
        found = gshard.explain(jax.jit(f), *arrays, machine="cpu")
        uncertain = [row for row in found.collectives if not row.exact and row.bytes]
        assert uncertain
        assert all(row.seconds > 0 for row in uncertain)


def test_times_need_a_machine(mesh):
    arguments = tensor_parallel(mesh)
    text = jax.jit(step).lower(*arguments).compile().as_text()
    found = gshard.explain(text)
    assert found.machine is None
    assert "a call on" not in str(found)
    assert "exposed" not in str(found)
    with pytest.raises(gshard.ArgumentError, match="no machine is known"):
        found.cost()
    on = gshard.explain(text, machine="h100:1x8")
    cost = on.cost()
    assert cost.sent == found.total_bytes
    assert cost.products == 6 * 256 * NARROW * WIDE * 2 // 8 - 2 * 256 * NARROW * WIDE // 8  # x needs no gradient
    assert abs(sum(cost.by_bound.values()) - cost.seconds) < 1e-12
    assert on.verdict().bound in ("launch", "latency")
    assert abs(sum(row.exposed for row in on.collectives) + 1e-12 - sum(
        k.seconds * k.times for k in cost.kernels if k.collective is not None
    )) < 1e-9  # fmt: skip
    with pytest.raises(gshard.stages.MachineError, match="4 devices"):
        found.cost("h100:1x4")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: gshard.explain("HloModule"), "no entry"),
        (lambda m: gshard.explain("no/such/file.txt"), "neither a compiled program nor a file"),
        (lambda m: gshard.explain(Path(__file__)), "this is no compiled program"),
        (lambda m: gshard.explain(unoptimised(m)), "(?s)XLA had not finished.*ends in after_optimizations.txt"),
        (lambda m: gshard.explain(jax.jit(step).lower(*tensor_parallel(m)), mesh=4), "8 devices, and the mesh has 4"),
        (lambda m: gshard.explain(jax.jit(step).lower(*tensor_parallel(m)), 3), "takes mesh= and machine= only"),
        (lambda m: gshard.explain(step, *tensor_parallel(m), partitioner="xla"), "functions from jax.jit"),
        (lambda m: gshard.explain(jax.jit(step), *tensor_parallel(m), partitioner="shardy"), "no partitioner 'shardy'"),
        (lambda m: gshard.explain(jax.jit(step), *tensor_parallel(m), mesh=8, partitioner="xla"), "the options of"),
        (lambda m: gshard.explain(jax.jit(step), tensor_parallel(m)[0]), "missing 1 required"),
        (lambda m: gshard.explain(jax.jit(step), *tensor_parallel(AbstractMesh((8, 8), NAMES))), "has 64, and"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained(mesh, call, message):
    with pytest.raises((gshard.GShardError, TypeError, ValueError), match=message):
        call(mesh)


def test_a_program_of_gshard_is_read_like_any_other(mesh):
    arguments = tensor_parallel(mesh)
    ours = gshard.jit(step, mesh=mesh)
    found = gshard.explain(ours.lower(*arguments).compile().as_text(), mesh=mesh)
    planned = gshard.explain(ours, *arguments)
    assert found.total_bytes == planned.total_bytes
