"""Defines the parameters and per-device programs of equations of ``custom_partitioning`` (``user_partition``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gshard.core.jax_adapter import closed


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """The parameters of an equation of ``custom_partitioning``, without its jaxpr."""

    # partition, infer, propagate: the user's functions; ``infer`` and ``propagate`` may be None
    partition: Callable[..., Any]
    infer: Callable[..., Any] | None
    propagate: Callable[..., Any] | None
    decoded: bool  # whether the functions receive ``NamedSharding`` objects
    sharding_rule: Any  # the user's sharding rule, or None
    static: tuple[Any, ...]  # the static arguments, which precede the others
    kinds: tuple[type, ...]  # the types of the static arguments
    in_tree: Any  # in_tree, out_tree: the pytree structures of operands and results
    out_tree: Any
    in_types: tuple[tuple[tuple[int, ...], Any], ...]  # in_types, out_types: shapes and dtypes of operands and results
    out_types: tuple[tuple[tuple[int, ...], Any], ...]

    @staticmethod
    def of(params: Mapping[str, Any]) -> Partitioned:
        """The relevant parameters of an equation."""
        body, _ = closed(params["call"])
        static = tuple(params["static_args"])
        return Partitioned(
            params["partition"],
            params["infer_sharding_from_operands"],
            params["propagate_user_sharding"],
            bool(params["decode_shardings"]),
            params["sharding_rule"],
            static,
            tuple(map(type, static)),
            params["in_tree"],
            params["out_tree"],
            tuple((tuple(v.aval.shape), v.aval.dtype) for v in body.invars),
            tuple((tuple(v.aval.shape), v.aval.dtype) for v in body.outvars),
        )

    @property
    def types(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shapes and dtypes of operands, then of results."""
        return (*self.in_types, *self.out_types)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """The user's per-device program for some shardings."""

    run: Callable[..., list[Any]]  # runs the program on one device's parts, with axes replaced by atoms
    sent: int  # bytes that each device sends
    over: frozenset[str]  # the atoms over which it communicates
    # the program without its last collective, if this collective combines all results over the same atoms; otherwise
    # None
    unfinished: Unfinished | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Unfinished:
    """A per-device program with unreduced results."""

    program: DeviceProgram  # the program
    monoid: str  # the monoid that combines the results
    atoms: frozenset[str]  # the atoms over which the results are unreduced
