"""A function that is traced for one mesh, and compiled for other devices: of described machines, and of this one."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.errors import MeshError
from gshard.core.jax_adapter_jit import calls_of_jit, jitted_as
from gshard.core.jax_adapter_retracing import OnDevices
from placed import mesh_of

LIBTPU = importlib.util.find_spec("libtpu") is not None
AUTO = (AxisType.Auto,) * 2


MESHES = AbstractMesh((4, 2), ("a", "b"), axis_types=AUTO), mesh_of(a=4, b=2, order=(3, 1, 0, 2, 7, 6, 5, 4))


def step(mesh):
    def held(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        return held(jnp.tanh(held(x, "a") @ w), "a"), None

    def mapped(x):
        return jax.shard_map(lambda x: jax.lax.psum(x, "b"), mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"))(x)

    def step(ws, x):
        value, gradient = jax.value_and_grad(lambda ws: jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2))(ws)
        return ws - 0.1 * gradient, value, mapped(x)

    return jax.jit(step, out_shardings=(NamedSharding(mesh, P(None, "a")), None, None), donate_argnums=0)


def arguments(mesh):
    types = ((3, 16, 16), (None, "a")), ((16, 16), ("a", "b"))
    return [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec))) for shape, spec in types]


@pytest.mark.parametrize("mesh", MESHES, ids=["abstract", "shuffled"])
def test_shardings_of_a_traced_function_move_to_other_devices_in_order(mesh):
    (call,) = calls_of_jit(jax.make_jaxpr(step(mesh))(*arguments(mesh)))
    on = OnDevices(jax.devices()[::-1])
    moved = on.equation(call)
    types = [x.update(sharding=on.sharding(x.sharding)) for x in arguments(mesh)]
    compiled = jitted_as(moved, moved.params["jaxpr"]).lower(*types).compile()
    order = [7 - i for i in ((3, 1, 0, 2, 7, 6, 5, 4) if isinstance(mesh, jax.sharding.Mesh) else range(8))]
    for sharding in jax.tree.leaves(compiled.input_shardings):
        assert [d.id for d in sharding.mesh.devices.flat] == order
    ws, x = (
        0.1 * np.arange(3 * 16 * 16, dtype="f").reshape(3, 16, 16) % 1,
        np.arange(16 * 16, dtype="f").reshape(16, 16) % 3,
    )
    wanted = jax.jit(step(mesh_of(a=4, b=2)))(jnp.array(ws), jnp.array(x))
    for _ in range(3):
        placed = [jax.device_put(value, t.sharding) for value, t in zip((ws, x), types, strict=True)]
        for got, want in zip(compiled(*placed), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(MeshError, match="over 8 devices, and the machine has 4"):
        OnDevices(jax.devices()[:4]).equation(call)


def test_a_machine_without_its_compiler_is_told_and_priced():
    mesh = MESHES[0]
    for machine in ("mi300x", "mi300x:1x8"):  # XLA compiles for these only where they are
        found = gshard.explain(step(mesh), *arguments(mesh), machine=machine)
        assert found.lists["counted"][-2].startswith(f"XLA did not compile it for {machine}: XLA compiles for mi300x")
        assert found.source.program.platform == "cpu"
        assert found.cost().seconds > 0
    with (
        gshard.instead_of_jit(mesh={"a": 4, "b": 2}),
        pytest.raises(gshard.ArgumentError, match="its mesh and its opt"),
    ):
        gshard.explain(step(mesh), *arguments(mesh), machine="mi300x")  # gshard partitions it, with these options
    far = AbstractMesh((16, 4), ("a", "b"), axis_types=AUTO)
    with pytest.raises(MeshError, match=r'has 64, and there are 8(?s:.)*name a machine: machine="h100:8x8"'):
        gshard.explain(step(far), *arguments(far))
    with pytest.raises(MeshError, match=r"has 64, and there are 8(?s:.)*XLA did not compile it for mi300x"):
        gshard.explain(step(far), *arguments(far), machine="mi300x")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed")
@pytest.mark.parametrize("machine, axes", [("v5e:2x4", (4, 2)), ("v4:4x4x4", (16, 4))])
def test_a_function_is_compiled_for_tpus_that_need_not_exist(machine, axes):
    mesh = AbstractMesh(axes, ("a", "b"), axis_types=AUTO)
    found = gshard.explain(step(mesh), *arguments(mesh), machine=machine)
    assert (found.source.program.platform, found.machine.name) == ("tpu", machine)
    assert not found.lists["counted"]
    assert {"ws", "gradient of ws"} <= {row.array for row in found.collectives}
