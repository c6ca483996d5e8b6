"""``gshard.jit`` inside of a ``jax.shard_map`` is refused: outside it partitions the axes that stay automatic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gshard

MESH = jax.make_mesh((2, 4), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)
SPECS = {"mesh": MESH, "in_specs": P("stage"), "out_specs": P("stage")}


def doubled(x):
    return 2 * gshard.split(x, 1, "model")


@pytest.mark.parametrize("axes", [{"stage"}, {"stage", "model"}])
@pytest.mark.parametrize("around", [jax.jit, jax.grad, lambda f: gshard.jit(f, mesh=MESH), lambda f: f])
def test_it_is_refused_inside(axes, around):
    x = jnp.ones((8, 8))
    inside = jax.shard_map(gshard.jit(doubled, mesh=MESH), axis_names=axes, **SPECS)
    with pytest.raises(
        gshard.stages.TraceError, match=r"(?s)doubled is called inside jax.shard_map.*test_inside_shard_map"
    ):
        around(lambda x: jnp.sum(inside(x)))(x)


def test_outside_it_partitions_the_automatic_axes():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    f = gshard.jit(jax.shard_map(doubled, axis_names={"stage"}, **SPECS), mesh=MESH)
    np.testing.assert_array_equal(f(x), 2 * x)
    assert f(x).sharding.shard_shape(x.shape) == (4, 2)
