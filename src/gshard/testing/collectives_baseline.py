"""Collectives baseline: a test states that a function sends no more than a file in the repository says.

    gshard.testing.assert_no_more_collectives(jax.jit(step), (state, batch), baseline="tests/step.collectives.txt")

The file lists the collectives of the compiled program without the lines of your source, so that only a change of what
is sent changes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.keywords import keywords
from gshard.core.mesh import MeshLike
from gshard.testing.asserted_collectives import check_devices, compiled, row_lines
from gshard.testing.collective_limits import PEAK_CURE, cures_of
from gshard.testing.compiled_subject import compiled_subject
from gshard.testing.sent_record import SentRecord, as_recorded
from gshard.xla_programs.compiled_explanation import CompiledExplanation


@keywords("", "gshard.testing")
def assert_no_more_collectives(
    f: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    baseline: str | Path,
    exact: bool = False,
    tolerance: float = 0.02,
    update: bool = False,
    mesh: MeshLike = None,
) -> CompiledExplanation:
    """Checks that a function sends and holds no more than a baseline file says.

    It fails if, of a kind of collective over an axis of the mesh, more run or send more bytes than in the file, if the
    peak memory of a device is larger, or if the mesh is another one. The file is text to review in a pull request: one
    line for each collective with its kind, number, bytes, axes, array and module.

    Args:
        f, args, kwargs, mesh: as for ``assert_collectives``.
        baseline: the file. It must be there, unless ``update``.
        exact: fail on any difference, also if less is sent, or another array.
        tolerance: by which part the peak memory may differ. Numbers and bytes of collectives have no tolerance.
        update: write the file, where it differs, instead of comparing. The fixture ``collectives`` sets it with
            ``pytest --gshard-update``.

    Returns:
        the explanation of the compiled program.

    Raises:
        AssertionError: there is no such file, or the program is not as the file says. The message has the difference,
            the additional collectives with their lines and reasons, and what to do.
        ArgumentError: the file is no baseline; or as for ``assert_collectives``.

    >>> import jax.numpy as jnp, os, tempfile
    >>> from gshard.api.jit import jit
    >>> from gshard.api.marks import split
    >>> def total_of(x):
    ...     return split(x, 0, "data").sum()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file, f, x = os.path.join(folder, "total.txt"), jit(total_of, mesh={"data": 4}), jnp.zeros((8, 2))
    ...     found = assert_no_more_collectives(f, (x,), baseline=file, update=True)
    ...     assert assert_no_more_collectives(f, (x,), baseline=file, exact=True).total_bytes == found.total_bytes
    """
    __tracebackhide__ = True
    found = compiled_subject(f, args, kwargs, mesh)
    check_devices(found)
    path, now = Path(baseline), SentRecord.of(found)
    before = _read(path)
    if update:
        if before is None or before.differs(now, exact=True, tolerance=tolerance):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now.text(), "utf-8")
        return found
    if before is None:
        raise AssertionError(
            f"there is no baseline of {found.name}.\n  {path}\n"
            "  Write it with pytest --gshard-update, or with update=True. Then review it and commit it."
        )
    if differences := before.differs(now, exact, tolerance):
        raise AssertionError(_message(found, path, before, now, differences, exact))
    return found


def _read(path: Path) -> SentRecord | None:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    try:
        return SentRecord.read(text)
    except ValueError as error:
        raise ArgumentError(
            "this file is no baseline of collectives.",
            user_line(),
            got=f"{path}: {error}",
            hint="Delete it, and write it with pytest --gshard-update or update=True.",
        ) from error


def _message(
    found: CompiledExplanation,
    path: Path,
    before: SentRecord,
    now: SentRecord,
    differences: Sequence[str],
    exact: bool,
) -> str:
    more = before.differs(now, exact=False, tolerance=0.0)
    lines = [f"{compiled(found)} {'does more than' if more else 'is not as'} its baseline says", ""]
    lines += [f"  {text}" for text in differences]
    lines += ["", *difflib.unified_diff(before.body(), now.body(), str(path), "compiled now", lineterm="", n=2)]
    grown = before.grown(now, exact)
    rows = [row for row in found.collectives if as_recorded(row) in grown]
    if rows:
        lines += ["", "collectives that are new or send more, largest first", *row_lines(rows)]
    lines.append("")
    lines += cures_of(rows)
    if any(text.startswith("peak") for text in differences) and now.peak > before.peak:
        lines.append(PEAK_CURE)
    if before.jax != jax.__version__:
        lines.append(
            f"The baseline was written with jax {before.jax}, and this is jax {jax.__version__}: XLA may partition, "
            "combine and hold otherwise."
        )
    if before.platform != now.platform:
        lines.append(f"The baseline was compiled for {before.platform}, and this program for {now.platform}.")
    lines.append(
        "If this is meant, write the baseline again with pytest --gshard-update or update=True, and review it."
    )
    return "\n".join(line.rstrip() for line in lines)
