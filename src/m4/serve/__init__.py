"""Serving: a page and an HTTP interface for translation, on one machine.

    config.py   addresses and limits
    batcher.py  sentences of many requests are translated together
    limits.py   how much, and how often, a client may ask
    app.py      what is asked and what is answered
    server.py   the process: its socket, its signals, its end
    page/       the page; it asks nothing of any other server

Needs starlette, uvicorn and prometheus-client.
"""
