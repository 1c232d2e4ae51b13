"""A person in a browser takes over from the policy that rlpd trains: over a real WebSocket, and in a real Chromium."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.access import TOKEN_VARIABLE
from nightshift.adapters.tracking import JsonlTracker
from nightshift.cli import doctor
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.robot.client import RobotClient, RobotFault
from nightshift.errors import ConfigError, RolloutError
from nightshift.interventions.base import Moment, PageSettings
from nightshift.interventions.browser import RETURN_SECONDS, BrowserIntervention
from nightshift.interventions.opening import InterventionSources, check_page, check_person
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.engine import ONE_AT_A_TIME
from nightshift.rollouts.local import LocalPool
from nightshift.teleop import messages
from nightshift.teleop.mirror import SCENE
from nightshift.teleop.pilot import DEAD_MAN_SECONDS
from nightshift.teleop.server import listen
from nightshift.types import Array, InterventionSettings, RolloutRequest, Scene, Task
from tests.browser import browser
from tests.conftest import REPOSITORY, choose, edit, nightshift
from tests.ports import free_port
from tests.robots.parts import FAKE, FaultyServer, faulty_server, robot_env, settings
from tests.rollouts.parts import policy
from tests.stages.test_rlpd import (
    clone,  # noqa: F401 - a fixture
    cloned,  # noqa: F401 - a fixture
    learn,
)
from tests.teleop.parts import Clock
from tests.teleop.serving import Visitor, until, visitor
from tests.teleop.test_command import flown

TASK = Task(suite="fake", name="near", language="reach it", index=0, suite_size=2)
PAGES_OWN = (0.7, -0.3, 0.25, 0.0, 0.0, 0.0)
PERSON = np.array([*PAGES_OWN, -1.0], np.float32)
POLICY = np.full(7, 0.125, np.float32)
"""Its hand closes."""
HERE = ("127.0.0.1", 0)
PAGE = PageSettings(address=HERE)
IMPATIENT = PageSettings(address=HERE, patience_s=5.0)
TOKEN = "0123456789abcdef0123456789abcdef"
UNREACHABLE = SimpleNamespace(url="http://127.0.0.1:1")


def no_scene() -> Scene:
    raise AssertionError("a person sees the picture")


class Play:
    """A source whose episode a test plays step by step; time passes when the source waits."""

    def __init__(self, env: config.Env, page: PageSettings = PAGE, **options: Any) -> None:
        self.clock = Clock()
        self.drawn = 0
        self.drawing_s = 0.0
        """That a picture takes."""
        self.stands_still = False
        """Time, while the source waits."""
        self.on_wait: Callable[[], object] = lambda: None
        self.source = BrowserIntervention(env, page, None, clock=self.clock, sleep=self._sleep, **options)
        self.source._pace._is_changed_within = self._pass
        self.step = 0

    @property
    def port(self) -> int:
        return self.source.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def begin(self) -> None:
        self.step = 0
        self.source.begin(TASK)

    def override(self) -> Array | None:
        moment = Moment(step=self.step, observation={}, scene=no_scene, picture=self._draw, policy_action=POLICY)
        self.step += 1
        return self.source.override(moment)

    def by_person(self) -> bool:
        """Whether the next step is the person's; then it is what the page asked for."""
        action = self.override()
        assert action is None or action.tolist() == PERSON.tolist()
        return action is not None

    def order(self, page: Visitor, kind: str) -> None:
        """What the page asks for, and that has arrived when this returns."""
        page.say(type=kind)
        until(lambda: bool(self.source._orders))

    def drive(self, page: Visitor) -> None:
        before = self.seq
        page.drive(*PAGES_OWN)
        until(lambda: self.seq > before)

    def take_over(self, page: Visitor) -> None:
        """The page becomes the pilot, takes over, and drives at the step that follows."""
        assert page.fly("Ada")
        self.drive(page)
        self.order(page, "take_over")
        assert self.by_person()

    @property
    def seq(self) -> int:
        command = self.source._pilot.command
        return command.seq if command else 0

    @property
    def phase(self) -> str:
        return str(self.source.state()["phase"])

    def _draw(self) -> Any:
        self.drawn += 1
        self.clock.now += self.drawing_s
        return np.zeros((16, 16, 3), np.uint8)

    def _sleep(self, seconds: float) -> None:
        if not self.stands_still:
            self.clock.now += seconds
        self.on_wait()

    def _pass(self, seconds: float) -> bool:
        self._sleep(seconds)
        time.sleep(0.001)  # others have their turn
        return self.stands_still


@pytest.fixture
def play(params: config.Params) -> Iterator[Play]:
    with closing(Play(params.env)) as found:
        yield found


@contextmanager
def closing(found: Play) -> Iterator[Play]:
    try:
        yield found
    finally:
        found.source.close()


def test_a_page_takes_over_and_hands_back_and_acts_at_exactly_those_steps(play: Play) -> None:
    play.begin()
    assert not play.by_person() and play.drawn == 0, "nobody watches"
    with visitor(play) as page:
        assert page.hear("welcome")["mode"] == "train"
        assert page.fly("Ada")
        play.drive(page)
        taken = [play.by_person()]
        play.order(page, "take_over")
        taken += [play.by_person() for _ in range(3)]
        play.order(page, "hand_back")
        taken += [play.by_person() for _ in range(2)]
        assert taken == [False, True, True, True, False, False]
        page.hear_until("state", lambda state: state["interventions"] == 3 and state["step"] == 6)
        assert page.pictures and play.drawn == 6
        play.source.end()
        page.hear_until("state", lambda state: state["phase"] == "waiting")


def test_a_picture_is_as_old_as_the_request_for_it(play: Play) -> None:
    play.begin()
    play.drawing_s = 3.0
    with visitor(play) as page:
        page.hear("welcome")
        asked = play.clock.now
        play.override()
        assert play.source._hub._newest[SCENE].time == asked


def test_an_episode_begins_with_the_policy_whoever_drove_the_one_before(play: Play) -> None:
    play.begin()
    with visitor(play) as page:
        play.take_over(page)
        play.begin()
        assert not play.by_person()


def test_the_hand_stays_as_it_was_until_the_page_has_said_otherwise(play: Play) -> None:
    play.begin()
    play.override()
    with visitor(play) as page:
        page.fly("Ada")
        play.order(page, "take_over")
        action = play.override()
        assert action is not None
        assert action.tolist() == [0, 0, 0, 0, 0, 0, 1.0], "it holds still, and what the policy held"


def meanwhile(play: Play, *later: Callable[[], None]) -> bool:
    """One step that waits while these happen, one after the other, each when the source has paused."""
    found: list[bool] = []
    play.stands_still = True
    stepping = threading.Thread(target=lambda: found.append(play.by_person()))
    stepping.start()
    until(lambda: play.phase == "paused")
    for happen in later:
        assert not found
        happen()
    stepping.join(60)
    play.stands_still = False
    return found[0]


def test_a_closed_tab_stops_the_person_and_nobody_acts_until_another_pilot_resumes(play: Play) -> None:
    play.begin()
    with visitor(play) as page:
        play.take_over(page)
    until(lambda: play.source._pilot.holder is None)
    with visitor(play) as other:

        def come_back() -> None:
            assert other.fly("Bob")
            play.drive(other)
            other.say(type="hand_back")
            other.say(type="resume")

        assert not meanwhile(play, come_back), "the first step after it is the policy's, as Bob wants"
        assert not play.by_person()


def test_a_silent_page_stops_the_person_within_a_second(play: Play) -> None:
    play.begin()
    with visitor(play, close_timeout=0.1) as page:
        play.take_over(page)
        began = play.clock.now
        while play.clock.now - began <= DEAD_MAN_SECONDS:
            assert play.by_person()
            play.clock.now += 0.05
        assert play.clock.now - began < 1

        def speak_again() -> None:
            play.drive(page)
            assert play.phase == "paused", "it moves again only when it is told to"
            page.say(type="resume")

        assert meanwhile(play, speak_again)


def test_if_nobody_comes_back_the_policy_goes_on(play: Play) -> None:
    play.begin()
    with visitor(play) as page:
        play.take_over(page)
    until(lambda: play.source._pilot.holder is None)
    before = play.clock.now
    assert not play.by_person()
    assert RETURN_SECONDS < play.clock.now - before < RETURN_SECONDS + 1
    assert play.phase == "running"


class Waiting:
    """A pilot who has stopped the episode and whose page is in front: it repeats its command."""

    def __init__(self, play: Play) -> None:
        self._play, self._seq = play, 0
        self.axes = (0.0,) * 6
        play.source._pilot.claim(1, "Ada")
        self.speak()
        play.source.submit(1, messages.Pause(type="pause"))
        play.on_wait = self.speak

    def speak(self) -> None:
        self._seq += 1
        drive = messages.Drive(type="drive", seq=self._seq, axes=self.axes, gripper="open", speed=1.0)
        assert self._play.source._pilot.drive(1, drive)


def test_a_simulator_goes_on_when_the_pilot_who_stopped_it_presses_nothing_for_long(
    params: config.Params, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Play(params.env, IMPATIENT)) as play, visitor(play) as page:
        until(lambda: play.source._hub.count > 0)  # else it misses the first notice
        play.begin()
        Waiting(play)
        before = play.clock.now
        assert play.override() is None
        assert IMPATIENT.patience_s < play.clock.now - before < IMPATIENT.patience_s + 1
        assert play.phase == "running" and "no key for 5 s: the policy goes on" in caplog.text
        page.hear_until("notice", lambda notice: "after 5 s without a key of the pilot" in notice["text"])
        page.hear_until("notice", lambda notice: "no key for 5 s: the policy goes on" in notice["text"])


def test_a_key_of_the_pilot_makes_a_stop_last(params: config.Params) -> None:
    with closing(Play(params.env, IMPATIENT)) as play:
        play.begin()
        ada, began = Waiting(play), play.clock.now

        def press() -> None:
            ada.axes = (1.0, *ada.axes[1:]) if play.clock.now - began < IMPATIENT.patience_s else (0.0,) * 6
            ada.speak()

        play.on_wait = press
        assert play.override() is None
        assert 2 * IMPATIENT.patience_s <= play.clock.now - began < 2 * IMPATIENT.patience_s + 1


@pytest.mark.parametrize("changes", [{"robot": UNREACHABLE}, {}])
def test_a_stop_lasts_on_a_robot_and_where_patience_has_no_limit(
    params: config.Params, changes: dict[str, Any]
) -> None:
    page = IMPATIENT if changes else PAGE
    let_go = threading.Event()
    with closing(Play(params.env.model_copy(update=changes), page, is_let_go=let_go.is_set)) as play:
        play.begin()
        ada, began = Waiting(play), play.clock.now

        def wait() -> None:
            ada.speak()
            if play.clock.now - began > 10 * IMPATIENT.patience_s:
                let_go.set()

        play.on_wait = wait
        with pytest.raises(RolloutError, match="the run ended"):
            play.override()


def test_a_run_that_is_interrupted_does_not_wait_for_a_pilot_who_has_stopped_it(params: config.Params) -> None:
    let_go = threading.Event()
    with closing(Play(params.env, is_let_go=let_go.is_set)) as play, visitor(play) as page:
        play.begin()
        play.take_over(page)
        play.order(page, "pause")
        let_go.set()
        with pytest.raises(RolloutError, match="the run ended"):
            play.override()


def at_the_border(play: Play, page: Visitor) -> None:
    """The scene is put back and the next episode begins, after the pilot has resumed."""
    resting = threading.Thread(target=play.source.before_reset)
    resting.start()
    until(lambda: play.phase == "paused")
    page.say(type="resume")
    resting.join(60)
    assert play.phase == "waiting"
    play.begin()


def test_an_episode_that_breaks_off_while_a_person_drives_is_followed_by_another_when_the_pilot_resumes(
    play: Play,
) -> None:
    play.begin()
    with visitor(play) as page:
        play.take_over(page)
        play.stands_still = True
        at_the_border(play, page)
        play.stands_still = False
        assert not play.by_person(), "with the policy"


def test_a_stop_between_two_episodes_holds_before_the_scene_is_put_back_and_one_during_that_before_the_first_step(
    play: Play,
) -> None:
    play.begin()
    play.source.end()
    with visitor(play) as page:
        page.fly("Ada")
        play.drive(page)
        play.order(page, "pause")
        play.stands_still = True
        at_the_border(play, page)
        assert play.phase == "running"
        play.source.end()
        play.source.before_reset()
        play.order(page, "pause")
        play.begin()
        assert play.phase == "paused"


def test_an_episode_that_ended_is_followed_by_another_at_once(play: Play) -> None:
    play.begin()
    play.source.end()
    play.source.before_reset()
    assert play.phase == "waiting"


def test_on_a_robot_no_pause_ends_without_a_pilot(params: config.Params) -> None:
    let_go = threading.Event()
    robot = params.env.model_copy(update={"robot": UNREACHABLE})
    with closing(Play(robot, is_let_go=let_go.is_set)) as play:
        play.begin()
        with visitor(play) as page:
            play.take_over(page)
        until(lambda: play.source._pilot.holder is None)
        ended: list[RolloutError] = []

        def wait() -> None:
            with pytest.raises(RolloutError) as raised:
                play.override()
            ended.append(raised.value)

        stepping = threading.Thread(target=wait)
        began = play.clock.now
        stepping.start()
        until(lambda: play.clock.now - began > 3 * RETURN_SECONDS)
        assert play.phase == "paused"
        let_go.set()
        stepping.join(60)
        assert ended


@contextmanager
def on_robot(**more: Any) -> Iterator[tuple[Play, FaultyServer, RobotClient]]:
    """The page, a robot server, and a session that may move the robot."""
    with faulty_server() as server:
        chosen = settings(server.url, server.arm.description)
        client = server.client(chosen)
        client.open()
        client.make_ready()
        with closing(Play(robot_env(FAKE, chosen), **more)) as play:
            yield play, server, client


def is_made_ready(client: RobotClient) -> bool:
    """False if a stop came in the middle of it: the next try has a session of its own."""
    try:
        client.make_ready()
    except RobotFault:
        client.open()
        return False
    return True


def test_a_stop_reaches_a_robot_at_once_and_again_until_the_episode_is_paused() -> None:
    with on_robot() as (play, server, client), visitor(play) as page:
        page.fly("Ada")
        play.drive(page)
        play.source.before_reset()
        assert server.mode == "ready"
        play.order(page, "pause")  # during the reset
        until(lambda: server.mode == "stopped")
        until(lambda: is_made_ready(client))  # as the reset does that the stop came before
        until(lambda: server.mode == "stopped")
        play.begin()
        assert play.phase == "paused"
        until(lambda: not any(thread.name == "intervention-stop" for thread in threading.enumerate()))
        client.make_ready()
        assert server.mode == "ready", "a stop that was obeyed is over"


def test_a_stop_lasts_though_the_page_that_ordered_it_is_gone(play: Play) -> None:
    play.begin()
    play.source.end()
    with visitor(play) as page:
        page.fly("Ada")
        play.drive(page)
        play.order(page, "pause")
    until(lambda: play.source._pilot.holder is None)
    play.stands_still = True
    with visitor(play) as other:
        other.fly("Bob")
        play.drive(other)
        at_the_border(play, other)


def test_a_stop_that_is_lost_is_sent_again() -> None:
    with on_robot() as (play, server, _), visitor(play) as page:
        page.fly("Ada")
        play.drive(page)
        play.begin()
        server.is_reachable = False
        play.order(page, "pause")
        play.stands_still = True
        page.hear_until("notice", lambda notice: "has not confirmed the stop" in notice["text"])
        server.is_reachable = True
        until(lambda: server.mode == "stopped")


def test_a_closed_tab_stops_the_robot_of_whoever_drove_it() -> None:
    let_go = threading.Event()
    with on_robot(is_let_go=let_go.is_set) as (play, server, _):
        play.begin()
        with visitor(play) as page:
            play.take_over(page)
            assert server.mode == "ready"
        until(lambda: play.source._pilot.holder is None)
        let_go.set()
        with pytest.raises(RolloutError, match="the run ended"):
            play.override()
        assert server.mode == "stopped"


@pytest.mark.parametrize("gone", ["closed", "silent"])
def test_whoever_drove_and_is_gone_stops_the_robot_while_a_step_still_waits_for_its_server(gone: str) -> None:
    with on_robot() as (play, server, _):
        play.begin()
        with visitor(play) as page:
            play.take_over(page)
            assert server.mode == "ready"
            if gone == "silent":
                play.clock.now += 2 * DEAD_MAN_SECONDS
                until(lambda: server.mode == "stopped")  # and nobody asks for the next action
        until(lambda: server.mode == "stopped")


def test_the_page_of_training_needs_the_token(params: config.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    from websockets.exceptions import ConnectionClosed

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    sources = InterventionSources(params.env, PAGE)
    source: Any = sources.take(settings_of_browser())
    try:
        with visitor(source, token=TOKEN) as page:
            assert page.hear("welcome")["mode"] == "train"
        for wrong in ("", "wrong"):
            with pytest.raises(ConnectionClosed), visitor(source, token=wrong) as stranger:
                stranger.hear("welcome")
    finally:
        sources.close()


def test_what_is_rlpds_cannot_be_asked_for_and_others_watch(play: Play) -> None:
    play.begin()
    with visitor(play) as page, visitor(play) as other:
        page.fly("Ada")
        assert not other.fly("Bob")
        other.say(type="take_over")
        other.hear_until("notice", lambda notice: "you are watching" in notice["text"])
        play.order(page, "undo")
        assert not play.by_person()
        page.hear_until("notice", lambda notice: "the episodes are rlpd's" in notice["text"])


class StopWhen(JsonlTracker):
    """Ctrl-C when the person is done."""

    def __init__(self, path: Path, is_done: threading.Event) -> None:
        super().__init__(path)
        self._is_done = is_done

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        if self._is_done.is_set():
            raise KeyboardInterrupt


class Ada(threading.Thread):
    """A page that stops the policy, drives for some steps, stops, and hands back."""

    STEPS = 3

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.is_done = threading.Event()
        self.first = self.last = -1
        """Control steps of the episode that she drove in."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with flown(self.port) as page:
                assert page.fly("Ada")
                self._take_part(page)
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.error = error
        finally:
            self.is_done.set()

    def _take_part(self, page: Visitor) -> None:
        """Until she has driven as long as she wants in one episode: the policy may end one before."""
        last = None
        while last is None:
            first = self._stopped_at(page, lambda state: True)
            assert first is not None
            page.say(type="take_over")
            page.hear_until(
                "state", lambda state: state["in_control"] == "person", meanwhile=lambda _: self._drive(page)
            )
            page.say(type="resume")
            last = self._stopped_at(page, lambda state: state["interventions"] >= self.STEPS, driver="person")
            self.first, self.last = first, last or -1
        page.say(type="hand_back")
        page.say(type="resume")  # which counts as long as she is here
        page.hear_until("state", lambda state: state["phase"] != "paused", meanwhile=lambda _: self._drive(page))

    def _stopped_at(self, page: Visitor, wanted: Callable[[Mapping[str, Any]], bool], driver: str = "") -> int | None:
        """Play until it is as wanted, and stop before a step, whose number it is; None if the episode of this driver
        is over before."""
        found: list[int | None] = []

        def look(state: Mapping[str, Any]) -> bool:
            self._drive(page)
            if driver and state["in_control"] != driver:
                found.append(None)
            elif state["phase"] == "paused" and wanted(state):
                found.append(state["step"])
            elif state["phase"] == "paused":  # she was not heard of for a moment
                page.say(type="resume")
            elif state["phase"] == "running" and wanted(state):
                page.say(type="pause")
            return bool(found)

        page.hear_until("state", look)
        return found[0]

    def _drive(self, page: Visitor) -> None:
        page.drive(*PAGES_OWN)


def settings_of_browser() -> InterventionSettings:
    section = config.load(REPOSITORY / "params.yaml").rlpd.interventions
    numbers = section.model_dump(exclude={"takeover", "imitate"})
    return InterventionSettings(**{**numbers, "source": "browser"})


def test_ctrl_c_ends_a_run_that_a_pilot_has_stopped(params: config.Params) -> None:
    env = params.env.model_copy(update={"horizon": 600})
    request = RolloutRequest(
        task="far", split="train", init_state=3, controller="sample", seed=5, interventions=settings_of_browser()
    )
    port = free_port()
    pool = LocalPool(env, replace(ONE_AT_A_TIME, page=PageSettings(address=("127.0.0.1", port))))
    ended = threading.Event()

    def interrupt() -> None:
        ada = Ada(port)
        with flown(port) as page:
            page.fly("Ada")
            ada._stopped_at(page, lambda state: True)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1200):  # she stays, so that nobody's absence ends the pause
                if ended.wait(0.05):
                    break
                ada._drive(page)

    person = threading.Thread(target=interrupt)
    person.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(pool.run([request], snapshot(policy())))
    finally:
        ended.set()
        person.join()
        pool.close()


def test_an_episode_without_interventions_waits_for_a_pilot_who_has_stopped_it(params: config.Params) -> None:
    asked = RolloutRequest(
        task="far", split="train", init_state=3, controller="sample", seed=5, interventions=settings_of_browser()
    )
    port = free_port()
    pool = LocalPool(params.env, replace(ONE_AT_A_TIME, page=PageSettings(address=("127.0.0.1", port))))
    list(pool.run([asked], snapshot(policy())))  # opens the page
    source = pool._engine._interventions._person
    assert isinstance(source, BrowserIntervention)
    played: list[Any] = []
    validation = replace(asked, interventions=None)
    playing = threading.Thread(target=lambda: played.extend(pool.run([validation], snapshot(policy()))))
    try:
        with flown(port) as page:
            page.fly("Ada")
            page.say(type="pause")
            until(source._is_stop_ordered)
            playing.start()
            page.hear_until("state", lambda state: state["phase"] == "paused")
            assert not played
            page.say(type="resume")
            playing.join(60)
            assert len(played) == 1
    finally:
        pool.close()


def at_page(job: Job, port: int) -> Job:
    return replace(job, machine=job.machine.model_copy(update={"page": f"127.0.0.1:{port}"}))


@pytest.mark.usefixtures("clone")
def test_the_stage_rlpd_records_the_pages_action_where_the_page_drove_and_the_policys_own_beside_it(
    job: Callable[[str], Job], params: config.Params
) -> None:
    from nightshift.policies.device import resolve
    from nightshift.rollouts.opening import open_pool

    port = free_port()
    ada = Ada(port)
    given = at_page(job("rlpd"), port)
    long = params.model_copy(update={"env": params.env.model_copy(update={"horizon": 60})})
    pool = open_pool(given.machine, long.env, resolve("cpu"))
    given = replace(given, pool=lambda env: pool, tracker=StopWhen(job("rlpd").state / "metrics.jsonl", ada.is_done))
    ada.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            learn(given, long, steps=10**6, episodes_at_once=1, interventions={"source": "browser"})
    finally:
        ada.join()
        pool.close()
    assert ada.error is None
    *others, episode = [one for one in EpisodeStore(job("rlpd").state / "episodes") if one.interventions.any()]
    driven = range(ada.first, ada.last)
    assert len(driven) >= Ada.STEPS
    assert np.flatnonzero(episode.interventions).tolist() == list(driven)
    for one in (*others, episode):
        assert_is_whoever_drove(one)
    changed = (episode.actions[:-1] != episode.policy_actions[:-1].clip(-1, 1)).any(axis=1)
    assert np.array_equal(changed, episode.interventions[:-1]), "elsewhere the policy's own was executed"


def assert_is_whoever_drove(episode: Episode) -> None:
    for step in np.flatnonzero(episode.interventions).tolist():
        assert episode.actions[step, :6].tolist() == PERSON[:6].tolist()
        assert episode.policy_actions[step].tolist() != PERSON.tolist()


@pytest.mark.parametrize("page", ["127.0.0.1", "127.0.0.1:", ":8600", "127.0.0.1:65536", "127.0.0.1:-1", "here:http"])
def test_an_address_that_is_none_is_refused_when_params_are_read(params: config.Params, page: str) -> None:
    machine = {**params.machine.model_dump(), "page": page}
    with pytest.raises(ValueError, match="should be HOST:PORT with a port from 0 to 65535"):
        config.Machine.model_validate(machine)


def test_a_page_that_could_not_be_served_is_refused_before_the_first_stage(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    by_page = params.rlpd.interventions.model_copy(update={"source": "browser"})
    check_page(by_page, params.machine.model_copy(update={"page": "[::1]:0"}))
    with pytest.raises(ConfigError, match=r"machine.page: 0.0.0.0 lets other machines move the robot"):
        check_person(by_page, params.machine.model_copy(update={"page": "0.0.0.0:8600"}))
    with listen(*HERE) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be listened on") as raised:
            check_page(by_page, params.machine.model_copy(update={"page": f"127.0.0.1:{port}"}))
        check_person(by_page, params.machine.model_copy(update={"page": f"127.0.0.1:{port}"}))  # during a run
    assert raised.value.next_step == "change machine.page in params.yaml"
    with pytest.raises(ConfigError, match="one episode at a time"):
        check_person(by_page, params.machine.model_copy(update={"actors": 1}))


def test_plan_and_doctor_know_the_page_of_the_projects_own_run(project: Path, params: config.Params) -> None:
    with closing(Play(params.env)) as play:
        port = play.port
        address = f"127.0.0.1:{port}"
        edit(project, "machine", page=address)
        edit(project, "policy", head="tanh_gaussian")
        edit(project, "rlpd", interventions={**params.rlpd.interventions.model_dump(), "source": "browser"})
        choose(project, "rlpd")
        planned = nightshift(project, "plan")
        assert planned.returncode == 0, planned.stderr
        assert f"{address} is the page of this project's run (process {os.getpid()})" in planned.stdout
        (finding,) = doctor._page(config.load(project / "params.yaml"))
        assert (finding.about, finding.verdict) == (f"port {port}", "good")
        assert finding.found == f"the page of this project's run (process {os.getpid()})"
    with listen("127.0.0.1", port):
        planned = nightshift(project, "plan")
    assert planned.returncode == 1 and f"{address} cannot be listened on" in planned.stderr, "nor a run that ended"


def test_in_a_real_browser_a_person_takes_over_with_keys_and_hands_back(params: config.Params) -> None:
    with closing(Play(params.env)) as play, browser() as tab:
        play.begin()
        tab.visit(play.url, 1440)
        tab.wait("welcome !== null")
        assert tab.evaluate("document.getElementById('undo').hidden && document.getElementById('success').hidden")
        tab.evaluate("document.getElementById('who').value = 'Ada'")
        tab.click("#controls")
        tab.wait("isPilot")
        assert play.override() is None
        tab.wait("document.getElementById('phase').textContent === '▶ the policy drives'")
        tab.wait("gripper === 'closed'")  # the page has heard of that step
        tab.key("KeyD", down=True)
        until(lambda: _axes(play)[1:2] == [1.0])
        tab.key("KeyT", down=True)
        tab.key("KeyT", down=False)
        until(lambda: bool(play.source._orders))
        driven = [play.override() for _ in range(3)]
        assert [None if one is None else one[:6].tolist() for one in driven] == [[0, np.float32(0.35), 0, 0, 0, 0]] * 3
        assert [one is not None and one[6] == 1.0 for one in driven] == [True] * 3, "the hand keeps what it holds"
        tab.wait("document.getElementById('phase').textContent === '◆ you drive'")
        tab.key("KeyT", down=True)
        tab.key("KeyT", down=False)
        until(lambda: bool(play.source._orders))
        assert play.override() is None
        tab.wait("document.getElementById('phase-detail').textContent.includes('3 steps taken over')")
        tab.wait("pictures[0].naturalWidth > 0")
        assert not tab.complaints()


def test_in_a_real_browser_esc_stops_what_rlpd_plays_also_in_a_field_and_enter_on_the_link_resumes_nothing(
    params: config.Params,
) -> None:
    with closing(Play(params.env)) as play, browser() as tab:
        play.begin()
        tab.visit(play.url, 1440)
        tab.wait("welcome !== null")
        tab.evaluate("document.getElementById('who').value = 'Ada'")
        tab.click("#controls")
        tab.wait("isPilot && state.phase === 'running'")
        tab.evaluate("document.getElementById('who').focus()")
        tab.press("Escape")
        until(play.source._is_stop_ordered)
        play.begin()  # an episode whose stop was ordered before it
        assert play.phase == "paused"
        play.source._hub.tell(play.source.state())
        tab.wait("!document.getElementById('start').disabled")
        tab.evaluate("document.querySelector('.skip').focus()")
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'cockpit'")
        sequence = tab.evaluate("drive(), sequence")
        until(lambda: play.seq >= sequence)
        assert not play.source._orders
        assert not tab.complaints()


def _axes(play: Play) -> list[float]:
    command: messages.Drive | None = play.source._pilot.command
    return list(command.axes) if command else []


def test_the_action_space_of_the_page_is_the_suites(play: Play, params: config.Params) -> None:
    assert play.source.axes == envs.suite(params.env.suite).action_space.size - 1
