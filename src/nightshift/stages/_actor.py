"""An actor of `rlpd`: a process with its own simulators that plays what the learner orders and sends the episodes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from nightshift import config, envs, interrupts
from nightshift.access import token_of_user
from nightshift.cluster import version_check
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.data.decisions import lost_episode
from nightshift.data.episode import NO_POLICY, Episode
from nightshift.data.experience import Order
from nightshift.envs.splits import split_training_states
from nightshift.errors import DataError, NightshiftError, RolloutError, StatesNotDrawn
from nightshift.policies.snapshot import restore
from nightshift.project import paths
from nightshift.rewards.reward import Reward, check_reward, open_reward
from nightshift.rollouts.base import Pool
from nightshift.rollouts.experience import Tickets, play_tickets
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.opening import engine_settings
from nightshift.rollouts.provenance import provenance
from nightshift.stream.experience import job_from_weights, orders_from_weights, with_ticket
from nightshift.stream.link import LearnerChanged, Link, LinkDown
from nightshift.stream.sender import Sender
from nightshift.stream.spool import Spool
from nightshift.stream.tcp_link import TcpLink
from nightshift.types import InterventionSettings, Task, Trajectory

_POLL_SECONDS = 0.02
_JOIN_SECONDS = 1.0
_OTHER_VERSIONS = "check out the learner's commit here, install its constraints.txt, and start the actor again"

_SECTIONS: dict[str, type[config.Section]] = {
    "env": config.Env,
    "states": config.States,
    "interventions": config.Interventions,
}
"""Of params.yaml, in the description of a job."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """What an actor's process is started with."""

    name: str
    """Unique among the actors of a learner."""
    run: str
    folder: Path
    """Of its spool."""
    learner: tuple[str, int]
    """Host and port."""
    incarnation: str
    """Of the learner."""
    token: str | None = field(repr=False)
    seed: int
    env: config.Env
    states: config.States
    machine: config.Machine
    discount: float
    reward: str
    interventions: config.Interventions
    commit: str
    alone: frozenset[int] = frozenset()
    """Tickets that were in play when an actor died; each is played by itself, to find the one that ends the process."""
    given_up: frozenset[int] = frozenset()
    """Tickets that ended their actor again and again; their episodes are invalid."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """What actors of one learner have in common, also those on other machines."""

    run: str
    incarnation: str
    """Of the learner."""
    seed: int
    env: config.Env
    states: config.States
    discount: float
    reward: str
    interventions: config.Interventions
    commit: str
    versions: Mapping[str, str]
    init_states: Mapping[str, str]
    """Digest of the training states of every task."""
    at_once: int

    def to_json(self) -> dict[str, Any]:
        sections = {name: getattr(self, name).model_dump(mode="json") for name in _SECTIONS}
        return {**vars(self), **sections, "versions": dict(self.versions), "init_states": dict(self.init_states)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> JobDescription:
        """RolloutError if another version of the code wrote it, before what it may have changed is read."""
        suite = content["env"]["suite"]
        if different := version_check.mismatch_error(content["versions"], suite, _OTHER_VERSIONS):
            raise different
        return cls(**{**content, **{name: model.model_validate(content[name]) for name, model in _SECTIONS.items()}})

    def actor(
        self, name: str, *, folder: Path, learner: tuple[str, int], token: str | None, machine: config.Machine
    ) -> ActorSpec:
        return ActorSpec(
            name=name,
            run=self.run,
            folder=folder,
            learner=learner,
            incarnation=self.incarnation,
            token=token,
            seed=self.seed,
            env=self.env,
            states=self.states,
            machine=machine,
            discount=self.discount,
            reward=self.reward,
            interventions=self.interventions,
            commit=self.commit,
        )


class TicketsInPlay:
    """What an actor is playing, in shared memory: its learner can still read it when the actor has died or hangs."""

    def __init__(self, context: SpawnContext, most: int) -> None:
        self._steps = context.RawValue("q", 0)
        self._cells = context.RawArray("q", most + 1)  # how many, and which

    def set(self, tickets: Sequence[int]) -> None:
        self._cells[0] = 0
        self._cells[1 : 1 + len(tickets)] = tickets
        self._cells[0] = len(tickets)

    def get(self) -> list[int]:
        return list(self._cells[1 : 1 + self._cells[0]])

    def step(self) -> None:
        """The simulators have made a step. Steps of several threads may count as one."""
        self._steps.value += 1

    @property
    def steps(self) -> int:
        return int(self._steps.value)


class HangWatch:
    """Tells how long the simulators of an actor have made no step."""

    def __init__(self, in_play: TicketsInPlay, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_play = in_play
        self._clock = clock
        self._last_seen: object = None
        self._since = clock()

    def seconds_without_step(self) -> float:
        """How long the tickets in play and the number of steps have been what they are; 0 if nothing is in play."""
        tickets = self._in_play.get()
        seen = (tickets, self._in_play.steps)
        if not tickets or seen != self._last_seen:
            self._last_seen, self._since = seen, self._clock()
        return self._clock() - self._since


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Makes episodes of what was played: the same in every process."""

    tasks: Sequence[Task]
    discount: float
    reward: Reward
    commit: str

    def __call__(self, trajectory: Trajectory) -> Episode:
        return self.reward.episode(trajectory, provenance(trajectory.request, self.tasks, self.commit), self.discount)

    def lost(self, trajectory: Trajectory, order: Order) -> Episode:
        """In the place of an episode that the simulator failed in."""
        policy = restore(order.policy, torch.device("cpu"))
        chunk = policy.chunk if trajectory.request.interventions is None else 1
        return lost_episode(policy, provenance(trajectory.request, self.tasks, self.commit), chunk=chunk)


def make_tickets(
    tasks: Sequence[Task],
    states: config.States,
    seed: int,
    reward: Reward,
    interventions: config.Interventions,
) -> Tickets:
    chosen = {task: split_training_states(task, states).train for task in tasks}
    # What a learner makes of them changes no episode.
    numbers = interventions.model_dump(exclude={"takeover", "imitate"})
    settings = InterventionSettings(**numbers) if interventions.is_on else None
    return Tickets(chosen, seed=seed, reward=reward, interventions=settings)


def init_state_digests(env: config.Env) -> dict[str, str]:
    """Of the training states, by task."""
    return {task.name: envs.init_states_digest(task, "train") for task in envs.tasks(env)}


def run_actor(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    """The main function of an actor's process; it ends when learning is over, with the learner, or by SIGTERM.

    An error is sent to `failed`.
    """
    interrupts.handle()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the learner decides
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_learner, daemon=True).start()
    try:
        act(spec, open_simulators(spec, in_play), open_link(spec), in_play)
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    except NightshiftError as error:
        failed.send(error)
        raise SystemExit(1) from None
    except Exception as error:
        failed.send(RolloutError(f"{spec.name} failed: {error!r}", "see its error above; run again: it resumes"))
        raise


def join_learner(learner: tuple[str, int], name: str, spools: Path, machine: config.Machine) -> None:
    """Play for a learner on another machine until learning is over; `spools` is the folder of all actors here.

    A learner that is started again is joined again from the start: its job may be another one, and of its tickets none
    counts as played. LinkDown if there is no learner, or it has another token.
    """
    torch.set_num_threads(1)
    token = token_of_user()
    described = _wait_for_job(TcpLink(*learner, token=token))
    while True:
        try:
            return _play_for(described, learner, name, spools, machine)
        except LearnerChanged as changed:
            _log.warning("%s; it is joined again", changed.what)
            described = _wait_for_job_of_restarted(learner, token)


def _play_for(
    described: JobDescription, learner: tuple[str, int], name: str, spools: Path, machine: config.Machine
) -> None:
    _check_reward(described)
    _check_init_states(described)
    folder = spools / described.run / name
    token = token_of_user()
    spec = described.actor(name, folder=folder, learner=learner, token=token, machine=machine)
    in_play = TicketsInPlay(multiprocessing.get_context("spawn"), described.at_once)
    with _ending_if_hung(in_play):
        act(spec, open_simulators(spec, in_play), open_link(spec), in_play)


def _check_reward(described: JobDescription) -> None:
    """What the reward asks of this machine; the learner has found nothing wrong with it."""
    try:
        check_reward(described.reward, described.env)
    except DataError as error:
        raise DataError(error.what, f"copy {paths.CLASSIFIER} of the learner's project to this one") from None


def _check_init_states(described: JobDescription) -> None:
    """Drawn states may be others here, under the same numbers."""
    remedy = f"copy {paths.INIT_STATES} of the learner's project to this one, and start the actor again"
    try:
        here = init_state_digests(described.env)
    except StatesNotDrawn as error:
        raise StatesNotDrawn(error.what, remedy) from None
    different = [task for task, digest in described.init_states.items() if here[task] != digest]
    if different:
        raise DataError(f"the init states of {', '.join(different)} are not the learner's", remedy)


@contextmanager
def _ending_if_hung(in_play: TicketsInPlay) -> Iterator[None]:
    """End the process if its simulators make no step for TIMEOUT_SECONDS, so that its tickets go to another actor.

    The learner cannot see that they hang: the sender's thread goes on polling.
    """
    watch, over = HangWatch(in_play), threading.Event()

    def end_if_hung() -> None:
        while not over.wait(_JOIN_SECONDS):
            if watch.seconds_without_step() > TIMEOUT_SECONDS:
                _log.error("the simulators have made no step for %.0f s; start the actor again", TIMEOUT_SECONDS)
                os._exit(1)

    threading.Thread(target=end_if_hung, name="hang watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _wait_for_job(link: TcpLink) -> JobDescription:
    """The job in the first order of this learner process. Orders of an earlier process are ignored."""
    try:
        while True:
            weights = link.weights(NO_POLICY)
            job = job_from_weights(weights) if weights else {}
            if job.get("incarnation") == link.incarnation:
                return JobDescription.from_json(job)
            time.sleep(_JOIN_SECONDS)
    finally:
        link.close()


def _wait_for_job_of_restarted(learner: tuple[str, int], token: str | None) -> JobDescription:
    """Retries while the learner does not answer: it has accepted this token before."""
    while True:
        with suppress(LinkDown):
            return _wait_for_job(TcpLink(*learner, token=token))
        time.sleep(_JOIN_SECONDS)


def open_simulators(spec: ActorSpec, in_play: TicketsInPlay) -> Pool:
    return LocalPool(spec.env, engine_settings(spec.machine, torch.device("cpu")), on_step=in_play.step)


def open_link(spec: ActorSpec) -> TcpLink:
    host, port = spec.learner
    return TcpLink(host, port, actor=spec.name, token=spec.token, incarnation=spec.incarnation)


def _end_with_learner() -> None:
    """Exit when the learner has ended, also while an order is played: the actors of its next run need the spools."""
    learner = multiprocessing.parent_process()
    assert learner is not None
    learner.join()
    os._exit(1)


def act(spec: ActorSpec, pool: Pool, link: Link, in_play: TicketsInPlay) -> None:
    """Play what is ordered over the link until learning is over."""
    with closing(pool), Spool(spec.folder, run=spec.run, actor=spec.name) as spool:
        player = _Player(spec, pool, spool, in_play)  # before the first poll, which is answered with tickets
        with Sender(spool, link, poll_interval=_POLL_SECONDS) as sender:
            for orders, assigned in _published(sender, spool):
                for order in orders:
                    player.play(order, assigned)


def _published(sender: Sender, spool: Spool) -> Iterator[tuple[list[Order], dict[int, str]]]:
    """The open orders and the actors of their tickets whenever they change, until none is open.

    Raises what stopped the sender.
    """
    seen = None
    while True:
        spool.check()
        weights = sender.latest_weights
        if weights is None or weights.version == seen:
            time.sleep(_POLL_SECONDS)
            continue
        seen = weights.version
        orders, assigned = orders_from_weights(weights)
        if not orders:
            return
        yield orders, assigned


class _Player:
    """Plays the tickets of the actor, each once."""

    def __init__(self, spec: ActorSpec, pool: Pool, spool: Spool, in_play: TicketsInPlay) -> None:
        self._spec = spec
        self._pool = pool
        self._spool = spool
        self._in_play = in_play
        tasks, reward = envs.tasks(spec.env), open_reward(spec.reward, spec.env)
        self._tickets = make_tickets(tasks, spec.states, spec.seed, reward, spec.interventions)
        self._recorder = Recorder(tasks=tasks, discount=spec.discount, reward=reward, commit=spec.commit)
        self._done: set[int] = set()

    def play(self, order: Order, assigned: Mapping[int, str]) -> None:
        """The tickets of an order that are assigned to this actor."""
        spec = self._spec
        own = [ticket for ticket in order.tickets if assigned.get(ticket) == spec.name and ticket not in self._done]
        for ticket in spec.given_up.intersection(own):
            lost = Trajectory.lost(self._tickets.request(ticket, order.controller), 0)
            self._put(ticket, lost, order)
        left = [ticket for ticket in own if ticket not in spec.given_up]
        self._play_together([ticket for ticket in left if ticket not in spec.alone], order)
        for ticket in left:
            if ticket in spec.alone:
                self._play_together([ticket], order)

    def _play_together(self, tickets: Sequence[int], order: Order) -> None:
        left = list(tickets)
        self._in_play.set(left)
        for ticket, trajectory in play_tickets(self._pool, self._tickets, tickets, order):
            self._put(ticket, trajectory, order)
            left.remove(ticket)
            self._in_play.set(left)

    def _put(self, ticket: int, trajectory: Trajectory, order: Order) -> None:
        episode = self._recorder(trajectory) if trajectory.valid else self._recorder.lost(trajectory, order)
        counters = self._spool.metrics()
        self._spool.put(with_ticket(episode, ticket, lost=not trajectory.valid, counters=counters))
        self._done.add(ticket)
