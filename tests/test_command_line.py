"""The command line: what its commands print and write, and errors in the user's terms."""

import gzip
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.__main__ import main
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine
from gshard.moe.config import TABLE_1
from gshard.named_target import mesh_of, shape_of
from gshard.plan_command import configured, lower, plan
from gshard.xla.calibrate import calibrate
from gshard.xla_programs.compiled_report import NO_MACHINE
from xla_programs.compiled_texts import GPU, TPU

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
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small_model.py"
    path.write_text(MODEL)
    return path


def test_explain_prints_a_table(model, capsys):
    assert main(["explain", f"{model}:loss", "--arg", "f32[8,4]", "--arg", "f32[4,2]", "--mesh", "data=4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("loss on 4 devices (data=4)")
    assert "all_reduce" in printed
    assert "ms a call on cpu" in printed


def test_explain_writes_a_page_and_its_data(model, tmp_path, capsys):
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    command = ["explain", f"{model}:example", "--mesh", "data=8", "--machine", "v3:2x2"]
    assert main([*command, "--html", str(page), "--json", str(data)]) == 0
    read = json.loads(data.read_text())
    assert read["mesh"]["size"] == 8
    assert read["machine"]["name"] == "v3:2x2"
    assert "<title>gshard explain" in page.read_text()


def test_search_prints_what_it_found_and_writes_the_plan(model, tmp_path, capsys):
    page, saved = tmp_path / "page.html", tmp_path / "plan.json"
    command = ["search", f"{model}:example", "--mesh", "data=2,model=4", "--machine", "v3:2x2", "--why", "w"]
    assert main([*command, "--html", str(page), "--save", str(saved), "--memory-limit", "1GiB"]) == 0
    printed = capsys.readouterr()
    assert "ms a call on v3:2x2, mesh (data=2, model=4)" in printed.out
    assert "as it is marked" in printed.out
    assert "w: f32[4,2" in printed.out
    assert "as it is marked: " in printed.err, "progress"
    assert "<title>gshard explain" in page.read_text()
    assert gshard.SavedPlan.load(saved).axes == (("data", 2), ("model", 4))
    assert main([*command, "--save", str(tmp_path / "absent" / "plan.json")]) == 1
    assert f"there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--export"], "in_shardings = "),
        (["--export", "plan.mlir"], "sdy.mesh @mesh"),
        (["--export", "plan.txt", "--export-as", "stablehlo"], "sdy.mesh @mesh"),
    ],
)
@pytest.mark.one_in(2)
def test_search_exports_the_plan(model, options, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["search", f"{model}:example", "--mesh", "data=4", "--machine", "h100:1x4", *options]
    assert main([*command, "--budget-seconds", "1"]) == 0
    printed = capsys.readouterr().out
    files = [tmp_path / name for name in options[1:2] if "." in name]
    assert part in (files[0].read_text() if files else printed)
    assert all(f"wrote {file.name}: for jax.jit on mesh" in printed for file in files)


def test_search_refuses_a_form_that_there_is_not(model, capsys):
    command = ["search", f"{model}:example", "--mesh", "4", "--machine", "h100:1x4"]
    assert main([*command, "--export-as", "patch"]) == 1
    assert "a plan has no form 'patch'" in capsys.readouterr().err
    assert main([*command, "--export-as", "jax-export"]) == 1
    assert "writes bytes" in capsys.readouterr().err


def test_search_tries_the_shapes_of_a_number_of_devices(model, capsys):
    assert (
        main(["search", f"{model}:example", "--mesh", "4", "--machine", "h100:1x4", "--donate-argnums", "0", "--marks"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "mesh (data=2, model=2)" in printed
    assert "ms without further marks" in printed


@pytest.mark.parametrize(
    "target, extra, message",
    [
        ("{}:absent", [], "has no 'absent'"),
        ("{}:value", [], "is a int and no function"),
        ("{}:wrong", [], "returned int, not a tuple"),
        ("{}:loss", [], "needs arguments, and none are given"),
        ("{}:loss", ["--arg", "f32[8,"], "'f32[8,' is not understood: f32[8]?"),
        ("{}:example", ["--mesh", "a=b"], "is no mesh"),
        ("{}:example", ["--mesh", "data=8", "--machine", "v3:4x4"], "32 devices, and the mesh has 8"),
        (
            "{}:loss",
            ["--arg", "float32[64,8]"],
            "'float32[64,8]' is not understood: f32[64,8]?\n  Types are f32, bf16, f16",
        ),
        ("{}:loss", ["--arg", "int8[4]"], "not understood: s8[4]?"),
        ("{}:loss", ["--arg", "[4]"], "'[4]' is not understood."),
        ("{}:example", ["--mesh", "data=8", "--machine", "h100:1x4"], "Write h100:1x8, or leave out the shape: h100."),
        ("{}", [], "names no function"),
        ("no_such_module:f", [], "cannot be imported"),
        ("{}:loss", ["--arg", "f32[8,4]"], "cannot be called with 1 argument: missing a required argument: 'w'"),
        ("{}:loss", ["--arg", "f32[8,4]"] * 3, "too many positional arguments"),
        ("{}:loss", ["--arg", "f32[8,4]", "--arg", "f32[5,2]", "--mesh", "data=4"], "small_model.py:4 (loss)"),
        (
            "{}:example",
            ["--mesh", "data=8", "--html", "/no/such/folder/page.html"],
            "there is no folder /no/such/folder",
        ),
        ("{}:example", ["--mesh", "data=8", "--json", "/no/such/folder/page.json"], "--json /no/such/folder/page.json"),
        (
            "{}:example",
            ["--mesh", "data=8", "--trace", "/no/such/folder/trace.json"],
            "--trace /no/such/folder/trace.json",
        ),
        ("{}:example", ["--mesh", "data=8", "--against", "/no/such/file.json"], "cannot be read"),
        ("{}:example", ["--mesh", "data=8", "--baseline", __file__], "is no explanation"),
        ("{}:example", ["--mesh", "data=8", "--fail-above", "much"], "is no number of bytes"),
    ],
)
def test_mistakes_are_one_clear_error(model, target, extra, message, capsys):
    assert main(["explain", target.format(model), *extra]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("import jax\njax.nothing_here\n", "fails when it is imported: AttributeError"),
        ("import sys\nsys.exit(2)\n", "fails when it is imported: SystemExit"),
        ("\ndef f(:\n", "SyntaxError: invalid syntax (failing_model.py, line 2).\n  at failing_model.py:2\n"),
        ("import not_there\n", "failing_model.py:1 imports 'not_there', which is not installed here."),
        ("import json\nfrom json import nope\n", "\n  at failing_model.py:2\n"),
    ],
)
def test_a_module_that_fails_is_one_clear_error(text, message, tmp_path, capsys):
    path = tmp_path / "failing_model.py"
    path.write_text(text)
    assert main(["explain", f"{path}:f"]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("command", [["explain"], ["search", "--machine", "h100"], ["plan", "--machine", "h100:1x8"]])
@pytest.mark.one_in(3)
def test_devices_of_a_target_need_not_exist(command, tmp_path):
    """In a process of its own, which has one device until a command plays more."""
    path = tmp_path / "jitted_model.py"
    path.write_text(
        f"{MODEL}\ndef jitted():\n    f, *args = reduced()\n    return gshard.jit(f, mesh={{'devices': 8}}), *args\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    program = [sys.executable, "-m", "gshard", command[0], f"{path}:jitted", *command[1:]]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "(devices=8)" in done.stdout or "mesh devices=8" in done.stdout


def test_what_does_not_fit_is_told_by_the_exit_status(model, capsys):
    big = ["--arg", "f32[8,4]", "--arg", "f32[4,5000000000]"]
    assert main(["plan", f"{model}:loss", *big, "--machine", "h100:1x8", "--mesh", "data=8"]) == 3
    assert "this does not fit: a device would hold 93.1 GiB, and may 74.5 GiB." in capsys.readouterr().err
    small = ["search", f"{model}:example", "--mesh", "data=4", "--machine", "h100:1x4", "--memory-limit", "40B"]
    assert main(small) == 3
    assert "this does not fit" in capsys.readouterr().err


def test_an_explanation_of_another_machine_is_not_compared(model, tmp_path, capsys):
    before = tmp_path / "before.json"
    command = ["explain", f"{model}:example", "--mesh", "data=8"]
    assert main([*command, "--json", str(before)]) == 0
    assert main([*command, "--against", str(before)]) == 0
    assert main([*command, "--against", str(before), "--machine", "h100"]) == 1
    printed = capsys.readouterr().err
    assert "times of two kinds of machines cannot be compared.\n  before: cpu:8; after: h100:1x8\n" in printed


def test_an_argument_to_donate_that_is_not_there(model, capsys):
    command = ["search", f"{model}:loss", "--arg", "f32[8,4]", "--arg", "f32[4,2]", "--donate-argnums", "5"]
    assert main(command) == 1
    assert "--donate-argnums 5: loss has 2 arguments, x and w." in capsys.readouterr().err


def test_a_traceback_is_shown_if_asked_for(model, capsys):
    command = ["explain", f"{model}:loss", "--arg", "f32[8,4]", "--arg", "f32[5,2]", "--mesh", "data=4"]
    assert main(command) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert main(["--traceback", *command]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"gshard {version('gshard')} (jax {jax.__version__}")


def test_the_mesh_is_that_of_the_machine(model, capsys):
    assert main(["explain", f"{model}:reduced", "--machine", "h100:1x4"]) == 0
    assert "loss on 4 devices (devices=4)" in capsys.readouterr().out


def test_what_became_worse_fails_with_its_line(model, tmp_path, capsys):
    """Exit status 3, for continuous integration: a limit of bytes, and what the program was before."""
    command = ["explain", f"{model}:reduced", "--mesh", "devices=8"]
    small, page = tmp_path / "small.json", tmp_path / "page.html"
    assert main(["explain", f"{model}:reduced", "--mesh", "devices=4", "--json", str(small)]) == 0
    assert "each device sends" in capsys.readouterr().out
    assert main([*command, "--fail-above", "1MiB", "--baseline", str(small)]) == 3, "more devices send more"
    failed = capsys.readouterr().err
    assert "bytes sent grew since the baseline" in failed
    assert "small_model.py:9" in failed
    assert main([*command, "--fail-above", "6"]) == 3
    failed = capsys.readouterr().err
    assert "--fail-above allows 6 B" in failed
    assert "small_model.py:9" in failed
    same = tmp_path / "same.json"
    assert main([*command, "--json", str(same)]) == 0
    assert (
        main([*command, "--baseline", str(same), "--against", str(same), "--html", str(page), "--fail-above", "7"]) == 0
    )
    printed = capsys.readouterr().out
    assert "no line changed" in printed
    assert "-bound: " in printed
    assert '"difference":' in page.read_text()


def test_trace_and_against_xla(model, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    command = ["explain", f"{model}:reduced", "--mesh", "devices=8", "--trace", str(trace), "--against", "xla"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "loss by XLA's partitioner -> loss by gshard" in printed
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_function_is_planned_for_a_machine(model, capsys):
    assert main(["plan", f"{model}:reduced", "--machine", "h100:1x4"]) == 0
    printed = capsys.readouterr().out
    assert "loss on h100:1x4" in printed
    assert "-bound: " in printed
    assert "temporaries" in printed
    assert main(["plan", f"{model}:reduced", "--machine", "h100:1x4", "--search"]) == 1
    assert "gshard search" in capsys.readouterr().err


@pytest.mark.parametrize("made", ["gshard.jit(loss, mesh=MESH), X", "jax.jit(loss, in_shardings=ROWS), X",
    "loss, jax.device_put(X, ROWS)"])  # fmt: skip
def test_a_function_is_planned_on_its_own_mesh(made, model, capsys):
    model.write_text(f"""{MODEL}
X = jnp.ones((8, 4))
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
ROWS = jax.NamedSharding(MESH, jax.P("data"))
def loss(x):
    return jnp.sum(gshard.split(x, 0, "data") ** 2)
def own():
    return {made}
""")
    for command in (["plan"], ["explain", "--seconds", "0"], ["search", "--budget-seconds", "1"]):
        assert main([command[0], f"{model}:own", *command[1:], "--machine", "h100:1x8"]) == 0
        assert re.search(r"data=4,? model=2", capsys.readouterr().out)
    assert main(["plan", f"{model}:own", "--machine", "h100:1x4"]) == 1
    assert "h100:1x4 has 4 devices, and the mesh has 8." in capsys.readouterr().err


@pytest.mark.parametrize("line", ["explan x.py:f", "plan x.py:f --machine v3 --serach"])
def test_what_a_command_line_does_not_know_has_a_near_name(line, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    assert f"Did you mean '{'explain' if 'explan' in line else '--search'}'?" in capsys.readouterr().err


def test_texts_of_shapes_and_meshes():
    assert shape_of("pred[]").dtype == jnp.bool_
    assert shape_of("s32[4, 2]").shape == (4, 2)
    assert mesh_of("16").size == 16


def test_calibrate_measures_this_machine(tmp_path, capsys):
    machine = calibrate(jax.devices()[:4], side=256, elements=1 << 18)
    assert machine.size == 4
    assert machine.measured
    assert all(rate > 1e8 for rate in machine.flops.values())
    assert machine.memory_bandwidth > 1e8
    assert 0 < machine.network[0].latency < 1
    machine.dump(tmp_path / "machine.json")
    assert Machine.of(str(tmp_path / "machine.json")) == machine


@pytest.mark.slow
def test_plan_of_a_model_of_table_1(capsys):
    """MoE(128E, 12L): the paper's marks alone give all-to-alls and sums of gradients.

    The weights of the paper's marks are replicated, and gradients are summed for all devices; most of them are
    scattered, so that each device updates a part of the weights, which is then gathered: the same bytes, less work.
    """
    found = plan("MoE(128E, 12L)", "v3:8x8", remat=True)
    assert set(found.collectives) == {"all_to_all", "all_reduce", "all_gather", "reduce_scatter"}
    config = found.config
    # Forward, recomputed forward and backward: to the experts and back, in each MoE layer, and two for embeddings.
    assert 0 <= found.collectives["all_to_all"][0] - 6 * config.moe_layers <= 2
    summed = sum(found.collectives[kind][1] for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    assert summed < 2 * found.replicated
    experts = 4 * config.moe_layers * 2 * config.model_dim * config.hidden_dim
    assert found.distributed == experts, "one expert of each layer on each device"
    assert found.cost.fits
    text = str(found)
    assert "fits" in text
    assert "MoE dispatch and combine" in text
    assert found.parameters == pytest.approx(13e9, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_plan_of_the_paper_is_found_without_its_marks():
    """MoE(128E, 12L): experts over devices, tokens by group, and less memory than with the marks, which do not fit."""
    by_hand = plan("MoE(128E, 12L)", "v3:8x8")
    assert not by_hand.cost.fits
    found = plan("MoE(128E, 12L)", "v3:8x8", search_plan=True)
    assert "searched, without a mark" in str(found)
    assert found.cost.fits
    assert found.cost.seconds <= 1.1 * by_hand.cost.seconds
    assert "all_to_all" in found.collectives
    program = found.found.plan.program
    for v, name in zip(program.block.inputs, program.names, strict=True):
        if "['experts']['wi']" in name:
            assert found.found.plan.mesh.count(found.found.plan.shardings[v].dims[1]) == 128


@pytest.mark.slow
def test_memory_is_constant_from_128_to_2048_experts():
    """Figure 7: at fixed depth weights and activations of a device do not grow with the experts, nor does planning."""
    peaks = {}
    for experts in (128, 2048):
        config, machine = configured(f"MoE({experts}E, 12L)", "v3", remat=True)
        # The same tokens on each device: Table 3 gives the model of 128 experts four times as many.
        found = plan(f"MoE({experts}E, 12L)", machine.name, remat=True, tokens_of_device=2048)
        peaks[experts] = (found.cost.peak, found.replicated, found.distributed)
    small, large = peaks[128], peaks[2048]
    # 2,048 devices do not divide all that 128 do: some gradients are summed whole.
    assert large[0] == pytest.approx(small[0], rel=0.15)
    assert large[2] == small[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MoE(2048E, 36L)", "MoE(2048E, 60L)"])
def test_the_largest_models_fit(name):
    found = plan(name, "v3:32x32")
    assert found.cost.fits
    # Sums of gradients that are updated in parts are scattered, and what is updated is gathered; experts never are.
    assert {"all_to_all", "all_reduce"} <= set(found.collectives)
    gathered = [k.result for k in found.cost.kernels if k.name in ("all_gather", "reduce_scatter")]
    # Numbers of tokens may be gathered.
    assert not any(re.match(r"(f32|bf16)\[\d+,1,", text) for text in gathered), "[layers, one expert of a device, ...]"


@pytest.mark.slow
def test_a_limit_needs_nothing_from_the_user():
    """MoE(2048E, 60L): gradients stacked as they are computed, in bfloat16; nothing else is needed for 12 GiB."""
    without, limited = (plan("MoE(2048E, 60L)", "v3:32x32", memory_limit=limit) for limit in (None, "12GiB"))
    assert 12 * 2**30 < without.cost.peak < 13 * 2**30
    assert limited.cost.peak <= 12 * 2**30
    assert limited.recomputed is not None
    assert limited.recomputed.share < 0.01
    assert limited.cost.seconds <= without.cost.seconds
    assert "recomputed to fit in 12,288.0 MiB" in str(limited)


@pytest.mark.slow
def test_a_limit_on_the_command_line(capsys):
    assert main(["plan", "MoE(128E, 12L)", "--machine", "v3:8x8", "--memory-limit", "2GiB"]) == 1
    error = capsys.readouterr().err
    assert "more than memory_limit (2.0 GiB)" in error
    assert main(["plan", "MoE(128E, 12L)", "--machine", "v3:8x8", "--memory-limit", "much"]) == 1
    assert "is no number of bytes" in capsys.readouterr().err


def test_finite_is_for_functions(capsys, tmp_path):
    (tmp_path / "chain.py").write_text(
        "import gshard\n\ndef f(u, v, w):\n    return gshard.replicate(gshard.split(u, 1, 8) @ v @ w)\n"
    )
    arguments = [word for size in ("64,512", "512,256", "256,2") for word in ("--arg", f"f32[{size}]")]
    sent = []
    for finite in ([], ["--finite"]):
        assert main(["explain", f"{tmp_path / 'chain.py'}:f", *arguments, "--machine", "h100:1x8", *finite]) == 0
        sent.append(capsys.readouterr().out)
    assert "reduce_scatter" in sent[0]
    assert "each device sends 896 B in one call: all_reduce 896 B" in sent[1]
    assert main(["plan", "MoE(128E, 12L)", "--machine", "v3:8x8", "--finite"]) == 1
    assert "--finite is for a function of yours" in capsys.readouterr().err


def test_plan_refuses_what_is_not_there(capsys):
    assert main(["plan", "MoE(7E)", "--machine", "v3"]) == 1
    printed = capsys.readouterr().err
    assert printed.count("MoE(7E)") == 1
    assert "A function of yours is file.py:function" in printed
    assert main(["plan", "T(96L)", "--machine", "v99"]) == 1
    assert "no machine is called 'v99'" in capsys.readouterr().err


def test_every_row_of_the_table_has_a_batch_that_its_devices_can_split():
    for name in TABLE_1:
        config, machine = configured(name, "v3")
        lowered, (sentences, length) = lower(config, Mesh.abstract(devices=machine.size))
        assert sentences % machine.size == 0
        assert sentences * length % 1024 == 0
        assert lowered.program.block.equations


def test_explain_takes_the_plan_that_search_saved(model, tmp_path, capsys):
    target, saved = [f"{model}:loss", "--arg", "f32[8,4]", "--arg", "f32[4,2]"], tmp_path / "plan.json"
    search = [
        "search",
        *target,
        "--mesh",
        "data=4",
        "--machine",
        "H100",
        "--donate-argnames",
        "w",
        "--save",
        str(saved),
    ]
    assert main(search) == 0
    assert main(["explain", *target, "--plan", str(saved), "--donate-argnames", "w", "--memory-limit", "1GiB"]) == 0
    assert "loss on 4 devices (data=4)" in capsys.readouterr().out
    assert main(["explain", *target, "--plan", str(saved), "--mesh", "data=8"]) == 1
    assert "the plan is for another mesh" in capsys.readouterr().err
    assert main(["explain", *target, "--mesh", "data=4", "--memory-limit", "8 B"]) == 1
    assert "MemoryLimitError" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--finite"], ["--arg", "f32[8]"], ["--mesh", "data=8"], ["--donate-argnums", "0"]])
def test_options_of_functions_are_refused_for_named_models(given, capsys):
    assert main(["plan", "MoE(128E, 12L)", "--machine", "v3:8x8", *given]) == 1
    assert f"{given[0]} is for a function of yours." in capsys.readouterr().err


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


@pytest.fixture
def placed(tmp_path):
    path = tmp_path / "placed_model.py"
    path.write_text(PLACED)
    return path


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "step.hlo.txt"
    path.write_text(GPU)
    return path


def test_explain_reads_a_dump(dump, tmp_path, capsys):
    page, data, trace = (tmp_path / name for name in ("page.html", "data.json", "trace.json"))
    command = ["explain", str(dump), "--mesh", "data=2,model=4"]
    files = ["--html", str(page), "--json", str(data), "--trace", str(trace)]
    assert main([*command, "--machine", "h100:1x8", *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step, compiled by XLA for gpu, on 8 devices (data=2 model=4), 40 instructions")
    assert "all_gather" in printed
    assert "Launch-bound: " in printed
    assert "ms a call on h100:1x8" in printed
    assert json.loads(data.read_text())["machine"]["name"] == "h100:1x8"
    assert "<title>gshard explain" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main([*command, "--against", str(data), "--baseline", str(data), "--fail-above", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert NO_MACHINE in printed
    assert "no line changed" in printed
    more = tmp_path / "more.txt"
    more.write_text(GPU.replace('{"n":"3"}', '{"n":"4"}'))
    assert main(["explain", str(more), "--mesh", "data=2,model=4", "--baseline", str(data)]) == 3
    failed = capsys.readouterr().err
    assert "bytes sent and FLOPs of a device grew since the baseline" in failed
    assert "layers.py:9" in failed
    assert main([*command, "--fail-above", "100KiB"]) == 3
    assert "416.0 KiB in one call of step, and --fail-above allows 100.0 KiB" in capsys.readouterr().err


def test_explain_reads_a_compressed_dump(tmp_path, capsys):
    path = tmp_path / "step.txt.gz"
    path.write_bytes(gzip.compress(TPU.encode()))
    assert main(["explain", str(path), "--machine", "v5e:2x4"]) == 0
    assert "compiled by XLA for tpu, on 8 devices" in capsys.readouterr().out
    path.write_bytes(gzip.compress(TPU.encode())[:100])
    assert main(["explain", str(path)]) == 1
    assert "neither a compiled program nor a file of one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--why", "w"], "--why is not for a compiled program."),
        (["--trace", "trace.json"], 'machine="h100:1x8", on the command line --machine h100:1x8'),
        (["--plan", "plan.json"], "--plan is not for a compiled program."),
        (["--memory-limit", "1GiB"], "--memory-limit is not for a compiled program."),
        (["--finite"], "--finite is not for a compiled program."),
        (["--arg", "f32[8]"], "--arg is not for a compiled program."),
        (["--donate-argnums", "0"], "--donate-argnums is not for a compiled program."),
        (["--static-argnames", "x"], "--static-argnames is not for a compiled program."),
        (["--against", "xla"], "--against xla is not for a compiled program."),
        (["--partitioner", "gshard"], "a compiled program is partitioned already."),
        (["--mesh", "4"], "the program runs on 8 devices, and the mesh has 4."),
        (["--machine", "h100:1x4"], "h100:1x4 has 4 devices"),
    ],
)
def test_what_a_dump_cannot_be_asked_is_one_clear_error(given, message, dump, capsys):
    assert main(["explain", str(dump), *given]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_dump_of_an_earlier_stage_is_one_clear_error(tmp_path, capsys):
    (tmp_path / "before.txt").write_text(GPU.replace(" is_scheduled=true,", ""))
    assert main(["explain", str(tmp_path / "before.txt")]) == 1
    printed = capsys.readouterr().err
    assert "XLA had not finished partitioning and optimising it" in printed
    assert "whose name ends in after_optimizations.txt" in printed


def test_a_file_that_is_no_dump_is_one_clear_error(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("nothing")
    assert main(["explain", str(tmp_path / "notes.txt")]) == 1
    assert "this is no compiled program.\n  text that begins with 'nothing'" in capsys.readouterr().err


def test_a_function_from_jax_jit_is_explained_as_xla_compiles_it(placed, tmp_path, capsys):
    data = tmp_path / "data.json"
    command = ["explain", f"{placed}:small"]
    assert main([*command, "--machine", "h100", "--json", str(data)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step, compiled by XLA for cpu, on 8 devices (data=8)")
    assert "gradient of w" in printed
    place = next(iter(json.loads(data.read_text())["lines"]))
    assert place.startswith("placed_model.py:")
    assert main([*command, "--machine", "h100", "--partitioner", "gshard", "--against", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "step on 8 devices (data=8), " in printed
    assert "equations" in printed
    assert "step -> step" in printed
    assert main([*command, "--mesh", "data=4"]) == 0, "a mesh is for gshard"
    assert "step on 4 devices (data=4)" in capsys.readouterr().out
    assert main([*command, "--partitioner", "xla", "--mesh", "data=4"]) == 1
    assert "--mesh is for what gshard partitions, and XLA partitions this." in capsys.readouterr().err
    assert main([*command, "--why", "w"]) == 1
    assert "Leave it out, or give --partitioner gshard." in capsys.readouterr().err
    assert main(["explain", f"{placed}:unplaced"]) == 0
    assert "step on 8 devices (devices=8), " in capsys.readouterr().out
    assert main(["explain", f"{placed}:unplaced", "--partitioner", "xla"]) == 0
    assert "compiled by XLA for cpu, on 1 device" in capsys.readouterr().out
    assert main(["explain", f"{placed}:step", "--arg", "f32[32,8]", "--arg", "f32[64,32]", "--partitioner", "xla"]) == 1
    assert 'partitioner="xla" explains a function from jax.jit' in capsys.readouterr().err


def test_a_function_that_is_lowered_is_explained(placed, capsys):
    assert main(["explain", f"{placed}:lowered", "--machine", "h100", "--why", "x"]) == 0
    printed = capsys.readouterr().out
    assert "step on 8 devices (devices=8), " in printed
    assert "x: f32[64@devices,32]" in printed
    assert "ms a call on h100:1x8" in printed
    assert main(["explain", f"{placed}:lowered", "--partitioner", "xla"]) == 0
    assert "step, compiled by XLA for cpu, on 8 devices (devices=8)" in capsys.readouterr().out
    assert main(["explain", f"{placed}:by_jax"]) == 0
    assert "step, compiled by XLA for cpu, on 8 devices (data=8)" in capsys.readouterr().out
    for target, option in ("lowered", ["--mesh", "4"]), ("by_jax", ["--why", "w"]), ("by_jax", ["--finite"]):
        assert main(["explain", f"{placed}:{target}", *option]) == 1
        assert f"{option[0]} is not for a function that is lowered." in capsys.readouterr().err
    assert main(["explain", f"{placed}:by_jax", "--partitioner", "gshard"]) == 1
    assert "a program that jax.jit lowered is partitioned by XLA." in capsys.readouterr().err
    assert main(["search", f"{placed}:lowered"]) == 1
    assert "returned Lowered, not a tuple" in capsys.readouterr().err


def test_devices_of_the_arguments_of_a_function_from_jax_jit_need_not_exist(placed):
    """In a process of its own, which plays as many devices as the arguments are placed on."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    program = [sys.executable, "-m", "gshard", "explain", f"{placed}:example"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled by XLA for cpu, on 16 devices (data=16)" in done.stdout
