"""Configure command: ``gshard configure module:builder``, the configuration of a training step for a machine."""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

from gshard.api.configure import configure
from gshard.baselines import CheckFailed, end_search
from gshard.core.errors import ArgumentError
from gshard.device.machine import Machine
from gshard.named_target import TOLD, mesh_of, named, play_devices
from gshard.remat.rematerialise import MemoryLimitError


def run_configure(options: argparse.Namespace) -> None:
    """Runs ``gshard configure`` with the options of the command line."""
    choices = choices_of_options(options.choice)
    size = _devices(options)
    play_devices(max(8, size))
    builder = named(options.target)
    meshes: dict[str, Any] = {"mesh": mesh_of(options.mesh)} if options.mesh else {"devices": size}
    try:
        found = configure(
            builder,
            machine=options.machine,
            global_batch=options.global_batch,
            choices=choices,
            offload=options.offload,
            memory_limit=options.memory_limit,
            budget_seconds=options.budget_seconds,
            finite=options.finite,
            progress=True,
            **{name: getattr(options, name) for name in TOLD},
            **meshes,
        )
    except MemoryLimitError as error:
        if not error.needed:
            raise
        raise CheckFailed("\n  ".join(filter(None, (error.what, error.got, error.hint)))) from error
    print(found)
    if options.html:
        print(f"wrote {found.html(options.html)}")
    if options.json:
        options.json.write_text(json.dumps(found.data()), "utf-8")
        print(f"wrote {options.json}")
    if options.save:
        found.best.save(options.save)
        builder_name = options.target.rpartition(":")[2]
        print(f"wrote {options.save}: gshard.stages.Configuration.load({str(options.save)!r}, {builder_name}) reads it")
    end_search(found.stopped, found.best.cost.peak, found.limit)


def choices_of_options(texts: list[str]) -> dict[str, list[Any]]:
    """Reads ``keyword=value,value``; numbers, True, False and None are those of Python, the rest is text.

    >>> choices_of_options(["micro_batches=1,4", "recompute=none,full"])
    {'micro_batches': [1, 4], 'recompute': ['none', 'full']}
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key.isidentifier() or not values:
            raise ArgumentError(
                f"--choice {text} is not understood.", hint="Write --choice keyword=value,value, once for each keyword."
            )
        found.setdefault(key, []).extend(_value(value) for value in values.split(","))
    return found


def _value(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def _devices(options: argparse.Namespace) -> int:
    """The number of devices: of the mesh, as given, or of the machine."""
    if options.mesh:
        return mesh_of(options.mesh).size
    if options.devices is not None:
        return int(options.devices)
    return Machine.of(options.machine or "").size if ":" in (options.machine or "") else 8
