"""Batching without end: what several requests ask is translated together, and whoever comes joins what is under way.

One thread goes on with the search (`gshard_m4.stream`), some steps at a time, so the device is never shared; in
between, sentences that wait take the places of those that have ended, each width for itself. Each client has a queue
of its own, and the queues are served in turn, a sentence at a time: a client that asks for much delays itself. A
sentence of a request that was cancelled, since its client has left, is not searched for any more.

No text is kept once it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gshard_m4.stream import Search
from gshard_m4.translate import Prepared, Translated, Translator

log = logging.getLogger("gshard_m4.serve")


class QueueFullError(Exception):
    """More sentences wait than may."""


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """A sentence. A client that leaves cancels its answer."""

    sentence: str
    language: str | None
    answer: asyncio.Future[Translated]
    prepared: Prepared | None = None  # made when it is first looked at, so that nothing is done for who leaves before

    def end(self, found: Translated | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(found, Translated):
            self.answer.set_result(found)
        else:
            self.answer.set_exception(found)


class Batcher:
    """Gathers the sentences of requests.

    Args:
        translator: what translates; its search runs in a thread of its own.
        limit: sentences that may wait, and half as many of one client.
        wait: seconds to wait for others before a search begins.
        seen: called with the number of sentences that a search held, and the seconds that its next steps took.
    """

    def __init__(
        self,
        translator: Translator,
        limit: int,
        wait: float,
        seen: Callable[[int, int, float], None] = lambda held, ended, seconds: None,
    ):
        self._translator, self._limit, self._wait, self._seen = translator, limit, wait, seen
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # of each client; who was served last is last
        self._held: set[_Job] = set()  # being searched for
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
        self._forget_given_up()
        own = len(self._waiting.get(client, ())) + len(sentences)
        if self.waiting + len(sentences) > self._limit or 2 * own > self._limit or not self.alive:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        jobs = [_Job(sentence, language, loop.create_future()) for sentence in sentences]
        if jobs:
            self._waiting.setdefault(client, deque()).extend(jobs)
        self._news.set()
        try:
            return list(await asyncio.gather(*(job.answer for job in jobs)))
        finally:
            for job in jobs:
                job.answer.cancel()

    async def close(self) -> None:
        """Stops; what still waits is given up."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for job in (*self._held, *(job for queue in self._waiting.values() for job in queue)):
            job.answer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget_given_up(self) -> None:
        for client, queue in list(self._waiting.items()):
            self._waiting[client] = deque(job for job in queue if not job.answer.done())
            if not self._waiting[client]:
                del self._waiting[client]

    def _let_in(self, search: Search) -> None:
        """Gives a search of each client in turn the first sentence for which there is room."""
        self._forget_given_up()
        turns = deque(self._waiting)
        while turns:
            client = turns.popleft()
            queue = self._waiting[client]
            for job in queue:
                prepared = job.prepared = job.prepared or self._translator.prepare(job.sentence, job.language)
                if prepared.searched is None or search.room(prepared.searched.width):
                    break
            else:
                continue
            queue.remove(job)
            if prepared.searched is None:
                job.end(self._translator.finish(prepared))
            else:
                search.add(job, prepared.searched)
                self._held.add(job)
            if queue:
                self._waiting.move_to_end(client)
                turns.append(client)
            else:
                del self._waiting[client]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        search = self._translator.search()
        while True:
            if not self._held:
                if not self._waiting:
                    self._news.clear()
                    await self._news.wait()
                await asyncio.sleep(self._wait)
            self._let_in(search)
            if not self._held:
                continue
            began, size = loop.time(), len(self._held)
            try:
                ended = await loop.run_in_executor(self._thread, self._step, search, bool(self._waiting))
                self._seen(size, len(ended), loop.time() - began)
            except Exception as error:
                log.exception("a search with %d sentences failed", size)
                ended = dict.fromkeys(self._held, error)
                search = self._translator.search()
            for job, found in ended.items():
                self._held.discard(job)
                job.end(found)

    def _step(self, search: Search, more: bool) -> dict[_Job, Translated | Exception]:
        """In the thread: what has come to its end. What one sentence makes fail is that sentence's failure."""
        ended: dict[_Job, Translated | Exception] = {}
        for found in search.step(more=more):
            try:
                ended[found.ticket] = self._translator.finish(found.ticket.prepared, found)
            except Exception as error:
                log.exception("a sentence could not be translated")
                ended[found.ticket] = error
        return ended
