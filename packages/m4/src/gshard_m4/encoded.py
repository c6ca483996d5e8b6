"""Encoded: sentence pairs as ids in files that are mapped into memory, so that ten million pairs cost none of it.

languages.json                       names
language.npy                         uint16 [N]: the number of each pair's language
source.npy target.npy                ids of all pairs, one after the other
source_at.npy target_at.npy          int64 [N + 1]: where each pair's ids begin
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy

from gshard_m4.errors import CorpusError

_ARRAYS = ("language", "source", "target", "source_at", "target_at")
_NAMES = "languages.json"


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


class Writer:
    """Writes pairs one block after another; the files can be loaded when it is closed.

    Args:
        folder: must not exist.
        languages: names.
        source_vocabulary, target_vocabulary: numbers of ids; up to 65,536 they are kept in two bytes.
    """

    def __init__(self, folder: Path, languages: Sequence[str], source_vocabulary: int, target_vocabulary: int):
        folder.mkdir()
        (folder / _NAMES).write_text(json.dumps(list(languages), ensure_ascii=False), encoding="utf-8")
        kinds = {
            "language": np.uint16,
            "source": _smallest(source_vocabulary),
            "target": _smallest(target_vocabulary),
            "source_at": np.int64,
            "target_at": np.int64,
        }
        self._arrays = {name: _Growing(folder / f"{name}.npy", np.dtype(kind)) for name, kind in kinds.items()}
        for name in ("source_at", "target_at"):
            self._arrays[name].append(np.zeros(1))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for array in self._arrays.values():
            array.close()

    def append(self, language: Sequence[int], source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> None:
        """Adds pairs: numbers of their languages, and the ids of both sides."""
        self._arrays["language"].append(np.asarray(language))
        for name, rows in (("source", source), ("target", target)):
            ids, at = self._arrays[name], self._arrays[f"{name}_at"]
            at.append(ids.size + np.cumsum([len(row) for row in rows], dtype=np.int64))
            ids.append(np.concatenate([np.asarray(row, np.int64) for row in rows]) if rows else np.zeros(0))


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


def _smallest(vocabulary: int) -> type[np.uint16] | type[np.int32]:
    return np.uint16 if vocabulary <= 1 << 16 else np.int32
