"""Two hosts on one machine, in network namespaces: ``python two_hosts.py FOLDER WHAT``, in namespaces of its own.

Runs small_run.py in two processes, each in a network of its own, and prints the exit code and standard error of each as
JSON. WHAT is ``named``: each host has its address; ``cut``: the same, and the link between them goes down after some
steps; or ``loopback``: each host has its own name for 127.0.1.1, as Debian writes it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SMALL_RUN = Path(__file__).with_name("small_run.py")
ADDRESSES = {"left": "10.99.0.1", "right": "10.99.0.2"}
STEPS = 6


def run(*command):
    subprocess.run(command, check=True)


def connect():
    """Makes two networks and a cable between them."""
    run("mount", "-t", "tmpfs", "none", "/run")
    for host in ADDRESSES:
        run("ip", "netns", "add", host)
    run("ip", "link", "add", "left0", "netns", "left", "type", "veth", "peer", "name", "right0", "netns", "right")
    for host, address in ADDRESSES.items():
        run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", f"{host}0")
        for device in (f"{host}0", "lo"):
            run("ip", "-n", host, "link", "set", device, "up")


def start(folder, host, rank, own):
    hosts = folder / f"hosts-{host}"
    hosts.write_text(f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n")
    options = [f"coordinator={ADDRESSES['left']}:8476", "processes=2", f"process_index={rank}", "hang_timeout=6"]
    options += ["init_timeout=60", "save_every=1"]
    command = [sys.executable, str(SMALL_RUN), str(folder / "run"), str(1000 if "cut" in sys.argv else STEPS), *options]
    inner = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *command]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *inner], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    connect()
    own = {host: "127.0.1.1" if what == "loopback" else address for host, address in ADDRESSES.items()}
    both = [start(folder, host, rank, own[host]) for rank, host in enumerate(ADDRESSES)]
    if what == "cut":
        assert both[0].stdout is not None
        for line in both[0].stdout:
            if line.strip() == "3":
                break
        run("ip", "-n", "left", "link", "set", "left0", "down")
    ended = []
    until = time.monotonic() + 240
    for process in both:
        try:
            said, told = process.communicate(timeout=max(until - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            said, told = process.communicate()
        ended.append({"code": process.returncode, "told": told + said})
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
