from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from nightshift.data.replay import TrajectoryReplay
from nightshift.errors import DataError

FORMATS = ["pt", "pkl"]


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def rollout(uid: int, epochs: int = 1, length: int = 4, envs: int = 2) -> dict[str, Any]:
    """As RLinf stores one: `dones` with a row more per epoch; env 1 starts another episode after row 1."""
    seen = torch.zeros(length + 1, envs, 3)
    seen[..., 0] = uid
    seen[..., 1] = torch.arange(envs)
    seen[..., 2] = torch.arange(length + 1)[:, None]
    led_to = seen[1:].clone()
    led_to[1, 1, 2] = 77  # the last observation before the reset
    per_epoch = length // epochs
    dones = torch.zeros(epochs, per_epoch + 1, envs, dtype=torch.bool)
    dones[:, 0] = True  # rows that belong to no step: they must not count
    flat = torch.zeros(length, envs, dtype=torch.bool)
    flat[1, 1] = True
    dones[:, 1:] = flat.reshape(epochs, per_epoch, envs)
    dones = dones.reshape(-1, envs)
    return {
        "max_episode_length": length,
        "model_weights_id": "w",
        "actions": torch.arange(length * envs * 2, dtype=torch.float32).reshape(length, envs, 2),
        "rewards": torch.full((length, envs), float(uid)),
        "terminations": dones.clone(),
        "truncations": torch.zeros_like(dones),
        "dones": dones,
        "prev_logprobs": torch.zeros(length, envs, 1, dtype=torch.bfloat16),
        "forward_inputs": {"tokens": torch.ones(length, envs, 5, dtype=torch.long), "text": ["a", "b"]},
        "curr_obs": {"state": seen[:-1].clone(), "task": ["lift"] * envs},
        "next_obs": {"state": led_to, "task": ["lift"] * envs},
    }


def folder_of(path: Path, form: str, contents: list[Any], index_name: str = "trajectory_index.json") -> Path:
    path.mkdir()
    entries = {}
    for number, content in enumerate(contents):
        target = path / f"trajectory_{number}_w.{form}"
        if form == "pt":
            torch.save(content, target)
        else:
            target.write_bytes(pickle.dumps(content))
        entries[str(number)] = {
            "num_samples": 8,
            "trajectory_id": number,
            "max_episode_length": 4,
            "shape": [4, 2, 1],
            "model_weights_id": "w",
        }
    index = {"trajectory_index": entries, "trajectory_id_list": list(range(len(contents)))}
    (path / index_name).write_text(json.dumps(index))
    metadata = {"trajectory_format": form, "size": 2, "total_samples": 16, "trajectory_counter": 2, "seed": 1234}
    (path / "metadata.json").write_text(json.dumps(metadata))
    return path


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("index_name", ["trajectory_index.json", "trajector_index.json"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_of_rlinf_loads_and_samples_as_in_rlinf(
    form: str, index_name: str, where: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "rlinf", form, [rollout(1), rollout(2)], index_name)
    with TrajectoryReplay(auto_save_path=tmp_path / "live" if where == "disk" else None) as replay:
        replay.load_checkpoint(folder)
        assert (len(replay), replay.total_samples) == (2, 16)
        batch = replay.sample(6)
        ids = np.array([15, 3, 6, 5, 12, 4])
        uid, row = ids // 8 + 1, ids % 8
        assert batch["rewards"].tolist() == uid.tolist()
        assert batch["curr_obs"]["state"].tolist() == np.stack([uid, row % 2, row // 2], axis=1).tolist()
        assert batch["next_obs"]["state"][:, 2].tolist() == [77 if r == 3 else r // 2 + 1 for r in row]
        assert batch["terminations"].tolist() == batch["dones"].tolist() == (row == 3).tolist()
        assert batch["mask"].tolist() == (row != 3).astype(float).tolist()
        assert batch["forward_inputs"]["tokens"].shape == (6, 5) and batch["prev_logprobs"].dtype == np.float32
        replay.save_checkpoint(tmp_path / "ours")
        again = TrajectoryReplay()
        again.load_checkpoint(tmp_path / "ours")
        assert np.array_equal(again.sample(9)["next_obs"]["state"], replay.sample(9)["next_obs"]["state"])


def test_episodes_of_a_rollout_begin_at_ends_and_at_every_epoch(tmp_path: Path) -> None:
    content = rollout(1, epochs=2)
    replay = TrajectoryReplay()
    replay.load_checkpoint(folder_of(tmp_path / "rlinf", "pt", [content]))
    batch = replay.sample(200, n_step=4, discount=1.0)
    steps = {}
    for seen, spanned in zip(batch["curr_obs"]["state"], batch["rewards"], strict=True):
        steps[int(seen[2]), int(seen[1])] = int(spanned)
    # Rows 0-1 and 2-3 are epochs; in env 1 the task also ends at row 1, where the second epoch begins anyway.
    assert steps == {(row, env): 2 - row % 2 for row in range(4) for env in range(2)}


@pytest.mark.parametrize("form", FORMATS)
def test_a_hostile_file_is_refused_and_named_and_the_buffer_stays(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_of(tmp_path / "rlinf", form, [rollout(1), rollout(2) | {"extra": Hostile()}])
    with TrajectoryReplay(auto_save_path=tmp_path / "live") as replay:
        replay.load_checkpoint(folder_of(tmp_path / "good", form, [rollout(5)]))
        with pytest.raises(DataError, match=rf"trajectory_1_w\.{form} is refused"):
            replay.load_checkpoint(folder)
        assert set(replay.sample(20)["rewards"]) == {5.0} and len(replay) == 1
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_or_missing_file_is_named(form: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "rlinf", form, [rollout(1), rollout(2)])
    target = folder / f"trajectory_1_w.{form}"
    target.write_bytes(target.read_bytes()[:300])
    replay = TrajectoryReplay()
    with pytest.raises(DataError, match=f"trajectory_1_w.{form}"):
        replay.load_checkpoint(folder)
    target.unlink()
    with pytest.raises(DataError, match=f"trajectory_1_w.{form} is missing"):
        replay.load_checkpoint(folder)
    assert len(replay) == 0


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "rlinf", "pt", [rollout(1)])
    torch.save(rollout(9), tmp_path / "x.pt")
    index = json.loads((folder / "trajectory_index.json").read_text())
    index["trajectory_index"]["0"]["model_weights_id"] = "/../../x"
    (folder / "trajectory_0_").mkdir()
    (folder / "trajectory_index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="is not an index"):
        TrajectoryReplay().load_checkpoint(folder)


def test_a_pickled_object_of_rlinf_is_read_as_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("rlinf.data.embodied_io_struct")

    class Trajectory:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    Trajectory.__module__, Trajectory.__qualname__ = module.__name__, "Trajectory"
    module.Trajectory = Trajectory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "rlinf", ModuleType("rlinf"))
    monkeypatch.setitem(sys.modules, "rlinf.data", ModuleType("rlinf.data"))
    folder = folder_of(tmp_path / "rlinf", "pkl", [Trajectory(**rollout(3))])
    monkeypatch.undo()
    replay = TrajectoryReplay()
    replay.load_checkpoint(folder)
    assert set(replay.sample(20)["rewards"]) == {3.0}


def test_a_pickled_tensor_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    class Forged:
        def __reduce__(self) -> Any:
            rebuild, arguments = torch.zeros(4).__reduce_ex__(2)  # type: ignore[no-untyped-call]
            storage, _, _, _, *rest = arguments
            return rebuild, (storage, 0, (400, 2), (2, 1), *rest)

    content = rollout(1) | {"rewards": Forged()}
    with pytest.raises(DataError, match="beyond its storage"):
        TrajectoryReplay().load_checkpoint(folder_of(tmp_path / "rlinf", "pkl", [content]))


def test_a_rollout_without_observations_loads(tmp_path: Path) -> None:
    content = rollout(1) | {"curr_obs": {}, "next_obs": {}, "terminations": None, "truncations": None}
    replay = TrajectoryReplay()
    replay.load_checkpoint(folder_of(tmp_path / "rlinf", "pt", [content]))
    batch = replay.sample(20)
    assert batch["curr_obs"] == {} and "next_obs" not in batch
    assert np.array_equal(batch["terminations"], batch["dones"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["rewards", "dones"])
def test_a_tensor_that_claims_to_be_larger_than_its_content_is_refused(form: str, name: str, tmp_path: Path) -> None:
    """A stride of nothing costs nothing in the file, and terabytes when it is read."""
    content = rollout(0)
    content[name] = torch.zeros(1, 1, dtype=content[name].dtype).expand(2**41, 2)
    folder = folder_of(tmp_path / "c", form, [content])
    with pytest.raises(DataError, match=r"trajectory_0_w.* shape \[2199023255552, 2\] has a smaller storage"):
        TrajectoryReplay().load_checkpoint(folder)


def test_a_compressed_archive_is_refused_before_torch_unpacks_it(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "theirs", "pt", [rollout(1)])
    file = path / "trajectory_0_w.pt"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"trajectory_0_w\.pt is refused: .* in it is compressed"):
        TrajectoryReplay().load_checkpoint(path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, form: str) -> None:
    path = folder_of(tmp_path / "theirs", form, [rollout(1)])
    file = path / f"trajectory_0_w.{form}"
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=rf"trajectory_0_w\.{form} is refused: it is a link to"):
        TrajectoryReplay().load_checkpoint(path)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {"curr_obs": 7},
        {"rewards": torch.zeros(0, 2)},
        {"dones": torch.zeros(9, 2, dtype=torch.bool)},
        {"actions": "text"},
        {"terminations": torch.zeros(1, 1)},
    ],
)
def test_odd_fields_are_data_errors(tmp_path: Path, form: str, changes: dict[str, Any]) -> None:
    path = folder_of(tmp_path / "theirs", form, [{**rollout(1), **changes}])
    with pytest.raises(DataError, match=rf"trajectory_0_w\.{form}"):
        TrajectoryReplay().load_checkpoint(path)
