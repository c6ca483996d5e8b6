"""One run of the sweep: a dimension is marked split, the program is partitioned, simulated and compared with the whole.

The whole pipeline is used as a user's program would use it: trace, propagate, partition; the per-device program is then
simulated for all devices of a mesh that need not exist, and every part on every device is compared.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

import gshard
from gshard.core.mark import Mark
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace
from harness import AS_WRITTEN
from simulated import parts_of, simulate
from sweep.comparison import difference

Place = tuple[int, int]
"""An argument and one of its dimensions."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to split dimensions.

    Attributes:
        name: unique.
        mesh: the devices.
        axes: the axes that each of the places gets, major to minor.
        fits: whether a dimension of this size is split in this variant.
        enters_split: whether arguments come split, as an even dimension can; otherwise they are marked inside.
    """

    name: str
    mesh: Mesh
    axes: tuple[tuple[str, ...], ...]
    fits: Callable[[int], bool] = lambda n: True
    enters_split: bool = False

    def places(self, arguments):
        """What is split, run by run: every dimension once, or each together with the next."""
        ones = [(i, d) for i, x in enumerate(arguments) for d, n in enumerate(x.shape) if n > 1 and self.fits(n)]
        if len(self.axes) == 1:
            yield from ((place,) for place in ones)
        elif len(ones) == 2:
            yield from itertools.permutations(ones)
        elif len(ones) > 2:
            yield from zip(ones, ones[1:] + ones[:1])


_TWO, _THREE, _GRID = Mesh.abstract(x=2), Mesh.abstract(x=3), Mesh.abstract(x=2, y=3)

EVEN = Variant("even", _TWO, (("x",),), lambda n: n % 2 == 0, enters_split=True)
VARIANTS = (
    EVEN,
    Variant("uneven", _TWO, (("x",),), lambda n: n % 2 == 1),
    Variant("three parts", _THREE, (("x",),)),
    Variant("two axes", _GRID, (("x", "y"),)),
    Variant("axes reversed", _GRID, (("y", "x"),)),
    Variant("two dimensions", _GRID, (("x",), ("y",))),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        group, harness, dtype: which program.
        variant, places: what was split.
        status: ``right``, ``wrong``, ``error``, or ``left out``: nothing is known to compare with.
        detail: what differs, or the error.
        gathers: whether the program makes an array as large as a whole split operand by one all_gather.
        bytes: that each device sends.
        seconds: it took.
        without_rule: primitives of the program that have no rule.
    """

    group: str
    harness: str
    dtype: str
    variant: str
    places: tuple[Place, ...]
    status: str
    detail: str = ""
    gathers: bool = False
    bytes: int = 0
    seconds: float = 0.0
    without_rule: tuple[str, ...] = ()

    def __str__(self):
        where = " and ".join(f"dimension {d} of argument {i}" for i, d in self.places)
        return f"{self.harness}, {self.variant}, {where}: {self.status} {self.detail}"


def whole(harness):
    """The results of a harness as it is."""
    found = jax.jit(harness.function, compiler_options=AS_WRITTEN)(*harness.arguments)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def outcomes(harness, variants=VARIANTS):
    """All runs of one harness."""
    expected = []
    for variant in variants:
        for places in variant.places(harness.arguments):
            if not expected:
                try:
                    expected = whole(harness)
                except jax.errors.JaxRuntimeError as error:  # XLA for CPU lacks some dtypes of some operators
                    named = harness.group, harness.name, str(harness.dtype), variant.name, places
                    yield Outcome(*named, "left out", str(error).splitlines()[0].partition(" %")[0])
                    return
            yield _outcome(harness, variant, places, expected)


def _outcome(harness, variant, places, expected):
    start = time.perf_counter()
    status, detail, gathers, sent = "right", "", False, 0
    unknown = ()
    try:
        spmd = partitioned(harness, variant, places)
        gathers = gathers_whole(spmd, min(harness.arguments[i].nbytes for i, _ in places))
        sent = sum(c.total_bytes for c in spmd.collectives)
        names = {e.name for e in spmd.program.block.walk()}
        unknown = tuple(sorted({e.name for e in spmd.program.block.walk() if e.rule is not None and not e.rule.known}))
        for i, (parts, want) in enumerate(zip(on_every_device(spmd, harness.arguments), expected, strict=True)):
            wanted = parts_of(want, spmd.out_shardings[i], variant.mesh)
            if "approx_top_k" in names and i == 1:
                parts, wanted = pointed_at(parts, spmd, harness), pointed_at(wanted, spmd, harness)
            differences = (difference(got, part, names) for got, part in zip(parts, wanted, strict=True))
            for device, found in enumerate(differences):
                if found:
                    status, detail = "wrong", f"result {i} on device {device}: {found}"
                    break
    except Exception as error:
        status, detail = "error", f"{type(error).__name__}: {str(error)[:400]}"
    seconds, dtype = time.perf_counter() - start, str(harness.dtype)
    return Outcome(
        harness.group, harness.name, dtype, variant.name, places, status, detail, gathers, sent, seconds, unknown
    )


def partitioned(harness, variant, places):
    """The per-device program of a harness in which some dimensions are marked split."""
    specs = {}
    for (i, d), axes in zip(places, variant.axes, strict=True):
        specs.setdefault(i, [None] * harness.arguments[i].ndim)[d] = axes
    marks = [None] * len(harness.arguments)
    function = harness.function
    if variant.enters_split:
        for i, spec in specs.items():
            marks[i] = Mark(spec=tuple(spec))
    else:

        def function(*arguments):
            return harness.function(
                *(gshard.shard(x, PartitionSpec(*specs[i])) if i in specs else x for i, x in enumerate(arguments))
            )

    return partition(propagate(trace(function, *harness.arguments, argument_marks=marks), variant.mesh))


def on_every_device(spmd, arguments):
    """The results, each stacked over the devices."""
    (equation,) = (e for e in spmd.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    known = {v: [c] * spmd.mesh.size for v, c in zip(spmd.jaxpr.jaxpr.constvars, spmd.jaxpr.consts, strict=True)}
    given = [*spmd.program.captured, *arguments]
    for var, x, sharding in zip(spmd.jaxpr.jaxpr.invars, given, spmd.in_shardings, strict=True):
        known[var] = parts_of(np.asarray(x, var.aval.dtype), sharding, spmd.mesh)
    operands = [[v.val] * spmd.mesh.size if hasattr(v, "val") else known[v] for v in equation.invars]
    return simulate(equation.params["jaxpr"], spmd.mesh.atom_sizes, operands)


def pointed_at(places, spmd, harness):
    """The elements at the places that each device found: which of equals ``approx_top_k`` gives is not specified.

    Raises:
        ValueError: a place is given twice.
    """
    (equation,) = (e for e in spmd.program.block.walk() if e.name == "approx_top_k")
    (x,) = harness.arguments
    axis = equation.params["reduction_dimension"] % x.ndim
    dims = [() if d == axis else atoms for d, atoms in enumerate(spmd.out_shardings[1].dims)]
    found = []
    for part, at in zip(parts_of(x, Sharding(tuple(dims)), spmd.mesh), places, strict=True):
        order = np.sort(at, axis)
        if np.any(np.diff(order, axis=axis) == 0):
            raise ValueError("a place is given twice")
        found.append(np.take_along_axis(part, at, axis))
    return found


def gathers_whole(spmd, size):
    """Whether some all_gather of the program makes an array of ``size`` bytes or more on every device."""
    return any(made >= size for made in _gathered(spmd.jaxpr))


def _gathered(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "all_gather":
            yield from (math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars)
        for value in eqn.params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from _gathered(body)
