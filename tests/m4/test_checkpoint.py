"""Checkpoints: bit-equal after restoring, on any number of devices; damage is found; a full disk harms nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4 import checkpoint
from m4.checkpoint import CheckpointError

META = {"config": {"experts": 8, "name": "ünïcode"}, "tokens": 12}


def random_state(rng: np.random.Generator) -> dict:
    return {
        "params": {
            "experts": {"wi": jnp.asarray(rng.standard_normal((8, 4, 6)), jnp.float32)},
            "scale": jnp.asarray(rng.standard_normal(5), jnp.bfloat16),
        },
        "moments": {"row": jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)},
        "step": jnp.int32(7),
    }


def assert_same(found: dict, want: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_what_was_saved_comes_back(tmp_path: Path, rng: np.random.Generator) -> None:
    first, second = random_state(rng), random_state(rng)
    checkpoint.save(tmp_path, 10, first, META)
    checkpoint.save(tmp_path, 20, second, {})
    assert checkpoint.steps(tmp_path) == [10, 20]
    step, found, meta = checkpoint.restore(tmp_path, 10)
    assert (step, meta) == (10, META)
    assert_same(found, first)
    assert checkpoint.restore(tmp_path)[0] == 20
    assert_same(checkpoint.restore(tmp_path, like=jax.eval_shape(lambda: second))[1], second)


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 4), (1, 8), (2, 8)])
def test_another_number_of_devices(before: int, after: int, tmp_path: Path, rng: np.random.Generator) -> None:
    def spread(count: int):
        mesh = jax.make_mesh((count,), ("expert",), devices=jax.devices()[:count])
        split, whole = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["expert"], [])
        )
        return lambda x: split if x.ndim and x.shape[0] % count == 0 else whole

    state = random_state(rng)
    lies = spread(before)
    checkpoint.save(tmp_path, 1, jax.tree.map(lambda x: jax.device_put(x, lies(x)), state), {})
    wanted = spread(after)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted(x)), state)
    _, found, _ = checkpoint.restore(tmp_path, like=like)
    assert_same(found, state)
    assert len(found["params"]["experts"]["wi"].sharding.device_set) == after


def test_every_damaged_file_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoint.save(tmp_path / "good", 3, random_state(rng), META)
    names = sorted(p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file())
    assert any("params.experts.wi" in str(name) for name in names), "the name of a file should say which array it is"
    for number, name in enumerate(names):
        for harm in ("flip", "truncate", "zero", "delete"):
            broken = tmp_path / f"{number}-{harm}"
            shutil.copytree(tmp_path / "good", broken)
            file = broken / name
            content = bytearray(file.read_bytes())
            if harm == "flip":
                content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
                file.write_bytes(content)
            elif harm == "truncate":
                file.write_bytes(content[: len(content) // 2])
            elif harm == "zero":
                file.write_bytes(bytes(len(content)))
            else:
                file.unlink()
            if file.name == checkpoint.MANIFEST:
                # Any change either makes it unreadable or names a file that is not as it says, or changes nothing.
                try:
                    checkpoint.verify(broken / "00000003")
                except CheckpointError:
                    continue
                assert json.loads(file.read_text()) == json.loads((tmp_path / "good" / name).read_text())
            else:
                with pytest.raises(CheckpointError, match=r"is damaged.*" + file.name.replace(".", r"\.")):
                    checkpoint.restore(broken, 3)


def test_swapped_and_added_files_are_found(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = checkpoint.save(tmp_path, 3, random_state(rng), META)
    (folder / "state" / "extra").write_text("x")
    with pytest.raises(CheckpointError, match="'state/extra' does not belong"):
        checkpoint.restore(tmp_path)
    (folder / "state" / "extra").unlink()
    data = next(p for p in (folder / "state" / "params.experts.wi").iterdir() if not p.name.startswith("."))
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"params\.experts\.wi"):
        checkpoint.restore(tmp_path)


def test_the_newest_sound_step_is_found(tmp_path: Path, rng: np.random.Generator) -> None:
    states = [random_state(rng) for _ in range(3)]
    for i, state in enumerate(states):
        checkpoint.save(tmp_path, i, state, {})
    (tmp_path / "00000002" / checkpoint.META).write_text("{}")
    step, found, _, damaged = checkpoint.restore_newest_sound(tmp_path)
    assert step == 1
    assert_same(found, states[1])
    assert "00000002" in str(damaged[0])
    for i in range(2):
        (tmp_path / f"0000000{i}" / checkpoint.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        checkpoint.restore_newest_sound(tmp_path)


def test_another_model_is_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    state = random_state(rng)
    checkpoint.save(tmp_path, 1, state, {})
    wider = jax.tree.map(lambda x: x, state)
    wider["params"]["experts"]["wi"] = jnp.zeros((16, 4, 6))
    with pytest.raises(CheckpointError, match=r"'params/experts/wi' is float32\[8,4,6\].* and float32\[16,4,6\]"):
        checkpoint.restore(tmp_path, like=wider)
    del wider["params"]["experts"]
    with pytest.raises(CheckpointError, match="absent in the model"):
        checkpoint.restore(tmp_path, like=wider)


def test_absent_steps_and_unusable_directories(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.restore(tmp_path / "nowhere")
    checkpoint.save(tmp_path, 1, random_state(rng), {})
    with pytest.raises(CheckpointError, match="there is no step 2"):
        checkpoint.restore(tmp_path, 2)
    with pytest.raises(CheckpointError, match="saved already"):
        checkpoint.save(tmp_path, 1, random_state(rng), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        checkpoint.save(tmp_path / "file", 1, random_state(rng), {})


def test_a_disk_without_room_is_noticed_before_writing(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, random_state(rng), {})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100))
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be saved: no space left(.|\n)*needed(.|\n)*step 1 is intact"
    ):
        checkpoint.save(tmp_path, 2, random_state(rng), {})


WRITER = """
import resource, sys
import numpy as np
from m4 import checkpoint

directory = sys.argv[1]
state = {"w": np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)}
checkpoint.save(directory, 1, state, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
try:
    checkpoint.save(directory, 2, state, {})
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes fails the array's file after its first quarter, as a disk that fills up does."""
    run = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "step 2 could not be saved: no space left" in run.stdout
    assert str(tmp_path) in run.stdout
    assert "needed: about 2.0 MiB" in run.stdout
    assert "step 1 is intact" in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    checkpoint.verify(tmp_path / "00000001")


def test_what_a_killed_writer_left_is_removed(tmp_path: Path, rng: np.random.Generator) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    leftover, alive = tmp_path / f".saving-00000001-{killed.pid}", tmp_path / f".saving-00000001-{os.getppid()}"
    leftover.mkdir()
    alive.mkdir()
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, 1, random_state(rng), {})
    assert not leftover.exists()
    assert alive.exists()


def test_only_the_newest_are_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    for step in range(4):
        checkpoint.save(tmp_path, step, random_state(rng), {})
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [2, 3]
