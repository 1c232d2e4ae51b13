"""A robot server over HTTP: the controller behind FastAPI, with a watchdog that needs no request."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nightshift.access import Access, check_token, is_loopback
from nightshift.envs.robot.messages import Refusal, dumps
from nightshift.errors import ConfigError
from nightshift.project import packages
from nightshift.robot_server.controller import IMMEDIATE, Controller

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

_log = logging.getLogger(__name__)

TICKS = 4
"""How often the watchdog looks within the time that it allows."""
LARGEST_BODY = 1 << 20
JSON = "application/json"
_STOPS_AT_ONCE = 8
"""An arm that blocks in one stop must not keep the next from it."""
_SECONDS_TO_END = 2


def make_app(controller: Controller, executor: ThreadPoolExecutor, token: str = "") -> FastAPI:
    """`executor` has one thread: the arm's, to which a simulator's GL context belongs."""
    packages.require("fastapi", "a robot server is asked for", "serve the robot from another machine")
    from asyncio import get_running_loop

    from fastapi import FastAPI

    access = Access(token or None)
    immediate = ThreadPoolExecutor(_STOPS_AT_ONCE)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with _watchdog(controller, controller.watchdog_s / TICKS):
            try:
                yield
            finally:
                _end(controller)
                immediate.shutdown(wait=False)

    async def answer(request: Request) -> Response:
        refusal = _refusal(access, request)
        if refusal is not None:
            return _refused(refusal)
        endpoint, body = request.path_params["endpoint"], await _body(request)
        if body is None and endpoint == "stop":
            body = b""  # stops, too, as any that cannot be read
        if body is None:
            return _refused(Refusal("too_long", f"the body has more than {LARGEST_BODY} bytes"))
        pool = immediate if endpoint in IMMEDIATE else executor  # a stop waits for no command
        authorization = request.headers.get("authorization", "")
        status, content = await get_running_loop().run_in_executor(
            pool, controller.handle, endpoint, body, authorization
        )
        return _response(content, status)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/{endpoint}", answer, methods=["POST"])
    return app


def serve(controller: Controller, executor: ThreadPoolExecutor, address: tuple[str, int], token: str = "") -> None:
    """Until interrupted. The arm is stopped however it ends."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Stop the arm before waiting for requests to end."""
            _end(controller)
            await super().shutdown(sockets)

    chosen = uvicorn.Config(
        make_app(controller, executor, token),
        host=address[0],
        port=address[1],
        log_level="warning",
        access_log=False,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=_SECONDS_TO_END,
    )
    try:
        Server(chosen).run()
    finally:  # a signal that uvicorn does not handle ends it without `shutdown`
        _end(controller)


def check_address(host: str, port: int, token: str) -> None:
    """Before a simulator is built: ConfigError if an open address has no token or the port is not free, StreamError if
    the token is short enough to guess."""
    if not is_loopback(host) and not token:
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set",
            "set NIGHTSHIFT_ROBOT_TOKEN here and on the client, or serve on 127.0.0.1",
        )
    check_token(token or None)
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened on: {error}", "give another --port") from error


def _end(controller: Controller) -> None:
    """Latched, so that no request that is still on its way moves the arm again."""
    controller.stop("the server ends", latched=True)


def _refusal(access: Access, request: Request) -> Refusal | None:
    """Web pages reach a server on this machine, too: they have an Origin, or cannot say that they send JSON."""
    reason = access.refusal(request.headers)
    if not reason and request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
        reason = f"the Content-Type has to be {JSON}"
    return Refusal("forbidden", reason) if reason else None


def _refused(refusal: Refusal) -> Response:
    return _response(dumps({"error": refusal.code, "what": refusal.what, "seq": None}), refusal.status)


def _response(content: bytes, status: int) -> Response:
    from fastapi import Response

    return Response(content, status, media_type=JSON)


async def _body(request: Request) -> bytes | None:
    """None if it is too long, or breaks off."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    with contextlib.suppress(ClientDisconnect):
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_BODY:
                return None
        return bytes(body)
    return None


@contextlib.contextmanager
def _watchdog(controller: Controller, seconds: float) -> Iterator[None]:
    """In a thread of its own: neither a slow arm nor a busy event loop delays it."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(seconds):
            try:
                controller.check_watchdog()
            except Exception:  # noqa: BLE001 - a watchdog goes on
                _log.exception("the watchdog failed; it looks again in %g s", seconds)

    watching = threading.Thread(target=watch, name="watchdog", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
