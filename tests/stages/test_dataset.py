import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift import config, files, paths
from nightshift.data import episode, store
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError
from nightshift.job import Job
from nightshift.stages import collect, dataset


@pytest.fixture
def demos(job: Callable[[str], Job], params: config.Params) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, collect=params.collect)


def run(job: Callable[[str], Job], params: config.Params) -> None:
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)


@pytest.mark.usefixtures("demos")
def test_no_init_state_is_on_both_sides_of_the_split(job: Callable[[str], Job], params: config.Params) -> None:
    run(job, params)
    episodes = json.loads((paths.DATASET / store.INDEX).read_text())["episodes"]
    sides = {
        part: {(e["provenance"]["task"], e["provenance"]["init_state"]) for e in episodes if e["part"] == part}
        for part in ("train", "validation")
    }
    assert sides["train"]
    assert {task for task, _ in sides["validation"]} == {"near", "far"}
    assert not sides["train"] & sides["validation"]


@pytest.mark.usefixtures("demos")
def test_the_same_demos_give_the_same_bytes(job: Callable[[str], Job], params: config.Params) -> None:
    run(job, params)
    first = files.sha256_tree(paths.DATASET)
    run(job, params)
    assert files.sha256_tree(paths.DATASET) == first


@pytest.mark.usefixtures("demos")
def test_a_damaged_demo_is_named_and_nothing_is_written(job: Callable[[str], Job], params: config.Params) -> None:
    victim = sorted(paths.DEMOS.glob(f"*{SUFFIX}"))[2]
    victim.write_bytes(victim.read_bytes()[:-4])
    with pytest.raises(DataError, match=victim.name):
        run(job, params)
    assert not Path(paths.DATASET).exists()


@pytest.mark.usefixtures("demos")
def test_a_demo_that_breaks_the_schema_is_refused_by_file_field_and_step(
    job: Callable[[str], Job], params: config.Params
) -> None:
    victim = sorted(paths.DEMOS.glob(f"*{SUFFIX}"))[1]
    demo = episode.load(victim)
    actions = demo.actions.copy()
    actions[2, 0] = float("nan")
    with files.new_folder(paths.DEMOS) as folder:
        for path in paths.DEMOS.iterdir():
            shutil.copy(path, folder)
        episode.save(replace(demo, actions=actions), folder / victim.name)
    with pytest.raises(DataError, match=rf"{victim.name}: actions is not finite .*step 2"):
        run(job, params)


@pytest.mark.usefixtures("demos")
def test_no_file_of_the_dataset_is_a_pickle(job: Callable[[str], Job], params: config.Params) -> None:
    run(job, params)
    assert {path.suffix for path in paths.DATASET.iterdir()} == {".safetensors", ".json"}
