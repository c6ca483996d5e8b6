"""Configuration of the documentation. Build it with `make docs`."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils.nodes import literal_block

project = "gshard"
author = "the gshard authors"
copyright = "the gshard authors, Apache-2.0"
version = release = installed_version("gshard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"gshard {version}"

copybutton_selector = "div.highlight-python pre, div.highlight-py pre, div.highlight-bash pre"  # no outputs

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# api.md lists the public names by task; tests/test_docs.py finds what is missing there.
autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Attributes:" become part of the class, not entries of their own


FEW_SECTIONS = 4  # with the title of the page


def setup(app):
    app.connect("autodoc-skip-member", skip_fields_of_named_tuples)
    app.connect("doctree-read", wrap_outputs)
    app.connect("html-page-context", offer_code)
    app.connect("html-page-context", offer_sections)
    app.connect("html-page-context", label_cells)


def wrap_outputs(app, doctree):
    """Breaks long lines of outputs where columns end, so that no page scrolls sideways on a screen of 1280 pixels."""
    for block in list(doctree.findall(literal_block)):
        if block.get("language") in ("output", "console"):
            lines = [part for line in block.astext().split("\n") for part in wrapped(line)]
            block.replace_self(literal_block("\n".join(lines), "\n".join(lines), **block.attributes))


def wrapped(line, width=132):
    """A line in parts of at most ``width`` characters, if it has spaces; parts after the first are indented."""
    while len(line) > width:
        ends = [line.rfind(mark, width // 2, width) for mark in ("  ", " <- ", " ")]
        end = next((end for end in ends if end > 0), -1)
        if end < 0:
            break
        yield line[:end].rstrip()
        line = " " * 10 + line[end:].strip()
    yield line


def skip_fields_of_named_tuples(app, what, name, obj, skip, options):
    """Their generated text ("Alias for field number 0") says less than the class does."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def offer_code(app, pagename, templatename, context, doctree):
    """Writes the blocks of a page into one file, as if pasted one after the other, and links to it below the title."""
    source = Path(app.srcdir) / f"{pagename}.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", source.read_text(), re.M | re.S) if source.exists() else []
    if len(blocks) < 2 or any(re.match(r"# \w+\.py\n", block) for block in blocks):
        return
    name = f"{pagename.rpartition('/')[2]}.py"
    file = Path(app.outdir) / "_code" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(blocks))
    link = f'<p><a href="{context["pathto"](f"_code/{name}", 1)}" download>All code of this page: {name}</a></p>'
    context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def offer_sections(app, pagename, templatename, context, doctree):
    """Lists the sections of a long page below its title, where the window has no room for the column at the right."""
    if context.get("toc", "").count("<li>") > FEW_SECTIONS:
        listed = f'<details class="on-this-page"><summary>On this page</summary>{context["toc"]}</details>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{listed}", 1)


def label_cells(app, pagename, templatename, context, doctree):
    """Repeats the head of a column in each of its cells, for narrow windows, where each row is a list (wide.css)."""
    context["body"] = re.sub(
        r"<table.*?</table>", lambda table: labelled(table[0]), context.get("body", ""), flags=re.S
    )


def labelled(table):
    heads = [re.sub("<.*?>", "", head).strip() for head in re.findall(r"<th.*?>(.*?)</th>", table, re.S)]

    def row(found):
        columns = iter(heads)

        def cell(part):
            empty = not re.sub("<.*?>", "", "<td" + part[1]).strip()
            return f'<td data-label="{next(columns, "")}"{" data-empty" if empty else ""}{part[1]}'

        return re.sub(r"<td\b(.*?</td>)", cell, found[0], flags=re.S)

    return re.sub(r"<tr.*?</tr>", row, table, flags=re.S)
