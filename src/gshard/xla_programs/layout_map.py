r"""Layout map: writes a plan as rows of ``keras.distribution.LayoutMap``.

    layout_map["^encoder/layer_\d+/mlp/kernel$"] = (None, "model")

A key is a regular expression of the paths of variables. Versions of Keras compare it with the whole path or with a part
of it, take the first row that matches or refuse a second. So keys are anchored and escaped, and each path that the plan
splits has one row; numbers stand for each other where that is true of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.xla_programs.exported_arguments import ExportedArgument
from gshard.xla_programs.exported_rows import ExportedRows, RowExport

Entry = str | None
_SHOWN = 8  # arrays in a message


def layout_map(export: RowExport, arrays: Mapping[str, ExportedArgument], *, nearest: bool = False) -> ExportedRows:
    """The rows, checked.

    Args:
        export: the plan.
        arrays: the variables by Keras's path.
        nearest: whether a dimension that is split over several axes may be split over the largest only.

    Raises:
        ShardingError: a dimension is split over several axes, which Keras has no words for, without ``nearest``.
    """
    sizes = dict(export.made.mesh.axes)
    entries: dict[str, tuple[Entry, ...]] = {}
    several = [f"{path}: {a}" for path, a in arrays.items() if any(len(axes) > 1 for axes in a.axes)]
    if several and not nearest:
        raise ShardingError(
            "Keras splits a dimension over one axis of a mesh, and the plan splits some over several.",
            user_line(),
            "\n    ".join(["", *several[:_SHOWN], *[f"and {len(several) - _SHOWN} more"] * (len(several) > _SHOWN)]),
            "Search on a mesh with one axis in their place, or write nearest=True, which takes the largest axis.",
        )
    for path, a in arrays.items():
        entries[path] = tuple(max(axes, key=lambda axis: sizes[axis]) if axes else None for axes in a.axes)
    rows = _rows(entries)
    given = {a: PartitionSpec(*_looked_up(dict(rows), path, len(a.value.shape))) for path, a in arrays.items()}
    axes = tuple(sizes)
    code = [
        f"device_mesh = keras.distribution.DeviceMesh({tuple(sizes.values())}, {axes})",
        "layout_map = keras.distribution.LayoutMap(device_mesh)",
        *(f'layout_map[r"{key}"] = {entry}' for key, entry in rows),
    ]
    return export.checked(rows, "\n".join(code), given)


def _rows(entries: Mapping[str, tuple[Entry, ...]]) -> list[tuple[str, tuple[Entry, ...]]]:
    """A row for all paths that differ in numbers only if they are split alike, and else one for each that is split."""
    alike: dict[str, dict[str, tuple[Entry, ...]]] = {}
    for path, entry in entries.items():
        alike.setdefault(_pattern(path), {})[path] = entry
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for pattern, members in alike.items():
        if len(set(members.values())) == 1 and len(members) > 1:
            rows += [(pattern, entry) for entry in list(members.values())[:1] if any(entry)]
        else:
            rows += [(f"^{_escaped(path)}$", entry) for path, entry in members.items() if any(entry)]
    return rows


def _pattern(path: str) -> str:
    r"""A pattern of the path with any numbers in place of its own.

    >>> _pattern("model/dense_1.a/kernel")
    '^model/dense_\\d+\\.a/kernel$'
    """
    return f"^{'[0-9]+'.join(map(_escaped, re.split('[0-9]+', path)))}$".replace("[0-9]+", r"\d+")


def _escaped(text: str) -> str:
    return re.escape(text).replace('"', r"\x22")


def _looked_up(rows: Mapping[str, tuple[Entry, ...]], path: str, ndim: int) -> tuple[Entry, ...]:
    """What Keras gives a variable: the row that is the path itself, or that matches it; whole without one."""
    found = [entry for key, entry in rows.items() if re.search(key, path)]
    assert len(found) < 2, f"{path} has one row at most"
    return found[0] if found else (None,) * ndim
