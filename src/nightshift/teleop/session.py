"""The session: one thread owns what the pilot moves, takes the newest command when its step is due, and records.

    loading ─▶ ready ─ start ─▶ running ◀─ pause, resume ─▶ paused
       ▲         ▲                 │ success, or marked        │ marked
       │         └── reset ◀─ ended ◀───── saving ◀────────────┘
       └─ start, reset ─ unset ◀─ a fault of the robot, from anywhere

Only `running` makes control steps, and only while the pilot's page is heard of: without a word for DEAD_MAN_SECONDS the
robot stops and the episode is paused. The first movement begins an episode, so that no demo begins with idle steps.
A robot is reset only when a pilot says so, so a session with one begins `unset`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from nightshift import config, envs
from nightshift.data.episode import NO_POLICY, Episode
from nightshift.data.rate import FPS
from nightshift.envs.base import Fleet, Suite, flipped
from nightshift.envs.protocols import find as find_protocol
from nightshift.envs.splits import split_training_states
from nightshift.errors import NightshiftError, SimulatorError
from nightshift.teleop import messages
from nightshift.teleop.driver import Driver
from nightshift.teleop.library import ORIGIN, Entry, Film, Library
from nightshift.teleop.mirror import SCENE, Development, Frame, Mirror
from nightshift.teleop.pacing import Pace
from nightshift.teleop.pilot import DEAD_MAN_SECONDS, Controls, Holder, Pilot, action_of, moves
from nightshift.teleop.plant import Plant, PlantFault
from nightshift.teleop.recorder import PERSON, Decision, Ending, Recorder
from nightshift.teleop.robot import Robot
from nightshift.teleop.simulators import Simulators
from nightshift.types import INSTRUCTION, Array, Observation, Provenance, Task

Phase = Literal["unset", "loading", "ready", "running", "paused", "saving", "ended"]
MAX_SECONDS = 300
"""Of control steps in an episode, after which a person has to say how it went."""
PICTURE_SIZE = 256


class Listener(Protocol):
    """Hears what happens, from any thread, and must not block."""

    def tell(self, message: Mapping[str, Any]) -> None:
        """JSON for every page. A newer message of the type "state" replaces an older one."""
        ...

    def show(self, frame: Frame) -> None: ...

    def fail(self, error: BaseException) -> None:
        """The session's thread or the mirror's has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a session plays with."""

    env: config.Env
    states: config.States
    commit: str
    driver: Driver | None = None

    @cached_property
    def suite(self) -> Suite:
        return envs.suite(self.env.suite)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        return {task.name: task for task in envs.tasks(self.env)}

    @cached_property
    def starts(self) -> dict[str, range]:
        """Init states by task. Demos start from training states only, and from none that validation uses."""
        return {name: split_training_states(task, self.states).train for name, task in self.tasks.items()}

    @cached_property
    def played(self) -> config.Env:
        """With all cameras, to look at, where params.yaml records none."""
        if self.env.cameras.names:
            return self.env
        cameras = {"names": tuple(self.suite.cameras), "size": PICTURE_SIZE, "shadows": False}
        return self.env.model_copy(update={"cameras": self.env.cameras.model_copy(update=cameras)})

    def make_fleet(self, task: Task) -> Fleet:
        fleet = envs.make_fleet(task, self.played)
        self.suite.sketch(fleet, films_alone=bool(self.env.cameras.names))
        return fleet

    @cached_property
    def views(self) -> list[str]:
        """What people see: the scene, and every camera that shows something else. A robot has its cameras alone."""
        if self.env.robot is not None:
            return list(self.env.cameras.names or self.suite.cameras)
        return [SCENE, *(name for name in self.played.cameras.names if name != "agentview")]


class Session:
    def __init__(
        self, setup: Setup, library: Library, pilot: Pilot, listener: Listener, clock: Callable[[], float]
    ) -> None:
        self._setup = setup
        self._library = library
        self._pilot = pilot
        self._listener = listener
        self._clock = clock
        self._orders: deque[tuple[int, messages.Order]] = deque()
        self._closing = threading.Event()
        self._phase: Phase = "loading"
        self._task = next(iter(setup.tasks.values()))
        self._init_state = setup.starts[self._task.name][0]
        self._observation: Observation = {}
        self._recorder: Recorder | None = None
        self._people: dict[str, None] = {}
        self._saving: tuple[Future[Development], Ending] | None = None
        self._executed_seq = -1
        self._gripper: messages.Gripper = "open"
        self._starter = -1
        self._is_at_rest = True
        """Nothing has moved since a reset, a stop or a while without steps, so that what is seen may be old."""
        self._is_complete = False
        """The episode is over, whether or not it is saved yet."""
        self._fault = ""
        """Why everything has to be reset, in words."""
        self._plant = self._open_plant()

    def _open_plant(self) -> Plant:
        """What the suite of params.yaml is: simulators, or a robot."""
        setup, suite, show = self._setup, self._setup.suite, self._listener.show
        if setup.env.robot is not None:
            seen = setup.driver.policy.observations if setup.driver else ()
            cameras = dict.fromkeys((*setup.views, *(name for name in seen if name in suite.cameras)))
            return Robot(setup.env, setup.views, list(cameras), show, self._clock, self._is_attended)
        flip = suite.flip(suite.drawing(find_protocol(setup.env.protocol), setup.played.cameras))
        mirror = Mirror(setup.views, lambda image: flipped(image, flip), show, self._listener.fail)
        return Simulators(setup.make_fleet, mirror, self._clock)

    @property
    def axes(self) -> int:
        """Numbers of a command: those of an action but the gripper's."""
        return self._setup.suite.action_space.size - 1

    def submit(self, client: int, order: messages.Order) -> None:
        """Carried out before the next control step, if `client` is the pilot then."""
        self._orders.append((client, order))

    def close(self) -> None:
        """Stop after the current control step."""
        self._closing.set()
        self._plant.let_go()

    def run(self) -> None:
        """Until `close`. The thread that runs this is the only one that moves anything."""
        try:
            try:
                self._play()
            finally:
                self._shut()
        except Exception as error:  # noqa: BLE001 - the server ends with it
            self._listener.fail(error)

    def _play(self) -> None:
        self.load()
        pace = Pace(1 / self._setup.suite.control_hz, self._pilot.is_changed_within, clock=self._clock)
        while not self._closing.is_set():
            pace.wait()
            self.tick()

    def load(self) -> None:
        """Open what is moved, and reset simulators; DataError if the source could not take what will be recorded."""
        self._plant.open(self._task)
        self._library.check(self._trial())
        self._init_state = self._next_state(self._task.name)
        if self._plant.needs_pilot:
            self._phase = "unset"
        else:
            self._reset(self._task.name, self._init_state)

    def tick(self) -> None:
        """One period of control."""
        while self._orders:
            client, order = self._orders.popleft()
            self._carry_out(client, order)
        self._finish_saving()
        try:
            if self._phase == "running":
                self._control()
            else:
                self._plant.idle()
        except PlantFault as fault:
            self._break_off(fault)
        self._listener.tell(self.state())

    def _shut(self) -> None:
        """The journal of an episode that is neither saved nor dropped stays: the next session says that it is lost."""
        try:
            if self._saving is not None:
                wait([self._saving[0]])
                self._finish_saving()
            if self._recorder is not None and not self._recorder.steps:
                self._recorder.forget()
        finally:
            self._plant.close()

    def state(self) -> dict[str, Any]:
        """Everything on the page that changes while an episode is played."""
        holder, recorder = self._pilot.holder, self._recorder
        return {
            "type": "state",
            "phase": self._phase,
            "awaits_motion": self._awaits_motion,
            "task": self._task.name,
            "init_state": self._init_state,
            "step": recorder.steps if recorder else 0,
            "interventions": recorder.interventions if recorder else 0,
            "pilot": holder.who if holder else "",
            "in_control": "person" if self._pilot.has_control else "policy",
            "gripper": self._gripper,
            "seq": self._executed_seq,
            "time": self._clock(),
        }

    def episodes(self) -> dict[str, Any]:
        """The list of episodes, newest first."""
        return {"type": "episodes", "episodes": [asdict(entry) for entry in reversed(self._library.entries)]}

    def welcome(self) -> dict[str, Any]:
        """What a page needs to know once."""
        starts = self._setup.starts
        driver = self._setup.driver
        return {
            "type": "welcome",
            "mode": "record",
            "source": self._library.name,
            "suite": self._setup.env.suite,
            "tasks": [
                {"name": name, "language": task.language, "states": [starts[name][0], starts[name][-1]]}
                for name, task in self._setup.tasks.items()
            ],
            "views": self._setup.views,
            "needs_pilot": self._plant.needs_pilot,
            "control_hz": self._setup.suite.control_hz,
            "axes": self.axes,
            "policy": driver.label if driver else "",
            "lost": self._fault or self._library.lost,
        }

    @property
    def _awaits_motion(self) -> bool:
        """Whether an episode has begun that the pilot has not moved in yet."""
        return self._phase == "running" and self._is_idle(self._pilot.command)

    def _is_idle(self, command: messages.Drive | None) -> bool:
        """Whether a step with this command would begin the episode with a person who does not move."""
        has_begun = self._recorder is not None and self._recorder.steps > 0
        return self._pilot.has_control and not has_begun and not moves(command)

    def _say(self, text: str, *, is_problem: bool = False) -> None:
        self._listener.tell({"type": "notice", "text": text, "problem": is_problem})

    def _is_attended(self) -> bool:
        """The pilot is there, and has not said Stop to what this thread waits for; any thread asks."""
        orders = list(self._orders)  # the server's thread adds to them
        has_said_stop = any(isinstance(order, messages.Pause) for client, order in orders if client == self._starter)
        return self._pilot.is_alive and self._pilot.is_held_by(self._starter) and not has_said_stop

    # Orders of the pilot

    def _carry_out(self, client: int, order: messages.Order) -> None:
        holder = self._pilot.holder
        if holder is None or holder.client != client:
            return  # the controls have gone to somebody else meanwhile
        try:
            self._obey(order, holder)
        except PlantFault as fault:
            self._break_off(fault)
        except NightshiftError as error:
            self._say(_words(error), is_problem=True)

    def _obey(self, order: messages.Order, holder: Holder) -> None:
        match order:
            case messages.Choose():
                self._choose(order, holder)
            case messages.Start():
                self._start(holder)
            case messages.Pause():
                self._pause("stopped")
            case messages.Resume():
                self._resume(holder)
            case messages.Mark():
                self._mark(success=order.success)
            case messages.Undo():
                self._undo()
            case messages.TakeOver() | messages.HandBack():
                self._hand_over(to_person=isinstance(order, messages.TakeOver))

    def _break_off(self, fault: PlantFault) -> None:
        """Nothing of an episode in the middle is kept: what it would show may be wrong. Orders that wait were meant
        for what is over now."""
        self._orders.clear()
        self._phase = "unset"
        lost = ""
        if self._recorder is not None and not self._is_complete:
            lost = f"the episode of {self._recorder.steps} steps is invalid and not kept: "
            self._recorder.forget()
            self._recorder = None
        self._fault = f"{lost}{_words(fault)}"
        self._say(self._fault, is_problem=True)
        if self._recorder is not None:
            self._say(f"the episode of {self._recorder.steps} steps was over before: it can still be marked")

    def _choose(self, order: messages.Choose, holder: Holder) -> None:
        if self._phase == "saving":
            raise SimulatorError("an episode is being saved", "wait for it")
        if order.task not in self._setup.tasks:
            raise SimulatorError(f"there is no task {order.task[:40]!r} here")
        states = self._setup.starts[order.task]
        state = self._next_state(order.task) if order.init_state is None else order.init_state
        if state not in states:
            raise SimulatorError(f"{order.task} has no training state {state}", f"choose {states[0]} to {states[-1]}")
        self._drop()
        self._reset_for(holder, order.task, state)

    def _next_state(self, task: str) -> int:
        """The next state after the current one that no success started from; the next one if there are all."""
        states = self._setup.starts[task]
        solved = {entry.init_state for entry in self._library.entries if entry.task == task and entry.success}
        start = self._init_state + 1 if task == self._task.name and self._observation else 0
        order = [states[(start + offset) % len(states)] for offset in range(len(states))]
        return next((state for state in order if state not in solved), order[0])

    def _reset_for(self, holder: Holder, task: str, init_state: int) -> None:
        """Only the connection that asked for it keeps a robot moving until it is done."""
        self._starter = holder.client
        self._reset(task, init_state)

    def _reset(self, task: str, init_state: int) -> None:
        self._phase, self._task, self._init_state = "loading", self._setup.tasks[task], init_state
        self._listener.tell(self.state())
        self._observation = self._plant.reset(self._task, init_state)
        self._pilot.has_control = self._setup.driver is None
        self._gripper, self._fault = "open", ""
        self._phase = "ready"

    def _start(self, holder: Holder) -> None:
        if self._phase == "ended":
            self._reset_for(holder, self._task.name, self._next_state(self._task.name))
        elif self._phase == "unset":
            self._drop()
            self._reset_for(holder, self._task.name, self._init_state)
        if self._phase != "ready":
            raise SimulatorError(f"an episode cannot be started: the session is {self._phase}")
        driver = self._setup.driver
        recorder = Recorder(
            number=self._library.next_number,
            task=self._task.name,
            init_state=self._init_state,
            who=holder.who,
            journal=self._library.journal,
            policy_version=driver.version if driver else NO_POLICY,
        )
        recorder.begin(self._observation)
        self._recorder, self._people = recorder, {}
        self._run_for(holder)

    def _pause(self, why: str, *, is_problem: bool = False) -> None:
        if self._phase == "running":
            self._phase = "paused"
            if not self._plant.stop(why):
                why, is_problem = f"{why}. The robot has not confirmed it: its watchdog holds it", True
            self._say(why, is_problem=is_problem)

    def _resume(self, holder: Holder) -> None:
        if self._phase == "paused":
            self._run_for(holder)

    def _run_for(self, holder: Holder) -> None:
        """Only the connection that started the robot keeps it going: a page that was reloaded has to resume."""
        self._starter = holder.client
        self._phase, self._is_at_rest, self._is_complete = "running", True, False

    def _hand_over(self, *, to_person: bool) -> None:
        if self._setup.driver is None:
            raise SimulatorError("there is no policy to take over from", "start with nightshift teleop --policy …")
        self._setup.driver.plan_anew()
        self._pilot.has_control = to_person

    def _mark(self, *, success: bool) -> None:
        if self._phase not in ("running", "paused", "unset") or self._recorder is None:
            raise SimulatorError("there is no episode to mark: it is saved already, or none was started")
        if not self._recorder.steps:
            raise SimulatorError("the episode has no steps yet", "move the hand first")
        self._end(Ending(success=success, judge=PERSON))

    def _undo(self) -> None:
        if self._phase in ("running", "paused", "saving"):
            raise SimulatorError("an episode is being played", "mark it or reset first")
        entry = self._library.undo()
        self._say(f"episode {entry.number} of {entry.task} is removed")
        self._listener.tell(self.episodes())

    def _drop(self) -> None:
        """Throw away the episode in the making, as the pilot wants."""
        recorder, self._recorder, self._saving = self._recorder, None, None
        if recorder is not None:
            recorder.forget()
            if recorder.steps:
                self._say(f"reset: an episode of {recorder.steps} steps was not kept")

    # Control

    def _control(self) -> None:
        """One control step, unless something stands in the way."""
        if self._may_move(self._pilot.read()) and self._is_at_rest:
            self._wake()
        if self._phase != "running" or self._is_at_rest:
            return
        wanted = self._policy_action()
        controls = self._pilot.read()  # inference may take a second, in which a page may be closed
        if self._may_move(controls):
            self._step(self._decide(wanted, controls.command), controls)

    def _may_move(self, controls: Controls) -> bool:
        """Whether a step may be made; what stands in its way stops the robot."""
        obstacle = self._obstacle(controls)
        if obstacle:
            self._pause(obstacle)
        elif self._is_idle(controls.command):
            self._is_at_rest = True
            self._plant.idle()
        else:
            return True
        return False

    def _wake(self) -> None:
        """What was seen and planned before a reset or a stop belongs to another moment."""
        assert self._recorder is not None
        self._observation = self._plant.wake()
        self._recorder.retake(self._observation)
        self._is_at_rest = False
        if self._setup.driver:
            self._setup.driver.plan_anew()

    def _obstacle(self, controls: Controls) -> str:
        """Why the robot has to stop now, or nothing."""
        if not controls.are_held_by(self._starter):
            return "the pilot's page is gone: stopped"
        if not controls.are_alive:
            return f"no word from the pilot for {DEAD_MAN_SECONDS} s: stopped"
        most = round(MAX_SECONDS * self._setup.suite.control_hz)
        if self._recorder is not None and self._recorder.steps >= most:
            return f"{most} steps: mark the episode as success or failure"
        return ""

    def _step(self, decision: Decision, controls: Controls) -> None:
        assert self._recorder is not None
        if decision.by_person or self._setup.driver is None:
            self._people[controls.holder.who if controls.holder else self._recorder.who] = None
        after = self._plant.step(decision.executed)
        self._executed_seq = controls.command.seq if controls.command else self._executed_seq
        self._gripper = "closed" if decision.executed[-1] > 0 else "open"
        self._observation = after.observation
        self._record(self._recorder, decision)
        if after.success or after.unstable:
            self._end(Ending(success=after.success, judge=self._plant.judge, unstable=after.unstable))

    def _record(self, recorder: Recorder, decision: Decision) -> None:
        """The step is in memory whatever happens to the journal, so the episode can go on once there is space."""
        try:
            recorder.add(decision, self._observation)
        except NightshiftError as error:
            self._pause(f"stopped: {_words(error)}", is_problem=True)

    def _policy_action(self) -> Array | None:
        driver = self._setup.driver
        return driver.act(self._seen_by_policy, alone=not self._pilot.has_control) if driver else None

    def _decide(self, wanted: Array | None, command: messages.Drive | None) -> Decision:
        """`wanted` by the policy; None: there is none."""
        space = self._setup.suite.action_space
        if wanted is not None and not self._pilot.has_control:
            return Decision(executed=space.clip(wanted).astype(np.float32), policy_action=wanted, by_person=False)
        executed = action_of(command, space, self._gripper).astype(np.float32)
        return Decision(
            executed=executed,
            policy_action=executed if wanted is None else wanted,
            by_person=wanted is not None,
        )

    def _seen_by_policy(self) -> Observation:
        assert self._setup.driver is not None
        names = self._setup.driver.policy.observations
        known = {**self._observation, INSTRUCTION: np.array(self._task.language)}
        cameras = [name for name in names if name not in known]
        images = self._plant.look(cameras) if cameras else {}
        return {name: images[name] if name in images else np.asarray(known[name])[None] for name in names}

    # Saving

    def _end(self, ending: Ending) -> None:
        assert self._recorder is not None
        self._phase, self._is_complete = "saving", True
        self._saving = self._plant.develop(self._recorder.actions, self._setup.env.cameras.names), ending

    def _finish_saving(self) -> None:
        if self._saving is None or self._recorder is None or not self._saving[0].done():
            return
        (future, ending), self._saving = self._saving, None
        try:
            developed = future.result()
            entry = self._library.save(self._episode(self._recorder, ending, developed))
        except NightshiftError as error:
            self._phase = "unset" if self._fault else "paused"  # it is still in memory: it can be marked again
            self._say(f"the episode is not saved: {_words(error)}", is_problem=True)
            return
        self._recorder.forget()
        self._recorder, self._phase = None, "ended"
        self._keep_film(entry, developed.film)
        self._listener.tell(self.episodes())

    def _keep_film(self, entry: Entry, film: Film) -> None:
        """A film is for looking at: without it the episode is saved all the same."""
        saved = f"episode {entry.number} is saved as a {'success' if entry.success else 'failure'}"
        try:
            self._library.keep_film(entry, film)
        except NightshiftError as error:
            self._say(f"{saved}, but without its film: {_words(error)}", is_problem=True)
        else:
            self._say(saved)

    def _episode(self, recorder: Recorder, ending: Ending, developed: Development) -> Episode:
        driver = self._setup.driver
        who = ", ".join(self._people) or recorder.who
        provenance = Provenance(
            source="human" if self._people else "policy",
            suite=self._task.suite,
            task=recorder.task,
            language=self._task.language,
            split="train",
            init_state=recorder.init_state,
            seed=None,
            versions=envs.versions(self._task.suite),
            commit=self._setup.commit,
            origin=f"{ORIGIN} {self._library.name}, by {who}",
        )
        rate = {FPS: self._setup.suite.control_hz}
        metadata = {"who": who, "judge": ending.judge, **rate, **({"policy": driver.label} if driver else {})}
        return recorder.episode(ending, provenance, developed.images, metadata)

    def _trial(self) -> Episode:
        """Such an episode as this session records, of one step."""
        recorder = Recorder(
            number=self._library.next_number,
            task=self._task.name,
            init_state=self._init_state,
            who="",
            journal=self._library.journal,
        )
        nothing = np.zeros(self._setup.suite.action_space.size, np.float32)
        space = envs.observation_space(self._setup.env)
        cameras = self._setup.env.cameras.names
        vectors = {name: spec for name, spec in space.items() if name not in (*cameras, INSTRUCTION)}
        recorder.observations = [{name: np.zeros(spec.shape, spec.dtype) for name, spec in vectors.items()}] * 2
        recorder.decisions = [Decision(executed=nothing, policy_action=nothing, by_person=False)]
        images = {name: np.zeros((2, *space[name].shape), np.uint8) for name in cameras}
        ending = Ending(success=True, judge=self._plant.judge)
        return self._episode(recorder, ending, Development(images=images, film=[]))


def _words(error: NightshiftError) -> str:
    return f"{error.what} → {error.next_step}" if error.next_step else error.what
