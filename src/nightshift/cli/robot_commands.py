"""The commands `nightshift robot …`: serve a simulator as a robot, check a server, stop and free a robot."""

from __future__ import annotations

import http.client
import socket
from concurrent.futures import ThreadPoolExecutor

import yaml
from rich.text import Text

from nightshift import config, envs
from nightshift.access import read_token
from nightshift.cli.commands import enter
from nightshift.envs.robot.client import TOKEN_VARIABLE, fetch_description
from nightshift.envs.robot.messages import Description
from nightshift.envs.robot.people import KINDS, FolderPerson
from nightshift.envs.robot.suite import NAME as ROBOT
from nightshift.errors import ConfigError, SimulatorError, StatesNotDrawn
from nightshift.project import paths
from nightshift.robot_server.conformance import CHECKS, READS_ONLY, Result, run_checks
from nightshift.robot_server.probe import Probe
from nightshift.telemetry.console import console

_TIMEOUT_S = 10.0
_HORIZON = 200
_PROTOCOL = "openvla-oft"
"""For the section of a server that is no simulator of ours; a person sets the horizon."""


def serve(suite: str, tasks: list[str], address: tuple[str, int], watchdog_s: float) -> None:
    """Until interrupted. Cameras and protocol are those of params.yaml."""
    from nightshift.robot_server import app
    from nightshift.robot_server.controller import Controller
    from nightshift.robot_server.simulated import SimulatedArm

    if suite == ROBOT:
        raise ConfigError("the suite robot is a robot server already", "serve simulators: nightshift env list")
    root = enter()
    token = read_token(TOKEN_VARIABLE) or ""
    app.check_address(*address, token)
    chosen = config.load(root / paths.PARAMS).env
    env = chosen.model_copy(update={"suite": suite, "tasks": tuple(tasks), "robot": None})
    horizon, *others = set(envs.horizons(env).values())
    if others:
        raise ConfigError(
            f"by the protocol {env.protocol} these tasks of {suite} have different horizons, and a robot has one",
            "choose tasks of one published suite with --task, or write a number in env.horizon of params.yaml",
        )
    with ThreadPoolExecutor(1) as thread:
        try:
            arm = thread.submit(SimulatedArm, env, watchdog_s=watchdog_s).result()
        except StatesNotDrawn as error:
            raise ConfigError(
                error.what,
                f"in this clone set env.suite: {suite} and env.tasks in params.yaml, run nightshift stage states, and "
                "serve again",
            ) from error
        url = url_of(*address)
        console.print(f"{arm.description.name} is a robot at {url}; in params.yaml of the client:\n")
        console.print(Text(snippet(url, arm.description, horizon, env.protocol)), soft_wrap=True)
        try:
            app.serve(Controller(arm, token=token), thread, address, token)
        except KeyboardInterrupt:
            console.print("stopped")
        finally:
            thread.submit(arm.close)


def url_of(host: str, port: int) -> str:
    """Where a client finds a server that listens there."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check(url: str, *, move: bool) -> None:
    """What a server does wrong; SimulatorError if it does. Without `move` nothing is sent that could move one."""
    results = []
    for result in run_checks(Probe(url, _TIMEOUT_S), CHECKS if move else READS_ONLY):
        results.append(result)
        _print(result)
    failed = [result.name for result in results if not result.passed]
    if failed:
        raise SimulatorError(
            f"{url} fails {len(failed)} of {len(results)} checks: {', '.join(failed)}",
            "docs/robot_protocol.md says what each endpoint has to do",
        )
    left_out = "" if move else "; the robot is stopped now, and checks that command it were left out: --move"
    words = f"\n{url} passes {len(results)} checks{left_out}. For params.yaml, horizon and limits are yours:\n"
    console.print(words, soft_wrap=True)
    described = fetch_description(url, _TIMEOUT_S)
    console.print(Text(snippet(url, described, _HORIZON, _PROTOCOL)), soft_wrap=True)


def stop(url: str) -> None:
    """By a person: the robot stays stopped until it is released."""
    _post(url, "stop", b'{"reason":"a person said so","latched":true}')
    console.print("stopped; nightshift robot release frees it")


def release(url: str) -> None:
    _post(url, "release", b"{}")
    console.print("released: the next session may clear the error and move it")


def answer(kind: str, word: str) -> None:
    """To what the run asks a person; without words, show what it asks."""
    enter()
    person = FolderPerson()
    if not kind:
        _show_question(person)
    elif kind not in KINDS or word not in ("yes", "no"):
        raise ConfigError(f"{kind} {word} is no answer", f"answer {' or '.join(KINDS)}, then yes or no")
    else:
        words = person.reply(kind, word == "yes")
        console.print(Text(f"{words} {word}"), soft_wrap=True)


def page(host: str, port: int) -> None:
    """Serve a page that asks what a run asks, until Ctrl-C."""
    from nightshift import access
    from nightshift.teleop.board import open_board

    token = access.token_of_user()
    access.check_host(host, token)
    enter()
    server = open_board(access.Access(token), (host, port))
    console.print(f"{access.page_url(host, server.port)}  asks what a run asks; Ctrl-C ends", soft_wrap=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        console.print("stopped")


def _show_question(person: FolderPerson) -> None:
    asked = person.question()
    if asked is None:
        console.print("no question is open")
        return
    console.print(Text(str(asked["words"])), soft_wrap=True)
    console.print(Text(f"nightshift robot answer {asked['kind']} yes", style="cyan"))


def snippet(url: str, described: Description, horizon: int, protocol: str) -> str:
    """The section env of params.yaml for a server, with its own limits to be narrowed."""
    limits = described.limits
    scale = described.action_scale or (0.02, 0.1)
    robot = {
        "url": url,
        "description": described.digest,
        "scale": {"position": scale[0], "rotation": scale[1]},
        "limits": {
            "box_low": list(limits.box_low),
            "box_high": list(limits.box_high),
            **{
                name: getattr(limits, name) for name in ("max_turn", "linear_speed", "angular_speed", "force", "torque")
            },
        },
        "deadline_s": min(described.command_age_s, described.watchdog_s) / 2,
        "attempts": 2,
        "reset_deadline_s": 60.0,
        "image_age_s": 0.2,
        "reset": "script" if "init_states" in described.capabilities else "person",
        "success": "server" if "success" in described.capabilities else "person",
        "answer_within_s": 600.0,
    }
    section = {
        "suite": ROBOT,
        "tasks": [task.name for task in described.tasks],
        "protocol": protocol,
        "horizon": horizon,
        "cameras": {"names": list(described.cameras), "size": "auto", "shadows": True},
        "robot": robot,
    }
    return yaml.safe_dump({"env": section}, sort_keys=False, default_flow_style=None)


def _print(result: Result) -> None:
    mark, style = ("✔", "green") if result.passed else ("✘", "bold red")
    console.print(Text.assemble((mark, style), f" {result.name}: {result.about}"), soft_wrap=True)
    if not result.passed:
        for label, words in (("sent", result.sent), ("expected", result.expected), ("came", result.came)):
            console.print(Text(f"    {label:<9}{words}"), soft_wrap=True)


def _post(url: str, endpoint: str, body: bytes) -> None:
    try:
        status, data = Probe(url, _TIMEOUT_S).post(endpoint, body)
    except ConfigError as error:
        raise ConfigError(
            error.what, f"press the robot's own stop button if it moves; then {error.next_step}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise SimulatorError(
            f"no robot server answers at {url}: {error!r}", "press the robot's own stop button if it moves"
        ) from error
    if status != http.client.OK:
        raise SimulatorError(f"{url} refuses /{endpoint}: {data[:200]!r}", "press the robot's own stop button")
