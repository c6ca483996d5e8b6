"""The application: requests and answers.

    POST /translate  {"text": "...", "from": "de", "alternatives": 3}   "from" and "alternatives" may be left out
                  -> {"text": "...", "language": "de", "lines": [{"source", "text", "cut", "unfamiliar", "lost",
                      "invented", "alternatives": [{"text", "score"}]}]}
    GET  /languages  the languages of the model, with their names and numbers of training pairs
    GET  /health     200 while translations can be asked for, else 503
    GET  /metrics    counters in the text format of Prometheus
    GET  /openapi.json  all of this as an OpenAPI document
    GET  /           the page

An error is ``{"error": "..."}`` with a status from 400 on: 400 no JSON, 408 the body came too slowly, 413 too large,
415 not application/json, 422 something else than what is described here, 429 too much of one address, 503 too much at
the moment, or the server is starting or about to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gshard_m4.language_names import name_of
from gshard_m4.serve.batcher import Batcher, QueueFullError
from gshard_m4.serve.config import ServeConfig
from gshard_m4.serve.limits import Rate, client_of, read_body, while_there
from gshard_m4.serve.openapi import document
from gshard_m4.translate import Translated, TranslateError, Translator

log = logging.getLogger("gshard_m4.serve")

PAGE = {"": "index.html", "style.css": "style.css", "page.js": "page.js"}
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Metrics:
    """What is counted; each application has its own.

    Args:
        waiting: how many sentences wait.
    """

    def __init__(self, waiting: Callable[[], int]):
        self.registry = CollectorRegistry()

        def made(kind: Any, name: str, text: str, *rest: Any, **more: Any) -> Any:
            return kind(name, text, *rest, registry=self.registry, **more)

        self.requests = made(Counter, "m4_requests_total", "Requests answered.", ["route", "status"])
        self.seconds = made(Histogram, "m4_request_seconds", "From request to answer.", ["route"])
        self.sentences = made(Counter, "m4_sentences_total", "Sentences translated.")
        self.tokens = made(Counter, "m4_source_tokens_total", "Source tokens read.")
        sizes = [1, 2, 4, 8, 16, 32, 64, 128]
        self.batches = made(Histogram, "m4_batch_sentences", "Sentences searched for together.", buckets=sizes)
        self.batch_seconds = made(Histogram, "m4_batch_seconds", "Time that some steps of a search took.")
        made(Gauge, "m4_waiting_sentences", "Sentences that wait.").set_function(waiting)

    def batch(self, held: int, ended: int, seconds: float) -> None:
        """Counts some steps of a search."""
        self.sentences.inc(ended)
        self.batches.observe(held)
        self.batch_seconds.observe(seconds)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for translation, checked: lines of text, how many alternatives of each, and the language if given."""

    lines: list[str]
    alternatives: int
    language: str | None


def understand(body: bytes, options: ServeConfig, translator: Translator) -> Asked:
    """Checks the body of a request.

    Raises:
        HTTPException: 400 if it is no JSON, 413 if the text is too long, 422 if it asks for something else.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not JSON in UTF-8.") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise HTTPException(422, 'The body must be an object with a string "text".')
    unknown = sorted(set(found) - {"text", "from", "alternatives"})
    if unknown:
        raise HTTPException(422, f"Not known: {', '.join(unknown)[:100]!r}.")
    text = found["text"]
    if len(text) > options.characters:
        raise HTTPException(413, f"The text has {len(text)} characters; {options.characters} is the most.")
    if "\0" in text:
        raise HTTPException(422, "The text has a NUL character.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise HTTPException(422, "The text has half a surrogate pair.")
    lines = text.splitlines()
    if len(lines) > options.lines:
        raise HTTPException(413, f"The text has {len(lines)} lines; {options.lines} is the most.")
    count = found.get("alternatives", 1)
    most = translator.options.n_best
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise HTTPException(422, f'"alternatives" must be a number from 1 to {most}.')
    language = found.get("from")
    if language is not None:
        if not isinstance(language, str) or len(language) > 40:
            raise HTTPException(422, '"from" must be the code of a language.')
        try:
            language = translator.check_language(language)
        except TranslateError:
            raise HTTPException(422, f"The model knows no language {language!r}; see /languages.") from None
    return Asked(lines, count, language)


_STOPPING = HTTPException(503, "The server is stopping.", {"Retry-After": "5", "Connection": "close"})


def make_app(
    translator: Translator,
    options: ServeConfig,
    stopping: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The application.

    Args:
        translator: what translates; its `options.n_best` is the most alternatives that can be asked for.
        options: limits.
        stopping: whether the server is about to end.
    """
    rate = Rate(options.rate, options.burst)
    page = {at: resources.files("gshard_m4.serve").joinpath("page", name).read_bytes() for at, name in PAGE.items()}
    languages = [{"code": code, "name": name_of(code), "pairs": n} for code, n in translator.languages.items()]
    shown = {"languages": languages, "characters": options.characters, "alternatives": translator.options.n_best}
    batcher: Batcher

    metrics = Metrics(lambda: batcher.waiting)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal batcher
        wait = options.wait / 1000
        batcher = Batcher(translator, options.queue, wait, metrics.batch)
        yield
        await batcher.close()

    async def translate(request: Request) -> Response:
        try:
            return await answered(request)
        except asyncio.CancelledError:  # the grace is over
            raise _STOPPING from None

    async def answered(request: Request) -> Response:
        client = client_of(request.client.host) if request.client else ""
        seconds = rate.ask(client)
        if seconds:
            raise HTTPException(429, "Too many requests from this address.", {"Retry-After": str(math.ceil(seconds))})
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "The body must be of the type application/json.")
        try:
            async with asyncio.timeout(options.timeout):
                body = await read_body(request, options.body)
        except TimeoutError:
            late = f"The body did not come within {options.timeout:.0f} seconds."
            raise HTTPException(408, late, {"Connection": "close"}) from None
        asked = understand(body, options, translator)
        rate.charge(client, len(asked.lines) - 1)
        try:
            async with asyncio.timeout(options.timeout):
                done = await while_there(request, batcher.translate(asked.lines, asked.language, client))
        except (QueueFullError, TimeoutError):
            much = HTTPException(503, "Too much is asked at the moment.", {"Retry-After": "5"})
            raise _STOPPING if stopping() else much from None
        except HTTPException:
            raise
        except Exception:  # the log has it already
            raise HTTPException(500, "The translation failed; the log of the server says why.") from None
        metrics.tokens.inc(sum(of.tokens for of in done))
        return JSONResponse(_answer(asked, done))

    described = document(options, translator.options.n_best, list(translator.languages))

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    async def known(request: Request) -> Response:
        return JSONResponse(shown)

    async def health(request: Request) -> Response:
        well = batcher.alive and not stopping()
        return JSONResponse({"status": "ok" if well else "stopping"}, 200 if well else 503)

    async def measured(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show(request: Request) -> Response:
        at = request.url.path[1:]
        return Response(page[at], media_type=_TYPES[PAGE[at].rpartition(".")[2]])

    routes = [
        Route("/translate", translate, methods=["POST"]),
        Route("/languages", known),
        Route("/health", health),
        Route("/metrics", measured),
        Route("/openapi.json", openapi),
        *(Route(f"/{at}", show) for at in PAGE),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: _refused},
    )
    app.router.redirect_slashes = False
    paths = {route.path for route in routes}
    app.add_middleware(_Around, metrics=metrics, paths=paths, stopping=stopping)  # type: ignore[arg-type]
    return app


def _answer(asked: Asked, done: list[Translated]) -> dict[str, Any]:
    lines = [
        {
            "source": source,
            "text": of.text,
            "cut": of.cut,
            "unfamiliar": of.unfamiliar,
            "lost": list(of.lost),
            "invented": list(of.invented),
            "alternatives": [{"text": h.text, "score": round(h.score, 6)} for h in of.hypotheses[: asked.alternatives]],
        }
        for source, of in zip(asked.lines, done, strict=True)
    ]
    return {"text": "\n".join(of.text for of in done), "language": asked.language, "lines": lines}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class _Around:
    """Counts every answer, and adds the headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str], stopping: Callable[[], bool]):
        self._app, self._metrics, self._paths, self._stopping = app, metrics, paths, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        route = scope["path"] if scope["path"] in self._paths else "other"

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if self._stopping():  # a client would send its next request into a connection that is being closed
                    headers["Connection"] = "close"
                self._metrics.requests.labels(route, str(message["status"])).inc()
                self._metrics.seconds.labels(route).observe(time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, told)
