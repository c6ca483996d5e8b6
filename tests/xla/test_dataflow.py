"""Arrays of compiled programs, followed to the arguments they come from and to what reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.xla.dataflow import Array, Dataflow
from gshard.xla.hlo_collectives import sent_by
from gshard.xla.hlo_parser import read_module


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def flow_of(f, mesh, *arguments):
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arguments
    ]
    return Dataflow(read_module(jax.jit(f).lower(*given).compile().as_text()))


def moved(flow, kind):
    """The operands and results of the collectives of a kind."""
    found = []
    for sent in sent_by(flow.module):
        if sent.collective.kind == kind:
            several = len(sent.itself.operands) > 1
            for i, operand in enumerate(sent.itself.operands):
                result = Array(sent.computation, sent.ends.name, i if several else None)
                found.append((Array(sent.inside, operand), result))
    return found


def whole(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def test_a_gathered_weight_is_the_argument_through_casts_and_transposes(mesh):
    def f(x, w):
        return x @ whole(w.T.astype(jnp.bfloat16).astype(jnp.float32), mesh)

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((16, 32), ("model",)))
    gathers = moved(flow, "all_gather")
    assert [flow.arguments(operand) for operand, _ in gathers] == [(1,)]
    assert [flow.arguments(result) for _, result in gathers] == [(1,)]
    readers = [made.opcode for _, result in gathers for _, made in flow.readers(result)]
    assert "dot" in readers or "custom-call" in readers


def test_a_layer_of_stacked_weights_in_a_loop_is_the_argument(mesh):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ whole(w, mesh)), None), x, ws)[0]

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((5, 32, 32), (None, "model")))
    gathers = moved(flow, "all_gather")
    assert gathers
    assert {flow.arguments(operand) for operand, _ in gathers} == {(1,)}


def test_what_a_loop_changes_is_no_argument(mesh):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(whole(x, mesh) @ w), None), x, ws)[0]

    flow = flow_of(f, mesh, ((64, 32), ("data",)), ((5, 32, 32), ()))
    operands = [
        operand for kind in ("all_gather", "all_to_all", "collective_permute") for operand, _ in moved(flow, kind)
    ]
    assert all(flow.arguments(operand) in ((), (0,)) for operand in operands)
    inner = [o for o in operands if o.computation != flow.module.entry]
    assert all(flow.arguments(operand) == () for operand in inner)


def test_a_gradient_reaches_the_result_and_meets_its_weight(mesh):
    def f(w, v, x):
        a, b = jax.grad(lambda w, v: (jnp.tanh(x @ w) @ v).sum(), (0, 1))(w, v)
        return w - 0.1 * a, v - 0.2 * b

    flow = flow_of(f, mesh, ((32, 48), ()), ((48, 16), ()), ((64, 32), ("data",)))
    reached = [flow.reach(result) for _, result in moved(flow, "all_reduce")]
    assert {(tuple(r.results), tuple(r.beside)) for r in reached} == {((0,), (0,)), ((1,), (1,))}


def test_a_join_of_arguments_is_all_of_them(mesh):
    for join in (jnp.concatenate, jnp.stack):
        flow = flow_of(lambda *x, join=join: join(x), mesh, *[((8, 4), ())] * 3)
        assert flow.arguments(Array(flow.module.entry, flow.module.computations[flow.module.entry].root)) == (0, 1, 2)
    flow = flow_of(lambda x, y: jnp.concatenate([x, jnp.exp(y)]), mesh, *[((8, 4), ())] * 2)
    assert flow.arguments(Array(flow.module.entry, flow.module.computations[flow.module.entry].root)) == ()


def test_what_a_product_reads_is_another_array(mesh):
    flow = flow_of(lambda x, w: jnp.exp(x @ w), mesh, ((64, 32), ("data",)), ((32, 16), ()))
    root = Array(flow.module.entry, flow.module.computations[flow.module.entry].root)
    assert flow.arguments(root) == ()
    made = flow.made(flow.source(root))
    assert made is not None
    assert made.opcode in ("exponential", "fusion", "exp")
