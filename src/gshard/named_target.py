"""Named target: what a command line names: a function, its arguments and its mesh.

train.py:step --arg f32[64,512]        a function of arrays, whose shapes are given as text
models:example                         a function without arguments that returns (function, *arguments)
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import line_of_exception
from gshard.core.mesh import Mesh

_DTYPES = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


class TargetError(GShardError):
    """What the command line names does not exist, or is no function that can be explained."""


def load(text: str, shapes: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments.

    Args:
        text: ``module:name`` or ``file.py:name``; the current folder is searched too.
        shapes: arguments as text, ``f32[64,512]``.

    Raises:
        TargetError: there is nothing of this name, or its arguments are not known.
    """
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name:
        raise TargetError(f"{text!r} names no function.", hint="Write module:function or file.py:function.")
    try:
        found: Any = _module(module)
    except ImportError as error:
        raise TargetError(
            f"{module!r} cannot be imported: {error}.", hint="Run this in the module's folder."
        ) from error
    except GShardError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise TargetError(
            f"{module!r} fails when it is imported: {what}.",
            line_of_exception(error),
            hint="Keep what runs under `if __name__ == '__main__':`." if isinstance(error, SystemExit) else None,
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = (
                ", ".join(n for n in vars(found) if not n.startswith("_"))[:200] if hasattr(found, "__dict__") else ""
            )
            raise TargetError(f"{module!r} has no {name!r}.", got=f"it has: {near}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{text!r} is a {type(found).__name__} and no function.")
    if shapes:
        arguments = tuple(map(shape_of, shapes))
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            raise TargetError(
                f"{text!r} cannot be called with {len(shapes)} argument{'s' if len(shapes) > 1 else ''}: {error}.",
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
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise TargetError(
            f"{text!r} returned a {type(made).__name__}.",
            hint="A function without parameters must return a tuple: (function, *arguments).",
        )
    return made[0], made[1:]


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

    Raises:
        TargetError: it cannot be read.
    """
    match = re.fullmatch(r"(pred|s|u|f|bf|c)(\d*)\[((?:\d+(?:,\d+)*)?)\]", text.replace(" ", ""))
    try:
        assert match is not None, "it has the form"
        dtype = jnp.dtype(_DTYPES[match[1]] + match[2])
    except (AssertionError, TypeError) as error:
        raise TargetError(f"{text!r} is no array.", hint="Write f32[64,512], s32[8] or pred[].") from error
    return jax.ShapeDtypeStruct(tuple(int(n) for n in match[3].split(",") if n), dtype)


def mesh_of(text: str) -> Mesh:
    """Reads ``8`` or ``data=4,model=2`` as a mesh that is only planned for.

    >>> print(mesh_of("data=4,model=2"))
    data=4 model=2

    Raises:
        TargetError: it cannot be read.
    """
    if re.fullmatch(r"\d+", text):
        return Mesh.abstract(devices=int(text))
    if re.fullmatch(r"\w+=\d+([, ]\w+=\d+)*", text):
        return Mesh.abstract(**{name: int(n) for name, n in (axis.split("=") for axis in re.split("[, ]", text))})
    raise TargetError(f"{text!r} is no mesh.", hint="Write 8 or data=4,model=2.")
