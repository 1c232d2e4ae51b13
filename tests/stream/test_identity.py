import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.errors import DataError
from nightshift.stream.identity import Identity
from nightshift.stream.message import Label

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
IDENTITIES = st.builds(Identity, NAMES, NAMES, st.integers(0, 10**10 - 1), st.integers(0, 10**9 - 1))


@given(IDENTITIES, st.integers(0, 2**32 - 1))
def test_a_key_names_one_episode_and_comes_back(identity: Identity, checksum: int) -> None:
    assert Identity.of_key(identity.key) == identity
    assert Label.of_key(Label(identity, checksum).key) == Label(identity, checksum)


@given(IDENTITIES, IDENTITIES)
def test_keys_of_one_actor_sort_as_its_episodes_were_made(one: Identity, other: Identity) -> None:
    mine = Identity(one.run, one.actor, other.epoch, other.number)
    assert (one.key < mine.key) == (one < mine)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a.b.1.2",
        "a.b.0000000001.00000000２",
        "a/../b.c.0000000001.000000000",
        "a.b.c.0000000001.000000000",
        "a\n.b",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(DataError, match="name"):
        Identity.of_key(key)
    with pytest.raises(DataError, match="name"):
        Label.of_key(f"{key}.00000000")


def test_a_label_has_one_spelling_only() -> None:
    key = Identity("a", "b", 1, 2).key
    for checksum in ("0000000F", "f", "0x00000f", "-000000f", " 000000f"):
        with pytest.raises(DataError, match="does not name"):
            Label.of_key(f"{key}.{checksum}")


@pytest.mark.parametrize("name", ["", ".", "a.b", "a/b", "-a", "a" * 65, "ä"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="cannot be the name of a run or an actor"):
        Identity(name, "a", 0, 0)
    with pytest.raises(DataError, match="cannot be the name of a run or an actor"):
        Identity("r", name, 0, 0)
