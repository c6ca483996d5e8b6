"""The commands ``gshard explain``, ``gshard search`` and ``gshard prove``, and checks against baselines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from gshard.api.compiled_programs import GSHARD, STAGES, XLA, is_from_jax_jit
from gshard.api.explained import Planned, explain
from gshard.api.export import programs_in
from gshard.api.function_again import with_bound_arguments
from gshard.api.jit import Jitted, jit
from gshard.api.prove import prove
from gshard.api.search import search
from gshard.core.errors import ArgumentError, GShardError, counted
from gshard.core.jax_adapter import line_of_exception
from gshard.core.mesh import Mesh
from gshard.core.program import format_bytes
from gshard.device.machine import Machine
from gshard.explanation.compiled_source import CompiledSource
from gshard.explanation.difference import Difference, difference
from gshard.explanation.explain import Explanation
from gshard.explanation.report.data import NO_MACHINE
from gshard.explanation.report.page import page
from gshard.planning.saved_plan import SavedPlan

# Named target: what a command line names: a function, its arguments and its mesh.
#
# train.py:step --arg f32[64,512]        a function of arrays, whose shapes are given as text
# models:example                         a function without arguments that returns (function, *arguments)

_DTYPES = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


class TargetError(GShardError):
    """What the command line names does not exist, or is no function that can be explained."""


def play_devices(count: int) -> None:
    """Has JAX play so many devices on the CPU, unless it has begun: a target may ask for devices that do not exist."""
    told: dict[str, Any] = jax.config.values
    with contextlib.suppress(RuntimeError):  # it has begun
        jax.config.update("jax_num_cpu_devices", max(count, told.get("jax_num_cpu_devices") or 0))
        if not told.get("jax_platforms"):
            jax.config.update("jax_platforms", "cpu")


def place_of(error: BaseException) -> str | None:
    """The user's line that an error comes from; of a syntax error the line that cannot be read."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    return line_of_exception(error)


def _not_imported(module: str, error: ImportError) -> TargetError:
    """The error for a target that is not there, or that imports what is not there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None
    if not frames or frames[-1].filename in (__file__, importlib.__file__):
        return TargetError(f"{module!r} cannot be imported: {error}.", hint="Run this in the module's folder.")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return TargetError(f"{at} imports {error.name!r}, which is not installed here.")
    return TargetError(f"{module!r} cannot be imported: {error}.", at)


def load(text: str, shapes: Sequence[str] = (), stages: tuple[type, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """The function and its arguments."""
    found = named(text, () if shapes else stages)
    if isinstance(found, stages) and not shapes:
        return found, ()
    if shapes:
        arguments = tuple(map(shape_of, shapes))
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            raise TargetError(
                f"{text!r} cannot be called with {counted(len(shapes), 'argument')}: {error}.",
                got=f"parameters: {', '.join(p.name for p in _parameters(found)) or 'none'}",
                hint="Give one --arg for each parameter.",
            ) from error
        except ValueError:
            pass  # it has no signature
        return found, arguments
    needed = [
        p.name for p in _parameters(found) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(
            f"{text!r} needs arguments, and none are given.",
            got=f"parameters: {', '.join(needed)}",
            hint="Give each as --arg f32[64,512], or name a function that returns (function, *arguments).",
        )
    made = found()
    if isinstance(made, stages):
        return made, ()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        kind = "a tuple that begins with no function" if isinstance(made, tuple) else type(made).__name__
        raise TargetError(
            f"{text!r} returned {kind}{'' if isinstance(made, tuple) else ', not a tuple'}.",
            hint="A function without parameters must return a tuple: (function, *arguments).",
        )
    return made[0], made[1:]


def named(text: str, stages: tuple[type, ...] = ()) -> Any:
    """What a command line names: a function, or a stage of one."""
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise TargetError(f"{text!r} names no function.", hint="Write module:function or file.py:function.")
    try:
        found: Any = _module(module)
    except ImportError as error:
        raise _not_imported(module, error) from error
    except GShardError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise TargetError(
            f"{module!r} fails when it is imported: {what}.",
            place_of(error),
            hint="Keep what runs under `if __name__ == '__main__':`." if isinstance(error, SystemExit) else None,
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = ", ".join(n for n in getattr(found, "__dict__", ()) if not n.startswith("_"))[:200]
            raise TargetError(f"{module!r} has no {name!r}.", got=f"it has: {near}")
        found = getattr(found, part)
    if not callable(found) and not isinstance(found, stages):
        raise TargetError(f"{text!r} is a {type(found).__name__} and no function.")
    return found


def need_folder(path: Path, option: str) -> None:
    """Refuses a file whose folder does not exist, before the work that it would hold."""
    if not path.parent.is_dir():
        raise TargetError(
            f"there is no folder {path.parent}.", got=f"{option} {path}", hint="Make it, or name another file."
        )


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.exists():
            raise ImportError(f"there is no file {name}")
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, "a path that ends in .py has a loader"
        assert spec.loader is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _parameters(f: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return []


def shape_of(text: str) -> jax.ShapeDtypeStruct:
    """Reads ``f32[64,512]``.

    >>> shape_of("bf16[8,4]")
    ShapeDtypeStruct(shape=(8, 4), dtype=bfloat16)
    """
    match = re.fullmatch(r"(pred|s|u|f|bf|c)(\d*)\[((?:\d+(?:,\d+)*)?)\]", text.replace(" ", ""))
    try:
        assert match is not None, "it has the form"
        dtype = jnp.dtype(_DTYPES[match[1]] + match[2])
    except (AssertionError, TypeError) as error:
        raise TargetError(
            f"{text!r} is not understood.",
            hint="Write f32[64,512]. Types are f32, bf16, f16, f64, s32, s8, u8, c64, pred.",
        ) from error
    return jax.ShapeDtypeStruct(tuple(int(n) for n in match[3].split(",") if n), dtype)


def mesh_of(text: str) -> Mesh:
    """Reads ``8`` or ``data=4,model=2`` as a mesh that is only planned for.

    >>> print(mesh_of("data=4,model=2"))
    data=4 model=2
    """
    if re.fullmatch(r"\d+", text):
        return Mesh.abstract(devices=int(text))
    if re.fullmatch(r"\w+=\d+([, ]\w+=\d+)*", text):
        return Mesh.abstract(**{name: int(n) for name, n in (axis.split("=") for axis in re.split("[, ]", text))})
    raise TargetError(f"{text!r} is no mesh.", hint="Write 8 or data=4,model=2.")


# Baselines: compares a program with an earlier version (``gshard explain --baseline``).

_GROWTH = 1.01  # of FLOPs and memory: less is no change of the plan
EXPORTED = ".zip"  # what gshard.export wrote
FILES = (".json", EXPORTED)  # files of explanations
SIGNALLED = 128  # exit status after a signal, with its number added, as shells have it


class CheckFailed(Exception):
    """More is sent, computed or held than is allowed; the text says what and where."""


def explanation_in(path: str) -> dict[str, Any]:
    """What ``--json`` wrote, or that of the first program of an exported file."""
    return dict(_programs(path)[0]["explanation"])


def _programs(path: str) -> list[dict[str, Any]]:
    """The programs of a file that ``gshard.export`` or ``--json`` wrote."""
    hint = "Write one with: gshard explain TARGET --json FILE, or with gshard.export."
    try:
        if path.endswith(EXPORTED):
            return programs_in(path)
        return [{"explanation": json.loads(Path(path).read_text("utf-8"))}]
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    except (ValueError, KeyError, BadZipFile) as error:
        raise TargetError(f"{path} is no explanation: {error}.", hint=hint) from error


def end_search(stopped: int | None, peak: int, limit: float) -> None:
    """Ends the command that searched: as a signal asks for, if one ended the search; else by what fits."""
    if stopped is not None:
        raise SystemExit(SIGNALLED + stopped)
    if too_large := over_memory(peak, limit):
        raise CheckFailed(too_large)


def over_memory(peak: int, memory: float) -> str:
    """What does not fit; nothing if it fits."""
    does_not = f"this does not fit: a device would hold {format_bytes(peak)}, and may"
    return "" if peak <= memory else f"{does_not} {format_bytes(int(memory))}."


def check(data: Mapping[str, Any], baseline: Mapping[str, Any] | None, machine: str | None) -> None:
    """Refuses a program that does more than ``--baseline``, and one that does not fit ``--machine``."""
    failures = [
        "" if baseline is None else over_baseline(baseline, data),
        ""
        if machine is None or data["machine"] is None
        else over_memory(data["totals"]["peak"], data["machine"]["memory"]),
    ]
    if any(failures):
        raise CheckFailed("\n\n".join(filter(None, failures)))


def over_baseline(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What grew, and the difference, if a program sends more bytes than it did, or computes or holds a percent more."""
    found = difference(before, after)
    grown = []
    if found.after.sent > found.before.sent:
        grown.append("bytes sent")
    if found.after.flops > _GROWTH * found.before.flops:
        grown.append("FLOPs of a device")
    if found.after.peak > _GROWTH * found.before.peak:
        grown.append("peak memory of a device")
    return f"{' and '.join(grown)} grew since the baseline.\n{found}" if grown else ""


FAILED = 3  # exit status


def _own_mesh(f: Any, arguments: Any) -> Mesh | None:
    """The mesh that a function from ``gshard.jit`` or ``jax.jit`` has, or on which an argument is placed."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    placed = next((s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1), None)
    return jit(f).options.mesh or (None if placed is None else Mesh.of(placed))


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
    stages: tuple[type, ...] = (),
) -> Any:
    """The target and its arguments, loaded where there are devices for the mesh, and 8 for one of its own."""
    play_devices(max(8, _mesh(options.mesh, machine).size))
    return load(target, options.arg, stages)


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    print(f"wrote {path}")


def _explain(options: argparse.Namespace) -> None:
    baseline = None if options.baseline is None else explanation_in(options.baseline)
    if options.after is not None:
        return check(_compare(options), baseline, options.machine)
    if options.target.endswith(EXPORTED):
        return check(_exported(options), baseline, None)
    found, took = _explained(options, options.target)
    reasons = _reasons(found, options)
    data = found.data(options.machine, options.seconds)
    on = None if data["machine"] is None else found.cost(options.machine).machine
    print(found.format(machine=on, seconds=options.seconds), NO_MACHINE if on is None else found.cost(on), sep="\n\n")
    for reason in reasons:
        print(reason)
    if isinstance(found.source, CompiledSource) and found.source.again is not None:
        data["lists"] += _try_changes(found, options.seconds, took)
    _write_data(options, data)
    check(data, baseline, options.machine)


def _compare(options: argparse.Namespace) -> dict[str, Any]:
    """Prints what changed from the first target to the second, and returns the data of the second."""
    targets = options.target, options.after
    names = ("machine", "mesh") if all(target.endswith(FILES) for target in targets) else ()
    _refuse(options, names, "two programs are compared", targets)
    before, after = (
        explanation_in(target) if target.endswith(FILES) else _explained(options, target)[0].data(options.machine, 0.0)
        for target in targets
    )
    _write_data(options, after, dataclasses.replace(difference(before, after), names=targets))
    return after


def _exported(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the programs of an exported file, and returns the data of the first."""
    _refuse(options, ("machine", "mesh", "partitioner", "memory_limit"), "the file has the plan", [options.target])
    programs = _programs(options.target)
    for program in programs:
        versions = f"gshard {program['gshard']}, JAX {program['jax']}"
        print(f"{program['file']}: for {program['platform']}, exported with {versions}", program["text"], "", sep="\n")
    _write_data(options, programs[0]["explanation"])
    return dict(programs[0]["explanation"])


def _refuse(options: argparse.Namespace, names: Sequence[str], where: str, targets: Sequence[str]) -> None:
    """Refuses options that need the function itself: these and some others."""
    if given := [f"--{name}" for name in ("arg", "why", "plan", *names) if getattr(options, name)]:
        raise ArgumentError(
            f"{', '.join(given)}: not where {where}.",
            got=" ".join(targets),
            hint="Explain the function itself. What it explains is written with --json, and compared as files.",
        )


def _reasons(found: Explanation, options: argparse.Namespace) -> list[str]:
    """Why arrays are sharded as they are, and what a call would take if they were not (``--why``)."""
    reasons = []
    for name in options.why:
        others = found.instead(name, options.machine) or ["no mark can say otherwise: it has one, or enters a body"]
        reasons.append("\n  instead ".join([f"\n{found.why(name)}", *map(str, others)]))
    return reasons


def _explained(options: argparse.Namespace, target: str) -> tuple[Explanation, float]:
    """The explanation of what the command line names, and the seconds that it took."""
    names = ("machine", "partitioner", "memory_limit")
    how: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name)}
    how |= {"plan": SavedPlan.load(options.plan)} if options.plan else {}
    f, arguments = Path(target), tuple[Any, ...]()
    if target.endswith(".py") or not f.is_file():
        f, arguments = _load(options, target, options.machine, stages=STAGES)
    elif options.arg:
        raise ArgumentError("a compiled program takes no --arg.", got=target)
    if options.mesh:
        how["mesh"] = mesh_of(options.mesh)
    elif options.plan:
        how["mesh"] = Mesh.abstract(**dict(how["plan"].axes))
    elif not isinstance(f, (Path, *STAGES)):
        inner, given = with_bound_arguments(f, arguments, {})
        own, is_by_jax = _own_mesh(inner, given), is_from_jax_jit(inner) and not isinstance(inner, Jitted)
        if own is not None and options.partitioner != GSHARD and is_by_jax:
            play_devices(own.size)  # ``explain`` sees where the arguments are placed
        elif options.partitioner != XLA:
            how["mesh"] = own or _mesh(None, options.machine)
    if isinstance(f, Planned) and options.partitioner != XLA:  # it was planned for a machine
        how.pop("machine", None)
    began = time.monotonic()
    return explain(f, *arguments, **how), time.monotonic() - began


def _try_changes(found: Explanation, seconds: float, took: float) -> list[tuple[str, str, list[str]]]:
    """Prints which constraints and other shardings help a function that XLA compiles, and returns the lists.

    ``took`` is how long that took to compile: changes are tried if there is time for one.
    """
    if took > seconds:
        more = "tries sharding constraints inside, and other shardings of arguments"
        print(f"\nCompiling takes {took:.0f} s: --seconds {10 * took:.0f} {more}.")
        return []
    advice = found.advise(seconds, progress=None)
    print("", advice, sep="\n")
    return [("tried", *advice.lines)]


def _write_data(options: argparse.Namespace, data: dict[str, Any], against: Difference | None = None) -> None:
    """Prints the difference, and writes the page and the data of an explanation where that is asked for."""
    if against is not None:
        print(f"\n{against}\n")
    if options.html:
        _write(options.html, page(data if against is None else {**data, "difference": against.data()}))
    if options.json:
        _write(options.json, json.dumps(data))


def _search(options: argparse.Namespace) -> None:
    f, arguments = _load(options, options.target, options.machine)
    mesh = int(options.mesh) if (options.mesh or "").isdecimal() else options.mesh and mesh_of(options.mesh)
    asked: dict[str, Any] = {
        "mesh": mesh or _own_mesh(f, arguments) or 8,
        "machine": options.machine,
        "memory_limit": options.memory_limit,
        "budget_seconds": options.budget_seconds,
        "progress": True,
    }
    found = search(f, *arguments, **asked)
    print(found)
    if options.marks:
        print(f"\n{found.marks}")
    for reason in _reasons(found.explain(), options) if options.why else ():
        print(reason)
    if options.html:
        print(f"wrote {found.html(options.html)}")
    if options.save:
        found.save(options.save)
        print(f"wrote {options.save}: gshard.jit(f, mesh=..., plan=gshard.SavedPlan.load('{options.save}')) runs it")
    end_search(found.stopped, found.cost.peak, found.best.limit)


def _prove(options: argparse.Namespace) -> None:
    f, arguments = _load(options, options.target, None)
    like = None
    if options.like is not None:
        like = named(options.like)
        if not _parameters(like) and arguments:
            like, _ = load(options.like)
    elif not is_from_jax_jit(f):
        f = jit(f, mesh=_mesh(options.mesh, None))
    proof = prove(f, *arguments, like=like, dtypes=options.dtypes)
    if not proof:
        raise CheckFailed(str(proof))
    print(proof)


_RUNS = {"explain": _explain, "search": _search, "prove": _prove}


def run(options: argparse.Namespace) -> int:
    """Runs one command with the options of a command line (``__main__.parsed``), and returns the exit status."""
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
