"""Encoded: sentence pairs as ids in files that are mapped into memory, so that ten million pairs cost none of it.

languages.json                       names
language.npy                         uint16 [N]: the number of each pair's language
source.npy target.npy                ids of all pairs, one after the other
source_at.npy target_at.npy          int64 [N + 1]: where each pair's ids begin
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from gshard_m4.errors import CorpusError

_ARRAYS = ("language", "source", "target", "source_at", "target_at")
_NAMES = "languages.json"

Ids = Sequence[int] | np.ndarray
"""The ids of a sentence."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Sentence pairs as ids, one after the other.

    Attributes:
        languages: names.
        language: for each pair the number of its language.
        source, target: all ids of all pairs.
        source_at, target_at: where each pair's ids begin; one more entry than pairs.
    """

    languages: tuple[str, ...]
    language: np.ndarray
    source: np.ndarray
    target: np.ndarray
    source_at: np.ndarray
    target_at: np.ndarray

    @staticmethod
    def load(folder: Path) -> Encoded:
        """Maps the files of a folder into memory, and checks that they belong together.

        Raises:
            CorpusError: a file is missing or damaged.
        """
        path = folder / _NAMES
        try:
            languages = tuple(json.loads(path.read_text(encoding="utf-8")))
            arrays = {}
            for name in _ARRAYS:
                path = folder / f"{name}.npy"
                arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            found = Encoded(languages, **arrays)
            for name, at, ids in (("source", found.source_at, found.source), ("target", found.target_at, found.target)):
                path = folder / f"{name}_at.npy"
                if len(at) != len(found) + 1 or at[0] != 0 or at[-1] != len(ids):
                    raise ValueError("the arrays do not belong together")
        except (OSError, ValueError, TypeError) as error:
            hint = "Delete the folder and run gshard-m4 prepare again."
            raise CorpusError("a file of the corpus is missing or damaged.", str(path), str(error), hint) from error
        return found

    def __len__(self) -> int:
        return len(self.language)

    @property
    def lengths(self) -> np.ndarray:
        """For each pair the longer side's ids, end included, int64 [N]."""
        return np.maximum(np.diff(self.source_at), np.diff(self.target_at)) + 1

    def only(self, rows: Sequence[int] | np.ndarray) -> Encoded:
        """Some of the pairs."""
        sides: dict[str, Any] = {}
        for name, ids, at in (("source", self.source, self.source_at), ("target", self.target, self.target_at)):
            picked = [ids[at[row] : at[row + 1]] for row in rows]
            sides[name] = np.concatenate(picked) if picked else ids[:0]
            sides[f"{name}_at"] = np.concatenate([[0], np.cumsum([len(own) for own in picked])]).astype(np.int64)
        return Encoded(self.languages, np.asarray(self.language[np.asarray(rows, np.int64)]), **sides)


def of_languages(data: Encoded, languages: Sequence[str]) -> Encoded:
    """The pairs of some languages."""
    numbers = [data.languages.index(name) for name in languages if name in data.languages]
    return data.only(np.flatnonzero(np.isin(data.language, numbers)))


def write(
    folder: Path,
    languages: Sequence[str],
    source_vocabulary: int,
    target_vocabulary: int,
    blocks: Iterable[tuple[Sequence[int], Sequence[Ids], Sequence[Ids]]],
) -> None:
    """Writes pairs one block after another.

    Args:
        folder: must not exist.
        languages: names.
        source_vocabulary, target_vocabulary: numbers of ids; up to 65,536 they are kept in two bytes.
        blocks: for some pairs, numbers of their languages and the ids of both sides.
    """
    folder.mkdir()
    (folder / _NAMES).write_text(json.dumps(list(languages), ensure_ascii=False), encoding="utf-8")
    sizes = {"source": source_vocabulary, "target": target_vocabulary}
    with contextlib.ExitStack() as stack:

        def growing(name: str, kind: Any) -> _Growing:
            return stack.enter_context(contextlib.closing(_Growing(folder / f"{name}.npy", np.dtype(kind))))

        numbers = growing("language", np.uint16)
        ids = {side: growing(side, np.uint16 if size <= 1 << 16 else np.int32) for side, size in sizes.items()}
        at = {side: growing(f"{side}_at", np.int64) for side in sizes}
        for begins in at.values():
            begins.append(np.zeros(1))
        for language, *sides in blocks:
            numbers.append(np.asarray(language))
            for side, rows in zip(sizes, sides, strict=True):
                at[side].append(ids[side].size + np.cumsum([len(row) for row in rows], dtype=np.int64))
                ids[side].append(np.concatenate([np.asarray(row, np.int64) for row in rows]) if rows else np.zeros(0))


class _Growing:
    """An .npy file of one dimension that grows; its header is written again at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]):
        self._file = path.open("wb")
        self._dtype = dtype
        self.size = 0
        self._header()

    def _header(self) -> None:
        # NumPy leaves room in the header for the number to grow.
        said = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        npy.write_array_header_1_0(self._file, said)

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).tobytes())
        self.size += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.close()
