"""Where the episodes of `rlpd` come from: the stage's own pool, or actors in processes of their own.

Actors share the episodes that the learner orders (`stream/experience.py`), so both ways give the same episodes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nightshift import config, envs
from nightshift.data.decisions import lost_episode
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.splits import split_training_states
from nightshift.errors import RolloutError
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot, restore
from nightshift.project import paths
from nightshift.rewards.reward import Reward, open_reward
from nightshift.rollouts.base import Pool
from nightshift.rollouts.experience import Experience, LocalExperience, Tickets, play_tickets
from nightshift.rollouts.opening import open_pool
from nightshift.stream.experience import Order, StreamedExperience, with_ticket
from nightshift.stream.link import LearnerEndpoint, Link
from nightshift.stream.sender import Sender
from nightshift.stream.server import Server
from nightshift.stream.spool import Spool
from nightshift.stream.tcp_link import TcpLink
from nightshift.types import Provenance, Task, Trajectory

_POLL_SECONDS = 0.02
_GOODBYE_SECONDS = 10.0
_RESTARTS = 3
"""Of each actor; after that the stage ends."""


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Makes episodes of what was played: the same in every process."""

    tasks: Sequence[Task]
    discount: float
    commit: str
    reward: Reward

    def __call__(self, trajectory: Trajectory) -> Episode:
        return self.reward.episode(trajectory, self.provenance(trajectory), self.discount)

    def provenance(self, trajectory: Trajectory) -> Provenance:
        request = trajectory.request
        (task,) = (task for task in self.tasks if task.name == request.task)
        return Provenance(
            source="policy",
            suite=task.suite,
            task=task.name,
            language=task.language,
            split=request.split,
            init_state=request.init_state,
            seed=request.seed,
            versions=envs.versions(task.suite),
            commit=self.commit,
        )


@dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """What an actor's process is started with."""

    index: int
    count: int
    """Of actors: each plays the tickets that are its index modulo their number."""
    run: str
    folder: Path
    """Of its spool."""
    port: int
    seed: int
    env: config.Env
    states: config.States
    machine: config.Machine
    discount: float
    reward: str
    commit: str


def run_actor(spec: ActorSpec) -> None:
    """The main function of an actor's process; it ends when learning is over, or with the learner."""
    torch.set_num_threads(1)
    machine = spec.machine.model_copy(update={"workers": 0})
    pool = open_pool(machine, spec.env, torch.device("cpu"))
    link = TcpLink("127.0.0.1", spec.port)
    threading.Thread(target=_end_with_learner, daemon=True).start()
    act(spec, pool, link)


def _end_with_learner() -> None:
    """Also in the middle of an order: the actors of a learner that resumes need the spools."""
    learner = multiprocessing.parent_process()
    assert learner is not None
    learner.join()
    os._exit(1)


def act(spec: ActorSpec, pool: Pool, link: Link) -> None:
    """Play what is ordered over the link until learning is over."""
    tasks, reward = envs.tasks(spec.env), open_reward(spec.reward)
    tickets = _tickets(tasks, spec.states, spec.seed, reward)
    recorder = Recorder(tasks=tasks, discount=spec.discount, commit=spec.commit, reward=reward)
    spool = Spool(spec.folder, run=spec.run, actor=f"actor-{spec.index}")
    sender = Sender(spool, link, poll_interval=_POLL_SECONDS)
    try:
        for order in _orders(sender):
            assert order.policy is not None
            own = [ticket for ticket in order.tickets if ticket % spec.count == spec.index]
            played = play_tickets(pool, tickets, own, order.policy, order.controller) if own else []
            for ticket, trajectory in zip(own, played, strict=True):
                episode = recorder(trajectory) if trajectory.valid else _lost(order.policy, recorder, trajectory)
                spool.put(with_ticket(episode, ticket, lost=not trajectory.valid))
    finally:
        sender.close()
        spool.close()
        pool.close()


def _lost(policy: PolicySnapshot, recorder: Recorder, trajectory: Trajectory) -> Episode:
    return lost_episode(restore(policy, torch.device("cpu")), recorder.provenance(trajectory))


def _orders(sender: Sender) -> Iterator[Order]:
    """Each order once, until the one that ends."""
    seen = None
    while True:
        weights = sender.latest_weights
        if weights is None or weights.version == seen:
            time.sleep(_POLL_SECONDS)
            continue
        seen = weights.version
        order = Order.from_weights(weights)
        if order.policy is None:
            return
        yield order


class Actors:
    """The processes that the stage starts, and starts again if they die."""

    def __init__(self, specs: Sequence[ActorSpec]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._specs = specs
        self._left = [_RESTARTS] * len(specs)
        self._processes = [self._start(spec) for spec in specs]

    def check(self) -> None:
        for index, process in enumerate(self._processes):
            if process.is_alive():
                continue
            if not self._left[index]:
                raise RolloutError(
                    f"actor {index} ended {_RESTARTS + 1} times, the last time with exit code {process.exitcode}",
                    "see its error above; run again: it resumes",
                )
            self._left[index] -= 1
            self._processes[index] = self._start(self._specs[index])

    def join(self) -> None:
        for process in self._processes:
            process.join(_GOODBYE_SECONDS)

    def kill(self) -> None:
        """An actor that is killed loses nothing: its episodes are on disk, and the rest is played again."""
        for process in self._processes:
            process.kill()
            process.join()

    def _start(self, spec: ActorSpec) -> multiprocessing.process.BaseProcess:
        process = self._context.Process(target=run_actor, args=(spec,), daemon=True)
        process.start()
        return process


@contextmanager
def open_experience(
    job: Job, pool: Pool, *, seed: int, env: config.Env, states: config.States, rlpd: config.Rlpd
) -> Iterator[Experience]:
    if job.machine.actors:
        with _streamed(job, seed=seed, env=env, states=states, rlpd=rlpd) as streamed:
            yield streamed
        return
    tasks, reward = envs.tasks(env), open_reward(rlpd.reward)
    yield LocalExperience(
        pool,
        _tickets(tasks, states, seed, reward),
        EpisodeStore(job.state / "episodes"),
        Recorder(tasks=tasks, discount=rlpd.discount, commit=job.commit, reward=reward),
        at_once=rlpd.episodes_at_once,
    )


@contextmanager
def _streamed(
    job: Job, *, seed: int, env: config.Env, states: config.States, rlpd: config.Rlpd
) -> Iterator[StreamedExperience]:
    """Start the actors; stop them when learning is over."""
    run = paths.short(job.fingerprint)
    with LearnerEndpoint.open(job.state, run=run) as endpoint, Server(endpoint) as server:
        specs = [
            ActorSpec(
                index=index,
                count=job.machine.actors,
                run=run,
                folder=job.state / "actors" / str(index),
                port=server.port,
                seed=seed,
                env=env,
                states=states,
                machine=job.machine,
                discount=rlpd.discount,
                reward=rlpd.reward,
                commit=job.commit,
            )
            for index in range(job.machine.actors)
        ]
        actors = Actors(specs)
        try:
            experience = StreamedExperience(endpoint, at_once=rlpd.episodes_at_once, check_actors=actors.check)
            yield experience
            experience.end()
            actors.join()
        finally:
            actors.kill()


def _tickets(tasks: Sequence[Task], states: config.States, seed: int, reward: Reward) -> Tickets:
    chosen = {task: split_training_states(task, states).train for task in tasks}
    return Tickets(chosen, seed=seed, reward=reward)
