"""One rule for symbolic links in all formats.

The path that the user names is followed wherever it leads. Below it a link is followed if it leads to a file inside the
folder that the user named, or if the folder is a snapshot of the Hugging Face cache and the link leads to its blobs:

    datasets--lerobot--pusht/snapshots/REVISION/meta/info.json -> ../../../blobs/HASH

Every other link is refused: a dataset from elsewhere could otherwise import any file of this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from nightshift.errors import DataError

_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"
_COPY = "replace the link by a copy of the file, if you trust it"


def check(path: Path, root: Path) -> Path:
    """`path`, which may be opened; DataError if it leads out of `root`, the path that the user named.

    Also refuses pipes and devices, on which a reader would wait forever. A file may be missing.
    """
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(root)):
        outside = os.path.relpath(path, root)
        raise DataError(f"{root} is refused: it refers to {outside}, which is outside of it", "use data you trust")
    real, real_root = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    if not real.is_relative_to(real_root) and real.parent != _blobs(real_root):
        raise DataError(f"{path} is refused: it is a link to {real}, which is outside of {root}", _COPY)
    if os.path.lexists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a broken link, a pipe or a device"
        raise DataError(f"{path} is not a file but {kind}", "download it again, or remove it")
    return path


def _blobs(root: Path) -> Path | None:
    """The folder with the contents of a snapshot of the Hugging Face cache; None if `root` is not in a snapshot."""
    for folder in (root, *root.parents):
        if folder.parent.name == _SNAPSHOTS:
            return folder.parent.parent / _BLOBS
    return None
