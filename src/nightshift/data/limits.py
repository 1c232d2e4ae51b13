"""How much a file from elsewhere may unpack to; one rule for all formats.

Compression, unallocated chunks, run lengths and shared references let a small file describe any amount of data. Readers
therefore compute the size of an episode from what the file declares about it, and check it here before they unpack it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nightshift.errors import DataError

RATIO = 200
"""An episode above `Limits.floor` may be this many times larger than what it is stored in. Camera images in MP4 reach
about 100; gzip alone reaches 1000 on zeros."""
EPISODES = 16
"""All episodes of a source together may take this many times the floor, however few bytes the source has."""
METADATA_BYTES = 256 * 2**20
"""The largest JSON file that is parsed."""

_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that one episode may take in memory."""

    floor: int  # allowed however few bytes the episode is stored in
    ceiling: int  # never exceeded

    @classmethod
    def of_gigabytes(cls, most: float) -> Limits:
        """The limits of a user who says how large an episode may be."""
        if not (math.isfinite(most) and most > 0):
            raise DataError(f"an episode cannot have at most {most} GB", "give a positive number: --max-episode-gb 4")
        return cls(floor=int(most * _GB), ceiling=int(most * _GB))

    def check_episode(self, unpacked: int, stored: int, where: str) -> None:
        """Raise DataError if an episode that is stored in `stored` bytes would unpack to too many."""
        allowed = min(self.ceiling, max(self.floor, RATIO * stored))
        if unpacked > allowed:
            raise DataError(
                f"{where} would unpack from {size(stored)} to {size(unpacked)}; at most {size(allowed)} are allowed",
                f"if you trust its origin, allow it: --max-episode-gb {math.ceil(unpacked / _GB)}",
            )

    def check_source(self, unpacked: int, stored: int, where: str) -> None:
        """Raise DataError if the episodes read from a source are too many bytes for its size."""
        allowed = max(EPISODES * self.floor, RATIO * stored)
        if unpacked > allowed:
            raise DataError(
                f"{where} has {size(stored)} and its episodes more than {size(allowed)}",
                f"if you trust its origin, allow it: --max-episode-gb {math.ceil(unpacked / EPISODES / _GB) + 1}",
            )


DEFAULT = Limits(floor=512 * 2**20, ceiling=8 * 2**30)


def size(count: int) -> str:
    """A number of bytes for people: "85.0 kB", "1.6 GB"."""
    for unit, factor in (("GB", _GB), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
