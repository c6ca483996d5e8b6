"""Readers, cleaning and the split that does not leak, on archives of the true layout made here."""

import hashlib
import json
import zipfile

import pytest

from gshard_m4.corpus import hold_out, parallel
from gshard_m4.corpus.clean import clean, tidy
from gshard_m4.corpus.pair import Pair
from gshard_m4.corpus.readers import READERS
from gshard_m4.corpus.source import PERMISSIVE, SOURCES, chosen, of_tier
from gshard_m4.errors import CorpusError

CATALOGUE = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Delete the selected files"
msgstr "Ausgewählte Dateien löschen"

#, fuzzy
msgid "Rename the file"
msgstr "Datei verschieben"

msgid "Not translated yet"
msgstr ""

msgid "%(count)s file deleted"
msgid_plural "%(count)s files deleted"
msgstr[0] "%(count)s Datei gelöscht"
msgstr[1] "%(count)s Dateien gelöscht"

#~ msgid "Gone long ago"
#~ msgstr "Lange vorbei"
"""


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_gettext_reads_translated_entries_only(tmp_path):
    archive = wheel(
        tmp_path / "a.whl",
        {
            "pkg/locale/de/LC_MESSAGES/django.po": CATALOGUE,
            "pkg/locale/en_GB/LC_MESSAGES/django.po": CATALOGUE,
            "pkg/locale/fr/LC_MESSAGES/django.po": b'msgid "x y"\nmsgstr "\xff"\n',
            "pkg/locale/de/LC_MESSAGES/django.mo": b"binary",
        },
    )
    assert [item for item in READERS["gettext"]([archive]) if isinstance(item, Pair)] == [
        Pair("de", "Ausgewählte Dateien löschen", "Delete the selected files"),
        Pair("de", "%(count)s Datei gelöscht", "%(count)s file deleted"),
        Pair("de", "%(count)s Dateien gelöscht", "%(count)s files deleted"),
    ]


def test_component_pairs_by_key(tmp_path):
    def text(**strings):
        return json.dumps({"config": {"step": strings, "number": 3}})

    folder = "homeassistant/components/lamp/translations"
    archive = wheel(
        tmp_path / "h.whl",
        {
            f"{folder}/en.json": text(a="Turn on", b="Turn off"),
            f"{folder}/pt-BR.json": text(a="Ligar", c="Só aqui"),
            f"{folder}/sensor.en.json": text(a="Warm"),
            f"{folder}/sensor.de.json": text(a="Warm"),
            f"{folder}/ru.json": "{broken",
            "homeassistant/components/door/translations/de.json": text(a="Ohne Englisch"),
        },
    )
    found = [item for item in READERS["component"]([archive]) if isinstance(item, Pair)]
    assert found == [Pair("pt", "Ligar", "Turn on"), Pair("de", "Warm", "Warm")]


def test_users_files_in_three_forms(tmp_path):
    tsv, jsonl = tmp_path / "p.tsv", tmp_path / "p.jsonl"
    tsv.write_text("de\tguten Tag\tgood day\nonly one field\nxx-invented\ta\tb\n", encoding="utf-8")
    jsonl.write_text('{"language": "fr", "foreign": "oui", "english": "yes"}\n{"language": "fr"}\n[]\n')
    (tmp_path / "talk.it").write_text("uno\ndue\n", encoding="utf-8")
    (tmp_path / "talk.en").write_text("one\ntwo\n", encoding="utf-8")
    assert list(parallel.read(tsv)) == [
        Pair("de", "guten Tag", "good day"),
        parallel.BadLine(2, "1 fields instead of 3", "only one field"),
        parallel.BadLine(3, "unknown language 'xx-invented'", "xx-invented\ta\tb"),
    ]
    good, missing, wrong = parallel.read(jsonl)
    assert good == Pair("fr", "oui", "yes")
    assert isinstance(missing, parallel.BadLine)
    assert missing.reason == "no field 'foreign'"
    assert isinstance(wrong, parallel.BadLine)
    assert list(parallel.read(tmp_path / "talk.it")) == [Pair("it", "uno", "one"), Pair("it", "due", "two")]


def test_a_line_of_ten_megabytes_is_rejected_and_the_rest_is_read(tmp_path):
    huge = "x" * 10_000_000
    (tmp_path / "p.tsv").write_text(f"de\teins\tone\nde\t{huge}\ttwo\nde\tdrei\tthree\n")
    (tmp_path / "t.de").write_text(f"eins\n{huge}\ndrei")
    (tmp_path / "t.en").write_text("one\ntwo\nthree\n")
    for name in ("p.tsv", "t.de"):
        one, bad, three = parallel.read(tmp_path / name)
        assert (one, three) == (Pair("de", "eins", "one"), Pair("de", "drei", "three"))
        assert isinstance(bad, parallel.BadLine)
        assert (bad.number, bad.reason, len(bad.text)) == (2, "more than 100,000 bytes", 200)


def test_a_catalogue_of_ones_own(tmp_path):
    header = 'msgid ""\nmsgstr ""\n"Language: {}\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    entries = CATALOGUE.split('charset=UTF-8\\n"', 1)[1]
    (tmp_path / "mine.po").write_text(header.format("pt_BR") + entries, encoding="utf-8")
    found = list(parallel.read(tmp_path / "mine.po"))
    assert [item for item in found if isinstance(item, Pair)] == [
        Pair("pt", "Ausgewählte Dateien löschen", "Delete the selected files"),
        Pair("pt", "%(count)s Datei gelöscht", "%(count)s file deleted"),
        Pair("pt", "%(count)s Dateien gelöscht", "%(count)s files deleted"),
    ]
    bad = [item for item in found if isinstance(item, parallel.BadLine)]
    assert [(b.reason, b.text) for b in bad] == [
        ("fuzzy translation", "Rename the file"), ("no translation", "Not translated yet"),
    ]  # fmt: skip
    lines = (tmp_path / "mine.po").read_text().split("\n")
    assert [lines[b.number - 1] for b in bad] == ["#, fuzzy", 'msgid "Not translated yet"']
    (tmp_path / "de.po").write_text(entries, encoding="utf-8")
    assert next(iter(parallel.read(tmp_path / "de.po"))) == Pair("de", *found[0][1:])
    (tmp_path / "german.po").write_text(entries, encoding="utf-8")
    with pytest.raises(CorpusError, match=r"does not say of which language(.|\n)*german.po(.|\n)*Language: de"):
        parallel.read(tmp_path / "german.po")
    (tmp_path / "de.po").write_text('msgid "x"\nnonsense "y"\n')
    with pytest.raises(CorpusError, match=r"catalogue cannot be read(.|\n)*de.po(.|\n)*msgfmt"):
        parallel.read(tmp_path / "de.po")


def test_fields_that_are_not_text(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"language": "fr", "foreign": 3, "english": null}\n' + "[" * 5000 + "\n")
    assert [item.reason for item in parallel.read(tmp_path / "p.jsonl") if isinstance(item, parallel.BadLine)] == [
        "a field that is not text", "not a JSON object",
    ]  # fmt: skip


def test_files_that_cannot_be_read_say_why(tmp_path):
    latin = tmp_path / "l.tsv"
    latin.write_bytes(b"de\teins\tone\nde\tgr\xfcn\tgreen\n")
    with pytest.raises(CorpusError, match=r"not UTF-8(.|\n)*l.tsv:2(.|\n)*0xfc(.|\n)*iconv"):
        parallel.read(latin)
    (tmp_path / "empty.tsv").write_text("\n")
    with pytest.raises(CorpusError, match="is empty"):
        parallel.read(tmp_path / "empty.tsv")
    with pytest.raises(CorpusError, match="cannot be read: No such file"):
        parallel.read(tmp_path / "absent.tsv")
    (tmp_path / "t.de").write_text("eins\nzwei\n")
    (tmp_path / "t.en").write_text("one\n")
    with pytest.raises(CorpusError, match=r"differ in length(.|\n)*2 lines, and 1"):
        parallel.read(tmp_path / "t.de")


@pytest.mark.parametrize(("pair", "reason"), [
    (Pair("de", "", "some text here"), "empty"), (Pair("de", "Home Assistant", "home assistant"), "identical"),
    (Pair("de", "w" * 1300, "a long word in German"), "too long"),
    (Pair("de", "Datei öffnen", "Open"), "fewer than two words"),
    (Pair("de", "1 2 3 4 5 x y", "12:34:56 -- 99 am pm now"), "mostly symbols"),
    (Pair("de", "falsche Seite hier", "неверная сторона тут"), "not English"),
    (Pair("ru", "not Russian at all", "certainly it is not"), "wrong script"),
    (Pair("de", "the cat sat hier", "the cat sat here"), "untranslated"),
    (Pair("de", "ja", "a very long English sentence about nothing much"), "wrong length ratio"),
])  # fmt: skip
def test_each_rule_has_its_reason(pair, reason):
    assert clean(pair) == reason


def test_tidy_keeps_placeholders():
    assert tidy("_Open <a href='x'>%(name)s</a> &now {entity_name}") == "Open %(name)s now {entity_name}"
    assert tidy("ファイル(_F)") == "ファイル"
    assert clean(Pair("zh_Hans", "打开 %s 文件", "Open the %s file")) == Pair(
        "zh_Hans", "打开 %s 文件", "Open the %s file"
    )


def test_the_split_is_by_english_sentence_and_never_changes():
    keys = [f"sentence about {a} with {b} inside" for a in "abcdefghij" for b in ("one", "two", "three")]
    keys += [hashlib.blake2b(bytes([i % 256, i // 256])).hexdigest()[:16] for i in range(3000)]
    first, again = hold_out.parts(keys, 0.05, 0.1), hold_out.parts(reversed(keys), 0.05, 0.1)
    assert first == again
    share = sum(part == hold_out.TEST for part in first.values()) / len(first)
    assert 0.08 < share < 0.12
    # All of the first thirty are near twins of each other: none may be held out.
    assert {first[k] for k in keys[:30]} == {hold_out.TRAIN}


def test_unknown_sources_are_refused():
    with pytest.raises(CorpusError, match=r"no source 'nothing'(.|\n)*django"):
        chosen(("django", "nothing"))
    with pytest.raises(CorpusError, match=r"licence of mediawiki is not a permissive(.|\n)*GPL-2(.|\n)*--licences all"):
        chosen(("django", "mediawiki"), "permissive")


def test_the_table_of_sources_is_sound():
    assert {s.reader for s in SOURCES.values()} == set(READERS)
    assert {s.registry for s in SOURCES.values()} == {"pip", "npm", "apt", "apt-source", "apt-descriptions"}
    for source in SOURCES.values():
        assert source.licence
        assert bool(source.version) == (source.registry in ("pip", "npm")), (
            "Debian's release fixes versions, we the others"
        )
        assert bool(source.packages) == (source.registry != "apt-descriptions")
        assert set(source.accelerators) <= set("_&~")
    assert {s.licence for s in of_tier("tiny")} <= PERMISSIVE
    permissive = of_tier("base", "permissive")
    assert {s.licence for s in permissive} <= PERMISSIVE
    assert {s.name for s in of_tier("tiny")} < {s.name for s in permissive}
