"""rules/OPERATORS.md says what the rules say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gshard.language.registry import known_primitives

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "src" / "gshard" / "rules" / "OPERATORS.md").read_text(encoding="utf-8")


def test_the_page_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("operators", ROOT / "scripts" / "operators.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == PAGE, "OPERATORS.md is stale: run make operators"


def test_every_operator_with_a_rule_is_on_the_page() -> None:
    assert [name for name in known_primitives() if f"`{name}`" not in PAGE] == []
