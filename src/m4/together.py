"""Several processes, on one machine or many, that train one model together under ``jax.distributed``."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from m4 import checkpoint
from m4.errors import TrainError
from m4.watchdog import Hub, Watch

_ADDRESS_BYTES = 512


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        coordinator: host:port of the first process, where the others find it.
        processes: their number; 1 trains alone.
        process_index: which of them this is, from 0.
        cluster: find all of that out from the cluster (Slurm, Open MPI, Kubernetes, Cloud TPU).
        init_timeout: seconds to wait for the others at the start.
        hang_timeout: seconds that a process may keep the others waiting before all of them end.
    """

    coordinator: str | None = None
    processes: int = 1
    process_index: int = 0
    cluster: bool = False
    init_timeout: int = 300
    hang_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.process_index < self.processes:
            raise ValueError(f"process_index must be below processes, got {self.process_index} of {self.processes}")
        if self.processes > 1 and not self.coordinator:
            raise ValueError("several processes need a coordinator, as in --coordinator 10.0.0.1:8476")

    @property
    def several(self) -> bool:
        """Whether there may be others."""
        return self.cluster or self.processes > 1

    def initialize(self) -> None:
        """Joins the others; before anything touches a device.

        Raises:
            TrainError: they did not come in time, or the coordinator's port is taken.
        """
        if not self.cluster and self.process_index == 0:
            self._check_port()
        given: dict[str, Any] = {}
        if not self.cluster:
            given = {
                "coordinator_address": self.coordinator,
                "num_processes": self.processes,
                "process_id": self.process_index,
            }
        try:
            jax.distributed.initialize(
                **given,
                initialization_timeout=self.init_timeout,
                heartbeat_timeout_seconds=60,
                shutdown_timeout_seconds=30,
            )
        except (RuntimeError, ValueError) as error:
            raise TrainError(
                "the processes did not find each other.",
                got=str(error).splitlines()[0],
                way_out="Start all of them with the same --coordinator and --processes, or raise --init-timeout.",
            ) from error

    def _check_port(self) -> None:
        host, _, port = (self.coordinator or "").rpartition(":")
        try:
            socket.create_server((host.strip("[]"), int(port))).close()
        except (OSError, ValueError) as error:
            raise TrainError(
                f"the coordinator cannot listen: {getattr(error, 'strerror', None) or error}.",
                where=str(self.coordinator),
                way_out="Give --coordinator as host:port, with an address of this machine and a port that is free.",
            ) from error


class Together:
    """The processes that ``jax.distributed`` has joined; implements `m4.processes.Group`.

    Args:
        processes: how they were joined.
        checkpoints: where the run saves, to say from which step to go on.
    """

    def __init__(self, processes: Processes, checkpoints: Path):
        self.first = jax.process_index() == 0
        self._checkpoints = checkpoints
        self._hub: Hub | None = None
        address = ""
        if self.first:
            host = (processes.coordinator or f"{socket.gethostname()}:0").rpartition(":")[0].strip("[]")
            long = max(1800.0, processes.hang_timeout)
            limits = {"": processes.hang_timeout, "start": long, "first step": long, "evaluation": long}
            limits["checkpoint"] = long
            self._hub = Hub(host, jax.process_count(), limits)
            address = f"{host} {self._hub.port} {self._hub.token}"
        padded = np.frombuffer(address.encode().ljust(_ADDRESS_BYTES), np.uint8)
        told = multihost_utils.broadcast_one_to_all(padded)
        host, port, token = bytes(np.asarray(told, np.uint8)).decode().split()
        self._watch = Watch((host, int(port)), token, jax.process_index(), self._hint)

    def _hint(self) -> str:
        found = checkpoint.steps(self._checkpoints)
        return f"Start all processes again with --resume to go on from step {found[-1]}." if found else ""

    def at(self, step: int, phase: str) -> None:
        """Tells the watchdog."""
        self._watch.at(step, phase)

    def any(self, asked: bool) -> bool:
        """One small all-gather."""
        return bool(np.any(multihost_utils.process_allgather(np.array([asked]))))

    def runs(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Each process gives its devices their parts of arrays that all processes have."""

        def placed(x: Any, sharding: Any) -> Any:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x
            whole = np.asarray(x)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        def call(*arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(arguments)
            expected = compiled.lower(*arguments).argument_shardings  # type: ignore[attr-defined]
            return compiled(*jax.tree.unflatten(tree, map(placed, leaves, expected)))

        return call

    def nothing(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._watch.failed(f"{type(error).__name__}: {error}".splitlines()[0])
            return
        self.any(False)  # nobody says goodbye while another one still trains
        self._watch.bye()
        jax.distributed.shutdown()
        if self._hub is not None:
            self._hub.close()
