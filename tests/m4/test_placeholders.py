"""Placeholders, tags and accelerators: they are kept, whatever a model writes, and what was put right is told."""

import io
import time
from collections import Counter
from types import MappingProxyType

import jax
import numpy as np
import pytest

from gshard import moe
from gshard_m4.decode import EOS, DecodeConfig
from gshard_m4.lines import Speed
from gshard_m4.placeholders import Marked, complete, found, lost_and_invented, mark
from gshard_m4.stream import Found
from gshard_m4.translate import Hypothesis, Translated, Translator

SENTENCES = [
    "open the file %s now", "%d of %d items in {folder}", "{a}{b}", "copy %1$s to %2$s in $HOME please",
    "100 % done with %s", "nothing at all here", "<b>delete</b> %(count)d items &amp; close",
    "see https://a.org/b?c=%d now", "{{name}} and ${name} and {name} and %name and $name",
    "@VERSION@ [% page.title %] \\n done", "%s", "%s: <i>{}</i>", "%5.2f %% of %-3d", "%1 %10 $HOME %n {x}",
]  # fmt: skip

# What a model may write: words, placeholders of the source and others, and parts of them.
PIECES = (
    "the file", "opened", "100 %", "5", "%", "s", "(", ")", ")s", "{", "}", "{name}", "{x}", "%s", "%d", "%(count)",
    "$", "$HOME", "&", "&File", "_Save", "~x", "<b>", "</b>", "<", "@", "@VERSION@", "[%", "%]", "http", "https://a.org/b",
    "\\n", "\\", "%1$s", "%10", "&amp;", "`", ":", ".",
)  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES)
def test_whatever_a_model_writes_the_translation_has_them(sentence, rng):
    marked = mark(sentence)
    changed = 0
    for _ in range(300):
        written = [str(piece) for piece in rng.choice(PIECES, rng.integers(0, 9))]
        written += [placeholder for placeholder in marked.placeholders if rng.random() < 0.5]
        rng.shuffle(written)
        for between in (" ", ""):
            text = between.join(written)
            whole = complete(text, marked.placeholders)
            assert lost_and_invented(marked.placeholders, whole) == ([], []), (text, whole)
            assert complete(whole, marked.placeholders) == whole
            if lost_and_invented(marked.placeholders, text) == ([], []):
                assert whole == text, "nothing was wrong"
            changed += whole != text
    assert changed > 100


@pytest.mark.parametrize(("written", "wanted", "whole"), [
    ("%d free", ["%d"], "%d free"), ("free", ["%d"], "free %d"), ("Copy {nam} now", ["{name}"], "Copy {name} now"),
    ("%s and %s", ["%s"], "%s and"), ("%d of %s left.", ["%d", "{total}"], "%d of {total} left."),
    ("<b>now</b>", [], "now"), ("_Save %s now", ["%s"], "Save %s now"), ("a name)s here", [], "a name here"),
    ("5 % off", [], "5 % off"),
])  # fmt: skip
def test_a_missing_one_takes_the_place_of_a_wrong_one_or_comes_last(written, wanted, whole):
    assert complete(written, wanted) == whole


class Spelt:
    """Ids are the characters of a text."""

    languages = MappingProxyType({"de": 9})
    fingerprint = "spelt"
    length = 48
    source_vocabulary = target_vocabulary = 130

    def tag(self, language):
        return 3

    def source_ids(self, sentence):
        return list(map(ord, sentence))

    def english(self, ids):
        return "".join(map(chr, ids))

    def spelt_in_bytes(self, ids):
        return 0.0


def test_translations_have_them_and_what_was_put_right_is_told():
    spelt = Spelt()
    model = moe.TransformerConfig(130, 130, model_dim=8, hidden_dim=8, heads=2, head_dim=4, encoder_layers=2,
                                  decoder_layers=2)  # fmt: skip
    params = moe.init(model, jax.random.key(8))
    options = DecodeConfig(beam=2, n_best=2, max_length=12)
    done = Translator(model, params, spelt, options, batch=8).translate(SENTENCES)
    for sentence, of in zip(SENTENCES, done, strict=True):
        for hypothesis in of.hypotheses:
            assert Counter(found(hypothesis.text)) == Counter(found(sentence)), (sentence, hypothesis.text)

    kept = Translator(model, params, spelt, DecodeConfig(beam=2))
    of = kept.prepare("<b>%s now</b>")
    assert of.searched.ids == (*map(ord, "%s now"), EOS)

    def told(*texts):
        rows = np.array([list(map(ord, text)) for text in texts])
        done = kept.finish(of, Found(0, rows, -np.arange(1.0, 1 + len(rows))))
        assert done.placeholders == ("%s",)
        return done.text, done.lost, done.invented

    assert told("close %d") == ("<b>close %s</b>", ("%s",), ("%d",))
    assert told("close %d", "close %s") == ("<b>close %s</b>", (), ()), "kept before likely"
    for text in ("%s", "<br/>", "%d: {a}"):
        assert kept.prepare(text).searched is None
        assert kept.finish(kept.prepare(text)).text == text


@pytest.mark.parametrize(("text", "plain"), [
    ("_Datei", "Datei"), ("Q&A", "Q&A"), ("file_name", "file_name"), ("&Datei &Speichern", "&Datei &Speichern"),
    ("ファイルを開く(_O)", "ファイルを開く"), ("a <b>fat</b> cat", "a fat cat"), ("<p>%s</p>", "%s"),
    ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
])  # fmt: skip
def test_marks_are_taken_out_and_put_back(text, plain):
    marked = mark(text)
    assert marked.plain == plain
    assert Counter(found(marked.restore("Some words " + " ".join(marked.placeholders)))) == Counter(found(text))
    if plain == text:
        assert marked == Marked(text, marked.placeholders)


def test_tags_stay_in_order_and_around_what_they_were_around():
    marked = mark("<p>Klick <a href='x'>hier</a>, %s!</p>")
    assert marked.plain == "Klick hier, %s!"
    assert marked.restore("Click here, %s!") == "<p>Click <a href='x'>here,</a> %s!</p>"


@pytest.mark.parametrize(("text", "has"), [
    ("100 % sicher", []), ("50%de rabatt", []), ("%d%%", ["%d", "%%"]),
    ("%1$s %2$-5d %lu %zu %@", ["%1$s", "%2$-5d", "%lu", "%zu", "%@"]), ("%(a)s%(b).2f", ["%(a)s", "%(b).2f"]),
    ("%1 of %L2 and %n", ["%1", "%L2", "%n"]), ("$HOME costs $5", ["$HOME"]),
    ("{} {0} {x:>4} {{y}} ${z}", ["{}", "{0}", "{x:>4}", "{{y}}", "${z}"]),
    ("%APPDATA% @VERSION@ me@example.org", ["%APPDATA%", "@VERSION@"]),
    ("AT&amp;T &lt;tag&gt; &#169;", ["&amp;", "&lt;", "&gt;", "&#169;"]),
    ("(https://a.org/b_c?d=1).", ["https://a.org/b_c?d=1"]),
])  # fmt: skip
def test_what_is_a_placeholder(text, has):
    assert found(text) == has
    assert lost_and_invented(has, "") == (has, [])
    assert lost_and_invented([], text) == ([], has)
    # The end of one without its beginning is one, too.
    assert lost_and_invented([], "Folder name)s") == ([], [")s"])
    assert lost_and_invented(["%(name)s"], "%(name)s and file(s)") == ([], [])


@pytest.mark.parametrize("begun", [
    " ", "<a ", "<", "{", "{{", "${", "[%", "%", "$", "%(a", "@A_", "&#1", "&a", "http://", "http://.", "(_", "\\",
    "%1", "%0", "%.", "\u3042 (_",
])  # fmt: skip
@pytest.mark.one_in(3)
def test_the_longest_line_is_read_in_linear_time(begun):
    """Anybody may send one: what begins like a placeholder and does not end like one, again and again.

    Four times the length takes four times as long if reading is linear, sixteen times if it is quadratic. A machine
    that stops for a while makes one measurement wrong, not five.
    """

    def texts(size):
        return (begun * size)[:size], begun + begun[-1] * size, begun + "a" * size

    def takes(text):
        before = time.process_time()
        mark(text)
        return time.process_time() - before

    for short, long in zip(texts(15_000), texts(60_000), strict=True):
        assert any(takes(long) < 9 * takes(short) for _ in range(5)), "what is quadratic takes sixteen times as long"


def test_lost_placeholders_are_told_with_the_first_line_that_lost_one():
    stream = io.StringIO()
    speed = Speed(stream, live=False)
    well = Translated((Hypothesis("a", 0.0),), tokens=3)
    speed.end(20)
    assert "placeholders" not in stream.getvalue()
    speed.add([well, Translated((Hypothesis("b", 0.0),), lost=("%s", "{x}"), invented=("%d",)), well])
    speed.end(20)
    told = "1 translation was given the placeholders of the source (line 2: %s {x} put in, %d taken out)\n"
    assert told in stream.getvalue()
    speed.add([Translated((Hypothesis("c", 0.0),), invented=("%d",))])
    speed.end(20)
    assert "2 translations were given the placeholders of the source (line 2: %s" in stream.getvalue()
