"""Two processes that train one model over sockets; and what the one hears when the other dies, raises or is stuck."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from gshard_m4 import checkpoint, together, watchdog
from gshard_m4.config import Run
from gshard_m4.relay import Relay
from gshard_m4.watchdog import LOST, NAMED, STUCK, Hub, Watch

SMALL_RUN = Path(__file__).with_name("small_run.py")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


RUNNING = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """A test that fails leaves no processes behind that train on."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def start(folder, steps, count, changes=None):
    """A run of two devices in `count` processes."""
    flags = [word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word]
    environment = os.environ | {
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={2 // count}"]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    port, pipe = free_port(), subprocess.PIPE
    for rank in range(count):
        command = [sys.executable, str(SMALL_RUN), str(folder), str(steps), *(changes or {}).get(rank, [])]
        if count > 1:
            command += [f"coordinator=127.0.0.1:{port}", f"processes={count}", "init_timeout=120"]
            command += [f"process_index={rank}"]
        RUNNING.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
    return RUNNING[-count:]


def wait_for(process, line):
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"it ended without saying {line!r}:\n{process.stderr and process.stderr.read()}")


def wait_for_checkpoint(folder, pair):
    """The next step that is saved."""
    before = max(checkpoint.steps(Run(folder).checkpoints), default=0)
    while all(process.poll() is None for process in pair):
        if (found := max(checkpoint.steps(Run(folder).checkpoints), default=0)) > before:
            return found
        time.sleep(0.05)
    raise AssertionError([end(process) for process in pair])


def end(process):
    """Exit code and what it said on standard error."""
    with process:
        _, told = process.communicate(timeout=200)
    return process.returncode, told


def losses(folder):
    return [json.loads(line)["loss"] for line in Run(folder).metrics.read_text().splitlines()]


def bits(folder):
    """Of the losses and of the newest state."""
    _, state, _ = checkpoint.restore(Run(folder).checkpoints)
    return [loss.hex() for loss in losses(folder)], [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, rng):
    """Also while a checkpoint is written, as every second step begins one: the bits of an undisturbed run."""
    (whole,) = start(tmp_path / "whole", 16, 1)
    assert end(whole)[0] == 0
    folder, done = tmp_path / "killed", 0
    for _ in range(12):
        (process,) = start(folder, 16, 1)
        # It gets somewhere first, unless little is left to do.
        wait_for(process, str(done + int(rng.integers(1, 4))) if done < 8 else "begun")
        time.sleep(float(rng.uniform(0.0, 0.08)))
        process.kill()
        assert end(process)[0] == -signal.SIGKILL
        found = checkpoint.steps(Run(folder).checkpoints)
        for step in found:
            checkpoint.verify(Run(folder).checkpoints / f"{step:08d}")
        assert max(found, default=0) >= done
        done = max(found, default=0)
    (last,) = start(folder, 16, 1)
    assert end(last)[0] == 0
    assert bits(folder) == bits(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_long_run_takes_no_more_memory_and_no_more_files(tmp_path):
    """2,000 steps, with a checkpoint after every 50 and an evaluation after every 5."""
    (process,) = start(tmp_path, 2000, 1, {0: ["save_every=50"]})
    pages, files = [], []
    for step in (600, 1200, 1900):
        wait_for(process, str(step))
        pages.append(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]))
        files.append(len(os.listdir(f"/proc/{process.pid}/fd")))
    assert end(process)[0] == 0
    assert max(files) - min(files) <= 4, files  # a checkpoint that is just being written
    assert pages[2] < 1.02 * pages[0], pages
    assert len(losses(tmp_path)) == 2000


@pytest.mark.slow
def test_two_processes_compute_what_one_does_and_resume_after_a_death(tmp_path):
    """SIGKILL of either; SIGTERM of either stops both at the same step; then one process goes on with the same bits."""
    (one,) = start(tmp_path / "one", 12, 1)
    assert end(one)[0] == 0

    folder = tmp_path / "two"
    for victim in (1, 0):
        pair = start(folder, 1000, 2)
        saved = wait_for_checkpoint(folder, pair)
        killed = time.monotonic()
        pair[victim].kill()
        code, told = end(pair[1 - victim])
        assert time.monotonic() - killed < 2.0
        assert code == LOST, told
        assert f"process {victim} is gone" in told
        named = re.search(r"go on from step (\d+)", told)
        assert int(named[1]) >= saved
        end(pair[victim])
    for victim in (0, 1):
        pair = start(folder, 1000, 2)
        wait_for_checkpoint(folder, pair)
        pair[victim].send_signal(signal.SIGTERM)
        assert [end(process)[0] for process in pair] == [143, 143]
    saved = checkpoint.steps(Run(folder).checkpoints)[-1]
    checkpoint.verify(Run(folder).checkpoints / f"{saved:08d}")
    common = min(12, saved)
    np.testing.assert_allclose(losses(folder)[:common], losses(tmp_path / "one")[:common], rtol=1e-5)

    (alone,) = start(folder, saved + 2, 1)
    assert end(alone)[0] == 0
    assert len(losses(folder)) == saved + 2


@pytest.mark.slow
def test_an_exception_and_a_hang_are_told(tmp_path):
    pair = start(tmp_path / "raising", 1000, 2, {1: ["raise_at=5"]})
    wait_for(pair[1], "the corpus is on fire")
    raised = time.monotonic()
    code, told = end(pair[0])
    assert time.monotonic() - raised < 2.0
    assert code == LOST
    assert "process 1 is gone: ValueError: the corpus is on fire" in told
    assert end(pair[1])[0] == 2

    pair = start(tmp_path / "hanging", 1000, 2, {0: ["hang_timeout=6"], 1: ["hang_at=5"]})
    wait_for(pair[1], "hanging")
    stuck = time.monotonic()
    codes, tolds = zip(*map(end, pair), strict=True)
    assert time.monotonic() - stuck < 12.0
    assert codes == (STUCK, STUCK)
    named = re.search(r"process 1 is in 'batch' of step 5, and the others have waited for it for ([\d.]+) s", tolds[0])
    assert named is not None, tolds[0]
    assert NAMED <= float(named[1]) < 6.0, "long before it is stuck"
    assert "process 1 is stuck" in tolds[0]
    assert "failing_batch" in tolds[1], "its stacks are shown"


@pytest.mark.slow
def test_processes_are_started_alike_and_draw_their_own_rows(tmp_path):
    for process in start(tmp_path / "unlike", 1000, 2, {1: ["learning_rate=0.5"]}):
        told, _ = process.communicate(timeout=200)
        assert process.returncode == 2
        assert "train.learning_rate is 1.0 for process 0 and 0.5 for process 1" in told

    for process in start(tmp_path / "alike", 6, 2):
        told, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        assert [line for line in told.splitlines() if "whole" in line] == ["whole batch of step 0"]


def test_those_who_do_not_come_and_ports_that_are_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, str(SMALL_RUN), str(tmp_path / "r"), "3", f"coordinator=127.0.0.1:{port}"]
        taken = subprocess.run([*command, "processes=2"], capture_output=True, text=True, timeout=100)
    assert taken.returncode != 0
    assert "the coordinator cannot listen: Address already in use" in taken.stdout + taken.stderr


class ReachesOthers:
    """A socket that reaches others from 10.0.0.5."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        assert address == ("10.0.0.1", 8476)

    def getsockname(self):
        return "10.0.0.5", 40000


def test_a_host_whose_name_is_127_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(together.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert together.loopback("127.0.0.1:8476") == ""
    assert together.loopback("nonsense") == ""
    monkeypatch.setattr(together.socket, "socket", lambda *_: ReachesOthers())
    assert "Put the line '10.0.0.5 " in together.loopback("10.0.0.1:8476")
    monkeypatch.setattr(together.socket, "gethostbyname", lambda name: "10.0.0.5")
    assert together.loopback("10.0.0.1:8476") == ""


class Ends:
    """Notes when and with which code a process would have ended."""

    def __init__(self):
        self.codes = []
        self.event = threading.Event()

    def __call__(self, code):
        self.codes.append(code)
        self.event.set()


LIMITS = {"": 3.5, "checkpoint": 60.0}


@pytest.fixture
def three():
    """A hub, three watches that have said hello and where they are, and how their processes would have ended."""
    hubs = []

    def made(limits=LIMITS, heard=3):
        hubs.append(hub := Hub("127.0.0.1", 3, limits))
        ends = [Ends() for _ in range(3)]
        watches = [Watch(("127.0.0.1", hub.port), hub.token, rank, str, ends[rank]) for rank in range(3)]
        for watch in watches:
            watch.at(0, "step")
        deadline = time.monotonic() + 30
        while len(hub._lines) < 3 or len(hub._at) < heard:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return watches, ends

    yield made
    for hub in hubs:
        hub.close()


def test_a_death_is_told_within_two_seconds(three, capfd):
    watches, ends = three()
    began = time.monotonic()
    watches[2]._line.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        assert ends[rank].event.wait(2.0)
        assert ends[rank].codes == [LOST]
    assert time.monotonic() - began < 2.0
    assert capfd.readouterr().err.count("process 2 is gone: its connection ended") >= 2


def test_a_failure_that_follows_from_a_death_is_not_told_as_one_of_its_own(three, monkeypatch, capfd):
    """A collective of process 1 fails as process 2 dies; on a busy machine the hub hears of the death long after."""
    real, busy = watchdog._messages, threading.Event()

    def late(line):
        """The hub reads what process 2 said before it died, and the end of the connection, when it comes to it."""
        for message in real(line):
            ended = message.get("hello") == 2
            yield message
            if ended:
                busy.wait(20)

    monkeypatch.setattr(watchdog, "_messages", late)
    watches, ends = three({"": 60.0}, heard=2)
    watches[2]._line.shutdown(socket.SHUT_RDWR)
    failing = threading.Thread(target=watches[1].failed, args=("JaxRuntimeError: connection reset",))
    failing.start()
    failing.join(2.5)
    assert failing.is_alive()
    assert not ends[0].codes, "nobody is named before it is known who was first"
    busy.set()
    failing.join(4.0)
    assert not failing.is_alive(), "it does not wait longer than it must"
    assert ends[1].codes == [LOST]
    assert ends[0].event.wait(2.0)
    told = capfd.readouterr().err
    assert "process 2 is gone: its connection ended" in told
    assert "JaxRuntimeError" not in told


def test_two_that_fail_at_once_do_not_wait_for_each_other(three, capfd):
    """Both fail in the same batch: the message names one, and the other one exits. A single failure keeps its code."""
    watches, ends = three()
    began = time.monotonic()
    watches[1].failed("JaxRuntimeError: out of memory")
    assert time.monotonic() - began < 2.0
    assert not ends[1].codes, "it ends with its own exit code"
    for rank in (0, 2):
        assert ends[rank].event.wait(2.0)
        assert ends[rank].codes == [LOST]
    assert "process 1 is gone: JaxRuntimeError: out of memory" in capfd.readouterr().err

    watches, ends = three()
    failing = [threading.Thread(target=watches[rank].failed, args=("ValueError: so it goes",)) for rank in (0, 2)]
    for thread in failing:
        thread.start()
    for thread in failing:
        thread.join(4.0)
        assert not thread.is_alive()
    assert ends[1].event.wait(2.0)
    assert sorted([ends[0].codes, ends[2].codes]) == [[], [LOST]]


def test_the_first_process_ends_last(three, capfd):
    """JAX's coordinator ends with it, and would end the others before they have spoken."""
    watches, ends = three()
    when = {}

    def leave(rank):
        when[rank] = time.monotonic()
        if rank:
            time.sleep(0.2)  # its stacks are written
            watches[rank]._line.shutdown(socket.SHUT_RDWR)

        ends[rank](LOST)

    for rank in (0, 1):
        watches[rank]._leave = lambda code, rank=rank: leave(rank)
    watches[2].failed("ValueError: so it goes")
    assert ends[0].event.wait(2.0)
    assert when[0] - when[1] >= 0.19


def test_a_relay_passes_on_what_is_said_and_not_that_the_other_end_died():
    port = free_port()
    relay = Relay("127.0.0.1", port)
    host, _, near_port = relay.address.rpartition(":")
    with socket.create_connection((host, int(near_port))) as client:
        client.sendall(b"before it listens")
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(10)
            far, _ = server.accept()
            assert far.recv(100) == b"before it listens"
            far.sendall(b"x" * 300_000)
            client.settimeout(10)
            came = 0
            while came < 300_000:
                came += len(client.recv(1 << 16))
            far.close()
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(1)
    relay.close()


def test_who_keeps_the_others_waiting_is_named_at_once_and_ended_later(three, capfd):
    watches, ends = three()
    for step in range(1, 4):
        for watch in watches[: 2 if step == 3 else 3]:
            watch.at(step, "step")
        time.sleep(0.3)
    time.sleep(2.2)
    told = capfd.readouterr().err
    assert told.count("process 2 is in 'step' of step 2, and the others have waited for it for") == 2
    assert not any(end.codes for end in ends)
    for end in ends:
        assert end.event.wait(4.0)
        assert end.codes == [STUCK]
    assert "process 2 is stuck: it has been in 'step' of step 2 for" in capfd.readouterr().err


def test_who_comes_back_in_time_or_may_take_long_is_left_alone(three, capfd):
    watches, ends = three({"": 30.0, "checkpoint": 60.0})
    watches[1].at(1, "checkpoint")
    for watch in watches[::2]:
        watch.at(1, "checkpoint")
        watch.at(2, "step")
    said, patience = "", time.monotonic() + 30
    while "process 1 is in 'checkpoint' of step 1" not in said and time.monotonic() < patience:
        time.sleep(0.1)
        said += capfd.readouterr().err
    assert "process 1 is in 'checkpoint' of step 1" in said
    watches[1].at(2, "step")
    for watch in watches:
        watch.bye()
    time.sleep(1.0)
    assert not any(end.codes for end in ends)


def test_a_process_that_hears_nothing_of_the_first_one_ends_by_itself(three, capfd):
    """The network is cut: no connection ends. And the hub is as patient with one that says nothing, in any phase."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        end = Ends()
        watch = Watch(("127.0.0.1", silent.getsockname()[1]), "token", 1, lambda: "Go on.", end, patience=2.5)
        watch.at(7, "checkpoint")
        assert end.event.wait(6.0)
        assert end.codes == [LOST]
    told = capfd.readouterr().err
    assert re.search(r"process 0 has said nothing for [12]\.\d s", told)
    assert re.search(r"process 0 is gone: it has said nothing for [23] s: .* the network to it is down\. Go on\.", told)

    watches, ends = three({"": 2.5, "checkpoint": 60.0})
    for of in watches:
        of.at(1, "checkpoint")
    watches[2]._say = lambda message: None
    assert ends[0].event.wait(8.0)
    assert ends[0].codes == [STUCK]
    assert "process 2 is stuck: it has said nothing for" in capfd.readouterr().err
    assert not ends[1].codes or ends[1].codes == [STUCK]


def test_strangers_are_not_listened_to():
    hub, end = Hub("127.0.0.1", 2, LIMITS), Ends()
    watches = [Watch(("127.0.0.1", hub.port), hub.token, 0, str, end)]
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 0, "token": "wrong"}\n', b"[" * 100_000, b"\xff\xfe\n"):
        with socket.create_connection(("127.0.0.1", hub.port)) as line, contextlib.suppress(ConnectionError):
            line.settimeout(5)
            line.sendall(greeting)
            assert line.recv(1) == b""
    watches.append(Watch(("127.0.0.1", hub.port), hub.token, 1, str, end))
    time.sleep(0.5)
    assert not end.codes
    for watch in watches:
        watch.bye()
    hub.close()
