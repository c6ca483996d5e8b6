"""Traced: a traced function that is not planned yet, as ``jax.stages.Traced``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.api.lowered import Lowered
from gshard.api.static_leaves import freed


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A traced function, as ``jax.stages.Traced``; what is not defined here is as of ``traced_by_jax()``."""

    jaxpr: Any  # the closed jaxpr over flat arguments
    in_tree: Any  # the structure of ``(positional, named)`` arguments
    out_tree: Any  # the structure of the results
    fun_name: str  # the function's name
    donated: frozenset[int]  # the flat arguments whose memory the results may take
    lowered: Callable[[], Lowered]  # goes on to the per-device program
    # gives what is said of each flat result of a pytree of shapes, None where nothing is
    out_shardings: Callable[[Any], Sequence[Any]]
    # the same function traced as a part of a program of JAX's, in which it is one equation
    traced_by_jax: Callable[[], Any]

    def lower(self, **options: Any) -> Any:
        """Goes on to the per-device program; with JAX's own options, as ``jax.export`` has, to JAX's ``Lowered``."""
        given = any(x is not None for x in options.values())
        return self.traced_by_jax().lower(**options) if given else self.lowered()

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, and the shardings that ``out_shardings`` names, in their structure."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in self.jaxpr.out_avals]
        said = self.out_shardings(jax.tree.unflatten(self.out_tree, shapes))
        shapes = [x.update(sharding=sharding) for x, sharding in zip(shapes, said, strict=True)]
        return freed(jax.tree.unflatten(self.out_tree, shapes))

    @property
    def in_avals(self) -> Any:
        """JAX's types of the arguments, in their structure."""
        return jax.tree.unflatten(self.in_tree, self.jaxpr.in_avals)

    @property
    def out_avals(self) -> Any:
        """JAX's types of the results, in their structure."""
        return jax.tree.unflatten(self.out_tree, self.jaxpr.out_avals)

    @property
    def args_info(self) -> Any:
        """Shape, dtype and whether it is donated for each argument, in their structure."""
        infos = [jax.stages.ArgInfo(a, i in self.donated) for i, a in enumerate(self.jaxpr.in_avals)]
        return jax.tree.unflatten(self.in_tree, infos)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The flat arguments that are donated."""
        return tuple(sorted(self.donated))

    @property
    def effects(self) -> Any:
        """The side effects of the function."""
        return self.jaxpr.effects

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the traced function, partitioned, for arguments without the static ones."""
        return self.traced_by_jax()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.stages.Traced, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.traced_by_jax(), name)
