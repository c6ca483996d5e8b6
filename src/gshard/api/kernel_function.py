"""kernel: a function in two implementations, a fast one that runs and a plain one that gshard reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.language.kernel_primitive import Kernel, kernel_p, shown, types_of

P = ParamSpec("P")
R = TypeVar("R")


@overload
def kernel(
    fast: Callable[P, R],
    *,
    like: Callable[..., Any],
    platforms: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> KernelFunction[P, R]: ...


@overload
def kernel(
    *,
    like: Callable[..., Any],
    platforms: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[P, R]], KernelFunction[P, R]]: ...


def kernel(
    fast: Callable[..., Any] | None = None,
    *,
    like: Callable[..., Any],
    platforms: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """A function that runs as ``fast`` and is partitioned as ``like``.

    ``fast`` is opaque: a Pallas kernel, an FFI call, cuDNN. ``like`` computes the same in JAX operators. gshard finds
    from ``like`` which dimensions are independent, which are summed over and which must be whole, proves it for each
    split, and runs ``fast`` on shards. Outside of ``gshard.jit`` the function is ``fast``, also under ``jax.jit``,
    ``jax.vmap`` and ``jax.grad``.

    Both must be pure functions of pytrees of arrays that compute the same for arrays of all sizes: gshard calls them on
    arrays of a shard's size. ``gshard.testing.check_kernel`` checks this on examples.

    Derivatives: ``jax.vjp`` of ``fast`` (so a ``jax.custom_vjp`` inside ``fast`` is used), partitioned as ``jax.vjp``
    of ``like``. It recomputes ``fast`` to have its residuals; to save them, write forward and backward kernels and
    join them by ``jax.custom_vjp``. If ``fast`` has no derivative, that of ``like`` runs.

    Args:
        fast: the implementation that runs. Without it, ``kernel`` returns a decorator for it.
        like: the implementation that gshard reads. It takes the same arguments and returns arrays of the same shapes
            and dtypes in the same structure. Marks and sharding constraints in it are refused.
        platforms: where ``fast`` runs, such as ``"tpu"`` or ``("cuda", "rocm")``; elsewhere ``like`` runs. By default
            ``fast`` runs everywhere.
        static_argnums, static_argnames: arguments that are hashable values, not arrays; both functions get them.

    Returns:
        a function with the arguments and results of ``fast``.

    Raises:
        ArgumentError: when the function is called: ``like`` returns something else than ``fast``, an argument is not
            an array, or ``like`` uses a traced array from outside.

    >>> import gshard
    >>> softmax = kernel(jax.nn.softmax, like=lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True))
    >>> x = jnp.ones((8, 4))
    >>> explanation = gshard.explain(lambda x: softmax(gshard.split(x, 0, 4)), x, mesh=gshard.Mesh.abstract(data=4))
    >>> explanation.total_bytes
    0
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    where = (platforms,) if isinstance(platforms, str) else None if platforms is None else tuple(platforms)
    if not callable(like):
        raise ArgumentError(
            f"like is a {type(like).__name__}, not a function.", user_line(), hint="Give the function in JAX operators."
        )

    def of(fast: Callable[..., Any]) -> KernelFunction[..., Any]:
        if not callable(fast):
            hint = "Write gshard.kernel(fast, like=plain)."
            raise ArgumentError(f"a {type(fast).__name__} is not a function.", user_line(), hint=hint)
        return KernelFunction(fast, like, where, numbers, names)

    return of if fast is None else of(fast)


class KernelFunction(Generic[P, R]):
    """What ``gshard.kernel`` returns.

    Attributes:
        fast: the implementation that runs.
        like: the implementation that gshard reads.
        platforms: where ``fast`` runs; None for everywhere.
    """

    def __init__(
        self,
        fast: Callable[P, R],
        like: Callable[..., Any],
        platforms: tuple[str, ...] | None,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
    ) -> None:
        functools.update_wrapper(self, fast)
        self.fast, self.like, self.platforms = fast, like, platforms
        self._static = static_argnums, static_argnames
        self._kernels: dict[Hashable, Kernel] = {}
        self._results: dict[Hashable, Any] = {}  # their structures

    @without_our_frames
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the kernel."""
        numbers, names = self._static
        at = {n % max(len(args), 1) for n in numbers}
        fixed = {i: x for i, x in enumerate(args) if i in at}
        fixed_names = {name: x for name, x in kwargs.items() if name in names}
        static = tuple(self._key_of(where, x) for where, x in (*fixed.items(), *sorted(fixed_names.items())))
        given = [x for i, x in enumerate(args) if i not in fixed]
        named = {name: x for name, x in kwargs.items() if name not in names}
        leaves, tree = jax.tree_util.tree_flatten_with_path((given, named))
        arrays = [self._array(x, path) for path, x in leaves]

        def flat(function: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
            def call(*arrays: Any) -> Any:
                rest, named = jax.tree.unflatten(tree, arrays)
                following = iter(rest)
                every = [fixed[i] if i in fixed else next(following) for i in range(len(args))]
                return function(*every, **named, **fixed_names)

            return call

        key = static, tree
        if key not in self._kernels:
            fast, plain = flat(self.fast), flat(self.like)
            self._kernels[key] = Kernel(str(self), _leaves_of(fast), _leaves_of(plain), self.platforms)
        types = types_of(arrays)
        if (key, types) not in self._results:
            self._results[key, types] = self._checked(flat, types)
        with jax.named_scope(str(self)):
            results = kernel_p.bind(*arrays, kernel=self._kernels[key])
        return jax.tree.unflatten(self._results[key, types], results)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return str(getattr(self.fast, "__name__", type(self.fast).__name__))

    def _key_of(self, where: object, x: Any) -> Hashable:
        """A static argument as a part of a key."""
        try:
            hash(x)
        except TypeError as error:
            said = f"Non-hashable static arguments are not supported: argument {where} of {self}."
            hint = "Give a tuple or another value that is hashable and does not change."
            raise ArgumentError.like(ValueError(), said, user_line(), f"a {type(x).__name__}", hint) from error
        # Zeros of both signs are equal, and a NaN is not equal to itself; written out they are what they are.
        return where, type(x), repr(x) if isinstance(x, float | complex) else x

    def _array(self, x: Any, path: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return jnp.asarray(x)
        raise ArgumentError(
            f"an argument of kernel {self} is not an array.",
            user_line(),
            f"a {type(x).__name__} at {jax.tree_util.keystr(path)}",
            "Name it in static_argnames or static_argnums of gshard.kernel.",
        )

    def _checked(self, flat: Callable[..., Any], types: Any) -> Any:
        """The structure of the results."""
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
        with no_mesh_set():
            fast, plain = (jax.eval_shape(flat(function), *shapes) for function in (self.fast, self.like))
        (made, found), (wanted, structure) = jax.tree.flatten(fast), jax.tree.flatten(plain)
        if str(found) != str(structure) or types_of(made) != types_of(wanted):
            raise ArgumentError(
                f"the two functions of kernel {self} return different types.",
                user_line(),
                f"for {shown(types)} fast returns {_text(fast)}, and like {_text(plain)}",
                "Both must return arrays of the same shapes and dtypes, in the same structure.",
            )
        return structure


def _leaves_of(function: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
    return lambda *arrays: jax.tree.leaves(function(*arrays))


def _text(tree: Any) -> str:
    def leaf(x: Any) -> str:
        return shown(types_of([x]))

    return str(jax.tree.map(leaf, tree)).replace("'", "")
