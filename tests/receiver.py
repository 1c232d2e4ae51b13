"""A webhook and a mail server that keep what they are told."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import socketserver
import threading
from collections.abc import Iterator
from email.message import EmailMessage
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


@contextlib.contextmanager
def receiving_mail() -> Iterator[tuple[str, list[EmailMessage]]]:
    """The address, with the password of an account, and the mails so far."""
    mails: list[EmailMessage] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 ready")
            while words := self.rfile.readline().split():
                match words[0].upper():
                    case b"EHLO":
                        self._say("250-here\r\n250 AUTH PLAIN")
                    case b"AUTH":
                        self._say("235 welcome")
                    case b"DATA":
                        self._say("354 go on")
                        mails.append(email.message_from_bytes(self._data(), policy=email.policy.default))
                        self._say("250 taken")
                    case b"QUIT":
                        self._say("221 bye")
                        return
                    case _:
                        self._say("250 fine")

        def _say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        def _data(self) -> bytes:
            return b"".join(iter(self.rfile.readline, b".\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        yield f"mailto://robot:{SECRET}@127.0.0.1:{port}?mode=insecure&from=robot@example.com&to=a@example.com", mails
        server.shutdown()
        thread.join()
