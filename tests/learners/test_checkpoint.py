from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nightshift import files
from nightshift.errors import ProjectError
from nightshift.learners import checkpoint
from nightshift.learners.checkpoint import Checkpoint


def make(step: int) -> Checkpoint:
    return Checkpoint(step=step, tensors={"w": torch.full((3,), float(step))}, state={"cursor": [step, 2]})


def test_the_newest_complete_checkpoint_wins(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, make(step))
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 10
    assert newest.state == {"cursor": [10, 2]}
    assert torch.equal(newest.tensors["w"], torch.full((3,), 10.0))


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        checkpoint.save(tmp_path, make(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_that_was_never_finished_is_swept_away(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, make(1))
    unfinished = tmp_path / ".step-00000002.partial-abcd"
    unfinished.mkdir()
    (unfinished / checkpoint.TENSORS).write_bytes(b"half")
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert not unfinished.exists()


def test_a_part_that_a_rank_wrote_elsewhere_is_missed_before_older_checkpoints_go(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, make(step))
    with pytest.raises(ProjectError, match=r"learner ranks wrote shards/__1_0\.distcp"):
        checkpoint.save(tmp_path, make(3), lambda folder: {"__1_0.distcp": "0" * 64})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


DAMAGES = (flip_a_bit, truncate, Path.unlink)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.STATE, files.MANIFEST])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_resumed_from(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, make(1))
    checkpoint.save(tmp_path, make(2))
    damage(tmp_path / "step-00000002" / name)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert torch.equal(newest.tensors["w"], torch.full((3,), 1.0))
    assert str(tmp_path / "step-00000002") in caplog.text
    assert "training goes on from step 1, and the checkpoint is kept as damaged-step-00000002" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000002", "step-00000001"]


def test_without_a_whole_checkpoint_training_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, make(step))
        truncate(tmp_path / f"step-{step:08d}" / checkpoint.TENSORS)
    assert checkpoint.newest(tmp_path) is None
    assert caplog.text.count("training starts from the beginning") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-step-00000002"], "only the last one is kept"


def test_a_checkpoint_can_be_written_again_after_its_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, make(step))
    truncate(tmp_path / "step-00000002" / checkpoint.TENSORS)
    checkpoint.newest(tmp_path)
    checkpoint.save(tmp_path, make(2))
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 2


def test_nothing_there_means_start_from_the_beginning(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None
