"""The site of the page: three files, pictures of the episodes, and a WebSocket for commands, state and frames."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Path, WebSocket, WebSocketDisconnect
from fastapi.responses import Response

from nightshift.access import Access, Guard
from nightshift.envs.robot.people import FolderPerson
from nightshift.errors import ConfigError, DataError, SimulatorError
from nightshift.teleop import messages
from nightshift.teleop.hub import Hub, Page
from nightshift.teleop.library import Library
from nightshift.teleop.pilot import Pilot
from nightshift.teleop.session import Session, Setup

ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/teleop.css": ("teleop.css", "text/css; charset=utf-8"),
    "/teleop.js": ("teleop.js", "text/javascript; charset=utf-8"),
}
MOST_PAGES = 16
_HELLO_SECONDS = 10
_STOP_SECONDS = 5
_QUESTION_SECONDS = 0.2
_POLICY_VIOLATION, _TRY_AGAIN_LATER = 1008, 1013

Number = Annotated[int, Path(ge=0, lt=10**6)]


class Watched(Protocol):
    """What the pages show and steer: a session, or a policy while it is trained. Called by the server's thread."""

    @property
    def axes(self) -> int:
        """Numbers of a command."""
        ...

    def welcome(self) -> dict[str, Any]:
        """What a page needs to know once."""
        ...

    def episodes(self) -> dict[str, Any]: ...

    def state(self) -> dict[str, Any]:
        """Everything on the page that changes while an episode is played."""
        ...

    def submit(self, client: int, order: messages.Order) -> None:
        """Carry out what the pilot wants, soon."""
        ...


@dataclass(kw_only=True)
class Station:
    """What is watched, and those who are connected to it."""

    watched: Watched
    pilot: Pilot
    hub: Hub
    access: Access
    library: Library | None = None
    """Whose episodes the page lists; None: none are recorded here."""
    person: FolderPerson | None = None
    """Who is asked beside a robot; None: nobody."""
    _numbers: Any = field(default_factory=itertools.count)

    def next_page(self) -> Page:
        return Page(next(self._numbers), self.watched.welcome()["views"])


def create_app(station: Station) -> FastAPI:
    """The site. `Guard` goes around it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        station.hub.open(asyncio.get_running_loop())
        asking = asyncio.create_task(_ask(station))
        yield
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for path in ASSETS:
        app.get(path)(_asset(path))

    if station.library is not None:
        app.include_router(_pictures(station.library, station.access))

    @app.websocket("/socket")
    async def connected(websocket: WebSocket) -> None:
        await websocket.accept()
        if station.hub.count >= MOST_PAGES:
            await websocket.close(_TRY_AGAIN_LATER, f"{MOST_PAGES} pages are open already")
        elif await _says_hello(websocket, station.access):
            await _attend(websocket, station)
        else:
            await websocket.close(_POLICY_VIOLATION, "the token is missing or wrong")

    return app


async def _ask(station: Station) -> None:
    """Tell the pages whenever the run asks something else."""
    shown = _question(station)
    while True:
        await asyncio.sleep(_QUESTION_SECONDS)
        if (asked := _question(station)) != shown:
            shown = asked
            station.hub.tell(asked)


def _question(station: Station) -> dict[str, Any]:
    """What the run asks now; without an id it asks nothing."""
    asked = station.person.question() if station.person is not None else None
    return {"type": "question", **(asked or {"id": "", "kind": "", "words": ""})}


def _pictures(library: Library, access: Access) -> APIRouter:
    """Pictures of recorded episodes, by number: no request names a file."""

    def admit(authorization: Annotated[str, Header()] = "") -> None:
        if not access.admits_header(authorization):
            raise HTTPException(401, "the token is missing or wrong")

    router = APIRouter(dependencies=[Depends(admit)])

    @router.get("/episodes/{number}/thumbnail")
    def thumbnail(number: Number) -> Response:
        return _found(library.thumbnail(number), "image/jpeg")

    @router.get("/episodes/{number}/film")
    def film(number: Number) -> Response:
        return _found(library.film(number), "application/octet-stream")

    return router


def _found(content: bytes, kind: str) -> Response:
    if not content:
        raise HTTPException(404, "this episode has no pictures on this machine")
    return Response(content, media_type=kind)


def _asset(path: str) -> Any:
    name, kind = ASSETS[path]
    content = resources.files("nightshift.teleop").joinpath("static", name).read_bytes()

    async def asset() -> Response:
        return Response(content, media_type=kind)

    return asset


async def _says_hello(websocket: WebSocket, access: Access) -> bool:
    """Whether the first message brings the token in time."""
    try:
        hello = messages.parse(await asyncio.wait_for(websocket.receive_text(), _HELLO_SECONDS))
    except (TimeoutError, DataError, WebSocketDisconnect, KeyError):
        return False
    return isinstance(hello, messages.Hello) and access.admits(hello.token)


async def _attend(websocket: WebSocket, station: Station) -> None:
    """Serve one page until it is gone. A pilot's page that goes stops the robot at once."""
    page = station.next_page()
    watched = station.watched
    for message in (watched.welcome(), watched.episodes(), watched.state(), _question(station)):
        page.tell(json.dumps(message))
    station.hub.add(page)
    sending = asyncio.create_task(_send(websocket, page))
    try:
        while True:
            _receive(await websocket.receive_text(), page, station)
    except (WebSocketDisconnect, RuntimeError, KeyError):  # gone, gone while we sent, or not a text
        pass
    finally:
        station.pilot.release(page.number)
        station.hub.remove(page)
        sending.cancel()
        _tell_pilot(station)


async def _send(websocket: WebSocket, page: Page) -> None:
    while True:
        message = await page.next()
        await (websocket.send_bytes(message) if isinstance(message, bytes) else websocket.send_text(message))


def _receive(text: str, page: Page, station: Station) -> None:
    try:
        message = messages.parse(text)
    except DataError as error:
        _refuse(page, f"not understood: {error.what}")
        return
    match message:
        case messages.Seen():
            page.seen()
        case messages.Pilot():
            _claim(message, page, station)
        case messages.Release():
            station.pilot.release(page.number)
            _tell_controls(page, granted=False)
            _tell_pilot(station)
        case messages.Hello():
            pass
        case _ if not station.pilot.is_held_by(page.number):
            _refuse(page, "you are watching: take the controls first")
        case messages.Drive():
            _drive(message, page, station)
        case messages.Answer():
            _answer(message, page, station)
        case _:
            station.watched.submit(page.number, message)


def _claim(message: messages.Pilot, page: Page, station: Station) -> None:
    before = station.pilot.holder
    holder = station.pilot.claim(page.number, message.who)
    granted = holder.client == page.number
    _tell_controls(page, granted=granted)
    _tell_pilot(station)
    if not granted:
        _refuse(page, f"{holder.who} has the controls")
    elif before is not None and before.client != page.number:
        _tell_loss(station.hub.find(before.client), holder.who)


def _tell_loss(page: Page | None, who: str) -> None:
    """To the page that was silent for too long."""
    if page is not None:
        _tell_controls(page, granted=False)
        _refuse(page, f"you were silent, and {who} has taken the controls")


def _tell_pilot(station: Station) -> None:
    """To all pages: between two episodes nobody else tells them."""
    station.hub.tell(station.watched.state())


def _tell_controls(page: Page, *, granted: bool) -> None:
    page.tell(json.dumps({"type": "controls", "granted": granted}))


def _drive(message: messages.Drive, page: Page, station: Station) -> None:
    if len(message.axes) != station.watched.axes:
        _refuse(page, f"a command has {station.watched.axes} axes")
    else:
        station.pilot.drive(page.number, message)


def _answer(message: messages.Answer, page: Page, station: Station) -> None:
    if station.person is None:
        _refuse(page, "nothing is asked here")
        return
    try:
        station.person.reply_to(message.id, message.yes)
    except SimulatorError as error:
        _refuse(page, f"{error.what}: {error.next_step}")


def _refuse(page: Page, reason: str) -> None:
    page.tell(json.dumps({"type": "notice", "text": reason, "problem": True}))


class Server:
    """Serves the site until it is told to stop."""

    def __init__(self, station: Station, listening: socket.socket) -> None:
        self._listening = listening
        settings = uvicorn.Config(
            Guard(create_app(station), station.access),
            access_log=False,
            log_level="warning",
            ws_max_size=messages.LARGEST,
            ws_ping_interval=5,
            ws_ping_timeout=5,
            timeout_graceful_shutdown=_STOP_SECONDS,
            server_header=False,
        )
        self._uvicorn = uvicorn.Server(settings)

    def stop(self) -> None:
        self._uvicorn.should_exit = True

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def serve(self) -> None:
        """Blocks."""
        self._uvicorn.run(sockets=[self._listening])


class SessionServer(Server):
    """Runs the site and the session's thread until it is told to stop, or one of them fails."""

    def __init__(self, station: Station, session: Session, listening: socket.socket) -> None:
        super().__init__(station, listening)
        self._session = session
        self._thread = threading.Thread(target=session.run, name="teleop-session")
        self._error: BaseException | None = None
        station.hub.on_failure = self.fail

    def fail(self, error: BaseException) -> None:
        """End with this error; what fails later because of it is not told."""
        self._error = self._error or error
        self.stop()

    def run(self) -> None:
        """Blocks. The error of whatever failed is raised."""
        self._thread.start()
        try:
            self.serve()
        finally:
            self._session.close()
            self._thread.join()
        if self._error is not None:
            raise self._error


def open_server(
    setup: Setup, library: Library, access: Access, address: tuple[str, int], clock: Callable[[], float]
) -> SessionServer:
    """A server with a session of its own. It listens, and nothing runs yet; ConfigError if it cannot listen."""
    listening = listen(*address)
    hub, pilot = Hub(), Pilot(clock)
    session = Session(setup, library, pilot, hub, clock)
    person = FolderPerson() if setup.env.robot else None
    station = Station(watched=session, pilot=pilot, library=library, hub=hub, access=access, person=person)
    return SessionServer(station, session, listening)


def listen(host: str, port: int, next_step: str = "give another --port or --host") -> socket.socket:
    """Bound before a simulator is built: a port that is taken is known at once, and port 0 becomes a real one."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
            found.listen()
        except BaseException:
            found.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}", next_step) from None
    return found
