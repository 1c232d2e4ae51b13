from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data.formats import tf_example, tfrecord
from nightshift.errors import DataError

RECORDS = [b"", b"one", b"x" * 40]


def written(path: Path, records: list[bytes]) -> Path:
    path.write_bytes(b"".join(map(tfrecord.frame_record, records)))
    return path


def test_the_frame_is_the_one_that_tensorflow_writes() -> None:
    # tf.io.TFRecordWriter (tensorflow 2.15.1) of b"hello"
    assert tfrecord.frame_record(b"hello").hex() == "0500000000000000eab2043e68656c6c6fbb1f1c19"


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_records_come_back_one_by_one(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]) -> None:
    path = written(tmp_path_factory.mktemp("records") / "a", records)
    assert [tfrecord.read(record) for record in tfrecord.scan(path)] == records


def test_a_file_that_is_cut_anywhere_but_between_records_is_refused_by_record_number(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", RECORDS).read_bytes()
    ends = [record.offset + record.length + 4 for record in tfrecord.scan(tmp_path / "whole")]
    for size in range(len(whole)):
        torn = tmp_path / "torn"
        torn.write_bytes(whole[:size])
        complete = sum(end <= size for end in ends)
        if size in (0, *ends):
            assert len(tfrecord.scan(torn)) == complete
        else:
            with pytest.raises(DataError, match=f"torn ends inside record {complete}, .* is truncated"):
                tfrecord.scan(torn)


def test_a_flipped_bit_anywhere_is_refused_and_never_read(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", RECORDS).read_bytes()
    path = tmp_path / "flipped"
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"flipped.* record \d"):
            for record in tfrecord.scan(path):
                tfrecord.read(record)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        tfrecord.scan(tmp_path / "gone")
    record = tfrecord.scan(written(tmp_path / "a", RECORDS))[1]
    record.path.unlink()
    with pytest.raises(DataError, match="a, record 1 cannot be read"):
        tfrecord.read(record)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_are_refused(record: bytes) -> None:
    try:
        tf_example.decode(record)
    except tf_example.NotAnExample:
        return
