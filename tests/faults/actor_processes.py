"""Main functions of actors that fail."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nightshift import config, envs
from nightshift.access import TOKEN_VARIABLE
from nightshift.errors import StreamError
from nightshift.rewards.reward import SIMULATOR
from nightshift.rollouts.local import LocalPool
from nightshift.stages import _actor
from nightshift.stages._actor import ActorSpec, TicketsInPlay, act, join_learner, make_tickets, open_link
from tests.rollouts.faulty import Faulty, hang, segfault

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
