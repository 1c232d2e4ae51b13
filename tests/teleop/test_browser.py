"""A scripted user in a real browser: demos, a policy that is taken over, a failure, a reload in the middle."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from nightshift import config
from nightshift.data.episode_store import EpisodeStore
from nightshift.teleop.mirror import to_jpeg
from tests.browser import Page, browser
from tests.robots import parts as robots
from tests.teleop.parts import FULL_STEP, Rig, assert_replays, stored, straight
from tests.teleop.serving import Served, served, until

pytestmark = pytest.mark.usefixtures("project")
TOKEN = "0123456789abcdef0123456789abcdef"
SPEED = np.float32(0.35)
"""Of the slider as the page opens."""
MOVES = {"KeyW": (0, -1), "KeyS": (0, 1), "KeyA": (1, -1), "KeyD": (1, 1), "KeyR": (2, 1), "KeyF": (2, -1)}


def enter(page: Page, at: Served, width: int) -> None:
    """Through an empty page: what the page of another test's server complains of is not about this one."""
    page.visit("about:blank", width)
    page.evaluate("0")
    page.visit(at.url, width)
    page.wait("welcome !== null")


class User:
    """Presses keys and clicks buttons. A control step is made when the page has sent what the user wants."""

    def __init__(self, page: Page, at: Served) -> None:
        self.page = page
        self.rig: Rig = at.rig
        self.expected: list[list[float]] = []
        """The actions that this user has made, of the episode so far."""
        enter(page, at, 1440)

    def fly(self, who: str) -> None:
        self.page.evaluate(f"document.getElementById('who').value = '{who}'")
        self.page.click("#controls")
        until(lambda: self.rig.pilot.holder is not None)
        self.page.wait("isPilot")

    def press(self, code: str) -> None:
        """A shortcut, whose order the session has when this returns."""
        self.page.wait(f"!document.getElementById(SHORTCUTS[{code!r}]).disabled")
        self.page.key(code, down=True)
        self.page.key(code, down=False)
        until(lambda: bool(self.rig.session._orders))
        self.rig.session.tick()
        self.rig.settle()

    def ordered(self) -> list[str]:
        """What the page has ordered and nobody has carried out; this does. Messages arrive in the order of sending."""
        seq = self.page.evaluate("drive(), sequence")
        until(lambda: self._seq() >= seq)
        kinds: list[str] = [order.type for _, order in self.rig.session._orders]
        self.rig.session.tick()
        return kinds

    def start_after_reset(self, words: str) -> None:
        """Start an episode on a robot, whose reset waits until the page has said that the scene is back."""
        pressing = threading.Thread(target=self.rig.session.tick)
        self.page.wait("!document.getElementById('start').disabled")
        self.page.key("Enter", down=True)
        self.page.key("Enter", down=False)
        until(lambda: bool(self.rig.session._orders))
        pressing.start()
        self.page.wait("phaseInWords() === '? the robot waits for you' && !document.getElementById('yes').disabled")
        assert words in self.page.evaluate("document.getElementById('question').innerText")
        self.page.click("#yes")
        pressing.join()
        self.page.wait("phaseInWords() === '● armed: move to begin' && document.getElementById('question').hidden")

    def reach(self) -> None:
        """Along one axis after the other until the goal is reached."""
        for axis, keys in enumerate((("KeyW", "KeyS"), ("KeyA", "KeyD"), ("KeyF", "KeyR"))):
            way = self.rig.to_goal()[axis]
            self.hold(keys[int(way > 0)], round(abs(way) / (SPEED * FULL_STEP)))
        assert self.rig.phase == "ended"

    def hold(self, code: str, steps: int) -> None:
        """Hold a key for this many control steps, and let go."""
        axis, sign = MOVES[code]
        self.page.key(code, down=True)
        self._step(steps, axis, sign)
        self.page.key(code, down=False)
        until(lambda: self._wanted() == [0.0] * 6)

    def _step(self, steps: int, axis: int, sign: int) -> None:
        wanted = [float(sign) if index == axis else 0.0 for index in range(6)]
        until(lambda: self._wanted() == wanted)
        for _ in range(steps):
            before = self.rig.steps
            seq = self._seq()
            until(lambda seq=seq: self._seq() > seq)  # type: ignore[misc]
            if self.rig.phase == "running":
                self.rig.tick()
                self.expected.append([float(SPEED * np.float32(value)) for value in wanted])
                assert self.rig.steps == before + 1 or self.rig.phase != "running"
        self.rig.settle()

    def demonstrate(self) -> None:
        self.expected = []
        self.press("Enter")
        self.reach()

    def _wanted(self) -> list[float]:
        command = self.rig.pilot.command
        return list(command.axes) if command else []

    def _seq(self) -> int:
        command = self.rig.pilot.command
        return command.seq if command else -1


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


def test_a_user_records_three_demos_and_replays_them(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada Ünïcode")
        made = []
        for _ in range(3):
            user.demonstrate()
            made.append(user.expected)
        demos = stored(at.rig.library)
        assert [demo.actions[:-1, :6].tolist() for demo in demos] == made
        for demo in demos:
            assert demo.success and demo.provenance.source == "human" and demo.metadata["who"] == "Ada Ünïcode"
            assert_replays(demo, params.env)
        tab.wait("episodes.length === 3 && document.querySelectorAll('#episodes img[src^=blob]').length === 3")
        assert "100 %" in tab.evaluate("document.getElementById('counts').innerText")
        tab.click("#episodes button")
        tab.wait("document.getElementById('replay').open && document.getElementById('replay-picture').naturalWidth > 0")
        tab.evaluate("document.getElementById('replay').close()")
        assert tab.evaluate("pictures[0].naturalWidth") == 256
        assert tab.evaluate("document.getElementById('round-trip').textContent").endswith(" ms")
        assert not tab.complaints()
        ours = (at.url, at.url.replace("http", "ws"), f"blob:{at.url}")
        assert all(url.startswith(ours) for url in tab.requests()), "nothing comes from elsewhere"


def test_a_user_reloads_in_the_middle_marks_failure_and_undoes_it(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        user.press("Enter")
        user.hold("KeyD", 2)
        tab.reload()  # the robot stops, and the page gets its controls back
        tab.wait("isPilot && welcome !== null")
        until(lambda: user._seq() > 0)
        at.rig.session.tick()
        assert at.rig.phase == "paused" and at.rig.steps == 2
        tab.wait("state.phase === 'paused'")
        user.press("Enter")  # resumes, and the first step is without a key
        user.expected.append([0.0] * 6)
        user.hold("KeyA", 3)
        tab.key("KeyG", down=True)
        tab.key("KeyG", down=False)
        until(lambda: at.rig.pilot.command is not None and at.rig.pilot.command.gripper == "closed")
        at.rig.tick()
        user.expected.append([0.0] * 6)
        user.press("KeyN")
        tab.wait("episodes.length === 1")
        (failure,) = EpisodeStore(at.rig.library.failures)
        assert failure.actions[:-1, :6].tolist() == user.expected and not failure.success
        assert failure.actions[:-1, 6].tolist() == [-1.0] * 6 + [1.0]
        assert_replays(failure, params.env)
        tab.wait("thumbnails.size === 1")  # a request for it that comes after the undoing is not found
        user.press("KeyZ")
        tab.wait("episodes.length === 0")
        assert not list(EpisodeStore(at.rig.library.failures)) and not at.rig.library.successes.exists()
        assert not tab.complaints()


def test_a_user_takes_over_from_a_policy_and_hands_back(tab: Page, params: config.Params) -> None:
    with served(params, driver=straight()) as at:
        user = User(tab, at)
        user.fly("Grace")
        rig = at.rig
        user.press("Enter")  # the policy makes a step with this
        rig.tick()
        user.press("KeyT")  # the person's first: holding still
        user.expected = []
        user.hold("KeyD", 2)
        user.press("KeyT")  # and the policy again
        rig.tick()
        user.press("KeyY")
        tab.wait("episodes.length === 1")
        (episode,) = stored(rig.library)
        assert episode.interventions.tolist() == [False, False, True, True, True, False, False, False]
        assert episode.actions[3:5, :6].tolist() == user.expected
        first, second = np.float32(0.1), np.float32(0.11)
        assert episode.policy_actions[:-1, 0].tolist() == [first, second, first, first, first, first, second]
        assert episode.actions[:-1, 0].tolist() == [first, second, 0, 0, 0, first, second]
        assert_replays(episode, params.env)
        assert "3 taken over" in tab.evaluate("document.getElementById('episodes').innerText")
        assert not tab.complaints()


def test_a_held_key_ends_with_the_focus_of_the_window_and_a_button_can_be_held(
    tab: Page, params: config.Params
) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.key("KeyW", down=True)
        until(lambda: user._wanted()[:1] == [-1.0])
        tab.evaluate("window.dispatchEvent(new Event('blur'))")
        until(lambda: user._wanted() == [0.0] * 6)
        tab.key("KeyW", down=False)
        tab.wait("pictures[0].naturalWidth > 0")
        tab.drag("#views img", right=90)
        until(lambda: user._wanted()[1:2] == [1.0])
        tab.evaluate("window.dispatchEvent(new Event('blur'))")
        until(lambda: user._wanted() == [0.0] * 6)
        tab.move("#views img", right=91)
        tab.wait("held.size === 0")
        assert user._wanted() == [0.0] * 6, "the mouse moves on with its button down"
        tab.drop()
        tab.evaluate("document.querySelector('[data-move=\"5+\"]').focus()")
        for kind, down in (("keyDown", True), ("keyUp", False)):
            tab.evaluate(f"document.activeElement.dispatchEvent(new KeyboardEvent('{kind.lower()}', {{key: ' '}}))")
            until(lambda down=down: user._wanted()[5:] == [float(down)])  # type: ignore[misc]
        assert not tab.complaints()


def test_a_connection_that_drops_ends_a_drag_and_cmd_ends_a_held_key(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.wait("pictures[0].naturalWidth > 0")
        tab.drag("#views img", right=90)
        until(lambda: user._wanted()[1:2] == [1.0])
        tab.evaluate("socket.close()")
        until(lambda: at.rig.pilot.holder is None)
        tab.wait("isPilot")  # it connects again by itself
        until(lambda: user._seq() > 0)
        assert user._wanted() == [0.0] * 6, "nobody drags the new picture"
        tab.drop()
        tab.key("KeyW", down=True)
        until(lambda: user._wanted()[:1] == [-1.0])
        tab.evaluate("document.dispatchEvent(new KeyboardEvent('keyup', {key: 'Meta', code: 'MetaLeft'}))")
        until(lambda: user._wanted() == [0.0] * 6)
        assert not tab.complaints()


def test_enter_on_the_link_that_skips_to_the_robot_skips_and_orders_nothing(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.reload()  # the first Tab of a page goes to its first control
        tab.wait("isPilot && welcome !== null && !document.getElementById('start').disabled")
        tab.press("Tab")
        assert tab.evaluate("document.activeElement.className") == "skip"
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'cockpit'")
        assert user.ordered() == []
        tab.press("Enter")
        assert user.ordered() == ["start"]
        assert not tab.complaints()


def test_esc_stops_wherever_the_focus_is_and_closes_a_replay(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        user.demonstrate()
        tab.wait("episodes.length === 1")
        for field in ("init-state", "task", "who", "speed", "start"):
            user.press("Enter")
            tab.wait("state.phase === 'running'")
            tab.evaluate(f"document.getElementById('{field}').focus()")
            tab.press("Escape")
            assert user.ordered() == ["pause"], field
            assert at.rig.phase == "paused"
            tab.wait("state.phase === 'paused'")
            tab.evaluate("document.getElementById('cockpit').focus()")
        user.press("Enter")
        tab.wait("state.phase === 'running'")
        tab.click("#episodes button")
        tab.wait("document.getElementById('replay').open")
        tab.press("Escape")
        assert user.ordered() == ["pause"] and at.rig.phase == "paused"
        assert not tab.evaluate("document.getElementById('replay').open")
        assert not tab.complaints()


def test_esc_right_after_enter_stops_what_the_page_has_not_heard_of_yet(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.wait("!document.getElementById('start').disabled")
        tab.press("Enter")
        tab.press("Escape")
        assert user.ordered() == ["start", "pause"]
        assert at.rig.phase == "paused"
        assert not tab.complaints()


def test_a_server_of_another_source_at_the_same_address_shows_its_own_thumbnails(
    tab: Page, params: config.Params
) -> None:
    shown = "document.querySelector('#episodes img[src^=blob]')?.src || ''"
    with served(params, name="first") as at:
        user = User(tab, at)
        user.fly("Ada")
        user.demonstrate()
        tab.wait(shown)
        first = tab.evaluate(shown)
        tab.evaluate("window.before = episodes, sessionStorage.removeItem('piloting')")  # she only watches from now on
    with served(params, name="second", port=at.port) as other:
        other.rig.demonstrate()
        tab.wait(f"welcome.source === 'second' && episodes !== before && episodes.length === 1 && ({shown})")
        assert tab.evaluate(shown) != first
        assert tab.requests().count(f"{at.url}episodes/0/thumbnail") == 2


def test_a_page_asks_for_the_token_and_sends_it_in_no_url(tab: Page, params: config.Params) -> None:
    with served(params, token=TOKEN) as at:
        at.rig.demonstrate()
        tab.visit("about:blank", 1440)
        tab.visit(at.url, 1440)

        def give(token: str) -> None:
            tab.wait("!document.getElementById('token-form').hidden")
            tab.evaluate(f"document.getElementById('token').value = '{token}'")
            tab.click("#token-form button")

        give("a wrong one")
        tab.wait("document.getElementById('notice').textContent === 'the server refused this token'")
        assert tab.evaluate("welcome === null")
        give(TOKEN)
        tab.wait("welcome !== null && document.getElementById('token-form').hidden")
        tab.wait("document.querySelectorAll('#episodes img[src^=blob]').length === 1")
        tab.click("#episodes button")
        tab.wait("document.getElementById('replay-picture').naturalWidth > 0")
        asked = tab.requests()
        assert {f"{at.url}episodes/0/{kind}" for kind in ("thumbnail", "film")} <= set(asked)
        assert any(url.startswith("ws:") for url in asked) and not [url for url in asked if TOKEN in url]
        tab.reload()
        tab.wait("welcome !== null")
        assert tab.evaluate("document.getElementById('token-form').hidden"), "it is known until the tab is closed"
        assert not tab.complaints()


def test_a_user_goes_to_a_task_and_state_and_changes_speed_and_height(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.evaluate("document.getElementById('task').value = 'far'")
        tab.evaluate("document.getElementById('task').dispatchEvent(new Event('change'))")
        assert "reach far" in tab.evaluate("document.getElementById('instruction').textContent")
        for written, expected in (("7", 7), ("", 8)):
            tab.evaluate(f"document.getElementById('init-state').value = '{written}'")
            tab.wait("!document.getElementById('go').disabled")
            tab.click("#go")
            assert user.ordered() == ["reset"]
            tab.wait(f"state.phase === 'ready' && state.task === 'far' && state.init_state === {expected}")

        def speed() -> float | None:
            return command.speed if (command := at.rig.pilot.command) else None

        for key, expected_speed in (("+", 0.4), ("-", 0.35), ("-", 0.3)):
            tab.press(key)
            until(lambda expected=expected_speed: speed() == expected)  # type: ignore[misc]
        tab.evaluate("document.getElementById('speed').focus()")
        tab.press("ArrowRight")
        until(lambda: speed() == 0.35)
        assert tab.evaluate("document.getElementById('speed-value').textContent") == "35 %"
        tab.wait("pictures[0].naturalWidth > 0")
        for down, height in ((-100, 1.0), (100, -1.0)):
            tab.evaluate("performance.now = () => 1000, 0")  # time that the test moves
            tab.wheel("#views img", down)
            until(lambda height=height: user._wanted() == [0, 0, height, 0, 0, 0])  # type: ignore[misc]
            tab.evaluate("performance.now = () => 1000 + WHEEL_MS, 0")
            until(lambda: user._wanted() == [0.0] * 6)
        assert not tab.complaints()


def test_a_replay_plays_on_pauses_and_is_moved_by_its_slider(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        at.rig.demonstrate()
        later = 10**6  # so that the film stays at its second picture
        film = [(step, to_jpeg(np.zeros((8, width, 3), np.uint8))) for step, width in ((0, 16), (1, 32), (later, 48))]
        at.rig.library.keep_film(at.rig.library.entries[0], film)
        enter(tab, at, 1440)

        def shows(width: int, word: str) -> None:
            picture, button = "document.getElementById('replay-picture')", "document.getElementById('replay-play')"
            tab.wait(f"{picture}.naturalWidth === {width} && {button}.textContent === '{word}'")

        tab.wait("episodes.length === 1")
        tab.click("#episodes button")
        shows(32, "Pause")
        tab.click("#replay-play")
        shows(32, "Play")
        tab.evaluate("document.getElementById('replay-position').focus()")
        tab.press("ArrowRight")
        shows(48, "Play")
        tab.press("ArrowLeft")
        tab.press("ArrowLeft")
        shows(16, "Play")
        tab.click("#replay-play")
        shows(32, "Pause")
        tab.evaluate("film.frames[2].step = 2, 0")
        tab.click("#replay-play")
        tab.click("#replay-play")
        shows(48, "Again")
        tab.click("#replay-close")
        tab.wait("!document.getElementById('replay').open && film.frames.length === 0")
        assert not tab.complaints()


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_nothing_is_wider_than_the_screen_and_every_control_has_a_name(
    tab: Page, params: config.Params, width: int
) -> None:
    with served(params) as at:
        enter(tab, at, width)
        tab.wait("pictures[0].naturalWidth > 0")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        nameless = """[...document.querySelectorAll('button, input, select')].filter(e =>
            !(e.innerText || e.ariaLabel || e.labels && e.labels.length)).map(e => e.id)"""
        assert tab.evaluate(nameless) == []
        small = """[...document.querySelectorAll('main button')].filter(e => e.offsetParent &&
            (e.offsetHeight < 40 || e.offsetWidth < 36)).map(e => e.id || e.dataset.move)"""
        assert tab.evaluate(small) == [], "a finger needs room"
        assert not tab.complaints()


def pad(*, axes: dict[int, float] | None = None, buttons: tuple[int, ...] = ()) -> str:
    """What a browser says of a gamepad: these sticks off their centre, and these buttons held."""
    sticks = [(axes or {}).get(index, 0.0) for index in range(4)]
    keys = ", ".join(f"{{pressed: {on}, value: {int(on == 'true')}}}" for on in _held(buttons))
    found = f"{{id: 'Standard Gamepad', connected: true, axes: {sticks}, buttons: [{keys}]}}"
    return f"navigator.getGamepads = () => [null, {found}], 0"


def _held(buttons: tuple[int, ...]) -> list[str]:
    return ["true" if index in buttons else "false" for index in range(17)]


LEFT_X, LEFT_Y, RIGHT_X, RIGHT_Y = range(4)
A, B, LB, START, UP, LEFT = 0, 1, 4, 9, 12, 14


@pytest.mark.parametrize(
    ("axes", "buttons", "wanted"),
    [
        ({LEFT_X: 0.5, LEFT_Y: -1.0}, (), [-1.0, 0.5, 0, 0, 0, 0]),
        ({RIGHT_X: 0.25, RIGHT_Y: -0.75}, (), [0, 0, 0.75, 0, 0, -0.25]),
        ({}, (UP, LEFT), [0, 0, 0, 1.0, -1.0, 0]),
        ({LEFT_X: 0.05, RIGHT_Y: -0.1}, (), [0.0] * 6),
    ],
)
def test_the_sticks_of_a_gamepad_move_the_hand_and_trembling_does_not(
    tab: Page, params: config.Params, axes: dict[int, float], buttons: tuple[int, ...], wanted: list[float]
) -> None:
    with served(params) as at:
        user = User(tab, at)
        user.fly("Ada")
        tab.evaluate(pad(axes={LEFT_X: 1.0}))
        until(lambda: user._wanted() == [0, 1.0, 0, 0, 0, 0])
        tab.evaluate(pad(axes=axes, buttons=buttons))
        until(lambda: user._wanted() == wanted)
        assert "Standard Gamepad" in tab.evaluate("document.getElementById('gamepad').textContent")
        tab.evaluate("navigator.getGamepads = () => [], 0")  # unplugged
        until(lambda: user._wanted() == [0.0] * 6)
        assert not tab.complaints()


def test_a_gamepad_alone_starts_takes_over_grips_hands_back_and_stops(tab: Page, params: config.Params) -> None:
    with served(params, driver=straight()) as at:
        user = User(tab, at)
        rig = user.rig
        user.fly("Ada")

        def press(button: int) -> None:
            """Held over many frames: it counts once."""
            tab.evaluate(pad(buttons=(button,)))
            until(lambda: bool(rig.session._orders))
            seq = user._seq()
            until(lambda: user._seq() > seq + 2)
            assert len(rig.session._orders) == 1
            rig.tick()
            tab.evaluate(pad())

        press(START)
        assert (rig.phase, rig.steps) == ("running", 1)
        press(LB)
        assert rig.session.state()["in_control"] == "person"
        tab.wait("state.in_control === 'person'")
        tab.evaluate(pad(axes={LEFT_Y: 1.0}, buttons=(A,)))
        until(lambda: (command := rig.pilot.command) is not None and command.gripper == "closed")
        until(lambda: user._wanted()[0] == 1.0)
        rig.tick()
        tab.evaluate(pad())
        press(LB)
        press(B)
        assert rig.phase == "paused"
        recorder = rig.session._recorder
        assert recorder is not None
        driven = [decision.executed.tolist() for decision in recorder.decisions if decision.by_person]
        assert [float(SPEED), 0, 0, 0, 0, 0, 1.0] in driven
        assert not recorder.decisions[-1].by_person
        assert not tab.complaints()


COLOURLESS = """(() => {
    const rule = '* { color: black !important; background: white !important; border-color: black !important;'
        + ' outline-color: black !important; transition: none !important; caret-color: transparent !important }';
    const sheet = new CSSStyleSheet(); sheet.replaceSync(rule); document.adoptedStyleSheets = [sheet]; })(), 0"""


def test_without_any_colour_every_status_still_looks_different(tab: Page, params: config.Params) -> None:
    with served(params) as at:
        enter(tab, at, 1440)
        tab.evaluate("socket.onmessage = null, socket.onclose = null, 0")  # nothing changes but by this test
        tab.evaluate(COLOURLESS)
        phases = tab.evaluate("Object.keys(PHASES)")

        def shown(phase: str, more: str = "") -> bytes:
            tab.evaluate(f"setState({{...state, phase: '{phase}', step: 7, gripper: 'open', {more}}})")
            return tab.picture("#status")

        assert shown("paused") == shown("paused"), "the same status looks the same"
        looks = {phase: shown(phase) for phase in phases}
        looks["armed"] = shown("running", "awaits_motion: true")
        assert len(set(looks.values())) == len(looks)
        words = {phase: tab.evaluate(f"PHASES['{phase}']") for phase in phases}
        assert len(set(words.values())) == len(words), "and it reads different"

        def noticed(problem: str) -> bytes:
            tab.evaluate(f"notice('the same words', {problem})")
            return tab.picture("#notice")

        assert noticed("false") != noticed("true")
        button = "[data-move='5+']"

        def held(on: str) -> bytes:
            tab.evaluate(f'document.querySelector("{button}").classList.toggle("held", {on})')
            return tab.picture(button)

        assert held("false") != held("true")
        episode = "{number: 1, task: 'near', init_state: 1, steps: 5, intervened: 0, source: 'human', who: 'Ada'"

        def listed(success: str) -> bytes:
            tab.evaluate(f"episodes = [{episode}, success: {success}}}], listEpisodes()")
            return tab.picture("#episodes li")

        assert listed("true") != listed("false")


def test_a_user_records_a_demo_on_a_robot_whose_scene_is_put_back_and_whose_server_dies(
    tab: Page, params: config.Params
) -> None:
    with robots.faulty_server() as server:
        robot = robots.settings(server.url, server.arm.description, reset="person")
        on_robot = params.model_copy(update={"env": robots.robot_env(robots.FAKE, robot)})
        with served(on_robot) as at:
            user = User(tab, at)
            user.fly("Ada")
            tab.wait("phaseInWords() === '◇ not reset' && pictures[0].naturalWidth > 0")
            user.start_after_reset("Put everything at place 0 (train) for: reach near")
            user.reach()
            (demo,) = stored(at.rig.library)
            assert demo.actions[:-1, :6].tolist() == user.expected
            assert demo.provenance.source == "human" and demo.metadata["who"] == "Ada"
            vectors = {name: values for name, values in demo.observations.items() if name != "agentview"}
            assert_replays(dataclasses.replace(demo, observations=vectors), robots.FAKE)
            tab.wait("episodes.length === 1 && document.querySelectorAll('#episodes img[src^=blob]').length === 1")
            user.start_after_reset("Put everything at place 1 (train)")
            user.hold("KeyD", 1)
            tab.visit("about:blank", 1440)  # the tab is closed
            until(lambda: at.rig.pilot.holder is None)
            at.rig.session.tick()
            assert server.mode == "stopped" and at.rig.phase == "paused"
            enter(tab, at, 1440)
            tab.wait("isPilot && state.phase === 'paused'")
            server.is_reachable = False
            at.rig.clock.now += 1.0
            at.rig.session.tick()
            tab.wait("phaseInWords() === '◇ not reset'")
            told = tab.evaluate("document.getElementById('notice').textContent")
            assert "the episode of 1 steps is invalid and not kept: getstate was not answered" in told
            assert "No stop arrived: its watchdog has to hold the robot" in told
            assert len(at.rig.library.entries) == 1
            assert not tab.complaints()
            server.is_reachable = True
