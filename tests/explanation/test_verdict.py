"""The verdict: what bounds a call, whose work is done twice, which line sends most, and which mark would help."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32, model
from gshard import split

MESH = gshard.Mesh.abstract(data=4, model=2)


def told(f, *args, machine="h100:1x8", mesh=MESH, seconds=0):
    return gshard.explain(f, *args, mesh=mesh).verdict(machine, seconds)


def test_work_that_is_done_by_all_is_told_with_its_line():
    def twice(x, w):
        y = gshard.split(x, 0, "data") @ w
        return y, gshard.replicate(x) @ gshard.replicate(w)

    even = told(lambda x, w: gshard.shard(x, P(("data", "model"), None)) @ w, f32(512, 64), f32(64, 64))
    assert even.work == pytest.approx(1.0)
    assert "No product is computed by more than one device" in str(even)

    def alone(x, w):
        return gshard.replicate(gshard.replicate(x) @ gshard.replicate(w))

    found = told(alone, f32(512, 64), f32(64, 64))
    assert found.work == pytest.approx(8.0)
    line = f"test_verdict.py:{alone.__code__.co_firstlineno + 1} "
    assert f"Each device computes 8.00 times its share, most at {line}" in str(found)
    assert found.share <= 1 / 8 + 1e-9


def test_ideal_time_is_an_even_share_at_the_peak_rate():
    found = told(lambda x, w: gshard.split(x, 0, "data") @ w, f32(512, 64), f32(64, 32))
    peak = 494e12  # the vendor's, which MFU is a part of; products reach less
    assert found.ideal == pytest.approx(2 * 512 * 64 * 32 / 8 / peak)
    assert found.cost.machine.rate("f32") < 0.9 * peak
    f, args, _, _ = model("recurrent")
    loop = told(f, *args, mesh=gshard.Mesh.abstract(data=8))
    assert loop.ideal == pytest.approx(3 * 8 * 2 * 4096 * 256 * 256 / 8 / peak)
    assert loop.work == pytest.approx(1.0), "rounds of loops count on both sides"
    assert told(f, *args).work == pytest.approx(1.0), "the other axis takes half of what no mark splits over it"


def test_the_largest_collective_and_the_mark_that_would_lower_it():
    def f(x, w):
        return gshard.split(x, 1, "data") @ w

    found = told(f, f32(256, 1024), f32(1024, 256), seconds=10)
    assert f"caused at test_verdict.py:{f.__code__.co_firstlineno + 1}" in str(found)
    assert found.proposal.after < found.proposal.before == found.cost.sent
    assert found.proposal.mark in str(found)


def test_nothing_to_run_and_what_does_not_fit_are_told():
    assert told(lambda x: x, f32(8)).headline.startswith("Nothing to run")
    assert "it does not fit" in str(told(lambda x: jnp.sin(x) + 1, f32(1 << 35)))


def test_how_good_the_plan_is_among_those_that_keep_the_marks():
    found = told(lambda x, w: gshard.split(x, 0, "data") @ w, f32(512, 64), f32(64, 64))
    sentence = "By the planner's cost model (bytes sent), no plan over whole axes that keeps the marks is cheaper."
    assert sentence in str(found)
    unmarked = told(lambda x, w: x @ w, f32(512, 64), f32(64, 64))
    assert "By the planner's cost model" not in str(unmarked)


def test_a_proposed_mark_and_the_cost_model_do_not_contradict():
    """A mark on an unmarked result sends less, and the model does not choose it: both are said, with the reason."""
    mesh = gshard.Mesh.abstract(data=8)

    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, gshard.split(ws, 0, "data"))[0]

    added = told(layers, f32(8, 512, 512), f32(4096, 512), mesh=mesh, seconds=10)
    assert added.proposal.instead == ""
    assert added.proposal.after < added.cost.sent
    assert "Fewer bytes: gshard.shard(x, P('data', None)) on the result of scan" in str(added)
    assert "keeps the marks is cheaper" not in str(added)
    assert "By the planner's cost model (bytes sent), a plan with this change is not cheaper: it also counts" in str(
        added
    )
    removed = told(lambda x: gshard.replicate(gshard.split(x, 0, "data") * 2), f32(16, 4), mesh=mesh, seconds=10)
    assert removed.proposal.instead
    assert "no plan over whole axes that keeps the marks is cheaper" in str(removed), "the change takes one away"


def test_what_the_plan_was_made_for_is_told_where_it_is_priced_for_something_else():
    arguments = {"w": f32(128, 384), "b": f32(384)}, f32(32, 64, 128)
    step = lambda p, x: jax.grad(  # noqa: E731
        lambda p: jnp.mean(jnp.split(gshard.split(x, 0, "data") @ p["w"] + p["b"], 3, -1)[0] ** 2)
    )(gshard.split(p, 0, "data"))
    mesh = gshard.Mesh.abstract(data=8)
    by_bytes = gshard.explain(step, *arguments, mesh=mesh)
    other = "gshard planned by bytes, not for h100:1x8; to plan for h100:1x8, pass machine="
    assert other in str(by_bytes.verdict("h100:1x8", seconds=0))
    assert "By the planner's cost model (bytes sent)" in str(by_bytes.verdict("h100:1x8", seconds=0))
    timed = gshard.explain(step, *arguments, mesh=mesh, machine="h100:1x8")
    for own in (timed.verdict(seconds=0), timed.verdict("h100:1x8", seconds=0)):
        assert own.cost.machine.name == "h100:1x8"
        assert "was made" not in str(own)
        assert own.cost.seconds <= by_bytes.cost("h100:1x8").seconds
    assert "gshard planned for h100:1x8, not for cpu:8" in str(timed.verdict("cpu:8", seconds=0))
    jitted = gshard.jit(step, mesh=mesh, machine="v5e:2x4")
    assert gshard.explain(jitted, *arguments).cost().machine.name == "v5e:2x4"
    assert gshard.explain(jitted, *arguments, machine="h100:1x8").cost().seconds == timed.cost().seconds


def gathered_four_times(x, w):
    for _ in range(4):
        x = jnp.tanh(gshard.replicate(gshard.split(x, 1, ("data", "model")) @ w))
    return x


@pytest.mark.parametrize(("f", "args", "machine", "bound", "texts"), [
    (lambda x, w: gshard.split(x, 0, "data") @ w, (f32(1 << 16, 4096), f32(4096, 4096)), "h100:1x8", "compute", []),
    (lambda x: jnp.sin(gshard.split(x, 0, "data")), (f32(1 << 20, 64),), "h100:1x8", "memory",
     ["There is no matrix product.", "No device sends anything."]),
    (lambda x: gshard.replicate(gshard.split(x, 0, "data")), (f32(1 << 14, 1 << 12),), "h100:1x8", "network",
     ["bytes on links", "Fewer bytes help"]),
    # Few kernels of nothing and a sum of one number: no bytes, and one device would be as fast.
    (lambda x, w: jnp.tanh(gshard.split(x, 0, "data") @ w).sum(), (f32(64, 16), f32(16, 16)), "h100:1x8", "launch",
     ["This split does not pay: one device alone would take", "kernel launches, which no split makes fewer"]),
    (gathered_four_times, (f32(8, 64), f32(64, 64)), "v5e:2x4", "latency", ["fewer bytes do not"]),
])  # fmt: skip
def test_what_bounds_a_call(f, args, machine, bound, texts):
    found = told(f, *args, machine=machine)
    assert found.cost.bounds == (bound,)
    assert found.headline.startswith(f"{bound.capitalize()}-bound: ")
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert [text for text in texts if text not in str(found)] == []
    assert ("does not pay" in str(found)) == (bound in ("launch", "latency", "network"))
    if bound == "launch":
        assert "memory traffic" not in found.headline
        kernels = [k for k in found.cost.kernels if dict(k.parts).get("launch")]
        assert found.shares["launch"] == pytest.approx(len(kernels) * found.cost.machine.launch / found.cost.seconds)
        assert "Kernel launches: " in str(found)


def test_a_mixed_program_is_named_with_the_two_largest():
    """Nothing takes more than half: both are named, the larger first, each with what would help."""
    found = told(lambda x, w: gshard.replicate(jnp.sin(gshard.split(x, 0, "data") @ w)), f32(1 << 13, 64), f32(64, 64))
    first, second = found.cost.bounds
    assert 0 < found.shares[second] <= found.shares[first] <= 0.5
    assert found.headline.startswith(f"{first.capitalize()}- and {second}-bound: ")
    assert [text.split(":")[0] for text in found.sentences[:2]] == [
        {"compute": "Arithmetic", "memory": "Memory traffic", "network": "Bytes on links", "launch": "Kernel launches",
         "latency": "Network latency"}[what]
        for what in found.cost.bounds
    ]  # fmt: skip


# Devices without work of their own: axes that split nothing, dimensions with too few elements; the time of both.
def net(p, x, y):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) - y) ** 2)


def arguments(rows):
    return {"a": f32(64, 64), "b": f32(64, 8)}, f32(rows, 64), f32(rows, 8)


def test_a_program_without_marks_is_computed_by_every_device():
    told = gshard.explain(net, *arguments(32), mesh=MESH)
    (line,) = told.lists["replicated"]
    assert line.startswith("no array is split: each of the 8 devices computes the whole program; split(x, 0, 'data')")
    assert line in str(told)
    assert gshard.explain(net, *arguments(32), mesh=gshard.Mesh.abstract(data=1)).lists["replicated"] == ()


@pytest.mark.parametrize(("spec", "axes", "line"), [
    (P("data"), {"data": 4, "model": 2}, "axis 'model' splits no array: its 2 devices repeat the same work"),
    (P("model"), {"data": 4, "model": 2}, "axis 'data' splits no array: its 4 devices repeat the same work"),
    (P(("data", "model")), {"data": 4, "model": 2}, None),
    (2, {"data": 8}, "axis 'data' splits arrays into 2 parts of 8: 4 devices repeat the same work"),
])  # fmt: skip
def test_an_axis_or_a_part_of_one_that_splits_nothing_is_named(spec, axes, line):
    mark = (lambda x: gshard.split(x, 0, spec)) if spec == 2 else lambda x: gshard.shard(x, spec)
    told = gshard.explain(lambda x: mark(jnp.sin(mark(x))), f32(32, 8), mesh=gshard.Mesh.abstract(**axes))
    assert told.lists["replicated"] == (() if line is None else (line,))


def test_a_batch_smaller_than_the_mesh_leaves_devices_without_rows():
    def f(p, x, y):
        return net(p, gshard.split(x, 0, "data"), y)

    mesh = gshard.Mesh.abstract(data=8)
    told = gshard.explain(f, *arguments(3), mesh=mesh)
    line = "dimension 0 of x has 3 elements, and is split over data (8 parts): 5 of 8 devices have none of it"
    assert told.lists["replicated"] == (line,), "x and y have as many rows: one line"
    assert gshard.explain(f, *arguments(8), mesh=mesh).lists["replicated"] == ()


def test_a_search_says_which_devices_have_no_work_and_shows_split_arguments_first():
    idle = gshard.search(net, *arguments(4), mesh=gshard.Mesh.abstract(data=8), machine="h100:1x8", progress=False)
    assert "no array is split: each of the 8 devices computes the whole program" in str(idle)

    def product(w, x):
        return jnp.tanh(gshard.split(x, 0, "x") @ w)

    small = gshard.search(product, f32(4096, 4096), f32(512, 4096), mesh={"x": 2}, machine="h100:1x2", progress=False)
    assert "the mesh has 2 of the 8 devices that there are; the others are not used" in str(small)
    assert "arguments (the largest 2 of 2; bytes of one device's part)" in str(small)


# A byte budget: kept without a word, broken with the lines, the bytes and the marks that would help.
W = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)


def contracted(x, w):
    return jnp.tanh(gshard.replicate(split(x, 1, 8) @ split(w, 0, 8)))


SENT = 2 * 8 * 24 * 4 * 7 // 8  # one all-reduce of the result


@pytest.mark.parametrize("strict", [SENT, SENT + 0.5, 1e9, True, False])
def test_a_program_that_keeps_to_its_budget_runs(strict):
    assert gshard.explain(contracted, X, W, mesh=8).total_bytes == SENT
    jitted = gshard.jit(contracted, mesh=8, strict=strict)
    np.testing.assert_allclose(jitted(X, W), np.tanh(X @ W), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [0, SENT - 1])
def test_one_that_does_not_is_refused_with_what_to_do(strict):
    with pytest.raises(gshard.PlanError) as caught:
        gshard.jit(contracted, mesh=8, strict=strict)(X, W)
    text = str(caught.value)
    assert f"{SENT:,} bytes in one call of contracted, and strict allows {strict:,} bytes" in text
    assert "all_reduce of f32[8,24] over devices for" in text
    line = contracted.__code__.co_firstlineno + 1
    assert f"test_verdict.py:{line} (contracted)" in text, "the user's line is missing"
    assert "split(x, 1, 8)" in text, "the mark that causes it is missing"


def test_it_holds_for_each_half_of_a_derivative():
    jitted = gshard.jit(lambda x, w: contracted(x, w).sum(), mesh=8, strict=16)
    with pytest.raises(gshard.PlanError, match="strict allows 16 bytes"):
        jax.jit(jax.grad(jitted))(X, W)


@pytest.mark.parametrize("strict", [-1, "1 MB", float("nan"), None])
def test_budgets_that_say_nothing(strict):
    with pytest.raises(gshard.PlanError, match="number of bytes"):
        gshard.jit(contracted, mesh=8, strict=strict)
