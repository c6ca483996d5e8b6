"""The command line, which imports what a command needs once its options are read: ``gshard --help`` takes no time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from gshard.command_options import parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    status: int = importlib.import_module("gshard.commands").run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
