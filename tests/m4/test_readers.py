"""Readers of packages, on archives of the true layout made here."""

import io
import json
import shutil
import struct
import subprocess
import tarfile
import zipfile

import polib
import pytest

from gshard_m4.corpus import catalogues
from gshard_m4.corpus.archive import members
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.readers import READERS

debian_only = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="reads packages of Debian with dpkg-deb")


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
    files = {
        "DEBIAN/control": "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: a\n",
        **files,
    }
    for name, text in files.items():
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
    assert sorted(item for item in found if isinstance(item, Pair)) == sorted(
        [
            Pair("de", "Öffne es", "Open it"),
            Pair("de", "eine Seite", "a page"),
            Pair("de", "%d Seiten", "%d pages"),
            Pair("de", "Beenden", "Quit now"),
            Pair("de", "Der Fluss", "The river"),
            Pair("de", "Er fließt schnell.", "It flows fast."),
        ]
    )
    assert [item.name for item in found if isinstance(item, Unreadable)] == ["./usr/share/locale/fr/LC_MESSAGES/a.mo"]


@debian_only
def test_a_damaged_package_is_an_error(tmp_path):
    path = package(tmp_path / "a.deb", {"usr/share/a.txt": "some text" * 1000})
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
    with pytest.raises(ValueError, match="not a Qt catalogue"):
        catalogues.qm(b"GIF89a")
    with pytest.raises(ValueError, match="is cut"):
        catalogues.qm(whole[:44])


@debian_only
def test_mozilla_takes_english_from_its_language_packs(tmp_path):
    def pack(code, **files):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("manifest.json", json.dumps({"langpack_id": code}))
            for name, text in files.items():
                stem, _, ending = name.rpartition("_")
                archive.writestr(f"browser/{code}/{stem}.{ending}", text)
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
        Pair("de", "Eine Entität", "An entity"),
        Pair("de", "In Firefox speichern", "Save in Firefox"),
        Pair("de", "Nur britisch", "Only British words"),
    ]


@debian_only
def test_josm_and_mediawiki_packages(tmp_path):
    def lang(*singles, plurals=b""):
        return b"".join(struct.pack(">H", len(s)) + s for s in singles) + b"\xff\xff" + plurals

    forms = b"\2\0\6a node\0\5nodes"
    path = package(
        tmp_path / "j.deb",
        {
            "usr/share/josm/en.lang": lang(b"___menu___Open it", b"Same", plurals=forms),
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


def test_source_packages(tmp_path):
    po = str(catalogue(("Open it", "Öffne es")))
    latin = po.replace("UTF-8", "ISO-8859-1").encode("latin-1")
    path = tarball(tmp_path / "dpkg.tar.gz", {"dpkg/po/de.po": po, "dpkg/po/nn.po": latin, "g/po/pt_BR/b.po": po})
    assert list(READERS["gettext"]([path])) == [Pair(code, "Öffne es", "Open it") for code in ("de", "nn", "pt")]

    odd = tarball(tmp_path / "odd.tar.gz", {"dpkg/po/de.po": po.replace("Öffne", "Öffne\x85\u2028")})
    assert list(READERS["gettext"]([odd])) == [Pair("de", "Öffne   es", "Open it")], "they end no line"


def test_npm_packages(tmp_path):
    scratch = tarball(
        tmp_path / "s.tgz",
        {
            "package/editor/a/en.json": '{"x": "Move it"}',
            "package/editor/a/de.json": '{"x": "Bewege es", "y": "nur hier"}',
        },
    )
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
        Pair("de", "ein Werkzeug", "a tool"),
        Pair("de", "Es ist gut.", "It is good."),
        Pair("de", "Du kannst es nutzen.", "You can use it."),
        Pair("de", "ein Punkt", "an item"),
    ]
