from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from nightshift import config, envs, files
from nightshift.envs.libero.drawing import SAME, draw
from nightshift.envs.libero.env import LiberoEnv, _numpy_seed
from nightshift.envs.libero.setup import quiet
from nightshift.envs.libero.suites import LIBERO_OBJECT, LIBERO_SPATIAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import states
from tests.envs.test_suites import needs_assets
from tests.rollouts.parts import NO_CAMERAS

ARM = slice(1, 8)
"""Joint angles of the arm in an init state, after the time."""
TASK = "pick_up_the_milk_and_place_it_in_the_basket"
OBJECT = config.Env(suite="libero_object", tasks=(TASK,), protocol="openvla-oft", horizon="auto", cameras=NO_CAMERAS)
FEW = config.States(per_task=4, validation_share=0.25)


def run(job: Job, env: config.Env = OBJECT, seed: int = 0) -> dict[str, Any]:
    states.run(job, seed=seed, env=env, states=FEW)
    files.verify_folder(paths.INIT_STATES, "")
    index: dict[str, Any] = json.loads((paths.INIT_STATES / states.INDEX).read_text())
    return index


def test_states_that_are_shipped_are_noted_and_not_copied(job: Callable[[str], Job], params: config.Params) -> None:
    assert set(run(job("states"), params.env)["tasks"]) == {"near", "far"}
    mini = config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=80, cameras=NO_CAMERAS)
    entry = run(job("states"), mini)["tasks"]["lift_cube"]
    assert {split: (of["count"], of["from"]) for split, of in entry.items()} == {
        "train": (200, "shipped"),
        "eval": (250, "shipped"),
    }
    assert entry["train"]["sha256"] == envs.init_states_digest(LIBERO_MINI.tasks()[0], "train")
    assert sorted(path.name for path in paths.INIT_STATES.iterdir()) == ["index.json", "manifest.json"]


def test_noting_what_libero_mini_ships_does_not_import_the_simulator(project: Path) -> None:
    program = """
import sys
from pathlib import Path
from nightshift import config
from nightshift.pipeline.job import Job
from nightshift.stages import states
state = Path(".state/states/test")
job = Job(stage="states", fingerprint="", state=state, tracker=None, pool=None, machine=None, commit="")
cameras = config.Cameras(names=(), size="auto", shadows=True)
env = config.Env(suite="libero_mini", tasks=(), protocol="openvla-oft", horizon=80, cameras=cameras)
states.run(job, seed=0, env=env, states=config.States(per_task=4, validation_share=0.25))
assert not {"mujoco", "robosuite", "libero", "torch"} & set(sys.modules), "heavy"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_horizon_that_no_protocol_has_is_refused_before_anything_runs(job: Callable[[str], Job]) -> None:
    env = config.Env(suite="libero_mini", tasks=(), protocol="openvla-oft", horizon="auto", cameras=NO_CAMERAS)
    with pytest.raises(SimulatorError, match="no number of steps for libero_mini"):
        run(job("states"), env)


def test_a_draw_is_never_like_a_known_state() -> None:
    env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
    first = list(islice(draw(env, 0, known=()), 3))
    again = list(islice(draw(env, 0, known=[first[0].state, first[2].state]), 2))
    assert again[0].seed == first[1].seed
    assert {one.seed for one in first}.isdisjoint({again[1].seed})
    same = env.sample_state(first[1].seed)
    assert same is not None
    np.testing.assert_array_equal(same, first[1].state)


@pytest.mark.usefixtures("project")
def test_training_states_that_were_not_drawn_are_asked_for_with_the_command() -> None:
    with pytest.raises(SimulatorError, match="nightshift stage states"):
        envs.init_state_count(envs.tasks(OBJECT)[0], "train")


@needs_assets
def test_a_train_state_is_never_an_evaluation_state_and_never_solved(job: Callable[[str], Job]) -> None:
    index = run(job("states"))
    (task,) = envs.tasks(OBJECT)
    train, held_out = LIBERO_OBJECT.load_init_states(task, "train"), LIBERO_OBJECT.load_init_states(task, "eval")
    assert (index["tasks"][TASK]["train"]["count"], envs.init_state_count(task, "eval")) == (4, 50)
    assert index["tasks"][TASK]["train"]["sha256"] == envs.init_states_digest(task, "train")
    env = LIBERO_OBJECT.make_env(task)
    for state in train:
        apart = [np.abs(env.positions_in(state) - env.positions_in(other)).max() for other in held_out]
        assert min(apart) > SAME
        assert not env.is_solved_in(state)
    with np.load(paths.INIT_STATES / "libero_object" / f"{TASK}.npz", allow_pickle=False) as arrays:
        same = env.sample_state(int(arrays["seeds"][2]))
    assert same is not None
    np.testing.assert_array_equal(same, train[2])
    env.reset("train", 3)


@needs_assets
def test_the_arm_starts_as_differently_as_in_liberos_evaluation_states(job: Callable[[str], Job]) -> None:
    run(job("states"))
    (task,) = envs.tasks(OBJECT)
    drawn, held_out = (LIBERO_OBJECT.load_init_states(task, split)[:, ARM] for split in ("train", "eval"))
    rest = held_out.mean(axis=0)
    assert 0.7 < np.std(drawn - rest) / np.std(held_out - rest) < 1.4, "28 and 350 joint angles"
    assert np.abs(drawn - rest).max() < 5 * np.std(held_out - rest)


@needs_assets
def test_objects_on_fixtures_start_as_differently_as_in_liberos_evaluation_states() -> None:
    """A bowl lies in a drawer. LIBERO moved the cabinet for every state that it drew, and the bowl with it."""
    (task,) = (task for task in LIBERO_SPATIAL.tasks() if "in_the_top_drawer" in task.name)
    env = LIBERO_SPATIAL.make_env(task)
    fixtures = env._model.body_pos.copy(), env._model.body_quat.copy()
    drawn = np.array([placed(env, seed) for seed in range(100)])
    known = LIBERO_SPATIAL.load_init_states(task, "eval")
    held_out = np.array([env.positions_in(state)[env._objects_xy] for state in known])
    agreement = ks_2samp(drawn.reshape(100, -1), held_out.reshape(50, -1)).pvalue
    assert agreement.min() > 1e-3, "of each coordinate of each object"
    np.testing.assert_array_equal(fixtures[0], env._model.body_pos)
    np.testing.assert_array_equal(fixtures[1], env._model.body_quat)


def placed(env: LiberoEnv, seed: int) -> NDArray[np.float64]:
    """Where the samplers put the objects, before they settle."""
    with env._bound(), quiet(), _numpy_seed(seed):
        env._clear()
        env._placement.draw()
    return np.array(env._data.qpos[env._objects_xy])


@needs_assets
@pytest.mark.usefixtures("forked_processes")
def test_processes_side_by_side_draw_the_same_states(job: Callable[[str], Job]) -> None:
    env = OBJECT.model_copy(update={"tasks": (TASK, "pick_up_the_butter_and_place_it_in_the_basket")})
    alone = with_processes(job("states"), 1)
    index = run(alone, env)
    shutil.rmtree(alone.state)
    assert run(with_processes(job("states"), 2), env) == index


def with_processes(job: Job, count: int) -> Job:
    return replace(job, machine=job.machine.model_copy(update={"workers": count, "threads": 1}))


class DyingDraw(states._Draw):
    def run(self) -> Iterator[None]:
        yield
        os.kill(os.getpid(), signal.SIGKILL)


class EndlessDraw(states._Draw):
    def run(self) -> Iterator[None]:
        for number in count():
            self.draft.write_text(str(number))
            yield
            time.sleep(0.01)


class QuickDraw(states._Draw):
    def run(self) -> Iterator[None]:
        yield


@pytest.mark.usefixtures("forked_processes")
def test_processes_that_draw_stop_when_nobody_wants_more(tmp_path: Path) -> None:
    task, other = LIBERO_OBJECT.tasks()[:2]
    others = set(multiprocessing.active_children())
    draws = [
        QuickDraw(task, "openvla-oft", 0, tmp_path / "quick", 1),
        EndlessDraw(other, "openvla-oft", 0, tmp_path / "endless", 1),
    ]
    drawing = states._drawn_side_by_side(draws, 2)
    assert next(drawing) == task.name
    drawing.close()  # waits for its processes, which would draw for ever
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.usefixtures("forked_processes")
def test_a_process_that_dies_while_it_draws_is_a_sentence(tmp_path: Path) -> None:
    draw = DyingDraw(LIBERO_OBJECT.tasks()[0], "openvla-oft", 0, tmp_path / "draft.npz", 4)
    with pytest.raises(SimulatorError, match="a process that draws init states died"):
        list(states._drawn_side_by_side([draw, draw], 2))


@needs_assets
def test_a_killed_run_goes_on_with_the_states_that_are_missing(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job("states"))
    whole = (paths.INIT_STATES / "libero_object" / f"{TASK}.npz").read_bytes()
    draft = job("states").state / f"{TASK}.npz"
    states._write(draft, states._read(draft)[:2])
    sampled: list[int] = []
    sample = LiberoEnv.sample_state

    def noting(env: LiberoEnv, seed: int) -> NDArray[np.float64] | None:
        sampled.append(seed)
        return sample(env, seed)

    monkeypatch.setattr(LiberoEnv, "sample_state", noting)
    run(job("states"))
    assert (paths.INIT_STATES / "libero_object" / f"{TASK}.npz").read_bytes() == whole
    assert len(sampled) == 2
    draft.unlink()
    run(job("states"), seed=1)
    assert (paths.INIT_STATES / "libero_object" / f"{TASK}.npz").read_bytes() != whole


@needs_assets
def test_an_object_that_starts_on_a_fixture_is_drawn_on_it() -> None:
    """Drawn states settle to where LIBERO's own do: the bowl is on the cabinet, the other one on the stove."""
    env = LIBERO_SPATIAL.make_env(LIBERO_SPATIAL.tasks()[9])
    env.reset("eval", 0)
    expected = {name: body.position for name, body in env.scene().bodies.items()}
    fixtures = env._model.body_pos.copy()
    for drawn in islice(draw(env, 0, known=()), 3):
        np.testing.assert_array_equal(env._model.body_pos, fixtures)
        assert not env.is_solved_in(drawn.state)
        for name, body in env.scene().bodies.items():
            if name.startswith("akita_black_bowl"):
                assert np.abs(body.position - expected[name])[2] < 0.01
                assert np.linalg.norm(body.position - expected[name]) < 0.15
