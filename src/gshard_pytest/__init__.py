"""gshard_pytest: the plugin for pytest, with the fixtures ``collectives`` and ``assert_proved``.

    def test_step(collectives):
        collectives.check(jax.jit(step), (state, batch), all_gather=0, max_bytes="50MiB")
        collectives.baseline(jax.jit(step), (state, batch))

    def test_sharded_step(assert_proved):
        assert_proved(sharded_step, (state, batch), like=step)

pytest finds it where gshard is installed. Every run of pytest imports this module, so it imports neither JAX nor gshard
before a test uses the fixture.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gshard.stages import Explanation

FOLDER = "collectives"  # of baselines, beside the file of the test


class Collectives:
    """Checks of what functions send, for one test.

    Attributes:
        folder: where the baselines are.
        test: the test, as a file name.
        update: whether baselines are written.
    """

    def __init__(self, folder: Path, test: str, update: bool):
        self.folder, self.test, self.update = folder, test, update
        self._used: set[Path] = set()

    def check(
        self, f: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **limits: Any
    ) -> Explanation:
        """Checks limits, as ``gshard.testing.assert_collectives``."""
        __tracebackhide__ = True
        found: Explanation = _testing().assert_collectives(f, args, kwargs, **limits)
        return found

    def baseline(
        self,
        f: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        **options: Any,
    ) -> Explanation:
        """Compares with the baseline of this test, as ``gshard.testing.assert_no_more_collectives``.

        ``pytest --gshard-update`` writes the file instead.

        Args:
            f, args, kwargs: as for ``assert_no_more_collectives``.
            name: tells this baseline from others of the same test; a part of the file's name.
            options: ``exact``, ``tolerance`` and ``mesh``, as for ``assert_no_more_collectives``.

        Raises:
            ValueError: the test has compared with this file before.
        """
        __tracebackhide__ = True
        path = self.path(name)
        if path in self._used:
            raise ValueError(f"this test has two baselines in {path}: give each a name=.")
        self._used.add(path)
        found: Explanation = _testing().assert_no_more_collectives(
            f, args, kwargs, baseline=path, update=self.update, **options
        )
        return found

    def path(self, name: str = "") -> Path:
        """The file of a baseline: ``collectives/<file of the test>.<test>[.<name>].txt`` beside the test."""
        words = [self.test, *([_as_file_name(name)] if name else [])]
        return self.folder / f"{'.'.join(words)}.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--gshard-update``."""
    parser.getgroup("gshard").addoption(
        "--gshard-update",
        action="store_true",
        help="write the baselines of the fixture 'collectives' instead of comparing with them",
    )


@pytest.fixture
def collectives(request: pytest.FixtureRequest) -> Collectives:
    """Checks how many collectives jitted functions run, and what they send: check(...) and baseline(...)."""
    test = request.node.nodeid.partition("::")[2] or request.node.name
    name = f"{request.path.stem}.{_as_file_name(test)}"
    return Collectives(request.path.parent / FOLDER, name, request.config.getoption("--gshard-update"))


@pytest.fixture
def assert_proved() -> Any:
    """Asserts that a sharded program computes what a plain one does: ``gshard.testing.assert_proved``."""
    return _testing().assert_proved


def _as_file_name(text: str) -> str:
    """Without what file names cannot have: ``TestStep::test_it[8-f32]`` is ``TestStep.test_it-8-f32``."""
    return re.sub(r"[^\w.=+-]+", "-", text.replace("::", ".")).strip("-")


def _testing() -> Any:
    return importlib.import_module("gshard.testing")
