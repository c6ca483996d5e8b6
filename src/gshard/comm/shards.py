"""Shards: what a rule's ``local`` may know about the part of an equation that one device computes.

    def local(shards, x):                       # inside shard_map, x is this device's part
        return shards.bind(x, shape=shards.out_shape())
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation
from gshard.core.rule import Rule
from gshard.core.split import Split, place


@dataclasses.dataclass(frozen=True, slots=True)
class Shards:
    """One equation, its split and the mesh, seen from one device."""

    equation: Equation
    split: Split
    mesh: Mesh

    @property
    def rule(self) -> Rule:
        """The equation's rule."""
        assert self.equation.rule is not None
        return self.equation.rule

    @property
    def params(self) -> dict[str, Any]:
        """The equation's parameters, which speak of global shapes."""
        return self.equation.params

    def bind(self, *arrays: Any, **changes: Any) -> list[Any]:
        """Runs the equation's own primitive on local arrays, with some parameters changed."""
        out = self.equation.primitive.bind(*arrays, **{**self.params, **changes})
        return list(out) if self.equation.primitive.multiple_results else [out]

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """The local shape of result ``i``."""
        return self._shape(self.rule.results[i], self.equation.outputs[i].shape)

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """The local shape of operand ``i``."""
        return self._shape(self.rule.operands[i], self.equation.inputs[i].shape)

    def _shape(self, dims: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        atoms = place(dims, self.split)
        return tuple(-(-n // self.mesh.count(a)) for n, a in zip(shape, atoms, strict=True))

    def atoms(self, factor: int) -> Atoms:
        """The atoms over which a factor is split."""
        return self.split.get(factor, ())

    def size(self, factor: int) -> int:
        """A factor's size on one device, padding included."""
        return -(-self.rule.factors[factor].size // self.mesh.count(self.atoms(factor)))

    def offset(self, dim: tuple[int, ...]) -> Any:
        """Where this device's part of a dimension begins, as a global index (an ``int32`` scalar or 0)."""
        atoms = tuple(a for f in dim for a in self.atoms(f))
        if not atoms:
            return 0
        size = math.prod(self.size(f) for f in dim)
        return lax.axis_index(atoms) * size

    def is_first(self, atoms: Atoms) -> Any:
        """Whether this device holds the first part over these atoms: the one that counts what counts once."""
        return lax.axis_index(atoms) == 0

    def reduced_atoms(self) -> Atoms:
        """All atoms over which reduce factors are split."""
        return tuple(a for f, factor in enumerate(self.rule.factors) if factor.kind == "reduce" for a in self.atoms(f))


def mask(x: Any, dim: int, valid: int, atoms: Atoms, fill: Any) -> Any:
    """Fills the padding of a part: elements of ``dim`` whose global index is ``valid`` or more become ``fill``."""
    local = x.shape[dim]
    index = lax.axis_index(atoms) * local + lax.broadcasted_iota(jnp.int32, x.shape, dim)
    return jnp.where(index < valid, x, jnp.asarray(fill, x.dtype))


def identity(monoid: str, dtype: Any) -> Any:
    """The value that a monoid does not notice: 0 for add, -inf for max, ...

    >>> identity("max", jnp.int8)
    -128
    """
    dtype = jnp.dtype(dtype)
    if monoid in ("add", "or", "xor"):
        return False if dtype == jnp.bool_ else 0
    if monoid == "mul":
        return 1
    if monoid == "and":
        return True if dtype == jnp.bool_ else -1 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    if dtype == jnp.bool_:
        return monoid == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return float("-inf") if monoid == "max" else float("inf")
    info = jnp.iinfo(dtype)
    return int(info.min) if monoid == "max" else int(info.max)
