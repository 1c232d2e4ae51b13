"""A robot server over HTTP: the controller behind FastAPI, with a watchdog that needs no request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nightshift.errors import ConfigError
from nightshift.project import packages
from nightshift.robot_server.controller import IMMEDIATE, Controller

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

TICKS = 4
"""How often the watchdog looks within the time that it allows."""
LARGEST_BODY = 1 << 20
TOO_LONG = b'{"error":"bad_request","what":"the body is too long","seq":null}'
JSON = "application/json"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def make_app(controller: Controller, executor: ThreadPoolExecutor, watchdog_s: float) -> FastAPI:
    """`executor` has one thread: the arm's, to which a simulator's GL context belongs."""
    packages.require("fastapi", "a robot server is asked for", "serve the robot from another machine")
    from fastapi import FastAPI, Response

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.create_task(_tick(controller, watchdog_s / TICKS))
        yield
        ticking.cancel()
        controller.stop("the server ends")

    async def answer(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return Response(TOO_LONG, 413, media_type=JSON)
        endpoint = request.path_params["endpoint"]
        arguments = endpoint, body, request.headers.get("authorization", "")
        if endpoint in IMMEDIATE:  # a stop waits for no command
            status, content = controller.handle(*arguments)
        else:
            loop = asyncio.get_running_loop()
            status, content = await loop.run_in_executor(executor, controller.handle, *arguments)
        return Response(content, status, media_type=JSON)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/{endpoint}", answer, methods=["POST"])
    return app


def serve(controller: Controller, executor: ThreadPoolExecutor, watchdog_s: float, address: tuple[str, int]) -> None:
    """Until interrupted."""
    import uvicorn

    app = make_app(controller, executor, watchdog_s)
    uvicorn.run(app, host=address[0], port=address[1], log_level="warning", access_log=False, timeout_keep_alive=3600)


def check_address(host: str, port: int, token: str) -> None:
    """ConfigError before a simulator is built: an open address needs a token, and the port has to be free."""
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set",
            "set NIGHTSHIFT_ROBOT_TOKEN here and on the client, or serve on 127.0.0.1",
        )
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened on: {error}", "give another --port") from error


async def _body(request: Request) -> bytes | None:
    """None if it is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            return None
    return bytes(body)


async def _tick(controller: Controller, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        controller.check_watchdog()
