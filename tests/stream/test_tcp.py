import contextlib
import logging
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightshift.errors import ProjectError, StreamError
from nightshift.stream import server as server_module
from nightshift.stream.link import Desk, LinkDown
from nightshift.stream.message import Parcel
from nightshift.stream.sender import Courier
from nightshift.stream.server import Server
from nightshift.stream.tcp import TcpLink
from nightshift.stream.wire import MAGIC
from tests.data.examples import make
from tests.stream.parts import contents, identity, open_desk, open_spool, parcel, parcel_of

TOKEN = "correct horse battery staple"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return open_desk(tmp_path)


@pytest.fixture
def server(desk: Desk) -> Iterator[Server]:
    with closing(Server(desk, patience=5)) as server:
        yield server


@pytest.fixture
def guarded(desk: Desk) -> Iterator[Server]:
    with closing(Server(desk, host="0.0.0.0", token=TOKEN, patience=5)) as server:
        yield server


def knock(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


def say(connection: socket.socket, content: bytes) -> None:
    """Say this and nothing more, to one who may hang up at any moment."""
    with contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def hung_up(connection: socket.socket) -> bool:
    """Whether the learner closes the connection, after whatever it says first."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def frame(head: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">4sIQ", MAGIC, len(head), len(payload)) + head + payload


def test_episodes_and_weights_travel(tmp_path: Path, desk: Desk, server: Server) -> None:
    spool = open_spool(tmp_path / "spool")
    desk.publisher.publish({"w": np.arange(1000, dtype=np.float32)})
    made = [spool.put(make(seed=seed)) for seed in range(40)]
    before = {parcel.label.identity: parcel.content for parcel in spool.waiting()}
    courier = Courier(spool, TcpLink("127.0.0.1", server.port))
    spool.await_empty(timeout=60)
    while courier.newest is None:
        threading.Event().wait(0.01)
    courier.close()
    assert contents(desk.inbox) == before
    assert set(before) == set(made)
    np.testing.assert_array_equal(courier.newest.arrays()["w"], np.arange(1000))


def test_receipts_come_in_order_and_tell_the_outcome(server: Server) -> None:
    link = TcpLink("127.0.0.1", server.port)
    good, bad = parcel(identity(0)), parcel_of(identity(1), b"garbage" * 9)
    receipts = list(link.send([good, bad, good, parcel(identity(2))]))
    assert [receipt.outcome for receipt in receipts] == ["accepted", "rejected", "duplicate", "accepted"]
    assert "episode 1 of actor arm" in receipts[1].reason
    link.close()


def test_nobody_is_asked_for_weights_he_has(desk: Desk, server: Server) -> None:
    link = TcpLink("127.0.0.1", server.port)
    assert link.weights(-1) is None
    desk.publisher.publish({"w": np.zeros(1, np.float32)})
    newest = link.weights(-1)
    assert newest is not None
    assert newest == desk.publisher.newest()
    assert link.weights(newest.version) is None
    link.close()


def test_a_link_finds_a_learner_that_was_started_again(tmp_path: Path, desk: Desk) -> None:
    first = Server(desk)
    port = first.port
    link = TcpLink("127.0.0.1", port)
    assert [r.outcome for r in link.send([parcel(identity(0))])] == ["accepted"]
    first.close()
    with pytest.raises(LinkDown, match=f"no learner at 127.0.0.1:{port}"):
        list(link.send([parcel(identity(1))]))
    desk.inbox.close()
    with closing(Server(open_desk(tmp_path), port=port)):
        receipts = list(link.send([parcel(identity(0)), parcel(identity(1))]))
        assert [r.outcome for r in receipts] == ["duplicate", "accepted"]
        link.close()


def test_a_link_that_is_left_early_does_not_mistake_one_answer_for_another(server: Server, desk: Desk) -> None:
    link = TcpLink("127.0.0.1", server.port)
    receipts = link.send([parcel(identity(n)) for n in range(5)])
    next(receipts)
    receipts.close()  # type: ignore[attr-defined]
    assert link.weights(-1) is None
    assert {r.label.identity: r.outcome for r in link.send([parcel(identity(9))])} == {identity(9): "accepted"}
    link.close()


def test_trouble_at_the_learner_is_no_rejection(
    server: Server, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(received: Parcel) -> None:
        raise ProjectError("no space left on the disk")

    link = TcpLink("127.0.0.1", server.port)
    with monkeypatch.context() as broken:
        broken.setattr(desk.inbox, "receive", full)
        with pytest.raises(LinkDown, match="no space left on the disk"):
            list(link.send([parcel(identity(0))]))
    assert [r.outcome for r in link.send([parcel(identity(0))])] == ["accepted"]
    link.close()


def test_listening_elsewhere_needs_a_token_that_cannot_be_guessed(desk: Desk) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(StreamError, match="can be reached from other machines"):
            Server(desk, host=host)
    with pytest.raises(StreamError, match="can be guessed"):
        Server(desk, host="0.0.0.0", token="secret")


def test_who_knows_the_token_is_let_in(guarded: Server) -> None:
    link = TcpLink("127.0.0.1", guarded.port, token=TOKEN)
    assert [r.outcome for r in link.send([parcel(identity(0))])] == ["accepted"]
    link.close()


@pytest.mark.parametrize(("token", "reason"), [(None, "asks for a token"), ("x" * 20, "is not the learner's")])
def test_who_does_not_know_the_token_is_told_so_and_stores_nothing(
    desk: Desk, guarded: Server, caplog: pytest.LogCaptureFixture, token: str | None, reason: str
) -> None:
    link = TcpLink("127.0.0.1", guarded.port, token=token)
    with pytest.raises(LinkDown, match=reason):
        list(link.send([parcel(identity(0))]))
    assert not len(desk.inbox)


def test_an_actor_gives_nothing_to_a_learner_that_does_not_know_the_token(desk: Desk, server: Server) -> None:
    with pytest.raises(LinkDown, match="asks for no token"):
        list(TcpLink("127.0.0.1", server.port, token=TOKEN).send([parcel(identity(0))]))


def test_a_proof_heard_on_the_wire_cannot_be_said_again(guarded: Server) -> None:
    """A learner that repeats what an actor said does not pass for one that knows the token."""
    listener = socket.create_server(("127.0.0.1", 0))

    def repeat() -> None:
        actor, _ = listener.accept()
        with actor, knock(guarded) as real:
            real.settimeout(5)
            actor.settimeout(5)
            actor.sendall(real.recv(65536))
            actor.sendall(actor.recv(65536))
            hung_up(actor)

    thread = threading.Thread(target=repeat)
    thread.start()
    with pytest.raises(LinkDown, match="does not know the token"):
        TcpLink("127.0.0.1", listener.getsockname()[1], token=TOKEN).weights(-1)
    thread.join()
    listener.close()


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('it went off')",)


HOSTILE = {
    "random": bytes(np.random.default_rng(0).integers(0, 256, 4096, np.uint8)),
    "pickle": pickle.dumps(Bomb()) * 10,
    "http": b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n",
    "huge payload": struct.pack(">4sIQ", MAGIC, 1, 2**63),
    "huge header": struct.pack(">4sIQ", MAGIC, 2**32 - 1, 0),
    "pickle in a frame": frame(pickle.dumps(Bomb())),
    "no msgpack": frame(b"\xc1" * 20),
    "deep msgpack": frame(b"\x91" * 10_000),
    "no map": frame(b"\x01"),
    "odd map": frame(b"\x81\xa3ask\x01"),
    "half a frame": struct.pack(">4sIQ", MAGIC, 100, 100) + b"\x80",
    "nothing": b"",
}


@pytest.mark.parametrize("which", HOSTILE)
@pytest.mark.parametrize("where", ["server", "guarded"])
def test_a_hostile_client_is_hung_up_on_and_harms_nobody(
    desk: Desk, where: str, which: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    server: Server = request.getfixturevalue(where)
    link = TcpLink("127.0.0.1", server.port, token=TOKEN if where == "guarded" else None)
    assert [r.outcome for r in link.send([parcel(identity(0))])] == ["accepted"]
    with knock(server) as connection, caplog.at_level(logging.WARNING):
        say(connection, HOSTILE[which])
        assert hung_up(connection)
    assert [r.outcome for r in link.send([parcel(identity(1))])] == ["accepted"]
    assert which == "nothing" or "hung up on 127.0.0.1" in caplog.text
    link.close()


HELLO_BACK = frame(b"\x82\xa5nonce\xc4\x20" + b"n" * 32 + b"\xa5proof\xc4\x00")
ASKED = frame(b"\x82\xa3ask\xa5store\xa3key\xa4evil", b"x" * 100)


@pytest.mark.parametrize("asked", [ASKED, frame(b"\x81\xa3ask\xa4exec"), frame(b"\x82\xa3ask\xa5store\xa3key\xc0")])
def test_a_client_that_is_let_in_and_then_hostile_is_hung_up_on(desk: Desk, server: Server, asked: bytes) -> None:
    with knock(server) as connection:
        connection.sendall(HELLO_BACK + asked)
        assert hung_up(connection)
    assert not len(desk.inbox)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200), polite=st.booleans())
def test_no_noise_stops_a_learner(desk: Desk, server: Server, noise: bytes, polite: bool) -> None:
    with knock(server) as connection:
        say(connection, (HELLO_BACK if polite else b"") + noise)
        assert hung_up(connection)
    link = TcpLink("127.0.0.1", server.port)
    assert link.weights(-1) is None
    link.close()


def test_slow_and_silent_clients_hold_up_nobody_and_are_given_up(desk: Desk) -> None:
    with closing(Server(desk, patience=0.5)) as server:
        slow = [knock(server) for _ in range(5)]
        slow[0].sendall(HELLO_BACK + ASKED[:-1])
        slow[1].sendall(HELLO_BACK[:3])
        link = TcpLink("127.0.0.1", server.port)
        assert [r.outcome for r in link.send([parcel(identity(0))])] == ["accepted"]
        for connection in slow[1:]:
            assert hung_up(connection)
            connection.close()
        slow[0].close()
        assert [r.outcome for r in link.send([parcel(identity(1))])] == ["accepted"]
        link.close()


def test_too_many_connections_are_turned_away(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 2)
    with closing(Server(desk)) as server:
        link = TcpLink("127.0.0.1", server.port)
        assert link.weights(-1) is None
        with knock(server) as second, knock(server) as third:
            assert second.recv(4) == MAGIC
            assert hung_up(third)
            assert link.weights(-1) is None
        link.close()


def test_an_episode_too_large_for_the_learner_is_rejected_and_those_behind_it_arrive(desk: Desk) -> None:
    small, large = parcel(identity(0)), parcel(identity(1), metadata={"note": "x" * 10_000})
    with closing(Server(desk, largest=len(small.content))) as server:
        link = TcpLink("127.0.0.1", server.port)
        receipts = {r.label.identity.number: r for r in link.send([small, large, parcel(identity(2))])}
        link.close()
    assert {number: r.outcome for number, r in receipts.items()} == {0: "accepted", 1: "rejected", 2: "accepted"}
    assert f"the learner takes {len(small.content)}" in receipts[1].reason


def test_a_frame_larger_than_allowed_is_not_taken_into_memory(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Server(desk, largest=100)) as server, knock(server) as connection:
        say(connection, HELLO_BACK + frame(b"\x80", b"x" * 101))
        assert hung_up(connection)
    assert "a frame of 1 + 101 bytes" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [b"", b"x" * 100, frame(b"\x80"), frame(b"\x81\xa8protocol\x02"), frame(b"\x82\xa8protocol\x01\xa7secured\xc2")],
)
def test_an_actor_survives_a_learner_that_talks_nonsense(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def nonsense() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=nonsense)
        thread.start()
        with pytest.raises(LinkDown, match="no learner at"):
            TcpLink("127.0.0.1", listener.getsockname()[1], patience=5).weights(-1)
        thread.join()


def test_closing_leaves_no_thread_and_no_port(desk: Desk) -> None:
    before = set(threading.enumerate())
    server = Server(desk)
    port = server.port
    link = TcpLink("127.0.0.1", port)
    assert link.weights(-1) is None
    with knock(server):
        server.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(LinkDown):
        link.weights(-1)
    Server(desk, port=port).close()
