"""Page: the report as one HTML file that needs no network and opens from disk."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def page(data: dict[str, Any]) -> str:
    """The page that shows ``report_data``.

    Nothing of the data is written as HTML: names and source lines may hold anything.
    """
    template = files("gshard.analysis.report").joinpath("page.html").read_text("utf-8")
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A closing tag inside a string would end the script that holds the data.
    return template.replace("__DATA__", text.replace("<", "\\u003c"))
