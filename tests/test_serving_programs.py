"""Serving programs give the tokens of one device, wherever arguments lie, and send few bytes."""

import jax
import numpy as np
import pytest

import gshard
from placed import in_every_way
from sampled import sampled
from serving_programs import CASES

SAMPLE = sampled(CASES, lambda name: name.partition("/")[0], lambda name: 4, "serving")


def check(case):
    expected = jax.tree.map(np.asarray, jax.jit(case.function)(*case.arguments))
    jitted = gshard.jit(case.function, mesh=case.jax_mesh)
    for found in in_every_way(jitted, case.arguments, case.jax_mesh):
        jax.tree.map(compare, found, expected)


def compare(found, expected):
    found = np.asarray(found)
    if np.issubdtype(expected.dtype, np.inexact):
        assert np.max(np.abs(found - expected)) <= 1e-3 * np.max(np.abs(expected))  # as in the benchmark
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_tokens_are_those_of_one_device(name):
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_of_every_program_are_those_of_one_device(name):
    check(CASES[name])


# Bytes of plans for a machine, or without one; for CPUs XLA's partitioner sends 8.5 MB for ``top_k``.
SENT = {
    ("sampling/greedy", "h100:1x8"): 896,  # candidates, not the logits
    ("sampling/top_k", None): 57_344,
    ("weights/step_of_both", "v5e:2x4"): 73_920,  # the product reads the transposed embedding in place
}


@pytest.mark.parametrize(("name", "machine"), SENT)
def test_what_a_program_sends(name, machine):
    case = CASES[name]
    found = gshard.explain(gshard.jit(case.function, mesh=case.jax_mesh, machine=machine), *case.arguments)
    assert found.total_bytes == SENT[name, machine]
