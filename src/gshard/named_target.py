"""Named target: what a command line names: a function, its arguments and its mesh.

train.py:step --arg f32[64,512]        a function of arrays, whose shapes are given as text
models:example                         a function without arguments that returns (function, *arguments)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import GShardError, counted
from gshard.core.jax_adapter import line_of_exception
from gshard.core.mesh import Mesh
from gshard.core.paths import parameters_of
from gshard.tracing.by_jax import name_of

_DTYPES = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
_SHORT = {long: short for short, long in _DTYPES.items()} | {"i": "s", "b": "pred"}


class TargetError(GShardError):
    """What the command line names does not exist, or is no function that can be explained."""


def play_devices(count: int, force: bool = False) -> None:
    """Has JAX play so many devices on the CPU, unless it has begun: a target may ask for devices that do not exist."""
    told: dict[str, Any] = jax.config.values
    with contextlib.suppress(RuntimeError):  # it has begun
        jax.config.update("jax_num_cpu_devices", max(count, told.get("jax_num_cpu_devices") or 0))
        if force or not told.get("jax_platforms"):
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


def named(text: str) -> Any:
    """What a command line names, a function in general."""
    found = _named(text)
    if not callable(found):
        raise TargetError(f"{text!r} is a {type(found).__name__} and no function.")
    return found


def load(text: str, shapes: Sequence[str] = (), stages: tuple[type, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """The function and its arguments."""
    found = _named(text)
    if isinstance(found, stages) and not shapes:
        return found, ()
    if not callable(found):
        raise TargetError(f"{text!r} is a {type(found).__name__} and no function.")
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


def _named(text: str) -> Any:
    """What a text names, of any type."""
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
            near = (
                ", ".join(n for n in vars(found) if not n.startswith("_"))[:200] if hasattr(found, "__dict__") else ""
            )
            raise TargetError(f"{module!r} has no {name!r}.", got=f"it has: {near}")
        found = getattr(found, part)
    return found


def need_folder(path: Path, option: str) -> None:
    """Refuses a file whose folder does not exist, before the work that it would hold."""
    if not path.parent.is_dir():
        raise TargetError(
            f"there is no folder {path.parent}.", got=f"{option} {path}", hint="Make it, or name another file."
        )


TOLD = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def told_by(f: Callable[..., Any], given: int, options: argparse.Namespace) -> dict[str, Any]:
    """The static and donated arguments of a command line, as ``jit`` takes them."""
    made = {name: getattr(options, name) for name in TOLD}
    for option, number in ((f"--{name.replace('_', '-')}", n) for name in TOLD[::2] for n in made[name] or ()):
        if not 0 <= number < given:
            names = list(parameters_of(f))
            told = f", {' and '.join([', '.join(names[:-1]), names[-1]] if len(names) > 1 else names)}" if names else ""
            raise TargetError(
                f"{option} {number}: {name_of(f)} has {counted(given, 'argument')}{told}.",
                hint="Arguments are counted from 0.",
            )
    return made


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
            f"{text!r} is not understood{_meant(text)}", hint="Types are f32, bf16, f16, f64, s32, s8, u8, c64, pred."
        ) from error
    return jax.ShapeDtypeStruct(tuple(int(n) for n in match[3].split(",") if n), dtype)


def _meant(text: str) -> str:
    """What a shape with a type in other words should be."""
    match = re.fullmatch(r"([a-z]+)(\d*)[\[(]((?:\d+(?:,\d+)*)?),?[\])]?", text.replace(" ", ""))
    short = match and (_SHORT.get(match[1]) or (match[1] if match[1] in _DTYPES else None))
    return f": {short}{match[2]}[{match[3]}]?" if match and short else "."


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
