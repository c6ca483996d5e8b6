"""Serving: a page and an HTTP interface for translation, on one machine.

    config.py       addresses and limits
    batcher.py      sentences of many requests are translated together
    limits.py       how much, how often and for how long a client may ask
    app.py          requests and answers
    openapi.py      the same as a document for other programs
    starting.py     what is answered while the model is read
    server.py       the process: its socket, its signals, its end
    page/           the page; it loads nothing from any other server

Needs starlette, uvicorn and prometheus-client.
"""
