"""rules/OPERATORS.md says what the rules say."""

from pathlib import Path

from gshard.language.registry import own_rules
from training_files import loaded

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "src" / "gshard" / "rules" / "OPERATORS.md").read_text(encoding="utf-8")


def test_the_page_is_fresh():
    script = loaded(ROOT / "scripts" / "operators.py", "operators")
    assert script.page() == PAGE, "OPERATORS.md is stale: run make operators"


def test_every_operator_with_a_rule_is_on_the_page():
    assert [name for name in own_rules() if f"`{name}`" not in PAGE] == []
