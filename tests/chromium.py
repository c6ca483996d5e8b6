"""A headless Chromium that a test can drive: DevTools messages over a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Chromium:
    """One page. ``requested`` has every address that it asked for."""

    def __enter__(self):
        assert FOUND, "no Chromium"
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        flags = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --disable-extensions"
        flags += " --disable-background-networking --disable-component-update --disable-sync --mute-audio"
        # Chromium reads from 3 and writes to 4.
        place = "import os, sys, fcntl; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
        place += "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
        placed = [sys.executable, "-c", place, str(to_read), str(to_write)]
        chromium = [FOUND, *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={self._home.name}"]
        self._process = subprocess.Popen(
            [*placed, *chromium, "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._session = 0, b"", ""
        self.requested: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, kind, error, at):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def send(self, method, **params):
        """Sends a command and waits for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + 60
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._from], [], [], max(ends - time.monotonic(), 0))[0], f"{method}: no answer"
                read = os.read(self._from, 1 << 16)
                assert read, "Chromium ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            came = json.loads(line)
            if came.get("method") == "Network.requestWillBeSent":
                self.requested.append(came["params"]["request"]["url"])
            if came.get("id") == self._number:
                assert "error" not in came, came
                return came["result"]

    def run(self, script):
        """The value of an expression in the page; waits if it is a promise."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script, seconds=30):
        """Waits until an expression is true."""
        ends = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < ends, f"never came true: {script}"
            time.sleep(0.05)

    def open(self, address):
        """Goes to an address and waits until the page is there."""
        self.send("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def type(self, text):
        """Types into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key, code, control=False):
        """Presses a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                modifiers=2 if control else 0,
            )  # fmt: skip

    def look(self, scheme, width, height):
        """Chooses light or dark, and a size."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path):
        """Takes a picture."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
