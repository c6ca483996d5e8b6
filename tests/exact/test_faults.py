"""Seeded faults: the programs are right, and every fault shows in the numbers."""

import jax
import numpy as np
import pytest

from exact import faults

EACH = pytest.mark.parametrize("program", faults.PROGRAMS, ids=lambda program: program.name)


def largest_difference(plain, sharded):
    """Between the results of the two, over all devices."""
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True)
    shards = [(s.data, np.asarray(x)[s.index]) for x, y in pairs for s in y.addressable_shards]
    return max(float(np.nan_to_num(np.abs(a - b) / (1 + np.abs(b)), nan=np.inf).max()) for a, b in shards)


@pytest.mark.slow
@EACH
def test_programs_are_right_and_faults_show_in_the_numbers(program):
    arguments = program.arguments()
    expected = jax.jit(program.versions()[0])(*arguments)
    names = ["", *program.faults]
    found = {name: largest_difference(expected, jax.jit(program.versions(name)[1])(*arguments)) for name in names}
    assert found.pop("") < 1e-5
    assert found
    assert not [name for name, difference in found.items() if difference < 1e-3]


@pytest.mark.slow
def test_what_check_vma_finds_is_as_the_page_says(monkeypatch):
    original = faults.manual
    monkeypatch.setattr(faults, "manual", lambda *args, check=True: original(*args, check=True))

    def is_refused(program, fault=""):
        try:
            jax.eval_shape(program.versions(fault)[1], *program.arguments())
        except (TypeError, ValueError):
            return True
        return False

    accepted = [program for program in faults.PROGRAMS if not is_refused(program)]
    refused = [is_refused(program, fault) for program in accepted for fault in program.faults]
    assert (len(faults.PROGRAMS) - len(accepted), len(refused), sum(refused)) == (6, 96, 13)
