import io
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from nightshift import config, files, policies
from nightshift.errors import RolloutError, SimulatorError
from nightshift.pipeline import summary
from nightshift.pipeline.job import Job
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.project import paths
from nightshift.reports import figures
from nightshift.rollouts.local import LocalPool
from nightshift.stages import evaluate
from tests.rollouts.faulty import AT_STEP, Unstable
from tests.stages.test_collect import FailingPool


@pytest.fixture
def two_policies(project: object) -> None:
    policy = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[4], chunk=1)
    for path in (paths.SFT_POLICY, paths.RLOO_POLICY):
        with files.new_folder(path) as folder:
            policies.save(policy, folder)
            files.write_json(folder / paths.RLOO_HISTORY.name, [{"rollout/success": 0.5, "update/kl": 0.01}])


def run(job: Job, params: config.Params) -> dict[str, Any]:
    evaluate.run(job, env=params.env, evaluate=params.evaluate)
    report: dict[str, Any] = json.loads(paths.EVALUATION_REPORT.read_text())
    return report


@pytest.mark.usefixtures("two_policies")
def test_every_cell_of_the_grid_counts_once(job: Callable[[str], Job], params: config.Params) -> None:
    run(job("evaluate"), params)
    outcomes = json.loads((paths.EVALUATION / evaluate.OUTCOMES).read_text())
    cells = [(task, state) for task in ("near", "far") for state in range(10)]
    for policy in ("sft", "rloo"):
        assert [(o["task"], o["init_state"]) for o in outcomes[policy]] == cells
    assert paths.EVALUATION_FIGURE.stat().st_size > 10_000


def test_only_held_out_states_are_played(params: config.Params) -> None:
    assert {request.split for request in evaluate.grid(params.env, 50)} == {"eval"}


@pytest.mark.usefixtures("two_policies")
def test_a_killed_evaluation_plays_only_what_is_missing_and_reports_the_same(
    job: Callable[[str], Job], params: config.Params
) -> None:
    whole = run(job("evaluate"), params)
    journal = job("evaluate").state / "rloo.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-3]) + lines[-1][:7])
    pool = FailingPool(params.env)
    assert run(replace(job("evaluate"), pool=lambda env: pool), params) == whole
    assert len(pool.played) == 3


@pytest.mark.usefixtures("two_policies")
def test_an_episode_that_the_simulator_spoilt_is_left_out_counted_and_played_again_when_resumed(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.init_state == 7)
    report: Any = run(replace(job("evaluate"), pool=lambda env: pool), params)
    for policy in report["policies"].values():
        assert policy["invalid"] == 2
        assert policy["overall"]["episodes"] == 18
        assert [task["episodes"] for task in policy["tasks"].values()] == [9, 9]
    assert "without 2 episodes in which the simulator failed" in printed()
    mended = FailingPool(params.env)
    report = run(replace(job("evaluate"), pool=lambda env: mended), params)
    assert [request.init_state for request in mended.played] == [7] * 4
    assert [policy["overall"]["episodes"] for policy in report["policies"].values()] == [20, 20]
    assert "simulator failed" not in printed()


@pytest.mark.usefixtures("two_policies")
def test_an_episode_that_the_policy_drove_into_unstable_physics_counts_as_a_failure(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = LocalPool(params.env, make_fleet=Unstable(frozenset({7})))
    report: Any = run(replace(job("evaluate"), pool=lambda env: pool), params)
    outcomes = json.loads((paths.EVALUATION / evaluate.OUTCOMES).read_text())
    for name, policy in report["policies"].items():
        assert (policy["invalid"], policy["overall"]["episodes"]) == (0, 20)
        unstable = [o for o in outcomes[name] if o["init_state"] == 7]
        assert [(o["success"], o["valid"], o["length"]) for o in unstable] == [(False, True, AT_STEP)] * 2


@pytest.mark.usefixtures("two_policies")
def test_a_task_without_one_valid_episode_has_no_rate(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.task == "far")
    with pytest.raises(RolloutError, match="failed in every episode of far"):
        run(replace(job("evaluate"), pool=lambda env: pool), params)
    assert not paths.EVALUATION.exists()


def printed() -> str:
    """What a user reads on the terminal and on Prefect's page."""
    gathered = summary.gather(Path(), [])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary.render(gathered))
    text = console.export_text()
    assert ("simulator failed" in text) == ("simulator failed" in summary.markdown(gathered))
    return text


@pytest.mark.usefixtures("two_policies")
def test_another_grid_has_another_digest(job: Callable[[str], Job], params: config.Params) -> None:
    digests = set()
    for states, horizon, protocol in ((5, 12, "rlinf"), (6, 12, "rlinf"), (5, 13, "rlinf"), (5, 12, "openvla-oft")):
        env = params.env.model_copy(update={"horizon": horizon, "protocol": protocol})
        pool = LocalPool(env)
        state = job("evaluate").state / f"{states}-{horizon}-{protocol}"
        fresh = replace(job("evaluate"), state=state, pool=lambda _, p=pool: p)  # type: ignore[misc]
        evaluate.run(fresh, env=env, evaluate=params.evaluate.model_copy(update={"init_states": states}))
        digests.add(json.loads(paths.EVALUATION_REPORT.read_text())["grid"]["digest"])
    assert len(digests) == 4


def test_a_film_is_a_moving_picture_and_a_strip_of_stills(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (9, 32, 48, 3), dtype=np.uint8)
    figures.film(tmp_path, "lift_cube", frames, strip_frames=4)
    with Image.open(tmp_path / "lift_cube.gif") as film, Image.open(tmp_path / "lift_cube.png") as strip:
        assert getattr(film, "n_frames", 1) == 9
        assert strip.size == (4 * 48, 32)


def test_more_states_than_there_are_is_refused(params: config.Params) -> None:
    with pytest.raises(SimulatorError, match="has 50 evaluation init states, 51 are asked for"):
        evaluate.grid(params.env, 51)


@pytest.mark.usefixtures("two_policies")
def test_the_report_says_what_was_played_under_which_conditions(
    job: Callable[[str], Job], params: config.Params
) -> None:
    assert run(job("evaluate"), params)["conditions"] == {
        "protocol": "openvla-oft",
        "horizon": 12,
        "settle_steps": 0,
        "settle_action": [0, 0, 0, 0, 0, 0, -1],
        "seed": 0,
        "pictures": "not used",
        "versions": {"nightshift": version("nightshift")},
        "temperature": 0.0,
    }


@pytest.mark.usefixtures("two_policies")
def test_a_policy_that_draws_its_actions_is_another_evaluation(
    job: Callable[[str], Job], params: config.Params
) -> None:
    best = run(job("evaluate"), params)
    warm = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"temperature": 1.0})})
    drawn = run(replace(job("evaluate"), state=job("evaluate").state / "warm"), warm)
    assert drawn["grid"]["digest"] != best["grid"]["digest"]
    assert drawn["conditions"]["temperature"] == 1.0


def test_every_state_has_draws_of_its_own(params: config.Params) -> None:
    requests = evaluate.grid(params.env, 5, 0.5)
    assert {(request.controller, request.temperature) for request in requests} == {("sample", 0.5)}
    assert len({(request.task, request.seed) for request in requests}) == len(requests)
    assert {request.controller for request in evaluate.grid(params.env, 5)} == {"greedy"}


def test_auto_plays_as_many_states_as_the_protocol(params: config.Params) -> None:
    assert len(evaluate.grid(params.env, "auto")) == 2 * 50


def test_the_cameras_of_an_evaluation_are_those_its_policies_look_through() -> None:
    seeing, blind = (
        GaussianMlp(inputs=inputs, hidden=[4], chunk=1) for inputs in ({"task": 2, "wrist": 8}, {"task": 2})
    )
    assert evaluate._cameras([blind, seeing]) == ["wrist"]
    assert evaluate._cameras([blind]) == []
