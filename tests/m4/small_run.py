"""A small training run as a process of its own, to be killed: ``python small_run.py FOLDER STEPS [OPTION=VALUE ...]``.

Prints each step it has taken. SIGTERM saves and ends it with 143, SIGINT with 130, as with ``gshard-m4 train``.
"""

import dataclasses
import io
import logging
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

from gshard import GShardError, moe
from gshard_m4 import train
from gshard_m4.config import Run, TrainConfig, on_devices
from gshard_m4.processes import Alone
from gshard_m4.progress import Progress
from gshard_m4.stopping import asked_to_stop
from gshard_m4.together import Processes, Together

B, L, V = 8, 6, 12
MODEL = moe.TransformerConfig(
    source_vocabulary=V, target_vocabulary=V, model_dim=8, hidden_dim=16, heads=2, head_dim=4,
    encoder_layers=2, decoder_layers=2, experts=2, group_size=None, dropout=0.1,
)  # fmt: skip


def batch(step, process=0, processes=1):
    """Sentences of several lengths, ended and padded; of several processes the rows of one."""
    rng = np.random.default_rng(step)
    ids = np.where(np.arange(L) < rng.integers(1, L, (B, 1)), rng.integers(3, V, (B, L)), 0)
    ids[np.arange(B), (ids != 0).sum(1)] = 1
    ids = ids[process * B // processes : (process + 1) * B // processes].astype(np.int32)
    return {"source": ids, "target": ids}


class Telling(Progress):
    """Says each step at once."""

    def update(self, done, values):
        print(done, flush=True)


def main():
    folder, steps, *changes = sys.argv[1:]
    given = dict(change.split("=") for change in changes)
    defaults = dataclasses.asdict(TrainConfig()) | dataclasses.asdict(Processes()) | {"coordinator": ""}
    kinds = {name: int if default is None else type(default) for name, default in defaults.items()}
    settings = {name: kinds[name](value) for name, value in given.items() if name in kinds}
    processes = Processes(**{n: v for n, v in settings.items() if hasattr(Processes(), n)})
    chosen = {n: v for n, v in settings.items() if hasattr(TrainConfig(), n)}
    options = TrainConfig(**({"steps": int(steps), "save_every": 2, "evaluate_every": 5} | chosen))
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    def failing_batch(step, process=0, count=1):
        if step == int(given.get("raise_at", -1)):
            raise ValueError("the corpus is on fire")
        if step == int(given.get("hang_at", -1)):
            print("hanging", flush=True)
            time.sleep(1000)
        if processes.several and count == 1:
            print("whole batch of step", step, flush=True)
        return batch(step, process, count)

    print("begun", flush=True)
    try:
        group = Alone()
        if processes.several:
            processes.initialize()
            group = Together(processes, Run(Path(folder)).checkpoints)
        model = on_devices(MODEL, len(jax.devices()), int(given.get("replicas", 1)))
        with group, asked_to_stop() as asked:
            found = train.train(
                model, options, Run(Path(folder)), failing_batch, [batch(10**6)], resume=True, stop=asked,
                show=Telling(int(steps), 1, io.StringIO()), group=group,
            )  # fmt: skip
    except (GShardError, ValueError) as error:
        print(error, flush=True)
        if processes.several:
            os._exit(2)
        return 2
    return asked.exit_code if found.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
