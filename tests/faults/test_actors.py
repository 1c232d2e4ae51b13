"""Actors of rlpd that die, end with an error, or cannot send."""

from __future__ import annotations

import multiprocessing
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nightshift import config, envs, policies
from nightshift.access import TOKEN_VARIABLE, host_of_this_machine
from nightshift.cli import actor_commands
from nightshift.cluster import version_check
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.data.experience import Order
from nightshift.errors import ConfigError, DataError, RolloutError, StreamError
from nightshift.pipeline.job import Job
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rewards.reward import SIMULATOR
from nightshift.rollouts.local import LocalPool
from nightshift.stages import _experience
from nightshift.stages._actor import (
    ActorSpec,
    JobDescription,
    TicketsInPlay,
    act,
    init_state_digests,
    join_learner,
    make_tickets,
)
from nightshift.stages._experience import Actors
from nightshift.stream import listening
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.experience import StreamedExperience
from nightshift.stream.link import INBOX_FOLDER, LearnerEndpoint, LocalLink
from nightshift.stream.message import Ack, Message
from nightshift.stream.server import Server
from nightshift.stream.tcp_link import TcpLink
from nightshift.stream.weights import Weights
from tests import forks
from tests.faults import actor_processes
from tests.faults.actor_processes import AT_ONCE
from tests.waiting import SECONDS

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[LearnerEndpoint]:
    with LearnerEndpoint.open(tmp_path, run="night") as endpoint:
        yield endpoint


@pytest.fixture
def described(params: config.Params, endpoint: LearnerEndpoint) -> JobDescription:
    return JobDescription(
        run="night",
        incarnation=endpoint.incarnation,
        seed=params.seed,
        env=params.env,
        states=params.states,
        discount=0.9,
        reward=config.SIMULATOR,
        interventions=params.rlpd.interventions,
        commit="abc1234",
        versions=version_check.versions(params.env.suite),
        init_states=init_state_digests(params.env),
        at_once=AT_ONCE,
    )


@pytest.fixture
def spec(tmp_path: Path, described: JobDescription, params: config.Params) -> ActorSpec:
    return described.actor(
        "actor-0", folder=tmp_path / "actor", learner=("127.0.0.1", 0), token=None, machine=params.machine
    )


@pytest.fixture
def policy(params: config.Params) -> PolicySnapshot:
    section = params.policy.model_copy(update={"head": "tanh_gaussian"})
    fleet = envs.make_fleet(envs.tasks(params.env)[0], params.env)
    shapes = {name: values.shape[1:] for name, values in fleet.reset("train", [0]).items()}
    return snapshot(policies.fresh(section, shapes, action_dim=7))


def in_play() -> TicketsInPlay:
    return TicketsInPlay(multiprocessing.get_context("spawn"), AT_ONCE)


@pytest.fixture
def started() -> Iterator[Callable[..., Actors]]:
    """Starts actors, and ends them with the test."""
    found: list[Actors] = []

    def start(*arguments: Any, **options: Any) -> Actors:
        found.append(Actors(*arguments, most_in_play=AT_ONCE, **options))
        found[-1].start()
        return found[-1]

    yield start
    for actors in found:
        actors.stop()


def after_it_ended(actors: Actors) -> None:
    """`check` once the actor has ended."""
    (process,) = (actor.process for actor in actors._actors)
    process.join(60)
    actors.check()


@pytest.mark.slow
def test_a_ticket_that_segfaults_its_simulator_is_given_up_and_the_others_are_played(
    endpoint: LearnerEndpoint, spec: ActorSpec, policy: PolicySnapshot, started: Callable[..., Actors]
) -> None:
    with Server(endpoint) as server:
        placed = replace(spec, learner=("127.0.0.1", server.port))
        actors = started([placed], arrived=lambda: len(endpoint.inbox), main=actor_processes.segfaults)
        experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, check_actors=actors.check)
        first = experience.play(policy, "sample")
        assert (len(first.episodes), first.invalid) == (AT_ONCE - 1, 1)
        assert len(experience.play(policy, "sample").episodes) == AT_ONCE
        actors.stop()


def with_expert(spec: ActorSpec) -> ActorSpec:
    """An actor that simulates in several threads, and whose expert takes over: it decides in processes of its own."""
    takes_over = {"source": "scripted", "stall_steps": 3, "stall_distance": 0.002, "hold_steps": 3}
    return replace(
        spec,
        machine=spec.machine.model_copy(update={"threads": 2, "requests_at_once": 4}),
        interventions=spec.interventions.model_copy(update=takes_over),
    )


def test_the_expert_takes_over_in_an_actor_that_simulates_in_several_threads(
    endpoint: LearnerEndpoint, spec: ActorSpec, policy: PolicySnapshot, started: Callable[..., Actors]
) -> None:
    with Server(endpoint) as server:
        placed = replace(with_expert(spec), learner=("127.0.0.1", server.port))
        actors = started([placed], arrived=lambda: len(endpoint.inbox))
        experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, check_actors=actors.check)
        played = experience.play(policy, "sample")
        actors.stop()
    assert len(played.episodes) == AT_ONCE
    assert any(one.load().interventions.any() for one in played.episodes)


@pytest.mark.slow
def test_a_learner_that_is_killed_leaves_neither_actors_nor_experts(
    tmp_path: Path, spec: ActorSpec, policy: PolicySnapshot
) -> None:
    found, sent = multiprocessing.Pipe(duplex=False)
    learner = forks.fork(actor_processes.learns, tmp_path / "learner", with_expert(spec), policy, sent)
    sent.close()
    processes = [psutil.Process(pid) for pid in found.recv()]
    learner.kill()
    learner.join()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert len(processes) >= 3, "an actor and its two experts"


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_an_actor_that_cannot_be_started_leaves_none_of_those_before_it(
    params: config.Params, job: Callable[[str], Job]
) -> None:
    others = multiprocessing.active_children()
    two = replace(job("rlpd"), commit=SentOnce("abc1234"), machine=params.machine.model_copy(update={"actors": 2}))
    opening = _experience.open_experience(
        two, two.pool(params.env), seed=0, env=params.env, states=params.states, rlpd=params.rlpd
    )
    with pytest.raises(OSError, match="too many open files"), opening:
        pass
    assert multiprocessing.active_children() == others


class SentOnce(str):
    """Cannot be sent to a second process."""

    sent = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        if self.sent:
            raise OSError("too many open files")
        self.sent = True
        return str, (str(self),)


@pytest.mark.slow
def test_restarts_are_limited_and_every_episode_that_arrives_refills_them(
    spec: ActorSpec, started: Callable[..., Actors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_experience, "_RESTARTS", 1)
    arrived = [0]
    actors = started([spec], arrived=lambda: arrived[0], main=actor_processes.exits)
    after_it_ended(actors)
    arrived[0] += 1
    after_it_ended(actors)
    with pytest.raises(RolloutError, match="ended 2 times, the last time with exit code 7"):
        after_it_ended(actors)


def test_an_actor_that_makes_no_step_is_ended_and_its_ticket_is_played_alone(
    spec: ActorSpec, started: Callable[..., Actors]
) -> None:
    now = [0.0]
    actors = started([spec], arrived=lambda: 0, main=actor_processes.hangs, clock=lambda: now[0])
    (actor,) = actors._actors
    first = actor.process
    while not actor.in_play.steps:
        actors.check()
    now[0] += TIMEOUT_SECONDS
    actors.check()
    assert actor.process is first
    now[0] += TIMEOUT_SECONDS + 1
    actors.check()
    assert actor.process is not first
    assert not first.is_alive()
    assert actor.spec.alone == {actor_processes.DEADLY}


def test_an_actor_that_ends_with_the_same_error_twice_ends_the_stage_with_that_error(
    spec: ActorSpec, started: Callable[..., Actors]
) -> None:
    actors = started([spec], arrived=lambda: 0, main=actor_processes.reports)
    after_it_ended(actors)
    with pytest.raises(StreamError, match="the arm is unplugged") as ended:
        after_it_ended(actors)
    assert ended.value.next_step == "plug it in"


class Broken:
    """A link with a fault that is not one of the network."""

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        raise ValueError("the header of the frame is not msgpack")

    def weights(self, newer_than: int) -> Weights | None:
        raise ValueError("the header of the frame is not msgpack")

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_actor_whose_sender_has_stopped_ends_with_the_reason(spec: ActorSpec) -> None:
    with pytest.raises(StreamError, match=r"stopped: .*not msgpack"):
        act(spec, LocalPool(spec.env), Broken(), in_play())


def test_an_actor_plays_what_was_ordered_ahead_and_no_more_while_the_learner_stands_still(
    endpoint: LearnerEndpoint, spec: ActorSpec, policy: PolicySnapshot
) -> None:
    experience = StreamedExperience(endpoint, at_once=2, staleness=1)
    with ThreadPoolExecutor(1) as thread:
        actor = thread.submit(act, spec, LocalPool(spec.env), LocalLink(endpoint, actor=spec.name), in_play())
        experience.play(policy, "sample")
        endpoint.inbox.wait_for_episode(3)  # the round ahead, while nothing is asked for
        experience.end()
        actor.result()
    assert len(endpoint.inbox) == 4
    assert experience.metrics()["queue/ordered"] + experience.metrics()["queue/received"] == 2


TOKEN = "a token of more than sixteen characters"


def test_an_actor_of_another_machine_takes_part_with_the_token_and_the_address_alone(
    endpoint: LearnerEndpoint,
    described: JobDescription,
    params: config.Params,
    policy: PolicySnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, job=described.to_json())
    with Server(endpoint, token=TOKEN) as server, ThreadPoolExecutor(1) as thread:
        address = ("127.0.0.1", server.port)
        actor = thread.submit(join_learner, address, "elsewhere", Path("spools"), params.machine)
        assert len(experience.play(policy, "sample").episodes) == AT_ONCE
        experience.end()
        actor.result()
    assert {one.header.episode_id.actor for one in endpoint.inbox.stored_after(0)} == {"elsewhere"}


@pytest.mark.parametrize(
    "learners",
    [[("first", "night"), ("second", "other")], [("first", "night"), ("second", "night")], [("first", "night")] * 2],
)
def test_an_actor_of_another_machine_asks_a_learner_that_was_started_again_for_its_job(
    described: JobDescription,
    params: config.Params,
    policy: PolicySnapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    learners: list[tuple[str, str]],
) -> None:
    """With other params, in a state folder that was wiped, or resumed after the inbox was emptied."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = 0
    with ThreadPoolExecutor(1) as thread:
        for seed, (folder, run) in enumerate(learners):
            shutil.rmtree(tmp_path / folder / INBOX_FOLDER, ignore_errors=True)
            with (
                LearnerEndpoint.open(tmp_path / folder, run=run) as endpoint,
                Server(endpoint, port=port, token=TOKEN) as server,
            ):
                job = replace(described, run=run, incarnation=endpoint.incarnation, seed=seed).to_json()
                experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, job=job)
                if not port:
                    port = server.port
                    address = ("127.0.0.1", port)
                    actor = thread.submit(join_learner, address, "elsewhere", tmp_path / "spools", params.machine)
                played = [experience.play(policy, "sample").episodes for _ in range(2 - seed)]
                if seed:
                    experience.end()
                    actor.result()
    seeds = {one.load().provenance.seed for one in played[0]}
    tickets = make_tickets(envs.tasks(params.env), params.states, 1, SIMULATOR, params.rlpd.interventions)
    assert seeds == {tickets.request(ticket, "sample").seed for ticket in range(AT_ONCE)}


def test_an_actor_of_another_machine_whose_simulator_hangs_ends_although_its_sender_polls(
    endpoint: LearnerEndpoint,
    described: JobDescription,
    params: config.Params,
    policy: PolicySnapshot,
    tmp_path: Path,
) -> None:
    experience = StreamedExperience(endpoint, at_once=AT_ONCE, staleness=0, job=described.to_json())
    with Server(endpoint, token=TOKEN) as server:
        arguments = (("127.0.0.1", server.port), TOKEN, params.machine, tmp_path / "spools")
        actor = multiprocessing.get_context("spawn").Process(
            target=actor_processes.hangs_for_another_machine, args=arguments, daemon=True
        )
        actor.start()
        experience._orders.append(Order(tickets=range(AT_ONCE), controller="sample", policy=policy))
        for _ in range(10 * SECONDS):
            experience._announce()
            actor.join(0.1)
            if not actor.is_alive():
                break
    assert endpoint.roster.present() == ["elsewhere"]
    assert actor.exitcode == 1


@pytest.mark.usefixtures("project")
def test_an_actor_without_the_classifier_of_its_learner_is_told_so_before_it_is_given_tickets(
    endpoint: LearnerEndpoint,
    described: JobDescription,
    spec: ActorSpec,
    params: config.Params,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    name = "classifier-3fa9c1d2e4b5"
    rewarded = replace(described, reward=name).to_json()
    StreamedExperience(endpoint, at_once=1, staleness=0, job=rewarded).end()
    with Server(endpoint, token=TOKEN) as server:
        with pytest.raises(DataError, match="there is no success classifier in models/classifier") as refused:
            join_learner(("127.0.0.1", server.port), "elsewhere", Path("spools"), params.machine)
        assert refused.value.next_step == "copy models/classifier of the learner's project to this one"
    with pytest.raises(DataError, match="there is no success classifier"):
        act(replace(spec, reward=name), LocalPool(spec.env), LocalLink(endpoint, actor=spec.name), in_play())
    assert endpoint.roster.present() == []


def test_an_actor_with_other_init_states_is_refused(
    endpoint: LearnerEndpoint, described: JobDescription, params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    first, *_ = described.init_states
    drawn = replace(described, init_states={**described.init_states, first: "of another seed"})
    StreamedExperience(endpoint, at_once=1, staleness=0, job=drawn.to_json()).end()
    with Server(endpoint, token=TOKEN) as server:
        with pytest.raises(DataError, match=f"the init states of {first} are not the learner's") as refused:
            join_learner(("127.0.0.1", server.port), "elsewhere", Path("spools"), params.machine)
        assert refused.value.next_step.startswith("copy data/init_states")


def test_an_actor_with_other_packages_or_another_token_is_refused(
    endpoint: LearnerEndpoint,
    described: JobDescription,
    params: config.Params,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(described, versions={**described.versions, "numpy": "0.1"})
    job = other.to_json() | {"env": {"suite": params.env.suite, "renamed": 1}}
    StreamedExperience(endpoint, at_once=1, staleness=0, job=job).end()
    with Server(endpoint, token=TOKEN) as server:
        address = ("127.0.0.1", server.port)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        with pytest.raises(RolloutError, match=r"numpy .*, the driver 0\.1") as refused:
            join_learner(address, "elsewhere", Path("spools"), params.machine)
        assert "start the actor again" in refused.value.next_step
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN[::-1])
        with pytest.raises(StreamError, match="token"):
            join_learner(address, "elsewhere", Path("spools"), params.machine)


def test_a_learner_for_other_machines_needs_a_token_and_an_actor_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"machine\.listen is 0\.0\.0\.0:7777"):
        listening.address("0.0.0.0:7777")
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(StreamError, match="5 characters"):
        listening.address("0.0.0.0:7777")
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert listening.address("0.0.0.0:7777") == ("0.0.0.0", 7777)
    with pytest.raises(ConfigError, match="'gpu-box' is not the address of a learner"):
        actor_commands.join("gpu-box", "")


def test_actors_of_machines_with_the_same_name_have_names_of_their_own_which_they_keep(tmp_path: Path) -> None:
    names = [actor_commands.own_name(tmp_path / machine) for machine in ("one", "other", "one")]
    assert names[0] == names[2] != names[1]


def test_an_actor_of_a_machine_with_a_long_name_can_name_its_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu.box" * 10)
    assert EpisodeId("night", actor_commands.own_name(tmp_path), 0, 0).actor.startswith("gpu-box")


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "[::]"])
def test_actors_of_the_stage_reach_a_learner_that_listens_everywhere(
    endpoint: LearnerEndpoint, monkeypatch: pytest.MonkeyPatch, everywhere: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    host, port = listening.address(f"{everywhere}:0")
    with Server(endpoint, host=host, port=port, token=TOKEN) as server:
        link = TcpLink(host_of_this_machine(host), server.port, token=TOKEN)
        assert link.weights(-1) is None
        link.close()
