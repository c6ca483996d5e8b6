"""The law: two processes run one program, whatever one of them planned before; if they do not, both are told."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PROCESS = Path(__file__).resolve().parent.parent / "two_processes.py"
PATIENCE = 60  # seconds; processes that run different programs wait for each other for ever


def together(what):
    """What two processes print, that do this together.

    Raises:
        AssertionError: one fails, or they do not end in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    flags = [word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word]
    environment = os.environ | {"XLA_FLAGS": " ".join([*flags, "--xla_force_host_platform_device_count=8"])}
    line = [sys.executable, str(PROCESS)]
    pair = [
        subprocess.Popen(
            [*line, str(i), address, what], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        told = [process.communicate(timeout=PATIENCE) for process in pair]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"two processes that do {what!r} are still waiting after {PATIENCE} s") from None
    finally:
        for process in pair:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(pair, told, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [out.strip().splitlines()[-1] for out, _ in told]  # Gloo prints lines of its own


def test_what_one_process_planned_before_changes_nothing():
    assert together("explains-first") == ["right", "right"]


def test_different_programs_are_refused_by_both():
    """A collective that the other process does not take part in would wait for ever."""
    told = together("different")
    assert all(line.startswith("refused: ") for line in told), told
    assert all("process" in line for line in told), told
