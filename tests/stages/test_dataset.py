import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift import config, files
from nightshift.data import dataset_store, episode
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.rate import FPS
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import collect, dataset, sft
from nightshift.telemetry.console import console


@pytest.fixture
def demos(job: Callable[[str], Job], params: config.Params) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)


def imported(name: str, *demos: Episode, file: str = "") -> None:
    """A source of these episodes; `file` is where they came from."""
    with files.new_folder(paths.IMPORTS / name) as folder:
        store = EpisodeStore(folder)
        for number, demo in enumerate(demos):
            origin = replace(demo.provenance, init_state=None, origin=f"{file or f'{name}.hdf5'}#{number}")
            store.put(f"{number}", replace(demo, provenance=origin))


def run(job: Callable[[str], Job], params: config.Params) -> None:
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)


@pytest.mark.usefixtures("demos")
def test_no_init_state_is_on_both_sides_of_the_split(job: Callable[[str], Job], params: config.Params) -> None:
    run(job, params)
    episodes = json.loads((paths.DATASET / dataset_store.INDEX).read_text())["episodes"]
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
    first = files.identity(paths.DATASET)
    run(job, params)
    assert files.identity(paths.DATASET) == first


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


@pytest.mark.usefixtures("demos")
def test_imports_stand_beside_the_demos_and_are_split_episode_by_episode(
    job: Callable[[str], Job], params: config.Params
) -> None:
    with files.new_folder(paths.IMPORTS / "elsewhere") as folder:
        store = EpisodeStore(folder)
        for number, demo in enumerate(EpisodeStore(paths.DEMOS)):
            origin = replace(demo.provenance, task="imported", init_state=None, origin=f"demos.hdf5#{number}")
            store.put(f"{number}", replace(demo, provenance=origin))
    both = params.dataset.model_copy(update={"sources": ("demos", "elsewhere")})
    dataset.run(job("dataset"), seed=params.seed, dataset=both)
    rows = dataset_store.describe((paths.DATASET / dataset_store.INDEX).read_bytes())["rows"]
    assert {(task, part): count for task, part, count, _ in rows} == {
        ("far", "train"): 3,
        ("far", "validation"): 1,
        ("near", "train"): 3,
        ("near", "validation"): 1,
        ("imported", "train"): 6,
        ("imported", "validation"): 2,
    }


@pytest.mark.usefixtures("demos")
def test_an_import_that_looks_different_is_refused_by_name(job: Callable[[str], Job], params: config.Params) -> None:
    with files.new_folder(paths.IMPORTS / "elsewhere") as folder:
        demo = next(iter(EpisodeStore(paths.DEMOS)))
        actions, chosen = demo.actions.repeat(2, axis=1), demo.policy_actions.repeat(2, axis=1)
        EpisodeStore(folder).put("0", replace(demo, actions=actions, policy_actions=chosen))
    both = params.dataset.model_copy(update={"sources": ("demos", "elsewhere")})
    with pytest.raises(DataError, match=r"data/imports/elsewhere/0.safetensors: actions has shape"):
        dataset.run(job("dataset"), seed=params.seed, dataset=both)


@pytest.mark.usefixtures("demos")
def test_the_dataset_has_what_all_sources_have_and_says_what_it_leaves_out(
    job: Callable[[str], Job], params: config.Params
) -> None:
    """As in the tutorial: imports of LIBERO and robomimic have float64 actions and fields of their own."""
    demos = list(EpisodeStore(paths.DEMOS))
    imported(
        "by_hand",
        *(
            replace(
                demo,
                actions=demo.actions.astype(np.float64),
                policy_actions=demo.policy_actions.astype(np.float64) / 3,
                rewards=demo.rewards.astype(np.uint8),
                extras={"dones": np.zeros(demo.length, np.int64)},
            )
            for demo in demos
        ),
    )
    both = params.dataset.model_copy(update={"sources": ("demos", "by_hand")})
    with console.capture() as shown:
        dataset.run(job("dataset"), seed=params.seed, dataset=both)
    assert "of by_hand, extras.dones are left out of the dataset" in shown.get()
    data = dataset_store.read(paths.DATASET)
    assert not any(name.startswith("extras.") for name in data.schema.fields)
    assert data.schema.fields["actions"].dtype == "float64", "nothing is rounded"
    found = [demo for part in dataset_store.SPLITS for demo in data.episodes(part)]
    (same,) = [demo for demo in found if demo.provenance.origin == "by_hand.hdf5#0"]
    assert np.array_equal(same.policy_actions, demos[0].policy_actions.astype(np.float64) / 3)
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft.model_copy(update={"steps": 3}))


def at(steps_per_second: float | None, demos: Sequence[Episode]) -> list[Episode]:
    """These demos as a source with this rate holds them."""
    return [replace(demo, metadata={FPS: steps_per_second} if steps_per_second else {}) for demo in demos]


@pytest.mark.usefixtures("demos")
def test_sources_of_different_steps_per_second_are_refused_by_name(
    job: Callable[[str], Job], params: config.Params
) -> None:
    demos = list(EpisodeStore(paths.DEMOS))
    imported("slow", *at(10, demos[:4]))
    imported("fast", *at(20.0, demos[4:]))
    both = params.dataset.model_copy(update={"sources": ("demos", "slow", "fast")})
    with pytest.raises(DataError, match="different numbers of steps per second: slow has 10, fast has 20") as refusal:
        dataset.run(job("dataset"), seed=params.seed, dataset=both)
    assert "dataset.sources" in refusal.value.next_step
    assert not paths.DATASET.exists()


@pytest.mark.usefixtures("demos")
@pytest.mark.parametrize(("steps_per_second", "told"), [(10, True), (20, False), (None, False)])
def test_a_source_that_does_not_say_its_steps_per_second_is_taken_and_that_is_said_unless_it_is_the_usual_number(
    job: Callable[[str], Job], params: config.Params, steps_per_second: float | None, told: bool
) -> None:
    imported("by_hand", *at(steps_per_second, list(EpisodeStore(paths.DEMOS))))
    both = params.dataset.model_copy(update={"sources": ("demos", "by_hand")})
    with console.capture() as shown:
        dataset.run(job("dataset"), seed=params.seed, dataset=both)
    assert ("of demos no number is known" in shown.get()) == told
    assert ("by_hand has 10" in shown.get()) == told


@pytest.mark.usefixtures("demos")
def test_an_import_that_came_twice_is_trained_on_once(job: Callable[[str], Job], params: config.Params) -> None:
    demos = list(EpisodeStore(paths.DEMOS))[:4]
    for name in ("first", "again"):
        imported(name, *demos)
    both = params.dataset.model_copy(update={"sources": ("first", "again")})
    with console.capture() as shown:
        dataset.run(job("dataset"), seed=params.seed, dataset=both)
    assert shown.get().count("is left out: it is the episode data/imports/first/") == 4
    assert len(list(dataset_store.read(paths.DATASET).episodes("train"))) < 4


@pytest.mark.usefixtures("demos")
def test_demos_of_files_with_one_name_are_of_different_starts(job: Callable[[str], Job], params: config.Params) -> None:
    near = [demo for demo in EpisodeStore(paths.DEMOS) if demo.provenance.task == "near"]
    for name, demo in zip(("a", "b"), near, strict=False):
        imported(name, demo, file="demo.hdf5")
    both = params.dataset.model_copy(update={"sources": ("a", "b")})
    dataset.run(job("dataset"), seed=params.seed, dataset=both)
    data = dataset_store.read(paths.DATASET)
    assert [len(list(data.episodes(part))) for part in dataset_store.SPLITS] == [1, 1]


@pytest.mark.usefixtures("demos")
def test_numbers_that_float32_does_not_hold_are_refused(job: Callable[[str], Job], params: config.Params) -> None:
    demo = next(iter(EpisodeStore(paths.DEMOS)))
    huge = {name: np.full(values.shape, 1e300) for name, values in demo.observations.items()}
    imported("odd", replace(demo, observations=huge))
    with pytest.raises(DataError, match=r"odd/0.safetensors: observations\.\w+ is larger than float32 can be"):
        dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset.model_copy(update={"sources": ("odd",)}))


@pytest.mark.usefixtures("demos")
def test_an_episode_without_an_action_is_refused(job: Callable[[str], Job], params: config.Params) -> None:
    demo = next(iter(EpisodeStore(paths.DEMOS)))
    first = {name: column[:1] for name, column in episode.columns(demo).items()}
    imported("odd", episode.assemble(first, episode.header(demo)))
    with pytest.raises(DataError, match="the episode has no action"):
        dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset.model_copy(update={"sources": ("odd",)}))


@pytest.mark.usefixtures("demos")
def test_a_source_that_was_never_imported_is_told_with_the_command(
    job: Callable[[str], Job], params: config.Params
) -> None:
    both = params.dataset.model_copy(update={"sources": ("demos", "kitchen")})
    with pytest.raises(DataError) as error:
        dataset.run(job("dataset"), seed=params.seed, dataset=both)
    assert "nightshift import PATH --format FORMAT --name kitchen" in error.value.next_step


@pytest.mark.usefixtures("demos")
def test_a_task_of_one_demo_is_refused_by_name(job: Callable[[str], Job], params: config.Params) -> None:
    with files.new_folder(paths.IMPORTS / "elsewhere") as folder:
        demo = next(iter(EpisodeStore(paths.DEMOS)))
        origin = replace(demo.provenance, task="imported", init_state=None, origin="demos.hdf5#0")
        EpisodeStore(folder).put("0", replace(demo, provenance=origin))
    for sources in (("elsewhere",), ("demos", "elsewhere")):
        chosen = params.dataset.model_copy(update={"sources": sources})
        with pytest.raises(DataError, match=r"the task imported has demos of one start only.* at least two") as error:
            dataset.run(job("dataset"), seed=params.seed, dataset=chosen)
        assert "more demos of imported" in error.value.next_step
    assert not paths.DATASET.exists()


def test_without_a_validation_share_one_demo_of_a_task_is_enough(
    job: Callable[[str], Job], params: config.Params
) -> None:
    one = params.collect.model_copy(update={"demos_per_task": 1})
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=one)
    dataset.run(job("dataset"), seed=0, dataset=params.dataset.model_copy(update={"validation_share": 0.0}))
    data = dataset_store.read(paths.DATASET)
    collected = [path.read_bytes() for path in sorted(paths.DEMOS.glob(f"*{SUFFIX}"))]
    assert [episode.to_bytes(demo) for demo in data.episodes("train")] == collected
    assert not list(data.episodes("validation"))
    sft.run(job("sft"), seed=0, policy=params.policy, sft=params.sft.model_copy(update={"steps": 3}))
    logged = (job("sft").state / "metrics.jsonl").read_text()
    assert "sft/loss" in logged
    assert "validation_loss" not in logged
