"""The log of phases: one record for each, at the level at which JAX logs its own."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.core.phases import phase

SHAPE = jax.ShapeDtypeStruct((8, 4), "float32")
TIME = re.compile(r" in [\d.]+(e-?\d+)? s$")


def step(x):
    return jnp.sin(gshard.split(x, 0, "data")).sum()


def records_of(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Levels and messages, without the seconds."""
    found = [r for r in caplog.records if r.name == "gshard" and r.getMessage().startswith("Finished")]
    assert all(TIME.search(r.getMessage()) for r in found)
    return [(r.levelno, TIME.sub("", r.getMessage())) for r in found]


def test_each_phase_is_logged_once_as_a_warning_where_jax_logs_compilations(caplog: pytest.LogCaptureFixture) -> None:
    f = gshard.jit(step, mesh=jax.make_mesh((8,), ("data",)))
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "gshard"):
        f.lower(SHAPE).compile()
        f.lower(SHAPE).compile()
    said = ["tracing step", "rewriting step"]
    said += [f"{doing} step for 8 devices" for doing in ("planning", "partitioning", "lowering", "compiling")]
    assert records_of(caplog) == [(logging.WARNING, f"Finished {text}") for text in said]


def test_phases_are_logged_for_debugging_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gshard"):
        gshard.jit(step, mesh=gshard.Mesh.abstract(data=8)).lower(SHAPE).spmd  # noqa: B018
    assert records_of(caplog) == []
    with caplog.at_level(logging.DEBUG, "gshard"):
        gshard.jit(step, mesh=gshard.Mesh.abstract(data=4)).lower(SHAPE).spmd  # noqa: B018
    levels, texts = zip(*records_of(caplog), strict=True)
    assert set(levels) == {logging.DEBUG}
    assert texts[-2:] == ("Finished planning step for 4 devices", "Finished partitioning step for 4 devices")


def test_a_phase_that_fails_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gshard"), pytest.raises(gshard.PlanError), phase("planning", "step", 8):
        raise gshard.PlanError("refused.")
    assert records_of(caplog) == []


def test_a_partitioned_function_inside_jax_jit_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    inner = gshard.jit(step, mesh=jax.make_mesh((8,), ("data",)))
    with caplog.at_level(logging.DEBUG, "gshard"):
        jax.jit(lambda x: inner(x) + 1).lower(SHAPE)
    texts = [text for _, text in records_of(caplog)]
    # Planned twice: how its results leave before anything is known of the operands, then with their shardings.
    assert texts.count("Finished planning call for 8 devices") == 2
    assert texts.count("Finished partitioning call for 8 devices") == 1
