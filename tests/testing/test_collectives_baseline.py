"""Baselines of what a jitted function sends: what is written, read and compared, and what a difference says."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies

import gshard
from gshard.testing import assert_collectives, assert_no_more_collectives
from gshard.testing.asserted_collectives import SentRecord
from stepped import (
    DATA,
    LAYERS,
    array,
    fsdp_arguments,
    marked_step,
    mlp,
    step,
    tensor_parallel_arguments,
    without_lines,
)

pytestmark = pytest.mark.optimised  # what users get

PROGRAMS = {
    "fsdp": lambda: assert_collectives(jax.jit(step), fsdp_arguments(), total=range(100)),
    "tensor_parallel": lambda: assert_collectives(jax.jit(mlp), tensor_parallel_arguments(), total=range(100)),
    "by_gshard": lambda: assert_collectives(
        gshard.jit(marked_step, mesh={"data": 8}), fsdp_arguments(), total=range(100)
    ),
    "no_collectives": lambda: assert_collectives(jax.jit(jnp.tanh), (array((8,), DATA, "data"),), total=0),
}


@pytest.fixture(scope="module")
def fsdp():
    return PROGRAMS["fsdp"]()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tests" / "step.collectives.txt"


def differs(found, file, **options):
    """The message of a comparison that fails."""
    with pytest.raises(AssertionError) as error:
        assert_no_more_collectives(found, baseline=file, **options)
    return str(error.value).replace(str(file), file.name)


def written(file, record, **changed):
    """Writes a record with other figures as the baseline."""
    other = dataclasses.replace(record, **changed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(other.text("f"))
    return other


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_the_baseline_that_is_written_of_it(name, file):
    found = PROGRAMS[name]()
    assert "there is no baseline" in differs(found, file)
    assert not file.exists(), "only an update writes"
    assert_no_more_collectives(found, baseline=file, update=True)
    assert_no_more_collectives(found, baseline=file, exact=True, tolerance=0.0)
    record = SentRecord.read(file.read_text())
    assert record == SentRecord.of(found)
    assert sum(n for _, n in record.sums.values()) == found.total_bytes
    assert sum(n for _, n in record.rows.values()) == found.total_bytes
    assert sum(times for times, _ in record.sums.values()) == sum(found.times_by_kind.values())


words = strategies.text("abc._[]'0(),/é ", min_size=1, max_size=12).map(lambda s: " ".join(s.split()) or "x")
figures = strategies.tuples(strategies.integers(0, 10**6), strategies.integers(0, 10**15))


@hypothesis.given(
    strategies.dictionaries(strategies.tuples(words, words), figures, max_size=4),
    strategies.lists(strategies.tuples(words, words | strategies.just(""), figures), max_size=4),
    strategies.integers(0, 10**13),
)
def test_a_record_is_read_as_it_was_written(sums, rows, peak):
    keyed = {(*where, array, module): of for where in sums for array, module, of in rows}
    record = SentRecord("data=8", peak, keyed, sums, "jax 0.10.2, cpu")
    assert SentRecord.read(record.text("f")) == record


def test_the_file(golden, fsdp):
    """Without the peak and the version, which depend on JAX."""
    record = dataclasses.replace(SentRecord.of(fsdp), peak=100_000, compiler="jax 0.10.2, cpu")
    golden("collectives_baseline", record.text(fsdp.name))


def test_more_is_refused_and_less_only_if_asked(file, fsdp):
    record = SentRecord.of(fsdp)
    gathers = ("all_gather", "data")
    times, size = record.sums[gathers]
    for of in ((times - 1, size), (times, size - 1)):
        written(file, record, sums={**record.sums, gathers: of})
        text = differs(fsdp, file)
        assert "does more than its baseline says" in text
        assert f"all_gather over data: 12 in one call, 168.0 KiB; was {of[0]}, 168.0 KiB" in text
    for of in ((times + 1, size), (times, size + 1), (times + 1, size + 1)):
        written(file, record, sums={**record.sums, gathers: of})
        assert_no_more_collectives(fsdp, baseline=file)
        assert "is not as its baseline says" in differs(fsdp, file, exact=True)
    written(file, record, sums={**record.sums, ("all_to_all", "data"): (1, 8)})
    assert_no_more_collectives(fsdp, baseline=file)
    assert "all_to_all over data: 0 in one call, 0 B; was 1, 8 B" in differs(fsdp, file, exact=True)
    written(file, record, sums={where: of for where, of in record.sums.items() if where != gathers})
    assert "was 0, 0 B" in differs(fsdp, file)


def test_memory_has_a_tolerance(file, fsdp):
    record = SentRecord.of(fsdp)
    for part, exact, tolerance, passes in (
        (0.99, False, 0.02, True), (0.97, False, 0.02, False), (0.97, False, 0.05, True), (0.5, True, 0.02, False),
        (1.01, True, 0.02, True), (1.5, False, 0.02, True), (1.5, True, 0.02, False),
    ):  # fmt: skip
        written(file, record, peak=int(record.peak * part))
        if passes:
            assert_no_more_collectives(fsdp, baseline=file, exact=exact, tolerance=tolerance)
        else:
            assert "peak memory: " in differs(fsdp, file, exact=exact, tolerance=tolerance)


def test_other_arrays_differ_only_if_asked(file, fsdp):
    record = SentRecord.of(fsdp)
    written(file, record, rows={(k, axes, "another", module): of for (k, axes, _, module), of in record.rows.items()})
    assert_no_more_collectives(fsdp, baseline=file)
    assert "other arrays, or other modules" in differs(fsdp, file, exact=True)


def test_an_update_leaves_a_file_that_is_as_good(file, fsdp):
    record = SentRecord.of(fsdp)
    written(file, record, peak=int(record.peak * 1.01), compiler="jax 0.0.1, tpu")
    before = file.read_text()
    assert_no_more_collectives(fsdp, baseline=file, update=True)
    assert file.read_text() == before
    written(file, record, rows={})
    assert_no_more_collectives(fsdp, baseline=file, update=True)
    assert SentRecord.read(file.read_text()) == record


def test_another_mesh_another_jax_and_other_devices_are_told(file, fsdp):
    written(file, SentRecord.of(fsdp), mesh="data=4", compiler="jax 0.0.1, tpu")
    text = differs(fsdp, file)
    assert "mesh: data=8, was data=4" in text
    assert f"written with jax 0.0.1, tpu, and this is jax {jax.__version__}, cpu" in text


def test_what_a_difference_says(golden, file):
    """Of a step with one more layer. The peak is the same here, since it depends on JAX."""
    before = assert_collectives(jax.jit(step), fsdp_arguments(LAYERS - 1), total=range(100))
    now = PROGRAMS["fsdp"]()
    written(file, SentRecord.of(before), peak=now.peak)
    text = differs(now, file)
    text = text.replace(f"{now.peak:,} bytes", "100,000 bytes")
    golden("collectives_difference", without_lines(text))


def test_a_file_that_is_no_baseline_is_told(file, fsdp):
    file.parent.mkdir(parents=True)
    for text, words in (
        ("hello", "cannot read 'hello'"),
        ("mesh  data=8\npeak  5 bytes\nall_gather  x1  many  over data  w\n", "cannot read 'all_gather"),
        ("mesh  data=8\npeak  5\n", "no line 'peak'"),
        ("", "no line 'mesh'"),
    ):
        file.write_text(text)
        with pytest.raises(gshard.ArgumentError, match="no baseline of collectives") as error:
            assert_no_more_collectives(fsdp, baseline=file)
        assert words in str(error.value)


def test_one_device_has_no_baseline(file):
    with pytest.raises(gshard.ArgumentError, match="for one device"):
        assert_no_more_collectives(jax.jit(jnp.tanh), (jnp.ones(8),), baseline=file, update=True)
    assert not file.exists()
