"""Placeholders in translations of a model that has learnt nothing: whatever it wants to write, they are kept."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import moe
from gshard_m4 import tokens
from gshard_m4.copying import CHARACTERS, LONGEST, PLACEHOLDERS
from gshard_m4.decode import EOS, DecodeConfig, beam_search, greedy, ids_of
from gshard_m4.placeholders import Marked, accuracy, found, lost_and_invented, mark
from gshard_m4.stream import Found
from gshard_m4.translate import Spelling, Translator

WORDS = (
    "the file of a new window cannot be opened save close delete copy all selected items in this folder now please "
    "100 % done with %s and {name} or %(count)d left in $HOME at %1$s lines"
).split()


class Spelt:
    """One SentencePiece vocabulary for both sides."""

    languages = MappingProxyType({"de": 9})
    fingerprint = "spelt"
    length = 48

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        lines = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(3000)]
        self.vocabulary = tokens.learn(lines, None, 400, "test")
        self.source_vocabulary = self.target_vocabulary = self.vocabulary.size

    def tag(self, language: str) -> int:
        return 3

    def source_ids(self, sentence: str) -> list[int]:
        return self.vocabulary.encode([sentence])[0]

    def english(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)

    def target_pieces(self) -> list[str]:
        return self.vocabulary.pieces()

    def target_ids(self, text: str) -> list[int]:
        return self.vocabulary.encode([text])[0]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling costs more than running; one width is compiled for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gshard_m4.translate._width", lambda tokens, longest: longest)
        yield


@pytest.fixture(scope="module")
def spelt() -> Spelt:
    return Spelt()


def translator(spelt: Spelt, **options: object) -> Translator:
    model = moe.TransformerConfig(
        spelt.source_vocabulary, spelt.target_vocabulary, model_dim=16, hidden_dim=24, heads=2, head_dim=8,
        encoder_layers=2, decoder_layers=2, experts=4, group_size=None,
    )  # fmt: skip
    params = moe.init(model, jax.random.key(8))
    params["target_embedding"] = 3.0 * params["target_embedding"]
    return Translator(model, params, spelt, DecodeConfig(**options), batch=8)  # type: ignore[arg-type]


SENTENCES = [
    "open the file %s now",
    "%d of %d items in {folder}",
    "{a}{b}",
    "copy %1$s to %2$s in $HOME please",
    "100 % done with %s",
    "nothing at all here",
    "<b>delete</b> %(count)d items &amp; close",
    "see https://a.org/b?c=%d now",
    "{{name}} and ${name} and {name} and %name and $name",
    "@VERSION@ [% page.title %] \\n done",
    "%s",
    "%s: <i>{}</i>",
    "%5.2f %% of %-3d",
    "%1 %10 $HOME %n {x}",
]


@pytest.mark.parametrize("beam", [4, 1])
@pytest.mark.parametrize("slope", [0.0, 0.6])
@pytest.mark.one_in(2)
def test_whatever_a_model_wants_they_are_kept(spelt: Spelt, beam: int, slope: float, rng: np.random.Generator) -> None:
    """A model whose next word is random, and that would end sooner or later, or never."""
    copier = translator(spelt).copier
    assert copier is not None
    marked = [mark(sentence) for sentence in SENTENCES]
    longest, options = 96, DecodeConfig(beam=beam, n_best=min(beam, 2), alpha=0.0)
    copied, can = copier.table([(of.plain, of.placeholders) for of in marked], longest)
    assert all(can)
    table_XV = jnp.asarray(rng.normal(0.0, 3.0, (97, spelt.target_vocabulary)), jnp.float32)

    def step(cache: jax.Array, tokens_BK: jax.Array, position: jax.Array, seen_BKP: jax.Array):
        row_BK = (7 * tokens_BK + 13 * position + jnp.arange(len(SENTENCES))[:, None]) % 97
        logits_BKV = table_XV[row_BK]
        return logits_BKV.at[:, :, EOS].add(slope * position), cache

    search = greedy if beam == 1 else beam_search
    run = jax.jit(lambda copied: search(step, jnp.zeros(()), len(SENTENCES), longest, options, copied))
    found_ = run(copied)
    free = run(None)
    kept = nothing = 0
    for row, (sentence, of) in enumerate(zip(SENTENCES, marked, strict=True)):
        for n in range(options.n_best):
            assert np.isfinite(found_.score_BN[row, n])
            text = of.restore(" ".join(spelt.english(ids_of(np.asarray(found_.tokens_BNT[row, n]))).split()))
            assert lost_and_invented(sentence, text) == ([], []), (sentence, text)
        written = spelt.english(ids_of(np.asarray(free.tokens_BNT[row, 0])))
        kept += lost_and_invented(of.plain, written) == ([], [])
        nothing += not of.placeholders
    assert kept <= nothing + 1, "by itself this model does not keep them"


@pytest.mark.parametrize("beam", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_translations_keep_them(spelt: Spelt, beam: int) -> None:
    kept = translator(spelt, beam=beam, n_best=min(beam, 2))
    assert isinstance(spelt, Spelling)
    done = kept.translate(SENTENCES)
    for sentence, of in zip(SENTENCES, done, strict=True):
        assert (of.lost, of.invented) == ((), ()), (sentence, of.text)
        assert Counter(found(of.text)) == Counter(found(sentence))
    whole = accuracy(SENTENCES, [of.text for of in done])
    assert (whole.kept, whole.invented) == (whole.wanted, 0)
    assert dataclasses.replace(kept, options=dataclasses.replace(kept.options, placeholders=False)).copier is None

    # To the last bit nothing changes for others, whoever is among them.
    plain = [SENTENCES.index("nothing at all here")]
    assert [kept.translate([SENTENCES[n]])[0] for n in plain] == [done[n] for n in plain]


def test_what_does_not_fit_is_told(spelt: Spelt) -> None:
    kept = translator(spelt, beam=2)
    assert kept.copier is not None
    many = " ".join(f"{{a{n}}}" for n in range(PLACEHOLDERS + 1))
    long = "{" + "abcdefgh" * LONGEST + "}"
    asked = [(text, mark(text).placeholders) for text in (many, long, "%(count)d", "%s")]
    table, can = kept.copier.table(asked, 8)
    assert can == [False, False, False, True]
    assert not table.length_BF[:3].any()
    assert not table.barred_BC[:3].any(), "what cannot be copied is not hindered either"

    of = kept.prepare("<b>%s now</b>")
    assert of.searched is not None
    words = np.array([[*spelt.target_ids("close %d"), 0]])
    told = kept.finish(of, Found(0, words, np.array([-1.0])))
    assert told.text == "<b>close %d</b>"
    assert (told.lost, told.invented) == (("%s",), ("%d",))
    two = np.array([spelt.target_ids("close %d"), spelt.target_ids("close %s")])
    assert kept.finish(of, Found(0, two, np.array([-1.0, -2.0]))).text == "<b>close %s</b>", "kept before likely"
    for text in ("%s", "<br/>", "%d: {a}"):
        assert kept.prepare(text).searched is None
        assert kept.finish(kept.prepare(text)).text == text


def test_a_character_of_the_source_s_own_is_not_barred(spelt: Spelt) -> None:
    copier = translator(spelt).copier
    assert copier is not None
    table, can = copier.table([("100 % of %s", ("%s",)), ("%s", ("%s",)), ("none", ())], 40)
    assert can == [True] * 3
    percent = CHARACTERS.index("%")
    assert table.barred_BC[:, percent].tolist() == [False, True, True]
    assert table.spelt_CV[percent].sum() >= 2, "a piece, and the byte"
    asked = [("close %s (now)", ("%s",)), ("close %s", ("%s",)), ("%(count)d now", ("%(count)d",))]
    table, _ = copier.table(asked, 20)
    for parenthesis in "()":
        at = CHARACTERS.index(parenthesis)
        assert table.barred_BC[:, at].tolist() == [False, True, True], "no end of a %(count)d without its beginning"
    assert table.barred_BC[:, -1].all(), "nor where the source has a parenthesis of its own"
    assert not copier.table([("close(now)s %s", ("%s",))], 20)[0].barred_BC[0, -1]


def test_the_end_of_a_placeholder_without_its_beginning_is_told() -> None:
    assert lost_and_invented("Carpeta", "Folder name)s") == ([], [")s"])
    assert lost_and_invented("%(name)s y fichero(s)", "%(name)s and file(s)") == ([], [])


def test_forms_spell_what_they_should(spelt: Spelt) -> None:
    copier = translator(spelt).copier
    assert copier is not None
    for placeholder in ("%s", "%(count)d", "{name}", "{Ünïcode}", "{0, number}"):
        forms = copier.forms(placeholder)
        assert forms, placeholder
        for ids in forms:
            assert spelt.english(ids) == placeholder
            assert copier.pieces[ids[0]] != "▁", "a blank begins nothing"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("_Datei", "Datei"),
        ("Q&A", "Q&A"),
        ("file_name", "file_name"),
        ("&Datei &Speichern", "&Datei &Speichern"),
        ("ファイルを開く(_O)", "ファイルを開く"),
        ("a <b>fat</b> cat", "a fat cat"),
        ("<p>%s</p>", "%s"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
    ],
)
def test_marks_are_taken_out_and_put_back(text: str, plain: str) -> None:
    marked = mark(text)
    assert marked.plain == plain
    assert Counter(found(marked.restore("Some words " + " ".join(marked.placeholders)))) == Counter(found(text))
    if plain == text:
        assert marked == Marked(text, marked.placeholders)


def test_tags_stay_in_order_and_around_what_they_were_around() -> None:
    marked = mark("<p>Klick <a href='x'>hier</a>, %s!</p>")
    assert marked.plain == "Klick hier, %s!"
    restored = marked.restore("Click here, %s!")
    assert restored == "<p>Click <a href='x'>here,</a> %s!</p>"
    assert found(restored) == ["<p>", "<a href='x'>", "</a>", "%s", "</p>"]


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("100 % sicher", []),
        ("50%de rabatt", []),
        ("%d%%", ["%d", "%%"]),
        ("%1$s %2$-5d %lu %zu %@", ["%1$s", "%2$-5d", "%lu", "%zu", "%@"]),
        ("%(a)s%(b).2f", ["%(a)s", "%(b).2f"]),
        ("%1 of %L2 and %n", ["%1", "%L2", "%n"]),
        ("{} {0} {x:>4} {{y}} ${z}", ["{}", "{0}", "{x:>4}", "{{y}}", "${z}"]),
        ("$HOME costs $5", ["$HOME"]),
        ("%APPDATA% @VERSION@ me@example.org", ["%APPDATA%", "@VERSION@"]),
        ("AT&amp;T &lt;tag&gt; &#169;", ["&amp;", "&lt;", "&gt;", "&#169;"]),
        ("(https://a.org/b_c?d=1).", ["https://a.org/b_c?d=1"]),
    ],
)
def test_what_is_a_placeholder(text: str, has: list[str]) -> None:
    assert found(text) == has
    assert lost_and_invented(text, "") == (has, [])
    assert lost_and_invented("", text) == ([], has)


_SHORT, _LONG = 15_000, 60_000


@pytest.mark.parametrize(
    "begun",
    [" ", "<a ", "<", "{", "{{", "${", "[%", "%", "$", "%(a", "@A_", "&#1", "&a", "http://", "http://.", "(_", "\\",
     "%1", "%0", "%.", "\u3042 (_"],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_the_longest_line_is_read_in_linear_time(begun: str) -> None:
    """Anybody may send one: what begins like a placeholder and does not end like one, again and again.

    Four times the length takes four times as long if reading is linear, sixteen times if it is quadratic. A machine
    that stops for a while makes one measurement wrong, not five.
    """

    def texts(size: int) -> tuple[str, str, str]:
        return (begun * size)[:size], begun + begun[-1] * size, begun + "a" * size

    def takes(text: str) -> float:
        before = time.process_time()
        mark(text)
        return time.process_time() - before

    for short, long in zip(texts(_SHORT), texts(_LONG), strict=True):
        assert any(takes(long) < 9 * takes(short) for _ in range(5)), "what is quadratic takes sixteen times as long"
