"""Readers of files and packages, cleaning and the split that does not leak, on archives of the true layout."""

import hashlib
import io
import json
import shutil
import struct
import subprocess
import tarfile
import zipfile

import polib
import pytest

from gshard_m4.corpus import catalogues, fetch, hold_out, parallel
from gshard_m4.corpus.archive import members
from gshard_m4.corpus.clean import clean, tidy
from gshard_m4.corpus.pair import Pair, Unreadable
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
TRANSLATED = [
    ("Ausgewählte Dateien löschen", "Delete the selected files"),
    ("%(count)s Datei gelöscht", "%(count)s file deleted"), ("%(count)s Dateien gelöscht", "%(count)s files deleted"),
]  # fmt: skip
debian_only = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="reads packages of Debian with dpkg-deb")


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def tarball(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def package(path, files):
    root = path.with_suffix(".root")
    control = "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: a\n"
    for name, text in {"DEBIAN/control": control, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", str(root), str(path)], check=True, capture_output=True)
    return path


def catalogue(*entries, **plural):
    made = polib.POFile()
    made.metadata = {"Content-Type": "text/plain; charset=UTF-8"}
    made.extend(polib.POEntry(msgid=english, msgstr=foreign) for english, foreign in entries)
    if plural:
        forms = {0: plural["one"], 1: plural["many"]}
        made.append(polib.POEntry(msgid="a page", msgid_plural="%d pages", msgstr_plural=forms, msgctxt="noun"))
    return made


def qm(*records):
    body = b"".join(
        bytes([tag]) + (data if tag in (1, 5) else struct.pack(">I", len(data)) + data) for tag, data in records
    )
    other = b"\x42" + struct.pack(">I", 3) + b"xyz"
    return b"\x3c\xb8\x64\x18" + b"\0" * 12 + other + b"\x69" + struct.pack(">I", len(body)) + body


def of_pairs(found):
    return [item for item in found if isinstance(item, Pair)]


def unreadable(found):
    return [item.name for item in found if isinstance(item, Unreadable)]


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
    found = list(READERS["gettext"]([archive]))
    assert of_pairs(found) == [Pair("de", *pair) for pair in TRANSLATED]
    assert unreadable(found) == ["pkg/locale/fr/LC_MESSAGES/django.po"]


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
            "k/translations/en.json": b"\xff",
        },
    )
    found = list(READERS["component"]([archive]))
    assert of_pairs(found) == [Pair("pt", "Ligar", "Turn on"), Pair("de", "Warm", "Warm")]
    assert unreadable(found) == [f"{folder}/ru.json", "k/translations/en.json"]


HUGE = "x" * 10_000_000


@pytest.mark.parametrize(("name", "text", "read"), [
    ("p.tsv", f"de\tguten Tag\tgood day\nonly one field\nxx-invented\ta\tb\nde\t{HUGE}\ttwo\nde\tdrei\tthree\n", [
        Pair("de", "guten Tag", "good day"), (2, "1 fields instead of 3", "only one field"),
        (3, "unknown language 'xx-invented'", "xx-invented\ta\tb"),
        (4, "more than 100,000 bytes", "de\t" + 197 * "x"), Pair("de", "drei", "three"),
    ]),
    ("p.jsonl", '{"language": "fr", "foreign": "oui", "english": "yes"}\n{"language": "fr"}\n[]\n'
                '{"language": "fr", "foreign": 3, "english": null}\n' + 5000 * "[" + "\n", [
        Pair("fr", "oui", "yes"), (2, "no field 'foreign'", '{"language": "fr"}'), (3, "not a JSON object", "[]"),
        (4, "a field that is not text", '{"language": "fr", "foreign": 3, "english": null}'),
        (5, "not a JSON object", 200 * "["),
    ]),
    # Nothing but line feeds ends lines.
    ("t.de", f"\ufeffeins\u2028noch eins\r\n{HUGE}\nzwei\x85\r\ndrei", [
        Pair("de", "eins\u2028noch eins", "1"), (2, "more than 100,000 bytes", 200 * "x"), Pair("de", "zwei\x85", "3"),
        Pair("de", "drei", "4"),
    ]),
], ids=["tab-separated", "JSON", "aligned"])  # fmt: skip
def test_users_files_in_three_forms(name, text, read, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "t.en").write_text("1\n2\n3\n4\n")
    assert list(parallel.read(tmp_path / name)) == [
        item if isinstance(item, Pair) else parallel.BadLine(*item) for item in read
    ]


def test_a_catalogue_of_ones_own(tmp_path):
    header = 'msgid ""\nmsgstr ""\n"Language: pt_BR\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    entries = CATALOGUE.split('charset=UTF-8\\n"', 1)[1]
    (tmp_path / "mine.po").write_text(header + entries, encoding="utf-8")
    found = list(parallel.read(tmp_path / "mine.po"))
    assert of_pairs(found) == [Pair("pt", *pair) for pair in TRANSLATED]
    bad = [item for item in found if isinstance(item, parallel.BadLine)]
    assert [b[1:] for b in bad] == [("fuzzy translation", "Rename the file"), ("no translation", "Not translated yet")]
    lines = (tmp_path / "mine.po").read_text().split("\n")
    assert [lines[b.number - 1] for b in bad] == ["#, fuzzy", 'msgid "Not translated yet"']
    (tmp_path / "de.po").write_text(entries, encoding="utf-8")
    assert next(iter(parallel.read(tmp_path / "de.po"))) == Pair("de", *TRANSLATED[0])


@pytest.mark.parametrize(("name", "content", "told"), [
    ("l.tsv", b"de\teins\tone\nde\tgr\xfcn\tgreen\n", r"not UTF-8(.|\n)*l.tsv:2(.|\n)*0xfc(.|\n)*iconv"),
    ("empty.tsv", b"\n", "is empty"), ("absent.tsv", None, "cannot be read: No such file"),
    ("t.de", b"eins\nzwei\n", r"differ in length(.|\n)*2 lines, and 1"),
    ("german.po", b'msgid "x"\nmsgstr "y"\n', r"not say of which language(.|\n)*german.po(.|\n)*Language: de"),
    ("de.po", b'msgid "x"\nnonsense "y"\n', r"catalogue cannot be read(.|\n)*de.po(.|\n)*msgfmt"),
])  # fmt: skip
def test_files_that_cannot_be_read_say_why(name, content, told, tmp_path):
    (tmp_path / "t.en").write_text("one\n")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=told):
        parallel.read(tmp_path / name)


@pytest.mark.parametrize(("pair", "reason"), [
    (Pair("de", "", "some text here"), "empty"), (Pair("de", "Home Assistant", "home assistant"), "identical"),
    (Pair("de", "w" * 1300, "a long word in German"), "too long"),
    (Pair("de", "Datei öffnen", "Open"), "fewer than two words"),
    (Pair("de", "1 2 3 4 5 x y", "12:34:56 -- 99 am pm now"), "mostly symbols"),
    (Pair("de", "falsche Seite hier", "неверная сторона тут"), "not English"),
    (Pair("ru", "not Russian at all", "certainly it is not"), "wrong script"),
    (Pair("de", "the cat sat hier", "the cat sat here"), "untranslated"),
    (Pair("de", "ja", "a very long English sentence about nothing much"), "wrong length ratio"),
    (Pair("zh_Hans", "打开 %s 文件", "Open the %s file"), Pair("zh_Hans", "打开 %s 文件", "Open the %s file")),
])  # fmt: skip
def test_each_rule_has_its_reason(pair, reason):
    assert clean(pair) == reason


@pytest.mark.parametrize(("text", "tidied"), [
    ("_Open <a href='x'>%(name)s</a> &now {entity_name}", "Open %(name)s now {entity_name}"),
    ("ファイル(_F)", "ファイル"), ("the entity_id of vacuum.turn_off", "the entity_id of vacuum.turn_off"),
    ("Name(s) of file(s)", "Name(s) of file(s)"), ("Q&A and R&D of AT&T", "Q&A and R&D of AT&T"),
    ("Bang &amp; Olufsen", "Bang & Olufsen"), ("Date & Time", "Date & Time"), ("E&xit now", "Exit now"),
    ("Save _As", "Save As"), ("~Open file", "Open file"), ("開く(O)...", "開く..."),
    ("soft\xad hyphen \u202bmark\ufeff", "soft hyphen mark"), ("می\u200cخواهم", "می\u200cخواهم"),
    ("a\r\rb\u2028c\x0bd", "a b c d"),
])  # fmt: skip
def test_placeholders_identifiers_plurals_and_joiners_survive(text, tidied):
    assert tidy(text) == tidy(tidied) == tidied


def test_the_split_is_by_english_sentence_and_never_changes():
    twins = [f"sentence about {a} with {b} inside" for a in "abcdefghij" for b in ("one", "two", "three")]
    others = [hashlib.blake2b(bytes([i % 256, i // 256])).hexdigest()[:16] for i in range(3000)]
    keys = twins + others
    found = hold_out.parts(keys, 0.05, 0.1)
    assert found == hold_out.parts(reversed(keys), 0.05, 0.1)
    assert 0.08 < sum(part == hold_out.TEST for part in found.values()) / len(found) < 0.12
    assert {found[k] for k in twins} == {hold_out.TRAIN}, "near twins of each other are not held out"

    small = {"aa": others[:60], "bb": others[60:75], "cc": others[75:80]}
    with_small = hold_out.parts(others, 0.01, 0.01, {"de": others, **small})
    tests = {name: sum(with_small[k] == hold_out.TEST for k in own) for name, own in small.items()}
    assert tests["aa"] >= 5
    assert tests["bb"] >= 1
    assert tests["cc"] == 0, "nothing would be left to learn from"
    plain = hold_out.parts(others, 0.01, 0.01)
    assert all(with_small[k] == plain[k] for k in others if plain[k] != hold_out.TRAIN)


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
        assert bool(source.version) == (source.registry in ("pip", "npm")), "Debian's release fixes its versions"
        assert bool(source.packages) == (source.registry != "apt-descriptions")
        assert set(source.accelerators) <= set("_&~")
    assert {s.licence for s in of_tier("tiny")} <= PERMISSIVE
    permissive = of_tier("base", "permissive")
    assert {s.licence for s in permissive} <= PERMISSIVE
    assert {s.name for s in of_tier("tiny")} < {s.name for s in permissive}


@pytest.mark.network
def test_the_quick_start_can_be_had(tmp_path):
    fetcher = fetch.Fetcher(tmp_path)
    for source in of_tier("tiny"):
        got = fetcher.fetch(source)
        assert got.folder is not None, got.problem
        assert len({pair.language for pair in of_pairs(READERS[source.reader](got.files))}) > 50


@debian_only
def test_a_debian_package_is_read_in_one_pass(tmp_path):
    mo = catalogue(("Open it", "Öffne es"), one="eine Seite", many="%d Seiten").to_binary()
    german = qm((3, "Beenden".encode("utf-16-be")), (5, b"\0\0\0\1"), (6, b"Quit now"), (7, b"Context"), (1, b""))
    page = "<page xmlns='x'><title>{}</title><p>{} <em>{}</em>.</p><code>ls</code></page>"
    path = package(
        tmp_path / "a.deb",
        {
            "usr/share/locale/de/LC_MESSAGES/a.mo": mo,
            "usr/share/locale/en_GB/LC_MESSAGES/a.mo": mo,
            "usr/share/locale/fr/LC_MESSAGES/a.mo": mo[:-30],
            "usr/share/a/a_de.qm": german,
            "usr/share/help/C/a/index.page": page.format("The river", "It flows", "fast"),
            "usr/share/help/de/a/index.page": page.format("Der Fluss", "Er fließt", "schnell"),
            "usr/share/help/fr/a/index.page": "<page><title>La rivière</title></page>",
            "usr/share/doc/readme.xml": "<page><title>not a help page</title></page>",
        },
    )
    found = list(READERS["debian"]([path]))
    assert {pair[1:] for pair in of_pairs(found) if pair.language == "de"} == {
        ("Öffne es", "Open it"), ("eine Seite", "a page"), ("%d Seiten", "%d pages"), ("Beenden", "Quit now"),
        ("Der Fluss", "The river"), ("Er fließt schnell.", "It flows fast."),
    }  # fmt: skip
    assert len(of_pairs(found)) == 6
    assert unreadable(found) == ["./usr/share/locale/fr/LC_MESSAGES/a.mo"]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(OSError, match=r"a.deb is damaged"):
        list(members(path, lambda name: True))


@pytest.mark.parametrize("name", ["a.whl", "a.tar.gz"])
def test_damaged_archives_are_errors(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is none")
    with pytest.raises(OSError, match=f"{name} is damaged"):
        list(members(tmp_path / name, lambda name: True))


def test_qt_catalogues_that_are_cut_or_something_else():
    whole = qm((3, "Ja".encode("utf-16-be")), (6, b"Yes"), (1, b""))
    assert catalogues.qm(whole) == [("Yes", "Ja")]
    for content, told in ((b"GIF89a", "not a Qt catalogue"), (whole[:44], "is cut")):
        with pytest.raises(ValueError, match=told):
            catalogues.qm(content)


@debian_only
def test_mozilla_takes_english_from_its_language_packs(tmp_path):
    def pack(code, **files):
        named = {f"browser/{code}/{name.replace('_', '.')}": text for name, text in files.items()}
        data = io.BytesIO()
        wheel(data, {"manifest.json": json.dumps({"langpack_id": code}), **named})
        return {f"usr/lib/firefox/langpack-{code}@firefox.mozilla.org.xpi": data.getvalue()}

    british = pack("en-GB", a_ftl="save = Save the colour\nonly = Only British words\n")
    canadian = pack(
        "en-CA", a_ftl="save = Save in { -brand-short-name }\n    .accesskey = S\n", b_dtd='<!ENTITY x "An entity">'
    )
    german = pack(
        "de", a_ftl="save = In { -brand-short-name } speichern\n    .accesskey = I\nonly = Nur britisch\n",
        b_dtd="<!ENTITY x 'Eine Entität'>", c_properties="other=Nicht auf Englisch\n",
    )  # fmt: skip
    files = [
        package(tmp_path / f"firefox-esr-l10n-{code}_1_all.deb", contents)
        for code, contents in (("en-gb", british), ("en-ca", canadian), ("de", german))
    ]
    assert sorted(READERS["mozilla"](files)) == [
        Pair("de", "Eine Entität", "An entity"), Pair("de", "In Firefox speichern", "Save in Firefox"),
        Pair("de", "Nur britisch", "Only British words"),
    ]  # fmt: skip


@debian_only
def test_josm_and_mediawiki_packages(tmp_path):
    strings = b"".join(struct.pack(">H", len(s)) + s for s in (b"___menu___Open it", b"Same"))
    path = package(
        tmp_path / "j.deb",
        {
            "usr/share/josm/en.lang": strings + b"\xff\xff\2\0\6a node\0\5nodes",
            "usr/share/josm/de.lang": b"\0\7Mach es\xff\xfe\xff\xff\2\0\7ein Kno\0\6Knoten",
            "usr/share/josm/fr.lang": b"\0\7Mach es\0",
            "usr/share/mediawiki/i18n/en.json": json.dumps({"a": "'''Read''' [[Help|the help]]", "@metadata": {}}),
            "usr/share/mediawiki/i18n/nds-nl.json": json.dumps({"a": "Lees [[Help|de hulp]]", "b": "neet"}),
            "usr/share/mediawiki/i18n/qqq.json": json.dumps({"a": "a note for translators"}),
            "usr/share/mediawiki/i18n/fr.json": "{",
        },
    )
    found = list(READERS["josm"]([path]))
    assert found == [
        Unreadable("./usr/share/josm/fr.lang", "the catalogue is cut"),
        Pair("de", "Mach es", "Open it"), Pair("de", "ein Kno", "a node"), Pair("de", "Knoten", "nodes"),
    ]  # fmt: skip
    broken, pair = READERS["mediawiki"]([path])
    assert isinstance(broken, Unreadable)
    assert pair == Pair("nds_nl", "Lees de hulp", "Read the help")


def test_source_and_npm_packages(tmp_path):
    po = str(catalogue(("Open it", "Öffne es")))
    latin = po.replace("UTF-8", "ISO-8859-1").encode("latin-1")
    path = tarball(tmp_path / "dpkg.tar.gz", {"dpkg/po/de.po": po, "dpkg/po/nn.po": latin, "g/po/pt_BR/b.po": po})
    assert list(READERS["gettext"]([path])) == [Pair(code, "Öffne es", "Open it") for code in ("de", "nn", "pt")]
    odd = tarball(tmp_path / "odd.tar.gz", {"dpkg/po/de.po": po.replace("Öffne", "Öffne\x85\u2028")})
    assert list(READERS["gettext"]([odd])) == [Pair("de", "Öffne   es", "Open it")], "they end no line"
    strings = {"en": '{"x": "Move it"}', "de": '{"x": "Bewege es", "y": "nur hier"}'}
    scratch = tarball(tmp_path / "s.tgz", {f"package/editor/a/{code}.json": text for code, text in strings.items()})
    assert list(READERS["scratch"]([scratch])) == [Pair("de", "Bewege es", "Move it")]


def test_descriptions_belong_together_by_hash(tmp_path):
    def file(code, *entries):
        lines = [
            f"Package: p{h}\nDescription-md5: {h}\nDescription-{code}: {short}\n{long}\n" for h, short, long in entries
        ]
        (tmp_path / f"i18n_Translation-{code}").write_text("\n".join(lines), encoding="utf-8")

    file("en", ("1", "a tool", " It is good. You\n can use it.\n .\n * an item"), ("2", "another", " Text."))
    file("de", ("1", "ein Werkzeug", " Es ist gut. Du kannst es nutzen.\n .\n * ein Punkt"), ("3", "fremd", " Text."))
    assert list(READERS["descriptions"](sorted(tmp_path.iterdir()))) == [
        Pair("de", "ein Werkzeug", "a tool"), Pair("de", "Es ist gut.", "It is good."),
        Pair("de", "Du kannst es nutzen.", "You can use it."), Pair("de", "ein Punkt", "an item"),
    ]  # fmt: skip
