"""When two arrays count as equal: to the bit, except for sums in another order and approximations of functions.

Elements that are only moved, compared or counted must be the same bits. XLA rounds its approximations of functions
differently where loops have other lengths, so a function of each element may differ in the last places. A sum in
another order may differ by some roundings of its terms, which are as large as the largest element, not as the sum.
"""

import jax.numpy as jnp
import numpy as np

from gshard.language.traits import names_where
from gshard.rules.elementwise import EXACT

# What moves, selects, compares or orders elements, and rounds none.
_MOVES = frozenset(EXACT) | frozenset(
    """
    approx_top_k argmax argmin bitcast_convert_type broadcast_in_dim concatenate cummax cummin device_put dynamic_slice
    dynamic_update_slice gather gshard_mark iota pad reduce_max reduce_min reduce_window_max reduce_window_min reshape
    rev scatter scatter-max scatter-min slice sort split squeeze tile top_k transpose
    """.split()
)
# What computes each element of the result by itself.
_ELEMENTWISE = names_where(lambda traits: traits.elementwise) - {*EXACT} | {"while", "scan", "cond", "pjit"}
# Roundings that elements computed each by itself, and sums, may be apart; fewer where one of them is large.
_ROUNDINGS = {False: (8, 64), True: (2, 8)}


def difference(got, want, primitives):
    """How a part differs from what a program of these primitives should give; nothing if it does not."""
    got, want = np.asarray(got), np.asarray(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} belongs"
    if got.tobytes() == want.tobytes():
        return ""
    kind = want.dtype
    inexact, is_complex = jnp.issubdtype(kind, jnp.inexact), jnp.issubdtype(kind, jnp.complexfloating)
    # A product of complex numbers is two sums of products, and how XLA fuses them decides how often they are rounded.
    exact = _MOVES - {"mul"} if is_complex else _MOVES
    if inexact:
        wide = np.complex128 if is_complex else np.float64
        got, want = got.astype(wide), want.astype(wide)
    with np.errstate(all="ignore"):
        same = (got == want) | ((got != got) & (want != want))
        if same.all():
            return ""
        if inexact and not primitives <= exact:
            finite = np.abs(want[np.isfinite(want)])
            few, some = _ROUNDINGS[kind.itemsize < 4]
            close, scale = (
                (few, np.abs(want)) if primitives <= _MOVES | _ELEMENTWISE
                else (some, np.maximum(np.abs(want), finite.max(initial=0)))
            )  # fmt: skip
            same |= np.abs(got - want) <= close * float(jnp.finfo(kind).eps) * scale
        if same.all():
            return ""
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"{(~same).sum()} of {same.size} elements differ, at {at}: {got[at]} where {want[at]} belongs"
