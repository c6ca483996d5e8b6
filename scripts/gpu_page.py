"""The page of ``scripts/gpu.py``: tables of what its parts found, what failed, and what was not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resumable import DONE, FAILED, Found, Part, State

TITLES = {
    "gpu": (
        "On a GPU",
        "Each figure was measured on the machine whose table is above it, by one run of the script.",
    ),
    "described": (
        "Compiled for GPUs",
        "No GPU was there. Programs were compiled by XLA for GPUs that were described to it, and read; none ran.",
    ),
    "dry-run": (
        "Dry run",
        "**No GPU was there.** This is the script's dry run on CPU with tiny sizes: it shows that the script works. "
        "No figure of it means anything.",
    ),
}
SOURCES = {
    "mocked": "one GPU that XLA takes for many (`jax_mock_gpu_topology`)",
    "described": "H100 that are described to the compiler, whose autotuner has nothing to run on",
    "virtual": "virtual CPU devices, where nothing is asynchronous",
}
SPEED = (
    "step", "weights", "tokens/s, `jax.jit`", "tokens/s, `gshard.jit`", "time over `jax.jit`'s", "ms", "ms, modelled",
    "TFLOP/s",
)  # fmt: skip
MEMORY = (
    "step", "MiB of temporaries, `jax.jit`", "`gshard.jit`", "MiB of arguments and results, `jax.jit`", "`gshard.jit`",
    "compiled in s, `jax.jit`", "`gshard.jit` (of it planning)", "kernels, `jax.jit`", "`gshard.jit`",
)  # fmt: skip
MIB = 2**20


def page(state: State, parts: Sequence[Part], mode: str, again: str, others: Sequence[State] = ()) -> str:
    """The text of the page; ``others`` are states of other machines, shown in sections of their own."""
    title, what = TITLES[mode]
    left = [part.name for part in parts if not any(part.name in s.parts for s in (state, *others))]
    sections = [
        f"# {title}\n\n<!-- Written by scripts/gpu.py from what it measured: change that, not this. -->\n\n{what}\n",
        _found(state), *(_on_another(other) for other in others), _not_run(left),
        f"## Doing it again\n\n```bash\n{again}\n```\n\nStopped at any point, the same line goes on where it was.\n",
    ]  # fmt: skip
    return "\n".join(filter(None, sections))


def _found(state: State) -> str:
    sections = [
        machine_of(state), _training(state), _programs(state), _laws(state), _kernels(state), _examples(state),
        _steps(state), _memory(state), _layer(state), _operators(state),
        *(_topology(state, source) for source in SOURCES), failed(state),
    ]  # fmt: skip
    return "\n".join(filter(None, sections))


def _on_another(state: State) -> str:
    """What was measured on another machine, one level of headings deeper."""
    m = state.found("machine")
    lines = _found(state).splitlines()
    deeper = "\n".join(f"#{line}" if line.startswith("## ") else line for line in lines)
    return f"## On {m['kind'] if m else 'another machine'}\n\n{deeper}\n"


def put(where: Path, text: str) -> None:
    """Writes a page, and its folder if there is none."""
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(text, "utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def of_kind(state: State, prefix: str) -> dict[str, Found]:
    """What the finished parts of a kind found, by name."""
    names = [name for name in state.parts if name == prefix or name.startswith(prefix + " ")]
    return {name: found for name in names if (found := state.found(name)) is not None}


def machine_of(state: State) -> str:
    """A table of what the devices are."""
    m = state.found("machine")
    if m is None:
        return ""
    memory = f", {m['memory'] / 2**30:.0f} GiB that JAX may use" if m["memory"] else ""
    driver = f", driver {m['driver']}" if m["driver"] else ""
    dates = sorted(entry["at"] for entry in state.parts.values() if entry["state"] == DONE)
    rows = [
        ["devices", f"{m['count']} x {m['kind']} ({m['platform']}{memory})"],
        ["host", f"{m['cores']} cores, {m['processor']}"],
        ["software", f"JAX {m['jax']}, jaxlib {m['jaxlib']}, NumPy {m['numpy']}, Python {m['python']}{driver}"],
        ["runtime", m["runtime"]],
        ["gshard", f"{m['gshard']}{', commit ' + m['commit'] if m['commit'] else ''}"],
        ["measured", f"{dates[0]} to {dates[-1]} UTC"],
    ]
    return (
        f"## The machine\n\n{table(['', ''], rows)}\nMemory was not preallocated. Numbers are compared with products "
        "at JAX's `highest` precision, on both sides; speed is that of the default, which takes TF32 for float32 on a "
        "GPU.\n"
    )


def _training(state: State) -> str:
    found = state.found("train")
    if found is None:
        return ""
    on_cpu, *_ = found["losses"].values()
    rows = []
    for side, losses in found["losses"].items():
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, on_cpu, strict=True))
        rows.append([side, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{off:.1e}"])
    return (
        f"## A training run\n\n{found['steps']} steps of {found['model']} on random ids, {found['tokens']:,} tokens a "
        "side, with the same numbers at the start:\n\n"
        + table(["", "first loss", "last loss", "largest difference to CPU, relative"], rows)
    )


def _programs(state: State) -> str:
    found = state.found("programs")
    if found is None:
        return ""
    rows = found["rows"]
    alone, many = (max((row[i] for row in rows), default=0.0) for i in (1, 2))
    return (
        f"## Programs\n\n{found['tried']} of the {found['of']} programs of `tests/families`, drawn at random, with "
        "marks for eight devices: `gshard.jit` on this device alone, and the programs of all eight devices run on it "
        "one after the other, what they say to each other done in numpy. Largest differences to `jax.jit` on CPU, "
        f"relative to the largest element of a result: {alone:.1e} alone, {many:.1e} for eight.\n\n"
        + _lists({f"further off than {found['near']:g}": found["far"], "failed": found["wrong"]})
    )


def _laws(state: State) -> str:
    found = state.found("laws")
    if found is None:
        return ""
    return (
        f"## Rules of operators\n\nOf {found['tried']} of the {found['of']} rows of `tests/harness.py`, drawn at "
        "random, one split each was run part by part on this device and compared with the operator on the whole array "
        f"there (`gshard.testing`): {found['tried'] - len(found['wrong'])} agree.\n\n"
        + _lists({"wrong": found["wrong"]})
    )


def _lists(groups: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for title, members in groups.items():
        told = [f"`{name}` ({x if isinstance(x, str) else format(x, '.1e')})" for name, x in members.items()]
        lines.append(f"- {title}: {', '.join(told) or 'none'}")
    return "\n".join(lines) + "\n"


def _kernels(state: State) -> str:
    found = state.found("kernels")
    if found is None:
        return ""
    rows = [
        [name, *("" if off is None else f"{off:.1e}" for off in offs), f"{near:g}"]
        for name, near, *offs in found["rows"]
    ]
    return (
        "## Kernels of a GPU\n\nPrograms whose kernels a CPU does not have, or has others for: largest differences to "
        "`jax.jit` on this device, relative to the largest element of a result.\n\n"
        + table(["program", "`gshard.jit` alone", "eight devices, one after the other", "allowed"], rows)
        + "\n"
        + _lists({"further off than allowed": found["far"], "failed": found["wrong"]})
    )


def _memory(state: State) -> str:
    found = state.found("memory")
    if found is None:
        return ""
    rows = []
    for name, off, same, jit, ours in found["rows"]:
        memories = [f"{x / MIB:,.0f}" for side in (jit, ours) for x in side[1:]]
        rows.append([name, f"{off:.1e}", "yes" if same else "no", f"{1e3 * jit[0]:.2f}", f"{1e3 * ours[0]:.2f}"])
        rows[-1] += memories
    head = [
        "program", "largest difference", "results in the same memories", "ms, `jax.jit`", "ms, `gshard.jit`",
        "MiB of temporaries, `jax.jit`", "on the host", "MiB of temporaries, `gshard.jit`", "on the host",
    ]  # fmt: skip
    return (
        f"## State in the memory of the host\n\nMatrices of {found['size']} x {found['size']} in float32; the moments "
        "of Adam, or the activations of four layers, lie in `pinned_host`. Three calls, each with the results of the "
        "one before.\n\n" + table(head, rows) + "\n" + _lists({"failed": found["wrong"]})
    )


def _operators(state: State) -> str:
    found = state.found("operators")
    if found is None:
        return ""
    rows = [
        [name, f"{1e3 * took:.3f}", f"{1e3 * modelled:.3f}", f"{took / modelled:.2f}", f"{flops / took / 1e12:,.1f}", n]
        for name, took, modelled, flops, n in found["rows"]
    ]
    head = ["operator", "ms", "ms, modelled", "measured / modelled", "TFLOP/s", "kernels"]
    return (
        f"## Operators and the roofline\n\nEach under `jax.jit` at the default precision, medians of queued calls; the "
        f"model is that of `{found['machine']}` (`gshard.device`). Its shares of the vendor's figures were set from "
        "one H100; there this is no test of them.\n\n"
        + table(head, rows) + "\n" + _lists({"failed": found["wrong"]})
    )  # fmt: skip


def _examples(state: State) -> str:
    rows = []
    for name, found in of_kind(state, "example").items():
        worst = max((off for *_, off in found["programs"]), default=None)
        programs = ", ".join(f"`{function}` ({devices})" for function, devices, _ in found["programs"])
        off = "" if worst is None else f"{worst:.1e}"
        rows.append([f"`{name.split()[1]}.py`", programs or "none is called", off, found["left"] or ""])
    if not rows:
        return ""
    return (
        "## Examples\n\nEach example ran unchanged on eight CPU devices. Then this device ran the first calls of its "
        "partitioned functions, one device's program after the other, with the same arguments:\n\n"
        + table(["example", "programs (devices)", "largest difference to CPU", "not looked at, for time"], rows)
    )


def _steps(state: State) -> str:
    found = list(of_kind(state, "step").values())
    return "" if not found else "## The training step\n\n" + steps(found)


def steps(found: Sequence[Found]) -> str:
    """Tables of training steps, those of ``gpu_step.step``."""
    speed, memory, kinds = [], [], []
    for f in found:
        name = f"`{f['preset']}`" + ("" if f["preset"].startswith("dense") else f", {f['dispatch']}")
        jit, ours = f["sides"]["jax.jit"], f["sides"]["gshard.jit"]
        modelled = f"{1e3 * f['modelled']:.2f}" if f["modelled"] else ""
        speed.append([
            name, f"{f['weights'] / 1e6:.1f} M", f"{jit['tokens_per_second']:,.0f}",
            f"{ours['tokens_per_second']:,.0f}",
            f"{f['ratio']:.3f}", f"{1e3 * ours['seconds']:.2f}", modelled, f"{f['flops'] / jit['seconds'] / 1e12:.1f}",
        ])  # fmt: skip
        memory.append([
            name, *(f"{side[key] / MIB:,.0f}" for key in ("temporaries", "kept") for side in (jit, ours)),
            f"{jit['compile_seconds']:.1f}", f"{ours['compile_seconds']:.1f} ({f['plan_seconds']:.1f})",
            *(sum(side["kernels"].values()) for side in (jit, ours)),
        ])  # fmt: skip
        most = list(ours["kernels"].items())[:6]
        kinds.append(f"- {name}: " + ", ".join(f"{count} {kind}" for kind, count in most))
    return (
        f"One device, {found[0]['tokens']:,} tokens a side without padding; medians of steps of both in turns. Experts "
        "have twice the slots of an even load with `einsum` and `gather`; `blocks` drops no token. FLOPs "
        "are those of gshard's model of the program, products and all else; its modelled time stands where the device "
        "is one that it knows.\n\n"
        + "\n".join([table(SPEED, speed), table(MEMORY, memory), "Kernels of a step under `gshard.jit`, by kind:\n"])
        + "\n"
        + "\n".join(kinds)
        + "\n"
    )


def _layer(state: State) -> str:
    found = state.found("routing")
    return "" if found is None else f"## A layer\n\n`{found['line']}` printed:\n\n```text\n{found['text']}\n```\n"


def _topology(state: State, source: str) -> str:
    rows = []
    for found in of_kind(state, source).values():
        where = f"{found['devices']} ({', '.join(f'{a}={n}' for a, n in found['axes'].items())})"
        for side, s in found["sides"].items():
            begin = [found["program"], where, side]
            if "error" in s:
                rows.append([*begin, s["error"], *[""] * 7])
                continue
            predicted = f"{found['predicted'] / MIB:,.2f}" if side == "gshard" else ""
            kinds = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, (count, _) in sorted(s["kinds"].items()))
            rows.append([
                *begin, kinds or "none", f"{s['bytes'] / MIB:,.2f}", predicted, s["asynchronous"], s["hidden"],
                f"{100 * s['hidden_bytes'] / max(s['bytes'], 1):.0f} %", f"{s['temporaries'] / MIB:,.1f}",
                f"{s['seconds']:.0f}",
            ])  # fmt: skip
    if not rows:
        return ""
    head = [
        "program", "devices", "partitioned by", "collectives of a call", "MiB sent by a device", "as predicted",
        "asynchronous", "with kernels meanwhile", "bytes of these", "MiB of temporaries", "compiled in s",
    ]  # fmt: skip
    return (
        f"## Schedules: {source} devices\n\nCompiled and not run, for {SOURCES[source]}. A collective can be hidden by "
        "what the schedule has between its start and its end; whether it is hidden in time is not measured. XLA's own "
        "partitioner has the same marks as constraints and the arguments as gshard places them; it is left out where "
        "the time was short, and of products in steps. It is compiled second, in the same process: it finds the tuning "
        "of the kernels that both have.\n\n" + table(head, rows)
    )


def failed(state: State) -> str:
    """The parts that failed, each with its last lines."""
    ended = {name: entry for name, entry in state.parts.items() if entry["state"] == FAILED}
    if not ended:
        return ""
    told = [
        f"**{name}**, after {entry['seconds']:.0f} s:\n\n```text\n{entry['error']}\n```\n"
        for name, entry in ended.items()
    ]
    return "\n".join(["## What failed\n", *told])


def _not_run(left: Sequence[str]) -> str:
    lines = [f"- Parts that were not reached: {', '.join(left)}."] if left else []
    lines += [
        "- No program ran on several GPUs: collectives between GPUs, NCCL and networks are not tested here.",
        "- No model was trained to an end, and no other kind of accelerator was looked at.",
    ]
    return "## What was not run\n\n" + "\n".join(lines) + "\n"
