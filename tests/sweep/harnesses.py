"""JAX's own primitive harnesses: thousands of small programs, nearly all of one equation, each with its arguments.

They come with JAX's wheel and are the widest table of operators there is: every primitive, every dtype, every mode.
"""

import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # JAX's test module imports what JAX itself has deprecated
    from jax._src.internal_test_util import test_harnesses

NO_OPERAND = "it has no operand that could be split"
UNDEFINED = "it promises indices in bounds and breaks the promise, so that its result is undefined"


@dataclasses.dataclass(frozen=True)
class Harness:
    """One program of JAX's table.

    Attributes:
        group: mostly the name of the primitive.
        name: unique.
        dtype: of its first operand, mostly.
        function: takes the arguments.
        make: makes them from a random state.
    """

    group: str
    name: str
    dtype: np.dtype
    function: Callable[..., Any]
    make: Callable[[np.random.RandomState], Any]

    @functools.cached_property
    def arguments(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = self.make(np.random.RandomState(zlib.crc32(self.name.encode())))
        return tuple(x if isinstance(x, np.ndarray) else np.asarray(x) for x in given)

    @functools.cached_property
    def jaxpr(self):
        return jax.make_jaxpr(self.function)(*self.arguments)


@functools.cache
def harnesses():
    """All harnesses that JAX can run on CPU, whether or not they have something to split."""
    return tuple(
        Harness(h.group_name, h.fullname, np.dtype(h.dtype), h.dyn_fun, h.dyn_args_maker)
        for h in test_harnesses.all_harnesses
        if h.filter("cpu")
    )


@functools.cache
def groups():
    return tuple(sorted({h.group for h in harnesses()}))


def excluded(harness):
    """Why a harness is left out, or nothing."""
    if not any(n > 1 for x in harness.arguments for n in x.shape):
        return NO_OPERAND
    if any(_breaks_promise(eqn, values) for eqn, values in _equations_on_arguments(harness)):
        return UNDEFINED
    return ""


def _equations_on_arguments(harness):
    """The outermost equations, with the values of operands that are arguments or constants (others are None)."""
    closed = harness.jaxpr
    known = dict(zip(closed.jaxpr.invars, harness.arguments, strict=True))
    known.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        yield eqn, [v.val if hasattr(v, "val") else known.get(v) for v in eqn.invars]


def _breaks_promise(eqn, values):
    """Whether an index that is promised to be in bounds is not."""
    mode = eqn.params.get("mode")
    if mode != jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS or values[1] is None:
        return False
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    if eqn.primitive.name == "gather":
        mapped, sizes = numbers.start_index_map, eqn.params["slice_sizes"]
    else:
        mapped = numbers.scatter_dims_to_operand_dims
        skipped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = iter(eqn.invars[2].aval.shape[d] for d in numbers.update_window_dims)
        sizes = [1 if d in skipped else next(window) for d in range(len(shape))]
    indices = np.asarray(values[1])
    return any(
        bool(np.any((indices[..., k] < 0) | (indices[..., k] > shape[d] - sizes[d]))) for k, d in enumerate(mapped)
    )
