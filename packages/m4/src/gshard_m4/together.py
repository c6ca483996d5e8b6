"""Several processes, on one machine or many, that train one model together under ``jax.distributed``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gshard_m4 import checkpoint
from gshard_m4.errors import OptionError, TrainError
from gshard_m4.processes import Alone, Draw
from gshard_m4.relay import Relay
from gshard_m4.rows import OwnRows
from gshard_m4.step import Batch
from gshard_m4.watchdog import Hub, Watch

_ADDRESS_BYTES = 512
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        coordinator: host:port of the first process, where the others find it.
        processes: their number; 1 trains alone.
        process_index: which of them this is, from 0.
        cluster: find all of that out from the cluster (Slurm, Open MPI, Kubernetes, Cloud TPU).
        init_timeout: seconds to wait for the others at the start.
        hang_timeout: seconds that a process may keep the others waiting, or be out of their reach, before all of them
            end.
    """

    coordinator: str | None = None
    processes: int = 1
    process_index: int = 0
    cluster: bool = False
    init_timeout: int = 300
    hang_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.process_index < self.processes:
            raise OptionError(f"process_index must be below processes, got {self.process_index} of {self.processes}")
        if self.processes > 1 and not self.coordinator:
            raise OptionError("several processes need a coordinator, as in --coordinator 10.0.0.1:8476")

    @property
    def several(self) -> bool:
        """Whether there may be others."""
        return self.cluster or self.processes > 1

    def initialize(self) -> None:
        """Joins the others; before anything touches a device.

        Raises:
            TrainError: they did not come in time, the coordinator's port is taken, or other hosts do not find this one
                at the address of its name.
        """
        given: dict[str, Any] = {}
        if not self.cluster:
            given = {
                "coordinator_address": self._address(),
                "num_processes": self.processes,
                "process_id": self.process_index,
            }
        if hint := loopback(self.coordinator or ""):
            if _is_processor():
                raise TrainError(
                    "other machines cannot reach this one by its name.", got=socket.gethostname(), hint=hint
                )
            print(f"gshard-m4: {hint}", file=sys.stderr, flush=True)
        try:
            jax.distributed.initialize(
                **given,
                initialization_timeout=self.init_timeout,
                # JAX's own end of an unreachable process, an abort, would come before the watchdog's.
                heartbeat_timeout_seconds=max(60, math.ceil(2 * self.hang_timeout)),
                shutdown_timeout_seconds=30,
            )
        except (RuntimeError, ValueError) as error:
            raise TrainError(
                "the processes did not find each other.",
                got=str(error).splitlines()[0],
                hint="Start all of them with the same --coordinator and --processes, or raise --init-timeout.",
            ) from error

    def _address(self) -> str:
        """Where JAX finds the coordinator: the first process has it, the others have a relay to it."""
        told = self.coordinator or ""
        host, _, port = told.rpartition(":")
        try:
            where = host.strip("[]"), int(port)
            if self.process_index == 0:
                socket.create_server(where).close()
        except (OSError, ValueError) as error:
            raise TrainError(
                f"the coordinator cannot listen: {getattr(error, 'strerror', None) or error}.",
                where=told,
                hint="Give --coordinator as host:port, with an address of this machine and a port that is free.",
            ) from error
        if self.process_index == 0:
            return told
        if any(name.lower() in _PROXIES for name in os.environ):  # gRPC would look for the relay behind a proxy
            for name in ("no_proxy", "no_grpc_proxy"):
                if name == "no_proxy" or name in os.environ:
                    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        return Relay(*where).address


class Together(Alone):
    """The processes that ``jax.distributed`` has joined.

    Args:
        processes: how they were joined.
        checkpoints: where the run saves, to say from which step to go on.
    """

    def __init__(self, processes: Processes, checkpoints: Path):
        self.first = jax.process_index() == 0
        self._checkpoints = checkpoints
        self._rows = 0  # of a batch, once one has been seen
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
        try:
            told = multihost_utils.broadcast_one_to_all(padded)
        except RuntimeError as error:
            raise TrainError(
                "the processes found each other, and their devices cannot reach each other.",
                got=str(error).splitlines()[0][:300],
                hint=loopback(processes.coordinator or "")
                or "The machines must reach each other at every port, not at the coordinator's alone.",
            ) from error
        host, port, token = bytes(np.asarray(told, np.uint8)).decode().split()
        self._watch = Watch((host, int(port)), token, jax.process_index(), self._hint, patience=processes.hang_timeout)

    def _hint(self) -> str:
        found = checkpoint.steps(self._checkpoints)
        return f"Start all processes again with --resume to go on from step {found[-1]}." if found else ""

    def at(self, step: int, phase: str) -> None:
        """Tells the watchdog."""
        self._watch.at(step, phase)

    def agree(self, settings: Mapping[str, Any]) -> None:
        """All of them compare the same texts, so that all or none go on.

        Raises:
            TrainError: some setting is not the same for all.
        """
        mine = json.dumps(settings, sort_keys=True, default=str).encode()
        longest = int(np.max(multihost_utils.process_allgather(np.array([len(mine)]))))
        padded = np.frombuffer(mine.ljust(longest), np.uint8)
        told = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
        if found := disagreement([json.loads(row.tobytes()) for row in told]):
            self._watch.bye()
            self.any(False)  # so that no process takes the end of another one for a death
            raise TrainError(
                f"the processes were not started alike: {found}.",
                hint="Give all of them the same options, versions and corpus, and one folder for the run.",
            )

    def any(self, *values: bool) -> tuple[bool, ...]:
        """One small all-gather."""
        of_all_PV = np.asarray(multihost_utils.process_allgather(np.array(values)))
        return tuple(bool(np.any(of_all_P)) for of_all_P in of_all_PV.reshape(-1, len(values)).T)

    def batch(self, draw: Draw, step: int) -> Batch:
        """This process's rows; what other rows its devices may need is drawn when they do."""
        if not self._rows:
            whole = draw(step)
            self._rows = len(next(iter(whole.values())))
            return whole
        index, count, rows = jax.process_index(), jax.process_count(), self._rows
        others = functools.cache(lambda: draw(step))
        return {
            name: OwnRows(own, index * rows // count, rows, lambda name=name: others()[name])  # type: ignore[misc]
            for name, own in draw(step, index, count).items()
        }

    def runs(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Each process gives its devices their parts of arrays that all processes have, or have their own rows of."""

        def placed(x: Any, sharding: Any) -> Any:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x
            if isinstance(x, OwnRows):
                return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)  # type: ignore[arg-type]
            whole = np.asarray(x)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        def call(*arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(arguments)
            shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, OwnRows) else x for x in leaves]
            lowered = compiled.lower(*jax.tree.unflatten(tree, shaped))  # type: ignore[attr-defined]
            expected = lowered.argument_shardings
            return compiled(*jax.tree.unflatten(tree, map(placed, leaves, expected)))

        return call

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            # Collectives, and checkpoints that are being saved, fail when another process dies: whose end it was the
            # watchdog finds out.
            self._watch.failed(f"{type(error).__name__}: {error}".splitlines()[0])
            return
        self.any(False)  # so that no process ends while another one still trains
        self._watch.bye()
        jax.distributed.shutdown()
        if self._hub is not None:
            self._hub.close()


def loopback(coordinator: str) -> str:
    """What is wrong with the name of this host and how to cure it; nothing if nothing is.

    Without accelerators, JAX gives the other processes the address that this host's own name has here. Debian gives it
    127.0.1.1 in /etc/hosts, which means another machine there.

    Args:
        coordinator: host:port of the first process; one of this machine alone needs no other address.
    """
    host, _, port = coordinator.rpartition(":")
    name = socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:  # nothing is sent
            line.connect((host.strip("[]"), int(port)))
            own = str(line.getsockname()[0])
        there = socket.gethostbyname(name)
    except (OSError, ValueError):
        return ""  # of a name that is not found JAX says so itself
    if not there.startswith("127.") or own.startswith("127."):
        return ""
    return (
        f"The name of this host, {name}, has the address {there} here, which other machines take for their own. "
        f"Put the line '{own} {name}' into /etc/hosts, in place of {there}. Only accelerators do without it."
    )


def _is_processor() -> bool:
    """Whether JAX will compute on processors; its backend, which knows, may not be started yet."""
    named = os.environ.get("JAX_PLATFORMS", "")
    if named:
        return named.split(",")[0] == "cpu"
    return not entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None


def disagreement(told: Sequence[Mapping[str, Any]]) -> str:
    """The first setting that is not the same for all processes, and who says what; nothing if there is none.

    >>> disagreement([{"steps": 9, "experts": 8}, {"steps": 9, "experts": 8}, {"steps": 9, "experts": 4}])
    'experts is 8 for process 0 and 4 for process 2'
    """
    for rank, other in enumerate(told):
        for name in sorted(told[0].keys() | other.keys()):
            if told[0].get(name) != other.get(name):
                return f"{name} is {told[0].get(name)!r} for process 0 and {other.get(name)!r} for process {rank}"
    return ""
