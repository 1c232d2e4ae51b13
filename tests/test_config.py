"""params.yaml is checked whole: one error names every key that is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nightshift import config
from nightshift.errors import ConfigError
from nightshift.project import graph
from tests.conftest import REPOSITORY

PARAMS: dict[str, Any] = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
NULLABLE = {("rloo", "target_kl")}
VLA: dict[str, Any] = yaml.safe_load((REPOSITORY / "recipes" / "mini_pixels.yaml").read_text())["policy"]
LEAVES = [(section, key) for section, values in PARAMS.items() if isinstance(values, dict) for key in values]


def write(folder: Path, params: Any) -> Path:
    path = folder / "params.yaml"
    path.write_text(params if isinstance(params, str) else yaml.safe_dump(params))
    return path


def changed(section: str, **values: Any) -> dict[str, Any]:
    return {**PARAMS, section: {**PARAMS[section], **values}}


def test_the_shipped_params_are_valid() -> None:
    params = config.load(REPOSITORY / "params.yaml")
    assert params.section("rloo").temperature == PARAMS["rloo"]["temperature"]
    assert params.section("register").model == PARAMS["register"]["model"]


def test_one_error_lists_every_wrong_key_with_its_path(tmp_path: Path) -> None:
    params = changed("rloo", learning_rat=0.1, group_size=1, temperature="0.12")
    params["env"] = {**PARAMS["env"], "horizon": -3}
    params["extra"] = {"a": 1}
    del params["seed"]
    with pytest.raises(ConfigError) as error:
        config.load(write(tmp_path, params))
    for path in (
        "rloo.learning_rat: unknown key",
        "rloo.group_size",
        "rloo.temperature",
        "env.horizon",
        "extra",
        "seed: missing",
    ):
        assert path in str(error.value)
    assert "has 6 problems" in error.value.what


@pytest.mark.parametrize("level", [0.0, 0.51, 1.0])
def test_a_level_at_which_equal_policies_could_replace_each_other_is_refused(tmp_path: Path, level: float) -> None:
    with pytest.raises(ConfigError, match=r"register\.level"):
        config.load(write(tmp_path, changed("register", level=level)))


def test_threads_beside_one_request_at_a_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine: .*threads is 4 and requests_at_once is 1"):
        config.load(write(tmp_path, changed("machine", threads=4, requests_at_once=1)))
    assert config.load(write(tmp_path, changed("machine", threads=4, requests_at_once=3))).machine.threads == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "fsdp"}, "strategy is fsdp, and ranks is 1, which leaves nothing to shard"),
        ({"cpu_offload": True}, "cpu_offload is true, and with strategy data_parallel nothing is offloaded"),
    ],
)
def test_a_strategy_without_effect_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"machine: .*{sentence}"):
        config.load(write(tmp_path, changed("machine", **changes)))


def test_one_rank_may_shard_where_it_offloads(tmp_path: Path) -> None:
    machine = config.load(write(tmp_path, changed("machine", strategy="fsdp", cpu_offload=True))).machine
    assert machine.ranks == 1
    assert machine.has_rank_processes


def test_a_learner_apart_from_workers_is_a_process_of_its_own(tmp_path: Path) -> None:
    machine = config.load(write(tmp_path, changed("machine", placement="apart", workers=1))).machine
    assert machine.has_rank_processes
    with pytest.raises(ConfigError, match=r"machine: .*placement is apart, and with workers 0"):
        config.load(write(tmp_path, changed("machine", placement="apart", workers=0)))


def test_rlpd_has_no_learner_apart_from_workers(tmp_path: Path) -> None:
    recipe = yaml.safe_load((REPOSITORY / "recipes/mini_rlpd.yaml").read_text())
    apart = {"machine": {"placement": "apart", "workers": 1}}
    with pytest.raises(ConfigError, match="rlpd learns in the process of its stage"):
        config.load(write(tmp_path, config.merged(config.merged(PARAMS, recipe), apart)))


def test_an_address_for_actors_of_other_machines_without_actors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine: .*listen is 0\.0\.0\.0:7777, and with actors 0"):
        config.load(write(tmp_path, changed("machine", actors=0, listen="0.0.0.0:7777")))


@pytest.mark.parametrize("listen", ["gpu-box", ":7777", "gpu-box:99999"])
def test_what_is_no_address_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"machine\.listen: should be HOST:PORT"):
        config.load(write(tmp_path, changed("machine", actors=1, listen=listen)))


def test_an_ipv6_address_may_be_in_brackets() -> None:
    assert config.host_and_port("[::1]:7777") == ("::1", 7777)


def test_an_rlpd_that_ends_before_its_first_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training_starts is 600, so no update comes within 599 steps"):
        config.load(write(tmp_path, changed("rlpd", steps=599, training_starts=600)))


def test_a_folder_in_place_of_params_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        config.load(tmp_path)


@pytest.mark.parametrize(("typed", "hint"), [("1e-3", "1.0e-3"), ("1.0e9", "1.0e+9"), ("2E5", "2.0e+5")])
def test_a_number_that_yaml_reads_as_text_gets_a_hint(tmp_path: Path, typed: str, hint: str) -> None:
    assert isinstance(yaml.safe_load(hint), float)
    text = (REPOSITORY / "params.yaml").read_text().replace("learning_rate: 1.0e-3", f"learning_rate: {typed}")
    with pytest.raises(ConfigError, match=rf"got '{typed}' \(YAML reads that as text: write {re.escape(hint)}\)"):
        config.load(write(tmp_path, text))


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "a: [", "\tx: 1", "seed: 0", "seed: {{ seed }}", "? [a]\n: 1", "seed: 2026-11-31"]
)
def test_a_file_that_is_not_params_is_one_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        config.load(write(tmp_path, text))


@given(leaf=st.sampled_from(LEAVES), name=st.from_regex(r"[a-z]{3,12}_x", fullmatch=True))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_unknown_key_is_named(tmp_path: Path, leaf: tuple[str, str], name: str) -> None:
    section, _ = leaf
    with pytest.raises(ConfigError) as error:
        config.load(write(tmp_path, changed(section, **{name: 1})))
    assert f"{section}.{name}: unknown key" in error.value.what


@given(leaf=st.sampled_from(LEAVES), value=st.one_of(st.none(), st.booleans(), st.dictionaries(st.text(), st.text())))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ill_typed_value_is_refused_with_its_path(tmp_path: Path, leaf: tuple[str, str], value: Any) -> None:
    section, key = leaf
    assume(type(value) is not type(PARAMS[section][key]) or isinstance(value, dict))
    assume(value is not None or leaf not in NULLABLE)
    with pytest.raises(ConfigError) as error:
        config.load(write(tmp_path, changed(section, **{key: value})))
    assert f"{section}.{key}" in error.value.what


def test_one_demo_cannot_be_both_trained_on_and_held_back(tmp_path: Path) -> None:
    one = {**changed("collect", demos_per_task=1), "dataset": {"sources": ["demos"], "validation_share": 0.1}}
    with pytest.raises(ConfigError, match=r"collect\.demos_per_task is 1.*set dataset\.validation_share: 0"):
        config.load(write(tmp_path, one))
    config.load(write(tmp_path, {**one, "dataset": {"sources": ["demos"], "validation_share": 0.0}}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rloo": {"entropy_coef": 0.1}}, "rloo.entropy_coef has no effect while rloo.learn_std is false"),
        ({"policy": {**VLA, "head": "bins"}, "rloo": {"learn_std": True}}, "rloo.learn_std has no effect while"),
    ],
)
def test_a_knob_that_would_do_nothing_with_this_policy_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config.load(write(tmp_path, config.merged(PARAMS, changes)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entropy": {"relative": True}, "actor": {"start": "scratch"}}, "entropy.relative needs actor.start: clone"),
        (
            {"interventions": {"imitate": "all"}, "actor": {"bc_weight": 0.0, "bc_steps": 0}},
            "interventions.imitate needs actor.bc_weight",
        ),
    ],
)
def test_settings_of_rlpd_that_need_another_one_are_refused_without_it(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config.load(write(tmp_path, config.merged(PARAMS, {"rlpd": changes})))


def test_two_fields_that_do_not_fit_are_named_without_the_rest_of_their_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(write(tmp_path, changed("rloo", minibatch_size=None)))
    assert error.value.what.endswith(
        "rloo: set one of minibatch_size and num_minibatches to a number, and the other to null"
    )


@pytest.mark.parametrize(
    ("low", "high", "sentence"),
    [
        (1.0, 1.0, "sampling.min_success_rate 1 and max_success_rate 1 accept only groups whose episodes all succeed"),
        (0.9, 1.0, "accept only groups whose episodes all succeed, of which nothing is learned: lower the first"),
        (0.0, 0.0, "sampling.min_success_rate 0 and max_success_rate 0 accept only groups whose episodes all fail"),
        (0.0, 0.1, "accept only groups whose episodes all fail, of which nothing is learned: raise the second"),
        (0.55, 0.6, "no group of 8 episodes has a success rate within sampling.min_success_rate 0.55"),
    ],
)
def test_bounds_of_success_that_leave_no_group_to_learn_from_are_refused(
    tmp_path: Path, low: float, high: float, sentence: str
) -> None:
    sampling = {"min_success_rate": low, "max_success_rate": high}
    changes = {"rloo": {"group_size": 8, "sampling": sampling}}
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config.load(write(tmp_path, config.merged(PARAMS, changes)))


def test_a_critic_learns_from_groups_that_solved_everything(tmp_path: Path) -> None:
    sampling = {"min_success_rate": 1.0, "max_success_rate": 1.0}
    changes = {"rloo": {"advantage_estimator": "gae", "sampling": sampling}}
    assert config.load(write(tmp_path, config.merged(PARAMS, changes))).rloo.sampling.min_success_rate == 1.0


def test_a_warm_up_of_cloning_ends_before_its_last_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft: warmup_steps is 200, so .* within 200 steps"):
        config.load(write(tmp_path, changed("sft", steps=200, warmup_steps=200)))
    config.load(write(tmp_path, changed("sft", steps=201, warmup_steps=200)))


def test_cloning_that_takes_no_step_needs_no_other_warm_up() -> None:
    assert config.Sft(steps=0, batch_size=32, learning_rate=1e-3, warmup_steps=200).steps == 0


def test_a_knob_of_a_stage_that_is_not_chosen_may_do_nothing(tmp_path: Path) -> None:
    changes = {"algorithms": [], "rloo": {"entropy_coef": 0.1}}
    assert config.load(write(tmp_path, config.merged(PARAMS, changes))).skips("rloo")


@pytest.mark.parametrize(
    ("algorithms", "sentence"),
    [(["rloo", "rloo"], "contains a name twice"), (["ppo"], "input should be 'rloo'"), ("rloo", "valid tuple")],
)
def test_algorithms_are_names_of_training_stages_each_once(tmp_path: Path, algorithms: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithms.*: .*{sentence}"):
        config.load(write(tmp_path, {**PARAMS, "algorithms": algorithms}))


def test_the_clone_and_all_that_follows_training_is_never_skipped() -> None:
    params = config.Params.model_validate({**PARAMS, "algorithms": []})
    assert [stage for stage in graph.load(REPOSITORY) if params.skips(stage)] == [config.START, *config.ALGORITHMS]
    from_champion = params.model_copy(update={"start": "champion"})
    assert not from_champion.skips(config.START)


def test_bins_have_an_entropy_without_a_std() -> None:
    changes = {"policy": {**VLA, "head": "bins"}, "rloo": {"entropy_coef": 0.1}}
    params = config.Params.model_validate(config.merged(PARAMS, changes))
    assert (params.policy.head, params.rloo.entropy_coef) == ("bins", 0.1)


def test_params_are_read_where_pyyaml_was_built_without_libyaml(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: 0\nseed: 1\n")
    program = """
import yaml
from pathlib import Path
del yaml.CSafeLoader
from nightshift import config
config.load(Path("params.yaml"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "params.yaml has the key 'seed' twice, in lines 1 and 2" in done.stderr
