"""The commands: ``gshard explain``, ``search``, ``configure``, ``plan`` and ``calibrate``.

The exit status is 0; 1 after an error that is the user's to mend; 2 after one in the options themselves; 3 if
``explain`` found more than ``--fail-above`` or ``--baseline`` allows, or if what ``search`` or ``plan`` found does
not fit; 130 after Ctrl-C and 143 after SIGTERM, which end a search with the best plan so far.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gshard.api.compiled_programs import STAGES
from gshard.api.explained import explain
from gshard.api.export import export_plan
from gshard.api.jit import jit
from gshard.api.jitted import Jitted
from gshard.api.search import search
from gshard.baselines import SIGNALLED, CheckFailed, check_fits, check_sent, end_search, explanation_in, limit_of
from gshard.command_options import PRINTED
from gshard.compiled_command import is_dump, mesh_of_arguments, of_dump, of_function
from gshard.configure_command import run_configure
from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.explanation.difference import Difference, difference
from gshard.explanation.explain import Explanation
from gshard.explanation.report.page import page
from gshard.export_command import export_to, form_of
from gshard.moe.models import ModelError
from gshard.named_target import TOLD, TargetError, load, mesh_of, need_folder, place_of, play_devices, told_by
from gshard.plan_command import plan
from gshard.planning.saved_plan import SavedPlan
from gshard.xla.calibrate import calibrate
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.compiled_report import NO_MACHINE
from gshard.xla_programs.tried_changes import Tried

FAILED = 3  # exit status


def _own_mesh(f: Any, arguments: Any) -> Mesh | None:
    """The mesh that a function from ``gshard.jit`` or ``jax.jit`` has, or on which an argument is placed."""
    return jit(f).options.mesh or mesh_of_arguments(arguments)


def _mesh(mesh: str | None, machine: str | None) -> Mesh:
    """The mesh that was asked for; without one the machine's devices, or 8."""
    if mesh:
        return mesh_of(mesh)
    machine = machine or ""
    return mesh_of(str(Machine.of(machine).size) if ":" in machine or machine.endswith(".json") else "8")


def _load(
    options: argparse.Namespace,
    target: str,
    machine: str | None,
    force: bool = False,
    stages: tuple[type, ...] = (),
) -> Any:
    """The target and its arguments, loaded where there are devices for the mesh, and 8 for one of its own."""
    play_devices(max(8, _mesh(options.mesh, machine).size), force)
    return load(target, options.arg, stages)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    print(f"wrote {path}")


def _explain(options: argparse.Namespace) -> None:
    with_xla = options.against == "xla"
    paths = (None if with_xla else options.against, options.baseline)
    before, baseline = (None if path is None else explanation_in(path) for path in paths)
    limit = None if options.fail_above is None else limit_of(options.fail_above)
    if is_dump(options.target):
        _tell_compiled(options, of_dump(options), before, baseline, limit)
        return
    # XLA compiles for devices that exist.
    f, arguments = _load(options, options.target, options.machine, force=with_xla, stages=STAGES)
    began = time.monotonic()
    if (compiled := of_function(f, arguments, options)) is not None:
        _tell_compiled(options, compiled, before, baseline, limit, time.monotonic() - began)
        return
    saved = options.plan and SavedPlan.load(options.plan)
    own = None if options.mesh or isinstance(f, STAGES) else _own_mesh(f, arguments)
    mesh = own or _mesh(options.mesh, options.machine)
    if saved and not options.mesh:
        mesh = Mesh.abstract(**dict(saved.axes))
    on = dict(mesh.axes) if with_xla and mesh.devices is None else mesh
    how: dict[str, Any] = {
        "mesh": on, "machine": options.machine, "memory_limit": options.memory_limit, "plan": saved,
        "finite": options.finite, **told_by(f, len(arguments), options),
    }  # fmt: skip
    found = explain(f, *arguments, partitioner=options.partitioner, **({} if isinstance(f, STAGES) else how))
    data = found.data(options.machine, options.seconds)
    print(found.format(tensors=0, collectives=8) if options.html else found)
    print(f"\n{found.verdict(options.machine, options.seconds)}\n\n{found.cost(options.machine)}")
    for name in options.why:
        others = found.instead(name, options.machine) or ["no mark can say otherwise: it has one, or enters a body"]
        compared = f"\n{found.costs(name)}" if found.choice is not None else ""
        print("\n  instead ".join([f"\n{found.why(name)}{compared}", *map(str, others)]))
    against = found.against_xla(options.machine) if with_xla else None if before is None else difference(before, data)
    _write_data(options, data, against)
    if options.trace:
        print(f"wrote {found.trace(options.trace, options.machine)}: open it in ui.perfetto.dev")
    check_sent(data, limit, baseline)


def _tell_compiled(
    options: argparse.Namespace,
    found: CompiledExplanation,
    before: dict[str, Any] | None,
    baseline: dict[str, Any] | None,
    limit: int | None,
    took: float = 0.0,
) -> None:
    """Prints and writes the explanation of what XLA compiled; other arguments as ``_explain`` reads them.

    ``took`` is how long that took to compile: other shardings are tried if there is time for one.
    """
    if options.trace:
        found.cost()  # refuses a program without a machine before anything is printed
    data = found.data()
    print(found.format(collectives=8) if options.html else found)
    print(f"\n{NO_MACHINE if found.machine is None else found.cost()}")
    tried: list[Tried] = []
    if found.again is not None and took <= options.seconds:
        tried = [found.try_shardings(options.seconds / 2), found.try_constraints(options.seconds / 2, progress=None)]
        print("", *tried, sep="\n")
        data = found.data(tried=tried)
    elif found.again is not None:
        more = "tries other shardings of arguments, and sharding constraints inside"
        print(f"\nCompiling takes {took:.0f} s: --seconds {10 * took:.0f} {more}.")
    _write_data(options, data, None if before is None else difference(before, data))
    if options.trace:
        print(f"wrote {found.trace(options.trace)}: open it in ui.perfetto.dev")
    check_sent(data, limit, baseline)


def _write_data(options: argparse.Namespace, data: dict[str, Any], against: Difference | None) -> None:
    """Prints the difference, and writes the page and the data of an explanation where that is asked for."""
    if against is not None:
        print(f"\n{against}\n")
    if options.html:
        _write(options.html, page(data if against is None else {**data, "difference": against.data()}))
    if options.json:
        _write(options.json, json.dumps(data))


def _search(options: argparse.Namespace) -> None:
    file = None if options.export == PRINTED else options.export
    form = form_of(file, options.export_as) if options.export or options.export_as else None
    f, arguments = _load(options, options.target, options.machine)
    mesh = int(options.mesh) if (options.mesh or "").isdecimal() else options.mesh and mesh_of(options.mesh)
    asked: dict[str, Any] = {
        "mesh": mesh or _own_mesh(f, arguments) or 8,
        "machine": options.machine,
        "memory_limit": options.memory_limit,
        "budget_seconds": options.budget_seconds,
        "finite": options.finite,
        "progress": True,
        "compile_best": options.compile_best,
        **told_by(f, len(arguments), options),
    }
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
        _write(options.patch, patch)
        if "\n@@" in patch:
            print(f"git apply {options.patch}")
        else:
            print("no mark in it that git could apply")
    if form is not None:
        print(f"\n{export_to(export_plan(found), file, form)}")
    if options.save:
        found.save(options.save)
        print(
            f"wrote {options.save}: gshard.jit(f, mesh=..., plan=gshard.SavedPlan.load({str(options.save)!r})) runs it"
        )
    end_search(found.stopped, found.cost.peak, found.best.limit)


def _plan(options: argparse.Namespace) -> None:
    if ":" in options.config:
        _plan_function(options)
        return
    for name in ("finite", "arg", "mesh", *TOLD):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise TargetError(f"{option} is for a function of yours.", got=options.config, hint=f"Leave {option} out.")
    try:
        found = plan(
            options.config,
            options.machine,
            remat=options.remat,
            memory_limit=options.memory_limit,
            search_plan=options.search,
            compiled=options.compile,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except ModelError as error:
        own = "A function of yours is file.py:function or module:function."
        raise TargetError(error.what, hint=f"{error.hint}\n  {own}") from error
    print(found)
    check_fits(found.cost.peak, found.cost.machine.memory)
    if refused := found.compiled.get("does not fit"):
        raise CheckFailed(f"as compiled this does not fit: {refused}")


def _plan_function(options: argparse.Namespace) -> None:
    """Tells whether a user's function fits a machine, and what bounds a call there."""
    if options.search or options.compile or options.remat is not None:
        raise TargetError(
            "--search, --compile and --remat are for the paper's models.",
            got=options.config,
            hint="For a function of yours: gshard search TARGET, or jax.checkpoint and --memory-limit.",
        )
    f, arguments = _load(options, options.config, options.machine)
    asked = {"memory_limit": options.memory_limit, "finite": options.finite, **told_by(f, len(arguments), options)}
    if isinstance(f, Jitted) and any(asked.values()):
        own = " and ".join(name for name, value in asked.items() if value)
        raise TargetError(f"{options.config!r} is jitted already.", hint=f"Give its own gshard.jit the {own}.")
    given = mesh_of(options.mesh) if options.mesh else _own_mesh(f, arguments)
    machine = Machine.of(options.machine, None if given is None else given.size)
    mesh = given or mesh_of(str(machine.size))
    jitted = f.on(mesh) if isinstance(f, Jitted) else jit(f, mesh=mesh, **asked)
    found: Explanation = explain(jitted, *arguments, machine=machine)
    cost = found.cost(machine)
    memory = cost.memory
    rows = [
        ("arguments", memory.arguments),
        ("results", memory.results - memory.shared),
        ("temporaries", memory.temporaries),
    ]
    lines = [
        f"{found.name} on {machine}, mesh {mesh}",
        "",
        *str(found.verdict(machine)).splitlines(),
        "",
        "memory of a device",
    ]
    lines += [f"  {what:<14} {format_bytes(n):>12}" for what, n in rows]
    lines += ["", "time of a call"]
    lines += [f"  {what:<20} {1e3 * s:>10.3f} ms  {100 * s / cost.seconds:5.1f} %" for what, s in cost.by_kind.items()]
    print("\n".join(lines))
    check_fits(cost.peak, machine.memory)


def _calibrate(options: argparse.Namespace) -> None:
    machine = calibrate()
    print(machine)
    if options.out:
        machine.dump(options.out)
        print(f"wrote {options.out}")


_RUNS = {"explain": _explain, "search": _search, "configure": run_configure, "plan": _plan, "calibrate": _calibrate}


def run(options: argparse.Namespace) -> int:
    """Runs one command with the options of a command line (``command_options.parsed``), and returns the exit status."""
    try:
        for name, value in vars(options).items():
            if isinstance(value, Path):
                need_folder(value, f"--{name}")
        _RUNS[options.command](options)
    except KeyboardInterrupt:
        print("Ctrl-C ended this, and nothing was found yet.", file=sys.stderr)
        return SIGNALLED + signal.SIGINT
    except CheckFailed as failure:
        print(failure, file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # what read this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        print(_told(error), file=sys.stderr)
        return 1
    return 0


def _told(error: Exception) -> str:
    """One clear error: gshard's unchanged, others with the user's line."""
    if isinstance(error, GShardError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename:
        return f"{type(error).__name__}: {error.filename}: {error.strerror}."
    where = place_of(error)
    at = "".join([f"\n  at {where}" if where else "", *(f"\n  {note}" for note in getattr(error, "__notes__", ()))])
    return f"{type(error).__name__}: {error}{at}\n  gshard --traceback {' '.join(sys.argv[1:2])} ... shows more."
