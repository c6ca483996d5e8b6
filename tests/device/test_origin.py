"""Which line a collective is caused by, and where it is emitted: every byte that is sent belongs to one line."""

import jax.numpy as jnp
import pytest

import gshard
from device.models import explained, f32, model
from gshard.device.cost import origins
from gshard.device.fusion_model import COLLECTIVE
from gshard.explanation.rows import merged


@pytest.mark.parametrize("name", ["gradient", "recurrent", "vocabulary", "experts gradient"])
def test_every_costed_collective_is_one_that_was_noted(name):
    found = explained(name)
    cost = found.cost("v3:2x2")
    owners = origins(found.spmd, cost)
    for kernel, owner in zip(cost.kernels, owners, strict=True):
        assert (kernel.kind == COLLECTIVE) == (owner is not None)
        if owner is not None:
            assert (kernel.name, kernel.axes, kernel.sent, kernel.times) == (
                owner.kind, owner.atoms, owner.bytes, owner.times
            )  # fmt: skip
            assert kernel.line == owner.emitted.line
    taken = [id(c) for c in owners if c is not None]
    assert len(taken) == len(set(taken)) == len(found.spmd.collectives)


@pytest.mark.parametrize("name", ["gradient", "experts gradient"])
def test_merging_keeps_bytes_times_and_seconds(name):
    found = explained(name)
    cost = found.cost("v3:2x2")
    rows = merged(found.spmd, cost)
    assert sum(r.collective.total_bytes for r in rows) == found.total_bytes
    assert sum(r.collective.times for r in rows) == sum(c.times for c in found.spmd.collectives)
    assert sum(r.seconds for r in rows) == pytest.approx(
        sum(k.total_seconds for k in cost.kernels if k.kind == COLLECTIVE)
    )
    sent = [r.collective.total_bytes for r in rows]
    assert sent == sorted(sent, reverse=True)


def test_a_sum_is_caused_where_it_is_made_and_emitted_where_it_is_first_used():
    def f(x, w):
        h = gshard.split(x, 1, "d") @ w
        b = jnp.float32(2) + w[0, 0]
        return jnp.tanh(h) + b

    found = gshard.explain(f, f32(16, 4096), f32(4096, 32), mesh=gshard.Mesh.abstract(d=4))
    first = f.__code__.co_firstlineno
    (c,) = [c for c in found.spmd.collectives if c.bytes > 100]
    assert c.cause.line == c.line == f"test_origin.py:{first + 1} ({f.__qualname__})"
    assert c.emitted.line == f"test_origin.py:{first + 3} ({f.__qualname__})"


def test_results_that_leave_otherwise_belong_to_the_line_that_makes_them():
    """Nothing inside uses them: what brings them to how they leave is emitted at their own line, not at the call's."""

    def f(x, w):
        return gshard.replicate(gshard.split(x, 0, "d") @ w)

    found = gshard.explain(f, f32(8, 8), f32(8, 8), mesh=gshard.Mesh.abstract(d=4))
    lines = {(c.cause.line, c.emitted.line) for c in found.spmd.collectives}
    here = f"test_origin.py:{f.__code__.co_firstlineno + 1} ({f.__qualname__})"
    assert lines == {(here, here)}


def test_what_a_memory_limit_runs_again_has_a_line():
    f, args, axes, _ = model("attention")
    mesh = gshard.Mesh.abstract(**axes)
    peak = gshard.explain(f, *args, mesh=mesh).cost("v3:2x2").peak
    found = gshard.explain(gshard.jit(f, mesh=mesh, memory_limit=int(0.8 * peak), machine="v3:2x2"), *args)
    again = [c for c in found.spmd.collectives if c.why.startswith("recomputed")]
    assert all(c.cause.line == c.line != "" for c in found.spmd.collectives)
    assert found.spmd.recomputed is not None or not again


def test_a_permutation_along_some_axes_is_emitted_over_all():
    mesh = gshard.Mesh.abstract(a=2, b=4)
    found = gshard.explain(lambda x: jnp.roll(gshard.split(x, 0, "b"), 3, 0), f32(32, 4), mesh=mesh)
    (row,) = merged(found.spmd, found.cost())
    assert row.collective.atoms == ("b.0", "b.1")
    assert row.over == mesh.atoms
    assert set(row.pairs) == {(4 * i + b, 4 * i + (b + 1) % 4) for i in range(2) for b in range(4)}
    assert row.seconds > 0
