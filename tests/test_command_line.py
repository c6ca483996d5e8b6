"""The command line: what its commands print and write, and errors in the user's terms."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gshard
from explanation.compiled_texts import GPU, TPU
from gshard.__main__ import main
from gshard.commands import mesh_of, shape_of
from gshard.explanation.report.data import NO_MACHINE

MODEL = """
import gshard, jax, jax.numpy as jnp
def loss(x, w):
    return jnp.sum(gshard.split(x, 0, "data") @ w)
def example():
    return jax.grad(loss), jnp.ones((8, 4)), jnp.ones((4, 2))
def reduced():
    def loss(x):
        return jnp.sum(gshard.split(x, 0, "devices") ** 2)
    return loss, jnp.ones((8, 4))
def wrong():
    return 3
value = 3
def jitted():
    f, *args = reduced()
    return gshard.jit(f, mesh={"devices": 8}), *args
def squares(x):
    return jnp.sum(gshard.split(x, 0, "data") ** 2)
X = jnp.ones((8, 4))
def on_mesh(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    if kind == "gshard.jit":
        return gshard.jit(squares, mesh=mesh), X
    return (jax.jit(squares, in_shardings=rows), X) if kind == "jax.jit" else (squares, jax.device_put(X, rows))
def own_gshard():
    return on_mesh("gshard.jit")
def own_jax():
    return on_mesh("jax.jit")
def own_array():
    return on_mesh("array")
def chain(u, v, w):
    return gshard.replicate(gshard.split(u, 1, 8) @ v @ w)
finite = gshard.jit(chain, finite=True)
"""
PLACED = """
import gshard, jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
def loss(w, x):
    return jnp.sum((x @ w) ** 2)
def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)
def array(shape, *spec, devices=16):
    mesh = AbstractMesh((devices,), ("data",))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
def example():
    return jax.jit(step), array((32, 8)), array((64, 32), "data")
def small():
    return jax.jit(step), array((32, 8), devices=8), array((64, 32), "data", devices=8)
def unplaced():
    return jax.jit(step), jnp.ones((32, 8)), jnp.ones((64, 32))
def lowered():
    return gshard.jit(step, mesh=8).lower(*small()[1:])
def by_jax():
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(step).lower(small()[1].update(sharding=NamedSharding(mesh, P())), x)
"""
FILES = {
    "model.py": MODEL, "placed.py": PLACED, "step.hlo.txt": GPU, "notes.txt": "nothing",
    "more.txt": GPU.replace('{"n":"3"}', '{"n":"4"}'), "before.txt": GPU.replace(" is_scheduled=true,", ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The commands run in a folder with these files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    for name, data in (("step.txt.gz", gzip.compress(TPU.encode())), ("cut.txt.gz", gzip.compress(TPU.encode())[:100])):
        Path(name).write_bytes(data)
    return tmp_path


LOSS = "model.py:loss --arg f32[8,4] --arg f32[4,2]"
CHAIN = "model.py:chain --arg f32[64,512] --arg f32[512,256] --arg f32[256,2] --machine h100:1x8"
TWO_BY_FOUR = "step.hlo.txt --mesh data=2,model=4"

# Commands that run one after the other in one folder: each with its exit status and words that it prints.
SESSIONS = {
    "explain prints a table": [
        (f"explain {LOSS} --mesh data=4", 0, ["loss on 4 devices (data=4)", "all_reduce", "ms a call on cpu"]),
    ],
    "search": [
        (
            "search model.py:example --mesh data=2,model=4 --machine v3:2x2 --why w --html page.html --save plan.json"
            " --memory-limit 1GiB", 0,
            ["ms a call on v3:2x2, mesh (data=2, model=4)", "as it is marked", "w: f32[4,2", "as it is marked: "],
        ),
        (
            "search model.py:example --mesh data=2,model=4 --machine v3:2x2 --save absent/plan.json", 1,
            ["there is no folder absent"],
        ),
    ],
    "search tries the shapes of a number of devices": [
        (
            "search model.py:example --mesh 4 --machine h100:1x4 --marks", 0,
            ["mesh (data=2, model=2)", "ms without further marks"],
        ),
    ],
    "what does not fit": [
        (
            "explain model.py:loss --arg f32[8,4] --arg f32[4,5000000000] --machine h100:1x8 --mesh data=8 --seconds 0",
            3,
            ["this does not fit: a device would hold 93.1 GiB, and may 74.5 GiB."],
        ),
        (
            "search model.py:example --mesh data=4 --machine h100:1x4 --memory-limit 40B", 3, ["this does not fit"]
        ),
    ],
    "times of two machines": [
        ("explain model.py:example --mesh data=8 --json before.json", 0, []),
        ("explain before.json model.py:example --mesh data=8", 0, ["before.json -> model.py:example\n", "no line"]),
        (
            "explain before.json model.py:example --mesh data=8 --machine h100", 1,
            ["times of two kinds of machines cannot be compared.\n  before: cpu:8; after: h100:1x8\n"],
        ),
    ],
    "a traceback if asked for": [
        ("--traceback explain model.py:loss --arg f32[8,4] --arg f32[5,2] --mesh data=4", 1, ["Traceback"]),
    ],
    "the mesh is that of the machine": [
        ("explain model.py:reduced --machine h100:1x4", 0, ["loss on 4 devices (devices=4)"]),
    ],
    "what became worse fails with its line": [
        ("explain model.py:reduced --mesh devices=4 --json small.json", 0, ["each device sends"]),
        (
            "explain model.py:reduced --mesh devices=8 --baseline small.json", 3,
            ["bytes sent grew since the baseline", "model.py:9"],
        ),
        ("explain model.py:reduced --mesh devices=8 --json same.json", 0, []),
        (
            "explain same.json model.py:reduced --mesh devices=8 --baseline same.json --html page.html",
            0, ["no line changed"],
        ),
        (
            "explain small.json model.py:reduced --mesh devices=8 --baseline small.json", 3,
            ["x1 6 B -> x1 7 B           all_reduce\n", "all_reduce of reduce_sum", "model.py:9"],
        ),
    ],
    "a machine has as many devices as the mesh": [
        ("explain model.py:own_gshard --machine h100:1x4", 1, ["h100:1x4 has 4 devices, and the mesh has 8."]),
    ],
    "explain takes the plan that search saved": [
        (f"search {LOSS} --mesh data=4 --machine H100 --save plan.json", 0, []),
        (
            f"explain {LOSS} --plan plan.json --memory-limit 1GiB", 0,
            ["loss on 4 devices (data=4)"],
        ),
        (f"explain {LOSS} --plan plan.json --mesh data=8", 1, ["the plan is for another mesh"]),
        (f"explain {LOSS} --mesh data=4 --memory-limit '8 B'", 1, ["MemoryLimitError"]),
    ],
    "a function has the options of its jit": [
        (f"explain {CHAIN}", 0, ["reduce_scatter"]),
        (
            f"explain {CHAIN.replace('chain', 'finite')} --mesh 8", 0,
            ["each device sends 896 B in one call: all_reduce 896 B"],
        ),
    ],
    "explain reads a dump": [
        (
            f"explain {TWO_BY_FOUR} --machine h100:1x8 --html page.html --json data.json", 0,
            ["step on 8 devices (data=2 model=4), 40 instructions, compiled by XLA for gpu", "all_gather",
             "Launch-bound: ", "ms a call on h100:1x8"],
        ),
        (
            f"explain {TWO_BY_FOUR} --baseline data.json", 0, [NO_MACHINE],
        ),
        ("explain data.json more.txt --mesh data=2,model=4", 0, ["data.json -> more.txt\n", "layers.py:9"]),
        (
            "explain more.txt --mesh data=2,model=4 --baseline data.json", 3,
            ["bytes sent and FLOPs of a device grew since the baseline", "layers.py:9"],
        ),
    ],
    "explain reads a compressed dump": [
        ("explain step.txt.gz --machine v5e:2x4", 0, ["27 instructions, compiled by XLA for tpu"]),
        ("explain cut.txt.gz", 1, ["neither a compiled program nor a file of one"]),
    ],
    "files that are no dumps": [
        (
            "explain before.txt", 1,
            ["XLA had not finished partitioning and optimising it", "whose name ends in after_optimizations.txt"],
        ),
        ("explain notes.txt", 1, ["this is no compiled program.\n  text that begins with 'nothing'"]),
    ],
    "a function from jax.jit is explained as XLA compiles it": [
        (
            "explain placed.py:small --machine h100 --json data.json", 0,
            ["step on 8 devices (data=8)", "gradient of w"],
        ),
        (
            "explain data.json placed.py:small --machine h100 --partitioner gshard", 0,
            ["data.json -> placed.py:small", "gradient of w"],
        ),
        ("explain placed.py:small --mesh data=4", 0, ["step on 4 devices (data=4)"]),
        (
            "explain placed.py:small --partitioner xla --mesh data=4", 1,
            ["XLA's partitioner takes the devices and the options of jax.jit."],
        ),
        ("explain placed.py:small --why w", 1, ["instead is for what gshard partitions"]),
        ("explain placed.py:unplaced", 0, ["step on 8 devices (devices=8), "]),
        ("explain placed.py:unplaced --partitioner xla", 0, ["step on 1 device"]),
        (
            "explain placed.py:step --arg f32[32,8] --arg f32[64,32] --partitioner xla", 1,
            ["XLA's partitioner is for functions from jax.jit"],
        ),
    ],
    "a function that is lowered is explained": [
        (
            "explain placed.py:lowered --machine h100 --why x", 0,
            ["step on 8 devices (devices=8), ", "x: f32[64@devices,32]", "ms a call on h100:1x8"],
        ),
        (
            "explain placed.py:lowered --partitioner xla", 0,
            ["step on 8 devices (devices=8)"],
        ),
        ("explain placed.py:by_jax", 0, ["step on 8 devices (data=8)"]),
        ("explain placed.py:lowered --mesh 4", 1, ["has its arguments, its mesh and its options."]),
        ("explain placed.py:by_jax --why w", 1, ["instead is for what gshard partitions"]),
        (
            "explain placed.py:by_jax --partitioner gshard", 1,
            ["a compiled program takes mesh= and machine= only."],
        ),
        ("search placed.py:lowered", 1, ["returned Lowered, not a tuple"]),
    ],
}  # fmt: skip


def run(command, status, words, capsys):
    assert main(shlex.split(command)) == status, command
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert [word for word in words if word not in text] == [], (command, text)
    assert ("Traceback" in text) == ("--traceback" in command)
    return printed


@pytest.mark.parametrize("what", SESSIONS)
def test_sessions(what, capsys):
    for command, status, words in SESSIONS[what]:
        run(command, status, words, capsys)
    for file in Path().iterdir():
        if file.name == "page.html":
            assert "<title>gshard " in file.read_text()
    if what == "search":
        assert gshard.SavedPlan.load("plan.json").axes == (("data", 2), ("model", 4))
    if what.startswith("explain reads a dump"):
        assert json.loads(Path("data.json").read_text())["machine"]["name"] == "h100:1x8"
    if what.startswith("a function from jax.jit"):
        assert next(iter(json.loads(Path("data.json").read_text())["lines"])).startswith("placed.py:")
    if what == "what became worse fails with its line":
        assert '"difference":' in Path("page.html").read_text()


@pytest.mark.parametrize(("made", "command"), [
    ("own_gshard", "explain {} --seconds 0"), ("own_array", "search {} --budget-seconds 1"),
    *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [("own_jax", "search {}"), ("own_array", "explain {}")]),
])  # fmt: skip
def test_a_function_is_planned_on_its_own_mesh(command, made, capsys):
    assert main([*command.format(f"model.py:{made}").split(), "--machine", "h100:1x8"]) == 0
    assert re.search(r"data=4,? model=2", capsys.readouterr().out)


VERSIONS = [str(Path(__file__).resolve().parent / f"golden/step_of_jax_{v}.txt.gz") for v in ("0.10.2", "0.12")]


def test_two_versions_of_jax_write_one_program_differently(capsys):
    """One step of four layers, as both versions print it: they send the same for the same lines."""
    text = run(f"explain {' '.join(VERSIONS)} --machine h100:1x8", 0, [" -> ".join(VERSIONS)], capsys).out
    for what in (
        "sent by each device",
        "collectives in one call",
        "peak memory of a device",
        "modelled time of a call",
    ):
        assert re.search(rf"  {what} .* unchanged\n", text), what
    assert "collectives by" not in text
    assert re.search(r"bytes sent, FLOPs.*\n +=", text), "a line computes more, and none sends more"


def test_a_program_that_gathers_more_is_told_by_kind_array_and_line(capsys):
    """Against what the other program sends, whichever version wrote it; the one that sends more is the second."""
    first = gzip.decompress(Path(VERSIONS[0]).read_bytes()).decode()
    gathers = re.findall(r"^  %all-gather\S* = .*\n", first, re.M)
    assert len(gathers) == 4
    used = gathers[1].split()[0]
    fewer = first.replace(gathers[1], "").replace(f"{used},", "%all-gather,").replace(f"{used})", "%all-gather)")
    Path("fewer.txt").write_text(fewer)
    words = [
        "collectives in one call             4 ->            5  +25.0 %", "all_gather\n",
        "none -> x1 224.0 KiB     all_gather of p/b in mlp\n", "model.py:11",
    ]  # fmt: skip
    for more in VERSIONS:
        run(f"explain fewer.txt {more}", 0, words, capsys)


# The target and options of explain, and the message.
MISTAKES = [
    ("model.py:absent", "has no 'absent'"),
    ("model.py:value", "is a int and no function"),
    ("model.py:wrong", "returned int, not a tuple"),
    ("model.py:loss", "needs arguments, and none are given"),
    ("model.py:loss --arg float32[64,8]", "'float32[64,8]' is not understood.\n  Write f32[64,512]. Types are"),
    ("model.py:loss --arg [4]", "'[4]' is not understood."),
    ("model.py:example --mesh a=b", "is no mesh"),
    ("model.py:example --mesh data=8 --machine v3:4x4", "32 devices, and the mesh has 8"),
    ("model.py:example --mesh data=8 --machine h100:1x4", "Write h100:1x8, or leave out the shape: h100."),
    ("model.py", "names no function"),
    ("no_such_module:f", "cannot be imported"),
    ("model.py:loss --arg f32[8,4]", "cannot be called with 1 argument: missing a required argument: 'w'"),
    ("model.py:loss" + " --arg f32[8,4]" * 3, "too many positional arguments"),
    ("model.py:loss --arg f32[8,4] --arg f32[5,2] --mesh data=4", "model.py:4 (loss)"),
    ("model.py:example --mesh data=8 --html /no/such/folder/page.html", "there is no folder /no/such/folder"),
    ("model.py:example --mesh data=8 --json /no/such/folder/page.json", "--json /no/such/folder/page.json"),
    ("/no/such/file.json model.py:example --mesh data=8", "cannot be read"),
    ("before.json model.py:example --why x", "--why: not where two programs are compared."),
    ("before.json after.json --mesh 8 --machine h100", "--machine, --mesh: not where two programs are compared."),
    ("model.py:example --mesh data=8 --baseline notes.txt", "is no explanation"),
    *(
        (f"step.hlo.txt {given}", "a compiled program takes mesh= and machine= only.")
        for given in (
            "--memory-limit 1GiB", "--partitioner gshard",
        )
    ),
    ("step.hlo.txt --arg f32[8]", "a compiled program takes no --arg."),
    ("step.hlo.txt --why w", "instead is for what gshard partitions, and XLA partitions this program."),
    ("step.hlo.txt --mesh 4", "the program runs on 8 devices, and the mesh has 4."),
    ("step.hlo.txt --machine h100:1x4", "h100:1x4 has 4 devices"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_mistakes_are_one_clear_error(given, message, capsys):
    assert run(f"explain {given}", 1, [message], capsys).out == ""


@pytest.mark.parametrize("text, message", [
    ("import jax\njax.nothing_here\n", "fails when it is imported: AttributeError"),
    ("import sys\nsys.exit(2)\n", "fails when it is imported: SystemExit"),
    ("\ndef f(:\n", "SyntaxError: invalid syntax (failing_model.py, line 2).\n  at failing_model.py:2\n"),
    ("import not_there\n", "failing_model.py:1 imports 'not_there', which is not installed here."),
    ("import json\nfrom json import nope\n", "\n  at failing_model.py:2\n"),
])  # fmt: skip
def test_a_module_that_fails_is_one_clear_error(text, message, capsys):
    Path("failing_model.py").write_text(text)
    run("explain failing_model.py:f", 1, [message], capsys)


@pytest.mark.parametrize(("command", "words"), [
    ("search model.py:jitted --machine h100", "devices=8"),
    ("explain placed.py:example", "step on 16 devices (data=16)"),
])  # fmt: skip
def test_devices_of_a_target_need_not_exist(command, words):
    """In a process of its own, which has one device until a command plays more."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    program = [sys.executable, "-m", "gshard", *command.split()]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.parametrize(("line", "code", "told"), [
    ("--version", 0, f"gshard {version('gshard')} (jax {jax.__version__}"),
    ("explan x.py:f", 2, "Did you mean 'explain'?"),
    ("explain x.py:f --machien v3", 2, "Did you mean '--machine'?"),
])  # fmt: skip
def test_the_version_and_near_names(line, code, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == code
    assert told in "".join(capsys.readouterr())


def test_texts_of_shapes_and_meshes():
    assert shape_of("pred[]").dtype == jnp.bool_
    assert shape_of("s32[4, 2]").shape == (4, 2)
    assert mesh_of("16").size == 16
