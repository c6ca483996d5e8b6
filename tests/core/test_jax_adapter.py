"""Tracebacks of errors show the user's frames, by JAX's switch, and the causes of the errors."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard

MESH = gshard.Mesh.abstract(data=8)
OURS = str(Path(gshard.__file__).parent)
X = jax.ShapeDtypeStruct((16, 4), jnp.float32)


def bad_mark(x):
    return gshard.split(x, 5, "data")


def bad_axis(x):
    return jax.lax.psum(x, "data")


def of_the_user(x):
    raise KeyError("mine")


def jitted(f=bad_mark):
    return gshard.jit(f, mesh=8)


PUBLIC = {
    "call": lambda: jitted()(jnp.ones((16, 4))),
    "call, an unbound axis": lambda: jitted(bad_axis)(jnp.ones((16, 4))),
    "call, the user's own": lambda: jitted(of_the_user)(jnp.ones((16, 4))),
    "lower": lambda: jitted().lower(X),
    "jit": lambda: gshard.jit(bad_mark, mesh=99),
    "an option": lambda: gshard.jit(bad_mark, mseh=8),
    "split": lambda: gshard.split(jnp.ones(8), 5, "data"),
    "gshard.stages.trace": lambda: gshard.stages.trace(bad_mark, X),
    "explain": lambda: gshard.explain(bad_mark, X, mesh=MESH),
    "search": lambda: gshard.search(bad_mark, X, mesh=MESH, machine="h100:1x8"),
    "explanation": lambda: gshard.explain(jnp.sin, X, mesh=MESH).why("nothing"),
    "cost": lambda: gshard.explain(jnp.sin, X, mesh=MESH).cost("q100"),
    "strict": lambda: gshard.jit(lambda x: (gshard.split(x, 0, "data"), x)[1], mesh={"data": 8}, strict=True)(
        jnp.ones((16, 4))
    ),
    "compiled": lambda: gshard.jit(jnp.sin, mesh=8).lower(X).compile()(jnp.ones(3)),
    "a rule": lambda: gshard.rule("primitive_of_a_test")("a ->"),
    "under jax.grad": lambda: jax.grad(lambda x: jitted()(x).sum())(jnp.ones((16, 4))),
}


def error_of(act):
    with pytest.raises(Exception) as raised:  # noqa: PT011  of any kind
        act()
    return raised.value


def files(error):
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


@pytest.mark.parametrize("name", PUBLIC)
def test_errors_show_the_frames_of_the_user_alone(name):
    error = error_of(PUBLIC[name])
    assert files(error) == {__file__}
    cause = error.__cause__
    while cause is not None:
        assert not [file for file in files(cause) if file.startswith(OURS)]
        cause = cause.__cause__


def test_the_frames_of_the_user_inside_of_the_function_stay():
    error = error_of(PUBLIC["call, the user's own"])
    assert type(error) is KeyError
    assert [f.name for f in traceback.extract_tb(error.__traceback__)][-1] == "of_the_user"


def test_the_cause_stays():
    error = error_of(PUBLIC["call, an unbound axis"])
    assert isinstance(error, gshard.stages.TraceError)
    assert isinstance(error.__cause__, NameError)
    assert "bad_axis" in [f.name for f in traceback.extract_tb(error.__cause__.__traceback__)]


@pytest.mark.parametrize("name", ["call", "lower", "split", "explain", "explanation"])
def test_jax_switches_it_off(name, request):
    before = jax.config.jax_traceback_filtering
    request.addfinalizer(lambda: jax.config.update("jax_traceback_filtering", before))
    jax.config.update("jax_traceback_filtering", "off")
    assert any(f.startswith(OURS) for f in files(error_of(PUBLIC[name])))
    jax.config.update("jax_traceback_filtering", "tracebackhide")
    error = error_of(PUBLIC[name])
    shown = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename.startswith(OURS)]
    assert shown
    assert all(frame.f_locals.get("__tracebackhide__") for frame in shown)


# With ``jax.debug_nans`` a NaN is a ``FloatingPointError`` wherever the function is called from, never a result.
ONES = np.ones((16, 8), np.float32)


def logarithm(x):
    return jnp.sum(jnp.log(gshard.split(x - 2, 0, 8)))


def in_place(x):
    x[...] = jnp.log(x[...] - 2)


CALLS = {
    "call": (lambda: gshard.jit(logarithm, mesh=8)(ONES), "encountered in log"),
    "donated": (lambda: gshard.jit(logarithm, mesh=8, donate_argnums=0)(jnp.array(ONES)), "encountered in log"),
    "gradient": (lambda: jax.grad(gshard.jit(logarithm, mesh=8))(ONES), "encountered in log"),
    "vmap": (lambda: jax.vmap(gshard.jit(logarithm, mesh=8))(ONES[None]), "encountered in log"),
    "made by NumPy": (lambda: gshard.jit(lambda x: 0 * x / (x - 1), mesh=8)(ONES), "NumPy"),
    "an argument": (lambda: gshard.jit(lambda x: x + np.float32(0), mesh=8)(ONES * np.nan), "arguments"),
    "a reference": (lambda: gshard.jit(in_place, mesh=8)(jax.new_ref(jnp.array(ONES))), "the results of in_place"),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:Some donated buffers")
def test_a_nan_is_an_error(case):
    call, text = CALLS[case]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=text):
        call()


def test_infinities_too():
    with jax.debug_infs(True), np.errstate(divide="ignore"), pytest.raises(FloatingPointError, match="inf"):
        gshard.jit(lambda x: 1 / (x - 1), mesh=8)(ONES)


def test_a_nan_in_the_padding_is_none():
    x = np.arange(1, 14, dtype=np.float32)
    with jax.debug_nans(True):
        call = gshard.jit(lambda x: jnp.log(gshard.split(x, 0, 8) - 0.5), mesh=8)
        np.testing.assert_allclose(np.asarray(call(x)), np.log(x - 0.5), rtol=1e-6)


# Lines: those that the user wrote, also where a framework's layer stands between them and the operation.
def test_layers_of_a_framework_are_at_the_lines_that_call_them():
    nnx = pytest.importorskip("flax.nnx")
    up, down = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 8, rngs=nnx.Rngs(1))

    def model(x):
        h = up(x)
        return down(h)

    program = gshard.stages.trace(model, jnp.ones((4, 16)))
    lines = [e.line for e in program.block.equations if e.name == "dot_general"]
    first = model.__code__.co_firstlineno
    assert lines == [f"test_jax_adapter.py:{first + i} ({model.__qualname__})" for i in (1, 2)]


def test_a_framework_that_is_called_by_nobody_else_has_its_own_lines():
    optax = pytest.importorskip("optax")
    program = gshard.stages.trace(optax.squared_error, jnp.ones(4))
    assert all(e.line for e in program.block.equations)
