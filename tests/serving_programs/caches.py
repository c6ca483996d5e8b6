"""Caches of keys and values: writes of a step at places that differ, reads through tables of pages, reorders."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from families.case import GRID, LINE, Family, Whole, on

CASES = Family("caches")

B, L, H, D = 16, 1024, 8, 64
CACHE, NEW, PLACES = (B, L, H, D), (B, H, D), Whole((B,), L)
BY_HEADS, BY_BATCH, BY_LENGTH = P(None, None, "x"), P("x"), P(None, "x")


def write(cache, new, places):
    return jax.vmap(lambda own, x, at: lax.dynamic_update_slice_in_dim(own, x[None], at, 0))(cache, new, places)


def scatter(cache, new, places):
    return cache.at[jnp.arange(B), places].set(new)


for way, own in ("write", write), ("scatter", scatter):
    CASES.add(LINE, on(CACHE, *BY_HEADS), on(NEW, None, "x"), PLACES, results=BY_HEADS, name=f"{way}_by_heads")(own)
    CASES.add(LINE, on(CACHE, "x"), on(NEW, "x"), on(PLACES, "x"), results=BY_BATCH, name=f"{way}_by_batch")(own)
    CASES.add(LINE, on(CACHE, None, "x"), NEW, PLACES, results=BY_LENGTH, name=f"{way}_by_length")(own)


@CASES.add(LINE, on((B, 256, H, D), None, "x"), NEW, Whole((B,), 4096), results=BY_LENGTH)
def window_by_length(cache, new, places):
    """A ring of the last positions."""
    return cache.at[jnp.arange(B), places % cache.shape[1]].set(new)


PAGES, PAGE = 256, 16


def write_pages(pages, new, slots):
    """Each token has a slot; those of no request have one too many."""
    return pages.at[slots // PAGE, slots % PAGE].set(new, mode="drop")


SLOTS = Whole((B,), PAGES * PAGE + PAGE)
CASES.add(LINE, on((PAGES, PAGE, H, D), None, None, "x"), on(NEW, None, "x"), SLOTS, results=P(None, None, "x"))(
    write_pages
)
CASES.add(
    LINE, on((PAGES, PAGE, H, D), "x"), NEW, SLOTS, results=P("x"), name="write_pages_by_pages"
)(write_pages)  # fmt: skip


def read_pages(pages, table):
    return pages[table].reshape(*table.shape[:1], -1, *pages.shape[2:])


TABLE = Whole((B, 8), PAGES)
CASES.add(LINE, on((PAGES, PAGE, H, D), None, None, "x"), TABLE, results=P(None, None, "x"))(read_pages)
CASES.add(
    LINE, on((PAGES, PAGE, H, D), "x"), on(TABLE, "x"), results=P("x"), name="read_pages_by_pages"
)(read_pages)  # fmt: skip


@CASES.add(GRID, on((4, 4, L, H, D), "x", None, None, "y"), on(Whole((4, 4), 4), "x"), results=P("x", None, None, "y"))
def reorder_beams(cache, parents):
    """The caches of the beams that go on."""
    return jax.vmap(lambda own, of: own[of])(cache, parents)


@CASES.add(LINE, on(Whole(CACHE, 128, "int8", -127), *BY_HEADS), on((B, L, H), *BY_HEADS), on(NEW, None, "x"), PLACES,
           results=(BY_HEADS, BY_HEADS))  # fmt: skip
def write_int8(cache, scales, new, places):
    scale = jnp.max(jnp.abs(new), -1) / 127
    rows = jnp.arange(B)
    whole = jnp.round(new / scale[..., None]).astype(jnp.int8)
    return cache.at[rows, places].set(whole), scales.at[rows, places].set(scale)
