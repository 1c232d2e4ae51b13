"""Where the episodes of `rlpd` come from: the stage's own pool, or actors in processes of their own.

Actors share the episodes that the learner orders (`stream/experience.py`), so both ways give the same episodes.
"""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from nightshift import access, config, envs
from nightshift.cluster import version_check
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.experience import Experience
from nightshift.errors import NightshiftError, RolloutError
from nightshift.interrupts import deferred
from nightshift.pipeline.job import Job
from nightshift.project import paths, ports
from nightshift.rewards.reward import open_reward
from nightshift.rollouts.base import Pool
from nightshift.rollouts.experience import LocalExperience
from nightshift.rollouts.retries import MAX_ATTEMPTS, MAX_INVALID, MAX_INVALID_SHARE
from nightshift.stages._actor import (
    ActorSpec,
    HangWatch,
    JobDescription,
    Recorder,
    TicketsInPlay,
    init_state_digests,
    make_tickets,
    run_actor,
)
from nightshift.stream import listening
from nightshift.stream.experience import StreamedExperience
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.server import Server

_GOODBYE_SECONDS = 10.0
_STOP_SECONDS = 2.0
_RESTARTS = 3
"""Of an actor between two episodes that arrive; after that the stage ends."""

_log = logging.getLogger(__name__)


class Actors:
    """The processes that the stage starts, and starts again if they end.

    A ticket that is played alone and ends its actor, or makes it hang, MAX_ATTEMPTS times is given up, as on Ray
    (`rollouts/retries.py`). Every other end of an actor counts against its restarts, which every episode that arrives
    refills.
    """

    def __init__(
        self,
        specs: Sequence[ActorSpec],
        *,
        most_in_play: int,
        arrived: Callable[[], int],
        main: Callable[..., None] = run_actor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_in_play` tickets at a time per actor; `arrived` episodes so far; `main` of every process.

        `start` has to be followed by `stop`, also after an error: the exit of this process waits for the actors.
        """
        self._arrived = arrived
        self._last_arrived = arrived()
        self._deaths: Counter[int] = Counter()  # of actors by the ticket that they were playing
        self._alone: set[int] = set()  # tickets that were in play when an actor ended
        self._specs = specs
        self._begin = partial(_Actor, most_in_play=most_in_play, main=main, clock=clock)
        self._actors: list[_Actor] = []

    def start(self) -> None:
        for spec in self._specs:
            with deferred():  # a process that is not among them yet would not be stopped
                self._actors.append(self._begin(spec))

    def check(self) -> None:
        """End those that hang, and start those again that have ended; an error if that does not help."""
        for actor in self._actors:
            if actor.is_alive and actor.seconds_without_step() > TIMEOUT_SECONDS:
                _log.warning("%s has made no step for %.0f s", actor.spec.name, TIMEOUT_SECONDS)
                actor.kill()
            if not actor.is_alive:
                self._restart(actor)

    def join(self) -> None:
        self._join(_GOODBYE_SECONDS)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for actor in self._actors:
            actor.process.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Terminate the actors, and kill those that do not end in time. No episode is lost: finished ones are on disk,
        and others are played again. After a kill a robot moves on until its watchdog stops it, and a question to a
        person stays open."""
        for actor in self._actors:
            actor.process.terminate()
        self._join(_STOP_SECONDS)
        for actor in self._actors:
            actor.kill()

    def _restart(self, ended: _Actor) -> None:
        if self._arrived() > self._last_arrived:
            self._last_arrived = self._arrived()
            for actor in self._actors:
                actor.refill()
        error, tickets = ended.error(), ended.in_play.get()
        if error is None and len(tickets) == 1:
            self._blame(tickets[0])
        else:
            ended.spend_restart(error)
        reason = error.what if error else f"exit code {ended.process.exitcode}"
        _log.warning("%s ended (%s) and is started again", ended.spec.name, reason)
        given_up = frozenset(ticket for ticket, deaths in self._deaths.items() if deaths >= MAX_ATTEMPTS)
        self._alone |= set(tickets)
        ended.start(replace(ended.spec, alone=frozenset(self._alone), given_up=given_up))

    def _blame(self, ticket: int) -> None:
        self._deaths[ticket] += 1
        given_up = sum(deaths >= MAX_ATTEMPTS for deaths in self._deaths.values())
        if given_up > max(MAX_INVALID, MAX_INVALID_SHARE * self._arrived()):
            raise RolloutError(
                f"the simulator ended its process on {given_up} init states, {MAX_ATTEMPTS} times each",
                "set machine.actors and machine.workers to 0 in params.yaml to see its output",
            )


class _Actor:
    """One actor's process, and those that took its place."""

    def __init__(
        self, spec: ActorSpec, most_in_play: int, main: Callable[..., None], clock: Callable[[], float]
    ) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._main = main
        self.in_play = TicketsInPlay(self._context, most_in_play)
        self._watch = HangWatch(self.in_play, clock)
        self.refill()
        self.start(spec)

    @deferred()
    def start(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.in_play.set([])
        self._failed, failed = self._context.Pipe(duplex=False)
        # Not daemonic, since a daemonic process may start no other: the scripted expert decides in some of its own.
        process = self._context.Process(target=self._main, args=(spec, self.in_play, failed))
        process.start()
        self.process = process
        failed.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def seconds_without_step(self) -> float:
        return self._watch.seconds_without_step()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def error(self) -> NightshiftError | None:
        """What the process that has ended said; None if it was killed."""
        try:
            found = self._failed.recv()
        except (EOFError, OSError):
            return None
        finally:
            self._failed.close()
        assert isinstance(found, NightshiftError)
        return found

    def refill(self) -> None:
        self._restarts = _RESTARTS
        self._last_error = ""

    def spend_restart(self, error: NightshiftError | None) -> None:
        """Raise if the process ended with the same error twice, or too often."""
        if error is not None and (not self._restarts or str(error) == self._last_error):
            raise error
        if not self._restarts:
            raise RolloutError(
                f"{self.spec.name} ended {_RESTARTS + 1} times, the last time with exit code {self.process.exitcode}",
                "see its error above; run again: it resumes",
            )
        self._restarts -= 1
        self._last_error = str(error) if error else ""


@contextmanager
def open_experience(
    job: Job, pool: Pool, *, seed: int, env: config.Env, states: config.States, rlpd: config.Rlpd
) -> Iterator[Experience]:
    if job.machine.actors:
        with _streamed(job, seed=seed, env=env, states=states, rlpd=rlpd) as streamed:
            yield streamed
        return
    tasks, reward = envs.tasks(env), open_reward(rlpd.reward, env)
    yield LocalExperience(
        pool,
        make_tickets(tasks, states, seed, reward, rlpd.interventions),
        EpisodeStore(job.state / "episodes"),
        Recorder(tasks=tasks, discount=rlpd.discount, reward=reward, commit=job.commit),
        at_once=rlpd.episodes_at_once,
        staleness=rlpd.staleness,
    )


@contextmanager
def _streamed(
    job: Job, *, seed: int, env: config.Env, states: config.States, rlpd: config.Rlpd
) -> Iterator[StreamedExperience]:
    """Start the actors; stop them when learning is over."""
    run = paths.short(job.fingerprint)
    listen = listening.address(job.machine.listen)
    token = access.token_of_user() or secrets.token_hex()  # other users of this machine reach loopback, too
    with (
        LearnerEndpoint.open(job.state, run=run) as endpoint,
        Server(endpoint, host=listen[0], port=listen[1], token=token) as server,
        ports.held(server.port),
    ):
        described = JobDescription(
            run=run,
            incarnation=endpoint.incarnation,
            seed=seed,
            env=env,
            states=states,
            discount=rlpd.discount,
            reward=rlpd.reward,
            interventions=rlpd.interventions,
            commit=job.commit,
            versions=version_check.versions(env.suite),
            init_states=init_state_digests(env),
            at_once=rlpd.episodes_at_once,
        )
        host = access.host_of_this_machine(listen[0])
        specs = [
            described.actor(
                f"actor-{index}",
                folder=job.state / "actors" / str(index),
                learner=(host, server.port),
                token=token,
                machine=job.machine,
            )
            for index in range(job.machine.actors)
        ]
        actors = Actors(specs, most_in_play=rlpd.episodes_at_once, arrived=lambda: len(endpoint.inbox))
        try:
            actors.start()
            experience = StreamedExperience(
                endpoint,
                at_once=rlpd.episodes_at_once,
                staleness=rlpd.staleness,
                job=described.to_json(),
                check_actors=actors.check,
            )
            yield experience
            experience.end(_GOODBYE_SECONDS)
            actors.join()
        finally:
            actors.stop()
