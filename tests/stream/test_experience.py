"""Orders of episodes, and the episodes that come back, each ticket once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nightshift.data.decisions import decision_episode, lost_episode
from nightshift.data.episode import Episode
from nightshift.data.experience import SOURCE
from nightshift.errors import ConfigError, RolloutError, StreamError
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.stream.experience import Order, StreamedExperience, with_ticket
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LearnerEndpoint, LocalLink
from nightshift.stream.sender import Sender
from nightshift.stream.spool import Spool
from nightshift.stream.weights import WeightPublisher
from tests.data.test_decisions import PROVENANCE, policy, trajectory

POLICY = snapshot(policy(1), version=3)
RUN = "night"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[LearnerEndpoint]:
    inbox = Inbox(tmp_path / "inbox", run=RUN)
    yield LearnerEndpoint(inbox, WeightPublisher(tmp_path / "weights"))
    inbox.close()


def episode(ticket: int, *, lost: bool = False) -> Episode:
    played = decision_episode(trajectory(ticket + 1, 1, success=False), PROVENANCE, 0.9)
    return with_ticket(lost_episode(policy(1), PROVENANCE) if lost else played, ticket, lost=lost)


def send(endpoint: LearnerEndpoint, folder: Path, *episodes: Episode) -> None:
    spool = Spool(folder, run=RUN, actor=folder.name)
    sender = Sender(spool, LocalLink(endpoint), poll_interval=0.01)
    for one in episodes:
        spool.put(one)
    spool.wait_until_empty(timeout=30)
    sender.close()
    spool.close()


def lengths(episodes: list[Episode]) -> list[int]:
    """An episode with ticket t has t + 1 decisions."""
    return [one.length - 1 for one in episodes]


def test_an_order_travels_with_the_weights_of_the_policy(endpoint: LearnerEndpoint) -> None:
    halves = PolicySnapshot.of(POLICY.spec, {"w": torch.tensor([1.5], dtype=torch.bfloat16)}, 4)
    for sent in (POLICY, halves):
        order = Order(tickets=range(3, 9), controller="random", policy=sent)
        endpoint.publisher.publish(order.to_arrays())
        published = endpoint.publisher.latest()
        assert published is not None
        received = Order.from_weights(published)
        assert (received.tickets, received.controller) == (range(3, 9), "random")
        assert received.policy is not None
        assert (received.policy.spec, received.policy.version) == (sent.spec, sent.version)
        mine, theirs = sent.tensors(), received.policy.tensors()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_order_that_ends_has_no_policy(endpoint: LearnerEndpoint) -> None:
    StreamedExperience(endpoint, at_once=1).end()
    published = endpoint.publisher.latest()
    assert published is not None
    assert Order.from_weights(published).policy is None


def test_episodes_come_in_the_order_of_tickets_each_once_whoever_sends_them(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", episode(2), episode(0))
    send(endpoint, tmp_path / "right", episode(1), episode(0), episode(3))
    experience = StreamedExperience(endpoint, at_once=2)
    assert lengths(experience.play(POLICY, "sample")) == [1, 2]
    assert lengths(experience.play(POLICY, "sample")) == [3, 4]
    assert lengths(list(experience.played())) == [1, 2, 3, 4]


def test_what_has_arrived_is_not_ordered_again(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", episode(0), episode(1))
    StreamedExperience(endpoint, at_once=2).play(POLICY, "sample")
    assert endpoint.publisher.latest() is None


def test_it_waits_for_a_missing_ticket_and_looks_after_the_actors_meanwhile(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", episode(0))
    checks = []

    def check() -> None:
        checks.append(endpoint.publisher.version)
        send(endpoint, tmp_path / "right", episode(1))

    experience = StreamedExperience(endpoint, at_once=2, check_actors=check)
    assert lengths(experience.play(POLICY, "sample")) == [1, 2]
    assert checks == [0], "the order is published before anything is waited for"


def test_lost_episodes_are_left_out_and_a_round_of_them_is_passed_over(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    lost = (episode(ticket, lost=True) for ticket in (1, 2, 3))
    send(endpoint, tmp_path / "left", episode(0), *lost, episode(4), episode(5))
    experience = StreamedExperience(endpoint, at_once=2)
    assert [len(experience.play(POLICY, "sample")) for _ in range(2)] == [1, 2]
    assert experience.state["requested"] == 6


def test_a_simulator_that_fails_in_every_episode_ends_the_run(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", *(episode(ticket, lost=True) for ticket in range(10)))
    with pytest.raises(RolloutError, match="failed in every episode of 10 rounds"):
        StreamedExperience(endpoint, at_once=1).play(POLICY, "sample")


def test_a_training_that_began_without_actors_is_not_resumed_with_them(endpoint: LearnerEndpoint) -> None:
    with pytest.raises(ConfigError, match=r"began with machine\.actors: 0") as refused:
        StreamedExperience(endpoint, at_once=1).restore({"requested": 3, SOURCE: "machine.actors: 0"})
    assert refused.value.next_step == "set machine.actors: 0 in params.yaml and run again: it resumes"


def test_a_restored_learner_goes_on_with_the_same_episodes(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", *(episode(ticket) for ticket in range(4)))
    first = StreamedExperience(endpoint, at_once=2)
    first.play(POLICY, "sample")
    state = first.state
    expected = [one.actions for one in first.play(POLICY, "sample")]
    resumed = StreamedExperience(endpoint, at_once=2)
    resumed.restore(state)
    assert lengths(list(resumed.played())) == [1, 2]
    for ours, theirs in zip(resumed.play(POLICY, "sample"), expected, strict=True):
        assert np.array_equal(ours.actions, theirs)


def test_an_episode_that_was_not_ordered_is_named(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", decision_episode(trajectory(2, 1, success=False), PROVENANCE, 0.9))
    with pytest.raises(StreamError, match="has no ticket"):
        StreamedExperience(endpoint, at_once=1).play(POLICY, "sample")
