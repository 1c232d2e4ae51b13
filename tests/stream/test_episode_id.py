from operator import add
from string import ascii_letters, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.errors import DataError
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import MessageHeader

LETTERS = ascii_letters + digits
NAMES = st.builds(add, st.sampled_from(LETTERS), st.text(LETTERS + "_-", max_size=63))
EPISODE_IDS = st.builds(EpisodeId, NAMES, NAMES, st.integers(0, 10**20 - 1), st.integers(0, 10**9 - 1))


@given(EPISODE_IDS, st.integers(0, 2**32 - 1))
def test_a_key_names_one_episode_and_comes_back(episode_id: EpisodeId, checksum: int) -> None:
    assert EpisodeId.from_key(episode_id.key) == episode_id
    assert MessageHeader.from_key(MessageHeader(episode_id, checksum).key) == MessageHeader(episode_id, checksum)


@given(EPISODE_IDS, EPISODE_IDS)
def test_keys_of_one_actor_sort_as_its_episodes_were_made(one: EpisodeId, other: EpisodeId) -> None:
    mine = EpisodeId(one.run, one.actor, other.epoch, other.number)
    assert (one.key < mine.key) == (one < mine)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a.b.1.2",
        "a.b.00000000000000000001.00000000２",
        "a/../b.c.00000000000000000001.000000000",
        "a.b.c.00000000000000000001.000000000",
        "a\n.b",
    ],
)
def test_invalid_keys_are_rejected(key: str) -> None:
    with pytest.raises(DataError, match="key"):
        EpisodeId.from_key(key)
    with pytest.raises(DataError, match="key"):
        MessageHeader.from_key(f"{key}.00000000")


def test_a_header_has_exactly_one_key() -> None:
    key = EpisodeId("a", "b", 1, 2).key
    for checksum in ("0000000F", "f", "0x00000f", "-000000f", " 000000f"):
        with pytest.raises(DataError, match="is not the key of a message"):
            MessageHeader.from_key(f"{key}.{checksum}")


@pytest.mark.parametrize("name", ["", ".", "a.b", "a/b", "-a", "a" * 65, "ä"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name of a run or an actor"):
        EpisodeId(name, "a", 0, 0)
    with pytest.raises(DataError, match="cannot be the name of a run or an actor"):
        EpisodeId("r", name, 0, 0)
