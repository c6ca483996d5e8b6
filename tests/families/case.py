"""Case: a program with the mesh it is meant for and its arguments.

    CASES = Family("layers")

    @CASES.add({"data": 8}, (64, 32), (32, 128), gradient=(1,))
    def project(x, w):
        return gshard.split(x, 0, "data") @ w

adds two cases, ``layers/project`` and ``layers/project'``: the program, and a gradient of its results with respect to
argument 1. A plain function is given the shardings of its arguments and results instead of marks:

    @CASES.add({"x": 8}, on((16, 32_768), None, "x"), results=P())
    def greedy(logits):
        return jnp.argmax(logits, -1)
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gshard

LINE = {"x": 8}
GRID = {"x": 2, "y": 4}
CUBE = {"x": 2, "y": 2, "z": 2}


@dataclasses.dataclass(frozen=True)
class Whole:
    """Integers from ``low`` to below ``high``, or booleans."""

    shape: tuple[int, ...]
    high: int
    dtype: Any = "int32"
    low: int = 0


@dataclasses.dataclass(frozen=True)
class Placed:
    """The shapes of an argument, and the sharding of all its leaves."""

    shapes: Any
    spec: P


def on(shapes, *entries):
    """An argument that is split as the entries of a PartitionSpec say."""
    return Placed(shapes, P(*entries))


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: ``family/program``, with ``'`` for its gradient.
        mesh: sizes of the axes; eight devices in all, or fewer.
        function: of arrays, with marks.
        shapes: pytrees of shapes (normal float32) and ``Whole``, one for each argument.
    """

    name: str
    mesh: Mapping[str, int]
    function: Callable[..., Any]
    shapes: tuple[Any, ...]

    @property
    def jax_mesh(self):
        """The mesh over the first devices that there are."""
        axis_types = (jax.sharding.AxisType.Auto,) * len(self.mesh)
        return jax.make_mesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=axis_types)

    @property
    def arguments(self):
        """The same numbers at every call; normal numbers, or whole ones."""
        rng = np.random.default_rng(zlib.crc32(self.name.rstrip("'").encode()))

        def make(leaf):
            if isinstance(leaf, Whole):
                return rng.integers(leaf.low, leaf.high, leaf.shape).astype(leaf.dtype)
            return rng.standard_normal(leaf).astype(np.float32)

        return tuple(jax.tree.map(make, self.shapes, is_leaf=_is_leaf))


@dataclasses.dataclass(frozen=True)
class Family:
    """The cases of a module, in the order in which they were added."""

    name: str
    cases: list[Case] = dataclasses.field(default_factory=list)

    def add(self, mesh, *arguments, results=None, gradient=(), name=""):
        """Adds the decorated program, and its gradient with respect to the given arguments if there are any.

        With ``results``, PartitionSpecs of the results, arguments are split as ``on`` says, and whole without it.
        """
        shapes = tuple(a.shapes if isinstance(a, Placed) else a for a in arguments)
        specs = [a.spec if isinstance(a, Placed) else P() for a in arguments]

        def note(plain):
            function = plain if results is None else with_shardings(plain, specs, results)
            full = f"{self.name}/{name or plain.__name__}"
            self.cases.append(Case(full, mesh, function, shapes))
            if gradient:
                self.cases.append(Case(full + "'", mesh, gradient_of(function, tuple(gradient)), shapes))
            return plain

        return note


def with_shardings(function, arguments, results):
    """The function with the PartitionSpecs of its arguments and results as marks."""

    def each(specs, values):
        return jax.tree.map(lambda spec, own: jax.tree.map(lambda x: gshard.shard(x, spec), own), specs, values)

    @functools.wraps(function)
    def marked(*values):
        return each(results, function(*each(list(arguments), list(values))))

    return marked


def gradient_of(function, arguments):
    """The gradient of half the sum of y |y| over a program's results y.

    The cotangents are |y|. With y they would be all alike to a normalization, whose gradient is then but rounding.
    """

    def energy(*args):
        return sum(jnp.sum(leaf * jnp.abs(leaf)) / 2 for leaf in jax.tree.leaves(function(*args)))

    return jax.grad(energy, argnums=arguments)


def _is_leaf(node):
    return isinstance(node, Whole) or (isinstance(node, tuple) and all(isinstance(n, int) for n in node))
