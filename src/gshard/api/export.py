"""export: writes the program of all devices, with its collectives, as a file that JAX runs without gshard.

The file is a zip archive. ``programs.json`` lists its programs: for each its arguments, results, mesh, platform and
plan, and how to call it. The other members are the programs, as ``jax.export`` serializes them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import AbstractMesh, NamedSharding

from gshard.api.explained import explain
from gshard.api.jit import Jitted, jit
from gshard.api.lowered import Lowered
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import names_devices
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mesh import MeshLike
from gshard.emit.compile import exported
from gshard.planning.saved_plan import SavedPlan

LIST = "programs.json"
PLATFORMS = ("cpu", "tpu", "cuda", "rocm")


@without_our_frames
def export(
    f: Any,
    *args: Any,
    to: str | Path,
    platforms: str | Sequence[str] | None = None,
    mesh: MeshLike = None,
    also: Sequence[tuple[Any, ...]] = (),
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Writes a partitioned program as a file that JAX loads and runs without gshard, with the same collectives.

    The file has one program for each platform and each kind of arguments. ``gshard explain FILE`` prints it.
    It needs the package ``flatbuffers``, here and where it is loaded.

    Args:
        f: a marked function, or one that ``gshard.jit`` returned, with its options.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``, and values for static ones.
        to: the path of the file.
        platforms: the devices that will run it: ``"cpu"``, ``"tpu"``, ``"cuda"``, ``"rocm"``, or several of these.
            None takes that of the devices of the mesh.
        mesh: as for ``jit``, or an abstract mesh of any size (``gshard.Mesh.abstract(model=64)``), whose devices need
            not exist here. None takes the mesh of ``f``.
        also: positional arguments of further programs, such as other sizes of the batch.

    Returns:
        the list of the programs, as ``programs.json`` in the file has it.

    Raises:
        ArgumentError: the program calls back to Python, or reads mutable arrays; or it is given no platform.
        MeshError: no mesh was given. ImportError: ``flatbuffers`` is not installed.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from gshard.api.marks import split
    >>> path = Path(tempfile.mkdtemp()) / "total.zip"
    >>> [program] = export(lambda x: split(x, 0, "data").sum(), jnp.zeros((8, 2)), to=path, mesh={"data": 4})
    >>> program["sends"]
    6
    """
    jitted = f if isinstance(f, Jitted) else jit(f)
    jitted = jitted if mesh is None else jitted.on(mesh)
    first = jitted.lower(*args, **kwargs)
    every = [first, *(jitted.lower(*_placed_as(first, given), **kwargs) for given in also)]
    platforms = (platforms,) if isinstance(platforms, str) else platforms
    listed, members = [], dict[str, bytes]()
    for lowered in every:
        ordered = dataclasses.replace(lowered, target=dataclasses.replace(lowered.target, reorders=False))
        for platform in platforms or _platforms(ordered):
            member = f"{len(members)}.{platform}.jax"
            program, axes = _exported(ordered, platform)
            members[member] = bytes(program.serialize())
            listed.append({"file": member, **_described(ordered, program, axes)})
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(LIST, json.dumps({"format": 1, "programs": listed}, indent=1))
        for member, data in members.items():
            archive.writestr(member, data)
    return programs_in(to)


def programs_in(path: str | Path) -> list[dict[str, Any]]:
    """The list of the programs in a file that ``export`` wrote, each with what ``explain`` tells of it."""
    with zipfile.ZipFile(path) as archive:
        return list(json.loads(archive.read(LIST))["programs"])


def _placed_as(first: Lowered, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a further program. Those that the first one has too, such as weights, have its shardings."""
    (shardings, _), avals = jax.tree.unflatten(first.in_tree, first.argument_shardings), first.in_avals[0]
    kinds: list[Any] = [jax.tree.structure(args), jax.tree.structure(avals)]
    if kinds[0] != kinds[1]:
        return args

    def placed(x: Any, aval: Any, sharding: Any) -> Any:
        same = jax.typeof(x).shape == aval.shape and jax.typeof(x).dtype == aval.dtype
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) if same else x

    return tuple(jax.tree.map(placed, args, avals, shardings))


def _platforms(lowered: Lowered) -> tuple[str, ...]:
    devices = lowered.mesh.devices
    if devices is None:
        raise ArgumentError(
            f"{lowered.program.name} is exported for an abstract mesh, which does not tell the platform.",
            user_line(),
            hint='Give platforms="tpu", "cuda", "rocm" or "cpu".',
        )
    return tuple("cuda" if d.platform == "gpu" else d.platform for d in devices[:1])  # ROCm's are "gpu" to JAX, too


def _exported(lowered: Lowered, platform: str) -> tuple[jax.export.Exported, AbstractMesh]:
    """The program without gshard, for this platform, and its mesh."""
    name = lowered.program.name
    if platform not in PLATFORMS:
        raise ArgumentError(
            f"{name} cannot be exported for {platform!r}.", user_line(), hint=f"Give some of {', '.join(PLATFORMS)}."
        )
    if lowered.program.references or lowered.spmd.jaxpr.effects or names_devices(lowered.spmd.jaxpr):
        raise ArgumentError(
            f"{name} calls back to Python, or writes to mutable arrays, which a file cannot do.",
            user_line(),
            hint="Leave out callbacks (jax.debug.print, pure_callback), and return arrays instead of references.",
        )
    program, mesh = exported(lowered.spmd, lowered.donated, platform)
    return dataclasses.replace(program, in_tree=lowered.in_tree, out_tree=lowered.out_tree), mesh


def _described(lowered: Lowered, program: jax.export.Exported, mesh: AbstractMesh) -> dict[str, Any]:
    """What the file tells of a program: how to call it, and what it sends and why."""
    in_specs, out_specs = (
        [s.spec for s in found if isinstance(s, NamedSharding)]
        for found in (program.in_shardings_jax(mesh), program.out_shardings_jax(mesh))
    )
    names = lowered.program.names[len(lowered.program.captured) :]
    donated = jax.tree.unflatten(lowered.in_tree, [i in lowered.donated for i in range(len(lowered.avals))])
    found = explain(lowered)
    return {
        "name": lowered.program.name,
        "platform": program.platforms[0],
        "mesh": dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
        "arguments": {
            name: f"{aval.str_short()} {spec}"
            for name, aval, spec in zip(names, program.in_avals, in_specs, strict=True)
        },
        "results": [f"{aval.str_short()} {spec}" for aval, spec in zip(program.out_avals, out_specs, strict=True)],
        "donate_argnums": [i for i, leaves in enumerate(donated[0]) if any(jax.tree.leaves(leaves))],
        "donate_argnames": [name for name, leaves in donated[1].items() if any(jax.tree.leaves(leaves))],
        "compiler_options": dict(lowered.target.compiler_options),
        "sends": found.total_bytes,
        "gshard": importlib.metadata.version("gshard"),
        "jax": jax.__version__,
        "plan": json.loads(SavedPlan.of(lowered.plan).as_json()),
        "explanation": found.data(None, 0.0),
        "text": str(found),
    }
