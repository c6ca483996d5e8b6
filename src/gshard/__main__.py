"""The command line: ``gshard explain``, ``search``, ``plan`` and ``calibrate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshard.analysis.calibrate import calibrate
from gshard.api.explained import explain
from gshard.api.jit import Jitted
from gshard.api.search import search
from gshard.core.errors import ArgumentError, GShardError
from gshard.planning import plan
from gshard.target import load, mesh_of


def _explain(options: argparse.Namespace) -> None:
    f, arguments = load(options.target, options.arg)
    mesh = mesh_of(options.mesh) if options.mesh else None
    if mesh is None and not isinstance(f, Jitted):
        mesh = mesh_of("8")
    found = explain(f, *arguments, mesh=mesh)
    if options.html:
        print(f"wrote {found.html(options.html, options.machine)}")
    if options.json:
        options.json.write_text(json.dumps(found.data(options.machine)), "utf-8")
        print(f"wrote {options.json}")
    if not options.html and not options.json:
        print(found)
        print(f"\n{found.cost(options.machine)}")


def _search(options: argparse.Namespace) -> None:
    f, arguments = load(options.target, options.arg)
    mesh = int(options.mesh) if (options.mesh or "").isdecimal() else options.mesh and mesh_of(options.mesh)
    asked: dict[str, Any] = {
        "mesh": mesh if mesh or isinstance(f, Jitted) else 8,
        "machine": options.machine,
        "memory_limit": options.memory_limit,
        "budget_seconds": options.seconds,
        "donate_argnums": options.donate or None,
        "on_better": lambda plan: print(f"{plan.name}: {plan.cost}", file=sys.stderr),
    }
    if options.over == "layout":
        if of_plans := [f"--{name}" for name in ("why", "marks", "patch", "html", "save") if getattr(options, name)]:
            raise ArgumentError(
                f"--over layout finds a table, and {', '.join(of_plans)} would tell of a plan.",
                way_out="Leave one of them out.",
            )
        print(search(f, *arguments, over="layout", **asked))
        return
    found = search(f, *arguments, **asked)
    print(found)
    if options.marks:
        print(f"\n{found.marks}")
    for what in options.why:
        print("\n".join(["", *found.why(what)]))
    if options.html:
        print(f"wrote {found.html(options.html)}")
    if options.patch:
        patch = found.patch()
        options.patch.write_text(patch, "utf-8")
        can = "\n@@" in patch
        print(f"wrote {options.patch}: {f'git apply {options.patch}' if can else 'no mark in it that git could apply'}")
    if options.save:
        found.save(options.save)
        print(
            f"wrote {options.save}: gshard.jit(f, mesh=..., plan=gshard.Recorded.load({str(options.save)!r})) runs it"
        )


def _plan(options: argparse.Namespace) -> None:
    found = plan(
        options.config,
        options.topology,
        remat=options.remat,
        memory_limit=options.memory_limit,
        search_plan=options.search,
        compiled=options.compile,
    )
    print(found)


def _calibrate(options: argparse.Namespace) -> None:
    machine = calibrate()
    print(machine)
    if options.out:
        machine.dump(options.out)
        print(f"wrote {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gshard", description="See how a JAX program is partitioned, and what it costs."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("explain", help="how a function is partitioned, why, and what it costs")
    command.add_argument("target", help="module:function or file.py:function")
    command.add_argument(
        "--arg", action="append", default=[], metavar="f32[64,512]", help="an argument; repeat for each"
    )
    command.add_argument("--mesh", help="8 or data=4,model=2; the devices need not exist (default: 8)")
    command.add_argument("--machine", help="v3:32x32, h100:4x8, cpu:8 or a file of gshard calibrate")
    command.add_argument("--html", type=Path, help="write the report as one page")
    command.add_argument("--json", type=Path, help="write everything the page shows")
    command.set_defaults(run=_explain)

    command = commands.add_parser(
        "search", help="the plan that takes least time on a machine, and how near the best it is"
    )
    command.add_argument("target", help="module:function or file.py:function")
    command.add_argument(
        "--arg", action="append", default=[], metavar="f32[64,512]", help="an argument; repeat for each"
    )
    command.add_argument(
        "--mesh", help="data=4,model=2, or a number, which tries all shapes; they need not exist (default: 8)"
    )
    command.add_argument("--machine", help="v3:32x32, h100:4x8, cpu:8 or a file of gshard calibrate")
    command.add_argument(
        "--memory-limit", metavar="70GiB", help="what a device may hold (default: the machine's memory)"
    )
    command.add_argument(
        "--donate", action="append", type=int, default=[], metavar="0", help="an argument whose memory results take"
    )
    command.add_argument(
        "--over",
        choices=("plan", "layout"),
        default="plan",
        help="what is found: a plan, or a table of names and axes (default: plan)",
    )
    command.add_argument("--seconds", type=float, help="how long to search on each mesh, about")
    command.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="TEXT",
        help="what else could be: arguments or lines that contain this",
    )
    command.add_argument("--marks", action="store_true", help="say the plan in few marks, each tried; takes a while")
    command.add_argument(
        "--patch", type=Path, metavar="marks.diff", help="write these marks into the source files, as a diff"
    )
    command.add_argument("--html", type=Path, help="write the report of the plan as one page")
    command.add_argument("--save", type=Path, metavar="plan.json", help="write the plan, for gshard.jit(plan=...)")
    command.set_defaults(run=_search)

    command = commands.add_parser("plan", help="whether a model of the paper fits a machine, and what a step takes")
    command.add_argument("config", help='a model of Table 1, such as "MoE(128E, 12L)"')
    command.add_argument(
        "--topology", required=True, help="v3:32x32 names chips; v3 takes as many as there are experts"
    )
    command.add_argument(
        "--remat", action=argparse.BooleanOptionalAction, default=None, help="recompute pairs of layers"
    )
    command.add_argument(
        "--memory-limit", metavar="14GiB", help="choose what to recompute so that a device holds no more"
    )
    command.add_argument(
        "--search", action="store_true", help="search for the plan, without the model's marks (gshard search)"
    )
    command.add_argument("--compile", action="store_true", help="compile with libtpu (pip install libtpu) and compare")
    command.set_defaults(run=_plan)

    command = commands.add_parser("calibrate", help="measure the machine at hand")
    command.add_argument("--out", type=Path, help="where to write it, for --machine")
    command.set_defaults(run=_calibrate)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        the exit status: 0, or 1 after an error that is the user's to mend.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except GShardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of a file that was to be written
        print(f"{error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
