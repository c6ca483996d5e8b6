"""Checkpoints: bit-equal after restoring, on any number of devices; damage is found; a full disk harms nothing."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from checked_calls import assert_same
from gshard import moe
from gshard_m4 import checkpoint, disk, manifest
from gshard_m4.checkpoint import CheckpointError
from gshard_m4.command_line import main
from gshard_m4.config import Run
from gshard_m4.errors import DamagedError
from gshard_m4.export import export
from gshard_m4.saver import Saver

META = {"config": {"experts": 8, "name": "ünïcode"}, "tokens": 12}


@pytest.fixture(autouse=True)
def levels():
    """The command line quietens libraries; other tests must not notice."""
    before = {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def random_state(rng):
    return {
        "params": {
            "experts": {"wi": jnp.asarray(rng.standard_normal((8, 4, 6)), jnp.float32)},
            "scale": jnp.asarray(rng.standard_normal(5), jnp.bfloat16),
        },
        "moments": {"row": jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)},
        "step": jnp.int32(7),
    }


def test_what_was_saved_comes_back(tmp_path, rng):
    first, second = random_state(rng), random_state(rng)
    checkpoint.save(tmp_path, 10, first, META)
    checkpoint.save(tmp_path, 20, second, {})
    assert checkpoint.steps(tmp_path) == [10, 20]
    step, found, meta = checkpoint.restore(tmp_path, 10)
    assert (step, meta) == (10, META)
    assert_same(found, first)
    assert checkpoint.restore(tmp_path)[0] == 20
    assert_same(checkpoint.restore(tmp_path, like=jax.eval_shape(lambda: second))[1], second)


@pytest.mark.parametrize(("before", "after"), [(8, 1), (8, 4), (2, 8)])
def test_another_number_of_devices(before, after, tmp_path, rng):
    """Each device writes its part of a large array; a small array is one file."""

    def spread(count):
        mesh = jax.make_mesh((count,), ("expert",), devices=jax.devices()[:count])
        split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["expert"], []))
        return lambda x: split if x.ndim and x.shape[0] % count == 0 else whole

    state = random_state(rng) | {"large": jnp.asarray(rng.standard_normal((8, 2**15)), jnp.float32)}
    placed = spread(before)
    folder = checkpoint.save(tmp_path, 1, jax.tree.map(lambda x: jax.device_put(x, placed(x)), state), {}) / "state"
    for name, count in (("large", before), ("params.experts.wi", 1)):
        files = [p for p in (folder / name).rglob("*") if p.is_file() and not p.name.startswith(".")]
        assert len(files) == count
    wanted = spread(after)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted(x)), state)
    _, found, _ = checkpoint.restore(tmp_path, like=like)
    assert_same(found, state)
    assert len(found["params"]["experts"]["wi"].sharding.device_set) == after


def flipped(content, rng):
    changed = bytearray(content)
    changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def test_every_damaged_file_is_named(tmp_path, rng):
    folder = checkpoint.save(tmp_path, 3, random_state(rng), META)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != checkpoint.MANIFEST)
    assert any("params.experts.wi" in str(file) for file in files), "the name of a file should say which array it is"
    for file in files:
        sound = file.read_bytes()
        for changed in (sound[: len(sound) // 2], bytes(len(sound)), None, *(flipped(sound, rng) for _ in range(8))):
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
            with pytest.raises(DamagedError, match=r"is damaged.*" + re.escape(file.name)):
                checkpoint.restore(tmp_path, 3)
            file.write_bytes(sound)
    manifest_file = folder / checkpoint.MANIFEST
    sound = manifest_file.read_bytes()
    for _ in range(60):  # it cannot be read, or a file is not as it says, or nothing has changed
        manifest_file.write_bytes(flipped(sound, rng))
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            continue
        assert json.loads(manifest_file.read_bytes()) == json.loads(sound)
    manifest_file.write_bytes(sound)
    checkpoint.verify(folder)


def test_swapped_and_added_files_are_found(tmp_path, rng):
    folder = checkpoint.save(tmp_path, 3, random_state(rng), META)
    (folder / "state" / "extra").write_text("x")
    with pytest.raises(CheckpointError, match="'state/extra' does not belong"):
        checkpoint.restore(tmp_path)
    (folder / "state" / "extra").unlink()
    written = (folder / checkpoint.MANIFEST).read_text()
    for outside in ("../outside", str(tmp_path / "outside")):
        named = json.loads(written)
        (tmp_path / "outside").write_text("x")
        named["files"][outside] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        (folder / checkpoint.MANIFEST).write_text(json.dumps(named))
        with pytest.raises(CheckpointError, match=r"outside' is missing"):
            checkpoint.restore(tmp_path)
    (folder / checkpoint.MANIFEST).write_text(written)
    data = next(p for p in (folder / "state" / "params.experts.wi").iterdir() if not p.name.startswith("."))
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"params\.experts\.wi"):
        checkpoint.restore(tmp_path)


def test_the_newest_sound_step_is_found(tmp_path, rng):
    states = [random_state(rng) for _ in range(3)]
    for i, state in enumerate(states):
        checkpoint.save(tmp_path, i, state, {})
    (tmp_path / "00000002" / checkpoint.META).write_text("{}")
    damaged = []
    step, found, _ = checkpoint.restore(tmp_path, tell=damaged.append)
    assert step == 1
    assert_same(found, states[1])
    assert "00000002" in str(damaged[0])
    for i in range(2):
        (tmp_path / f"0000000{i}" / checkpoint.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        checkpoint.restore(tmp_path)


def test_another_model_is_refused_by_name(tmp_path, rng):
    state = random_state(rng)
    checkpoint.save(tmp_path, 1, state, {})
    wider = jax.tree.map(lambda x: x, state)
    wider["params"]["experts"]["wi"] = jnp.zeros((16, 4, 6))
    with pytest.raises(CheckpointError, match=r"'params/experts/wi' is float32\[8,4,6\].* and float32\[16,4,6\]"):
        checkpoint.restore(tmp_path, like=wider)
    del wider["params"]["experts"]
    with pytest.raises(CheckpointError, match="absent in the model"):
        checkpoint.restore(tmp_path, like=wider)


def test_absent_steps_unusable_directories_and_a_full_disk(tmp_path, rng, monkeypatch):
    checkpoint.save(tmp_path, 1, random_state(rng), {})
    (tmp_path / "file").write_text("")
    for told, wrong in (
        ("there is no checkpoint", lambda: checkpoint.restore(tmp_path / "nowhere")),
        ("there is no step 2", lambda: checkpoint.restore(tmp_path, 2)),
        ("saved already", lambda: checkpoint.save(tmp_path, 1, random_state(rng), {})),
        ("step 1 could not be saved", lambda: checkpoint.save(tmp_path / "file", 1, random_state(rng), {})),
    ):
        with pytest.raises(CheckpointError, match=told):
            wrong()
    # A disk without room is noticed before anything is written.
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100))
    told = r"step 2 could not be saved: no space left(.|\n)*needed(.|\n)*step 1 is intact"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path, 2, random_state(rng), {})


WRITER = """
import resource, sys
import numpy as np
from gshard_m4 import checkpoint, disk

directory = sys.argv[1]
state = {"w": np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)}
checkpoint.save(directory, 1, state, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
try:
    checkpoint.save(directory, 2, state, {})
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    """A limit on file sizes fails the array's file after its first quarter, as a disk that fills up does."""
    run = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for part in ("step 2 could not be saved: no space left", str(tmp_path), "about 2.0 MiB", "step 1 is intact"):
        assert part in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    checkpoint.verify(tmp_path / "00000001")


def test_a_disk_that_fills_up_while_writing(tmp_path, rng, monkeypatch):
    """Of the folders of a step the first cannot be made, then the second, until there is room for all."""

    def nearly_full(path, *args, **options):
        made.append(path)
        if len(made) > room:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return mkdir(path, *args, **options)

    checkpoint.save(tmp_path, 1, random_state(rng), {})
    mkdir, made, room, told = os.mkdir, [], 0, "no space left"
    monkeypatch.setattr(os, "mkdir", nearly_full)
    while told:
        assert "no space left" in told
        assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
        made.clear()
        room, told = room + 1, ""
        try:
            checkpoint.save(tmp_path, 2, random_state(rng), {})
        except CheckpointError as error:
            told = str(error)
    assert (room > 2, checkpoint.steps(tmp_path)) == (True, [1, 2])


def test_what_a_killed_writer_left_is_removed(tmp_path, rng):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    leftover, alive = tmp_path / f".saving-00000001-{killed.pid}", tmp_path / f".saving-00000001-{os.getppid()}"
    leftover.mkdir()
    alive.mkdir()
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, 1, random_state(rng), {})
    assert not leftover.exists()
    assert alive.exists()


def test_the_best_is_kept_beside_the_newest(tmp_path, rng):
    for step, score in enumerate([3.0, 1.5, 2.0, None, 1.7]):
        checkpoint.save(tmp_path, step, random_state(rng), {}, score=score)
        checkpoint.prune(tmp_path, 2)
    assert checkpoint.best(tmp_path) == 1
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    (tmp_path / "00000001" / checkpoint.META).write_text("{")
    assert checkpoint.best(tmp_path) == 4, "what cannot be read has no score"


def test_what_changes_while_a_step_is_written_is_not_in_it(tmp_path, rng):
    """Training goes on with the memory of the state as soon as `begin` is back."""
    state = {"w": jnp.asarray(rng.standard_normal((512, 512)), jnp.float32), "n": rng.standard_normal(1000)}
    want = jax.tree.map(lambda x: np.array(x, copy=True), state)
    finish = checkpoint.begin(tmp_path, 1, state, {})
    state["n"][:] = 0
    over = jax.jit(lambda x: x * 0, donate_argnums=0)(state["w"])
    over.block_until_ready()
    finish()
    assert_same(checkpoint.restore(tmp_path)[1], want)


def test_an_error_in_the_background_is_told(tmp_path, rng):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, Saver(tmp_path, 2) as saver:
        saver.save(1, random_state(rng), {})
        saver.wait()
        patch.setattr(manifest, "write", full)
        saver.save(2, random_state(rng), {})
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved: no space left(.|\n)*step 1 is intact"):
            saver.wait()
        saver.save(3, random_state(rng), {})
        with pytest.raises(CheckpointError, match="step 3"):
            saver.__exit__(None, None, None)
        saver.save(4, random_state(rng), {})
        saver.__exit__(ValueError, ValueError(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


SAVING = """
import sys
import numpy as np
from gshard_m4.saver import Saver
from gshard_m4 import checkpoint

first = max(checkpoint.steps(sys.argv[1]), default=0) + 1
print("begun", flush=True)
with Saver(sys.argv[1], 3) as saver:
    for step in range(first, first + 10_000):
        saver.save(step, {"w": np.full((64, 1024), step, np.float32), "v": np.full((7, 5), -step, np.float32)}, {})
        if step > first:
            print(step - 1, flush=True)
"""


def test_a_killed_writer_leaves_whole_steps(tmp_path, rng):
    """Killed at random moments while it writes and removes steps: each one listed is whole, none goes back."""
    newest = 0
    for _ in range(2):
        command = [sys.executable, "-c", SAVING, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "begun\n"
            time.sleep(float(rng.uniform(0.0, 0.6)))
            writer.kill()
            promised = writer.stdout.read().split()
        found = checkpoint.steps(tmp_path)
        assert max(found, default=0) >= max([newest, *map(int, promised)])
        for step in found:
            _, state, _ = checkpoint.restore(tmp_path, step)
            assert (state["w"] == step).all()
            assert (state["v"] == -step).all()
        newest = max(found, default=0)


def test_parameters_go_to_other_frameworks(tmp_path, rng):
    model = moe.TransformerConfig(9, 7, model_dim=8, hidden_dim=12, heads=2, head_dim=4, experts=2, group_size=None)
    specs = moe.param_specs(model)
    state = {"params": jax.tree.map(lambda spec: rng.standard_normal(spec.shape, np.float32), specs)}
    checkpoint.save(Run(tmp_path).checkpoints, 5, state, {"model": {"experts": 2}})
    assert export(Run(tmp_path), tmp_path / "out" / "model.safetensors") == 5
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"step": "5", "model": '{"experts": 2}'}
        names = list(file.keys())
        stacked = state["params"]["decoder"]["blocks"]["sparse"]["experts"]["wi"]
        for layer in range(3):
            found = file.get_tensor(f"decoder.blocks.{layer}.sparse.experts.wi")
            assert np.array_equal(found, stacked[layer])
        total = sum(file.get_tensor(name).size for name in names)
    assert total == moe.parameter_count(specs)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        export(Run(tmp_path), tmp_path / "file" / "model.safetensors")


def test_the_command_lists_verifies_and_exports(tmp_path, rng, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    run = ["--run", str(tmp_path)]
    assert main(["checkpoint", "list", *run]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    for step in (1, 2):
        checkpoint.save(Run(tmp_path).checkpoints, step, random_state(rng), {}, score=step)
    assert main(["checkpoint", "verify", *run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2"]
    assert lines[0].endswith("sound  best")
    (Run(tmp_path).checkpoints / "00000002" / checkpoint.META).write_text("{}")
    assert main(["checkpoint", "verify", *run]) == 5
    assert "the file 'meta.json' has 2 bytes" in capsys.readouterr().out
    assert main(["checkpoint", "verify", *run, "--step", "1"]) == 0
    assert main(["checkpoint", "export", *run, "--step", "2"]) == 5
    assert "is damaged" in capsys.readouterr().err
