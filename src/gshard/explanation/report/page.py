"""Report page: the report as one HTML file that needs no network.

It is put together from the files of ``parts``: the document, its style, and one script for each section.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

# In the order in which they run: helpers and filters first, then the sections from the top, then what draws them all.
SCRIPTS = (
    "data", "filters", "table", "verdict", "timeline", "source", "collectives", "mesh", "difference", "memory",
    "tensors", "draw",
)  # fmt: skip

_FRAME = "width: 100%; height: 800px; border: 1px solid #8884; border-radius: 8px"


class InNotebooks:
    """What notebooks show: the page in a frame, or the text where there is no page."""

    def _page_data(self) -> dict[str, Any] | None:
        """The data of the page; None without one."""
        return None

    def _repr_html_(self) -> str:
        data = self._page_data()
        if data is None:
            return f'<pre style="white-space: pre-wrap">{html.escape(str(self))}</pre>'
        return (
            f'<iframe srcdoc="{html.escape(page(data))}" title="{html.escape(data["name"])}" style="{_FRAME}"></iframe>'
        )


class Page(InNotebooks):
    """A result that has a page."""

    def html(self, path: str | Path) -> Path:
        """Writes the report of the best plan as one page, with what is known of the others.

        Returns:
            the path.
        """
        path, data = Path(path), self._page_data()
        assert data is not None, "it has a page"
        path.write_text(page(data), "utf-8")
        return path


def page(data: dict[str, Any]) -> str:
    """The page that shows ``report_data``.

    Nothing of the data is written as HTML: names and source lines may hold anything.
    """
    parts = files("gshard.explanation.report").joinpath("parts")
    style = parts.joinpath("style.css").read_text("utf-8")
    script = "\n".join(parts.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A closing tag inside a string would end the script that holds the data.
    text = text.replace("<", "\\u003c")
    document = parts.joinpath("page.html").read_text("utf-8")
    return document.replace("__STYLE__", style).replace("__SCRIPT__", script).replace("__DATA__", text)
