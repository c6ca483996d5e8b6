"""Copying: the search writes every placeholder of a source as often as the source has it, and no other.

A placeholder is a fixed sequence of target tokens (two of them: at the beginning of a word, and within one). A
hypothesis that has begun one goes on with it to its end. One that lacks some cannot end: where the model would end it,
it begins the likeliest of those instead, at the price of ending; and in good time before the longest translation is
reached it has no other choice. So the model decides where a placeholder stands, and never whether.

What could spell a placeholder that the source does not have is not written: the characters that placeholders begin
with are barred outside of them, unless the source has such a character of its own ("100 %"); nor does a word go on
where ``$HOME`` or ``%1`` or "100 %" ends, or a ``%s`` follow a digit. Some are still more than there is room for, and a
model may write a placeholder with a brace of the source's own: who asks for a translation compares the text that comes
out.

    F forms (two for each of P placeholders)    L tokens of a form    C characters
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PLACEHOLDERS, LONGEST = 8, 24
"""The most placeholders of a sentence, and tokens of one of them, that the search copies."""

CHARACTERS = "%{}$<>&[]@\\_~()"
"""Characters that placeholders, tags and accelerators are known by, with those of a part of ``%(name)s``."""

_FRAGMENT = re.compile(r"\)\w")

EOS = 1


class Copied(NamedTuple):
    """What to copy in each of B sentences.

    Attributes:
        form_BFL: token ids; forms 2p and 2p + 1 belong to placeholder p.
        length_BF: their lengths; 0 where there is none.
        after_BF: what must not follow them: 0 is anything, 1 a letter or digit, 2 anything but a blank.
        digit_BF: bool, those that must not follow a digit.
        barred_BC: bool, the characters that are not written outside of placeholders; the last one stands for a letter
            behind a parenthesis, as at the end of ``%(name)s``.
        spelt_CV: bool, the tokens that have such a character.
        kind_V: int32, bits that say of a token whether it is a blank alone, begins with a blank, begins with a letter
            or digit, ends with a digit, begins with what may stand within ``%-5.2f``, or ends with a percent sign or a
            parenthesis.
    """

    form_BFL: jax.Array | np.ndarray
    length_BF: jax.Array | np.ndarray
    after_BF: jax.Array | np.ndarray
    digit_BF: jax.Array | np.ndarray
    barred_BC: jax.Array | np.ndarray
    spelt_CV: jax.Array | np.ndarray
    kind_V: jax.Array | np.ndarray


_BLANK, _BEGINS_BLANK, _BEGINS_WORD, _ENDS_DIGIT, _BEGINS_FLAG = 1, 2, 4, 8, 16
_ENDS_PERCENT, _ENDS_PARENTHESIS = 32, 64
_PERCENT = 3  # in Progress.after_BK: behind a percent sign that is none of a placeholder's


class Progress(NamedTuple):
    """How far K hypotheses of each sentence are.

    Attributes:
        used_BKP: bool, placeholders that are written.
        active_BKF: bool, forms that the placeholder being written may turn out to be.
        offset_BK: tokens of it that are written; 0 outside of placeholders.
        after_BK: what must not come next, see `Copied`.
        last_BK: the token written last.
    """

    used_BKP: jax.Array
    active_BKF: jax.Array
    offset_BK: jax.Array
    after_BK: jax.Array
    last_BK: jax.Array


def begin(copied: Copied, beam: int) -> Progress:
    """Nothing is written; a placeholder that there is not counts as used."""
    B, F = copied.length_BF.shape
    longest_BP = _longest(copied)
    return Progress(
        jnp.broadcast_to((longest_BP == 0)[:, None], (B, beam, F // 2)),
        jnp.zeros((B, beam, F), bool),
        *(jnp.zeros((B, beam), jnp.int32) for _ in range(3)),
    )


def constrain(copied: Copied, progress: Progress, logp_BKV: jax.Array, left: jax.Array) -> jax.Array:
    """Log-probabilities of what may come next, minus infinity for the rest.

    Args:
        copied: what to copy.
        progress: how far hypotheses are.
        logp_BKV: what the model says.
        left: tokens that may still be written, end included; a scalar or [B].
    """
    candidate_BKF, next_BKF = _candidates(copied, progress)
    idle_BK = progress.offset_BK == 0
    pending_BK = jnp.any(~progress.used_BKP, axis=-1)
    longest_BP = _longest(copied)
    # One more for each: a blank before it.
    needed_BP = jnp.where(longest_BP > 0, longest_BP + 1, 0)
    missing_BK = jnp.sum(jnp.where(progress.used_BKP, 0, needed_BP[:, None]), axis=-1) - progress.offset_BK
    must_BK = pending_BK & (jnp.reshape(left, (-1, 1)) <= missing_BK + 1)

    B, K, V = logp_BKV.shape
    b, k = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    allowed_BKV = jnp.zeros((B, K, V), jnp.int32).at[b, k, next_BKF].max(candidate_BKF.astype(jnp.int32)) > 0
    barred_BV = jnp.einsum("BC,CV->BV", *(jnp.asarray(x, jnp.float32) for x in (copied.barred_BC, copied.spelt_CV)))
    end_V, kind_V = jnp.arange(V) == EOS, jnp.asarray(copied.kind_V)
    joins_BKV = (progress.after_BK[:, :, None] == 1) & (kind_V & _BEGINS_WORD > 0)
    joins_BKV |= (progress.after_BK[:, :, None] == 2) & ~((kind_V & _BEGINS_BLANK > 0) | end_V)
    joins_BKV |= (progress.after_BK[:, :, None] == _PERCENT) & (kind_V & (_BEGINS_WORD | _BEGINS_FLAG) > 0)
    # Where something must come and cannot follow what was written, a blank comes first.
    stuck_BK = must_BK & ~jnp.any(allowed_BKV & ~joins_BKV, axis=-1)
    blank_BKV = stuck_BK[:, :, None] & (kind_V & _BLANK > 0)

    closed_BKV = (barred_BV > 0)[:, None] | (pending_BK[:, :, None] & end_V) | (must_BK[:, :, None] & ~blank_BKV)
    end_BK = jnp.where(idle_BK & pending_BK, logp_BKV[:, :, EOS], -jnp.inf)
    within_BKV = jnp.where(allowed_BKV, jnp.maximum(logp_BKV, end_BK[:, :, None]), -jnp.inf)
    outside_BKV = jnp.maximum(jnp.where(closed_BKV, -jnp.inf, logp_BKV), within_BKV)
    return jnp.where(idle_BK[:, :, None], jnp.where(joins_BKV, -jnp.inf, outside_BKV), within_BKV)


def follow(copied: Copied, progress: Progress, parent_BK: jax.Array, token_BK: jax.Array) -> Progress:
    """After hypotheses went on: hypothesis k continues ``parent_BK[:, k]`` with a token."""

    def of_parent(x_BK: jax.Array) -> jax.Array:
        index = parent_BK if x_BK.ndim == 2 else parent_BK[:, :, None]
        return jnp.take_along_axis(x_BK, index, axis=1)

    progress = jax.tree.map(of_parent, progress)
    candidate_BKF, next_BKF = _candidates(copied, progress)
    same_BKF = candidate_BKF & (next_BKF == token_BK[:, :, None])
    offset_BK = jnp.where(jnp.any(same_BKF, axis=-1), progress.offset_BK + 1, 0)
    complete_BKF = same_BKF & (jnp.asarray(copied.length_BF)[:, None] == offset_BK[:, :, None])
    done_BK = jnp.any(complete_BKF, axis=-1)
    first_BK = jnp.argmax(complete_BKF, axis=-1) // 2  # of several alike
    now_BKP = done_BK[:, :, None] & (jnp.arange(progress.used_BKP.shape[-1]) == first_BK[:, :, None])
    going_BK = (offset_BK > 0) & ~done_BK
    after_BK = jnp.max(jnp.where(complete_BKF, jnp.asarray(copied.after_BF)[:, None], 0), axis=-1)
    kind_BK = jnp.where(jnp.any(same_BKF, axis=-1), 0, jnp.take(jnp.asarray(copied.kind_V), token_BK))  # 0 in a form
    after_BK = jnp.where(kind_BK & _ENDS_PERCENT > 0, _PERCENT, after_BK)
    after_BK = jnp.where(kind_BK & _ENDS_PARENTHESIS > 0, 1, after_BK)
    return Progress(
        progress.used_BKP | now_BKP,
        same_BKF & going_BK[:, :, None],
        jnp.where(going_BK, offset_BK, 0),
        after_BK,
        token_BK,
    )


def _longest(copied: Copied) -> jax.Array:
    B, F = copied.length_BF.shape
    return jnp.max(jnp.reshape(jnp.asarray(copied.length_BF), (B, F // 2, 2)), axis=-1)


def _candidates(copied: Copied, progress: Progress) -> tuple[jax.Array, jax.Array]:
    """Which forms may go on, or begin, and with which token."""
    length_BF = jnp.asarray(copied.length_BF)
    idle_BK = progress.offset_BK == 0
    unused_BKF = jnp.repeat(~progress.used_BKP, 2, axis=-1) & (length_BF > 0)[:, None]
    kind_BK = jnp.take(jnp.asarray(copied.kind_V), progress.last_BK)
    unused_BKF &= ~(jnp.asarray(copied.digit_BF)[:, None] & (kind_BK & _ENDS_DIGIT > 0)[:, :, None])
    candidate_BKF = jnp.where(idle_BK[:, :, None], unused_BKF, progress.active_BKF)
    at_BKF1 = jnp.broadcast_to(progress.offset_BK[:, :, None, None], (*candidate_BKF.shape, 1))
    form_BKFL = jnp.broadcast_to(
        jnp.asarray(copied.form_BFL)[:, None], (*candidate_BKF.shape, copied.form_BFL.shape[-1])
    )
    next_BKF = jnp.take_along_axis(form_BKFL, at_BKF1, axis=-1, mode="clip")[..., 0]
    return candidate_BKF & (progress.offset_BK[:, :, None] < length_BF[:, None]), next_BKF


@dataclasses.dataclass(frozen=True)
class Copier:
    """Knows how a target vocabulary spells placeholders.

    Attributes:
        pieces: the text of each id, ``▁`` for a blank; single bytes as they are, and nothing for what is no text.
        encode: a text's ids, without an end.
        decode: the text of ids.
    """

    pieces: tuple[str, ...]
    encode: Callable[[str], Sequence[int]] = dataclasses.field(compare=False)
    decode: Callable[[Sequence[int]], str] = dataclasses.field(compare=False)
    spelt_CV: np.ndarray = dataclasses.field(init=False, compare=False, repr=False)
    kind_V: np.ndarray = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows = [[c in piece for piece in self.pieces] for c in CHARACTERS]
        spelt_CV = np.array([*rows, [_FRAGMENT.search(piece) is not None for piece in self.pieces]], bool)
        object.__setattr__(self, "spelt_CV", spelt_CV)
        object.__setattr__(self, "kind_V", np.array([_kind(piece) for piece in self.pieces], np.int32))

    def forms(self, placeholder: str) -> list[list[int]]:
        """Its ids at the beginning of a word and within one; none if the vocabulary cannot spell it.

        A blank alone in front is left out: it is ordinary text, after which the form within a word follows.
        """
        alone = list(self.encode(placeholder))
        if alone and self.pieces[alone[0]] == "▁":
            alone = alone[1:]
        found: list[list[int]] = []
        for ids in (alone, self._within(placeholder)):
            if ids and len(ids) <= LONGEST and self.decode(ids).strip() == placeholder and ids not in found:
                found.append(ids)
        return found

    def _within(self, placeholder: str) -> list[int]:
        for before in ("(", "x", ":"):
            ids, text = list(self.encode(before + placeholder)), ""
            for count, i in enumerate(ids):
                if text.lstrip("▁") == before:
                    return ids[count:]
                text += self.pieces[i]
        return []

    def table(self, sentences: Sequence[tuple[str, Sequence[str]]], longest: int) -> tuple[Copied, list[bool]]:
        """What to copy in a batch.

        Args:
            sentences: the plain source of each, and its placeholders.
            longest: tokens of the longest translation, end included.

        Returns:
            the tables, and whether the placeholders of each sentence can be copied; where not, nothing constrains it.
        """
        rows, forms = len(sentences), 2 * PLACEHOLDERS
        form_BFL = np.zeros((rows, forms, LONGEST), np.int32)
        length_BF, after_BF = np.zeros((rows, forms), np.int32), np.zeros((rows, forms), np.int32)
        digit_BF = np.zeros((rows, forms), bool)
        barred_BC = np.zeros((rows, len(self.spelt_CV)), bool)
        can = []
        for row, (plain, placeholders) in enumerate(sentences):
            spelt = [self.forms(placeholder) for placeholder in placeholders]
            needed = sum(max(map(len, of), default=0) + 1 for of in spelt) + 1
            can.append(len(spelt) <= PLACEHOLDERS and all(spelt) and needed <= longest)
            if not can[-1]:
                continue
            rest = plain
            for p, placeholder in enumerate(placeholders):
                rest = rest.replace(placeholder, " ", 1)
                for f, ids in enumerate(spelt[p], 2 * p):
                    form_BFL[row, f, : len(ids)], length_BF[row, f] = ids, len(ids)
                    after_BF[row, f] = _after(placeholder)
                    digit_BF[row, f] = placeholder[0] == "%" and not self.pieces[ids[0]].startswith("▁")
            barred_BC[row] = [*(c not in rest for c in CHARACTERS), _FRAGMENT.search(rest) is None]
        return Copied(form_BFL, length_BF, after_BF, digit_BF, barred_BC, self.spelt_CV, self.kind_V), can


def _kind(piece: str) -> int:
    found = _BLANK * (piece == "▁") | _BEGINS_BLANK * piece.startswith("▁")
    if piece:
        found |= _BEGINS_WORD * (piece[0].isalnum() or piece[0] == "_") | _ENDS_DIGIT * piece[-1].isdigit()
        found |= _BEGINS_FLAG * (piece[0] in "%-+#.(@") | _ENDS_PERCENT * (piece[-1] == "%")
        found |= _ENDS_PARENTHESIS * (piece[-1] == ")")
    return found


def _after(placeholder: str) -> int:
    """What must not follow a placeholder."""
    if "://" in placeholder:
        return 2
    return int((placeholder[-1].isdigit() or placeholder[0] == "$" or placeholder == "%n") and placeholder[-1] != "}")
