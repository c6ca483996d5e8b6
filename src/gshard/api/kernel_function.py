"""kernel: a function in two implementations, a fast one that runs and a plain one that gshard reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.language.kernel_primitive import Kernel, kernel_p, shown, types_of
from gshard.tracing.trace import name_of

P = ParamSpec("P")
R = TypeVar("R")


def kernel(
    fast: Callable[P, R], *, like: Callable[..., Any], platforms: str | Sequence[str] | None = None
) -> KernelFunction[P, R]:
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
        fast: the implementation that runs.
        like: the implementation that gshard reads. It takes the same arguments and returns arrays of the same shapes
            and dtypes in the same structure. Marks and sharding constraints in it are refused.
        platforms: where ``fast`` runs, such as ``"tpu"`` or ``("cuda", "rocm")``; elsewhere ``like`` runs. By default
            ``fast`` runs everywhere.

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
    for function in (fast, like):
        if not callable(function):
            hint = "Write gshard.kernel(fast, like=plain)."
            raise ArgumentError(f"a {type(function).__name__} is not a function.", user_line(), hint=hint)
    where = (platforms,) if isinstance(platforms, str) else None if platforms is None else tuple(platforms)
    return KernelFunction(fast, like, where)


class KernelFunction(Generic[P, R]):
    """What ``gshard.kernel`` returns.

    Attributes:
        fast: the implementation that runs.
        like: the implementation that gshard reads.
        platforms: where ``fast`` runs; None for everywhere.
    """

    def __init__(self, fast: Callable[P, R], like: Callable[..., Any], platforms: tuple[str, ...] | None) -> None:
        functools.update_wrapper(self, fast)
        self.fast, self.like, self.platforms = fast, like, platforms
        self._kernels: dict[Hashable, Kernel] = {}
        self._results: dict[Hashable, Any] = {}  # their structures

    @without_our_frames
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the kernel."""
        leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arrays = [self._array(x, path) for path, x in leaves]

        def flat(function: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
            def call(*arrays: Any) -> Any:
                args, kwargs = jax.tree.unflatten(tree, arrays)
                return function(*args, **kwargs)

            return call

        if tree not in self._kernels:
            fast, plain = flat(self.fast), flat(self.like)
            self._kernels[tree] = Kernel(str(self), _leaves_of(fast), _leaves_of(plain), self.platforms)
        types = types_of(arrays)
        if (tree, types) not in self._results:
            self._results[tree, types] = self._checked(flat, types)
        with jax.named_scope(str(self)):
            results = kernel_p.bind(*arrays, kernel=self._kernels[tree])
        return jax.tree.unflatten(self._results[tree, types], results)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return name_of(self.fast)

    def _array(self, x: Any, path: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return jnp.asarray(x)
        raise ArgumentError(
            f"an argument of kernel {self} is not an array.",
            user_line(),
            f"a {type(x).__name__} at {jax.tree_util.keystr(path)}",
            "Bind what is no array before: gshard.kernel(functools.partial(fast, causal=True), like=...).",
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
    return str(jax.tree.map(lambda x: shown(types_of([x])), tree)).replace("'", "")
