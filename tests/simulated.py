"""Programs of one device, written as functions, on all devices of a mesh that need not exist."""

import math

import jax
import numpy as np

from gshard.core.jax_adapter import closed
from gshard.core.planning_tables import with_tables
from gshard.exact.numbers import Reals
from gshard.exact.on_parts import Exactly
from gshard.simulator.simulate import simulate


@with_tables
def simulate_function(function, axis_sizes, *stacked_args):
    """Traces a function of one device's arrays, and simulates it."""
    jaxpr, constants = local_jaxpr(function, axis_sizes, *(x[0] for x in stacked_args))
    devices = math.prod(axis_sizes.values())
    return simulate(jaxpr, (), axis_sizes, [*([c] * devices for c in constants), *stacked_args])


def local_jaxpr(function, axis_sizes, *local_args):
    """Traces the program of one device."""
    mesh = jax.sharding.AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes))
    replicated = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    outer, consts = closed(jax.make_jaxpr(mapped)(*local_args))
    (eqn,) = outer.eqns
    return eqn.params["jaxpr"], consts


def parts_of(x, sharding, mesh):
    """Each device's part of an array; NaN, or large integers, in the padding; random parts of what is unreduced."""
    exactly = Exactly(jax.make_jaxpr(lambda: 0)(), (), mesh, Reals(1, 0))
    parts = exactly.parts(exactly.argument("", x), sharding)
    return list((parts.real + 1j * parts.imag if np.iscomplexobj(x) else parts).astype(x.dtype))
