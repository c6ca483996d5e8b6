"""Partition metadata: writes a plan as the metadata of Flax's initializers.

    up/kernel: nnx.with_partitioning(init, (None, "model"))

``nnx.get_partition_spec`` and ``flax.linen.get_partition_spec`` of a model with such initializers give the plan's
shardings.
"""

from __future__ import annotations

from collections.abc import Mapping

from gshard.xla_programs.exported_arguments import ExportedArgument
from gshard.xla_programs.exported_rows import ExportedRows, RowExport


def partition_metadata(export: RowExport, arrays: Mapping[str, ExportedArgument]) -> ExportedRows:
    """The entry for each dimension of the arrays that are split, by their paths, checked.

    Args:
        export: the plan.
        arrays: by path.
    """
    rows = [(path, tuple(a.spec)) for path, a in arrays.items() if any(a.axes)]
    code = "\n".join(f"{path}: with_partitioning(init, {entries})" for path, entries in rows)
    return export.checked(rows, code or "no array is split", {a: a.spec for a in arrays.values()})
