"""Figures of evaluations, in the manner of the paper's Figure 6. They need matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from gshard_m4.by_class import CLASSES, Row


def figure(path: Path, title: str, rows: Sequence[Row], classes: Mapping[str, str], baseline: str = "") -> None:
    """Draws the languages from high to low resource, as the paper's Figure 6: bars, and their running mean.

    Args:
        path: an image file; its ending says which kind.
        title: what stands above it.
        rows: scores of the languages; where any has a difference to a baseline, the differences are drawn.
        classes: high, medium or low for each language.
        baseline: its name.
    """
    deltas = any(row.delta_bleu is not None for row in rows)
    drawn = [row for row in rows if not deltas or row.delta_bleu is not None]
    codes = [row.resource for row in drawn]
    values = np.array([row.delta_bleu if deltas else row.bleu for row in drawn])
    colours = {"high": "#0072b2", "medium": "#999999", "low": "#d55e00"}  # told apart by the colour-blind, too
    with mpl.rc_context({"svg.hashsalt": "m4", "font.size": 9}):
        drawing = Figure(figsize=(max(6.0, 0.13 * len(codes)), 3.6), layout="constrained")
        axes = drawing.subplots()
        for name in CLASSES:
            at = [i for i, c in enumerate(codes) if classes[c] == name]
            axes.bar(at, values[at], color=colours[name], label=f"{name} resource", width=0.8)
        window = max(len(codes) // 10, 1)
        if window > 1:
            padded = np.pad(values, (window // 2, window - 1 - window // 2), mode="edge")
            mean = np.convolve(padded, np.full(window, 1 / window), mode="valid")
            axes.plot(mean, color="black", linewidth=1.2, label=f"mean of {window}")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(codes)), codes, rotation=90, fontsize=7 if len(codes) > 40 else 9)
        axes.set_xlim(-0.7, len(codes) - 0.3)
        axes.set_ylabel(f"BLEU above {baseline}" if deltas else "BLEU")
        axes.set_xlabel("languages, from the most to the fewest training pairs")
        axes.set_title(title, fontsize=9)
        axes.legend(loc="upper right", frameon=False, ncols=4, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
