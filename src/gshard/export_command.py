"""Export command: ``gshard search --export``: writes a plan in the form that is given, or prints it.

The form follows from the suffix of the file (``plan.mlir``) or from ``--export-as``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gshard.core.errors import ArgumentError, known_names
from gshard.xla_programs.exported_plan import ExportedPlan

_FORMS: Mapping[str, Callable[[ExportedPlan], str | bytes]] = {
    "shardings": str,
    "stablehlo": lambda plan: plan.stablehlo(),
    "jax-export": lambda plan: bytes(plan.jax_export().serialize()),
}
_SUFFIXES = {".mlir": "stablehlo", ".jax_export": "jax-export"}


def form_of(file: Path | None, form: str | None) -> str:
    """The form in which a plan is exported.

    >>> form_of(Path("plan.mlir"), None), form_of(None, None)
    ('stablehlo', 'shardings')
    """
    name = form or _SUFFIXES.get(file.suffix if file is not None else "", "shardings")
    if name not in _FORMS:
        raise ArgumentError(f"a plan has no form {name!r}.", hint=known_names(name, _FORMS, "--export-as takes"))
    if name == "jax-export" and file is None:
        raise ArgumentError("--export-as jax-export writes bytes.", hint="Name a file: --export plan.jax_export.")
    return name


def export_to(plan: ExportedPlan, file: Path | None, form: str) -> str:
    """Writes a plan, and returns what to print: the form itself, or where it was written with what XLA makes of it."""
    made = _FORMS[form](plan)
    if file is None:
        assert isinstance(made, str), "bytes are not printed"
        return made
    if isinstance(made, bytes):
        file.write_bytes(made)
    else:
        file.write_text(made if made.endswith("\n") else f"{made}\n", "utf-8")
    return f"wrote {file}: {str(plan).partition(chr(10))[0]}"
