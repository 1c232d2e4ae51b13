"""Plays many requests at once in one process: threads simulate, and one thread draws and acts.

    engine's thread   see and decide for A │ see and decide for B │ see and decide for A │ …
    threads           advance B ───────────┼ advance A ───────────┼ advance B ───────────┼ …

The requests that are being played form two cohorts, A and B. While the threads simulate the chunks of one, the engine's
thread draws the other's images and asks the policy, in one batch. A request that ends makes room for the next one. The
simulators of a request step side by side where threads are idle (`SharingFleet`).

A cohort waits for all its simulators, and requests are taken in order. So which requests share a batch depends on the
requests and the settings, never on time: on a GPU the same run gives the same bits, and on the CPU, where no request
shares a batch, it does with any settings (`acting.py`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from nightshift import config, envs
from nightshift.envs.base import Fleet
from nightshift.envs.perturbations.fleet import PerturbedFleet, perturbed
from nightshift.envs.perturbations.randomisation import randomised
from nightshift.errors import NightshiftError, RolloutError
from nightshift.interventions.base import PageSettings
from nightshift.interventions.opening import InterventionSources
from nightshift.policies.device import POLICY_SIZE, out_of_memory_advice
from nightshift.policies.snapshot import PolicySlot, PolicySnapshot
from nightshift.rollouts.acting import Actor
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.experts import Decide, ExpertProcesses, decide
from nightshift.rollouts.fleets import Fleets
from nightshift.rollouts.intervened import IntervenedPlay
from nightshift.rollouts.redrawn import redrawn
from nightshift.rollouts.rollout import GroupPlay, Observer
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

BUSY, TRANSFER = "busy", "transfer"
"""What a process's time is spent on: playing, and loading a policy. The rest is waiting for requests."""
SIMULATION, LOOK, INFERENCE = "simulation", "look", "inference"
"""Of the busy time: waiting for simulators, drawing, acting. The rest is recording. Simulation that runs while the
engine draws and acts takes no time of its own, so it is not counted."""

_SWITCH_SECONDS = 5e-4
"""How long a thread may keep the GIL while others want it, a tenth of Python's default: a simulating thread needs it
for a moment only, between two control steps."""

_log = logging.getLogger(__name__)

Waiting = deque[tuple[int, RolloutRequest]]
"""Requests to play, in order, each with the number that its answer will have."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    device: torch.device
    threads: int
    requests_at_once: int
    compile: bool = False
    """Whether the policy's transformer blocks are compiled."""
    draw: bool = True
    """False observes the simulators' states in the place of the cameras' images, for `redraw`."""
    reserved_gpus: int = 0
    """Of a cluster: those that the learner's ranks take."""
    page: PageSettings = field(default_factory=PageSettings)


ONE_AT_A_TIME = EngineSettings(device=torch.device("cpu"), threads=1, requests_at_once=1)


class Answer(NamedTuple):
    number: int
    """Of the request."""
    trajectories: list[Trajectory] | None
    """None: the simulator failed."""
    error: str = ""


@dataclass
class _Slot:
    """A request that is being played."""

    number: int
    group: GroupPlay
    fleet: Fleet
    perturbed: Fleet
    """What is played: `fleet` itself, or what perturbations have made of it."""
    simulating: Future[None]


@dataclass
class _Cohort:
    size: int
    slots: list[_Slot] = field(default_factory=list)


class Engine:
    """Keeps no state that could change a result: a new engine gives the same answers. Use it from one thread, to which
    the GL contexts of its simulators belong."""

    def __init__(
        self,
        env: config.Env,
        settings: EngineSettings,
        make_fleet: MakeFleet,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_step` is called when a request begins and after every chunk of control steps, in any thread."""
        if settings.threads > 1:
            sys.setswitchinterval(_SWITCH_SECONDS)
        if settings.device.type == "cpu":
            torch.set_num_threads(1)  # one order of summation, as in every other process
        self.stopwatch = Stopwatch()
        self._settings = settings
        self._env = env
        self._records_states = bool(env.cameras.names) and not settings.draw
        self._on_step = on_step
        self._threads = ThreadPoolExecutor(settings.threads) if settings.requests_at_once > 1 else None
        self._fleets = Fleets(env, make_fleet, self._threads if settings.threads > 1 else None)
        self._experts = ExpertProcesses(settings.threads, env.suite)
        self._interventions = InterventionSources(env, settings.page)
        self._actor: tuple[str, Actor] | None = None
        self._slot = PolicySlot(settings.device, compile=settings.compile)

    def play(self, waiting: Waiting, snapshot: PolicySnapshot | None) -> Generator[list[Answer], None, None]:
        """Play all of `waiting`, which may grow meanwhile; yields after every turn of a cohort."""
        version = snapshot.version if snapshot is not None else 0
        at_once = min(self._settings.requests_at_once, len(waiting))
        cohorts = [_Cohort(size) for size in ((at_once + 1) // 2, at_once // 2) if size]
        try:
            while waiting or any(cohort.slots for cohort in cohorts):
                for cohort in cohorts:
                    with self.stopwatch.timing(TRANSFER):
                        actor = self._actor_of(snapshot)  # another run may have loaded its own since the last turn
                    with self.stopwatch.timing(BUSY):
                        answers = [*self._collected(cohort, version), *self._continued(cohort, waiting, actor)]
                    yield answers
        finally:
            for cohort in cohorts:
                self._abandon(cohort)
            envs.suite(self._env.suite).release()

    def redraw(self, number: int, episodes: Sequence[Trajectory]) -> Answer:
        """The episodes of a request that were played without images, with them; those of a simulator that failed as
        they are."""
        if not all(episode.valid for episode in episodes):
            return Answer(number, list(episodes))
        self._on_step()
        with self.stopwatch.timing(BUSY):
            try:
                return Answer(number, self._redrawn(episodes))
            except Exception as error:  # noqa: BLE001 - simulators raise anything
                return _failed(number, episodes[0].request, error)

    def _redrawn(self, episodes: Sequence[Trajectory]) -> list[Trajectory]:
        fleet = self._fleets.take(episodes[0].request.task)
        try:
            with self.stopwatch.timing(LOOK):
                drawn = redrawn(fleet, episodes, self._env.cameras.names)
        except Exception:
            self._fleets.discard(fleet)
            raise
        self._fleets.give_back(fleet)
        return drawn

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self.close_experts()
        self._interventions.close()
        self._fleets.close()

    def begin(self) -> None:
        """Before the engine's thread plays on: the answers are wanted, and people are waited for."""
        self._interventions.begin()
        envs.suite(self._env.suite).begin(self._on_step)

    def let_go(self) -> None:
        """Wait for no person any more, from any thread: the answers are no longer wanted."""
        self._interventions.let_go()
        envs.suite(self._env.suite).let_go()

    def close_experts(self) -> None:
        """Free the memory of the expert's processes; they start again when they are needed."""
        self._experts.close()

    def _actor_of(self, snapshot: PolicySnapshot | None) -> Actor | None:
        """Built once per policy, however many requests it plays."""
        if snapshot is None:
            return None
        if self._actor is None or self._actor[0] != snapshot.token:
            self._actor = None  # its memory is needed
            with out_of_memory_advice(f"machine.workers, if several share the GPU, or {POLICY_SIZE}"):
                policy = self._slot.load(snapshot).eval()
            self._actor = snapshot.token, Actor(policy, share_batches=self._settings.device.type == "cuda")
        return self._actor[1]

    def _collected(self, cohort: _Cohort, version: int) -> Iterator[Answer]:
        """Wait for each simulator and draw it, and answer the requests that ended or failed: they leave the cohort.

        While a GPU draws one request, the images of that before it are fetched.
        """
        before: _Slot | None = None
        for slot in list(cohort.slots):
            if before is not None and not slot.simulating.done():  # there is time to fetch
                yield from self._seen(cohort, before, version)
                before = None
            with self.stopwatch.timing(SIMULATION):
                wait([slot.simulating])
            error = slot.simulating.exception() or self._drawing_error(slot.group.look)
            if before is not None:
                yield from self._seen(cohort, before, version)
            if error is not None:
                yield self._lost(cohort, slot, error)
            before = slot if error is None else None
        if before is not None:
            yield from self._seen(cohort, before, version)

    def _seen(self, cohort: _Cohort, slot: _Slot, version: int) -> Iterator[Answer]:
        """Fetch its images, and answer the request if it ended or failed."""
        error = self._drawing_error(slot.group.see)
        if error is not None:
            yield self._lost(cohort, slot, error)
        elif slot.group.done:
            self._give_back(slot)
            cohort.slots.remove(slot)
            yield Answer(slot.number, _played(slot, version))

    def _lost(self, cohort: _Cohort, slot: _Slot, error: BaseException) -> Answer:
        slot.group.abandon()
        self._drop(slot)
        cohort.slots.remove(slot)
        return _failed(slot.number, slot.group.request, error)

    def _drawing_error(self, draw: Callable[[], None]) -> Exception | None:
        try:
            with self.stopwatch.timing(LOOK):
                draw()
        except Exception as error:  # noqa: BLE001 - simulators raise anything
            return error
        return None

    def _continued(self, cohort: _Cohort, waiting: Waiting, actor: Actor | None) -> Iterator[Answer]:
        """Decide, let the simulators go on, and fill the cohort. Answers requests that cannot begin."""
        deciding = [slot.group for slot in cohort.slots if slot.group.awaits_decision]
        if deciding and actor is not None:
            with self.stopwatch.timing(INFERENCE):
                actor.decide(deciding)
        for slot in cohort.slots:
            slot.simulating = self._submit(slot.group.advance)
        while waiting and len(cohort.slots) < cohort.size:
            number, asked = waiting.popleft()
            request = randomised(self._env, asked)
            try:
                cohort.slots.append(self._begun(number, request, actor))
            except Exception as error:  # noqa: BLE001 - simulators raise anything
                yield _failed(number, request, error)

    def _begun(self, number: int, request: RolloutRequest, actor: Actor | None) -> _Slot:
        by_expert = request.controller == "expert"
        if actor is None and not by_expert:
            raise RolloutError(f"the controller {request.controller!r} needs a policy")
        names = None if actor is None or by_expert else actor.observations
        fleet = self._fleets.take(request.task)
        self._on_step()
        cameras = () if self._records_states else self._env.cameras.names
        observer = Observer(names, cameras, request.cameras, states=self._records_states)
        try:
            played = perturbed(fleet, request)
            group = self._group(request, played, observer)
        except Exception:
            self._fleets.give_back(fleet)  # nothing was simulated
            raise
        reset = partial(self._reset_alone, group) if request.interventions is None else group.reset
        return _Slot(number, group, fleet, played, self._submit(reset))

    def _reset_alone(self, group: GroupPlay) -> None:
        self._interventions.before_reset()
        group.reset()

    def _group(self, request: RolloutRequest, fleet: Fleet, observer: Observer) -> GroupPlay:
        horizon = envs.horizon(self._env, fleet.task)
        if request.interventions is None:
            return GroupPlay(request, fleet, observer, horizon, self._on_step, self._expert())
        source = self._interventions.take(request.interventions, self._expert())
        return IntervenedPlay(request, fleet, observer, horizon, self._on_step, source)

    def _expert(self) -> Decide:
        """In this process, or in others beside several threads."""
        if self._threads is None or self._settings.threads == 1:
            return partial(decide, self._env.suite)
        return self._experts.for_episode()

    def _submit(self, simulate: Callable[[], None]) -> Future[None]:
        """On one of the threads; without threads, at once."""
        if self._threads is not None:
            return self._threads.submit(simulate)
        future: Future[None] = Future()
        try:
            with self.stopwatch.timing(SIMULATION):
                simulate()
        except Exception as error:  # noqa: BLE001 - simulators raise anything
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def _abandon(self, cohort: _Cohort) -> None:
        """After an error, or where the answers are no longer wanted."""
        wait([slot.simulating for slot in cohort.slots])
        for slot in cohort.slots:
            slot.group.abandon()
            if slot.simulating.exception() is None:
                self._give_back(slot)
            else:
                self._drop(slot)

    def _drop(self, slot: _Slot) -> None:
        """What was played has failed. A model and its GL context take hundreds of megabytes: they are kept, and used
        again, if a simulation of another model is what failed."""
        is_altered = isinstance(slot.perturbed, PerturbedFleet) and slot.perturbed.has_own_scene
        if not is_altered or slot.simulating.exception() is None:
            self._fleets.discard(slot.fleet)
            return
        with contextlib.suppress(Exception):  # simulators raise anything
            slot.perturbed.close()
        self._fleets.give_back(slot.fleet)

    def _give_back(self, slot: _Slot) -> None:
        """For the next request of its task."""
        if slot.perturbed is not slot.fleet:
            slot.perturbed.close()
        self._fleets.give_back(slot.fleet)


def _played(slot: _Slot, version: int) -> list[Trajectory]:
    trajectories = slot.group.trajectories(version)
    if not isinstance(slot.perturbed, PerturbedFleet):
        return trajectories
    return [replace(trajectory, reached=slot.perturbed.reached) for trajectory in trajectories]


def _failed(number: int, request: RolloutRequest, error: BaseException) -> Answer:
    """An error that is meant for people ends the run."""
    if isinstance(error, NightshiftError):
        raise error
    _log.warning("the simulator failed on %s", request.place, exc_info=error)
    return Answer(number, None, repr(error))
