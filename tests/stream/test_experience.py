"""Orders of episodes, and the episodes that come back, each ticket once."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nightshift import files
from nightshift.data.decisions import decision_episode, lost_episode
from nightshift.data.episode import NO_POLICY, Episode
from nightshift.data.experience import SOURCE, ExperienceEpisode, Order
from nightshift.errors import ConfigError, DataError, ProjectError, RolloutError, StreamError
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.stream.experience import (
    StreamedExperience,
    job_from_weights,
    orders_from_weights,
    orders_to_arrays,
    with_ticket,
)
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LearnerEndpoint, LocalLink
from nightshift.stream.roster import ABSENT_SECONDS, Roster
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
    return with_ticket(lost_episode(policy(1), PROVENANCE, chunk=1) if lost else played, ticket, lost=lost)


def send(endpoint: LearnerEndpoint, folder: Path, *episodes: Episode) -> None:
    spool = Spool(folder, run=RUN, actor=folder.name)
    sender = Sender(spool, LocalLink(endpoint), poll_interval=0.01)
    for one in episodes:
        spool.put(one)
    spool.wait_until_empty(timeout=30)
    sender.close()
    spool.close()


def streamed(endpoint: LearnerEndpoint, at_once: int, staleness: int = 0, **options: Any) -> StreamedExperience:
    return StreamedExperience(endpoint, at_once=at_once, staleness=staleness, **options)


def lengths(episodes: Sequence[ExperienceEpisode]) -> list[int]:
    """An episode with ticket t has t + 1 decisions."""
    assert [one.load().length - 1 for one in episodes] == [one.transitions for one in episodes]
    return [one.transitions for one in episodes]


def published(endpoint: LearnerEndpoint) -> list[tuple[list[int], int]]:
    """The open orders: their tickets, and the version of the policy that plays them."""
    weights = endpoint.publisher.latest()
    return [] if weights is None else [(list(o.tickets), o.policy.version) for o in orders_from_weights(weights)[0]]


def assigned(endpoint: LearnerEndpoint) -> dict[int, str]:
    """The tickets that were published, and the actors that are to play them."""
    weights = endpoint.publisher.latest()
    assert weights is not None
    return orders_from_weights(weights)[1]


def test_orders_travel_with_the_weights_of_their_policies(endpoint: LearnerEndpoint) -> None:
    halves = PolicySnapshot.of(POLICY.spec, {"w": torch.tensor([1.5], dtype=torch.bfloat16)}, 34)
    orders = [
        Order(tickets=range(3), controller="random", policy=POLICY),
        Order(tickets=range(3, 6), controller="sample", policy=POLICY),
        Order(tickets=range(6, 9), controller="sample", policy=halves),
    ]
    endpoint.publisher.publish(orders_to_arrays(orders, {0: "left", 4: "right"}, {"seed": 3}))
    weights = endpoint.publisher.latest()
    assert weights is not None
    assert orders_from_weights(weights)[1] == {0: "left", 4: "right"}
    assert job_from_weights(weights) == {"seed": 3}
    for sent, received in zip(orders, orders_from_weights(weights)[0], strict=True):
        assert (list(received.tickets), received.controller) == (list(sent.tickets), sent.controller)
        assert (received.policy.spec, received.policy.version) == (sent.policy.spec, sent.policy.version)
        mine, theirs = sent.policy.tensors(), received.policy.tensors()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_at_the_end_no_order_is_open(endpoint: LearnerEndpoint) -> None:
    streamed(endpoint, 1).end()
    assert endpoint.publisher.version == 0
    assert published(endpoint) == []


def test_episodes_come_in_the_order_of_tickets_each_once_whoever_sends_them(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", episode(2), episode(0))
    send(endpoint, tmp_path / "right", episode(1), episode(0), episode(3))
    experience = streamed(endpoint, 2)
    assert lengths(experience.play(POLICY, "sample").episodes) == [1, 2]
    assert lengths(experience.play(POLICY, "sample").episodes) == [3, 4]
    assert lengths(experience.episodes()) == [1, 2, 3, 4]


def test_what_has_arrived_is_not_ordered_again(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", episode(0), episode(1))
    experience = streamed(endpoint, 2)
    experience.play(POLICY, "sample")
    assert endpoint.publisher.latest() is None
    send(endpoint, tmp_path / "left", episode(3))
    streamed(endpoint, 4, check_actors=lambda: send(endpoint, tmp_path / "left", episode(2))).play(POLICY, "sample")
    assert published(endpoint) == [([2], POLICY.version)]


def test_it_waits_for_a_missing_ticket_and_looks_after_the_actors_meanwhile(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", episode(0))
    checks = []

    def check() -> None:
        checks.append(endpoint.publisher.version)
        send(endpoint, tmp_path / "right", episode(1))

    assert lengths(streamed(endpoint, 2, check_actors=check).play(POLICY, "sample").episodes) == [1, 2]
    assert checks == [0], "the order is published before anything is waited for"


def test_lost_episodes_are_left_out_and_a_round_of_them_is_passed_over(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    lost = (episode(ticket, lost=True) for ticket in (1, 2, 3))
    send(endpoint, tmp_path / "left", episode(0), *lost, episode(4), episode(5))
    experience = streamed(endpoint, 2)
    rounds = [experience.play(POLICY, "sample") for _ in range(2)]
    assert [(lengths(one.episodes), one.invalid) for one in rounds] == [([1], 1), ([5, 6], 2)]
    assert lengths(experience.episodes()) == [1, 5, 6]


def test_a_simulator_that_fails_in_every_episode_ends_the_run(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", *(episode(ticket, lost=True) for ticket in range(10)))
    with pytest.raises(RolloutError, match="failed in every episode of 10 rounds"):
        streamed(endpoint, 1).play(POLICY, "sample")


def test_a_training_that_began_without_actors_is_not_resumed_with_them(endpoint: LearnerEndpoint) -> None:
    with pytest.raises(ConfigError, match=r"began with machine\.actors: 0") as refused:
        streamed(endpoint, 1).restore({"collected": 3, "ordered": [], SOURCE: "machine.actors: 0"}, {})
    assert refused.value.next_step == "set machine.actors: 0 in params.yaml and run again: it resumes"


def test_a_restored_learner_goes_on_with_the_same_episodes(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", *(episode(ticket) for ticket in range(4)))
    first = streamed(endpoint, 2)
    first.play(POLICY, "sample")
    state = first.state
    expected = [one.load().actions for one in first.play(POLICY, "sample").episodes]
    resumed = streamed(endpoint, 2)
    resumed.restore(state, {})
    assert lengths(resumed.episodes()) == [1, 2]
    for ours, theirs in zip(resumed.play(POLICY, "sample").episodes, expected, strict=True):
        assert np.array_equal(ours.load().actions, theirs)


def test_an_episode_that_was_learned_from_and_is_gone_is_named_on_resume(tmp_path: Path) -> None:
    with LearnerEndpoint.open(tmp_path, run=RUN) as endpoint:
        before = streamed(endpoint, 3)
        send(endpoint, tmp_path / "actor", *(episode(ticket) for ticket in range(3)))
        played = before.play(POLICY, "sample").episodes
        state, tensors = before.state, before.tensors
    (gone,) = (one.path for one in endpoint.inbox.stored_after(0) if one.transitions == played[1].transitions)
    gone.unlink()
    with LearnerEndpoint.open(tmp_path, run=RUN) as endpoint:
        resumed = streamed(endpoint, 3)
        resumed.restore(state, tensors)
        with pytest.raises(DataError, match=r"tickets 1 were learned from, and .*episodes has them no more"):
            resumed.episodes()


def test_an_episode_that_was_not_ordered_is_named(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    send(endpoint, tmp_path / "left", decision_episode(trajectory(2, 1, success=False), PROVENANCE, 0.9))
    with pytest.raises(StreamError, match="has no ticket"):
        streamed(endpoint, 1).play(POLICY, "sample")


def test_with_staleness_a_round_is_played_by_the_policy_of_so_many_rounds_before(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    experience = streamed(endpoint, 1, staleness=2)
    acted: dict[int, int] = {}
    ages = []
    for version in range(5):
        send(endpoint, tmp_path / "left", episode(version))
        ages.append(experience.play(replace(POLICY, version=version), "sample").weight_age)
        acted |= {ticket: by for tickets, by in published(endpoint) for ticket in tickets}
    assert acted == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3, 6: 4}
    assert ages == [0, 1, 2, 2, 2]


def test_a_learner_that_stands_still_has_ordered_no_more_than_its_staleness_allows(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", *(episode(ticket) for ticket in range(3)))
    streamed(endpoint, 3, staleness=1).play(POLICY, "sample")
    assert published(endpoint) == [([3, 4, 5], POLICY.version)]


def test_a_restored_learner_orders_what_is_missing_with_the_policy_that_it_was_ordered_with(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    send(endpoint, tmp_path / "left", episode(0), episode(1), episode(3))
    first = streamed(endpoint, 2, staleness=1)
    first.play(POLICY, "random")
    state, tensors = json.loads(json.dumps(first.state)), first.tensors
    other = PolicySnapshot.of(POLICY.spec, {name: t + 1 for name, t in POLICY.tensors().items()}, POLICY.version + 1)
    resumed = streamed(endpoint, 2, staleness=1, check_actors=lambda: send(endpoint, tmp_path / "right", episode(2)))
    resumed.restore(state, tensors)
    resumed.play(other, "sample")
    weights = endpoint.publisher.latest()
    assert weights is not None
    ahead, newest = orders_from_weights(weights)[0]
    assert (list(ahead.tickets), ahead.controller, ahead.policy.version) == ([2], "random", POLICY.version)
    assert (list(newest.tickets), newest.controller, newest.policy.version) == ([4, 5], "sample", other.version)
    for name, tensor in POLICY.tensors().items():
        assert torch.equal(ahead.policy.tensors()[name], tensor)
        assert torch.equal(newest.policy.tensors()[name], tensor + 1)


def test_tickets_are_shared_by_the_actors_that_are_there_and_those_of_one_that_went_are_given_to_others(
    tmp_path: Path,
) -> None:
    now = [0.0]
    roster = Roster(clock=lambda: now[0])
    endpoint = replace(LearnerEndpoint.open(tmp_path, run=RUN), roster=roster)
    shared: list[dict[int, str]] = []

    def check() -> None:
        """At each second of waiting: actors appear, nothing happens, one goes, and the others have played."""
        if endpoint.publisher.version >= 0:
            shared.append(assigned(endpoint))
        match len(shared):
            case 1:
                roster.note("left", 0)
                roster.note("right", 0)
            case 3:
                send(endpoint, tmp_path / "left", episode(0))
                now[0] += ABSENT_SECONDS + 1
                roster.note("right", 1)
            case 4:
                send(endpoint, tmp_path / "right", *(episode(ticket) for ticket in (1, 2, 3)))

    experience = streamed(endpoint, 4, check_actors=check)
    assert lengths(experience.play(POLICY, "sample").episodes) == [1, 2, 3, 4]
    both = {0: "left", 1: "right", 2: "left", 3: "right"}
    assert shared == [{}, both, both, dict.fromkeys((1, 2, 3), "right")]
    assert endpoint.publisher.version == 2, "an order that has not changed is not published again"
    endpoint.close()


def test_episodes_in_the_spool_of_an_actor_that_has_gone_are_not_counted(tmp_path: Path) -> None:
    now = [0.0]
    roster = Roster(clock=lambda: now[0])
    with replace(LearnerEndpoint.open(tmp_path, run=RUN), roster=roster) as endpoint:
        experience = streamed(endpoint, 1)
        roster.note("actor", 0)
        waiting = {"stream/spooled": 4.0, "stream/sent": 5.0}
        send(endpoint, tmp_path / "actor", with_ticket(episode(0), 0, counters=waiting))
        experience.play(POLICY, "sample")
        assert experience.metrics()["queue/spooled"] == 4
        now[0] += ABSENT_SECONDS + 1
        assert (experience.metrics()["queue/spooled"], experience.metrics()["stream/sent"]) == (0, 5)


def test_an_episode_of_another_run_is_rejected_and_does_not_disturb_the_learner(
    endpoint: LearnerEndpoint, tmp_path: Path
) -> None:
    with Spool(tmp_path / "old", run="yesterday", actor="old") as spool, Sender(spool, LocalLink(endpoint)):
        spool.put(episode(0))
        with contextlib.suppress(StreamError):
            spool.wait_until_empty(timeout=30)
    send(endpoint, tmp_path / "left", episode(0))
    assert endpoint.inbox.metrics()["inbox/rejected"] == 1
    experience = streamed(endpoint, 2, check_actors=lambda: send(endpoint, tmp_path / "left", episode(1)))
    assert lengths(experience.play(POLICY, "sample").episodes) == [1, 2]


def test_at_the_end_the_learner_waits_until_its_actors_have_heard_it(endpoint: LearnerEndpoint) -> None:
    link, experience = LocalLink(endpoint, actor="left"), streamed(endpoint, 1)
    experience.end()
    link.weights(NO_POLICY)
    assert endpoint.roster.wait_until_all_have(0, timeout=0)
    assert not endpoint.roster.wait_until_all_have(1, timeout=0)
    endpoint.publisher.publish({})
    link.weights(0)
    assert endpoint.roster.wait_until_all_have(1, timeout=0)


def test_a_rejected_episode_ends_the_wait_with_its_reason(endpoint: LearnerEndpoint, tmp_path: Path) -> None:
    first = episode(0)
    spoilt = replace(episode(1), rewards=np.full_like(episode(1).rewards, np.nan))
    spool = Spool(tmp_path / "left", run=RUN, actor="left")
    spool._store.check = lambda *_: None  # type: ignore[method-assign]  # as an actor of another version would do
    with pytest.raises(StreamError, match=r"rejected: .*rewards") as ended, Sender(spool, LocalLink(endpoint)):
        spool.put(first)
        spool.put(spoilt)
        streamed(endpoint, 2).play(POLICY, "sample")
    assert "run again" in ended.value.next_step
    with pytest.raises(StreamError, match="rejected an episode"):
        spool.check()


def test_an_inbox_that_cannot_sync_ends_the_wait(
    endpoint: LearnerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(endpoint, tmp_path / "left", episode(0))
    spool = Spool(tmp_path / "left", run=RUN, actor="left")

    def fail(path: Path) -> None:
        if path == tmp_path / "inbox" / "episodes":
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(files, "sync", fail)
    with (
        pytest.raises(StreamError, match="could not be written"),
        Sender(spool, LocalLink(endpoint), poll_interval=0.01),
    ):
        spool.put(episode(1))
        streamed(endpoint, 2).play(POLICY, "sample")


def test_an_inbox_on_a_full_disk_ends_the_wait(
    endpoint: LearnerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "left", run=RUN, actor="left")
    spool.put(episode(0))

    staged = files.staged

    def full(path: Path, chunks: Any) -> Any:
        if path.is_relative_to(tmp_path / "inbox"):
            raise ProjectError(f"no space left on the disk that holds {path}", "free some space")
        return staged(path, chunks)

    monkeypatch.setattr(files, "staged", full)
    with (
        pytest.raises(StreamError, match=r"could not be stored in .*: no space left"),
        Sender(spool, LocalLink(endpoint), poll_interval=0.01),
    ):
        streamed(endpoint, 1).play(POLICY, "sample")
    assert len(list(spool.unacknowledged())) == 1, "the actor has kept the episode"
