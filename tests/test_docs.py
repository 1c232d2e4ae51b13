"""What the pages show runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from nightshift import config
from nightshift.pipeline.job import Job
from nightshift.stages import collect
from nightshift.telemetry import experience, interventions
from scripts import docs
from tests.conftest import REPOSITORY
from tests.soak.faults import FAULTS


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)


@pytest.mark.usefixtures("project")
def test_the_program_on_the_page_about_data_runs(
    job: Callable[[str], Job], params: config.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)
    scope: dict[str, object] = {}
    for block in blocks("data.md", "python"):
        exec(compile(block, "docs/data.md", "exec"), scope)
    assert "'stream/acknowledged': 8.0" in capsys.readouterr().out
    assert len(scope["batch"]["actions"]) == 64  # type: ignore[index]


def test_the_page_about_rlpd_explains_every_metric_of_its_experience() -> None:
    page = (REPOSITORY / "docs/rlpd.md").read_text()
    explained = set(
        re.findall(r"^\| `((?:rollout|speed|replay|queue|stream|intervention)/\w+)` \|", page, re.MULTILINE)
    )
    names = {**vars(experience), **vars(interventions)}
    assert explained == {value for name, value in names.items() if name.isupper()}


def test_the_pages_that_are_written_from_the_code_are_up_to_date() -> None:
    for path, write in ((docs.PARAMETERS, docs.parameters_page), (docs.EXTENDING, docs.extending_page)):
        assert write(path.read_text()) == path.read_text(), "python scripts/docs.py"


def test_the_page_about_parameters_has_every_key_of_params_yaml_and_a_row_by_hand_keeps_its_names() -> None:
    page = docs.PARAMETERS.read_text()
    assert set(parameters(yaml.safe_load((REPOSITORY / "params.yaml").read_text()))) <= set(page_rows(page))
    by_hand = re.sub(r"(?m)^\| `sft.steps` \|.*$", "| `sft.steps` | old words | N | steps | max_steps | T |", page)
    assert re.search(
        r"(?m)^\| `sft.steps` \| whole.* \| N \| steps \| max_steps \| T \|$", docs.parameters_page(by_hand)
    )


def page_rows(page: str) -> list[str]:
    return re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE)


def parameters(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every number of a file by its dotted name."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from parameters(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_page_about_extending_shows_every_file_of_the_examples() -> None:
    shown = set(re.findall(r"`(examples/[a-z_/.]+)`:\n\n```", docs.EXTENDING.read_text()))
    files = [path for path in (REPOSITORY / "examples").rglob("*") if path.suffix in (".py", ".toml")]
    assert shown == {path.relative_to(REPOSITORY).as_posix() for path in files if path.read_text()}


def cluster_yaml(kind: str) -> dict[str, Any]:
    pages = [yaml.safe_load(block) for block in blocks("cluster.md", "yaml")]
    (found,) = [page for page in pages if kind in (page.get("kind"), page.get("provider", {}).get("type"))]
    return dict(found)


@pytest.mark.parametrize("provider", ["local", "aws"])
def test_ray_accepts_the_cluster_files_on_the_page_about_clusters(provider: str) -> None:
    complete = prepare_config(cluster_yaml(provider))
    validate_config(complete)
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "ray start" in complete[name][-1]
    excluded = complete["rsync_exclude"]
    assert all(pattern.startswith("/") for pattern in excluded), "any other pattern matches at every depth"
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert not [path for path in tracked.splitlines() if f"/{path}".startswith(tuple(f"{e}/" for e in excluded))]


def test_the_manifest_for_kuberay_has_a_head_without_cpus_and_workers_of_the_same_image_and_ray() -> None:
    spec = cluster_yaml("RayCluster")["spec"]
    (workers,) = spec["workerGroupSpecs"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (head,), (worker,) = (group["template"]["spec"]["containers"] for group in (spec["headGroupSpec"], workers))
    assert head["image"] == worker["image"]
    assert f"ray=={spec['rayVersion']}" in (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_messages_on_the_page_about_clusters_are_the_ones_in_the_code() -> None:
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    source = "".join(path.read_text() for path in (REPOSITORY / "src" / "nightshift").rglob("*.py"))
    for sentence in (
        "no Ray cluster answers at RAY_ADDRESS=",
        "cannot be joined: ",
        " each, and the cluster has ",
        "is not like the driver's: it has ",
        "there are no LIBERO simulation assets in ",
        "the simulator failed on ",
        "its process died",
    ):
        assert sentence in page
        assert sentence in source


def test_every_test_that_the_page_about_reliability_names_exists() -> None:
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 20
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (REPOSITORY / path).read_text()]
    assert not missing


def test_every_fault_of_the_soak_is_on_the_page_about_reliability() -> None:
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    assert [fault.name for fault in FAULTS if f"| {fault.name} |" not in page] == []
