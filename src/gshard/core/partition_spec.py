"""Converts JAX's ``PartitionSpec`` to the entries of a mark and to text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError

_KINDS = {"sum": "add", "max": "max", "min": "min"}


def entries_of(spec: PartitionSpec, line: str = "") -> tuple[Any, ...]:
    """The entries of a ``PartitionSpec`` without unreduced or reduced axes."""
    for kind in ("unreduced", "reduced"):
        if getattr(spec, kind, None):
            raise ShardingError(
                f"{kind} axes cannot be asked for here.",
                line,
                str(spec),
                "Mark the value inside of the function: x = gshard.shard(x, P(..., unreduced={...})).",
            )
    return words_of(spec, line)[0]


def words_of(spec: PartitionSpec, line: str = "") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The entries of a ``PartitionSpec``, and its unreduced and reduced axes as attributes of a ``Mark``.

    >>> words_of(PartitionSpec("data", None, unreduced={"model"}))
    (('data', None), {'unreduced': ('model',)})
    """
    for entry in spec.partitions:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        names = entry if isinstance(entry, tuple | list) else (entry,)
        if not all(isinstance(n, str) for n in names):
            raise ShardingError(
                f"{entry!r} is no name of a mesh axis.",
                line,
                str(spec),
                "Give for each dimension an axis name, a tuple of them, None (whole) or P.UNCONSTRAINED (open).",
            )
    attributes: dict[str, Any] = {}
    for word in ("unreduced", "reduced"):
        if axes := getattr(spec, word, None):
            attributes[word] = tuple(sorted(map(str, axes)))
    if "unreduced" in attributes:
        kind = str(getattr(spec, "unreduced_kind", None) or "sum").rsplit(".", 1)[-1].lower()  # newer JAX has several
        if kind not in _KINDS:
            raise ShardingError(
                f"parts cannot be combined by {kind!r}.", line, str(spec), f"Use one of {', '.join(_KINDS)}."
            )
        if _KINDS[kind] != "add":
            attributes["monoid"] = _KINDS[kind]
    return tuple(spec.partitions), attributes


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a ``PartitionSpec``; none of None and of ``UNCONSTRAINED``.

    >>> [axes_of_entry(entry) for entry in PartitionSpec("data", None, ("x", "y"))]
    [('data',), (), ('x', 'y')]
    """
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple | list) else ()


def spec_of_axes(axes_of_dims: Iterable[Sequence[str]]) -> PartitionSpec:
    """The ``PartitionSpec`` that splits each dimension over these axes."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else tuple(axes) or None for axes in axes_of_dims))


def text_of_spec(
    entries: Iterable[Any], axes: Iterable[tuple[str, Collection[str]]] = (), unreduced_kind: str = ""
) -> str:
    """The source text of a ``PartitionSpec``."""
    arguments = [repr(entry) for entry in entries]
    arguments += [f"{keyword}={{{', '.join(map(repr, names))}}}" for keyword, names in axes if names]
    if unreduced_kind:
        arguments.append(f"unreduced_kind={unreduced_kind}")
    return f"P({', '.join(arguments)})"
