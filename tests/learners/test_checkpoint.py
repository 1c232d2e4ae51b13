from pathlib import Path

import pytest
import torch

from nightshift.errors import CheckpointError
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


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.STATE])
def test_a_damaged_file_is_named_with_the_next_command(tmp_path: Path, name: str) -> None:
    checkpoint.save(tmp_path, make(1))
    checkpoint.save(tmp_path, make(2))
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError) as error:
        checkpoint.newest(tmp_path)
    assert str(path) in error.value.what
    assert f"rm -r {path.parent}" in error.value.next_step


def test_nothing_there_means_start_from_the_beginning(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None


def test_an_optimizer_goes_on_exactly_where_it_was() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def fresh(seed: int) -> tuple[torch.nn.Linear, torch.optim.Adam, torch.Generator]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 2)
        return model, torch.optim.Adam(model.parameters(), lr=0.1), torch.Generator().manual_seed(seed)

    def pack(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        return checkpoint.pack({"model": (model, optimizer)}, generator)

    first = fresh(0)
    for _ in range(3):
        step(*first)
    packed = {name: tensor.clone() for name, tensor in pack(*first).items()}
    step(*first)
    model, optimizer, generator = second = fresh(1)
    checkpoint.unpack(packed, {"model": (model, optimizer)}, generator)
    step(*second)
    for name, tensor in pack(*first).items():
        assert torch.equal(tensor, pack(*second)[name]), name
