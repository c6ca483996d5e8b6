"""Claim: gshard's own part of a first call is small beside XLA's compilation, in a process that has compiled nothing.

For each step of ``tests/steps``, a process of its own. It imports JAX, then gshard, and lowers and compiles the step
by ``gshard.jit`` twice: cold, and warm, as a new function. Then it does the same by ``jax.jit``. All are CPU seconds:

    import     of gshard, after JAX; what Python compiles of it is kept from an earlier run
    trace      JAX's jaxpr, and the rules of its equations
    plan       the plan
    partition  the per-device program
    lower      to StableHLO, by JAX
    compile    by XLA
    own        trace, plan and partition as a share of compile
    jax.jit    tracing and lowering of the same step by ``jax.jit`` with shardings, and compiling

    python benchmarks/cold_start.py                              a small program and small steps on 8 devices
    python benchmarks/cold_start.py --true-size --only 8B        8B parameters on 64 devices, compiled only
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRUE_SIZE = "--true-size" in sys.argv
FIRST = "a first program"
STAGES = ("trace", "plan", "partition", "lower", "compile")
SMALL = (FIRST, "scanned", "written out", "pipeline", "experts")


def measured(name: str) -> dict[str, Any]:
    """The seconds of a step in this process, which has imported nothing yet."""
    clock = time.process_time
    begun = clock()
    import jax

    with_jax = clock()
    import gshard

    found: dict[str, Any] = {"import jax": with_jax - begun, "import": clock() - with_jax}
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from steps import STEPS, TRUE_SIZES, Step

    def first_program() -> tuple[Callable[..., Any], Any, Any, dict[str, Any]]:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 128), (128, 8))]

        def loss(weights: Any, x: Any) -> Any:
            return jax.numpy.mean((jax.nn.relu(x @ weights[0]) @ weights[1]) ** 2)

        def step(weights: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

        return step, mesh, (shapes, jax.ShapeDtypeStruct((64, 32), "float32", sharding=rows)), {}

    def made() -> tuple[Callable[..., Any], Any, Any, dict[str, Any]]:
        if name == FIRST:
            return first_program()
        step: Step = (TRUE_SIZES if TRUE_SIZE else STEPS)[name]
        options = {"out_shardings": step.results(), "donate_argnums": 0}
        return step.function(), step.mesh(), step.arguments(), options

    def laps(*stages: Callable[[], Any]) -> list[float]:
        times = [clock()]
        for stage in stages:
            stage()
            times.append(clock())
        return [after - before for before, after in itertools.pairwise(times)]

    for when in ("cold", "warm"):
        function, mesh, arguments, options = made()
        jitted = gshard.jit(function, mesh=mesh, **options)
        lowered: list[Any] = []
        seconds = laps(
            lambda f=jitted, a=arguments, to=lowered: to.append(f.lower(*a)),
            lambda to=lowered: to[0].plan,
            lambda to=lowered: to[0].spmd,
            lambda to=lowered: to[0].executable.lowered,
            lambda to=lowered: to[0].compile(),
        )
        found[when] = dict(zip(STAGES, seconds, strict=True))
    function, mesh, arguments, options = made()
    theirs: list[Any] = []
    jitted = jax.jit(function, **options)
    found["jax.jit"] = laps(lambda: theirs.append(jitted.lower(*arguments)), lambda: theirs[0].compile())
    return found


def rows(name: str, found: dict[str, Any]) -> list[str]:
    """The rows of a step in the table."""
    made = []
    for when in ("cold", "warm"):
        stages = found[when]
        own = stages["trace"] + stages["plan"] + stages["partition"]
        seconds = [found["import"] if when == "cold" else None, *stages.values(), own / stages["compile"]]
        seconds += found["jax.jit"] if when == "warm" else [None, None]
        cells = "".join(f"{'-' if x is None else f'{x:.2f}':>10}" for x in seconds)
        made.append(f"{f'{name}, {when}':<32}{cells}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--true-size", action="store_true", help="8B and 70B parameters on 64 devices, compiled only")
    parser.add_argument("--only", action="append", default=[], help="steps whose name contains this")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child)))
        return
    names = ("8B", "8B, tensor", "70B", "8x7B, experts") if TRUE_SIZE else SMALL
    names = tuple(name for name in names if not options.only or any(text in name for text in options.only))
    titles = ("import", *STAGES, "own", "jax.jit", "compile")
    print(f"{'step: CPU seconds':<32}{''.join(f'{title:>10}' for title in titles)}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        devices = f"--xla_force_host_platform_device_count={64 if TRUE_SIZE else 8}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # As after an installation: what Python compiles of the modules is there.
        subprocess.run([sys.executable, "-c", "import gshard"], env=environment, check=True)
        for name in names:
            command = [sys.executable, __file__, *(["--true-size"] if TRUE_SIZE else []), "--child", name]
            text = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name] = json.loads(text.splitlines()[-1])
            print(*rows(name, found[name]), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
