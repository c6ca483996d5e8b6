"""When two arrays count as equal: to the bit, except for sums in another order and approximations of functions.

Elements that are only moved, compared or counted must be the same bits. XLA rounds its approximations of functions
differently where loops have other lengths, so a function of each element may differ in the last places. A sum in
another order may differ by some roundings of its terms, which are as large as the largest element, not as the sum.
"""

import jax.numpy as jnp
import numpy as np

# What moves, selects, compares or orders elements, and rounds none.
_MOVES = frozenset(
    """
    abs add add_any and approx_top_k argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp complex concatenate
    conj convert_element_type copy copy_p cummax cummin device_put dynamic_slice dynamic_update_slice eq floor gather ge
    gshard_mark gt imag iota is_finite le lt max min mul ne neg or pad real reduce_max reduce_min reduce_precision
    reduce_window_max reduce_window_min reshape rev round scatter scatter-max scatter-min select_n sign slice sort split
    squeeze sub tile top_k transpose xor
    """.split()
)
# What computes each element of the result by itself.
_ELEMENTWISE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma div erf erf_inv erfc exp exp2
    expm1 igamma igammac integer_pow lgamma log log1p logistic nextafter pow regularized_incomplete_beta rem rsqrt sin
    sinh sqrt square tan tanh random_gamma_grad while scan cond pjit
    """.split()
)
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
