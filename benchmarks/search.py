"""Claim: what is searched without a mark is no slower than what people mark by hand, and provably near the best.

Training steps (loss, gradients, the update of a state) on machines that need not be here, each beside the marks that
its literature has. Both are priced as they would run (``gshard cost``); ratios are searched over marked:

    megatron      residual MLPs with a batch too small for the devices (Shoeybi et al. 2019)
    experts       a MoE layer whose tokens come by group (Lepikhin et al. 2020, Algorithm 2)
    one trick     AlexNet: convolutions by sample, large weights not (Krizhevsky 2014)
    vgg           VGG-16, the same way (Jia et al. 2018 have it as their largest gain)
    stripes       a U-Net on one large image, by its rows, halos between them (Jin et al. 2018; the paper, section 4.4)
    square        one product of 16,384 rows on 4 x 4 devices that cannot hold an operand (van de Geijn and Watts 1997)
    vocabulary    an embedding and its logits, split by word
    tables        a recommendation model: tables over devices, layers by sample (Naumov et al. 2019)
    zero          Adam whose state does not fit whole (Rajbhandari et al. 2020): shares of what data parallelism needs
    transformer   a layer of GPT-2 medium with gradients and Adam; all 24 of them on 32 devices

    python benchmarks/search.py                     all, some minutes on one core
    python benchmarks/search.py --only experts

What else is claimed of searches, ``benchmarks/search_claims.py`` shows.
"""

from __future__ import annotations

import argparse
import math
import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from search_cases import Case, cases, memory_of, step_of

import gshard
from gshard.device.cost import cost

NEAR = 1.001  # of the time by hand: more is slower
GAP = 0.005


def run(case: Case) -> tuple[float, float]:
    """Prints a row; the ratio of times and the gap."""
    mesh = gshard.Mesh.abstract(**case.mesh)
    machine = gshard.Machine.of(case.machine)
    limit = memory_of(case, mesh, machine)
    marked = gshard.jit(
        case.marked, mesh=mesh, donate_argnums=0, machine=machine, in_shardings=case.arrive, memory_limit=limit
    ).lower(*case.arguments)
    try:
        by_hand = cost(marked.spmd, machine, marked.donated)
        hand = by_hand.seconds, by_hand.sent, by_hand.peak
    except gshard.stages.MemoryLimitError:
        hand = math.inf, math.nan, math.nan
    begin = time.perf_counter()
    found = gshard.search(step_of(case, mesh, machine), *case.arguments, memory_limit=limit, budget_seconds=math.inf)
    spent = time.perf_counter() - begin
    ratio = found.cost.seconds / hand[0]
    gap = math.nan if found.gap is None else found.gap
    model = found.best.solution.value / found.best.searched.cost.seconds
    print(
        f"{case.name:<14}{hand[0] * 1e3:>10.3f}{found.cost.seconds * 1e3:>10.3f}{ratio:>8.3f}"
        f"{hand[1] / 2**20:>10.1f}{found.cost.sent / 2**20:>10.1f}"
        f"{hand[2] / 2**30:>8.2f}{found.cost.peak / 2**30:>8.2f}"
        f"{model:>8.3f}{gap:>9.2%}{spent:>7.1f}  {found.best.chosen.name}"
        f"{'' if found.best.fits else ', DOES NOT FIT'}",
        flush=True,
    )
    return ratio, gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="cases whose name contains this")
    options = parser.parse_args()
    print(
        f"{'':<14}{'by hand':>10}{'found':>10}{'':>8}{'by hand':>10}{'found':>10}{'by hand':>8}{'found':>8}{'model':>8}"
    )
    print(
        f"{'':<14}{'ms':>10}{'ms':>10}{'ratio':>8}{'MiB':>10}{'MiB':>10}{'GiB':>8}{'GiB':>8}{'/ price':>8}{'gap':>9}"
        f"{'s':>7}  from"
    )
    chosen = [case for case in cases() if not options.only or any(text in case.name for text in options.only)]
    rows = [run(case) for case in chosen]
    slower, open_ = sum(ratio > NEAR for ratio, _ in rows), sum(gap > GAP or math.isnan(gap) for _, gap in rows)
    print(f"\nslower than by hand: {slower} of {len(rows)}; gap above {GAP:.1%}: {open_}; jax {jax.__version__}")


if __name__ == "__main__":
    main()
