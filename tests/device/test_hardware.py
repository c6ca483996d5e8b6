"""Hardware without a model: it is never taken for a CPU, and what needs times raises an error."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from checked_calls import near
from gshard import Machine, Mesh, split
from gshard.device import machine as hardware
from gshard.device.machine import kind_of_devices, machine_of, machine_to_plan_for, unknown_devices

CALLED = "NVIDIA L40S"


@dataclasses.dataclass(frozen=True)
class Device:
    """What ``jax.Device`` tells of itself."""

    id: int
    device_kind: str = CALLED
    platform: str = "gpu"


def mesh_of(*, size=8, **told):
    return dataclasses.replace(Mesh.abstract(d=size), devices=tuple(Device(i, **told) for i in range(size)))


@pytest.fixture
def unknown(monkeypatch):
    """The CPU devices of this process, as if there were no model of them."""
    monkeypatch.setattr(hardware, "kind_called", lambda device_kind, platform: None)
    return str(jax.devices()[0].device_kind)


def loss(ws, x):
    x = split(x, 0, "d")
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


def arguments(seed=0):
    random = np.random.default_rng(seed)
    ws = [random.standard_normal((64, 64), "float32") / 8 for _ in range(6)]
    return ws, random.standard_normal((4096, 64), "float32")


def test_devices_of_the_table_are_their_kind_and_others_are_nobody():
    assert kind_of_devices(mesh_of(device_kind="NVIDIA B200")) == "b200"
    assert machine_of(mesh_of(device_kind="NVIDIA GB200")) == Machine.of("gb200:1x8")
    assert machine_of(mesh_of(device_kind="TPU7x", platform="tpu")) == Machine.of("tpu7x", 8)
    for known in (Mesh.abstract(d=8), Mesh.of(8), mesh_of(device_kind="x86", platform="cpu")):
        assert machine_of(known) == Machine.of("cpu:8")
        assert unknown_devices(known) is None
    assert kind_of_devices(mesh_of()) is None
    assert unknown_devices(mesh_of()) == CALLED
    told = rf"no model of {CALLED}[\s\S]*machine=[\s\S]*gshard.Machine"
    with pytest.raises(gshard.stages.MachineError, match=told):
        machine_of(mesh_of())


def test_a_limit_of_memory_needs_a_machine(unknown):
    """What is recomputed depends on times, and none are made up."""
    step = gshard.jit(jax.grad(loss), mesh={"d": 8}, memory_limit="1MiB")
    with pytest.raises(gshard.stages.MachineError, match=f"no model of {unknown}"):
        step(*arguments())
    limited = gshard.jit(jax.grad(loss), mesh={"d": 8}, memory_limit="1MiB", machine="h100:1x8")
    near(limited(*arguments()), jax.jit(jax.grad(loss))(*arguments()), 1e-5, 1e-7)
    recomputed = limited.lower(*arguments()).spmd.recomputed
    assert recomputed.after <= 2**20 < recomputed.before


def test_planning_by_bytes_needs_no_model_and_explain_says_so(unknown):
    line = f"no model of {unknown}: planned by bytes"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = gshard.jit(jax.grad(loss), mesh={"d": 8})
        near(step(*arguments()), jax.grad(loss)(*arguments()), 1e-5, 1e-7)
        found = gshard.explain(step, *arguments())
    assert line in str(found).splitlines()[0]
    assert found._repr_html_().startswith(f'<pre style="white-space: pre-wrap">{found.name} on 8 devices')
    # Not where a machine is named, a plan is given, or nothing runs on these devices.
    named = gshard.jit(jax.grad(loss), mesh={"d": 8}, machine="h100:1x8")
    recorded = gshard.jit(jax.grad(loss), mesh={"d": 8}, plan=named.lower(*arguments()).plan)
    for other in (named, recorded):
        assert line not in str(gshard.explain(other, *arguments()))
    assert line not in str(gshard.explain(loss, *arguments(), mesh=Mesh.abstract(d=8)))


def test_plans_are_made_for_the_devices_at_hand():
    mesh = mesh_of(device_kind="NVIDIA H100 80GB HBM3")
    step, named = (gshard.jit(jax.grad(loss), mesh=mesh, machine=told) for told in (None, "h100:1x8"))
    assert machine_to_plan_for(mesh) == Machine.of("h100:1x8")
    assert step.lower(*arguments()).target == named.lower(*arguments()).target
    assert str(step.lower(*arguments()).plan) == str(named.lower(*arguments()).plan)
    told = gshard.explain(step, *arguments())
    assert told.cost().seconds == gshard.explain(jax.grad(loss), *arguments(), mesh=mesh).cost().seconds
    assert "was made" not in str(told.verdict())
    nobody = mesh_of(), mesh_of(size=7, device_kind="TPU7x", platform="tpu"), Mesh.of({"d": 8}), Mesh.abstract(d=8)
    for mesh in nobody:
        assert machine_to_plan_for(mesh) is None
        assert gshard.jit(jax.grad(loss), mesh=mesh).lower(*arguments()).target.machine is None


def test_no_times_are_made_up(unknown):
    found = gshard.explain(jax.grad(loss), *arguments(), mesh={"d": 8})
    searched = gshard.jit(loss, mesh={"d": 8}, search=True)
    for asked in (
        found.cost, found.verdict, found.data, lambda: gshard.search(loss, *arguments(), mesh={"d": 8}),
        lambda: gshard.search(loss, *arguments(), mesh=8), *[lambda: searched(*arguments())] * 2,
    ):  # fmt: skip
        with pytest.raises(gshard.stages.MachineError, match=f"no model of {unknown}"):
            asked()
    for asked in (found.cost, found.verdict, found.data):
        asked("h100:1x8")
    best = gshard.search(loss, *arguments(), mesh={"d": 8}, machine="h100:1x8")
    assert best.cost.machine.kind == "h100"
    assert "no model" not in str(best.explain())
