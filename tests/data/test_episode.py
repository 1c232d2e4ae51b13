from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data import episode
from nightshift.data.episode import Episode
from nightshift.errors import DataError
from nightshift.types import Provenance

SIZES = {"proprio": 8, "objects": 5}
PROVENANCE = Provenance(
    source="expert",
    suite="libero_mini",
    task="lift_cube",
    language="lift the cube",
    split="train",
    init_state=17,
    seed=0,
    versions={"mujoco": "3.3.7"},
    commit="abc1234",
)


def make(**changes: Any) -> Episode:
    random = np.random.default_rng(0)
    observations = {name: random.standard_normal((6, size)).astype(np.float32) for name, size in SIZES.items()}
    actions = random.uniform(-1, 1, (6, 7)).astype(np.float32)
    return replace(Episode(observations=observations, actions=actions, success=True, provenance=PROVENANCE), **changes)


def broken_at(step: int, value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    actions = make().actions.copy()
    actions[step, 3] = value
    return actions


def test_an_episode_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    original = make()
    episode.save(original, tmp_path / "a.safetensors")
    again = episode.load(tmp_path / "a.safetensors")
    assert again.provenance == original.provenance
    assert again.success is True
    np.testing.assert_array_equal(again.actions, original.actions)
    for name in SIZES:
        np.testing.assert_array_equal(again.observations[name], original.observations[name])


def test_a_sound_episode_is_accepted() -> None:
    episode.validate(make(), Path("a"), SIZES)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"actions": broken_at(4, np.nan)}, "actions", "step 4"),
        ({"actions": broken_at(2, 1.5)}, "actions", "step 2"),
        ({"actions": make().actions.astype(np.float64)}, "actions", "float64"),
        ({"actions": make().actions[:, :6]}, "actions", "shape"),
        ({"observations": {"proprio": make().observations["proprio"]}}, "observations", "objects"),
        ({"observations": {**make().observations, "extra": make().actions}}, "observations", "extra"),
        ({"success": False}, "success", "only successful"),
        ({"provenance": replace(PROVENANCE, split="eval")}, "provenance.split", "not for training"),
    ],
)
def test_what_breaks_the_schema_is_refused_by_file_field_episode_and_step(
    changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(DataError) as error:
        episode.validate(make(**changes), Path("data/demos/a.safetensors"), SIZES)
    for expected in ("data/demos/a.safetensors", field, "lift_cube, init state 17", words):
        assert expected in error.value.what


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\xff" * 100])
def test_a_file_that_is_no_episode_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.safetensors"):
        episode.load(path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(DataError):
        episode.load(path)
    assert not Path("hacked").exists()
