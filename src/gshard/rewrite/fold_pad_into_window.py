"""Folds a pad into the reduction over windows that reads it.

The derivative of an average over windows pads its operand with zeros between the elements, and sums windows of the
result. As a separate array, the padded operand would have other parts than the operand, so all elements would move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.comm.shards import identity
from gshard.core.program import Constant, Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph
from gshard.rules.window import MONOIDS


@at(*MONOIDS)
def fold_pad_into_window(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``reduce_window_sum(pad(x, 0))`` by a ``reduce_window_sum`` of ``x`` with more padding."""
    pad = graph.producer(e.inputs[0], "pad")
    padding = None if pad is None else _padding(e, pad)
    return None if pad is None or padding is None else [graph.changed(e, pad.inputs[:1], **padding)]


def _padding(e: Equation, pad: Equation) -> dict[str, Any] | None:
    """The parameters of a window reduction that includes the pad; None if there is none."""
    number, config = pad.inputs[1], [tuple(map(int, c)) for c in pad.params["padding_config"]]
    unit = identity(MONOIDS[e.name], e.outputs[0].dtype)
    if not isinstance(number, Constant) or not np.all(np.asarray(number.value) == unit):
        return None
    if any(low < 0 or high < 0 for low, high, _ in config) or any(n != 1 for n in e.params["base_dilation"]):
        return None
    padding = zip(e.params["padding"], config, strict=True)
    return {
        "padding": tuple((a + low, b + high) for (a, b), (low, high, _) in padding),
        "base_dilation": tuple(interior + 1 for _, _, interior in config),
    }
