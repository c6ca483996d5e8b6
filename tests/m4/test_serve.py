"""The server as a process of its own, asked over sockets; and its page in a browser."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="uvicorn (the extra serve) is not installed")
pytest.importorskip("starlette", reason="starlette (the extra serve) is not installed")

import serving
from gshard_m4.command_line import main
from gshard_m4.serve.batcher import Batcher, QueueFullError
from gshard_m4.serve.limits import Rate
from gshard_m4.serve.starting import starting
from gshard_m4.stream import Found, Sentence
from gshard_m4.translate import Hypothesis, Marked, Prepared, Translated

TESTS = Path(__file__).parents[1]
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /translate HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
RUNNING = []
COMPILED = []  # where servers keep compiled programs for each other


@pytest.fixture(scope="module", autouse=True)
def nothing_stays(tmp_path_factory):
    """A test that fails leaves no server behind."""
    COMPILED.append(tmp_path_factory.mktemp("compiled"))
    yield
    for server in RUNNING:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


class Served:
    """A running server."""

    def __init__(self, **options):
        flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
        kept = {"JAX_COMPILATION_CACHE_DIR": str(COMPILED[-1]), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | kept
        command, pipe = [sys.executable, str(TESTS / "serving.py"), json.dumps(options)], subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        RUNNING.append(self)
        said = ""
        for line in self.process.stdout:
            said += line
            if found := re.search(r"serving on http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found.group(1))
                return
        raise AssertionError((said, self.process.communicate(timeout=10)))

    def ask(self, method, path, body=None, headers=JSON, local="127.0.0.1"):
        return asyncio.run(ask(self.port, method, path, body, headers, local))

    def memory(self):
        """Most bytes that were ever resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status).group(1))

    def end(self):
        """Ends it with SIGTERM: exit code and what it wrote."""
        self.process.send_signal(signal.SIGTERM)
        told = self.process.stderr.read()
        return self.process.wait(timeout=30), told


async def ask(port, method, path, body=None, headers=JSON, local="127.0.0.1"):
    """Status, headers and body of an answer to a client at a local address."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close"]
    lines += [f"{k}: {v}" for k, v in ({"Content-Length": str(len(raw))} | headers).items()]
    return await speak(port, "\r\n".join([*lines, "", ""]).encode() + raw, local)


async def speak(port, sent, local="127.0.0.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(local, 0))
    try:
        with contextlib.suppress(ConnectionError):  # a refused body is not read to its end
            writer.write(sent)
            await writer.drain()
        came = b""
        with contextlib.suppress(ConnectionResetError):  # the server closes with something left to read
            while more := await asyncio.wait_for(reader.read(1 << 16), 60):
                came += more
    finally:
        writer.close()
    head, _, body = came.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}
    if "application/json" in headers.get("content-type", ""):
        return int(first.split()[1]), headers, json.loads(body)
    return int(first.split()[1]), headers, body.decode()


@pytest.fixture(scope="module")
def served():
    server = Served(rate=0, queue=800, characters=2000, lines=40, connections=1500)
    yield server
    code, told = server.end()
    assert code == 143
    assert "Traceback" not in told


def test_translations_are_those_of_the_model_whoever_asks_at_the_same_time(served):
    lines = ["save the file", "", "open a new window please", "unknown words here", "now"]
    from_german = serving.translator().translate(lines, "de")
    want = serving.translator().translate(lines)
    assert len({of.text for of in want}) >= 4, "a model that always says the same proves little"
    assert from_german != want, "to be told the language makes a difference to it"

    async def together():
        asked = [{"text": "\n".join(lines), "alternatives": 3, "from": "de"}, *({"text": line} for line in lines)]
        return await asyncio.gather(*(ask(served.port, "POST", "/translate", a) for a in asked))

    (status, headers, found), *single = asyncio.run(together())
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert [line["source"] for line in found["lines"]] == lines
    assert [line["text"] for line in found["lines"]] == [of.text for of in from_german]
    assert found["text"] == "\n".join(of.text for of in from_german)
    for line, of in zip(found["lines"], from_german, strict=True):
        assert [a["text"] for a in line["alternatives"]] == [h.text for h in of.hypotheses]
        # Who else is asked for at the time is added up beside it, in other kernels: a last bit of a float32.
        scores = [a["score"] for a in line["alternatives"]]
        assert scores == pytest.approx([h.score for h in of.hypotheses], rel=5e-7, abs=2e-6)
    assert [answer["text"] for _, _, answer in single] == [of.text for of in want]
    assert served.ask("POST", "/translate", {"text": ""})[2] == {"text": "", "language": None, "lines": []}
    assert found["language"] == "de"
    assert served.ask("POST", "/translate", {"text": "now\nopen"})[2]["language"] is None
    named = {of["code"]: of["name"] for of in served.ask("GET", "/languages")[2]["languages"]}
    assert (named["sr_Latn"], named["yo"]) == ("Serbian (Latin)", "Yoruba")
    assert served.ask("POST", "/translate", {"text": "now " * 30})[2]["lines"][0]["cut"] is True


@pytest.mark.parametrize(("status", "body", "headers", "told"), [
    (400, b"{", JSON, "not JSON"), (400, b"\xff\xfe", JSON, "not JSON"), (400, b"[" * 30_000, JSON, "not JSON"),
    (422, [], JSON, 'string "text"'), (422, {"text": 3}, JSON, 'string "text"'),
    (422, {"text": "now", "form": "de"}, JSON, "form"), (422, {"text": "now", "from": "xx"}, JSON, "no language 'xx'"),
    (422, {"text": "now", "from": ["de"]}, JSON, "code of a language"),
    (422, {"text": "now", "alternatives": 4}, JSON, "from 1 to 3"),
    (422, {"text": "now", "alternatives": True}, JSON, "from 1 to 3"),
    (422, b'{"text": "\\ud800"}', JSON, "surrogate"), (422, b'{"text": "now\\u0000"}', JSON, "NUL"),
    (413, {"text": "a" * 2001}, JSON, "2000 is the most"), (413, {"text": "\n" * 41}, JSON, "40 is the most"),
    (413, b"a" * 65_537, JSON, "longer than 65536 bytes"),
    (413, b"", JSON | {"Content-Length": "99999999999"}, "longer than"),
    (415, {"text": "now"}, {}, "application/json"),
    (415, {"text": "now"}, {"Content-Type": "text/plain"}, "application/json"),
])  # fmt: skip
def test_what_is_wrong_is_refused(served, status, body, headers, told):
    got, _, answer = served.ask("POST", "/translate", body, headers)
    assert got == status
    assert told in answer["error"]


def test_what_is_no_request_is_refused(served):
    assert served.ask("GET", "/translate")[0] == 405
    for path in ("/nothing", "/../../etc/passwd", "/style.css/", "/%00"):
        assert served.ask("GET", path)[0] == 404

    async def odd():
        chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
        head = HEAD + b"Connection: close\r\n"
        sent = [
            head + b"Transfer-Encoding: chunked\r\n\r\n" + 40 * chunk + b"0\r\n\r\n",
            head + b"Content-Length: -1\r\n\r\n",
            b"\x16\x03\x01\x02\x00 this is not HTTP\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 20_000,
        ]
        return [(await speak(served.port, of))[0] for of in sent]

    assert asyncio.run(odd()) == [413, 400, 400, 400]
    assert served.ask("GET", "/health")[0] == 200


def test_a_thousand_at_once(served):
    """Those for which there is room are answered, the others refused at once, and nothing piles up."""
    lines = ["save the file", "open a new window", "close now please"]
    # A number is an unknown word, whichever it is; but each is another sentence.
    done = serving.translator().translate([f"{line} 0" for line in lines])
    want = {line: of.text for line, of in zip(lines, done, strict=True)}

    async def all_at_once(count):
        asked = [ask(served.port, "POST", "/translate", {"text": f"{lines[n % 3]} {n}"}) for n in range(count)]
        return await asyncio.gather(*asked)

    before = served.memory()
    answers = asyncio.run(all_at_once(1000))
    grown = served.memory() - before
    again = asyncio.run(all_at_once(1000))
    statuses = [status for status, _, _ in (*answers, *again)]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 400
    for n, (status, headers, answer) in enumerate(answers):
        if status == 200:
            assert answer["text"] == want[lines[n % 3]]
        else:
            assert headers["retry-after"] == "5"
    assert grown < 150e6, "bytes for a thousand requests"
    assert served.memory() - before < 1.5 * grown + 20e6, "a second thousand needs no more"
    status, _, text = served.ask("GET", "/metrics")
    assert status == 200
    counted = float(re.search(r'm4_requests_total\{route="/translate",status="200"\} (\S+)', text).group(1))
    assert counted >= statuses.count(200)
    assert "m4_waiting_sentences 0.0" in text
    assert served.ask("POST", "/translate", {"text": "now"})[0] == 200


def test_limits_of_rate_and_time_and_a_graceful_end():
    server = Served(rate=0.001, burst=5, wait=1500, timeout=2, connections=20)
    assert server.ask("GET", "/health")[2] == {"status": "ok"}
    with contextlib.ExitStack() as open_ones:
        for _ in range(20):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert server.ask("GET", "/health")[0] == 503, "as many connections are open as may be"
    for _ in range(50):
        if server.ask("GET", "/health")[0] == 200:
            break
        time.sleep(0.1)

    async def slow_and_last():
        slow = await speak(server.port, HEAD + b"Content-Length: 9\r\n\r\n{")
        keeping = HEAD + b'Content-Length: 15\r\n\r\n{"text": "now"}'  # without Connection: close of its own
        last = asyncio.create_task(speak(server.port, keeping))
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        return slow[0], await last

    for _ in range(3):
        assert server.ask("POST", "/translate", {"text": ""})[0] == 200
    slow, last = asyncio.run(slow_and_last())
    assert slow == 408
    assert last[0] == 200, "a request that was taken before SIGTERM is answered after it"
    assert last[1]["connection"] == "close", "the client must not send its next request here"
    assert server.process.wait(20) == 143
    with pytest.raises(ConnectionRefusedError):
        server.ask("GET", "/health")


def test_while_it_stops_requests_are_refused():
    """Requests that outlast the grace, in their body and in the queue: 503 for both, and not a line of a traceback."""
    server = Served(rate=0, wait=60_000, grace=1)

    async def story():
        waiting = [asyncio.create_task(ask(server.port, "POST", "/translate", {"text": "now"})) for _ in range(5)]
        waiting.append(asyncio.create_task(speak(server.port, HEAD + b"Content-Length: 9\r\n\r\n{")))
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*waiting)

    answers = asyncio.run(story())
    for status, headers, answer in answers:
        assert (status, answer, headers["retry-after"]) == (503, {"error": "The server is stopping."}, "5")
        assert headers["connection"] == "close"
    assert server.process.wait(20) == 143
    assert "Traceback" not in server.process.stderr.read()


def test_sentences_are_charged_by_address_and_those_of_clients_that_left_are_dropped():
    """One server for all of this, since each takes seconds to start."""
    server = Served(rate=0.001, burst=60)
    first = server.ask("POST", "/translate", {"text": "save the file\nnow"})
    again = server.ask("POST", "/translate", {"text": "now\nsave the file"})
    assert [line["text"] for line in again[2]["lines"]] == [line["text"] for line in first[2]["lines"]][::-1]
    assert server.ask("POST", "/translate", {"text": "now", "from": "de"})[0] == 200
    assert "m4_sentences_total 5.0" in server.ask("GET", "/metrics")[2]

    # 2 + 2 + 1 sentences were charged; 200 more are answered, and the address has to wait for them.
    status, _, answer = server.ask("POST", "/translate", {"text": "\n".join(f"now {n}" for n in range(200))})
    assert (status, len(answer["lines"])) == (200, 200)
    status, headers, answer = server.ask("POST", "/translate", {"text": "now"})
    assert status == 429
    assert 145_000 < int(headers["retry-after"]) < 147_000, "sentences are counted, not requests"
    assert server.ask("POST", "/translate", {"text": "now"}, local="127.0.0.2")[0] == 200

    async def leaves():
        raw = json.dumps({"text": "\n".join(f"open the file {n}" for n in range(200))}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.3", 0))
        writer.write(HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        for _ in range(100):
            metrics = (await ask(server.port, "GET", "/metrics"))[2]
            if 'status="499"' in metrics and "m4_waiting_sentences 0.0" in metrics:
                return metrics
            await asyncio.sleep(0.05)
        raise AssertionError(metrics)

    translated = re.search(r"\nm4_sentences_total (\S+)", asyncio.run(leaves()))
    assert float(translated[1]) < 5 + 200 + 1 + 200, "those that waited were not translated"
    server.end()


def test_while_the_model_is_read_every_request_is_answered_with_503():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with starting(bound):
            for method, path in (("GET", "/health"), ("POST", "/translate"), ("GET", "/")):
                status, headers, body = asyncio.run(ask(port, method, path))
                assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "5")
                if path == "/health" and method == "GET":
                    assert body == {"status": "starting"}
        with socket.create_connection(("127.0.0.1", port)), bound.accept()[0] as later:
            assert later.fileno() >= 0, "the socket goes on to listen, and the server takes what comes now"


def test_the_interface_is_described(served):
    status, _, found = served.ask("GET", "/openapi.json")
    assert status == 200
    metrics = served.ask("GET", "/metrics")[2]
    asked = set(re.findall(r'm4_requests_total\{route="(/[a-z.]+)",status="(\d+)"', metrics))
    assert ("/openapi.json", "200") in asked
    for path, code in asked - {("/style.css", "200"), ("/page.js", "200")}:
        answers = {code for of in found["paths"][path].values() for code in of["responses"]}
        assert code in answers or code == "405", (path, code)
    schema = found["components"]["schemas"]["Asked"]["properties"]
    assert (schema["text"]["maxLength"], schema["alternatives"]["maximum"]) == (2000, 3)
    answer = served.ask("POST", "/translate", {"text": "now"})[2]
    described = found["components"]["schemas"]["Answer"]
    assert set(answer) == set(described["required"])
    assert set(answer["lines"][0]) == set(described["properties"]["lines"]["items"]["required"])


@pytest.mark.slow
def test_a_second_signal_does_not_wait():
    server = Served(rate=0, wait=20_000)

    async def twice():
        waiting = asyncio.create_task(ask(server.port, "POST", "/translate", {"text": "now"}))
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        assert server.process.poll() is None, "the request is waited for"
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.process.wait, 5) == 130
        with contextlib.suppress(ConnectionError, IndexError):  # no answer
            await waiting

    asyncio.run(twice())
    assert server.process.stderr.read() == ""


def test_too_many_requests_of_one_address():
    rate = Rate(rate=2.0, burst=3)
    assert [rate.ask("a", now=0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert rate.ask("b", now=0.0) == 0
    assert rate.ask("a", now=0.5) == 0
    assert rate.ask("a", now=0.5) > 0
    for n in range(20_000):
        rate.ask(str(n), now=1.0)
    assert len(rate._buckets) <= 10_000
    assert Rate(rate=0, burst=1).ask("a") == 0


def test_a_port_in_use_is_told_before_the_model_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--run", "nowhere", "--data", "nowhere"]) == 2
    told = capsys.readouterr().err
    assert f"port {port} is in use" in told
    assert "--port" in told
    assert main(["serve", "--host", "no.such.host.invalid"]) == 2
    assert "cannot listen" in capsys.readouterr().err


class Shouting:
    """An engine that writes capitals, a letter in each step; a search has room for four sentences."""

    def __init__(self):
        self.held = []
        self.searches = 0

    def prepare(self, sentence, language):
        return Prepared(sentence, Marked(sentence), Sentence(tuple(map(ord, sentence)), 16) if sentence else None)

    def search(self):
        self.held, self.searches = [], self.searches + 1
        return self

    @property
    def busy(self):
        return bool(self.held)

    def room(self, width):
        return 4 - len(self.held)

    def add(self, ticket, sentence):
        assert self.room(16) > 0
        self.held.append((ticket, "".join(map(chr, sentence.ids)), len(sentence.ids)))

    def step(self, *, more=False):
        time.sleep(0.02)
        if any(text == "fail" for _, text, _ in self.held):
            raise RuntimeError("as asked")
        self.held = [(ticket, text, left - 1) for ticket, text, left in self.held]
        ended = [Found(ticket, np.array([[0]]), np.array([0.0])) for ticket, _, left in self.held if not left]
        self.held = [of for of in self.held if of[2]]
        return ended

    def finish(self, prepared, found=None):
        if prepared.sentence == "odd":
            raise ValueError("this one only")
        return Translated((Hypothesis(prepared.sentence.upper(), 0.0),))


def test_sentences_join_a_search_and_a_failure_stays_in_it():
    async def story():
        sizes = []
        engine = Shouting()
        batcher = Batcher(engine, 40, 0.02, lambda held, ended, seconds: sizes.append((held, ended)))
        long = asyncio.create_task(batcher.translate(["a" * 30]))
        await asyncio.sleep(0.1)
        assert (await batcher.translate(["b"]))[0].text == "B"
        assert not long.done(), "who came later and had less to say is answered before"
        many = [batcher.translate([f"s{n}"]) for n in range(8)]
        assert [of[0].text for of in await asyncio.gather(*many)] == [f"S{n}" for n in range(8)]
        assert (await long)[0].text == "A" * 30
        assert max(held for held, _ in sizes) == 4

        with pytest.raises(RuntimeError, match="as asked"):
            await batcher.translate(["fail"])
        with pytest.raises(ValueError, match="this one only"):
            await asyncio.gather(batcher.translate(["odd"]), other := asyncio.ensure_future(batcher.translate(["x"])))
        assert (await other)[0].text == "X"
        assert engine.searches == 2, "what failed is begun anew, for all but the one sentence"
        assert [of.text for of in await batcher.translate(["a", "", "c"])] == ["A", "", "C"]

        with pytest.raises(QueueFullError):
            await batcher.translate(["x"] * 21)
        waiting = asyncio.create_task(batcher.translate([f"y{n}" for n in range(20)]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert (await batcher.translate([f"z{n}" for n in range(20)]))[0].text == "Z0", "what is given up makes room"

        gone = asyncio.create_task(batcher.translate(["once more"]))
        stays = asyncio.create_task(batcher.translate(["once more"]))
        await asyncio.sleep(0.05)
        gone.cancel()
        assert (await stays)[0].text == "ONCE MORE", "one that gives up takes nothing from the other"
        await batcher.close()
        with pytest.raises(QueueFullError):
            await batcher.translate(["late"])
        return sizes

    asyncio.run(story())


def test_clients_are_served_in_turn_and_those_that_left_are_not_served():
    async def story():
        batcher = Batcher(Shouting(), 200, 0.0)
        much = asyncio.create_task(batcher.translate([f"a{n:02}" for n in range(100)], client="greedy"))
        await asyncio.sleep(0.1)
        before = batcher.waiting
        assert before > 80
        assert (await batcher.translate(["b", "c"], client="polite"))[1].text == "C"
        assert batcher.waiting > before - 12, "of two that wait, each has every other place"
        with pytest.raises(QueueFullError):
            await batcher.translate(["x"] * 30, client="greedy")
        assert len(await batcher.translate(["x"] * 30, client="polite")) == 30, "half of the places are left to others"

        much.cancel()
        began = time.monotonic()
        assert (await batcher.translate(["d"], client="polite"))[0].text == "D"
        assert batcher.waiting == 0, "nobody wants them"
        assert time.monotonic() - began < 1.0
        await batcher.close()

    asyncio.run(story())


def luminance(colour):
    parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_in_a_browser(served, browser):
    address = f"http://127.0.0.1:{served.port}/"
    lines = ["save the file", "open a new window please"]
    want = [of.text for of in serving.translator().translate(lines)]
    browser.open(address)
    browser.wait("document.querySelectorAll('#from option').length === 6")
    assert "Serbian" in browser.run("document.getElementById('from').textContent")
    assert browser.run("document.getElementById('count').textContent") == "5"

    browser.run("document.getElementById('source').focus()")
    browser.type("\n".join(lines))
    assert browser.run("document.getElementById('left').textContent") == "38 of 2,000 characters"
    browser.press("Enter", 13, control=True)
    browser.wait("document.querySelectorAll('#result > p').length === 2")
    assert browser.run("[...document.querySelectorAll('#result > p')].map(p => p.textContent)") == want
    browser.run("document.getElementById('alternatives').click()")
    browser.run("document.getElementById('go').click()")
    browser.wait("document.querySelectorAll('#result ol li').length === 4")

    # The page shows input as text, not as markup, and reports an input that is too long.
    browser.run("document.getElementById('source').value = '<img src=x onerror=alert(1)>' + 'a'.repeat(2000)")
    browser.run("document.getElementById('go').click()")
    browser.wait("document.getElementById('status').textContent.includes('2000 is the most')")
    assert browser.run("document.images.length") == 0

    # Everything that can be used has a name, and everything that can be read has contrast.
    tree = browser.send("Accessibility.getFullAXTree")["nodes"]
    usable = {"textbox", "button", "combobox", "checkbox", "link", "region"}
    roles = [n for n in tree if n.get("role", {}).get("value") in usable and not n["ignored"]]
    assert len(roles) >= 5
    assert all(n["name"]["value"].strip() for n in roles), roles
    for scheme in ("light", "dark"):
        browser.look(scheme, 1200, 760)
        colours = browser.run(
            "['body', 'textarea', '#left', '#go', 'h1', '.problem', 'select'].map(s => {"
            " let e = document.querySelector(s); const ink = getComputedStyle(e).color;"
            " let ground = 'rgba(0, 0, 0, 0)';"
            " for (; e && ground === 'rgba(0, 0, 0, 0)'; e = e.parentElement)"
            " ground = getComputedStyle(e).backgroundColor; return [s, ink, ground]; })"
        )
        for name, ink, ground in colours:
            light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, name, ink, ground)
    browser.look("light", 360, 740)
    assert browser.run("document.documentElement.scrollWidth") <= 360, "nothing sticks out of a small screen"

    assert {url.split("/")[2] for url in browser.requested if url.startswith("http")} == {f"127.0.0.1:{served.port}"}
