"""What ``import gshard`` imports: what it needs, and nothing that a first call would pay for in vain."""

from __future__ import annotations

import subprocess
import sys

# Modules that no call of ``gshard.jit`` needs.
UNNEEDED = (
    "gshard.__main__",
    "gshard.ahead_of_time",
    "gshard.plan_command",
    "gshard.named_target",
    "gshard.baselines",
    "jax.experimental.pallas",
    "jax.export",
)
ASKED = """
import sys
import jax
before = set(sys.modules)
import gshard
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def test_import_takes_jax_and_numpy_and_nothing_that_a_call_does_not_need() -> None:
    found = subprocess.run([sys.executable, "-c", ASKED], check=True, capture_output=True, text=True).stdout.split()
    assert "gshard.api.jit" in found
    assert not [name for name in found if any(name == x or name.startswith(x + ".") for x in UNNEEDED)]
    others = {name.partition(".")[0] for name in found} - {"gshard", "jax", "jaxlib", "numpy"}
    assert others <= set(sys.stdlib_module_names), others


def test_import_starts_no_backend() -> None:
    asked = "import gshard; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    found = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "False"
