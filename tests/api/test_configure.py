"""Configure: what is found fits, runs and computes the unpartitioned numbers; errors are clear."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard import Mesh

BATCH = 64
ROW = [Mesh.of({"data": 8})]


def build(micro_batches, recompute, width=64, layers=4):
    """A residual MLP with Adam, its layers in a loop."""

    def layer(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    def loss(weights, x, y):
        x, _ = jax.lax.scan(jax.checkpoint(layer) if recompute == "full" else layer, x, weights)
        return jnp.mean((x - y) ** 2)

    def step(state, x, y):
        weights, first, second = state

        def one(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, *part)), None

        parts = tuple(a.reshape(-1, micro_batches, width).swapaxes(0, 1) for a in (x, y))
        total, _ = jax.lax.scan(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)), parts)
        value, gradients = jax.tree.map(lambda a: a / micro_batches, total)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
        weights = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-3), weights, first, second)
        return (weights, first, second), value

    array = jax.ShapeDtypeStruct
    weights = array((layers, width, 4 * width), "float32"), array((layers, 4 * width, width), "float32")
    rows = array((BATCH, width), "float32")
    return jax.jit(step, donate_argnums=0), (weights, weights, weights), rows, rows


def small(micro_batches):
    """A step that is planned in no time."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    return step, jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((BATCH, 64), "float32")


def numbers(rng):
    arguments = build(1, "none")[1:]
    state, *rows = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), arguments)
    weights, first, second = state
    return (weights, first, jax.tree.map(jnp.abs, second)), *rows


CHOICES = {"micro_batches": [1, 2, 4], "recompute": ["none", "full"]}


def configured(builder=build, **options):
    given = {"mesh": ROW, "machine": "cpu:8", "choices": CHOICES, "progress": False}
    return gshard.configure(builder, **(given | options))


@pytest.fixture(scope="module")
def found():
    return configured()


def check_runs(configuration, arguments):
    """Calls a configuration thrice beside the unpartitioned step without micro-batches; the last state."""
    step, *_ = build(1, "none")
    run, ours, theirs = configuration.jit(), jax.tree.map(jnp.copy, arguments), arguments
    for _ in range(3):
        state, value = run(*ours)
        expected_state, expected = step.__wrapped__(*theirs)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state, expected_state)
        ours, theirs = (state, *ours[1:]), (expected_state, *theirs[1:])
    return state


def test_the_best_is_optimal(found):
    best = found.best
    # To compute a layer again takes less time than to write its residuals into stacks, and to copy them out of these.
    assert best.keywords == {"micro_batches": 1, "recompute": "full"}
    assert best.found.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_no_configuration_is_better_that_was_left_out(found):
    """Every configuration, searched alone, takes at least the time of the best."""
    for micro_batches in (1, 4):
        for recompute in ("none", "full"):
            step, *arguments = build(micro_batches, recompute)
            alone = gshard.search(step, *arguments, mesh=ROW, machine="cpu:8", progress=False)
            assert alone.cost.seconds >= found.best.seconds * (1 - 1e-9)
    rows, others = len(found.rows), len(found.not_searched)
    assert rows + others == 6


def test_the_text_has_a_row_for_each(found):
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    for text in ("micro_batches", "estimated to be no faster", "gap"):
        assert text in str(found)


def test_a_saved_plan_runs_in_another_process(found, tmp_path, rng):
    found.best.save(tmp_path / "best.json")
    plan = gshard.SavedPlan.load(tmp_path / "best.json")
    step, *_ = build(**found.best.keywords)
    arguments = numbers(rng)
    expected = jax.jit(step.__wrapped__)(*arguments)
    got = gshard.jit(step, mesh={"data": 8}, plan=plan)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, expected)


def test_the_budget_is_kept():
    short = configured(budget_seconds=0.1)
    assert short.best.seconds > 0
    assert short.seconds < 12, "no more than a planning of the step, and of data parallelism and FSDP"
    assert [why for why in short.not_searched.values() if "time was over" in why]


def test_nothing_fits():
    with pytest.raises(gshard.stages.MemoryLimitError, match=r"no configuration fits in 60\.0 KiB") as error:
        configured(memory_limit="60KiB", choices={"micro_batches": [1, 4], "recompute": ["full"]})
    assert "nearest: micro_batches=" in str(error.value)
    assert "more than it has" in str(error.value)
    assert error.value.needed > 60 * 1024


def test_a_signal_ends_it_with_the_best_so_far():
    def stop(line):
        if "best so far" in line:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        some = configured(progress=stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert some.stopped == signal.SIGINT
    assert len(some.rows) == 1
    assert "Ctrl-C ended the search" in str(some)


def test_steps_that_are_jitted(rng):
    def jitted(micro_batches):
        step, *arguments = build(micro_batches, "full")
        return gshard.jit(step), *arguments

    some = configured(jitted, choices={"micro_batches": [4]})
    check_runs(some.best, numbers(rng))


def test_steps_of_a_framework():
    equinox = pytest.importorskip("equinox")

    def with_equinox(micro_batches):
        step, *arguments = small(micro_batches)
        return equinox.filter_jit(step), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arguments)

    some = configured(with_equinox, choices={"micro_batches": [1]})
    assert some.best.keywords == {"micro_batches": 1}
    with pytest.raises(gshard.ArgumentError, match="instead_of_jit"):
        some.best.jit()


def test_builders_that_make_no_step():
    def some_only(micro_batches):
        return small(micro_batches) if micro_batches == 2 else None

    only = configured(some_only, choices={"micro_batches": [1, 2]})
    assert only.best.keywords == {"micro_batches": 2}
    assert "for which the builder returns None" in str(only)
    with pytest.raises(gshard.ArgumentError, match="returns None for all keywords"):
        configured(lambda micro_batches: None, choices={"micro_batches": [1, 2]})
    with pytest.raises(gshard.ArgumentError, match="returned int, not a tuple"):
        configured(lambda micro_batches: 3, choices={"micro_batches": [1, 2]})
    with pytest.raises(gshard.ArgumentError, match="begins with no function"):
        configured(lambda micro_batches: (3, 4), choices={"micro_batches": [1, 2]})

    def fails(micro_batches):
        raise ValueError("no such size")

    def fails_once(micro_batches):
        return fails(micro_batches) if micro_batches == 2 else small(micro_batches)

    some = configured(fails_once, choices={"micro_batches": [2, 1]})
    assert some.best.keywords == {"micro_batches": 1}
    assert "1 not tried, because of an error: ValueError: no such size: micro_batches=2" in str(some)
    with pytest.raises(ValueError, match="no such size") as error:
        configured(fails, choices={"micro_batches": [2]})
    assert error.value.__notes__[:1] == ["gshard called fails(micro_batches=2)"]


@pytest.mark.parametrize(
    "choices", [None, {}, [1], {"micro_batches": 4}, {"micro_batches": []}, {"micro_batches": "14"}]
)
def test_mistakes_in_choices(choices):
    with pytest.raises(gshard.ArgumentError, match=r"choices (are no dictionary|of 'micro_batches' are no list)"):
        configured(choices=choices)
    with pytest.raises(gshard.ArgumentError, match="takes a builder, not a int"):
        configured(3)
    with pytest.raises(TypeError, match="'rounds'"):
        configured(small, choices={"rounds": [1]})


def test_mistakes_about_devices():
    with pytest.raises(gshard.ArgumentError, match="needs the number of devices"):
        configured(mesh=None, machine=None)
    with pytest.raises(gshard.stages.MachineError):
        configured(mesh=16)


def test_places_to_run_on():
    lines, x = [], np.ones((64, 64), np.float32)
    abstract = configured(small, choices={"micro_batches": [1]}, mesh=Mesh.abstract(data=8), progress=lines.append)
    assert any(line.startswith("gshard.configure") and "micro_batches=1" in line for line in lines)
    assert any("best so far: micro_batches=1" in line for line in lines)
    assert len(abstract.best.jit({"data": 8})(x, x).sharding.device_set) == 8
