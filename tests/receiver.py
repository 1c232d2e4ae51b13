"""A webhook that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "s3cret-t0ken"


@contextlib.contextmanager
def receiving() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address, which contains a secret, and the messages so far."""
    messages: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"json://127.0.0.1:{server.server_port}/{SECRET}", messages
        server.shutdown()
        thread.join()
