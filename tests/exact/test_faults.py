"""Seeded faults: the programs are right, every fault shows in the numbers, and gshard.prove finds it and its line."""

import jax
import numpy as np
import pytest

import gshard
from exact import faults

# Faults that no change of one place repairs, or none that is tried, and whose line is then another one.
NO_LINE = {
    "gradient_from_outside": "scale",  # the equation is outside of the shard_map; the sum of the gradients is blamed
    "sequence_parallel": "part",
    "ring_attention": "steps keys",
    "sharded_adam": "count",
}
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
    assert (len(faults.PROGRAMS) - len(accepted), len(refused), sum(refused)) == (5, 57, 6)


@pytest.mark.one_in(6)
@EACH
def test_faults_are_found_with_their_lines(program):
    arguments = program.arguments()
    plain, right = program.versions()
    proof = gshard.prove(right, *arguments, like=plain)
    assert proof, str(proof)
    lines = {}
    for fault in program.faults:
        proof = gshard.prove(program.versions(fault)[1], *arguments, like=plain)
        assert proof.verdict == "different"
        lines[fault] = proof.line
    wrong = {
        f for f, line in lines.items() if int(line.partition(":")[2].partition(" ")[0] or 0) not in program.lines(f)
    }
    assert wrong <= set(NO_LINE.get(program.name, "").split()), lines


def test_nine_in_ten_faults_have_their_line():
    count = sum(len(program.faults) for program in faults.PROGRAMS)
    assert (len(faults.PROGRAMS), count) == (16, 85)
    assert sum(len(names.split()) for names in NO_LINE.values()) <= count / 10
    assert all(program.lines(fault) for program in faults.PROGRAMS for fault in program.faults)
