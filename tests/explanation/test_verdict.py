"""The verdict: what bounds a call, whose work is done twice, which line sends most, and which mark would help."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from device.models import f32, model
from gshard.core.program import format_bytes
from gshard.explanation.verdict import alone

MESH = gshard.Mesh.abstract(data=4, model=2)


def told(f, *args, machine="h100:1x8", mesh=MESH):
    return gshard.explain(f, *args, mesh=mesh).verdict(machine)


def test_a_large_product_that_is_split_is_bound_by_compute():
    found = told(lambda x, w: gshard.split(x, 0, "data") @ w, f32(1 << 16, 4096), f32(4096, 4096))
    assert found.bound == "compute"
    assert found.bounds == ("compute",)
    assert found.headline.startswith("Compute-bound: ")
    assert "does not pay" not in str(found)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_work_that_is_done_by_all_is_told_with_its_line():
    def twice(x, w):
        y = gshard.split(x, 0, "data") @ w
        return y, gshard.replicate(x) @ gshard.replicate(w)

    even = told(lambda x, w: gshard.shard(x, P(("data", "model"), None)) @ w, f32(512, 64), f32(64, 64))
    assert even.work == pytest.approx(1.0)
    assert even.repeated is None
    assert "No product is computed by more than one device" in str(even)

    def alone(x, w):
        return gshard.replicate(gshard.replicate(x) @ gshard.replicate(w))

    found = told(alone, f32(512, 64), f32(64, 64))
    assert found.work == pytest.approx(8.0)
    line, times = found.repeated
    assert line.startswith(f"test_verdict.py:{alone.__code__.co_firstlineno + 1} ")
    assert times == pytest.approx(8.0)
    assert "8.00 times its share" in str(found)
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

    found = told(f, f32(256, 1024), f32(1024, 256))
    most = found.largest[0].collective
    assert most.total_bytes == max(r.collective.total_bytes for r in found.largest)
    assert f"caused at test_verdict.py:{f.__code__.co_firstlineno + 1}" in str(found)
    assert found.proposal.after < found.proposal.before == found.sent
    assert found.proposal.mark in str(found)


def test_programs_without_products_or_communication_have_a_verdict_too():
    found = told(lambda x: jnp.sin(gshard.split(x, 0, "data")), f32(1 << 20, 64))
    assert found.bound == "memory"
    assert "There is no matrix product." in str(found)
    assert "No device sends anything." in str(found)
    nothing = told(lambda x: x, f32(8))
    assert nothing.headline.startswith("Nothing to run")


def test_what_does_not_fit_is_told():
    found = told(lambda x: jnp.sin(x) + 1, f32(1 << 35))
    assert "it does not fit" in str(found)


def test_how_good_the_plan_is_among_those_that_keep_the_marks():
    sentence = "By the planner's cost model ({}), no plan over whole axes that keeps the marks is cheaper."
    f = lambda x, w: gshard.split(x, 0, "data") @ w  # noqa: E731
    found = told(f, f32(512, 64), f32(64, 64))
    assert found.gap == 0
    assert sentence.format("bytes sent") in str(found)
    unmarked = told(lambda x, w: x @ w, f32(512, 64), f32(64, 64))
    assert unmarked.gap is None
    assert "By the planner's cost model" not in str(unmarked)


def test_a_proposed_mark_and_the_cost_model_do_not_contradict():
    """A mark on an unmarked result sends less, and the model does not choose it: both are said, with the reason."""
    mesh = gshard.Mesh.abstract(data=8)

    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, gshard.split(ws, 0, "data"))[0]

    added = told(layers, f32(8, 512, 512), f32(4096, 512), mesh=mesh)
    assert added.proposal is not None
    assert added.proposal.instead == ""
    assert added.proposal.after < added.sent
    assert "Fewer bytes: gshard.shard(x, P('data', None)) on the result of scan" in str(added)
    assert "keeps the marks is cheaper" not in str(added)
    assert "By the planner's cost model (bytes sent), a plan with this change is not cheaper: it also counts" in str(
        added
    )
    removed = told(lambda x: gshard.replicate(gshard.split(x, 0, "data") * 2), f32(16, 4), mesh=mesh)
    assert removed.proposal is not None
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
    assert other in str(by_bytes.verdict("h100:1x8"))
    assert "By the planner's cost model (bytes sent)" in str(by_bytes.verdict("h100:1x8"))
    timed = gshard.explain(step, *arguments, mesh=mesh, machine="h100:1x8")
    for own in (timed.verdict(), timed.verdict("h100:1x8")):
        assert own.cost.machine.name == "h100:1x8"
        assert "was made" not in str(own)
        assert own.cost.seconds <= by_bytes.cost("h100:1x8").seconds
    assert "gshard planned for h100:1x8, not for cpu:8" in str(timed.verdict("cpu:8"))
    jitted = gshard.jit(step, mesh=mesh, machine="v5e:2x4")
    assert gshard.explain(jitted, *arguments).cost().machine.name == "v5e:2x4"
    assert gshard.explain(jitted, *arguments, machine="h100:1x8").cost().seconds == timed.cost().seconds


def test_a_small_program_is_bound_by_launches_and_latency():
    """A few kernels of nothing and a sum of one number: no bytes, and one device would be as fast."""
    found = told(lambda x, w: jnp.tanh(gshard.split(x, 0, "data") @ w).sum(), f32(64, 16), f32(16, 16))
    assert found.bounds == ("launch",)
    assert found.headline.startswith("Launch-bound: ")
    assert "kernel launches" in found.headline
    assert "memory traffic" not in found.headline
    kernels = [k for k in found.cost.kernels if dict(k.parts).get("launch")]
    assert found.shares["launch"] == pytest.approx(len(kernels) * found.cost.machine.launch / found.cost.seconds)
    assert f"Kernel launches: {len(kernels)} kernels take" in str(found)
    assert "This split does not pay: one device alone would take" in str(found)
    assert "kernel launches, which no split makes fewer" in str(found)


def test_many_small_messages_are_bound_by_latency():
    def f(x, w):
        for _ in range(4):
            x = jnp.tanh(gshard.replicate(gshard.split(x, 1, ("data", "model")) @ w))
        return x

    found = told(f, f32(8, 64), f32(64, 64), machine="v5e:2x4")
    assert found.bound == "latency"
    assert found.headline.startswith("Latency-bound: ")
    assert "fewer bytes do not" in str(found)
    assert sum(k.times for k in found.cost.kernels if k.sent) >= 4


def test_large_messages_are_bound_by_the_bytes_on_links():
    large = told(lambda x: gshard.replicate(gshard.split(x, 0, "data")), f32(1 << 14, 1 << 12))
    assert large.bounds == ("network",)
    assert large.headline.startswith("Network-bound: ")
    assert "bytes on links" in large.headline
    assert f"each device sends {format_bytes(large.sent)}" in str(large)


def test_a_mixed_program_is_named_with_the_two_largest():
    """Nothing takes more than half: both are named, the larger first, each with what would help."""
    found = told(lambda x, w: gshard.replicate(jnp.sin(gshard.split(x, 0, "data") @ w)), f32(1 << 13, 64), f32(64, 64))
    first, second = found.bounds
    assert 0 < found.shares[second] <= found.shares[first] <= 0.5
    assert found.headline.startswith(f"{first.capitalize()}- and {second}-bound: ")
    assert [text.split(":")[0] for text in found.sentences[:2]] == [
        {"compute": "Arithmetic", "memory": "Memory traffic", "network": "Bytes on links", "launch": "Kernel launches",
         "latency": "Network latency"}[what]
        for what in found.bounds
    ]  # fmt: skip


def test_what_one_device_alone_takes_has_no_communication():
    found = gshard.explain(
        lambda x, w: gshard.replicate(gshard.split(x, 1, "data") @ w), f32(512, 512), f32(512, 512), mesh=MESH
    )
    one = alone(found.plan, found.cost("h100:1x8").machine)
    assert one.sent == 0
    assert {"network", "latency"}.isdisjoint(one.by_bound)
    assert one.flops == 2 * 512**3
