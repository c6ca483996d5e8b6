"""Defines the context of an equation: the compute type and XLA metadata that JAX's context managers set.

    with set_xla_metadata(_scheduling_group_id=3):
        y = x * 2                                    # frontend attributes of this operation
    with compute_on("device_host"):
        z = jnp.sin(y)                               # runs on the host

Each equation of a program keeps its context, and gshard binds the equation under this context on every device.
Equations that gshard adds, such as collectives, have no context: the user did not annotate them.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The context of an equation.

    >>> Context(metadata=(("a", 1), ("b", 2))).inside(Context("device_host", (("b", 3), ("c", 4))))
    Context(compute_type='device_host', metadata=(('a', 1), ('b', 2), ('c', 4)))
    >>> print(Context("device_host", (("b", 3),)))
    {compute_on=device_host, b=3}
    """

    compute_type: str | None = None  # the argument of ``compute_on``; None outside of ``compute_on``
    metadata: tuple[tuple[str, Any], ...] = ()  # keys and values of ``set_xla_metadata``, sorted by key

    def __bool__(self) -> bool:
        return self.compute_type is not None or bool(self.metadata)

    def inside(self, outer: Context) -> Context:
        """This context within the context of an enclosing call. Where both set a value, the inner value applies."""
        if not self or not outer or self == outer:
            return self or outer
        metadata = {**dict(outer.metadata), **dict(self.metadata)}
        return Context(self.compute_type or outer.compute_type, tuple(sorted(metadata.items())))

    def __str__(self) -> str:
        compute_on = () if self.compute_type is None else (("compute_on", self.compute_type),)
        return f"{{{', '.join(f'{key}={value}' for key, value in (*compute_on, *self.metadata))}}}"


NO_CONTEXT = Context()
