"""The scripts for a GPU resume, tell what failed, and read schedules; their dry run on CPU writes its page."""

import importlib
import json
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
    state = scripts.resumable.State(tmp_path / "state.json", {"mode": "gpu"})
    assert scripts.resumable.run(every[:2], state, 5, after=lambda: written.append(1))
    state = scripts.resumable.State(tmp_path / "state.json", {"mode": "gpu"})
    assert scripts.resumable.run(every, state, 5)
    ran = (tmp_path / "ran").read_text().split()
    assert (ran, len(written)) == (["first", "broken", "last"], 2)
    assert state.found("first") == {"kind": "first"}
    assert state.found("broken") is None
    assert "the words of the error" in state.parts["broken"]["error"]
    assert str(tmp_path.home()) not in state.parts["broken"]["error"]
    assert scripts.resumable.run(every, state, 5, retry=True)
    assert (tmp_path / "ran").read_text().split() == [*ran, "broken"]
    with pytest.raises(SystemExit, match="another folder"):
        scripts.resumable.State(tmp_path / "state.json", {"mode": "dry-run"})


def test_the_message_of_a_process_that_c_plus_plus_ends_is_kept(scripts, tmp_path):
    parts(scripts.resumable, tmp_path)
    state = scripts.resumable.State(tmp_path / "state.json", {})
    ended = scripts.resumable.Part("ended", (str(tmp_path / "fake.py"), "ended"), 30)
    assert scripts.resumable.run([ended], state, 5)
    told = state.parts["ended"]["error"]
    assert "the row of sine\nF0000" in told
    assert "Check failed: a == b" in told
    assert told.count("PjitFunction") < 4


def test_a_slice_ends_and_the_next_one_begins_what_it_stopped_anew(scripts, tmp_path):
    every = parts(scripts.resumable, tmp_path, seconds=120)
    slow = scripts.resumable.Part("slow", (str(tmp_path / "fake.py"), "slow"), 21)
    state = scripts.resumable.State(tmp_path / "state.json", {})
    begun = [every[0], slow]
    # 22 seconds, of which 10 are kept; the first part takes a moment.
    assert not scripts.resumable.run(begun, state, 22 / 60)
    assert list(state.parts) == ["first"]
    short = scripts.resumable.Part("slow", slow.command, 1)
    assert scripts.resumable.run([short], state, 5), "what takes longer than its own time has failed"
    assert "took longer than 1 seconds" in state.parts["slow"]["error"]


def test_a_schedule_is_read(scripts):
    found = scripts.gpu_schedule.schedule(HLO)
    each = 2 * 32 * 3 // 4
    assert found["kinds"] == {"all_reduce": [4, 4 * each]}
    assert (found["asynchronous"], found["hidden"], found["hidden_bytes"], found["between"]) == (2, 1, each, 1)


def dry_run(script, folder, *options):
    line = [sys.executable, ROOT / "scripts" / script, "--dry-run", "--output", folder, *options]
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_dry_run_writes_its_page_and_resumes(tmp_path):
    chosen = ("--only", "machine", "--only", "step dense", "--only", "virtual 8 tensor")
    said = dry_run("gpu.py", tmp_path, *chosen)
    assert said.count(" ... ") == 3
    text = (tmp_path / "gpu.md").read_text()
    assert "No figure of it means anything" in text
    assert "`dense-12l-wide`" in text
    assert "| Hidden units split over four devices, the batch over the others | 8 (data=2, model=4) | gshard |" in text
    assert "What failed" not in text, text
    first = json.loads((tmp_path / "state.json").read_text())
    assert " ... " not in dry_run("gpu.py", tmp_path, *chosen)
    assert json.loads((tmp_path / "state.json").read_text()) == first
    assert not (ROOT / "docs" / "gpu.md").exists() or "Dry run" not in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "page"), [("gpu.py", "gpu.md"), ("gpu_scaling.py", "gpu_throughput.md")])
def test_the_whole_dry_run_has_no_failure(script, page, tmp_path):
    dry_run(script, tmp_path, "--minutes", "60")
    text = (tmp_path / page).read_text()
    assert "What failed" not in text, text
    assert "not reached" not in text
