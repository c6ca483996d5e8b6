"""Context: what JAX's context managers add to an equation (compute type, XLA metadata).

    with set_xla_metadata(_scheduling_group_id=3):
        y = x * 2                                    # frontend attributes of this operation
    with compute_on("device_host"):
        z = jnp.sin(y)                               # runs on the host

Each equation of a program keeps its own, and is bound under it on every device. What gshard adds, such as collectives,
is not: it is no part of what the user annotated.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The context of an equation.

    Attributes:
        compute_type: what ``compute_on`` was given; None where the equation runs as any other.
        metadata: keys and values of ``set_xla_metadata``, sorted by key.

    >>> Context(metadata=(("a", 1), ("b", 2))).inside(Context("device_host", (("b", 3), ("c", 4))))
    Context(compute_type='device_host', metadata=(('a', 1), ('b', 2), ('c', 4)))
    >>> print(Context("device_host", (("b", 3),)))
    {compute_on=device_host, b=3}
    """

    compute_type: str | None = None
    metadata: tuple[tuple[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return self.compute_type is not None or bool(self.metadata)

    def inside(self, outer: Context) -> Context:
        """The context of an equation in the body of a call that has another: its own values come first."""
        if not self or not outer or self == outer:
            return self or outer
        metadata = {**dict(outer.metadata), **dict(self.metadata)}
        return Context(self.compute_type or outer.compute_type, tuple(sorted(metadata.items())))

    def __str__(self) -> str:
        on = () if self.compute_type is None else (("compute_on", self.compute_type),)
        return f"{{{', '.join(f'{k}={v}' for k, v in (*on, *self.metadata))}}}"


NO_CONTEXT = Context()
