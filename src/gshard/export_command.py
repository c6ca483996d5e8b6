"""Export command: ``gshard search --export``: writes a plan in the form that is asked for, or prints it.

The form follows from the suffix of the file (``plan.diff``, ``plan.mlir``) or from ``--export-as``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gshard.core.errors import ArgumentError, known_names
from gshard.xla_programs.exported_plan import ExportedPlan

# Each form makes text, or bytes, of a plan and the path of arguments that was given with it.
_FORMS: Mapping[str, Callable[[ExportedPlan, str], str | bytes]] = {
    "shardings": lambda plan, below: str(plan),
    "patch": lambda plan, below: plan.patch(),
    "rules": lambda plan, below: str(plan.logical_axis_rules()),
    "layout-map": lambda plan, below: str(plan.layout_map(below=below)),
    "metadata": lambda plan, below: str(plan.partition_metadata(below)),
    "stablehlo": lambda plan, below: plan.stablehlo(),
    "jax-export": lambda plan, below: bytes(plan.jax_export().serialize()),
}
_SUFFIXES = {".diff": "patch", ".patch": "patch", ".mlir": "stablehlo", ".jax_export": "jax-export"}
_WITH_PATH = ("layout-map", "metadata")


def form_of(file: Path | None, form: str | None) -> tuple[str, str]:
    """The form in which a plan is exported, and the path of arguments that it is about.

    Args:
        file: where to; None prints it.
        form: what ``--export-as`` gives: ``patch``, ``layout-map:params``.

    Raises:
        ArgumentError: there is no such form, it takes no path, or it is bytes and would be printed.

    >>> form_of(Path("plan.mlir"), None), form_of(None, "metadata:state/0")
    (('stablehlo', ''), ('metadata', 'state/0'))
    """
    name, _, below = (form or "").partition(":")
    name = name or _SUFFIXES.get(file.suffix if file is not None else "", "shardings")
    if name not in _FORMS:
        raise ArgumentError(f"a plan has no form {name!r}.", hint=known_names(name, _FORMS, "--export-as takes"))
    if below and name not in _WITH_PATH:
        raise ArgumentError(f"--export-as {name} takes no path of arguments.", got=form, hint=f"Write {name}.")
    if name == "jax-export" and file is None:
        raise ArgumentError("--export-as jax-export writes bytes.", hint="Name a file: --export plan.jax_export.")
    return name, below


def export_to(plan: ExportedPlan, file: Path | None, form: tuple[str, str]) -> str:
    """Writes a plan, and returns what to print: the form itself, or where it was written with what XLA makes of it.

    Args:
        plan: the plan.
        file: where to; None prints it.
        form: what ``form_of`` gave.
    """
    name, below = form
    made = _FORMS[name](plan, below)
    if file is None:
        assert isinstance(made, str), "bytes are not printed"
        return made
    if isinstance(made, bytes):
        file.write_bytes(made)
    else:
        file.write_text(made if made.endswith("\n") else f"{made}\n", "utf-8")
    return f"wrote {file}: {str(plan).partition(chr(10))[0]}"
