"""A large model is loaded, saved and merged in little more memory than it has itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nightshift.policies.openvla_oft.network import LM_HEAD, OpenVlaOftNetwork
from tests.policies.openvla_oft import published

LLAMA = {"width": 1024, "mlp": 4096, "depth": 8, "heads": 4, "vocabulary": 32064}
"""330 MB in bfloat16, of which one tensor has 66. Small tensors would take more memory than they have."""
PROGRAM = """
import json, re, sys
from pathlib import Path
import torch
from nightshift import policies
from nightshift.policies import publishing
from tests.policies.openvla_oft.test_checkpoint import load

def resident(which):
    # Not ru_maxrss: a new process begins with the peak of its parent.
    return 1024 * int(re.search(which + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def peak_of(work):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    kept = work()
    return kept, resident("VmHWM") - before

published, own, merged = map(Path, sys.argv[1:])
lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
with torch.device("meta"):
    load(published, dtype="bfloat16")  # imports what the rest needs
policy, loading = peak_of(lambda: load(published, dtype="bfloat16", lora=lora))
_, saving = peak_of(lambda: policies.save(policy, own))
sizes = [tensor.nbytes for tensor in policy.state_dict().values()]
_, loading_own = peak_of(lambda: policies.load(own))
_, merging = peak_of(lambda: publishing.publish(policy, publishing.base_of(policy), merged))
print(json.dumps([sum(sizes), max(sizes), loading, saving, loading_own, merging]))
"""


def write_large(folder: Path) -> Path:
    """A published checkpoint of zeros in bfloat16, in three shards."""
    spec = published.spec(llama=LLAMA)
    deeper = published.spec(llama=LLAMA, dinov2={**spec["dinov2"], "depth": 3}, siglip={**spec["siglip"], "depth": 3})
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in OpenVlaOftNetwork(deeper).state_dict().items()}
    shapes[LM_HEAD] = shapes["language_model.model.embed_tokens.weight"]
    return published.write(folder, {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})


@pytest.mark.slow
def test_memory_beyond_that_of_the_weights_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("published", "own", "merged")]
    write_large(folders[0])
    for folder in folders[1:]:
        folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)], check=True, capture_output=True, text=True
    )
    whole, largest, loading, saving, loading_own, merging = json.loads(done.stdout.splitlines()[-1])
    assert whole > 3e8
    assert 0.9 * whole < loading < whole + 2 * largest
    assert saving < 2 * largest
    assert loading_own < whole + 2 * largest
    assert merging < 3 * largest
