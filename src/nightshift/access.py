"""Who may talk to an HTTP server: by token, by Host against DNS rebinding, by Origin against pages of other sites."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nightshift.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_VARIABLE = "NIGHTSHIFT_TOKEN"
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
        if self.token is None and not is_loopback(_hostname(host)):
            return "this server is for this machine only"
        if origin is not None and urlsplit(origin).netloc != host:
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


def check_host(host: str, token: str | None) -> None:
    """ConfigError if other machines could connect without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines move the robot, and there is no token",
            f'export {TOKEN_VARIABLE}=$(python -c "import secrets; print(secrets.token_hex())")',
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """Without the port: a tunnel may have another one."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending
