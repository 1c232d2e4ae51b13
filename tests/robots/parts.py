"""Robot servers to test with: real ones over HTTP, around simulated arms."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import uvicorn

from nightshift import config
from nightshift.envs.robot.client import RobotClient
from nightshift.envs.robot.messages import Description, RobotState
from nightshift.envs.robot.poses import Vector
from nightshift.envs.robot.suite import ROBOT
from nightshift.robot_server.app import make_app
from nightshift.robot_server.controller import Controller
from nightshift.robot_server.simulated import LIMITS, SCALE, SimulatedArm, _velocity

NO_CAMERAS = config.Cameras(names=(), size=32, shadows=False)
ONE_CAMERA = config.Cameras(names=("agentview",), size=32, shadows=False)
FAKE = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=12, cameras=ONE_CAMERA)
PATIENT_S = 60.0
"""No test depends on how fast the machine is."""


class ManualClock:
    """Time that passes when the test says so, and by a microsecond whenever it is asked for."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self._now += 1e-6
            return self._now

    now = __call__

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


def settings(url: str, described: Description, **changes: Any) -> config.Robot:
    """The section env.robot for a server, patient and with the server's own limits."""
    limits = {name: getattr(described.limits, name) for name in config.RobotLimits.model_fields}
    return config.Robot(
        **{
            "url": url,
            "description": described.digest,
            "scale": {"position": SCALE.position, "rotation": SCALE.rotation},
            "limits": limits,
            "deadline_s": PATIENT_S,
            "attempts": 2,
            "reset_deadline_s": PATIENT_S,
            "image_age_s": 0.5,
            "reset": "script",
            "success": "server",
            "answer_within_s": PATIENT_S,
            **changes,
        }
    )


def robot_env(simulated: config.Env, robot: config.Robot) -> config.Env:
    """The section env that plays on a robot server what `simulated` plays in process."""
    return simulated.model_copy(update={"suite": "robot", "robot": robot})


@contextlib.contextmanager
def served(simulated: config.Env, **changes: Any) -> Iterator[config.Env]:
    """The reference server on a free port, by uvicorn as `nightshift robot serve` runs it."""
    with ThreadPoolExecutor(1) as thread:
        arm = thread.submit(SimulatedArm, simulated, watchdog_s=PATIENT_S, limits=LIMITS).result()
        app = make_app(Controller(arm), thread)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = threading.Thread(target=server.run)
        serving.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield robot_env(simulated, settings(f"http://127.0.0.1:{port}", arm.description, **changes))
        finally:
            ROBOT.forget()
            server.should_exit = True
            serving.join()


Send = Callable[[int, bytes], None]
Misbehaviour = Callable[[str, int, bytes, Send], None]
"""What is done instead of sending the answer: endpoint, status, body, and how to send."""


def well_behaved(endpoint: str, status: int, body: bytes, send: Send) -> None:
    send(status, body)


class Trickle(bytes):
    """An answer that is sent byte by byte, each soon after the one before."""


class CutOff(bytes):
    """The part that is sent of an answer that was announced as longer."""


class FaultyServer:
    """A real HTTP server whose answers go through `misbehave`, which a test may set at any time."""

    def __init__(self, controller: Controller, arm: WatchedArm) -> None:
        self.controller, self.arm = controller, arm
        self.misbehave: Misbehaviour = well_behaved
        self.is_reachable = True
        """False: requests never arrive."""
        self.loses: Callable[[str], bool] = lambda endpoint: False
        """Whether this request never arrives."""
        self.clients: list[RobotClient] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.finished = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def client(self, chosen: config.Robot, clock: Any = None) -> RobotClient:
        """One that is closed when the server is."""
        self.clients.append(RobotClient(chosen, self.arm.description, clock))
        return self.clients[-1]

    @property
    def mode(self) -> str:
        return str(json.loads(self.controller.handle("getstate", b"{}")[1])["mode"])

    def close(self) -> None:
        self.finished.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(server: FaultyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            endpoint = self.path[1:]
            if not server.is_reachable or server.loses(endpoint):
                self.close_connection = True
                return
            with contextlib.suppress(ValueError):
                server.asked.append((endpoint, json.loads(body)))
            status, answer = server.controller.handle(endpoint, body, self.headers.get("Authorization", ""))
            try:
                server.misbehave(endpoint, status, answer, self._send)
            except OSError:
                self.close_connection = True

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + isinstance(body, CutOff)))
            self.end_headers()
            self.close_connection |= isinstance(body, CutOff)
            if not isinstance(body, Trickle):
                self.wfile.write(body)
                return
            for byte in body:
                self.wfile.write(bytes([byte]))
                server.finished.wait(0.02)

        def log_message(self, *_: Any) -> None:
            """Tests print nothing."""

    return Handler


class WatchedArm(SimulatedArm):
    """Counts what it is told, and has a gripper that is where it is sent, which the fake suite has not."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.told: list[str] = []
        self._opening = 0.5
        self.force, self.torque, self.velocity = np.zeros(3), np.zeros(3), np.zeros(6)
        self.compliance: dict[str, float] = {}
        super().__init__(*arguments, **more)

    def measure(self, cameras: Sequence[str]) -> RobotState:
        return replace(super().measure(cameras), **self._measured())

    def _measured(self) -> dict[str, Any]:
        """What a test has set; velocity of the simulator's own where it has set none."""
        moving = {"vel": self.velocity} if self.velocity.any() else {}
        return {"gripper_pos": self._opening, "force": self.force, "torque": self.torque, **moving}

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        self.told.append("move")
        super().move(target, gripper, action)

    def grip(self, opening: float) -> None:
        self._opening = opening
        super().grip(opening)

    def update_param(self, values: Mapping[str, float]) -> None:
        self.compliance.update(values)

    def hold(self) -> None:
        self.told.append("hold")

    def stop(self) -> None:
        self.told.append("stop")


class CompliantArm(WatchedArm):
    """With parameters of its controller, as a Franka has."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        announced = (*self._description.capabilities, "update_param")
        self._description = replace(
            self._description, capabilities=announced, compliance=("translational_stiffness", "damping")
        )


class TurningArm(CompliantArm):
    """Its hand turns as it is sent, which that of the fake suite does not."""

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        before = self._pose
        super().move(target, gripper, action)
        self._pose = np.concatenate([self._pose[:3], target[3:]])
        self._velocity = _velocity(before, self._pose)


class InterruptedArm(CompliantArm):
    """Its way to the rest joints lasts until a stop comes."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.is_moving, self.is_stopped = threading.Event(), threading.Event()
        super().__init__(*arguments, **more)

    def joint_reset(self) -> None:
        self.is_moving.set()
        assert self.is_stopped.wait(PATIENT_S)

    def stop(self) -> None:
        super().stop()
        self.is_stopped.set()


class BareArm(WatchedArm):
    """Without any extension."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._description = replace(self._description, capabilities=(), action_scale=None, observations={})


@contextlib.contextmanager
def faulty_server(
    simulated: config.Env = FAKE,
    clock: Callable[[], float] = time.monotonic,
    watchdog_s: float = PATIENT_S,
    make_arm: Callable[..., WatchedArm] = WatchedArm,
    token: str = "",
    **more: Any,
) -> Iterator[FaultyServer]:
    arm = make_arm(simulated, watchdog_s=watchdog_s, clock=clock, **more)
    server = FaultyServer(Controller(arm, clock=clock, token=token), arm)
    try:
        yield server
    finally:
        ROBOT.forget()
        server.misbehave = well_behaved
        for client in server.clients:
            client.close()
        server.close()
