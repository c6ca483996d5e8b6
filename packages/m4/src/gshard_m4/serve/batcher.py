"""Batching without end: what several requests ask is translated together, and whoever comes joins what is under way.

One thread goes on with the search (`gshard_m4.stream`), some steps at a time, so the device is never shared; in
between, sentences that wait take the places of those that have ended, each width for itself. Each client has a queue
of its own, and the queues are served in turn, a sentence at a time: a client that asks for much delays itself. A
sentence of a request that was cancelled, since its client has left, is not searched for any more.

A sentence that a client asks for twice at the same time is translated once. No text is kept once it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from gshard_m4.stream import Found, Search, Sentence
from gshard_m4.translate import Prepared, Translated

log = logging.getLogger("gshard_m4.serve")


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


class _Key(NamedTuple):
    """What a client asks for: two requests with the same key have one answer."""

    client: str
    sentence: str
    language: str | None


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """A sentence, and the requests of its client that want it."""

    key: _Key
    prepared: Prepared | None = None  # made when it is first looked at, so that nothing is done for who leaves before
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
        limit: sentences that may wait, and half as many of one client.
        wait: seconds to wait for others before a search begins.
        seen: is told how many sentences a search held, and the seconds that its next steps took.
    """

    def __init__(
        self,
        engine: Engine,
        limit: int,
        wait: float,
        seen: Callable[[int, int, float], None] = lambda held, ended, seconds: None,
    ):
        self._engine, self._limit, self._wait, self._seen = engine, limit, wait, seen
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # of each client; who was served last is last
        self._asked: dict[_Key, _Job] = {}  # waiting or being searched for
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="translate")
        self._task = asyncio.create_task(self._run())

    @property
    def waiting(self) -> int:
        """How many sentences wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def alive(self) -> bool:
        """Whether sentences are still taken."""
        return not self._task.done()

    async def translate(
        self, sentences: Sequence[str], language: str | None = None, client: str = ""
    ) -> list[Translated]:
        """Translates the sentences of one request; a request that is cancelled stops waiting.

        Args:
            sentences: lines of text.
            language: of all of them, or None.
            client: whose request it is.

        Raises:
            QueueFullError: there is no room for all of them; none is taken.
        """
        if not self._has_room(len(sentences), client):
            self._forget_given_up()
        if not self._has_room(len(sentences), client) or not self.alive:
            raise QueueFullError
        results = [self._ask(_Key(client, sentence, language)) for sentence in sentences]
        self._news.set()
        try:
            return list(await asyncio.gather(*results))
        finally:
            for result in results:
                result.cancel()

    def _has_room(self, count: int, client: str) -> bool:
        """Whether so many more of a client may wait."""
        own = len(self._waiting.get(client, ()))
        return self.waiting + count <= self._limit and 2 * (own + count) <= self._limit

    def _ask(self, key: _Key) -> asyncio.Future[Translated]:
        result: asyncio.Future[Translated] = asyncio.get_running_loop().create_future()
        job = self._asked.get(key)
        if job is None:
            job = self._asked[key] = _Job(key)
            self._waiting.setdefault(key.client, deque()).append(job)
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
        for client, queue in list(self._waiting.items()):
            left = deque(job for job in queue if not job.given_up)
            for job in queue:
                if job.given_up:
                    del self._asked[job.key]
            if left:
                self._waiting[client] = left
            else:
                del self._waiting[client]

    def _admitted(self, search: Search) -> list[_Job]:
        """Those that are let in now: of each client in turn the first one for which there is room."""
        self._forget_given_up()
        let_in: list[_Job] = []
        room: dict[int, int] = {}

        def searched(job: _Job) -> Sentence | None:
            if job.prepared is None:
                job.prepared = self._engine.prepare(job.key.sentence, job.key.language)
            return job.prepared.searched

        def has_room(job: _Job) -> bool:
            sentence = searched(job)
            return sentence is None or room.setdefault(sentence.width, search.room(sentence.width)) > 0

        turns = deque(self._waiting)
        while turns:
            client = turns.popleft()
            queue = self._waiting[client]
            job = next(filter(has_room, queue), None)
            if job is None:
                continue
            if sentence := searched(job):
                room[sentence.width] -= 1
            let_in.append(job)
            queue.remove(job)
            if queue:
                self._waiting.move_to_end(client)
                turns.append(client)
            else:
                del self._waiting[client]
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
                    job.answer(translated)
                else:
                    job.answer(None, translated)

    def _step(self, search: Search, let_in: list[_Job], more: bool) -> list[tuple[_Job, Translated | Exception]]:
        """In the thread: what has come to its end. What one sentence makes fail is that sentence's failure."""
        ended: list[tuple[_Job, Translated | Exception]] = []
        for job in let_in:
            assert job.prepared is not None
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
