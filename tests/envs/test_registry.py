"""The registry: suites by name, imported when they are asked for, from this package and from others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.envs import registry
from nightshift.envs.base import Suite
from nightshift.errors import PluginError, SimulatorError

NO_CAMERAS = config.Cameras(names=(), size="auto", shadows=True)
MODULE = """
from nightshift.envs.base import ActionSpace, ArraySpec, InitStates, Suite
from nightshift.envs.fake import FakeEnv
from nightshift.envs.sequential_fleet import SequentialFleet
from nightshift.types import Task

TASK = Task(suite="elsewhere", name="only", language="reach", index=0, suite_size=1)

class Elsewhere(Suite):
    name = "elsewhere"
    action_space = ActionSpace(size=7)

    def tasks(self): return [TASK]
    def goal(self, task): return (("reach", "goal"),)
    def state_space(self): return dict.fromkeys(("proprio", "objects"), ArraySpec((3,)))
    def init_states(self, task, split): return InitStates(count=3, digest="elsewhere")
    def make_env(self, task, protocol, cameras): return FakeEnv(task, self.drawing(protocol, cameras))
    def make_fleet(self, task, protocol, cameras, train_states=None):
        return SequentialFleet(lambda: self.make_env(task, protocol, cameras))

ELSEWHERE = Elsewhere()
NOT_A_SUITE = "suite"
"""


def install(folder: Path, name: str, **suites: str) -> None:
    """What pip leaves of a distribution whose entry points are `suites`, and its module."""
    (folder / f"{name}.py").write_text(MODULE)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{suite} = {where}" for suite, where in suites.items()]
    (info / "entry_points.txt").write_text("\n".join(["[nightshift.suites]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of this process; suites found there are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    registry.find.cache_clear()
    yield tmp_path
    registry.find.cache_clear()


def test_a_suite_of_another_package_plays_by_name_like_one_of_ours(site: Path) -> None:
    install(site, "their_simulator", elsewhere="their_simulator:ELSEWHERE")
    env = config.Env(suite="elsewhere", tasks=(), protocol="openvla-oft", horizon=9, cameras=NO_CAMERAS)
    (task,) = envs.tasks(env)
    fleet = envs.make_fleet(task, env)
    fleet.reset("train", [0, 1])
    steps = fleet.step(np.ones((2, fleet.action_space.size), np.float32), np.ones(2, np.bool_))
    assert steps.observation["proprio"].shape == (2, 3)
    assert envs.init_state_count(task, "train") == 3
    assert envs.conditions(env, [])["settle_steps"] == 0
    assert registry.names()[-1] == "elsewhere"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (
            {"elsewhere": "no_such_module:SUITE"},
            "elsewhere = no_such_module:SUITE of .* cannot be imported",
        ),
        ({"elsewhere": "their_simulator:MISSING"}, "cannot be imported.*MISSING"),
        ({"elsewhere": "their_simulator:NOT_A_SUITE"}, "is not a Suite with the name elsewhere"),
        ({"nowhere": "their_simulator:ELSEWHERE"}, "is not a Suite with the name nowhere"),
        ({"fake": "their_simulator:ELSEWHERE"}, "the name fake is taken twice in nightshift.suites"),
    ],
)
def test_an_entry_point_that_is_wrong_is_refused_by_name(site: Path, entry: dict[str, str], complaint: str) -> None:
    install(site, "their_simulator", **entry)
    with pytest.raises(PluginError, match=complaint):
        registry.find(*entry)


def test_an_unknown_suite_is_refused_with_every_suite_there_is() -> None:
    with pytest.raises(SimulatorError) as caught:
        envs.suite("libero_maxi")
    assert all(name in caught.value.what for name in registry.names())
    assert "env.suite" in caught.value.next_step


def test_listing_suites_and_playing_the_fake_one_imports_no_simulator_and_no_torch() -> None:
    program = """
import sys
import numpy as np
from nightshift import config, envs
from nightshift.envs import registry
assert "nightshift.envs.libero.suites" not in sys.modules
registry.names()
assert "nightshift.envs.libero.suites" not in sys.modules
cameras = config.Cameras(names=("agentview",), size=32, shadows=True)
env = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=9, cameras=cameras)
envs.check_cameras(env)
fleet = envs.make_fleet(envs.tasks(env)[0], env)
fleet.reset("eval", [0])
fleet.look(np.zeros(1, int), ["agentview"])
fleet.step(np.zeros((1, 7), np.float32), np.ones(1, bool))
envs.conditions(env, [])
[envs.suite(name) for name in registry.names()]
heavy = {"mujoco", "robosuite", "libero", "torch", "numba"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN.keys() - {"robot"}))  # its tasks are those of a server
def test_every_suite_of_ours_is_a_suite_of_its_name_with_a_camera_for_every_image(name: str) -> None:
    suite = registry.find(name)
    assert isinstance(suite, Suite)
    images = {
        key: spec.shape
        for key, spec in suite.observation_space(dict.fromkeys(suite.cameras, 64)).items()
        if spec.dtype == "uint8"
    }
    assert images == dict.fromkeys(suite.cameras, (64, 64, 3))
    assert [task.index for task in suite.tasks()] == list(range(suite.tasks()[0].suite_size))
    assert {task.suite for task in suite.tasks()} == {name}
