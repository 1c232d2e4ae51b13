"""Who may talk to an HTTP server: by token, by Host against DNS rebinding, by Origin against pages of other sites."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from nightshift.errors import ConfigError, StreamError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_VARIABLE = "NIGHTSHIFT_TOKEN"
"""The environment variable with the token that other machines need: actors of a learner, browsers of a page."""
_MIN_TOKEN_LENGTH = 16
_TOKEN = 'python -c "import secrets; print(secrets.token_hex())"'
EXPORT_TOKEN = f"export {TOKEN_VARIABLE}=$({_TOKEN})"
"""The command that makes a token."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """`token` None: only for a server that listens on loopback."""

    token: str | None

    def admits(self, token: str) -> bool:
        """Takes as long for a wrong token as for the right one."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def admits_header(self, authorization: str) -> bool:
        return self.admits(authorization.removeprefix("Bearer "))

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Why a request with these headers is refused, or nothing.

        Without a token the Host must be this machine's: a page of another site whose name was pointed here sends its
        own. A browser says in Origin which page asks; it must be ours. Programs send no Origin.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.token is None and not is_loopback(_split(f"//{host}").hostname or ""):  # a tunnel may have another port
            return "this server is for this machine only"
        if origin is not None and _split(origin).netloc != host:
            return "pages of other sites may not talk to this server"
        return ""


class Guard:
    """Refuses requests before anything reads them, and adds the headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reason = self._access.refusal(headers)
        if not reason:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            text = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": text})
            await send({"type": "http.response.body", "body": reason.encode()})


def token_of_user() -> str | None:
    """None if there is none; StreamError if it is short enough to guess."""
    token = read_token(TOKEN_VARIABLE)
    check_token(token)
    return token


def read_token(variable: str) -> str | None:
    """Of an environment variable, without the end of line that files of secrets have. ConfigError if HTTP cannot carry
    it; the token itself is in no message."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{variable} has a character that no HTTP header can carry", f"take another token: {_TOKEN}")
    return token or None


def check_token(token: str | None) -> None:
    if token is not None and len(token) < _MIN_TOKEN_LENGTH:
        raise StreamError(
            f"the token has {len(token)} characters, which is short enough to guess",
            f"use at least {_MIN_TOKEN_LENGTH}: {_TOKEN}",
        )


def check_host(host: str, token: str | None, setting: str = "--host") -> None:
    """ConfigError if other machines could connect without a token; `setting` is where the host was written."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{setting} {host} lets other machines move the robot, and there is no token",
            EXPORT_TOKEN,
        )


def host_of_this_machine(host: str) -> str:
    """What programs on this machine connect to: a server that listens everywhere is not at that address."""
    return _LOOPBACK_OF.get(host, host)


def page_url(host: str, port: int) -> str:
    """For a browser on this machine."""
    host = host_of_this_machine(host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(url: str) -> SplitResult:
    """Without a host if it is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending
