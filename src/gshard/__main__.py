"""The command line: the options of ``gshard explain``, ``search`` and ``prove``, and what runs them.

An option of a command has the name of the argument of ``gshard.jit``, ``explain``, ``search`` or ``prove`` that it is.
What a command needs is imported once its options are read: ``gshard --help`` takes no time.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from gshard.core.errors import known_names
from gshard.core.time_budget import TRIAL_SECONDS


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line."""
    command = next((text for text in arguments if not text.startswith("-")), "")
    parser, commands = _parser()
    if command and command not in commands:
        parser.error(f"there is no command {command!r}. {known_names(command, commands, 'Commands are')}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = dict.fromkeys(re.findall(r"--[a-z-]+", commands[command].format_usage()))
        parser.error(f"gshard {command} takes no {' '.join(unknown)}. {known_names(unknown[0], known, 'Options are')}")
    return options


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of all command lines, and those of the options of each command."""
    parser = argparse.ArgumentParser(
        prog="gshard", description="See how a JAX program is partitioned, and what it costs."
    )
    shown = f"gshard {version('gshard')} (jax {version('jax')}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=shown)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (add_options, about, epilog) in _COMMANDS.items():
        add_options(commands.add_parser(name, help=about, epilog=epilog))
    return parser, commands.choices


_FITS = "exit status: 0; 1 an error; 2 wrong options; 3 it does not fit into the memory of a device"
_MACHINES = "v3:32x32, h100:4x8 or cpu:8"


def _target(command: argparse.ArgumentParser, more: str = "") -> None:
    command.add_argument("target", help=f"module:function or file.py:function{more}")
    command.add_argument(
        "--arg", action="append", default=[], metavar="f32[64,512]", help="an argument; repeat for each"
    )


def _add_explain(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _target(
        command,
        ", or a file with the text of a compiled program (also .gz), or that gshard.export wrote; "
        "of two targets also what --json wrote",
    )
    add("after", nargs="?", help="another one, or --json of one: show what changed from the first to this one")
    add("--mesh", help="8 or data=4,model=2; they need not exist (default: the function's, that of --machine, or 8)")
    add("--machine", help=_MACHINES)
    add(
        "--partitioner",
        choices=("gshard", "xla"),
        help="who partitions a function from jax.jit (default: xla if its arguments are placed on several devices and "
        "none of --mesh, --memory-limit and --plan is given; else gshard)",
    )
    add("--memory-limit", metavar="70GiB", help="what a device may hold: jit(memory_limit=...)")
    add("--plan", type=Path, metavar="plan.json", help="explain this plan, which gshard search --save wrote")
    add("--html", type=Path, metavar="page.html", help="write the report as one page")
    add("--json", type=Path, metavar="plan.json", help="write everything the page shows")
    _why(command)
    add(
        "--seconds",
        type=float,
        default=TRIAL_SECONDS,
        help="how long to try marks that would lower what is sent, or for XLA's partitioner other shardings of "
        "arguments and sharding constraints inside, half of the time each (default: 10)",
    )
    add(
        "--baseline", metavar="main.json", help="fail if bytes sent, FLOPs or memory grew since this --json was written"
    )


def _why(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="NAME",
        help="the reasons of one array's sharding, and what a call would take with another",
    )


def _add_search(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _target(command)
    add(
        "--mesh",
        help="data=4,model=2, or a number, which tries all shapes; they need not exist (default: the function's, or 8)",
    )
    add("--machine", help=_MACHINES)
    add("--memory-limit", metavar="70GiB", help="what a device may hold (default: the machine's memory)")
    add(
        "--budget-seconds",
        type=float,
        help="how long the whole search may take (default: as its size asks for, 300 at most)",
    )
    _why(command)
    add("--marks", action="store_true", help="say the plan in few marks, each tried; takes a while")
    add("--html", type=Path, help="write the report of the plan as one page")
    add("--save", type=Path, metavar="plan.json", help="write the plan, for gshard.jit(plan=...)")


def _add_prove(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _target(command)
    add("--like", metavar="module:plain", help="the plain function (default: the function itself, without its mesh)")
    add("--mesh", help="8 or data=4,model=2, for a function without --like and without a mesh (default: 8)")
    add(
        "--dtypes", choices=("any", "kept"), default="any",
        help="kept: a conversion to a narrower float dtype counts as a function of its own (default: any)",
    )  # fmt: skip


_COMMANDS = {
    "explain": (
        _add_explain,
        "how a function is partitioned, why, and what it costs",
        "exit status: 0; 1 an error; 2 wrong options; 3 more than --baseline allows, or it does not fit --machine",
    ),
    "search": (
        _add_search,
        "the fastest plan that is found for a machine, and how near the best of a simplified model it is",
        _FITS,
    ),
    "prove": (
        _add_prove,
        "whether a sharded function computes what a plain one does, exactly",
        "exit status: 0 equal; 1 an error; 2 wrong options; 3 different, or undecided",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    status: int = importlib.import_module("gshard.commands").run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
