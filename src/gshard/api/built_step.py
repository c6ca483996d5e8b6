"""Built step: what a builder of training steps returned for some keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gshard.api.jit import Jitted
from gshard.api.signature import Parameters
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.memory_kinds import PINNED_HOST
from gshard.search.builder_choices import text_of
from gshard.search.state_on_host import with_state_on_host
from gshard.tracing.by_jax import name_of


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step with its arguments."""

    keywords: Mapping[str, Any]  # the keywords that were chosen
    fixed: Mapping[str, Any]  # other keywords, which every call of the builder gets
    step: Callable[..., Any]  # the function
    arguments: tuple[Any, ...]  # its arguments; those of the state on the host name this memory in their shardings
    own: Mapping[str, Any]  # static and donated arguments and ``finite``, as ``gshard.jit`` takes them
    # pairs of a flat argument in the memory of the host and the flat result that replaces it
    host: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """The keywords, and where the state is."""
        return f"{text_of(self.keywords)}{', state on the host' if self.host else ''}"

    @property
    def static(self) -> tuple[int, ...]:
        """The numbers of the positional arguments that are no arrays."""
        if isinstance(self.step, Jitted):
            return ()
        named = self.own["static_argnums"], self.own["static_argnames"]
        return Parameters.of(self.step, named, (None, None)).static_numbers

    def leaves(self, arguments: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """The flat arrays of arguments, and their structure."""
        static = self.static
        leaves, tree = jax.tree.flatten([x for i, x in enumerate(arguments) if i not in static])
        return leaves, tree

    def with_leaves(self, arguments: tuple[Any, ...], leaves: list[Any], tree: Any) -> tuple[Any, ...]:
        """Arguments with other arrays."""
        static, arrays = self.static, iter(jax.tree.unflatten(tree, leaves))
        return tuple(x if i in static else next(arrays) for i, x in enumerate(arguments))

    def with_host(self, pairs: Mapping[int, int]) -> BuiltStep:
        """The same with a part of the state in the memory of the host."""
        leaves, tree = self.leaves(self.arguments)
        placed = [_on_host(x) if i in pairs else x for i, x in enumerate(leaves)]
        return dataclasses.replace(
            self,
            step=with_state_on_host(self.step, frozenset(pairs.values()), self.static),
            arguments=self.with_leaves(self.arguments, placed, tree),
            host=tuple(sorted(pairs.items())),
        )


def built_by(
    builder: Callable[..., Any], keywords: Mapping[str, Any], fixed: Mapping[str, Any], own: Mapping[str, Any]
) -> BuiltStep | None:
    """Calls a builder; None if it returns None, because there is no step for these keywords."""
    name = name_of(builder)
    try:
        made = builder(**fixed, **keywords)
    except Exception as error:
        error.add_note(f"gshard called {name}({text_of({**fixed, **keywords})})")
        raise
    if made is None:
        return None
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        kind = "a tuple that begins with no function" if isinstance(made, tuple) else type(made).__name__
        raise ArgumentError(
            f"{name} returned {kind}{'' if isinstance(made, tuple) else ', not a tuple'}.",
            user_line(),
            text_of(keywords),
            "A builder returns (step, *arguments), or None if there is no step for these keywords.",
        )
    return BuiltStep(dict(keywords), dict(fixed), made[0], made[1:], own)


def _on_host(x: Any) -> Any:
    """The type of an array in the memory of the host. A sharding that it has stays."""
    given = getattr(x, "sharding", None)
    placed = isinstance(given, jax.sharding.NamedSharding)
    sharding: Any = given if placed else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.with_memory_kind(PINNED_HOST), weak_type=weak)
