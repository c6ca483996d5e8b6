"""The ``m4`` command: ``python -m m4 demo``, ``m4 train --help``.

It only starts `m4.command_line`: where one of the packages that this needs is not installed, that is told in one
sentence.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

EXTRA = {
    "orbax": "m4", "polib": "m4", "rich": "m4", "safetensors": "m4", "sacrebleu": "m4", "sentencepiece": "m4",
    "tyro": "m4",
}  # fmt: skip
"""Module -> the extra of gshard that has it."""
MISSING = 2


def _loaded() -> Any:
    """The module that has the commands; None if a package is missing, which has been told then."""
    try:
        return importlib.import_module("m4.command_line")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(
            f"m4: the package {package!r} is not installed; m4 needs an extra of gshard: pip install "
            f'"gshard[{EXTRA[package]}]" (in a clone: pip install -e ".[{EXTRA[package]}]").',
            file=sys.stderr,
        )
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; see `m4.command_line.main`."""
    found = _loaded()
    return MISSING if found is None else int(found.main(arguments))


def run() -> None:
    """The entry point of the ``m4`` script."""
    found = _loaded()
    if found is None:
        sys.exit(MISSING)
    found.run()


if __name__ == "__main__":
    run()
