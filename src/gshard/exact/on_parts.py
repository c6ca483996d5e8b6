"""Runs a program whole, and the programs of devices on padded and unreduced parts, and compares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.core.mark import positions_of_parts
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.exact.interpreter import Interpreter, cut
from gshard.exact.numbers import NAN, Field, Reals, Residues
from gshard.exact.operations import COMBINE, Complex, Operation, add, is_float, moved, neg


class Exactly:
    """A program, and the programs of devices that should compute the same, run in a domain of ``gshard.exact``.

    Where a dimension does not divide, parts are padded with what spoils results: NaN in the first draw, and random
    numbers in the others. The parts of unreduced arguments are random; no device has the array itself.
    """

    def __init__(self, whole: Any, arguments: Sequence[Any], mesh: Mesh, domain: Field | Reals) -> None:
        self.mesh, self.domain = mesh, domain
        self._axes = tuple(mesh.atom_sizes.items())
        self._random = np.random.default_rng(mesh.size)
        run = Interpreter(domain, trusts_rules=False)
        self.lanes = run.constant  # an array for all draws
        self._arguments = [self.argument(f"argument {i}", x) for i, x in enumerate(arguments)]
        self._expected = run.run(whole, self._arguments)
        self._types = [v.aval.dtype for v in whole.jaxpr.outvars]

    def difference(self, spmd: SpmdProgram, is_read: Sequence[bool], tolerance: float = 0.0) -> str:
        """The first element that a device computes otherwise, as text; empty if there is none.

        Args:
            spmd: a per-device program that ``emit`` made.
            is_read: which results are compared.
            tolerance: relative and absolute, of float64 numbers.
        """
        outer, mesh = spmd.jaxpr.jaxpr, self.mesh
        (equation,) = (e for e in outer.eqns if "in_specs" in e.params)
        local = Interpreter(self.domain, axes=self._axes, trusts_rules=False)
        values = dict(zip(outer.constvars, map(local.constant, spmd.jaxpr.consts), strict=True))
        for v, x, sharding in zip(outer.invars, self._arguments, spmd.in_shardings, strict=True):
            values[v] = self.parts(x, sharding)
        found = local.run(equation.params["jaxpr"], [values[v] for v in equation.invars])
        types = zip(self._types, (v.aval.dtype for v in equation.outvars), strict=True)
        for i, ((want, got), counts) in enumerate(zip(types, is_read, strict=True)):
            if counts and want != got:
                return f"result {i} is {got} and not {want}"
        compared = zip(found, self._expected, spmd.out_shardings, is_read, strict=True)
        for i, (got, want, sharding, counts) in enumerate(compared):
            inside = self.parts(np.ones(want.shape, bool), sharding, np.zeros((), bool))
            pairs = zip(*(_numbers(self.domain, x) for x in (got, self.parts(want, sharding))), strict=True)
            for a, b in pairs if counts else ():
                wrong = inside & ~near(a, b, tolerance)
                for lane in np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))[:1]:
                    one, other = np.broadcast_to(a, b.shape)[lane], b[lane]
                    text = first_difference(wrong[lane], one, other, f"on device {lane % mesh.size}", "unsplit")
                    return f"result {i}: {text}"
        return ""

    def argument(self, name: str, x: Any) -> Any:
        """Random numbers, equal ones where a float array has equal ones; zeros and infinities stay what they are."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.lanes(x)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return Complex(self.argument(f"{name}, real", x.real), self.argument(f"{name}, imaginary", x.imag))
        x = np.asarray(x, np.float64)
        if isinstance(self.domain, Reals):
            return self.lanes(x)
        values, place = np.unique(x, return_inverse=True)
        stays = (values == 0) | ~np.isfinite(values)
        both = self.domain.random(name, values.shape), self.lanes(np.where(stays, values, 0))
        found = moved(lambda a, b: np.where(stays, b, a), *both)
        return moved(lambda v: np.take(v, place.reshape(x.shape), 1), found)

    def parts(self, x: Any, sharding: Sharding, padding: Any = None) -> Any:
        """The part of each device: ``[draws, ...] -> [draws * devices, ...]``."""
        dims, sizes, mesh = sharding.dims, x.shape[1:], self.mesh
        if sharding.unreduced:
            partial = tuple(a for a, _ in sharding.unreduced)
            parts = [self.parts(p, Sharding(dims)) for p in self._divided(x, sharding, mesh.count(partial))]
            which = np.argsort(positions_of_parts((partial,), mesh).ravel()) // (mesh.size // len(parts))
            at = np.tile(which, self.domain.draws), np.arange(self.domain.draws * mesh.size)
            return moved(lambda *vs: np.stack(vs)[at], *parts)
        full = [n * mesh.count(atoms) for n, atoms in zip(sharding.local_shape(mesh, sizes), dims, strict=True)]
        if full != list(sizes):
            inside = np.zeros(full, bool)
            inside[tuple(map(slice, sizes))] = True
            missing = [(0, 0), *((0, n - m) for n, m in zip(full, sizes, strict=True))]
            padding = self._poison(x, full) if padding is None else padding
            x = moved(lambda v, w: np.where(inside, np.pad(v, missing), w), x, padding)
        return moved(lambda v: cut(v, self._axes, dims), x)

    def _noise(self, name: str, x: Any, shape: Sequence[int]) -> Any:
        if isinstance(x, Complex):
            return Complex(
                self._noise(f"{name}, real", x.real, shape), self._noise(f"{name}, imaginary", x.imag, shape)
            )
        if is_float(x):
            return self.domain.random(name, shape)
        return self._random.integers(0, 5, (self.domain.draws, *shape)).astype(x.dtype)

    def _poison(self, x: Any, shape: Sequence[int]) -> Any:
        if isinstance(x, Complex):
            return Complex(self._poison(x.real, shape), self._poison(x.imag, shape))
        if not is_float(x):
            return np.asarray(x.dtype == bool or np.iinfo(x.dtype).max // 3).astype(x.dtype)
        first = np.arange(self.domain.draws).reshape(-1, *(1,) * len(shape)) == 0
        nan, noise = self.lanes(np.full(shape, np.nan)), self._noise("padding", x, shape)
        return moved(lambda a, b: np.where(first, a, b), nan, noise)

    def _divided(self, x: Any, sharding: Sharding, count: int) -> list[Any]:
        """Parts whose combination is ``x``."""
        monoid = sharding.unreduced[0][1]
        o = Operation(monoid, {}, (), (), (), (), self.domain, self.domain.draws)
        noise = [self._noise(f"part {i}", x, x.shape[1:]) for i in range(count - 1)]
        if monoid == "add":
            return [*noise, functools.reduce(lambda a, b: add(o, a, neg(o, b)), noise, x)]
        if monoid == "xor":
            return [*noise, functools.reduce(np.bitwise_xor, noise, x)]
        owner = self._random.integers(0, count, x.shape[1:])
        dtype = np.float32 if is_float(x) or isinstance(x, Complex) else x.dtype
        least = self.lanes(np.full(x.shape[1:], monoid == "mul", dtype))
        other = {"max": "min", "min": "max", "and": "or", "or": "and"}.get(monoid)
        others = [COMBINE[other](o, x, n) if other else least for n in (*noise, x)]
        return [moved(lambda v, w, i=i: np.where(owner == i, v, w), x, rest) for i, rest in enumerate(others)]


def _numbers(domain: Any, x: Any) -> list[np.ndarray]:
    """The numbers that are compared."""
    if isinstance(x, Complex):
        return [*_numbers(domain, x.real), *_numbers(domain, x.imag)]
    if not isinstance(x, Residues):
        return [x]
    return [np.where(domain.is_nan(x), NAN, domain.flat(x).p)]


def near(got: np.ndarray, want: np.ndarray, tolerance: float) -> np.ndarray:
    """Where arrays are equal, or near if they are inexact."""
    if not tolerance or not jnp.issubdtype(want.dtype, jnp.inexact):
        return np.asarray((got == want) | ((got != got) & (want != want)))
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    return np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True)


def first_difference(wrong: np.ndarray, got: np.ndarray, want: np.ndarray, one: str, other: str) -> str:
    """The first of the elements that differ, and how many do; empty if there is none."""
    if not wrong.any():
        return ""
    at = tuple(map(int, np.argwhere(wrong)[0]))
    differ = f"({wrong.sum()} of {wrong.size} differ)"
    return f"element {list(at)} is {got[at]} {one}, and {want[at]} {other} {differ}"
