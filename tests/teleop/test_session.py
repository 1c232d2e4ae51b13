"""A person's session: what moves the robot, what stops it, and that the episodes are right to the step."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift import config, envs, files
from nightshift.config import merged
from nightshift.data import dataset_store, sources
from nightshift.data.episode import NO_POLICY
from nightshift.data.episode_store import EpisodeStore
from nightshift.envs.splits import split_training_states
from nightshift.errors import DataError, ProjectError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import dataset
from nightshift.teleop import messages, session
from nightshift.teleop.driver import Driver
from nightshift.teleop.library import FILM_SUFFIX, Library, read_film
from nightshift.teleop.pilot import DEAD_MAN_SECONDS, LEASE_SECONDS
from nightshift.teleop.recorder import Recorder
from nightshift.types import Array, Observation
from tests.data import examples
from tests.teleop.parts import (
    ALICE,
    NAME,
    PERIOD,
    RANGES,
    STILL,
    assert_replays,
    mark,
    rig,
    start,
    stored,
    straight,
)

BOB = 2
FORWARD = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
pytestmark = pytest.mark.usefixtures("project")


def test_a_demo_is_an_ordinary_episode_that_replays_bit_for_bit(params: config.Params) -> None:
    with rig(params) as one:
        one.demonstrate()
        (demo,) = stored(one.library)
        assert demo.success and demo.terminated and not demo.truncated
        assert demo.provenance.source == "human" and demo.provenance.split == "train"
        assert demo.metadata == {"who": "Alice", "judge": "simulator", "fps": 20}
        assert np.array_equal(demo.policy_actions, demo.actions), "a person who drives alone overrides nobody"
        assert not demo.interventions.any() and (demo.policy_versions == NO_POLICY).all()
        assert demo.rewards.tolist() == [0.0] * (demo.length - 2) + [1.0, 0.0]
        assert_replays(demo, params.env)
        film = read_film(one.library.film(0))
        assert film[-1][0] == demo.length - 1, "the film ends with the last state"


def test_what_is_recorded_is_a_source_that_the_stage_dataset_takes(
    params: config.Params, job: Callable[[str], Job]
) -> None:
    with rig(params) as one:
        one.demonstrate()
        one.demonstrate()
        one.order(messages.Choose(type="reset", task="far", init_state=3))
        one.demonstrate()
        one.demonstrate()
        assert [entry.init_state for entry in one.library.entries] == [0, 1, 3, 4], "the next state that is not solved"
    settings = params.dataset.model_copy(update={"sources": (NAME,)})
    dataset.run(job("dataset"), seed=0, dataset=settings)
    found = dataset_store.read(paths.DATASET)
    assert sum(len(list(found.episodes(part))) for part in dataset_store.SPLITS) == 4


def test_the_first_movement_begins_an_episode(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        for _ in range(30):
            one.drive(STILL)
        assert one.steps == 0 and one.session.state()["awaits_motion"]
        one.drive(FORWARD)
        one.drive(STILL)
        assert one.steps == 2, "standing still in the middle of an episode is part of it"


@pytest.mark.parametrize("with_policy", [False, True])
def test_without_a_word_from_the_pilot_the_robot_stops_within_a_second(
    params: config.Params, with_policy: bool
) -> None:
    with rig(params, driver=straight() if with_policy else None) as one:
        one.begin()
        one.drive(FORWARD)
        moved = one.steps
        for _ in range(40):
            one.tick()
        assert one.phase == "paused"
        assert (one.steps - moved) * PERIOD <= DEAD_MAN_SECONDS + PERIOD < 1
        one.drive(FORWARD)
        assert one.phase == "paused", "it does not move again by itself"
        one.order(messages.Resume(type="resume"))
        assert one.phase == "running"


def test_a_closed_tab_stops_the_robot_before_its_next_step(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        one.pilot.release(ALICE)
        one.tick()
        assert one.phase == "paused" and one.steps == 1


def test_a_page_that_was_reloaded_between_two_control_steps_has_to_resume(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD, gripper="closed")
        one.pilot.release(ALICE)
        one.pilot.claim(BOB, "Alice")
        one.tick()
        assert one.phase == "paused" and one.steps == 1
        assert one.session.state()["gripper"] == "closed", "the page learns what the hand holds"
        one.order(messages.Resume(type="resume"), client=BOB)
        assert one.phase == "running"


def test_a_page_that_was_reloaded_during_a_reset_does_not_inherit_the_episode(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(params, driver=straight()) as one:
        one.begin()
        one.order(mark(success=False))
        one.settle()
        plant: Any = one.session._plant
        reset = plant.reset

        def reloaded(*place: Any) -> Any:
            one.pilot.release(ALICE)
            one.pilot.claim(BOB, "Alice")
            return reset(*place)

        monkeypatch.setattr(plant, "reset", reloaded)
        one.order(start())
        assert one.phase == "paused" and one.steps == 0
        one.order(messages.Resume(type="resume"), client=BOB)
        assert one.phase == "running"


def test_a_long_episode_stops_until_somebody_says_how_it_went(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(params) as one:
        monkeypatch.setattr(session, "MAX_SECONDS", 2 / one.setup.suite.control_hz)
        one.begin()
        for _ in range(3):
            one.drive(FORWARD)
        assert one.phase == "paused" and one.steps == 2 and "mark the episode" in one.ear.notices[-1]


def test_one_pilot_at_a_time(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        assert one.pilot.claim(BOB, "Bob").who == "Alice"
        command = messages.Drive(type="drive", seq=9, axes=FORWARD, gripper="open", speed=1.0)
        assert not one.pilot.drive(BOB, command)
        one.order(mark(success=True), client=BOB)
        assert one.phase == "running"
        one.clock.now += LEASE_SECONDS + PERIOD
        assert one.pilot.claim(BOB, "Bob").who == "Bob", "silence ends a lease"
        one.order(messages.Pause(type="pause"), client=ALICE)
        assert not one.pilot.is_held_by(ALICE)


def test_a_command_that_arrives_late_does_not_replace_a_newer_one(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        one.drive(STILL)
        old = messages.Drive(type="drive", seq=1, axes=FORWARD, gripper="open", speed=1.0)
        assert not one.pilot.drive(ALICE, old)
        assert one.pilot.command is not None and not any(one.pilot.command.axes)


def test_speed_scales_the_motion_and_the_gripper_is_open_or_closed(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD, speed=0.25)
        one.drive((0.0, -0.5, 0.0, 0.0, 0.0, 1.0), gripper="closed", speed=0.5)
        one.order(mark(success=True))
        one.settle()
        (demo,) = stored(one.library)
        assert demo.actions[:2].tolist() == [[0.25, 0, 0, 0, 0, 0, -1], [0, -0.25, 0, 0, 0, 0.5, 1]]


def test_taking_over_and_handing_back_records_both_actions_at_every_step(params: config.Params) -> None:
    with rig(params, driver=straight()) as one:
        one.begin()  # the policy drives: one step
        one.drive()
        one.order(messages.TakeOver(type="take_over"))  # still with the command before
        one.drive((0.0, 0.5, 0.0, 0.0, 0.0, 0.0))
        one.order(messages.HandBack(type="hand_back"))
        one.drive((0.0, 0.5, 0.0, 0.0, 0.0, 0.0))
        one.order(mark(success=True))
        one.settle()
        (episode,) = stored(one.library)
        assert episode.interventions.tolist() == [False, False, True, True, False, False, False]
        first, second = np.float32(0.1), np.float32(0.11)
        assert episode.policy_actions[:-1, 0].tolist() == [first, second, first, first, first, second]
        assert episode.actions[:-1, 0].tolist() == [first, second, 0, 0, first, second]
        assert episode.actions[:-1, 1].tolist() == [0, 0, 0, 0.5, 0, 0]
        assert (episode.policy_versions == 7).all()
        assert episode.provenance.source == "human" and episode.metadata["policy"] == "models/straight"
        assert_replays(episode, params.env)


def test_an_episode_that_nobody_touched_is_the_policys(params: config.Params) -> None:
    with rig(params, driver=straight()) as one:
        one.begin()
        one.drive()
        one.order(mark(success=True))
        one.settle()
        (episode,) = stored(one.library)
        assert episode.provenance.source == "policy" and not episode.interventions.any()


def test_failures_are_kept_apart_and_undo_takes_the_last_episode_out(params: config.Params) -> None:
    with rig(params) as one:
        one.demonstrate()
        one.demonstrate()
        one.begin()
        one.drive(FORWARD)
        one.order(mark(success=False))
        one.settle()
        (failure,) = EpisodeStore(one.library.failures)
        assert not failure.success and failure.truncated and not failure.rewards.any()
        assert len(stored(one.library)) == 2
        undo = messages.Undo(type="undo")
        one.order(undo)
        assert not list(EpisodeStore(one.library.failures)) and len(stored(one.library)) == 2
        one.order(undo)
        assert [entry.number for entry in one.library.entries] == [0]
        assert len(list(sources.open_store(NAME))) == 1, "the source is whole at any time"
        one.order(undo)
        assert NAME not in sources.names()
        one.order(undo)
        assert one.ear.notices[-1] == "there is no episode to undo"


def test_only_training_states_are_played(params: config.Params) -> None:
    validation = split_training_states(envs.tasks(params.env)[0], params.states).validation[0]
    with rig(params) as one:
        one.pilot.claim(ALICE, "Alice")
        one.order(messages.Choose(type="reset", task="near", init_state=validation))
        assert one.session.state()["init_state"] == 0
        assert f"no training state {validation}" in one.ear.notices[-1]


def test_a_crash_loses_the_episode_in_the_making_alone_and_says_so(params: config.Params) -> None:
    crashed = Library(NAME, RANGES)
    crashed._claim.release()
    with rig(params) as one:
        one.demonstrate()
        one.begin()
        one.drive(FORWARD)
        one.drive(FORWARD)
        one.library._claim.release()  # as the kernel does for a process that dies
        after = Library(NAME, RANGES)
        expected = "in the middle of an episode (of near from init state 1 by Alice, 2 steps): that episode is lost"
        assert expected in after.lost
        assert [entry.number for entry in after.entries] == [0]
        after.close()
        again = Library(NAME, RANGES)
        assert again.lost == "", "it is said once"
        again.close()


@pytest.mark.parametrize("success", [True, False])
def test_an_episode_that_was_saved_right_before_a_kill_is_not_told_as_lost(
    params: config.Params, monkeypatch: pytest.MonkeyPatch, success: bool
) -> None:
    def killed(_: Recorder) -> None:
        raise KeyboardInterrupt

    with rig(params) as one:
        one.demonstrate()
        one.begin()
        one.drive(FORWARD)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Recorder, "forget", killed)
            one.order(mark(success=success))
            one.settle()
        assert one.library.journal.exists()
        one.library._claim.release()  # as the kernel does for a process that dies
        after = Library(NAME, RANGES)
        assert [entry.number for entry in after.entries] == [0, 1]
        assert (after.lost, after.journal.exists()) == ("", False)
        after.close()


def test_the_same_moves_again_are_another_episode_that_may_be_lost(params: config.Params) -> None:
    with rig(params) as one:
        for _ in range(2):
            one.pilot.claim(ALICE, "Alice")
            one.order(messages.Choose(type="reset", task="near", init_state=3))
            one.begin()
            one.drive(FORWARD)
            if not one.library.entries:
                one.order(mark(success=False))
                one.settle()
    with rig(params) as two:
        assert "(of near from init state 3 by Alice, 1 steps): that episode is lost" in two.library.lost


def test_a_full_disk_keeps_the_episode_in_memory_until_it_can_be_saved(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DataError("no space left", "free some")

    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        with monkeypatch.context() as patch:
            patch.setattr(Library, "_publish", full)
            one.order(mark(success=True))
            one.settle()
            assert one.phase == "paused" and "not saved: no space left" in one.ear.notices[-1]
        one.order(mark(success=True))
        one.settle()
        assert [demo.length for demo in stored(one.library)] == [2]


def failing_at(name: str, path: str) -> Callable[..., Any]:
    """A function of `files` that finds the disk full at paths with this name."""
    real = getattr(files, name)

    def write(file: Path, *arguments: Any) -> Any:
        if path in str(file):
            raise ProjectError("no space left on the disk", "free some")
        return real(file, *arguments)

    return write


def test_a_full_disk_in_the_middle_of_an_episode_stops_the_robot_and_costs_no_step(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        with monkeypatch.context() as patch:
            patch.setattr(files, "append_json", failing_at("append_json", "episode.jsonl"))
            one.drive(FORWARD)
            assert one.phase == "paused" and "no space left" in one.ear.notices[-1] and not one.ear.errors
        one.order(messages.Resume(type="resume"))
        one.drive(FORWARD)
        one.order(mark(success=True))
        one.settle()
        (demo,) = stored(one.library)
        assert demo.length == 5, "the order to resume led to a step as well"
        assert_replays(demo, params.env)


def test_a_session_that_ends_in_the_middle_of_an_episode_leaves_word_of_it(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
    assert one.library.unsaved == "of near from init state 0 by Alice, 1 steps"
    with rig(params) as two:
        assert "(of near from init state 0 by Alice, 1 steps): that episode is lost" in two.library.lost
        two.begin()
    assert not two.library.unsaved, "an episode without a step is no loss"


def test_an_episode_that_its_pilot_throws_away_is_no_loss(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        one.order(messages.Choose(type="reset", task="near", init_state=0))
        assert not one.library.unsaved


def test_a_session_whose_mirror_failed_ends_and_leaves_word_of_its_episode(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        plant: Any = one.session._plant
        plant._mirror.step(np.zeros(2, np.float32), 0.0)  # of another shape
        one.order(mark(success=True))
        one.settle()
        assert "not saved: the simulator that draws the pictures failed" in one.ear.notices[-1]
        assert len(one.ear.errors) == 1
    assert one.library.unsaved


@pytest.mark.parametrize("success", [True, False])
def test_a_film_that_cannot_be_written_costs_the_film_alone(
    params: config.Params, monkeypatch: pytest.MonkeyPatch, success: bool
) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_chunks", failing_at("write_chunks", FILM_SUFFIX))
            one.order(mark(success=success))
            one.settle()
        assert "is saved" in one.ear.notices[-1] and "without its film: no space left" in one.ear.notices[-1]
        one.demonstrate()
        assert [(entry.number, entry.success) for entry in one.library.entries] == [(0, success), (1, True)]
        assert not one.library.film(0) and one.library.film(1)
        assert len(stored(one.library)) == 1 + success


class Slow(Driver):
    """Something happens while the policy decides."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def act(self, look: Callable[[], Observation], *, alone: bool) -> Array:
        self.meanwhile()
        return super().act(look, alone=alone)


def test_a_page_that_is_closed_during_inference_stops_the_robot_before_its_next_step(params: config.Params) -> None:
    driver = Slow(policy=straight().policy, label="slow", version=7)
    with rig(params, driver=driver) as one:
        one.begin()
        one.order(messages.TakeOver(type="take_over"))
        one.drive(FORWARD, gripper="closed")
        made = one.steps
        driver.meanwhile = lambda: one.pilot.release(ALICE)
        one.drive(FORWARD, gripper="closed")
        assert one.phase == "paused" and one.steps == made
        assert one.session.state()["gripper"] == "closed"


def test_without_a_command_the_hand_keeps_what_it_holds(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD, gripper="closed")
        one.pilot.claim(ALICE, "Alice")  # the same page again: nothing is commanded yet
        one.tick()
        assert one.steps == 2 and one.session.state()["gripper"] == "closed"


def test_a_policy_that_was_stopped_plans_anew(params: config.Params) -> None:
    with rig(params, driver=straight()) as one:
        one.begin()
        one.clock.now += DEAD_MAN_SECONDS + PERIOD
        one.tick()
        assert one.phase == "paused"
        one.drive()
        one.order(messages.Resume(type="resume"))
        one.order(mark(success=True))
        one.settle()
        (episode,) = stored(one.library)
        first = np.float32(0.1)
        assert episode.actions[:-1, 0].tolist() == [first, first], "no action of its plan is skipped"
        assert_replays(episode, params.env)


def test_undoing_the_last_success_removes_the_source_and_its_pointer(params: config.Params) -> None:
    with rig(params) as one:
        one.demonstrate()
        one.library.pointer.write_text("outs: []\n")  # as `dvc add` after an earlier session
        one.order(messages.Undo(type="undo"))
        assert not one.library.successes.exists()
    with rig(params) as again:
        assert not again.library.entries, "it starts, and asks for no dvc pull"
        again.demonstrate()
        assert len(stored(again.library)) == 1


def test_a_kill_while_the_last_success_is_undone_damages_nothing(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with rig(params) as one:
        one.demonstrate()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shutil, "rmtree", killed)
            one.library.undo()
    library = Library(NAME, RANGES)
    library.close()
    assert not library.entries and NAME not in sources.names()


def test_an_episode_whose_undo_failed_is_undone_by_the_next(
    params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with rig(params) as one:
        one.demonstrate()
        one.demonstrate()
        with monkeypatch.context() as patch, pytest.raises(ProjectError, match="no space left"):
            patch.setattr(os, "fsync", full)
            one.library.undo()
        assert len(stored(one.library)) == 2
        one.library.undo()
        assert len(stored(one.library)) == 1


def test_a_session_that_ends_while_it_saves_saves(params: config.Params) -> None:
    with rig(params) as one:
        one.begin()
        one.drive(FORWARD)
        one.session.submit(ALICE, mark(success=True))
        one.session.tick()
    assert len(list(sources.open_store(NAME))) == 1


def test_two_processes_cannot_record_into_one_source(params: config.Params) -> None:
    with rig(params), pytest.raises(DataError, match="is in use"):
        Library(NAME, RANGES)


def test_successes_of_another_clone_take_no_number_and_no_film_of_a_failure(params: config.Params) -> None:
    """Films and failures stay on their machine; successes travel by DVC with the numbers of theirs."""
    with rig(params) as theirs:
        theirs.begin()
        theirs.drive(FORWARD)
        theirs.drive(FORWARD)
        theirs.order(mark(success=True))
        theirs.settle()
        came = stored(theirs.library)
        theirs.order(messages.Undo(type="undo"))
    with rig(params) as ours:
        ours.begin()
        ours.drive(FORWARD)
        ours.order(mark(success=False))
        ours.settle()
        film = ours.library.film(0)
    assert film
    with files.new_folder(paths.IMPORTS / NAME) as folder:
        EpisodeStore(folder, ranges=RANGES).put("000000", came[0])
    with contextlib.closing(Library(NAME, RANGES)) as library:
        assert [(entry.number, entry.success) for entry in library.entries] == [(0, True), (1, False)]
        assert (library.film(0), library.film(1)) == (b"", film)
        library.undo()
        assert [(entry.number, entry.success) for entry in library.entries] == [(0, True)]


def test_an_import_of_another_origin_is_not_recorded_into() -> None:
    with files.new_folder(paths.IMPORTS / "kitchen") as folder:
        EpisodeStore(folder).put("0", examples.make())
    with pytest.raises(DataError, match="another origin"):
        Library("kitchen", RANGES)


def test_other_cameras_than_the_source_has_are_refused_before_anybody_plays(params: config.Params) -> None:
    with rig(params) as one:
        one.demonstrate()
    seeing = config.Params.model_validate(
        merged(params.model_dump(mode="json", by_alias=True), {"env": {"cameras": {"names": ["agentview"]}}})
    )
    with pytest.raises(DataError, match=r"observations\.agentview is not declared"), rig(seeing):
        pass


def test_recorded_cameras_show_every_step_whatever_was_shown_live(params: config.Params) -> None:
    env = params.env.model_copy(
        update={"cameras": params.env.cameras.model_copy(update={"names": ("agentview",), "size": 32})}
    )
    seeing = params.model_copy(update={"env": env})
    with rig(seeing) as one:
        one.demonstrate()
        (demo,) = stored(one.library)
    simulator = envs.make(envs.tasks(env)[0], env)
    simulator.reset("train", 0)
    expected = [simulator.camera_images(["agentview"])["agentview"]]
    for action in demo.actions[:-1]:
        simulator.step(action)
        expected.append(simulator.camera_images(["agentview"])["agentview"])
    assert np.array_equal(demo.observations["agentview"], np.stack(expected))


def test_an_order_that_makes_no_sense_now_is_refused_with_a_sentence(params: config.Params) -> None:
    with rig(params) as one:
        one.pilot.claim(ALICE, "Alice")
        one.order(mark(success=True))
        assert "no episode to mark" in one.ear.notices[-1]
        one.order(messages.TakeOver(type="take_over"))
        assert "no policy to take over from" in one.ear.notices[-1]
        one.order(messages.Choose(type="reset", task="../../etc", init_state=0))
        assert "no task" in one.ear.notices[-1]
        one.order(start())
        one.order(start())
        assert "cannot be started" in one.ear.notices[-1]
