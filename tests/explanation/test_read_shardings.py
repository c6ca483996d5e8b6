"""Shardings that are read from the text of a program: along which axes of the mesh they cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.mesh import Mesh
from gshard.explanation.compiled_program import WHOLE, read_sharding

SPECS = [
    P("b"), P(None, "b"), P(None, ("a", "b")), P(("b", "a")), P("a", "b"), P("b", "a"), P(("a", "c", "b")),
    P("c", None, "a"), P(None, "c"), P(("c", "a"), "b"),
]  # fmt: skip


@pytest.mark.parametrize("from_text", [False, True])
def test_axes_are_found_whatever_the_order_of_the_devices_in_the_text(from_text):
    """Texts list the device of each part, or name axes, or tell nothing: what is read is what was given."""
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b", "c"))
    arrays = [jax.ShapeDtypeStruct((8, 8, 8), jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in SPECS]
    compiled = jax.jit(lambda *arrays: [2 * x for x in arrays]).lower(*arrays).compile()
    text = compiled.as_text()
    if from_text and "sharding={" not in text:
        pytest.skip("this version of XLA writes no shardings of arguments")
    found = gshard.explain(text, mesh=mesh) if from_text else gshard.explain(compiled)
    read = found.source.program.arguments
    assert len(read) == len(SPECS)
    for argument, spec in zip(read, SPECS, strict=True):
        assert argument.cut.dims is not None, spec
        assert found.mesh.spec_of(argument.cut.dims) == spec
        assert np.prod(argument.cut.parts) * argument.local_bytes == argument.bytes == 4 * 8**3


@pytest.mark.parametrize(("text", "parts", "dims", "shown"), [
    ("{replicated}", (), (), WHOLE), ("{devices=[1,1,8]<=[8] last_tile_dim_replicate}", (1, 1), ((), ()), WHOLE),
    ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (2, 1), (("data",), ()), "P(data)"),
    ("{devices=[4,2]<=[2,4]T(1,0)}", (4, 2), (("model.0", "model.1"), ("data",)), "P(model, data)"),
    ("{devices=[8]<=[8]}", (8,), (("data", "model.0", "model.1"),), "P((data, model))"),
    ("{devices=[2,2,2]<=[8] last_tile_dims={replicated}}", (2, 2), (("data",), ("model.0",)), "P(data, model.0)"),
    ("{devices=[2,1,2,2]<=[8] last_tile_dims={manual, replicated}}", (2, 1), (("data",), ()), "P(data)"),
    ("{devices=[2,4]0,1,2,3,4,5,6,7}", (2, 4), (("data",), ("model.0", "model.1")), "P(data, model)"),
    ("{devices=[8]0,5,1,4,2,7,3,6}", (8,), None, "in 8 parts"), ("{devices=[4]<=[4]}", (4,), None, "in 4 parts"),
    ("{mesh['data'=2,'model'=4], [{'model'}, {}]}", (4, 1), (("model.0", "model.1"), ()), "P(model)"),
    ("{mesh['data'=2,'model'=4], [{}, {}]}", (1, 1), ((), ()), WHOLE),
    ("{mesh['x'=2,'y'=4], [{'y'}, {'x'}]}", (4, 2), None, "P(y, x)"),
    ("{mesh['data'=2,'model'=4], [{'model':(1)2}, {}]}", (2, 1), None, "in 2 x 1 parts"),
])  # fmt: skip
def test_forms_of_shardings(text, parts, dims, shown):
    found = read_sharding(f', sharding={text}, metadata={{op_name="w"}}', Mesh.abstract(data=2, model=4))
    assert (found.parts, found.dims, found.text) == (parts, dims, shown)


def test_what_has_no_sharding_tells_none():
    assert read_sharding(', metadata={op_name="w"}', Mesh.abstract(data=2)) is None
