"""The compilation cache: a command does not compile again what an earlier one compiled.

JAX's persistent compilation cache does the work. Here is where it lies: in ``~/.cache/m4/xla``, in a folder for the
processor, since a program that was compiled for one processor may not run on another. Processes that train together
keep nothing. A folder that is named in JAX's own ``JAX_COMPILATION_CACHE_DIR`` has precedence.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path

import jax

ENVIRONMENT = "GSHARD_M4_COMPILATION_CACHE"
"""Environment variable: ``off``, or the folder to use instead."""

OFF = "--no-compilation-cache"
"""The option of the command line that does the same as ``off``."""

_LEAST_SECONDS = 0.3  # of the compilation of a program that is kept


def keep_compiled(off: bool = False) -> Path | None:
    """Switches the cache on.

    Args:
        off: whether the command line has switched it off.

    Returns:
        Its folder; None if it is off, JAX's own variable names one, or it cannot be written.
    """
    named = os.environ.get(ENVIRONMENT, "")
    if off or named == "off" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    folder = Path(named) if named else Path.home() / ".cache" / "m4" / "xla"
    folder /= _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a command works without it
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    return folder


def _processor() -> str:
    """A name for the kind of this processor: what it can do decides on the code."""
    try:
        told = Path("/proc/cpuinfo").read_text("utf-8")
        features = re.findall(r"^(?:flags|Features|model name)\s*:.*$", told, re.MULTILINE)[:2]
    except OSError:  # not Linux
        features = [platform.processor()]
    digest = hashlib.sha256("\n".join([platform.machine(), *features]).encode())
    return f"{platform.machine()}-{digest.hexdigest()[:12]}"
