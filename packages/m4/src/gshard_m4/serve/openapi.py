"""The HTTP interface as an OpenAPI 3.1 document, from which clients and tests are generated."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from gshard_m4.serve.config import ServeConfig

_STRINGS = {"type": "array", "items": {"type": "string"}}
_ERRORS = {
    400: "The body is not JSON in UTF-8.",
    408: "The body came too slowly.",
    413: "The text or the body is too long.",
    415: "The body is not of the type application/json.",
    422: "The body asks for something else than the schema has.",
    429: "This address has asked for too many sentences; Retry-After has the seconds to wait.",
    500: "The translation failed.",
    503: "Too much is asked at the moment, or the server is starting or about to end.",
}


def document(options: ServeConfig, alternatives: int, languages: Sequence[str]) -> dict[str, Any]:
    """The document, with the limits of a server.

    Args:
        options: its limits.
        alternatives: the most translations of a sentence that can be asked for.
        languages: codes of the languages of the model.
    """
    answers = {
        "200": _json("The translations, a line for each line.", {"$ref": "#/components/schemas/Answer"}),
        **{str(status): _json(text, {"$ref": "#/components/schemas/Error"}) for status, text in _ERRORS.items()},
    }
    asked = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Asked"}}}, "required": True}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gshard-m4", "version": version("gshard-m4"),
            "description": f"Translation into English: at most {options.lines} lines, {options.body} bytes a request.",
        },
        "paths": {
            "/translate": {"post": {"operationId": "translate", "requestBody": asked, "responses": answers}},
            "/languages": {"get": _get("languages", _json("The languages and limits.", _object(_LANGUAGES)))},
            "/health": {
                "get": _get(
                    "health", _json("Translations can be asked for.", _HEALTH),
                    {"503": _json("The server is starting or about to end.", _HEALTH)},
                )
            },
            "/metrics": {"get": _get("metrics", _text("Counters in the text format of Prometheus."))},
            "/openapi.json": {"get": _get("openapi", _json("This document.", {"type": "object"}))},
        },
        "components": {
            "schemas": {"Asked": _asked(options, alternatives, languages), "Answer": _ANSWER, "Error": _ERROR}
        },
    }  # fmt: skip


def _asked(options: ServeConfig, alternatives: int, languages: Sequence[str]) -> dict[str, Any]:
    fields = {
        "text": {
            "type": "string", "maxLength": options.characters,
            "description": "Each line is translated by itself. No NUL character.",
        },
        "from": {
            "enum": [*languages, None],
            "description": "The language; the model tells languages apart without it.",
        },
        "alternatives": {"type": "integer", "minimum": 1, "maximum": alternatives, "default": 1},
    }  # fmt: skip
    return _object(fields, ["text"]) | {"additionalProperties": False}


def _object(fields: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields) if required is None else required}


def _json(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _text(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _get(name: str, answer: dict[str, Any], others: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"operationId": name, "responses": {"200": answer, **(others or {})}}


_ERROR = _object({"error": {"type": "string"}})
_HEALTH = _object({"status": {"enum": ["ok", "starting", "stopping"]}})
_LANGUAGE = _object({"code": {"type": "string"}, "name": {"type": "string"}, "pairs": {"type": "integer"}})
_LANGUAGES = {
    "languages": {"type": "array", "items": _LANGUAGE},
    "characters": {"type": "integer"},
    "alternatives": {"type": "integer"},
}
_LINE = _object(
    {
        "source": {"type": "string"},
        "text": {"type": "string"},
        "cut": {"type": "boolean", "description": "Only the beginning of the line was translated."},
        "unfamiliar": {"type": "boolean", "description": "In letters that the model was not trained on."},
        "lost": _STRINGS | {"description": "Placeholders that the model did not write and that were put in."},
        "invented": _STRINGS
        | {"description": "Those that it wrote, that the line does not have, and that were taken out."},
        "alternatives": {
            "type": "array",
            "items": _object({"text": {"type": "string"}, "score": {"type": "number"}}),
        },
    }
)
_ANSWER = _object(
    {
        "text": {"type": "string"},
        "language": {"type": ["string", "null"]},
        "lines": {"type": "array", "items": _LINE},
    }
)
