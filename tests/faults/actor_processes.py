"""Main functions of actors that fail."""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from nightshift import config, envs
from nightshift.access import TOKEN_VARIABLE
from nightshift.errors import StreamError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rewards.reward import SIMULATOR
from nightshift.rollouts.local import LocalPool
from nightshift.stages import _actor
from nightshift.stages._actor import ActorSpec, TicketsInPlay, act, join_learner, make_tickets, open_link
from nightshift.stages._experience import Actors
from nightshift.stream.experience import StreamedExperience
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.server import Server
from tests.rollouts.faulty import Faulty, hang, segfault

AT_ONCE = 6
DEADLY = 2
"""The ticket whose init state ends the simulator's process."""


def segfaults(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    """A real actor whose simulator segfaults on one init state."""
    tickets = make_tickets(envs.tasks(spec.env), spec.states, spec.seed, SIMULATOR, spec.interventions)
    state = tickets.request(DEADLY, "sample").init_state
    pool = LocalPool(spec.env, make_fleet=Faulty({state: segfault}))
    act(spec, pool, open_link(spec), in_play)


def hangs(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    in_play.set([DEADLY])
    in_play.step()
    hang()


def hangs_for_another_machine(learner: tuple[str, int], token: str, machine: config.Machine, folder: Path) -> None:
    """`nightshift actor` with a simulator that hangs."""
    patch = pytest.MonkeyPatch()
    patch.setenv(TOKEN_VARIABLE, token)
    patch.setattr(_actor, "TIMEOUT_SECONDS", 0.5)
    hanging = Faulty(dict.fromkeys(range(1000), hang))
    patch.setattr(_actor, "open_simulators", lambda spec, in_play: LocalPool(spec.env, make_fleet=hanging))
    join_learner(learner, "elsewhere", folder, machine)


def exits(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    os._exit(7)


def reports(spec: ActorSpec, in_play: TicketsInPlay, failed: Connection) -> None:
    failed.send(StreamError("the arm is unplugged", "plug it in"))


def learns(folder: Path, spec: ActorSpec, policy: PolicySnapshot, processes: Connection) -> None:
    """A learner whose actor has played a round, and that goes on; sends the processes below it."""
    with LearnerEndpoint.open(folder, run=spec.run) as endpoint, Server(endpoint) as server:
        placed = replace(spec, learner=("127.0.0.1", server.port), incarnation=endpoint.incarnation)
        actors = Actors([placed], most_in_play=AT_ONCE, arrived=lambda: len(endpoint.inbox))
        actors.start()
        experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, check_actors=actors.check)
        experience.play(policy, "sample")
        processes.send([child.pid for child in psutil.Process().children(recursive=True)])
        hang()
