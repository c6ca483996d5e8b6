"""Batching without end: what several requests ask is translated together, and whoever comes joins what is under way.

One thread goes on with the search (`gshard_m4.stream`), some steps at a time, so the device is never shared; in
between, sentences that wait take the places of those that have ended, in the order they came, each width for itself. A
sentence that was translated before is remembered, and one that is asked for by several at the same time is translated
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from gshard_m4.stream import Found, Search
from gshard_m4.translate import Prepared, Translated

log = logging.getLogger("gshard_m4.serve")

_REMEMBERED = 500  # characters of the longest sentence that is remembered


class QueueFullError(Exception):
    """More sentences wait than may."""


class Engine(Protocol):
    """What translates; see `gshard_m4.translate.Translator`."""

    def prepare(self, sentence: str, language: str | None) -> Prepared:
        """What a search is given of a sentence."""

    def search(self) -> Search:
        """A search for sentences that are prepared."""

    def finish(self, prepared: Prepared, found: Found | None = None) -> Translated:
        """What became of a sentence."""


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """A sentence, and those that want it."""

    key: tuple[str, str | None]
    prepared: Prepared
    wanted: list[asyncio.Future[Translated]] = dataclasses.field(default_factory=list)

    @property
    def given_up(self) -> bool:
        return all(result.done() for result in self.wanted)

    def answer(self, translated: Translated | None, error: BaseException | None = None) -> None:
        for result in self.wanted:
            if result.done():
                continue
            if translated is not None:
                result.set_result(translated)
            elif error is not None:
                result.set_exception(error)
            else:
                result.cancel()


class Batcher:
    """Gathers the sentences of requests.

    Args:
        engine: what translates; its search runs in a thread of its own.
        limit: sentences that may wait.
        wait: seconds to wait for others before a search begins.
        seen: is told how many sentences a search held, and the seconds that its next steps took.
        cache: sentences that are remembered.
        hit: is told of each that was.
    """

    def __init__(
        self,
        engine: Engine,
        limit: int,
        wait: float,
        seen: Callable[[int, int, float], None] = lambda held, ended, seconds: None,
        cache: int = 0,
        hit: Callable[[], None] = lambda: None,
    ):
        self._engine, self._limit, self._wait, self._seen, self._hit = engine, limit, wait, seen, hit
        self._waiting: deque[_Job] = deque()
        self._asked: dict[tuple[str, str | None], _Job] = {}  # waiting or being searched for
        self._cache: OrderedDict[tuple[str, str | None], Translated] = OrderedDict()
        self._remembered = cache
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="translate")
        self._task = asyncio.create_task(self._run())

    @property
    def waiting(self) -> int:
        """How many sentences wait."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether sentences are still taken."""
        return not self._task.done()

    async def translate(self, sentences: Sequence[str], language: str | None = None) -> list[Translated]:
        """Translates the sentences of one request; a request that is cancelled stops waiting.

        Raises:
            QueueFullError: there is no room for all of them; none is taken.
        """
        if self.waiting + len(sentences) > self._limit:
            self._forget_given_up()
        if self.waiting + len(sentences) > self._limit or not self.alive:
            raise QueueFullError
        results = [self._ask((sentence, language)) for sentence in sentences]
        self._news.set()
        try:
            return list(await asyncio.gather(*results))
        finally:
            for result in results:
                result.cancel()

    def _ask(self, key: tuple[str, str | None]) -> asyncio.Future[Translated]:
        result: asyncio.Future[Translated] = asyncio.get_running_loop().create_future()
        if key in self._cache:
            self._cache.move_to_end(key)
            self._hit()
            result.set_result(self._cache[key])
            return result
        job = self._asked.get(key)
        if job is None:
            job = self._asked[key] = _Job(key, self._engine.prepare(*key))
            self._waiting.append(job)
        job.wanted.append(result)
        return result

    async def close(self) -> None:
        """Stops; what still waits is given up."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for job in list(self._asked.values()):
            job.answer(None)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget_given_up(self) -> None:
        for job in [job for job in self._waiting if job.given_up]:
            self._waiting.remove(job)
            del self._asked[job.key]

    def _admitted(self, search: Search) -> list[_Job]:
        """Those that are let in now: the first ones for which there is room, and those that need no search."""
        let_in: list[_Job] = []
        left: deque[_Job] = deque()
        room: dict[int, int] = {}
        for job in self._waiting:
            searched = job.prepared.searched
            if job.given_up:
                del self._asked[job.key]
            elif searched is None:
                let_in.append(job)
            elif room.setdefault(searched.width, search.room(searched.width)) > 0:
                room[searched.width] -= 1
                let_in.append(job)
            else:
                left.append(job)
        self._waiting = left
        return let_in

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        search = self._engine.search()
        held: set[_Job] = set()
        while True:
            if not held:
                if not self._waiting:
                    self._news.clear()
                    await self._news.wait()
                await asyncio.sleep(self._wait)
            let_in = self._admitted(search)
            held.update(let_in)
            began, size = loop.time(), len(held)
            try:
                ended = await loop.run_in_executor(self._thread, self._step, search, let_in, bool(self._waiting))
            except Exception as error:
                log.exception("a search with %d sentences failed", len(held))
                for job in held:
                    self._asked.pop(job.key, None)
                    job.answer(None, error)
                held.clear()
                search = self._engine.search()
                continue
            self._seen(size, len(ended), loop.time() - began)
            for job, translated in ended:
                held.discard(job)
                self._asked.pop(job.key, None)
                if isinstance(translated, Translated):
                    self._remember(job.key, translated)
                    job.answer(translated)
                else:
                    job.answer(None, translated)

    def _step(self, search: Search, let_in: list[_Job], more: bool) -> list[tuple[_Job, Translated | Exception]]:
        """In the thread: what has come to its end. What one sentence makes fail is that sentence's failure."""
        ended: list[tuple[_Job, Translated | Exception]] = []
        for job in let_in:
            if job.prepared.searched is None:
                ended.append((job, self._engine.finish(job.prepared)))
            else:
                search.add(job, job.prepared.searched)
        for found in search.step(more=more):
            try:
                ended.append((found.ticket, self._engine.finish(found.ticket.prepared, found)))
            except Exception as error:
                log.exception("a sentence could not be translated")
                ended.append((found.ticket, error))
        return ended

    def _remember(self, key: tuple[str, str | None], translated: Translated) -> None:
        if not self._remembered or len(key[0]) > _REMEMBERED:
            return
        self._cache[key] = translated
        if len(self._cache) > self._remembered:
            self._cache.popitem(last=False)
