"""JAX's own primitive harnesses under the partitioner: whatever dimension is split, every device has the right numbers.

Fast tests take some harnesses of every group and one way to split each; slow ones take every harness of the dtype that
is used most, and a sample of the others. Everything there is, and how many operands are gathered whole:
``python benchmarks/primitives.py``.
"""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from sweep.comparison import difference
from sweep.harnesses import UNDEFINED, excluded, groups, harnesses
from sweep.runs import VARIANTS, outcomes

pytestmark = pytest.mark.optimised  # unoptimised code loses small numbers of bfloat16 that are only moved

FEW = 2  # harnesses of a large group in the fast tests; one of a small group
LARGE = 20
COMPILE_SLOWLY = {"igamma", "igammac", "random_gamma", "regularized_incomplete_beta"}  # elementwise; slow tests only
CHUNK = 30  # harnesses in one slow test
ONE_IN = 8  # of the dtypes that are used less


def some(group):
    members = sorted((h for h in harnesses() if h.group == group), key=lambda h: zlib.crc32(h.name.encode()))
    return [h for h in members[: 4 * FEW] if not excluded(h)][: FEW if len(members) >= LARGE else 1]


def wrong(found):
    return [str(outcome) for outcome in found if outcome.status != "right"]


@pytest.mark.parametrize("group", [group for group in groups() if group not in COMPILE_SLOWLY])
@pytest.mark.one_in(10)
def test_some_harnesses_of_every_group(group):
    failures = []
    for harness in some(group):
        # One way of splitting each, another for each harness; the next one where a harness has none of that kind.
        turn = zlib.crc32(harness.name.encode())
        variants = [VARIANTS[(turn + k) % len(VARIANTS)] for k in range(len(VARIANTS))]
        failures += wrong(outcome for outcome, _ in zip(outcomes(harness, variants), range(1)))
    assert not failures


def chunks():
    for group in groups():
        members = [h for h in harnesses() if h.group == group]
        members = [h for i, h in enumerate(members) if h.dtype == np.float32 or i % ONE_IN == 0]
        for at in range(0, len(members), CHUNK):
            yield f"{group} {at}", tuple(members[at : at + CHUNK])


@pytest.mark.slow
@pytest.mark.parametrize("members", [pytest.param(members, id=name) for name, members in chunks()])
def test_every_harness(members):
    failures = []
    always, others = VARIANTS[:2], VARIANTS[2:]
    for i, harness in enumerate(members):
        if not excluded(harness):
            failures += wrong(outcomes(harness, (*always, others[i % len(others)])))
    assert not failures


def test_broken_promises_are_seen():
    """Harnesses whose result is undefined are the only ones left out that have something to split."""
    left_out = [h for h in harnesses() if h.group in ("gather", "scatter") and excluded(h) == UNDEFINED]
    assert left_out
    assert all("promise_in_bounds" in str(h.jaxpr).lower() for h in left_out)


def test_moved_elements_must_be_the_same_bits():
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    off = np.nextafter(x, np.float32(9))
    assert difference(off, x, {"gather"})
    assert not difference(off, x, {"exp"})
    assert difference(x * (1 + 1e-4), x, {"exp"})
    assert difference(x.astype(np.float64), x, {"exp"})
    assert difference(np.where(x > 0, np.nan, x), x, {"dot_general"})
    assert difference(x + 1e-4, x, {"dot_general"})
    assert not difference(x + np.float32(1e-6), x, {"dot_general"})
    brain = x.astype(jnp.bfloat16)
    assert not difference(np.nextafter(brain, jnp.bfloat16(9)), brain, {"dot_general"})
    assert difference(np.nextafter(brain, jnp.bfloat16(9)), brain, {"gather"})
