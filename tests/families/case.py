"""Case: a program with the mesh it is meant for and its arguments.

    CASES = Family("layers")

    @CASES.add({"data": 8}, (64, 32), (32, 128), gradient=(1,))
    def project(x, w):
        return gshard.split(x, 0, "data") @ w

adds two cases, ``layers/project`` and ``layers/project'``: the program, and a gradient of its results with respect to
argument 1.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LINE = {"x": 8}
GRID = {"x": 2, "y": 4}
CUBE = {"x": 2, "y": 2, "z": 2}


@dataclasses.dataclass(frozen=True)
class Whole:
    """Integers from 0 to below ``high``."""

    shape: tuple[int, ...]
    high: int


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
                return rng.integers(0, leaf.high, leaf.shape).astype(np.int32)
            return rng.standard_normal(leaf).astype(np.float32)

        return tuple(jax.tree.map(make, self.shapes, is_leaf=_is_leaf))


@dataclasses.dataclass(frozen=True)
class Family:
    """The cases of a module, in the order in which they were added."""

    name: str
    cases: list[Case] = dataclasses.field(default_factory=list)

    def add(self, mesh, *shapes, gradient=(), name=""):
        """Adds the decorated program, and its gradient with respect to the given arguments if there are any."""

        def note(function):
            full = f"{self.name}/{name or function.__name__}"
            self.cases.append(Case(full, mesh, function, shapes))
            if gradient:
                self.cases.append(Case(full + "'", mesh, gradient_of(function, tuple(gradient)), shapes))
            return function

        return note


def gradient_of(function, arguments):
    """The gradient of half the sum of y |y| over a program's results y.

    The cotangents are |y|. With y they would be all alike to a normalization, whose gradient is then but rounding.
    """

    def energy(*args):
        return sum(jnp.sum(leaf * jnp.abs(leaf)) / 2 for leaf in jax.tree.leaves(function(*args)))

    return jax.grad(energy, argnums=arguments)


def _is_leaf(node):
    return isinstance(node, Whole) or (isinstance(node, tuple) and all(isinstance(n, int) for n in node))
