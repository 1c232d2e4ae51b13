"""Environments for the projects we compare with: one each, under .state/benchmarks, nothing shared with our own.

`python(peer)` gives the interpreter of a peer's environment, after making it if it is not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / ".state" / "benchmarks"
READY = "ready"


@dataclass(frozen=True)
class Peer:
    """What to install: `alone` without the dependencies it declares, `needs` with theirs."""

    name: str
    alone: tuple[str, ...]
    needs: tuple[str, ...]


RLINF = Peer(
    name="rlinf",
    alone=("rlinf==0.3.0",),  # it declares a whole training stack; its buffer imports torch, numpy and omegaconf
    needs=("torch==2.13.0", "numpy", "omegaconf"),
)


def python(peer: Peer) -> Path:
    """The interpreter that can import the peer."""
    folder = ROOT / peer.name
    interpreter = folder / "bin" / "python"
    wanted = "\n".join((*peer.alone, *peer.needs))
    if not (folder / READY).exists() or (folder / READY).read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *peer.needs], check=True, stdout=sys.stderr)
        subprocess.run([*install, "--no-deps", *peer.alone], check=True, stdout=sys.stderr)
        (folder / READY).write_text(wanted)
    return interpreter


if __name__ == "__main__":
    print(python(RLINF))
