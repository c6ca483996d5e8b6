"""The operators of ``gshard.exact`` compute what JAX computes, and programs that are equal are proved so.

Every row of ``tests/harness.py`` runs over float64 on its own arrays, and is compared with what JAX computes. Over
residues the same rows run with random arguments: a program is equal to itself, and differs from one with one operand
changed.
"""

import jax
import numpy as np
import pytest

from gshard.core import jax_adapter
from gshard.exact.interpreter import Interpreter
from gshard.exact.numbers import Reals
from gshard.exact.operations import Complex
from harness import rows
from sampled import others_slow

# Rows whose numbers are others, each with the reason; the list may only get shorter.
OTHERS = {
    "a fixed function stands for it": """bessel_i0e bessel_i1e digamma erf_inv igamma igammac igamma_grad_a polygamma
        random_gamma_grad random_gamma regularized_incomplete_beta zeta eigh svd qr lu schur cholesky triangular_solve
        tridiagonal_solve eig hessenberg householder_product geqrf ormqr approx_top_k pallas_call""",
    "bits of floats are no integers": "bitcast_convert_type",
    "nothing is rounded": "convert_element_type reduce_precision select_and_gather_add",
}
WITHOUT = frozenset(" ".join(OTHERS.values()).split())
SIGNED = ("negative nan", "top_k, 3", "top_k, 5", "select_and_scatter_add, with NaN")  # zeros and NaN have no sign


class Given(Reals):
    """Float64, with given numbers for the arguments."""

    def constant(self, x, dtype):
        """The numbers as they are."""
        return np.asarray(x, np.float64)


def run(function, arguments):
    """The results of a function of arrays, evaluated over float64."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    interpreter = Interpreter(Given(1, 0))
    operands = [interpreter.constant(x, v) for x, v in zip(jax.tree.leaves(arguments), jaxpr.jaxpr.invars, strict=True)]
    return interpreter.run(jax_adapter.jaxpr_without_dead_code(jaxpr), operands)


def as_array(x):
    """The result of the only lane."""
    return (np.asarray(x.real) + 1j * np.asarray(x.imag))[0] if isinstance(x, Complex) else np.asarray(x)[0]


@pytest.mark.parametrize("row", others_slow(rows(), "exact"))
def test_an_operator_computes_what_jax_computes(row):
    if row.primitive in WITHOUT or any(text in row.name for text in SIGNED):
        pytest.skip("its numbers are others")
    found = [as_array(x) for x in run(row.function, row.arguments)]
    tolerance = 3e-2 if "16" in row.name else 3e-4
    expected = map(np.asarray, jax.tree.leaves(jax.jit(row.function)(*row.arguments)))
    for got, want in zip(found, expected, strict=True):
        wide = {"c": np.complex128, "f": np.float64, "V": np.float64}.get(want.dtype.kind, want.dtype)
        np.testing.assert_allclose(got, want.astype(wide), rtol=tolerance, atol=tolerance)
