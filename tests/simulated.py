"""Programs of one device, written as functions, on all devices of a mesh that need not exist."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from gshard.core import jax_adapter
from gshard.core.planning_tables import with_tables
from gshard.exact import interpreter
from gshard.exact.interpreter import Interpreter
from gshard.exact.numbers import Reals
from gshard.exact.on_parts import Exactly

OF_DEVICES = """axis_index psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter all_to_all
    ragged_all_to_all ppermute pbroadcast scan while cond""".split()


class OnJax(Interpreter):
    """Runs each equation of each device in JAX; regions and collectives as proofs do."""

    def _results(self, eqn, operands):
        if eqn.primitive.name in OF_DEVICES or jax_adapter.called_jaxpr(eqn) is not None:
            return super()._results(eqn, operands)
        return operands if eqn.primitive.name == "pvary" else self.by_jax(eqn, operands)


@with_tables
def simulate(jaxpr, axis_sizes, stacked_args):
    """The results of the program of one device on all devices, each stacked over the devices."""
    run = OnJax(Reals(1, 0), axes=tuple(axis_sizes.items()))
    body = jax_adapter.closed(jaxpr)[0]
    given = [
        interpreter._packed(x) if is_key(v) else np.stack(x) for v, x in zip(body.invars, stacked_args, strict=True)
    ]
    results = run.run(jaxpr, list(map(run._from_bits, given)))
    return [
        jnp.stack([interpreter._unpacked(x[i % len(x)], v.aval) for i in range(run.lanes)])
        if is_key(v)
        else np.stack([interpreter._of_lane(x, i % x.shape[0], v.aval) for i in range(run.lanes)])
        for v, x in zip(body.outvars, results, strict=True)
    ]


def is_key(v):
    """Whether a variable holds random keys."""
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def simulate_function(function, axis_sizes, *stacked_args):
    """Traces a function of one device's arrays, and simulates it."""
    jaxpr, constants = local_jaxpr(function, axis_sizes, *(x[0] for x in stacked_args))
    devices = math.prod(axis_sizes.values())
    return simulate(jaxpr, axis_sizes, [*([c] * devices for c in constants), *stacked_args])


def local_jaxpr(function, axis_sizes, *local_args):
    """Traces the program of one device."""
    mesh = jax.sharding.AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes))
    replicated = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    outer, consts = jax_adapter.closed(jax.make_jaxpr(mapped)(*local_args))
    (eqn,) = outer.eqns
    return eqn.params["jaxpr"], consts


def parts_of(x, sharding, mesh):
    """Each device's part of an array; NaN, or large integers, in the padding; random parts of what is unreduced."""
    exactly = Exactly(jax.make_jaxpr(lambda: 0)(), (), mesh, Reals(1, 0))
    parts = exactly.parts(exactly.argument("", x), sharding)
    return list((parts.real + 1j * parts.imag if np.iscomplexobj(x) else parts).astype(x.dtype))
