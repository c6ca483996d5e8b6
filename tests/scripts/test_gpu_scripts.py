"""The scripts for a GPU resume, tell what failed, and read schedules; their dry run on CPU writes its page."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = """
import json, pathlib, sys, time
kind, found = sys.argv[1], sys.argv[sys.argv.index("--found") + 1]
with open(pathlib.Path(__file__).with_name("ran"), "a") as file:
    file.write(kind + "\\n")
if kind == "broken":
    raise ValueError("the words of the error")
if kind == "ended":  # as C++ ends a process: its message, and more lines of its stack than are kept
    print("the row of sine", "F0000 00:00:00.1 7 gpu.cc:1] Check failed: a == b", sep="\\n")
    print(*["    @ 0x7 PjitFunction"] * 40, sep="\\n")
    sys.exit(6)
if kind == "slow":
    time.sleep(60)
pathlib.Path(found).write_text(json.dumps({"kind": kind}))
"""
HLO = """HloModule made, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %one = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1,2,3}}, backend_config={"is_sync":false}
  %product = f32[8]{0} multiply(%x, %x)
  %tuple = (f32[8]{0}) tuple(%product)
  %one-done = f32[8]{0} all-reduce-done(%one)
  %two = f32[8]{0} all-reduce-start(%one-done), replica_groups={{0,1,2,3}}, backend_config={"is_sync":false}
  %two-done = f32[8]{0} all-reduce-done(%two)
  %three = f32[8]{0} all-reduce-start(%two-done), replica_groups={{0,1,2,3}}, backend_config={"is_sync":true}
  %other = f32[8]{0} negate(%product)
  %three-done = f32[8]{0} all-reduce-done(%three)
  ROOT %four = f32[8]{0} all-reduce(%three-done), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


@pytest.fixture(scope="module")
def scripts():
    names = ("resumable", "gpu", "gpu_page", "gpu_schedule", "gpu_scaling")
    with pytest.MonkeyPatch.context() as patch:  # they stand beside each other
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def parts(resumable, folder, seconds=30):
    script = folder / "fake.py"
    script.write_text(FAKE)
    return [resumable.Part(kind, (str(script), kind), seconds) for kind in ("first", "broken", "last")]


def test_what_is_finished_is_not_run_again_and_what_fails_stops_nothing(scripts, tmp_path):
    every, written = parts(scripts.resumable, tmp_path), []
    ended = scripts.resumable.Part("ended", (str(tmp_path / "fake.py"), "ended"), 30)
    state = scripts.resumable.State(tmp_path / "state.json", {"mode": "gpu"})
    assert scripts.resumable.run(every[:2], state, 5, after=lambda: written.append(1))
    state = scripts.resumable.State(tmp_path / "state.json", {"mode": "gpu"})
    assert scripts.resumable.run(every, state, 5)
    ran = (tmp_path / "ran").read_text().split()
    assert ran == ["first", "broken", "last"]
    assert len(written) == 2
    assert state.found("first") == {"kind": "first"}
    assert state.found("broken") is None
    assert "the words of the error" in state.parts["broken"]["error"]
    assert str(tmp_path.home()) not in state.parts["broken"]["error"]
    assert scripts.resumable.run([*every, ended], state, 5, retry=True)
    assert (tmp_path / "ran").read_text().split() == [*ran, "broken", "ended"]
    told = state.parts["ended"]["error"]
    assert "the row of sine\nF0000 00:00:00.1 7 gpu.cc:1] Check failed: a == b" in told
    assert told.count("PjitFunction") < 4
    with pytest.raises(SystemExit, match="another folder"):
        scripts.resumable.State(tmp_path / "state.json", {"mode": "dry-run"})


def test_a_slice_ends_and_the_next_one_begins_what_it_stopped_anew(scripts, tmp_path, monkeypatch):
    every = parts(scripts.resumable, tmp_path, seconds=120)
    slow = scripts.resumable.Part("slow", (str(tmp_path / "fake.py"), "slow"), 3)
    state = scripts.resumable.State(tmp_path / "state.json", {})
    monkeypatch.setattr(scripts.resumable, "SAVING", 0.5)
    assert not scripts.resumable.run([every[0], slow], state, 2.8 / 60)  # the first part takes a moment
    assert list(state.parts) == ["first"]
    short = scripts.resumable.Part("slow", slow.command, 1)
    assert scripts.resumable.run([short], state, 5), "what takes longer than its own time has failed"
    assert "took longer than 1 seconds" in state.parts["slow"]["error"]


def test_the_page_has_failures_and_what_was_not_reached(scripts, tmp_path):
    state = scripts.resumable.State(tmp_path / "state.json", {})
    every = scripts.gpu.parts_of("gpu")
    state.put("laws", {"state": "done", "seconds": 3.0, "found": {"tried": 9, "of": 471, "wrong": {"sine": "is off"}}})
    state.put("train", {"state": "failed", "seconds": 2.0, "error": "ended with 1\nXlaRuntimeError: no memory"})
    text = scripts.gpu_page.page(state, every, "gpu", "python scripts/gpu.py")
    assert "Of 9 of the 471 rows" in text
    assert "wrong: `sine` (is off)" in text
    assert "**train**, after 2 s:\n\n```text\nended with 1\nXlaRuntimeError: no memory\n```" in text
    assert "mocked 32 moe" in text.split("not reached")[1]
    assert "```python" not in text, "the tests run those"


def test_parts_have_names_of_their_own_and_fit_into_a_slice(scripts):
    for mode in ("gpu", "described", "dry-run"):
        every = scripts.gpu.parts_of(mode)
        assert len({part.name for part in every}) == len(every)
        assert all(part.seconds <= 9 * 60 - scripts.resumable.SAVING for part in every)
        assert all((ROOT / part.command[0]).exists() for part in every)
        assert all(part.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" for part in every)


def test_a_schedule_is_read(scripts):
    found = scripts.gpu_schedule.schedule(HLO)
    each = 2 * 32 * 3 // 4
    assert found["kinds"] == {"all_reduce": [4, 4 * each]}
    assert (found["asynchronous"], found["hidden"], found["hidden_bytes"], found["between"]) == (2, 1, each, 1)


def test_the_comparison_of_models_takes_the_time_that_is_left(scripts):
    line = scripts.gpu_scaling.scaling(Path("data"), Path("out"), "gpu", "one GPU", 7.5)
    assert line[line.index("--minutes") + 1] == "7.50"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "page"), [("gpu.py", "gpu.md"), ("gpu_scaling.py", "gpu_throughput.md")])
def test_the_whole_dry_run_has_no_failure_and_resumes(script, page, tmp_path):
    def dry_run():
        line = [sys.executable, ROOT / "scripts" / script, "--dry-run", "--output", tmp_path, "--minutes", "60"]
        environment = {**os.environ, "XLA_FLAGS": ""}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert " ... " in dry_run()
    text = (tmp_path / page).read_text()
    assert script != "gpu.py" or "No figure of it means anything" in text
    assert "What failed" not in text, text
    assert "not reached" not in text
    assert " ... " not in dry_run()
