"""Writes the table of docs/machines.md: the kinds of machines, read off ``machine_kinds``.

python scripts/machines.py             # or: make machines
"""

import re
from pathlib import Path

from gshard.device.machine import DIRECT, KINDS, Kind

PAGE = Path(__file__).resolve().parent.parent / "docs" / "machines.md"
HEAD = (
    "| name | devices | TFLOP/s | in int8 | in fp8 | memory, GB/s | memory | network, GB/s | host, GB/s | source |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\|\n)*")


def table() -> str:
    """The table, a row for each kind."""
    return HEAD + "".join(map(_row, KINDS, KINDS.values()))


def page() -> str:
    """The page with that table in the place of the one that it has."""
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(text), f"{PAGE} has no table of machines"
    return TABLE.sub(lambda _: table(), text, count=1)


def _row(name: str, kind: Kind) -> str:
    memory = f"{kind.memory / 2**30:.4g} GiB" if kind.memory % 2**30 == 0 else f"{kind.memory / 1e9:.4g} GB"
    devices = ", ".join(f"`{device}`" for device in kind.devices) or "CPUs, abstract meshes"
    rate, bandwidth = (_number(x) for x in (kind.flops["bf16"] / 1e12, kind.memory_bandwidth / 1e9))
    f8 = next((dtype for dtype in kind.flops if dtype.startswith("f8")), "")
    narrow = [_number(kind.flops[dtype] / 1e12) if dtype in kind.flops else "" for dtype in ("s8", f8)]
    host = _number(kind.host_link / 1e9) if kind.host_link else ""
    cells = (f"`{name}`", devices, rate, *narrow, bandwidth, memory, _network(kind), host, kind.source)
    return f"| {' | '.join(cells)} |\n"


def _network(kind: Kind) -> str:
    link = _number(kind.link / 1e9)
    if kind.wraps:
        between = kind.between_cores or kind.memory_bandwidth / 2
        cores = f"; two cores a chip, {_number(between / 1e9)}" if kind.cores > 1 else ""
        return f"{kind.dimensions}-D torus, {link}{cores}"
    if not kind.node:
        return f"a switch, {link}"
    inside = (
        f"{kind.node}, each linked to each, {link}" if kind.inside == DIRECT else f"{kind.node} behind a switch, {link}"
    )
    return f"{inside}; between nodes {_number(kind.between_nodes / 1e9)}"


def _number(x: float) -> str:
    return f"{round(x, 3):,.10g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
