"""Dynamic batching: what several requests ask is translated together, in the order it came.

One thread translates, so the device is never shared; meanwhile sentences wait, up to a limit. A batch begins as soon
as the one before is done and it is full, or its first sentence has waited long enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from m4.translate import Translated

log = logging.getLogger("m4.serve")


class QueueFullError(Exception):
    """More sentences wait than may."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    sentence: str
    language: str | None
    result: asyncio.Future[Translated]


class Batcher:
    """Gathers sentences into batches.

    Args:
        translate: translates a batch, sentences and the language of each, or None; called in a thread of its own, one
            call at a time.
        batch: sentences of a full batch.
        limit: sentences that may wait.
        wait: seconds to wait for a batch to fill.
        seen: is told the size of each batch and the seconds it took.
    """

    def __init__(
        self,
        translate: Callable[[Sequence[str], Sequence[str | None]], list[Translated]],
        batch: int,
        limit: int,
        wait: float,
        seen: Callable[[int, float], None] = lambda size, seconds: None,
    ):
        self._translate, self._batch, self._limit, self._wait, self._seen = translate, batch, limit, wait, seen
        self._waiting: deque[_Waiting] = deque()
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
            self._forget_cancelled()
        if self.waiting + len(sentences) > self._limit or not self.alive:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        jobs = [_Waiting(sentence, language, loop.create_future()) for sentence in sentences]
        self._waiting.extend(jobs)
        self._news.set()
        try:
            return list(await asyncio.gather(*(job.result for job in jobs)))
        finally:
            for job in jobs:
                job.result.cancel()

    async def close(self) -> None:
        """Stops; what still waits is given up."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for job in self._waiting:
            job.result.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.result.done())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            if not self._waiting:
                await self._news.wait()
            if self.waiting < self._batch:
                await asyncio.sleep(self._wait)
            jobs: list[_Waiting] = []
            while self._waiting and len(jobs) < self._batch:
                job = self._waiting.popleft()
                if not job.result.done():
                    jobs.append(job)
            if not jobs:
                continue
            began = loop.time()
            try:
                sentences, languages = [job.sentence for job in jobs], [job.language for job in jobs]
                done = await loop.run_in_executor(self._thread, self._translate, sentences, languages)
            except Exception as error:
                log.exception("a batch of %d sentences failed", len(jobs))
                for job in jobs:
                    if not job.result.done():
                        job.result.set_exception(error)
                continue
            self._seen(len(jobs), loop.time() - began)
            for job, translated in zip(jobs, done, strict=True):
                if not job.result.done():
                    job.result.set_result(translated)
