"""The primitive of ``gshard.kernel``: one equation with a fast implementation and a plain one.

Outside of gshard the fast function runs. gshard reads the plain one to find how the equation may be split
(``language.kernel_loops``), and runs the fast one on shards.

Derivatives are kernels again. The derivative of a kernel along tangents is linear in them, and its transpose computes
the gradient: ``jax.vjp`` of the fast function runs, ``jax.vjp`` of the plain one describes it. So a fast function with
a ``jax.custom_vjp`` of its own keeps it. Where the fast function has no derivative, that of the plain one runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import closed, no_mesh_set, user_line
from gshard.language.flat_jaxpr import flat

_log = logging.getLogger("gshard")

Function = Callable[..., Sequence[Any]]
Types = tuple[tuple[tuple[int, ...], Any], ...]  # of arrays: shape and dtype


class Kernel:
    """A function of flat arrays in two implementations. Compared by identity."""

    def __init__(
        self, name: str, fast: Function, plain: Function, platforms: tuple[str, ...] | None = None,
        *, linear: int = 0, cotangents: int = 0, transposed: Kernel | None = None,
    ) -> None:  # fmt: skip
        # name: what messages call it; fast: the implementation that runs; plain: the implementation that says what it
        # computes, in JAX operators; platforms: where the fast one runs, such as ``("tpu",)``; elsewhere the plain one
        # does. None for everywhere
        self.name, self.fast, self.plain, self.platforms = name, fast, plain, platforms
        # linear: the number of last operands that the results are linear in: the tangents of a derivative; cotangents:
        # the number of results of a derivative; transposed: the kernel from the other operands, and cotangents of the
        # results, to cotangents of these last ones
        self.linear, self.cotangents, self.transposed = linear, cotangents, transposed
        self._derived: dict[Any, Any] = {}
        self._plain_jaxprs: dict[Types, Any] = {}
        self._refusals: dict[Types, str] = {}

    def __repr__(self) -> str:
        return f"kernel {self.name}"

    def plain_jaxpr(self, types: Types) -> Any:
        """The plain function traced on arrays of these types, calls opened."""
        if types not in self._plain_jaxprs:
            with no_mesh_set():
                made = flat(jax.make_jaxpr(self.plain)(*_structs(types)))
            if any(isinstance(x, jax.core.Tracer) for x in closed(made)[1]):
                raise ArgumentError(
                    f"the plain function of {self} uses an array from outside, which is being traced.",
                    user_line(),
                    hint="Pass the array as an argument of the kernel.",
                )
            self._plain_jaxprs[types] = made
        return self._plain_jaxprs[types]

    def plain_of(self, eqn: Any) -> Any:
        """The plain function of an equation of this kernel."""
        return self.plain_jaxpr(types_of(v.aval for v in eqn.invars))

    def result_types(self, types: Types) -> Types:
        """Shapes and dtypes of the results."""
        return types_of(v.aval for v in closed(self.plain_jaxpr(types))[0].outvars)

    def refusal(self, types: Types) -> str:
        """Why the fast function cannot run on arrays of these types; empty if it can."""
        if types not in self._refusals:
            self._refusals[types] = self._tried(types)
        return self._refusals[types]

    def _tried(self, types: Types) -> str:
        try:
            with no_mesh_set():
                made = types_of(jax.eval_shape(self.fast, *_structs(types)))
        except Exception as error:  # a block that does not fit, a derivative that does not exist
            return f"{type(error).__name__}: {error}"
        wanted = self.result_types(types)
        return "" if made == wanted else f"it returns {shown(made)}, and the plain function {shown(wanted)}"

    def implementation(self, platforms: Sequence[str], types: Types) -> Function:
        """The function that runs on arrays of these types."""
        if self.platforms is not None and not set(platforms) <= set(self.platforms):
            return self.plain
        if self.refusal(types):
            _log.warning(
                "gshard: the plain function of %s runs, because the fast one fails: %s", self, self._refusals[types]
            )
            return self.plain
        return self.fast

    @functools.cached_property
    def jitted(self) -> Callable[..., Any]:
        """The kernel as a jitted function, for calls that nothing traces."""
        return jax.jit(functools.partial(kernel_p.bind, kernel=self))

    def mapped(self, dims: tuple[int | None, ...]) -> Kernel:
        """The kernel under ``jax.vmap`` over these dimensions of its operands. Results have the new dimension first.

        The last operands of a linear kernel must all be mapped over.
        """

        def made() -> Kernel:
            back = self.transposed
            if back is not None:
                back = back.mapped((*dims[: len(dims) - self.linear], *(0,) * self.cotangents))
            fast, plain = jax.vmap(self.fast, dims), jax.vmap(self.plain, dims)
            linear, cotangents = self.linear, self.cotangents
            return Kernel(self.name, fast, plain, self.platforms, linear=linear, cotangents=cotangents, transposed=back)

        kernel: Kernel = self.once(("mapped", dims), made)
        return kernel

    def tangent(self, at: tuple[int, ...], operands: int, made: tuple[int, ...]) -> Kernel:
        """The derivative of the results ``made`` along tangents of the operands ``at``: (operands, tangents)."""

        def derivative(f: Function) -> Function:
            def along(*arrays: Any) -> Sequence[Any]:
                of_some, some = _restricted(f, arrays[:operands], at, made)
                results, tangents = jax.jvp(of_some, some, arrays[operands:])
                _have_one_shape((*some, *results), (*arrays[operands:], *tangents))
                return tangents

            return along

        def transpose(f: Function) -> Function:
            def back(*arrays: Any) -> Sequence[Any]:
                of_some, some = _restricted(f, arrays[:operands], at, made)
                results, pullback = jax.vjp(of_some, *some)
                cotangents = pullback(tuple(arrays[operands:]))
                _have_one_shape((*some, *results), (*cotangents, *arrays[operands:]))
                return cotangents

            return back

        def both() -> Kernel:
            gradient = Kernel(f"gradient of {self.name}", transpose(self.fast), transpose(self.plain), self.platforms)
            name, functions = f"derivative of {self.name}", (derivative(self.fast), derivative(self.plain))
            return Kernel(name, *functions, self.platforms, linear=len(at), cotangents=len(made), transposed=gradient)

        kernel: Kernel = self.once(("tangent", at, made), both)
        return kernel

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made of the kernel for this key. So programs that are traced again have equal kernels."""
        if key not in self._derived:
            self._derived.setdefault(key, make())
        return self._derived[key]


def _restricted(
    f: Function, operands: Sequence[Any], at: tuple[int, ...], made: tuple[int, ...]
) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
    """A function as one of some of its operands to some of its results, and these operands."""

    def of_some(*some: Any) -> tuple[Any, ...]:
        every = list(operands)
        for i, x in zip(at, some, strict=True):
            every[i] = x
        results = f(*every)
        return tuple(results[i] for i in made)

    return of_some, tuple(operands[i] for i in at)


def _have_one_shape(some: Sequence[Any], others: Sequence[Any]) -> None:
    """Writes equations that nothing reads and that have arrays in pairs: their dimensions are the same loops.

    A derivative need not read the arrays that it is a derivative of, but it has their dimensions.
    """
    for x, y in zip(some, others, strict=True):
        lax.add(x, y)


def types_of(avals: Any) -> Types:
    """Shapes and dtypes of arrays."""
    return tuple((tuple(x.shape), x.dtype) for x in avals)


def shown(types: Types) -> str:
    """Types as text: ``float32[8,4], int32[]``."""
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types) or "nothing"


def _structs(types: Types) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


kernel_p = Primitive("gshard_kernel")
kernel_p.multiple_results = True


@kernel_p.def_impl
def _called(*arrays: Any, kernel: Kernel) -> Any:
    return kernel.jitted(*arrays)


@kernel_p.def_abstract_eval
def _abstract(*avals: Any, kernel: Kernel) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in kernel.result_types(types_of(avals))]


def _lowered(ctx: Any, *operands: Any, kernel: Kernel) -> Any:
    platforms = ctx.module_context.platforms
    function = kernel.implementation(platforms, types_of(ctx.avals_in))
    return mlir.lower_fun(lambda *arrays: list(function(*arrays)), multiple_results=True)(ctx, *operands)


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, kernel: Kernel) -> Any:
    results = kernel_p.bind(*primals, kernel=kernel)
    at = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    made = tuple(i for i, x in enumerate(results) if jax.dtypes.issubdtype(x.dtype, np.inexact))
    along: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    if made:
        derivative = kernel.tangent(at, len(primals), made)
        moved = kernel_p.bind(*primals, *(tangents[i] for i in at), kernel=derivative)
        for i, tangent in zip(made, moved, strict=True):
            along[i] = tangent
    return results, along


def _transposed(cotangents: Sequence[Any], *operands: Any, kernel: Kernel) -> list[Any]:
    if kernel.transposed is None:
        raise TypeError(f"{kernel} is not linear in its operands")
    primals = operands[: len(operands) - kernel.linear]
    given = [ad.instantiate_zeros(ct) for ct in cotangents]
    back = kernel_p.bind(*primals, *given, kernel=kernel.transposed)
    unknown = [ad.is_undefined_primal(x) for x in operands[len(primals) :]]
    return [*(None for _ in primals), *(ct if own else None for ct, own in zip(back, unknown, strict=True))]


def _mapped_over(operands: Sequence[Any], dims: Sequence[int | None], *, kernel: Kernel) -> Any:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    first, arrays = len(operands) - kernel.linear, list(operands)
    for i, d in enumerate(dims):
        if d is not None:
            arrays[i] = jnp.moveaxis(operands[i], d, 0)
        elif i >= first:
            arrays[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
    at = tuple(0 if d is not None or i >= first else None for i, d in enumerate(dims))
    results = kernel_p.bind(*arrays, kernel=kernel.mapped(at))
    return results, [0] * len(results)


mlir.register_lowering(kernel_p, _lowered)
ad.primitive_jvps[kernel_p] = _derivative
ad.primitive_transposes[kernel_p] = _transposed
batching.primitive_batchers[kernel_p] = _mapped_over
