"""``gshard.export``: the file runs where gshard is not installed, with the collectives that were planned."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.__main__ import main
from steps import STEPS

pytest.importorskip("flatbuffers")

# What a server has to write, without gshard. Each file has three calls: of host arrays, of placed ones, and again.
SERVER = """
import json, math, pickle, sys, zipfile
sys.modules["gshard"] = None
import jax, numpy as np
from jax import export
for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as archive:
        programs = json.loads(archive.read("programs.json"))["programs"]
        about = next(p for p in programs if p["platform"] == "cpu")
        program = export.deserialize(bytearray(archive.read(about["file"])))
    names, sizes = tuple(about["mesh"]), tuple(about["mesh"].values())
    types, devices = (jax.sharding.AxisType.Auto,) * len(names), jax.devices()[: math.prod(sizes)]
    mesh = jax.sharding.Mesh(np.reshape(devices, sizes), names, axis_types=types)
    args, kwargs = jax.tree.unflatten(program.in_tree, program.in_shardings_jax(mesh))
    results = jax.tree.unflatten(program.out_tree, program.out_shardings_jax(mesh))
    step = jax.jit(program.call, in_shardings=args, out_shardings=results, donate_argnums=about["donate_argnums"])
    with open(path + ".arguments", "rb") as file:
        given = tuple(map(lambda x, s: jax.device_put(x, s), pickle.load(file), args))
    with open(path + ".hlo", "w") as file:
        file.write(step.lower(*given).compile(about["compiler_options"] or None).as_text())
    made = []
    for _ in range(3):
        copies = jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), given, args)
        made.append(jax.tree.map(np.asarray, step(*copies)))
        assert all(x.is_deleted() for i in about["donate_argnums"] for x in jax.tree.leaves(copies[i])), path
    with open(path + ".results", "wb") as file:
        pickle.dump(made, file)
"""
X = jax.random.normal(jax.random.key(0), (8, 16))
W = np.linspace(-1, 1, 128, dtype="float32").reshape(16, 8)


def sampled(scores, cache, key, at):
    """A step of decoding that samples over a split vocabulary and writes to a cache."""
    best, words = jax.lax.top_k(gshard.split(scores, 1, "model"), 4)
    chosen = jax.random.categorical(jax.random.wrap_key_data(key), best)
    return jnp.take_along_axis(words, chosen[:, None], 1), cache.at[:, at].set(scores.sum(1))


ON = {"data": 2, "model": 4}
PROGRAMS = {
    "a product with a closed-over weight": (gshard.jit(lambda x: gshard.split(x, 1, "model") @ W, mesh=ON), X),
    "sampling and a donated cache": (
        gshard.jit(sampled, mesh=ON, donate_argnames="cache"),
        X, jnp.zeros((8, 4)), jnp.zeros(2, "uint32"), jnp.int32(2),
    ),
    "a part of an axis": (gshard.jit(lambda x: jnp.cumsum(gshard.split(x, 0, 2), 0), mesh={"data": 8}), X),
    "uneven": (gshard.jit(lambda x: jnp.sort(gshard.split(x, 0, "data"), 0), mesh={"data": 8}), X[:6]),
    "another order of devices": (
        gshard.jit(lambda x: gshard.split(x, 0, "data") ** 2, mesh=jax.sharding.Mesh(jax.devices()[::-1], ("data",))),
        X,
    ),
    "explicit axes, options of XLA": (
        gshard.jit(lambda x: gshard.split(x, 0, "data").sum(), mesh=jax.make_mesh((8,), ("data",)),
                   compiler_options={"xla_cpu_enable_fast_math": False}), X,
    ),
    "static arguments": (gshard.jit(lambda x, n: gshard.split(x, 0, "devices") * n, mesh=8, static_argnums=1), X, 3),
    "four devices": (gshard.jit(lambda x: {"sum": gshard.split(x, 0, "data").sum(0)}, mesh={"data": 4}), X),
}  # fmt: skip


def served(folder, programs):
    """Exports programs, serves them in a process without gshard, and compares results and what is sent."""
    paths = {}
    for i, (name, (f, *args)) in enumerate(programs.items()):
        paths[name] = str(folder / f"{i}.zip")
        (about,) = gshard.export(f, *args, to=paths[name])
        assert about["sends"] == gshard.explain(f, *args).total_bytes
        arrays = [x for x in args if not isinstance(x, int)]
        Path(paths[name] + ".arguments").write_bytes(pickle.dumps(jax.tree.map(np.asarray, arrays)))
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", SERVER, *paths.values()], check=True, env=environment)
    for name, (f, *args) in programs.items():
        compiled = f.lower(*args).compile()
        texts = compiled.as_text(), Path(paths[name] + ".hlo").read_text()
        ours, theirs = (gshard.explain(text, mesh=compiled.lowered.mesh.size) for text in texts)
        assert (ours.times_by_kind, ours.bytes_by_kind) == (theirs.times_by_kind, theirs.bytes_by_kind), name
        expected = jax.tree.map(np.asarray, f(*jax.tree.map(lambda x: x if isinstance(x, int) else np.array(x), args)))
        for results in pickle.loads(Path(paths[name] + ".results").read_bytes()):
            jax.tree.map(np.testing.assert_array_equal, results, expected)


def test_runs_without_gshard(tmp_path):
    """Results and collectives are those of ``gshard.jit``, whatever the mesh, the arguments and the options."""
    served(tmp_path, PROGRAMS)


@pytest.mark.slow
def test_training_steps(tmp_path):
    """So are those of all small training steps."""
    jitted = {n: gshard.jit(s.function(), mesh=s.mesh(), out_shardings=s.results()) for n, s in STEPS.items()}
    served(tmp_path, {name: (f, *STEPS[name].numbers()) for name, f in jitted.items()})


def test_sizes_and_platforms(tmp_path):
    """One file has a program for each; weights lie in all of them as in the first."""
    array, to = jax.ShapeDtypeStruct, tmp_path / "all.zip"

    def layer(w, x):
        return gshard.split(x @ w, int(len(x) < 64), "model")  # rows, or columns and so those of w

    every = [(array((512, 512), "float32"), array((n, 512), "float32")) for n in (2, 4096)]
    options = {"platforms": ["tpu", "cuda"], "mesh": gshard.Mesh.abstract(model=64)}
    listed = gshard.export(layer, *every[0], to=to, also=every[1:], **options)
    kinds = [(p["arguments"]["x"].split()[0], p["platform"]) for p in listed]
    assert kinds == [(f"float32[{n},512]", platform) for n in (2, 4096) for platform in ("tpu", "cuda")]
    assert [p["arguments"]["w"] for p in listed] == ["float32[512,512] P(None, 'model')"] * 4
    with zipfile.ZipFile(to) as archive:
        assert json.loads(archive.read("programs.json"))["programs"] == listed
        programs = [jax.export.deserialize(bytearray(archive.read(p["file"]))) for p in listed]
    assert [(p.platforms, p.nr_devices) for p in programs] == [((p["platform"],), 64) for p in listed]


def test_memory_of_the_host(tmp_path):
    """An argument in the memory of the host is taken from there."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    f = gshard.jit(lambda x: x, mesh=mesh, in_shardings=host)
    (listed,) = gshard.export(f, X, to=tmp_path / "host.zip")
    assert listed["arguments"]["x"].startswith("float32<host>")


REFUSED = {
    "callbacks": (lambda x: (jax.debug.print("{}", x.sum()), x)[1], {"mesh": 8}, "calls back to Python"),
    "pure callbacks": (lambda x: jax.pure_callback(np.sin, x, x), {"mesh": 8}, "calls back to Python"),
    "no mesh": (jnp.sin, {}, "no mesh was given"),
    "no platform": (jnp.sin, {"mesh": gshard.Mesh.abstract(data=8)}, "does not tell the platform"),
    "an unknown platform": (jnp.sin, {"mesh": 8, "platforms": "gpu"}, "Give some of cpu, tpu, cuda, rocm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    """What a file cannot have is refused, and no file is written."""
    f, options, message = REFUSED[name]
    with pytest.raises(gshard.GShardError, match=message):
        gshard.export(f, X, to=tmp_path / "refused.zip", **options)
    assert not list(tmp_path.iterdir())


def test_explained(tmp_path, capsys):
    """``gshard explain`` prints a file, compares two, and checks one against a baseline."""
    paths = [str(tmp_path / name) for name in ("rows.zip", "columns.zip")]
    for dim, path in enumerate(paths):
        gshard.export(lambda x, dim=dim: gshard.split(x, dim, "data").sum(0), X, to=path, mesh={"data": 8})
    assert main(["explain", paths[0], "--json", str(tmp_path / "rows.json")]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("0.cpu.jax: for cpu, exported with gshard", "1 in one call"))
    assert main(["explain", *paths]) == 0
    assert "rows.zip" in capsys.readouterr().out
    assert main(["explain", paths[0], "--baseline", paths[1]]) != 0
    assert main(["explain", paths[0], "--why", "x"]) != 0
    assert "--why: not where the file has the plan" in capsys.readouterr().err
    (tmp_path / "broken.zip").write_text("no archive")
    assert main(["explain", str(tmp_path / "broken.zip")]) == main(["explain", str(tmp_path / "missing.zip")]) == 1
    text = capsys.readouterr().err
    assert all(part in text for part in ("is no explanation", "cannot be read"))
