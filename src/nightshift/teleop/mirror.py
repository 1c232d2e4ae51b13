"""Pictures without delay for the robot: a second simulator in a thread of its own makes the same steps and draws them.

Software rendering takes longer than a control step. Because the same init state and actions give the same states bit
for bit, a mirror can fall behind, catch up with a few steps and draw the newest state, while the simulator that the
pilot moves never waits. The GL context belongs to this thread, so images for policies and for episodes are drawn here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Fleet
from nightshift.errors import NightshiftError, SimulatorError
from nightshift.types import Array

Image = NDArray[np.uint8]
SCENE = "scene"
"""The name of the view that simulators draw for people."""
SCENE_TURNS = 4
"""Of so many pictures one is of another view than the scene, while the robot moves."""
_JPEG_QUALITY = 80
_NICENESS = 2
_LANE = np.zeros(1, np.int64)
_ACTIVE = np.ones(1, np.bool_)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One picture of one view."""

    view: str
    step: int
    """Control steps since the reset."""
    time: float
    """When the simulator was in this state or a camera was asked, on the session's clock."""
    jpeg: bytes


@dataclass(frozen=True, kw_only=True)
class Development:
    """The pictures of an episode that ended."""

    images: Mapping[str, Image]
    """Recorded cameras, each [N, S, S, 3]."""
    film: Sequence[tuple[int, bytes]]
    """The frames of the scene that were shown, with their steps; the last state is among them."""


class Mirror:
    """`views` are drawn for people, one after the other; `upright` turns a camera's image as people expect it."""

    def __init__(
        self,
        views: Sequence[str],
        upright: Callable[[Image], Image],
        on_frame: Callable[[Frame], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._views = list(views)
        self._upright = upright
        self._on_frame = on_frame
        self._on_error = on_error
        self._changed = threading.Condition()
        self._events: deque[Callable[[], None]] = deque()
        self._pending: set[Future[Any]] = set()
        self._failure: NightshiftError | None = None
        self._is_closing = False
        self._fleet: Fleet | None = None
        self._init_state = 0
        self._step = 0
        self._time = 0.0
        self._undrawn: list[str] = []
        self._turn = 0
        self._film: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._run, name="teleop-mirror", daemon=True)
        self._thread.start()

    def show(self, fleet: Fleet) -> None:
        """Mirror this fleet of one simulator, which nobody else uses, from its next reset on."""
        self._put(lambda: self._take(fleet))

    def reset(self, init_state: int, time: float) -> None:
        self._put(lambda: self._restart(init_state, time))

    def step(self, action: Array, time: float) -> None:
        self._put(lambda: self._follow(action, time))

    def look(self, cameras: Sequence[str]) -> Future[Mapping[str, Image]]:
        """What these cameras show in the newest state, each [1, S, S, 3], as a policy sees it."""
        return self._answer(lambda: self._required().look(_LANE, cameras))

    def develop(self, actions: Array, cameras: Sequence[str]) -> Future[Development]:
        """The pictures of the episode that these actions [T, A] made since the last reset."""
        return self._answer(lambda: self._develop(actions, cameras))

    def close(self, fleets: Iterable[Fleet]) -> None:
        """End the thread, which closes these fleets first: what draws is freed by the thread that drew."""
        with self._changed:
            self._events.extend(fleet.close for fleet in fleets)
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, event: Callable[[], None]) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def _answer(self, ask: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def answer() -> None:
            try:
                future.set_result(ask())
            except Exception as error:  # noqa: BLE001 - raised by result()
                future.set_exception(error)
            self._pending.discard(future)

        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._pending.add(future)
            self._events.append(answer)
            self._changed.notify()
        return future

    def _run(self) -> None:
        _let_others_first()
        try:
            while self._catch_up():
                if self._undrawn:
                    self._draw(self._next_view())
        except Exception as error:  # noqa: BLE001 - the session ends with it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """This thread ends: what it was asked for, and is asked for from now on, fails at once."""
        failure = _sentence(error)
        with self._changed:
            self._failure = failure
            pending, self._pending = self._pending, set()
        self._on_error(failure)
        for future in pending:
            future.set_exception(failure)

    def _catch_up(self) -> bool:
        """Do what was asked for meanwhile; wait where there is nothing to do at all. False: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._undrawn or self._is_closing)
            events = list(self._events)
            self._events.clear()
        for event in events:
            event()
        return not self._is_closing

    def _take(self, fleet: Fleet) -> None:
        self._fleet, self._undrawn = fleet, []

    def _restart(self, init_state: int, time: float) -> None:
        self._required().reset("train", [init_state])
        self._init_state, self._step, self._time = init_state, 0, time
        self._film = []
        self._undrawn = list(self._views)

    def _follow(self, action: Array, time: float) -> None:
        unstable = self._required().step(action[None], _ACTIVE).unstable[0]
        self._step, self._time = self._step + 1, time
        self._undrawn = [] if unstable else list(self._views)

    def _required(self) -> Fleet:
        assert self._fleet is not None, "show comes first"
        return self._fleet

    def _next_view(self) -> str:
        """The scene has most of the turns, because the pilot steers by it; the other views share the rest."""
        others = [view for view in self._views if view != SCENE and view in self._undrawn]
        is_others_turn = self._turn % SCENE_TURNS == SCENE_TURNS - 1
        self._turn += 1
        if SCENE in self._undrawn and not (others and is_others_turn):
            return self._drawn_now(SCENE)
        return self._drawn_now(others[self._turn // SCENE_TURNS % len(others)])

    def _drawn_now(self, view: str) -> str:
        self._undrawn.remove(view)
        return view

    def _draw(self, view: str) -> None:
        image = self._picture(view)
        if image is None:
            return
        jpeg = to_jpeg(image)
        if view == SCENE:
            self._film.append((self._step, jpeg))
        self._on_frame(Frame(view=view, step=self._step, time=self._time, jpeg=jpeg))

    def _picture(self, view: str) -> Image | None:
        fleet = self._required()
        return fleet.render(0) if view == SCENE else self._upright(fleet.look(_LANE, [view])[view][0])

    def _develop(self, actions: Array, cameras: Sequence[str]) -> Development:
        if SCENE in self._undrawn:
            self._undrawn.remove(SCENE)
            self._draw(SCENE)
        return Development(images=self._recorded(actions, cameras) if cameras else {}, film=list(self._film))

    def _recorded(self, actions: Array, cameras: Sequence[str]) -> Mapping[str, Image]:
        fleet = self._required().sibling()
        fleet.reset("train", [self._init_state])
        shown = [fleet.look(_LANE, cameras)]
        for action in actions:
            unstable = fleet.step(action[None], _ACTIVE).unstable[0]
            shown.append(shown[-1] if unstable else fleet.look(_LANE, cameras))
        return {camera: np.concatenate([images[camera] for images in shown]) for camera in cameras}


def _let_others_first() -> None:
    """The pilot's simulator and the server come before pictures. Linux has a niceness for every thread; threads that
    draw for this one inherit it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _sentence(error: Exception) -> NightshiftError:
    if isinstance(error, NightshiftError):
        return error
    failure = SimulatorError(f"the simulator that draws the pictures failed: {error!r}", "run nightshift teleop again")
    failure.__cause__ = error
    return failure


def to_jpeg(image: Image) -> bytes:
    options = [int(cv2.IMWRITE_JPEG_QUALITY), _JPEG_QUALITY]
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2BGR), options)
    assert done
    return encoded.tobytes()
