"""Compiled programs: reads what XLA compiles, or has compiled, of functions from JAX's and frameworks' jit."""

from __future__ import annotations

import dataclasses
import gzip
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from gshard.api.instead_of_jit import instead_of_jit
from gshard.api.jit import Jitted
from gshard.api.lowered import Compiled, Lowered, Traced
from gshard.api.wrapped import mesh_of_arguments
from gshard.core.errors import ArgumentError, MeshError, PlanError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_jit import arguments_of_call, calls_of_jit, given_to_jit
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.paths import leaf_names
from gshard.device.machine import Machine
from gshard.explanation.compiled_program import read_program
from gshard.explanation.compiled_source import CompiledSource
from gshard.explanation.explain import Explanation, read_compiled
from gshard.tracing.trace import name_of

CompiledLike = jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced | str | Path
# The stages of jit: JAX's and ours.
STAGES = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled, Traced, Lowered, Compiled)
XLA, GSHARD = "xla", "gshard"  # partitioners
_GZIP = b"\x1f\x8b"  # a file that begins so is compressed


def is_compiled(f: Any) -> bool:
    """Whether this is a compiled program, or becomes one without arguments."""
    return isinstance(f, CompiledLike)


def is_from_jax_jit(f: Any) -> bool:
    """Whether ``jax.jit``, ``flax.nnx.jit``, ``equinox.filter_jit`` or the like returned this: it can be lowered."""
    return callable(f) and callable(getattr(f, "lower", None)) and not isinstance(f, type)


def stage_inside(f: Any) -> Any:
    """The stage of ``jax.jit`` or ``gshard.jit`` that a stage of a framework's holds; others themselves."""
    if isinstance(f, (*STAGES, str, Path)):
        return f
    inside = (getattr(f, name, None) for name in ("compiled", "lowered", "traced"))
    return next((stage for stage in inside if isinstance(stage, STAGES)), f)


def explain_compiled(
    f: Any, mesh: MeshLike = None, machine: str | Machine | None = None, names: Mapping[str, str] | None = None
) -> Explanation:
    """Explains a program that is compiled, or is compiled here."""
    if isinstance(f, str | Path):
        source = CompiledSource(read_program(_text_of(f), None if mesh is None else Mesh.of(mesh)))
        return Explanation(source, None if machine is None else Machine.read(machine, source.mesh.size))
    f = f.lower() if isinstance(f, jax.stages.Traced) else f
    compiled = f.compile() if isinstance(f, jax.stages.Lowered) else f
    return read_compiled(compiled, None if mesh is None else Mesh.of(mesh), machine, names=names)


def explain_compiled_by_gshard(compiled: Compiled, machine: str | Machine | None = None) -> Explanation:
    """Explains what XLA compiled of a function from ``gshard.jit``: the arguments have the names of the function's."""
    lowered = compiled.lowered
    names = {f"arrays[{i}]": name for i, name in enumerate(lowered.program.names)}
    return read_compiled(lowered.executable.compiled, lowered.mesh, machine, compiled.out_tree, names)


def lowered_by_jax(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Lowers a function from ``jax.jit``; abstract meshes of arguments become meshes of the first devices."""
    args, kwargs = on_first_devices((tuple(args), dict(kwargs)))
    try:
        return stage_inside(f.lower(*args, **kwargs))
    except ValueError as error:
        if "AbstractMesh" not in str(error):
            raise
        raise ArgumentError.like(
            error,
            "the shardings inside this function are on an abstract mesh, for which XLA cannot compile.",
            user_line(),
            hint="Write `with jax.set_mesh(jax.make_mesh((8,), ('data',))):` around it, with the axes of that mesh.",
        ) from error


def on_first_devices(tree: Any) -> Any:
    """The same arguments with their abstract meshes as meshes of the first devices."""
    leaves, structure = jax.tree.flatten(tree)
    moved = [_on_devices(leaf) for leaf in leaves]
    is_same = all(new is old for new, old in zip(moved, leaves, strict=True))
    return tree if is_same else jax.tree.unflatten(structure, moved)  # modules of frameworks stay the same objects


def partitions_of(lowered: jax.stages.Lowered) -> int:
    """For how many devices a program was lowered."""
    module: Any = lowered.compiler_ir("stablehlo")
    attributes = module.operation.attributes
    return int(attributes["mhlo.num_partitions"].value) if "mhlo.num_partitions" in attributes else 1


def _text_of(given: str | Path) -> str:
    if isinstance(given, str) and given.lstrip().startswith("HloModule"):
        return given
    try:
        found = Path(given).read_bytes()
        return (gzip.decompress(found) if found.startswith(_GZIP) else found).decode("utf-8", errors="replace")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ArgumentError(
            "this is neither a compiled program nor a file of one.",
            user_line(),
            got=repr(given)[:80],
            hint="Give the text that compiled.as_text() returns, or the path of a file with it, which may be a .gz.",
        ) from error


def _on_devices(leaf: Any) -> Any:
    """An argument whose sharding is on an abstract mesh, on a mesh of the first devices."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(sharding, NamedSharding):
        return leaf
    if not isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        return leaf
    concrete = Mesh.of(sharding.mesh).on_first_devices().user_jax_mesh
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(concrete, sharding.spec))


# Framework jit: functions that ``flax.nnx.jit`` or ``equinox.filter_jit`` returned, which call ``jax.jit`` themselves.

_log = logging.getLogger(__name__)


def is_from_framework(f: Any) -> bool:
    """Whether ``flax.nnx.jit``, ``equinox.filter_jit`` or the like returned a function."""
    return is_from_jax_jit(f) and not isinstance(f, Jitted) and given_to_jit(f) is None


def traced_call(f: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[int], Any]:
    """The jaxpr of a call of a function, the numbers of the leaves that are arrays, and the tree of its results."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]

    def called(given: list[Any]) -> None:
        whole = dict(enumerate(leaves)) | dict(zip(arrays, given, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [whole[i] for i in range(len(leaves))])
        results.append(jax.tree.structure(f(*args, **kwargs)))

    results = list[Any]()
    return jax.make_jaxpr(called)([leaves[i] for i in arrays]), arrays, results[-1]


def names_of_arrays(f: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The names of arrays in the user's arguments, by the names that they have in the program of ``jax.jit``.

    The function is traced, and the arrays that reach ``jax.jit`` are found among its arguments.
    """
    if not is_from_framework(f):
        return {}
    names = leaf_names(f, (args, dict(kwargs)))
    try:
        traced, arrays, _ = traced_call(f, args, kwargs)
    except Exception as error:  # what is lowered need not be traced in a program: it keeps the framework's names
        _log.info("gshard: the arguments of %s have the names of its framework: %s", name_of(f), error)
        return {}
    calls = calls_of_jit(traced)
    found = arguments_of_call(traced, calls[0]) if len(calls) == 1 else {}
    return {name: names[arrays[i]] for name, i in found.items()}


def lowered_instead_of_jit(
    f: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: MeshLike,
    **options: Any,
) -> Lowered:
    """Lowers a function in a block of ``instead_of_jit`` with some options, so that gshard partitions it."""
    mesh = mesh_of_arguments(args, kwargs) if mesh is None else mesh
    with instead_of_jit(mesh, **options):
        lowered = lowered_by_jax(f, args, kwargs)
    if not isinstance(lowered, Lowered):
        raise MeshError(
            f"{name_of(f)} is left to XLA: its arguments are on devices that are not in the mesh.",
            user_line(),
            got=f"mesh: {Mesh.of(mesh)}",
            hint="Give the mesh of the devices on which the arguments are.",
        )
    if options.get("plan") is not None and lowered.target.recorded is None:
        raise PlanError(f"the plan is for another function than {name_of(f)}.", user_line())
    names = names_of_arrays(f, args, kwargs)
    program = dataclasses.replace(lowered.program, names=tuple(names.get(n, n) for n in lowered.program.names))
    return dataclasses.replace(lowered, program=program)
