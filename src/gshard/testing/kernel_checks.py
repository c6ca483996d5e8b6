"""Kernel checks: checks that the two functions of a ``gshard.kernel`` compute the same, whole and on shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.api.kernel_function import KernelFunction
from gshard.core.errors import ArgumentError, RuleError
from gshard.core.jax_adapter import user_line
from gshard.language.kernel_primitive import kernel_p
from gshard.testing.rule_checks import are_close, check_rule, numbers_of


def check_kernel(
    kernel: KernelFunction[..., Any],
    *args: Any,
    mesh: Any = None,
    most: int | None = None,
    tolerance: float = 1e-5,
    gradient: bool = True,
    **kwargs: Any,
) -> tuple[str, ...]:
    """Checks that the fast function of a kernel computes what the plain one computes, whole and on shards.

    gshard proves of the plain function that it may be split. It cannot prove that the fast function computes the same.

    Args:
        kernel: what ``gshard.kernel`` returned. Its fast function must run on this computer: write a Pallas kernel with
            ``interpret=True`` for a test on CPU.
        args: its arrays: numbers that vary in sign, dimensions that the mesh divides and some that it does not.
        kwargs: its static arguments.
        mesh: devices to simulate, as ``gshard.jit`` takes them or an abstract mesh; by default 2 x 3 of them.
        most: check no more than so many splits, drawn with a fixed seed.
        tolerance: relative and absolute.
        gradient: whether to check the gradient with respect to all arguments of floating-point numbers, too.

    Returns:
        the splits that were checked, as text; those of the gradient after those of the kernel.

    Raises:
        RuleError: the two functions, or a split, compute something else; with the first element that differs.
        ArgumentError: this is no kernel.

    >>> import gshard
    >>> double = gshard.kernel(lambda x: x + x, like=lambda x: 2 * x)
    >>> check_kernel(double, np.float32([1, -2, 3]), mesh=2)
    ('a@devices', 'a@devices', 'a@devices')
    """
    if not isinstance(kernel, KernelFunction):
        hint = "Give what gshard.kernel(fast, like=plain) returns."
        raise ArgumentError(f"check_kernel takes a kernel, not {type(kernel).__name__}.", user_line(), hint=hint)

    def value(function: Callable[..., Any], *arrays: Any) -> Any:
        return function(*arrays, **kwargs)

    def slope(function: Callable[..., Any], *arrays: Any) -> Any:
        leaves, tree = jax.tree.flatten(arrays)
        at = [i for i, x in enumerate(leaves) if _is_float(x)]

        def weighed(some: list[Any]) -> Any:
            every = list(leaves)
            for i, x in zip(at, some, strict=True):
                every[i] = x
            results = jax.tree.leaves(value(function, *jax.tree.unflatten(tree, every)))
            return sum(jnp.sum(jnp.sin(x)) for x in results if _is_float(x))

        return jax.grad(weighed)([leaves[i] for i in at])

    checked: list[str] = []
    has_gradient = gradient and any(map(_is_float, jax.tree.leaves(args)))
    for compute, what in ((value, ""), (slope, "the gradient: "))[: 2 if has_gradient else 1]:
        _compare(kernel, what, compute, args, tolerance)
        of_kernel = functools.partial(compute, kernel)
        checked += check_rule(of_kernel, *args, primitive=kernel_p, mesh=mesh, most=most, tolerance=tolerance)
    return tuple(checked)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _compare(
    kernel: KernelFunction[..., Any], what: str, compute: Callable[..., Any], arguments: Any, tolerance: float
) -> None:
    fast, plain = (jax.tree.leaves(jax.jit(compute, static_argnums=0)(f, *arguments)) for f in (kernel, kernel.like))
    for i, (got, want) in enumerate(zip(fast, plain, strict=True)):
        first, second = numbers_of(got), numbers_of(want)
        right = are_close(first, second, tolerance)
        if not right.all():
            at = tuple(map(int, np.argwhere(~right)[0]))
            raise RuleError(
                f"the two functions of kernel {kernel} do not compute the same.",
                user_line(),
                f"{what}result {i}: element {list(at)} is {first[at]} of fast, and {second[at]} of like "
                f"({(~right).sum()} of {right.size} differ)",
                "Both must compute the same for arrays of all sizes; tolerance= allows for rounding.",
            )
