"""An actor of `rlpd`: a process with its own simulators that plays what the learner orders and sends the episodes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

import torch

from nightshift import config, envs
from nightshift.data.decisions import decision_episode, lost_episode
from nightshift.data.episode import Episode
from nightshift.data.experience import Order
from nightshift.envs.splits import split_training_states
from nightshift.errors import NightshiftError, RolloutError
from nightshift.policies.snapshot import restore
from nightshift.rollouts.base import Pool
from nightshift.rollouts.experience import Tickets, play_tickets
from nightshift.rollouts.opening import open_pool
from nightshift.rollouts.provenance import provenance
from nightshift.stream.experience import orders_from_weights, with_ticket
from nightshift.stream.link import Link
from nightshift.stream.sender import Sender
from nightshift.stream.spool import Spool
from nightshift.stream.tcp_link import TcpLink
from nightshift.types import Task, Trajectory

_POLL_SECONDS = 0.02


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
    commit: str
    alone: frozenset[int] = frozenset()
    """Tickets that were in play when an actor died; each is played by itself, to find the one that ends the process."""
    given_up: frozenset[int] = frozenset()
    """Tickets that ended their actor again and again; their episodes are invalid."""


class TicketsInPlay:
    """What an actor is playing, in shared memory: its learner can still read it when the actor has died."""

    def __init__(self, context: SpawnContext, most: int) -> None:
        self._cells = context.RawArray("q", most + 1)  # how many, and which

    def set(self, tickets: Sequence[int]) -> None:
        self._cells[0] = 0
        self._cells[1 : 1 + len(tickets)] = tickets
        self._cells[0] = len(tickets)

    def get(self) -> list[int]:
        return list(self._cells[1 : 1 + self._cells[0]])


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Makes episodes of what was played: the same in every process."""

    tasks: Sequence[Task]
    discount: float
    commit: str

    def __call__(self, trajectory: Trajectory) -> Episode:
        return decision_episode(trajectory, provenance(trajectory.request, self.tasks, self.commit), self.discount)

    def lost(self, trajectory: Trajectory, order: Order) -> Episode:
        """In the place of an episode that the simulator failed in."""
        policy = restore(order.policy, torch.device("cpu"))
        return lost_episode(policy, provenance(trajectory.request, self.tasks, self.commit))


def make_tickets(tasks: Sequence[Task], states: config.States, seed: int) -> Tickets:
    return Tickets({task: split_training_states(task, states).train for task in tasks}, seed=seed)


def run_actor(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    """The main function of an actor's process; it ends when learning is over, or with the learner.

    An error is sent to `failed`.
    """
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_learner, daemon=True).start()
    machine = spec.machine.model_copy(update={"workers": 0})
    try:
        pool = open_pool(machine, spec.env, torch.device("cpu"))
        act(spec, pool, TcpLink("127.0.0.1", spec.port), in_play)
    except NightshiftError as error:
        failed.send(error)
        raise SystemExit(1) from None
    except Exception as error:
        failed.send(RolloutError(f"actor {spec.index} failed: {error!r}", "see its error above; run again: it resumes"))
        raise


def _end_with_learner() -> None:
    """Also in the middle of an order: the actors of a learner that resumes need the spools."""
    learner = multiprocessing.parent_process()
    assert learner is not None
    learner.join()
    os._exit(1)


def act(spec: ActorSpec, pool: Pool, link: Link, in_play: TicketsInPlay) -> None:
    """Play what is ordered over the link until learning is over."""
    spool = Spool(spec.folder, run=spec.run, actor=f"actor-{spec.index}")
    sender = Sender(spool, link, poll_interval=_POLL_SECONDS)
    player = _Player(spec, pool, spool, in_play)
    try:
        for orders in _published(sender, spool):
            for order in orders:
                player.play(order)
    finally:
        sender.close()
        spool.close()
        pool.close()


def _published(sender: Sender, spool: Spool) -> Iterator[list[Order]]:
    """The open orders whenever they change, until there are none. Raises what stopped the sender."""
    seen = None
    while True:
        spool.check()
        weights = sender.latest_weights
        if weights is None or weights.version == seen:
            time.sleep(_POLL_SECONDS)
            continue
        seen = weights.version
        orders = orders_from_weights(weights)
        if not orders:
            return
        yield orders


class _Player:
    """Plays the actor's share of every order, each ticket once."""

    def __init__(self, spec: ActorSpec, pool: Pool, spool: Spool, in_play: TicketsInPlay) -> None:
        self._spec = spec
        self._pool = pool
        self._spool = spool
        self._in_play = in_play
        tasks = envs.tasks(spec.env)
        self._tickets = make_tickets(tasks, spec.states, spec.seed)
        self._recorder = Recorder(tasks=tasks, discount=spec.discount, commit=spec.commit)
        self._next = 0  # earlier tickets are done: orders come in the order of tickets

    def play(self, order: Order) -> None:
        spec = self._spec
        own = [ticket for ticket in order.tickets if ticket % spec.count == spec.index and ticket >= self._next]
        for ticket in spec.given_up.intersection(own):
            lost = Trajectory.lost(self._tickets.request(ticket, order.controller), 0)
            self._put(ticket, lost, order)
        left = [ticket for ticket in own if ticket not in spec.given_up]
        self._play_together([ticket for ticket in left if ticket not in spec.alone], order)
        for ticket in left:
            if ticket in spec.alone:
                self._play_together([ticket], order)
        self._next = max([self._next, *(ticket + 1 for ticket in own)])

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
