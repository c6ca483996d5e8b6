"""XLA's own propagation as an oracle: what it leaves split along an axis, ours does not make whole."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.peer import xla_function
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from families import CASES
from gshard.core.mark import Mark
from gshard.core.mesh import Mesh
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace
from sweep import shardy
from sweep.harnesses import excluded, harnesses
from sweep.runs import EVEN

ONE_IN = 40  # harnesses in the fast test
CHUNK = 80  # harnesses in one slow test
# Its rule leaves padded windows of several dimensions whole: which of several extremes is the first would depend on it.
WHOLE_ON_PURPOSE = {"select_and_gather_add"}

pytestmark = pytest.mark.skipif(not shardy.available(), reason="this jaxlib's passes cannot be run from Python")


def of_floats():
    """In an order that is the same at every run; with those that are excluded, since finding them takes tracing."""
    found = [h for h in harnesses() if h.dtype == np.float32 and h.group not in WHOLE_ON_PURPOSE]
    return sorted(found, key=lambda h: zlib.crc32(h.name.encode()))


def whole_only_with_us(plan, function, arguments):
    """The results that are split by XLA's propagation and whole on every device by ours."""
    outputs = plan.program.block.outputs
    both = zip(outputs, shardy.results(function, arguments), strict=True)
    return [f"{v}: {split}" for v, split in both if any(split) and not any(plan.sharding(v).dims)]


def made_whole(members):
    """The runs of harnesses, each dimension split once, in which there is such a result."""
    mesh = Mesh.of(jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)))
    found = []
    for h in members:
        if excluded(h):
            continue
        for ((i, d),) in EVEN.places(h.arguments):
            spec = (*(None,) * d, "x")
            marks = [Mark(spec=spec) if k == i else None for k in range(len(h.arguments))]
            plan = propagate(trace(h.function, *h.arguments, argument_marks=marks), mesh)
            placed = [NamedSharding(mesh.jax_mesh, P(*spec) if k == i else P()) for k in range(len(h.arguments))]
            given = [
                jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=s)
                for x, s in zip(h.arguments, placed, strict=True)
            ]
            found += [
                f"{h.name}, dimension {d} of argument {i}, {x}" for x in whole_only_with_us(plan, h.function, given)
            ]
    return found


def test_the_oracle_speaks():
    """It tells how results are sharded, one by one; and a plan that forgets a split is found out."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((4, 8), "float32", sharding=NamedSharding(mesh, P("x", "y")))

    def function(x):
        return x.T, x.sum(), jnp.broadcast_to(x.sum(1), (3, 4))

    assert shardy.results(function, [x]) == [(("y",), ("x",)), (), ((), ("x",))]
    forgetful = propagate(trace(function, x), Mesh.of(mesh))
    assert len(whole_only_with_us(forgetful, function, [x])) == 2


def test_some_harnesses():
    assert not made_whole(of_floats()[::ONE_IN])


@pytest.mark.slow
@pytest.mark.parametrize("at", range(0, len(of_floats()), CHUNK))
def test_all_harnesses(at):
    assert not made_whole(of_floats()[at : at + CHUNK])


@pytest.mark.parametrize(
    "name", [name if i % 12 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CASES)]
)
@pytest.mark.one_in(3)
def test_marked_programs(name):
    case = CASES[name]
    lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
    flat = [*lowered.program.captured, *jax.tree.leaves(case.arguments)]
    assert not whole_only_with_us(lowered.plan, xla_function(lowered.program, lowered.mesh), flat)
