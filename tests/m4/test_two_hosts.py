"""Two hosts with a network between them: names that resolve to 127.x, and a link that goes down."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gshard_m4 import together
from gshard_m4.watchdog import LOST, STUCK

TWO_HOSTS = Path(__file__).with_name("two_hosts.py")
OWN = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def why_not():
    """Why this machine cannot have networks of its own; nothing if it can."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("unshare", "ip"))):
        return "needs Linux with unshare and ip"
    tried = 'mount -t tmpfs none /run && ip netns add a && ip -n a link add v0 type veth peer name v1 && touch "$0"'
    done = subprocess.run([*OWN, "sh", "-c", tried, os.devnull], capture_output=True, text=True)
    return f"no network namespaces here: {done.stderr.strip()[:200]}" if done.returncode else ""


@pytest.fixture(scope="module")
def networks():
    if reason := why_not():
        pytest.skip(reason)


def two_hosts(folder, what):
    """Exit codes and standard errors."""
    flags = [word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [*OWN, sys.executable, str(TWO_HOSTS), str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    return [of["code"] for of in ended], [of["told"] for of in ended]


@pytest.mark.slow
def test_two_hosts_with_names_that_others_can_reach_train(networks, tmp_path):
    codes, tolds = two_hosts(tmp_path, "named")
    assert codes == [0, 0], tolds
    assert "no_proxy" not in "".join(tolds), "m4 sets it for those only who have a proxy"


@pytest.mark.slow
def test_a_host_whose_name_is_127_is_named_with_its_cure(networks, tmp_path):
    codes, tolds = two_hosts(tmp_path, "loopback")
    assert codes == [2, 2], tolds
    for told, address in zip(tolds, ("10.99.0.1", "10.99.0.2"), strict=True):
        assert re.search(rf"has the address 127\.0\.1\.1 here(.|\n)*Put the line '{address} \S+' into /etc/hosts", told)


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_by_the_watchdog(networks, tmp_path):
    codes, tolds = two_hosts(tmp_path, "cut")
    assert codes == [STUCK, LOST], tolds
    for told, other in zip(tolds, (1, 0), strict=True):
        assert re.search(rf"process {other} has said nothing for [\d.]+ s", told), told
        assert re.search(
            rf"process {other} is (gone|stuck): it has said nothing for \d+ s: it is stopped, or its", told
        )
        assert re.search(r"go on from step \d+", told), told


def test_one_machine_alone_needs_no_other_name(monkeypatch):
    monkeypatch.setattr(together.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert together.loopback("127.0.0.1:8476") == ""
    assert together.loopback("nonsense") == ""
    monkeypatch.setattr(together.socket, "socket", lambda *_: Line())
    assert "Put the line '10.0.0.5 " in together.loopback("10.0.0.1:8476")
    monkeypatch.setattr(together.socket, "gethostbyname", lambda name: "10.0.0.5")
    assert together.loopback("10.0.0.1:8476") == ""


class Line:
    """A socket that reaches others from 10.0.0.5."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        assert address == ("10.0.0.1", 8476)

    def getsockname(self):
        return "10.0.0.5", 40000
