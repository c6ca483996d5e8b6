"""Pages that run: the code of a page is run in order, and what the page shows of its output is compared.

What a block is, its language says:

    python     run. Blocks make up a file, as if pasted one after the other: its name is the page's, or that of a first
               line ``# train.py``, which begins another file. Lines in explanations are lines of these files.
    output     what the block before printed; ``[...]`` stands for any text or lines. Numbers of equations and
               instructions, and times that follow from them, are those of one version of JAX, and compared on that one
               only.
    console    ``$ gshard ...``, ``$ python train.py`` or ``$ cat file``, each followed by what it prints.

Other blocks (``bash``, ``text``, ``diff``) are only read. ``pytest --update-golden tests/test_docs.py`` writes what was
printed into the pages where it differs, but not into a page with an output that leaves something out.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import runpy
import shlex
import sys
from unittest import mock

import jax

import gshard.__main__

BLOCK = re.compile(r"^```(python|output|console)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
COUNTED_BY = "0.10.2"  # the version of JAX that numbers of equations and modelled costs of the pages are of
_COUNTED = r"\b\d[\d,]* (?:equations|instructions)|.* a call on .*|^Arithmetic: .*"
FILES = {"README.md": "train.py"}  # what the blocks of a page are called, if not as the page


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page; ``span`` is where its text stands."""

    kind: str
    text: str
    span: tuple[int, int]


def blocks(page):
    return [Block(m[1], m[2], m.span(2)) for m in BLOCK.finditer(page.read_text())]


def differs(expected, got):
    """Whether an output is not as the page has it.

    >>> differs("a 1\\n[...]\\nb [...] c", "a 1\\n2\\n3\\nb 4 c"), differs("a", "b")
    (False, True)
    """
    if jax.__version__ != COUNTED_BY:
        expected, got = (re.sub(_COUNTED, "counted", text, flags=re.MULTILINE) for text in (expected, got))
    pattern = re.escape(expected.strip("\n")).replace(re.escape("[...]"), r"(?:.|\n)*?")
    lines = [line.rstrip() for line in got.strip("\n").split("\n")]
    return not re.fullmatch(pattern, "\n".join(lines))


def run(page, folder, update=False):
    """Runs a page in an empty folder.

    Args:
        page: the page.
        folder: where its files are written, and where it runs.
        update: whether to write outputs that differ into the page.

    Raises:
        AssertionError: an output differs, a command cannot be run here, or what the code raises.
    """
    namespace = {"__name__": "__main__"}
    printed, wrong = "", []
    name, written = FILES.get(page.name, f"{page.stem}.py"), ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, COLUMNS="100"))
        stack.enter_context(mock.patch.object(sys, "argv", [name]))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        for block in blocks(page):
            if block.kind == "python":
                if title := re.match(r"# (\w+\.py)\n", block.text):
                    name, written = title[1], ""
                before = written.count("\n")
                written += block.text + "\n"  # a line between blocks
                (folder / name).write_text(written)
                with _printing() as out:
                    exec(compile("\n" * before + block.text, str(folder / name), "exec"), namespace)
                printed = out.getvalue()
            elif block.kind == "output":
                assert printed.strip(), f"{page.name}: a block of output stands after code that prints nothing"
                if differs(block.text, printed):
                    wrong.append((block, block.text, printed))
            else:
                shown = "".join(f"$ {command}\n{_answer(command, folder)}" for command, _ in _commands(block.text))
                if differs(block.text, shown):
                    wrong.append((block, block.text, shown))
    if update and wrong and not any("[...]" in expected for _, expected, _ in wrong):
        text = page.read_text()
        for block, _, got in reversed(wrong):
            lines = [line.rstrip() for line in got.strip("\n").split("\n")]
            text = text[: block.span[0]] + "\n".join(lines) + "\n" + text[block.span[1] :]
        page.write_text(text)
        return
    shown = (
        difflib.unified_diff(e.splitlines(), got.splitlines(), page.name, "printed", n=0, lineterm="")
        for _, e, got in wrong
    )
    assert not wrong, "\n".join(line for difference in shown for line in difference)


def _commands(text):
    """Commands of a console, each with what the page shows of its output. A line that ends in \\ goes on."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*", part)
        assert command is not None, "the pattern matches anything"
        yield command[0], part[command.end() :].lstrip("\n")


def _answer(command, folder):
    """What a command prints, standard error included."""
    program, *arguments = shlex.split(command)
    with _printing() as out:
        if program == "gshard":
            with contextlib.suppress(SystemExit):  # --help
                gshard.__main__.main(arguments)
        elif program == "python":
            runpy.run_path(str(folder / arguments[0]), run_name="__main__")
        elif program == "cat":
            print((folder / arguments[0]).read_text(), end="")
        else:
            raise AssertionError(f"a page that is tested cannot run {program!r}: show it as bash")
    return out.getvalue()


@contextlib.contextmanager
def _printing():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out
