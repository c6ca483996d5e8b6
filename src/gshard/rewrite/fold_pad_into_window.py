"""Padded: a window that slides over what was padded pads by itself.

The derivative of an average over windows spreads what it is given with zeros between, and adds it up in windows. Made
as an array of its own, the padding is in other parts than what was padded, and all of it moves there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gshard.comm.shards import identity
from gshard.core.program import Constant, Equation, Value

_MONOIDS = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}


def padded_by_windows(
    equations: Iterable[Equation], outputs: Sequence[Value | Constant], equation: Callable[..., Equation]
) -> list[Equation]:
    """The equations in which windows pad; what nobody reads any more is gone.

    Args:
        equations: of one block.
        outputs: the block's results.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    pads: dict[Any, Equation] = {e.outputs[0]: e for e in equations if e.name == "pad"}
    instead = {}
    for e in equations:
        pad = pads.get(e.inputs[0]) if e.name in _MONOIDS else None
        if pad is not None and (params := _padding(e, pad)) is not None:
            instead[e] = equation(e.primitive, params, pad.inputs[:1], e.outputs, e.source_info)
    read = {*outputs, *(x for e in equations for x in instead.get(e, e).inputs)}
    return [instead.get(e, e) for e in equations if e.name != "pad" or not read.isdisjoint(e.outputs)]


def _padding(e: Equation, pad: Equation) -> dict[str, Any] | None:
    """The parameters of a window over what is padded so, if it can pad that itself."""
    number, config = pad.inputs[1], [tuple(map(int, c)) for c in pad.params["padding_config"]]
    nothing = identity(_MONOIDS[e.name], e.outputs[0].dtype)
    if not isinstance(number, Constant) or not np.all(np.asarray(number.value) == nothing):
        return None
    if any(low < 0 or high < 0 for low, high, _ in config) or any(n != 1 for n in e.params["base_dilation"]):
        return None
    padding = zip(e.params["padding"], config, strict=True)
    return {
        **e.params,
        "padding": tuple((a + low, b + high) for (a, b), (low, high, _) in padding),
        "base_dilation": tuple(interior + 1 for _, _, interior in config),
    }
