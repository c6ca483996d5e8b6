"""A run that is killed, again and again, and resumed computes the same bits as one that nothing disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gshard_m4 import checkpoint
from gshard_m4.config import Run

SMALL_RUN = Path(__file__).with_name("small_run.py")
STEPS = 16


def start(folder, steps=STEPS, *changes):
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, str(SMALL_RUN), str(folder), str(steps), *changes]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1)


def finish(process):
    """The steps that it told of."""
    with process:
        assert process.stdout is not None
        told = process.stdout.read().split()
    assert process.returncode == 0
    return [int(word) for word in told if word != "begun"]


def wait_for(process, line):
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"it ended without saying {line!r}")


def losses(folder):
    return [float(json.loads(line)["loss"]).hex() for line in Run(folder).metrics.read_text().splitlines()]


def parameters(folder):
    _, state, _ = checkpoint.restore(Run(folder).checkpoints)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert finish(start(folder)) == list(range(1, STEPS + 1))
    return folder


@pytest.mark.slow
def test_killed_at_random_moments(whole, rng):
    """Also while a checkpoint is written: every second step begins one."""
    folder = whole.with_name("killed")
    done = 0
    for _ in range(12):
        with start(folder) as process:
            assert process.stdout is not None
            if done < STEPS - 8:  # let it get somewhere
                for line in process.stdout:
                    if line.strip().isdecimal() and int(line) >= done + int(rng.integers(1, 4)):
                        break
            else:
                wait_for(process, "begun")
            time.sleep(float(rng.uniform(0.0, 0.08)))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        found = checkpoint.steps(Run(folder).checkpoints)
        for step in found:
            checkpoint.verify(Run(folder).checkpoints / f"{step:08d}")
        assert max(found, default=0) >= done
        done = max(found, default=0)
    finish(start(folder))
    assert losses(folder) == losses(whole)
    assert parameters(folder) == parameters(whole)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_long_run_takes_no_more_memory_and_no_more_files(whole):
    """2,000 steps, with a checkpoint after every 50 and an evaluation after every 5."""
    process = start(whole.with_name("long"), 2000, "save_every=50")
    pages, files = [], []
    for step in (600, 1200, 1900):
        wait_for(process, str(step))
        pages.append(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]))
        files.append(len(os.listdir(f"/proc/{process.pid}/fd")))
    finish(process)
    assert max(files) - min(files) <= 4, files  # a checkpoint that is just being written
    assert pages[2] < 1.02 * pages[0], pages
    assert len(losses(whole.with_name("long"))) == 2000
