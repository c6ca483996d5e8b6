"""Report: how the text is distributed over the languages, as a table and as the paper's figure."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("rank", "language", "train", "dev", "test", "known_dev", "known_test", "english_words")


def write_table(distribution: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes languages with their pairs and English words as CSV, in the order given: the largest first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows({"rank": rank, **row} for rank, row in enumerate(distribution, 1))


def write_plot(distribution: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draws training pairs of each language, the largest first, on a logarithmic scale.

    Returns:
        Whether it was drawn: matplotlib may not be there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    names = [row["language"] for row in distribution]
    figure = Figure(figsize=(max(6.0, 0.13 * len(names)), 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(names)), [max(row["train"], 1) for row in distribution], color="#4477aa")
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_xlim(-0.8, len(names) - 0.2)
    axes.set_xlabel("languages, from high to low resource")
    axes.set_ylabel("pairs with English")
    figure.savefig(path)
    return True
