import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import av
import pytest
from PIL import Image
from rich.console import Console

import nightshift
from nightshift import config, files, policies
from nightshift.envs import grid, protocols
from nightshift.envs.fake import FAKE
from nightshift.errors import RolloutError, SimulatorError
from nightshift.pipeline import summary
from nightshift.pipeline.job import Job
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import paths, playing
from nightshift.reports import figures
from nightshift.reports.candidates import policy_files
from nightshift.rollouts.local import LocalPool
from nightshift.stages import evaluate, register
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import REPOSITORY, add_store, install, leave_skipped
from tests.robots.parts import served
from tests.rollouts.faulty import AT_STEP, Unstable
from tests.rollouts.parts import Reaching, Seeing
from tests.stages.test_collect import FailingPool

HISTORY = {
    "algorithm": "grpo",
    "iterations": [{"rollout/success": 0.5, "update/kl": 0.01}],
    "validation": [{"iteration": 0, "successes": 5, "episodes": 10}],
    "kept": 0,
}


def leave(name: str, history: object = None) -> None:
    """As a training stage does."""
    with files.new_folder(paths.MODELS / name) as folder:
        policies.save(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[4], chunk=1, action_dim=7), folder)
        if history:
            files.write_json(folder / paths.HISTORY, history)


@pytest.fixture
def two_policies(project: object) -> None:
    leave("sft")
    leave("rloo", HISTORY)
    leave_skipped("rlpd")


def run(job: Job, params: config.Params) -> dict[str, Any]:
    evaluate.run(job, env=params.env, evaluate=params.evaluate)
    report: dict[str, Any] = json.loads(paths.EVALUATION_REPORT.read_text())
    return report


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at it: to draw it takes as long as to play the grid."""
    monkeypatch.setattr(figures, "evaluation", lambda path, *_: path.touch())


@pytest.mark.usefixtures("two_policies")
def test_every_cell_of_the_grid_counts_once(job: Callable[[str], Job], params: config.Params) -> None:
    run(job("evaluate"), params)
    outcomes = json.loads(paths.EVALUATION_OUTCOMES.read_text())
    cells = [(task, state) for task in ("near", "far") for state in range(10)]
    for policy in ("sft", "rloo"):
        assert [(o["task"], o["init_state"]) for o in outcomes[policy]] == cells
    assert paths.EVALUATION_FIGURE.stat().st_size > 10_000


@pytest.mark.usefixtures("two_policies")
def test_where_suites_are_joined_each_has_its_steps_and_its_rate(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"short": 2, "long": 30}
    homes = {"near": "short", "far": "long"}
    for suite, count in steps.items():
        monkeypatch.setitem(cast(dict[str, int], protocols.DEFAULT.max_steps), suite, count)
    monkeypatch.setattr(FAKE, "benchmarks", lambda: tuple(steps))
    monkeypatch.setattr(FAKE, "benchmark", lambda task: homes[task.name])
    auto = params.model_copy(update={"env": params.env.model_copy(update={"horizon": "auto"})})
    report = run(job("evaluate"), auto)
    outcomes = json.loads(paths.EVALUATION_OUTCOMES.read_text())
    for policy in ("sft", "rloo"):
        for task, suite in homes.items():
            failed = {o["length"] for o in outcomes[policy] if o["task"] == task and not o["success"]}
            assert failed == {steps[suite]}, "random policies solve nothing in two steps, and not all in 30"
    assert report["conditions"]["horizon"] == steps
    best = report["candidates"][0]
    assert best["suites"] == {"short": best["tasks"]["near"], "long": best["tasks"]["far"]}
    rows = paths.EVALUATION_SUCCESS.read_text()
    assert all(f'"{suite}, sft",' in rows for suite in steps)
    assert json.loads(paths.EVALUATION_METRICS.read_text())["sft"]["suite"].keys() == steps.keys()
    assert "  short " in printed()
    assert "  near " not in printed(), "tasks of joined suites are too many for a terminal"


def test_only_held_out_states_are_played(params: config.Params) -> None:
    assert {request.split for request in evaluate.grid(params.env, 50)} == {"eval"}


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_a_killed_evaluation_plays_only_what_is_missing_and_reports_the_same(
    job: Callable[[str], Job], params: config.Params
) -> None:
    whole = run(job("evaluate"), params)
    for journal in (job("evaluate").state / "rloo.jsonl", journal_of("rloo", params)):
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[:-3]) + lines[-1][:7])
    pool = FailingPool(params.env)
    assert run(replace(job("evaluate"), pool=lambda env: pool), params) == whole
    assert len(pool.played) == 3


def journal_of(name: str, params: config.Params) -> Path:
    """That of the policy, for later evaluations."""
    how = playing.evaluation(Path(), params.env, params.evaluate)
    return playing.journal(how, policy_files(paths.MODELS / name, ""))


GRID = 20
"""Episodes of each policy."""


class Killing(FailingPool):
    """The process that plays dies after some episodes; counts those of each policy."""

    def __init__(self, env: config.Env, after: int = 10**6) -> None:
        super().__init__(env)
        self._after = after
        self.counts: list[int] = []

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        self.counts.append(0)
        for played in super().run(requests, policy):
            if sum(self.counts) == self._after:
                raise KeyboardInterrupt
            self.counts[-1] += 1
            yield played


Evaluation = Callable[..., list[int]]


@pytest.fixture
def evaluation(job: Callable[[str], Job], params: config.Params, no_figure: None) -> Evaluation:
    """Evaluates a clone that solves most of the grid, and what else is in models; says how many episodes each policy
    played. Every evaluation of another name has a folder of its own, as one with other inputs has."""
    Reaching.leave(paths.SFT_POLICY, gain=10.0)
    Reaching.leave(paths.RLOO_POLICY, gain=20.0)
    leave_skipped("rlpd")

    def play(name: str, *, forced: bool = False, dies_after: int = 10**6, **changes: Any) -> list[int]:
        chosen = params.model_copy(update=changes)
        pool = Killing(chosen.env, dies_after)
        state = job("evaluate").state / name
        try:
            run(replace(job("evaluate"), state=state, forced=forced, pool=lambda env: pool), chosen)
        except KeyboardInterrupt:
            assert sum(pool.counts) == dies_after
        return pool.counts

    return play


def results() -> tuple[Any, Any]:
    return json.loads(paths.EVALUATION_REPORT.read_text()), json.loads(paths.EVALUATION_OUTCOMES.read_text())


def test_when_one_policy_is_trained_again_it_plays_alone_with_the_results_of_a_fresh_evaluation(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluation("first") == [GRID, GRID]
    clone = results()[1]["sft"]
    Reaching.leave(paths.RLOO_POLICY, gain=5.0)
    assert evaluation("second") == [GRID]
    assert "sft: 20 episodes were played in an earlier evaluation" in capsys.readouterr().out
    reused = results()
    shutil.rmtree(paths.PLAYED)
    assert evaluation("fresh") == [GRID, GRID]
    assert results() == reused
    assert reused[1]["sft"] == clone != reused[1]["rloo"], "policies that could not be told apart would show nothing"


def test_what_a_killed_evaluation_has_played_counts_when_another_policy_is_trained_again(
    evaluation: Evaluation,
) -> None:
    assert evaluation("first", dies_after=7) == [7]
    Reaching.leave(paths.RLOO_POLICY, gain=5.0)
    assert evaluation("second", dies_after=GRID) == [GRID - 7, 7]
    assert evaluation("second") == [GRID - 7]


def test_policies_play_again_where_any_param_of_the_evaluation_differs(
    evaluation: Evaluation, params: config.Params
) -> None:
    evaluation("first")
    others: list[tuple[str, dict[str, Any], int]] = [
        ("env", {"horizon": 13}, GRID),
        ("env", {"protocol": "rlinf"}, GRID),
        ("env", {"tasks": ("far",)}, GRID // 2),
        ("evaluate", {"temperature": 1.0}, GRID),
        ("evaluate", {"init_states": 5}, GRID // 2),
    ]
    for number, (section, changes, episodes) in enumerate(others):
        other = getattr(params, section).model_copy(update=changes)
        assert evaluation(f"other-{number}", **{section: other}) == [episodes, episodes], changes
    assert evaluation("first-again") == []
    with_films = params.evaluate.model_copy(update={"films": 1})
    assert sum(evaluation("with-films", evaluate=with_films)) <= 2, "the films alone"


@pytest.mark.parametrize("part", ["envs/fake.py", "rollouts/engine.py", "policies/heads.py", "stages/evaluate.py"])
def test_policies_play_again_with_other_code(evaluation: Evaluation, part: str) -> None:
    code = Path("src/nightshift") / part
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text("one = 1\n")
    evaluation("first")
    code.write_text("one = 2\n")
    assert evaluation("second") == [GRID, GRID]


@pytest.mark.parametrize("package", ["torch", "mujoco"])
def test_policies_play_again_with_other_packages(
    evaluation: Evaluation, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation("first")
    monkeypatch.syspath_prepend(install(tmp_path / "installed", **{package: "99.1"}))
    assert version(package) == "99.1"
    assert evaluation("second") == [GRID, GRID]


@pytest.mark.parametrize("file", [policies.SPEC, policies.WEIGHTS, "vocabulary.json", paths.HISTORY])
def test_a_policy_plays_again_if_any_of_its_files_differs_but_for_the_history_of_its_training(
    evaluation: Evaluation, file: str, tmp_path: Path
) -> None:
    evaluation("first")
    Reaching.leave(tmp_path / "other", gain=5.0)
    kept = {name: (paths.RLOO_POLICY / name).read_bytes() for name in (policies.SPEC, policies.WEIGHTS)}
    changed = {
        policies.SPEC: kept[policies.SPEC] + b" ",
        policies.WEIGHTS: (tmp_path / "other" / policies.WEIGHTS).read_bytes(),
        "vocabulary.json": b"{}",
        paths.HISTORY: json.dumps(HISTORY).encode(),
    }
    with files.new_folder(paths.RLOO_POLICY) as folder:
        for name, content in {**kept, file: changed[file]}.items():
            (folder / name).write_bytes(content)
    assert evaluation("second") == ([] if file == paths.HISTORY else [GRID])


def test_an_episode_that_was_invalid_is_played_again_by_the_next_evaluation(
    evaluation: Evaluation, job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.init_state == 7)
    run(replace(job("evaluate"), pool=lambda env: pool), params)
    Reaching.leave(paths.RLOO_POLICY, gain=5.0)
    assert evaluation("second") == [2, GRID]


def test_an_evaluation_that_is_to_play_again_does_so_and_resumes_from_what_it_has_played_itself(
    evaluation: Evaluation,
) -> None:
    evaluation("first")
    before = results()
    assert evaluation("first", forced=True, dies_after=GRID + 3) == [GRID, 3]
    assert evaluation("first", forced=True, dies_after=5) == [5], "its next try, as by Prefect"
    assert evaluation("first") == [GRID - 8], "a run that is not forced goes on where a forced one was killed"
    assert results() == before
    assert evaluation("first", forced=True) == [GRID, GRID]
    Reaching.leave(paths.RLOO_POLICY, gain=5.0)
    assert evaluation("second", forced=True) == [GRID, GRID]
    assert evaluation("third") == []


def test_on_a_robot_every_policy_plays_in_every_evaluation(evaluation: Evaluation, params: config.Params) -> None:
    with served(params.env.model_copy(update={"horizon": 2})) as env:
        one = params.evaluate.model_copy(update={"init_states": 1})
        for name in ("first", "second"):
            assert evaluation(name, env=env, evaluate=one) == [2, 2]
    assert not paths.PLAYED.exists()


def test_what_it_takes_from_earlier_evaluations_is_in_the_folder_that_goes_to_another_node(
    evaluation: Evaluation, job: Callable[[str], Job]
) -> None:
    evaluation("first")
    Reaching.leave(paths.RLOO_POLICY, gain=5.0)
    assert evaluation("second", dies_after=3) == [3]
    paths.PLAYED.rename("left-behind")
    assert evaluation("second") == [GRID - 3]
    Reaching.leave(paths.RLOO_POLICY, gain=6.0)
    assert evaluation("third") == [GRID], "there, too, the clone is known from now on"


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_an_invalid_episode_is_left_out_counted_and_played_again_when_resumed(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.init_state == 7)
    report: Any = run(replace(job("evaluate"), pool=lambda env: pool), params)
    for result in report["candidates"]:
        assert result["invalid"] == 2
        assert result["overall"]["episodes"] == 18
        assert [task["episodes"] for task in result["tasks"].values()] == [9, 9]
    assert "without 2 episodes in which the simulator failed" in printed()
    mended = FailingPool(params.env)
    report = run(replace(job("evaluate"), pool=lambda env: mended), params)
    assert [request.init_state for request in mended.played] == [7] * 4
    assert [result["overall"]["episodes"] for result in report["candidates"]] == [20, 20]
    assert "simulator failed" not in printed()


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_an_episode_that_the_policy_drove_into_unstable_physics_counts_as_a_failure(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = LocalPool(params.env, make_fleet=Unstable(frozenset({7})))
    report: Any = run(replace(job("evaluate"), pool=lambda env: pool), params)
    outcomes = json.loads(paths.EVALUATION_OUTCOMES.read_text())
    for candidate in report["candidates"]:
        assert (candidate["invalid"], candidate["overall"]["episodes"]) == (0, 20)
        unstable = [o for o in outcomes[candidate["name"]] if o["init_state"] == 7]
        assert [(o["success"], o["valid"], o["length"]) for o in unstable] == [(False, True, AT_STEP)] * 2


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_a_task_without_one_valid_episode_has_no_rate(job: Callable[[str], Job], params: config.Params) -> None:
    pool = FailingPool(params.env, breaks=lambda request: request.task == "far")
    with pytest.raises(RolloutError, match="failed in every episode of far"):
        run(replace(job("evaluate"), pool=lambda env: pool), params)
    assert not paths.EVALUATION.exists()


def printed() -> str:
    """What a user reads on a terminal of 80 columns; Prefect's page says the same about invalid episodes."""
    gathered = summary.gather(Path(), [])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary.render(gathered))
    text = console.export_text()
    assert ("simulator failed" in text) == ("simulator failed" in summary.markdown(gathered))
    return text


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_another_grid_has_another_digest(job: Callable[[str], Job], params: config.Params) -> None:
    digests = set()
    for states, horizon, protocol in ((1, 12, "rlinf"), (2, 12, "rlinf"), (1, 13, "rlinf"), (1, 12, "openvla-oft")):
        env = params.env.model_copy(update={"horizon": horizon, "protocol": protocol})
        pool = LocalPool(env)
        state = job("evaluate").state / f"{states}-{horizon}-{protocol}"
        fresh = replace(job("evaluate"), state=state, pool=lambda _, p=pool: p)  # type: ignore[misc]
        evaluate.run(fresh, env=env, evaluate=params.evaluate.model_copy(update={"init_states": states}))
        digests.add(json.loads(paths.EVALUATION_REPORT.read_text())["grid"]["digest"])
    assert len(digests) == 4


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_every_candidate_is_filmed_on_the_same_states_and_films_are_kept_with_the_evaluation(
    job: Callable[[str], Job], params: config.Params
) -> None:
    env = params.env
    pool = LocalPool(env, make_fleet=Seeing())
    filming = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"films": 2})})
    films = run(replace(job("evaluate"), pool=lambda env: pool), filming)["films"]
    assert len(films) == 4
    shown = {name: {(f["task"], f["init_state"]) for f in films if f["candidate"] == name} for name in ("sft", "rloo")}
    assert shown["sft"] == shown["rloo"]
    counted = {
        (name, o["task"], o["init_state"]): (o["success"], o["length"])
        for name, episodes in json.loads(paths.EVALUATION_OUTCOMES.read_text()).items()
        for o in episodes
    }
    for film in films:
        key = (film["candidate"], film["task"], film["init_state"])
        assert counted[key] == (film["success"], film["length"]), "the film shows another episode than was counted"
        with av.open(paths.EVALUATION / film["file"]) as video:
            rate, frames = video.streams.video[0].average_rate, sum(1 for _ in video.decode(video=0))
        assert (rate, frames) == (FAKE.control_hz, film["length"] + 1), "a frame per control step and the final one"
    files.verify_folder(paths.EVALUATION, "")


def test_more_states_than_there_are_is_refused(params: config.Params) -> None:
    with pytest.raises(SimulatorError, match="has 50 evaluation init states, 51 are asked for"):
        evaluate.grid(params.env, 51)


@pytest.mark.usefixtures("two_policies", "no_figure")
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


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_the_code_on_record_is_that_of_before_the_first_episode(
    job: Callable[[str], Job], params: config.Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nightshift"
    for folder in ("envs", "rollouts"):
        shutil.copytree(Path(nightshift.__file__).parent / folder, package / folder)
    monkeypatch.setattr(nightshift, "__file__", str(package / "__init__.py"))
    before, playing = grid.played_by(params.env), job("evaluate")

    def pool(env: config.Env) -> Any:
        (package / "envs" / "fake.py").write_text("# an edit while it plays")
        return playing.pool(env)

    assert run(replace(playing, pool=pool), params)["grid"]["code"] == before
    assert grid.played_by(params.env) != before


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_sampled_actions_are_another_evaluation(job: Callable[[str], Job], params: config.Params) -> None:
    best = run(job("evaluate"), params)
    warm = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"temperature": 1.0})})
    drawn = run(replace(job("evaluate"), state=job("evaluate").state / "warm"), warm)
    assert drawn["grid"]["digest"] != best["grid"]["digest"]
    assert drawn["conditions"]["temperature"] == 1.0


def test_every_state_has_a_seed_of_its_own(params: config.Params) -> None:
    requests = evaluate.grid(params.env, 5, 0.5)
    assert {(request.controller, request.temperature) for request in requests} == {("sample", 0.5)}
    assert len({(request.task, request.seed) for request in requests}) == len(requests)
    assert {request.controller for request in evaluate.grid(params.env, 5)} == {"greedy"}


def test_auto_plays_as_many_states_as_the_protocol(params: config.Params) -> None:
    assert len(evaluate.grid(params.env, "auto")) == 2 * 50


class ByPolicy(FailingPool):
    """Solves chosen init states, by the place of the candidate in the order of play, whatever the policy does."""

    def __init__(self, env: config.Env, solved: Sequence[Callable[[RolloutRequest], bool]]) -> None:
        super().__init__(env)
        self._solved = iter(solved)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        solves = next(self._solved)
        for index, trajectories in super().run(requests, policy):
            yield index, [replace(t, success=solves(requests[index])) for t in trajectories]


@pytest.mark.usefixtures("two_policies")
def test_three_candidates_go_through_evaluation_figure_summary_and_registration(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch, migrated_store: Path
) -> None:
    leave("rlpd", {"iterations": [{"rollout/success": 0.5}], "validation": [], "kept": 1})
    pool = ByPolicy(
        params.env,
        [lambda r: r.init_state < 3, lambda r: r.init_state in (0, 1, 7, 8, 9), lambda r: r.init_state < 8],
    )
    report = run(replace(job("evaluate"), pool=lambda env: pool), params)
    assert [(r["name"], r["label"], r["overall"]["successes"]) for r in report["candidates"]] == [
        ("sft", "SFT", 6),
        ("rloo", "GRPO", 10),
        ("rlpd", "RLPD", 16),
    ]
    assert report["best"] == "rlpd"
    first, second, third = (result["gain"] for result in report["candidates"])
    assert first is None
    assert (second["states"], second["won"], second["lost"], second["gain"]) == (20, 6, 2, 0.2)
    assert (third["won"], third["lost"], third["p_value"]) == (10, 0, 2**-10)
    with Image.open(paths.EVALUATION_FIGURE) as figure:
        assert figure.width > 1800, "a panel of bars and one per training"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path.cwd()}/{paths.MLFLOW_DATABASE}")
    add_store(Path.cwd(), migrated_store)
    register.run(job("register"), register=params.section("register"))
    receipt = json.loads(paths.RECEIPT.read_text())
    assert receipt["candidate"] == "rlpd"
    text = printed()
    for words in ("after SFT", "after GRPO", "after RLPD", "gain over SFT", "+20.0", "+50.0", "< 0.001"):
        assert words in text, words
    assert receipt["reason"] in " ".join(text.replace("│", " ").split())


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_a_clone_that_training_made_worse_is_the_best_candidate(
    job: Callable[[str], Job], params: config.Params
) -> None:
    pool = ByPolicy(params.env, [lambda r: True, lambda r: r.init_state < 8])
    report = run(replace(job("evaluate"), pool=lambda env: pool), params)
    assert report["best"] == "sft"
    gain = report["candidates"][1]["gain"]
    assert (gain["won"], gain["lost"], gain["gain"], gain["p_value"]) == (0, 4, -0.2, 1)


@pytest.mark.usefixtures("two_policies", "no_figure")
@pytest.mark.parametrize("kept", [True, False])
def test_a_policy_that_training_kept_as_it_was_is_not_played_again(
    job: Callable[[str], Job], params: config.Params, kept: bool
) -> None:
    with files.new_folder(paths.RLOO_POLICY) as folder:
        for name in (policies.SPEC, policies.WEIGHTS):
            shutil.copy(paths.SFT_POLICY / name, folder)
        if not kept:  # the same weights in another network
            spec = json.loads((folder / policies.SPEC).read_text())
            (folder / policies.SPEC).write_text(json.dumps({**spec, "activation": "relu"}))
        files.write_json(folder / paths.HISTORY, HISTORY)
    pool = ByPolicy(params.env, [lambda r: r.init_state < 4, lambda r: True])
    report = run(replace(job("evaluate"), pool=lambda env: pool), params)
    clone, trained = report["candidates"]
    assert [clone["overall"]["successes"], trained["overall"]["successes"]] == [8, 8 if kept else 20]
    assert trained["gain"]["won"] == (0 if kept else 12)
    assert [clone["same_policy_as"], trained["same_policy_as"]] == [None, "sft" if kept else None]
    assert len(pool.played) == (20 if kept else 40)
    outcomes = json.loads(paths.EVALUATION_OUTCOMES.read_text())
    assert (outcomes["rloo"] == outcomes["sft"]) == kept
    text = printed()
    assert ("after GRPO: the same policy as after SFT, not played again" in text) == kept
    assert ("gain over SFT" in text) != kept, "an interval of a gain would be that of no measurement"
    words = summary.markdown(summary.gather(Path(), []))
    assert ("not played again" in words) == kept and ("points over SFT" in words) != kept


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_a_champion_that_training_gave_again_is_not_played_and_equal_policies_have_one_film(
    job: Callable[[str], Job], params: config.Params
) -> None:
    with files.new_folder(paths.OPPONENT) as folder:
        for name in (policies.SPEC, policies.WEIGHTS):
            shutil.copy(paths.RLOO_POLICY / name, folder)
        files.write_json(folder / paths.CHAMPION_VERSION, {"version": "3"})
    filming = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"films": 1})})
    pool = LocalPool(params.env, make_fleet=Seeing())
    report = run(replace(job("evaluate"), pool=lambda env: pool), filming)
    champion = report["champion"]
    assert (champion["version"], champion["same_policy_as"]) == ("3", "rloo")
    assert champion["overall"] == report["candidates"][1]["overall"]
    assert [film["candidate"] for film in report["films"]] == ["rloo", "sft"]
    assert "champion, version 3: the same policy as after GRPO, not played again" in printed()


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_the_metrics_of_all_candidates_are_logged(job: Callable[[str], Job], params: config.Params) -> None:
    run(job("evaluate"), params)
    line, _ = (job("evaluate").state / "metrics.jsonl").read_text().splitlines()  # and the report as an artifact
    assert json.loads(line).keys() == {"step", "success/sft", "success/rloo"}


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_the_summary_fits_a_terminal_of_80_columns(job: Callable[[str], Job], params: config.Params) -> None:
    run(job("evaluate"), params)
    text = printed()
    assert "…" not in text, "a column was cut off"
    assert max(map(len, text.splitlines())) == 80


@pytest.mark.usefixtures("two_policies", "no_figure")
def test_the_summary_shows_long_names_of_tasks_whole(job: Callable[[str], Job], params: config.Params) -> None:
    run(job("evaluate"), params)
    name = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
    report = json.loads(paths.EVALUATION_REPORT.read_text())
    for candidate in report["candidates"]:
        candidate["tasks"][name] = candidate["tasks"]["near"]
    files.write_json(paths.EVALUATION_REPORT, report)
    lines = [line.split()[1] for line in printed().splitlines() if len(line.split()) > 1]
    assert name in "".join(lines)


def test_the_cameras_of_an_evaluation_are_those_among_the_inputs_of_its_policies() -> None:
    env = config.load(REPOSITORY / "params.yaml").env
    assert grid.cameras_in(env, {"task", "wrist", "proprio"}) == ["wrist"]
    assert grid.cameras_in(env, {"task"}) == []
