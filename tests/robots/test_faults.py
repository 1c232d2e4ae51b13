"""A robot server that misbehaves over real HTTP: the episode is invalid, the robot stopped, nothing wrong kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.client import OK
from typing import Any

import pytest
import torch

from nightshift import config
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.robot.client import RobotFault
from nightshift.errors import SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import collect
from nightshift.telemetry.experience import INVALID
from nightshift.types import RolloutRequest
from tests.robots.parts import (
    FAKE,
    CutOff,
    FaultyServer,
    ManualClock,
    Misbehaviour,
    Send,
    Trickle,
    faulty_server,
    robot_env,
    settings,
    well_behaved,
)
from tests.robots.test_same_episodes import assert_same, play
from tests.stages.test_rlpd import (
    clone,  # noqa: F401 - a fixture
    cloned,  # noqa: F401 - a fixture
    history,
    learn,
)

REQUEST = RolloutRequest(task="near", split="train", init_state=4, controller="expert", seed=1)
SHORT_S = 2.0
"""For an answer that never comes: the server waits for the end of the test. Others have to come within it."""


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as started:
        yield started


def env_of(server: FaultyServer, **changes: Any) -> config.Env:
    return robot_env(FAKE, settings(server.url, server.arm.description, **changes))


def at_step(number: int, fault: Misbehaviour) -> Misbehaviour:
    """Misbehave from the pose command of this number on, and not at /stop."""
    seen = 0

    def misbehave(endpoint: str, status: int, body: bytes, send: Send) -> None:
        nonlocal seen
        seen += endpoint == "pose"
        if seen >= number and endpoint not in ("stop", "describe", "open", "clearerr", "reset"):
            fault(endpoint, status, body, send)
        else:
            send(status, body)

    return misbehave


def dies(_: str, __: int, ___: bytes, ____: Send) -> None:
    raise ConnectionAbortedError  # the handler ends, and the connection is closed without an answer


def hangs(server: FaultyServer) -> Misbehaviour:
    return lambda endpoint, status, body, send: void(server.finished.wait())


def trickles(_: str, status: int, body: bytes, send: Send) -> None:
    """Every byte comes in time, and the answer does not."""
    send(status, Trickle(body))


def breaks_off(_: str, status: int, body: bytes, send: Send) -> None:
    send(status, CutOff(body))


def void(_: object) -> None:
    """For a lambda that has to return nothing."""


def with_nan(_: str, status: int, body: bytes, send: Send) -> None:
    content = json.loads(body)
    if "pose" in content:
        content["pose"][0] = float("nan")
    send(status, json.dumps(content).encode())


def with_nan_observation(_: str, status: int, body: bytes, send: Send) -> None:
    send(status, re.sub(rb'"objects":\[[^,]+', b'"objects":[1e999', body))


def with_a_huge_number(_: str, status: int, body: bytes, send: Send) -> None:
    send(status, re.sub(rb'"time":[^,]+', b'"time":' + b"9" * 400, body))


def twice() -> Misbehaviour:
    """The second time when the client has read the first: in one packet with it, it would be thrown away."""
    sent: list[bytes] = []

    def misbehave(_: str, status: int, body: bytes, send: Send) -> None:
        for again in sent:
            send(status, again)
        sent[:] = [body]
        send(status, body)

    return misbehave


def out_of_order() -> Misbehaviour:
    held: list[bytes] = []

    def misbehave(_: str, status: int, body: bytes, send: Send) -> None:
        held.append(body)
        send(status, held[-2] if len(held) > 1 else body)

    return misbehave


def last_seconds_picture() -> Misbehaviour:
    """The first one for ever, as a camera that froze: its pixels under its stamp."""
    first: dict[str, Any] = {}

    def misbehave(_: str, status: int, body: bytes, send: Send) -> None:
        content = json.loads(body)
        for name, image in content.get("images", {}).items():
            content["images"][name] = first.setdefault(name, image)
        send(status, json.dumps(content).encode())

    return misbehave


def a_late_picture(_: str, status: int, body: bytes, send: Send) -> None:
    """One that was taken a second before the state, and never sent before."""
    content = json.loads(body)
    for image in content.get("images", {}).values():
        image["time"] -= 1.0
    send(status, json.dumps(content).encode())


def old_state() -> Misbehaviour:
    first: dict[str, Any] = {}

    def misbehave(_: str, status: int, body: bytes, send: Send) -> None:
        content = json.loads(body)
        if "time" in content:
            content["time"] = first.setdefault("time", content["time"])
        send(status, json.dumps(content).encode())

    return misbehave


FAULTS: dict[str, tuple[Callable[[FaultyServer], Misbehaviour], str]] = {
    "it dies": (lambda _: dies, "was not answered within"),
    "it hangs": (hangs, "was not answered within"),
    "it trickles": (lambda _: trickles, "was not answered within"),
    "it breaks off": (lambda _: breaks_off, "was not answered within"),
    "NaN in the state": (lambda _: with_nan, "a number is not finite"),
    "infinity in an observation": (lambda _: with_nan_observation, "a number is not finite"),
    "a number that no double holds": (lambda _: with_a_huge_number, "a number is not finite"),
    "an answer twice": (lambda _: twice(), "was answered as seq"),
    "answers out of order": (lambda _: out_of_order(), "was answered as seq"),
    "last second's picture": (lambda _: last_seconds_picture(), "is the one that was sent before"),
    "a late picture": (lambda _: a_late_picture, "s older than the state"),
    "an old state": (lambda _: old_state(), "an old state"),
    "no JSON": (lambda _: lambda endpoint, status, body, send: send(200, b"<html>"), "cannot be read"),
}
SLOW = ("it hangs", "it trickles")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_episode_as_invalid_and_stops_the_robot(
    name: str, server: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    fault, reason = FAULTS[name]
    quick = {"deadline_s": SHORT_S, "attempts": 1} if name in SLOW else {}
    server.misbehave = at_step(3, fault(server))
    (episode,) = play(env_of(server, **quick), [REQUEST])
    assert not episode.valid
    assert episode.length == 0
    assert server.mode == "stopped"
    assert reason in caplog.text


def test_after_a_fault_that_passes_the_episode_is_played_again_and_is_the_right_one(server: FaultyServer) -> None:
    faulty = at_step(3, with_nan)

    def once(endpoint: str, status: int, body: bytes, send: Send) -> None:
        if endpoint == "stop":
            server.misbehave = lambda _, status, body, send: send(status, body)
        faulty(endpoint, status, body, send)

    server.misbehave = once
    played = play(env_of(server), [REQUEST])
    assert "stop" in [endpoint for endpoint, _ in server.asked]
    assert_same(play(FAKE, [REQUEST]), played)


def lost(_: FaultyServer) -> Misbehaviour:
    return dies


def late(server: FaultyServer) -> Misbehaviour:
    """The answer is sent when the command has come a second time."""

    def misbehave(_: str, status: int, body: bytes, send: Send) -> None:
        while [asked for asked, __ in server.asked].count("pose") == 1:
            server.finished.wait(0.01)
        send(status, body)

    return misbehave


@pytest.mark.parametrize("fault", [lost, late])
def test_a_command_whose_answer_is_lost_or_late_is_sent_again_and_executed_once(
    server: FaultyServer, fault: Callable[[FaultyServer], Misbehaviour]
) -> None:
    def misbehave(endpoint: str, status: int, body: bytes, send: Send) -> None:
        is_first = [asked for asked, _ in server.asked].count("pose") == 1
        (fault(server) if endpoint == "pose" and is_first else well_behaved)(endpoint, status, body, send)

    server.misbehave = misbehave
    (episode,) = played = play(env_of(server, deadline_s=50 * SHORT_S, attempts=50), [REQUEST])
    poses = [content["seq"] for endpoint, content in server.asked if endpoint == "pose"]
    assert poses[0] == poses[1]
    assert server.arm.told.count("move") == episode.length
    assert_same(play(FAKE, [REQUEST]), played)


def test_without_a_network_the_watchdog_holds_the_robot() -> None:
    clock = ManualClock()
    with faulty_server(clock=clock, watchdog_s=2.0) as server:
        client = server.client(settings(server.url, server.arm.description), clock)
        client.open()
        client.command("clearerr")
        server.misbehave = dies
        with pytest.raises(RobotFault, match="was not answered"):
            client.command("open_gripper")
        server.arm.told.clear()
        server.controller._mode = "ready"  # as if /stop had never arrived
        server.controller.check_watchdog()
        assert server.arm.told == []
        clock.sleep(2.1)
        server.controller.check_watchdog()
        assert server.arm.told == ["hold"]
        assert server.mode == "held"


def test_after_a_network_that_failed_for_a_while_the_episode_is_played_again() -> None:
    """Not even /stop arrives: until the watchdog holds the robot, the lost session is the one that commands it."""
    clock = ManualClock()
    with faulty_server(clock=clock, watchdog_s=2.0) as server:
        client = server.client(settings(server.url, server.arm.description), clock)
        client.open()
        client.command("clearerr")
        server.is_reachable = False
        with pytest.raises(RobotFault, match="was not answered"):
            client.command("open_gripper")
        server.is_reachable = True
        assert server.mode == "ready"
        client.open()
        assert server.arm.told == ["hold"]
        assert client.command("clearerr").mode == "ready"


def without_seq(_: str, status: int, body: bytes, send: Send) -> None:
    content = json.loads(body)
    send(status, json.dumps({**content, "seq": None} if status != OK else content).encode())


REFUSALS = pytest.mark.parametrize("refusing", [well_behaved, without_seq])


@REFUSALS
def test_a_stop_by_a_person_ends_the_run_and_no_other_stop_is_sent(
    server: FaultyServer, refusing: Misbehaviour
) -> None:
    client = server.client(settings(server.url, server.arm.description))
    client.open()
    client.command("clearerr")
    server.controller.stop("a hand is in the way", latched=True)
    server.misbehave = refusing
    with pytest.raises(SimulatorError, match="a hand is in the way"):
        client.command("open_gripper")
    assert server.arm.told == ["stop"]


@REFUSALS
def test_a_client_whose_robot_was_taken_over_leaves_it_to_the_other(refusing: Misbehaviour) -> None:
    clock = ManualClock()
    with faulty_server(clock=clock, watchdog_s=2.0) as server:
        server.misbehave = refusing
        first, second = (server.client(settings(server.url, server.arm.description), clock) for _ in range(2))
        first.open()
        first.command("clearerr")
        clock.sleep(2.1)
        second.open()
        second.command("clearerr")
        with pytest.raises(SimulatorError, match="another client took the robot over"):
            first.command("open_gripper")
        assert not first.is_open
        assert server.arm.told == ["hold"]
        assert second.command("open_gripper").mode == "ready"


@pytest.mark.usefixtures("project")
def test_demos_have_no_episode_in_which_the_robot_failed(
    server: FaultyServer, job: Callable[[str], Job], params: config.Params
) -> None:
    env = env_of(server).model_copy(update={"tasks": ("near",)})
    bad: list[int] = []

    def misbehave(endpoint: str, status: int, body: bytes, send: Send) -> None:
        if endpoint == "pose":
            start = [content["init_state"] for asked, content in server.asked if asked == "reset"][-1]
            bad[:] = bad or [start]
            if start in bad:
                return with_nan(endpoint, status, body, send)
        return send(status, body)

    server.misbehave = misbehave
    collect.run(job("collect"), seed=0, env=env, states=params.states, collect=params.collect)
    kept = [demo.provenance.init_state for demo in EpisodeStore(paths.DEMOS)]
    assert len(kept) == params.collect.demos_per_task
    assert not set(kept) & set(bad)


def each_once(faults: Sequence[Misbehaviour], apart: int) -> Misbehaviour:
    """Every so many pose commands the next of these faults, and none after the last."""
    left, poses = list(faults), 0

    def misbehave(endpoint: str, status: int, body: bytes, send: Send) -> None:
        nonlocal poses
        poses += endpoint == "pose"
        is_due = endpoint == "pose" and bool(left) and poses % apart == 0
        (left.pop(0) if is_due else well_behaved)(endpoint, status, body, send)

    return misbehave


def another_seq(_: str, status: int, body: bytes, send: Send) -> None:
    content = json.loads(body)
    send(status, json.dumps({**content, "seq": content["seq"] - 1}).encode())


def no_json(_: str, __: int, ___: bytes, send: Send) -> None:
    send(200, b"<html>")


PASSING = (with_nan, with_nan_observation, with_a_huge_number, another_seq, no_json)


@pytest.mark.usefixtures("clone")
def test_what_rlpd_learns_under_faults_that_pass_is_what_it_learns_without_any(
    server: FaultyServer, job: Callable[[str], Job], params: config.Params
) -> None:
    undisturbed = learn(replace(job("rlpd"), state=job("rlpd").state / "calm"), in_env(params, FAKE))
    server.misbehave = each_once(PASSING, apart=23)
    disturbed = learn(job("rlpd"), in_env(params, env_of(server)))
    assert [endpoint for endpoint, _ in server.asked].count("stop") == len(PASSING)
    assert disturbed.keys() == undisturbed.keys()
    assert all(torch.equal(disturbed[name], tensor) for name, tensor in undisturbed.items()), "critics and all"


@pytest.mark.usefixtures("clone")
def test_an_episode_in_which_the_robot_failed_enters_no_buffer_of_rlpd_and_is_counted(
    server: FaultyServer, job: Callable[[str], Job], params: config.Params
) -> None:
    bad: list[tuple[str, int]] = []

    def misbehave(endpoint: str, status: int, body: bytes, send: Send) -> None:
        start = [(one["task"], one["init_state"]) for asked, one in server.asked if asked == "reset"][-1:]
        poses = [asked for asked, _ in server.asked].count("pose")
        if endpoint == "pose" and poses >= LATER and not bad:
            bad.extend(start)
        failing = endpoint == "pose" and start == bad
        (with_nan if failing else well_behaved)(endpoint, status, body, send)

    server.misbehave = misbehave
    learn(job("rlpd"), in_env(params, env_of(server)))
    kept = list(EpisodeStore(job("rlpd").state / "episodes"))
    assert bad and all((one.provenance.task, one.provenance.init_state) != bad[0] for one in kept)
    rounds = history()["iterations"]
    assert sum(one[INVALID] for one in rounds) > 0
    assert rounds[-1]["replay/decisions"] == sum(one.length - 1 for one in kept), "all that is learned from"


LATER = 100
"""Pose commands, after those of the first validation."""


def in_env(params: config.Params, env: config.Env) -> config.Params:
    return params.model_copy(update={"env": env})
