"""The command line: reads it, sets up the process, runs a command, and tells errors.

What belongs to the process is here and nowhere else: virtual devices and time limits of XLA, which must be set before
JAX starts, the quieting of libraries, and the way errors are printed. A mistake of the user's takes a few lines,
with exit code 2; ``--debug`` shows where it came from.

    0 done    2 usage, configuration or data    4 loss not finite    5 checkpoint damaged, and no sound one
    130 interrupted; training saves first    141 the reader of the output went away    143 SIGTERM; the same
    201 another process of the run is gone    202 a process of the run was stuck
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import tyro

from gshard import GShardError
from gshard_m4.commands import COMMANDS
from gshard_m4.compilation_cache import OFF, keep_compiled

DESCRIPTION = """Massively multilingual translation into English with a Mixture-of-Experts Transformer that gshard
partitions. Start with: gshard-m4 demo. Add --debug to any command to see where an error comes from. gshard-m4 --version
says which version this is, of gshard, JAX and Python, too. Compiled programs are kept in ~/.cache/m4/xla;
--no-compilation-cache with any command keeps and reads none."""


_OF_ALL = ("--debug", OFF)  # options that every command takes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: without the name of the program; those of the process if None.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, off = "--debug" in given, OFF in given
    if given == ["--version"]:
        libraries = f"gshard {version('gshard')}, jax {jax.__version__}, Python {platform.python_version()}"
        print(f"gshard-m4 {version('gshard-m4')} ({libraries})")
        return 0
    try:
        try:
            command: Any = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                args=[word for word in given if word not in _OF_ALL],
                prog="gshard-m4",
                description=DESCRIPTION,
            )
            prepare_process(getattr(command, "virtual_devices", getattr(command, "devices", 1)), debug)
            keep_compiled(off or getattr(getattr(command, "together", None), "several", False))
            return int(command())
        finally:
            sys.stdout.flush()  # here, where the error of a closed pipe can be handled
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be flushed into the pipe
        return 141
    except KeyboardInterrupt:
        print("gshard-m4: interrupted", file=sys.stderr)
        return 130
    except (GShardError, ValueError, OSError) as error:
        if debug:
            raise
        print(f"gshard-m4: {type(error).__name__}: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def prepare_process(devices: int, debug: bool) -> None:
    """Sets what must be set before JAX starts its backend.

    Args:
        devices: number of virtual devices of a processor; accelerators are as many as there are.
        debug: whether libraries may log.
    """
    flags = {
        "--xla_force_host_platform_device_count": max(devices, 1),
        # A collective waits for all devices, and on few cores a virtual device may be late for long. XLA would abort
        # after 60 seconds.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
        "--xla_cpu_collective_call_terminate_timeout_seconds": 3600,
        "--xla_cpu_collective_timeout_seconds": 3600,
    }
    present = os.environ.get("XLA_FLAGS", "")
    added = [f"{name}={value}" for name, value in flags.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()
    if not debug:
        # The checkpoint writer logs its own errors with tracebacks before they are printed here.
        logging.getLogger("absl").setLevel(logging.CRITICAL + 1)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)


def run() -> None:
    """The entry point of the ``gshard-m4`` script."""
    try:
        code = main()
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    if jax.distributed.is_initialized():
        # It failed among others. The usual exit would wait for them at a barrier, for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
