"""What is imported: nothing by ``import gshard`` or ``--help``, and by a first call what it needs and nothing else."""

import subprocess
import sys

import pytest

# Modules that no call of ``gshard.jit`` needs.
UNNEEDED = (
    "gshard.__main__", "gshard.commands", "gshard.search",
    "gshard.testing", "gshard.moe",
    "jax.experimental.pallas", "jax.export",
)  # fmt: skip


def imported_by(program, *arguments, before=""):
    """The modules that a program imports, in a process of its own, besides those that it had ``before``."""
    asked = f"import sys\n{before}\nbefore = set(sys.modules)\ntry:\n    {program}\nfinally:\n    "
    asked += "print('modules', *sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", asked, *arguments], check=True, capture_output=True, text=True)
    return set(done.stdout.rpartition("modules")[2].split())


def test_jit_takes_jax_and_numpy_and_nothing_that_a_call_does_not_need():
    found = imported_by("import gshard; gshard.jit", before="import jax")
    assert "gshard.api.jit" in found
    assert not [name for name in found if any(name == x or name.startswith(x + ".") for x in UNNEEDED)]
    others = {name.partition(".")[0] for name in found} - {"gshard", "jax", "jaxlib", "numpy"}
    assert others <= set(sys.stdlib_module_names), others


@pytest.mark.parametrize("program, modules", [
    ("import gshard", 1),
    ("import gshard; dir(gshard); gshard.GShardError", 3),
    ("from gshard.__main__ import main; main(['--help'])", 10),
    ("from gshard.__main__ import main; main(['explain', '--help'])", 10),
])  # fmt: skip
def test_import_and_help_take_no_time(program, modules):
    found = imported_by(program)
    assert "jax" not in found
    assert len([name for name in found if name.startswith("gshard")]) <= modules


def test_import_starts_no_backend():
    asked = "import gshard; gshard.jit; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    found = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "False"


def test_rules_of_users_come_after_those_of_gshard():
    """Also where nothing but the rule was read before."""
    asked = "import gshard\ntry:\n    gshard.rule('sin')('a -> a')\nexcept Exception as error:\n    print(error)"
    found = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout
    assert "gshard has a rule for primitive 'sin'" in found


def test_names_may_be_read_first_while_jax_traces():
    """What is imported then keeps no value of that program."""
    asked = """
import sys, jax, gshard
def f(x):
    for name in gshard.__all__:
        getattr(gshard, name)
    return gshard.split(x, 0, 1) * 2
with jax.checking_leaks(), jax.enable_x64(True):
    jax.jit(f)(jax.numpy.arange(8.0))
values = [v for name, m in list(sys.modules.items()) if name.startswith("gshard") for v in vars(m).values()]
print(len(values) > 1000, any(isinstance(v, jax.core.Tracer) for v in values))
"""
    found = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout
    assert found.split() == ["True", "False"]
