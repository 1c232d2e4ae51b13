import contextlib
import logging
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightshift.errors import ProjectError, StreamError
from nightshift.stream import server as server_module
from nightshift.stream import tcp_link, wire
from nightshift.stream.link import LearnerEndpoint, LinkDown
from nightshift.stream.message import Message
from nightshift.stream.roster import ABSENT_SECONDS, Roster
from nightshift.stream.sender import Sender
from nightshift.stream.server import Server
from nightshift.stream.tcp_link import TcpLink
from nightshift.stream.wire import MAGIC, Channel
from tests.data.examples import make
from tests.stream.parts import contents, episode_id, message, message_of, open_endpoint, open_spool

TOKEN = "correct horse battery staple"


@pytest.fixture
def endpoint(tmp_path: Path) -> LearnerEndpoint:
    return open_endpoint(tmp_path)


@pytest.fixture
def server(endpoint: LearnerEndpoint) -> Iterator[Server]:
    with closing(Server(endpoint, timeout=5)) as server:
        yield server


@pytest.fixture
def guarded(endpoint: LearnerEndpoint) -> Iterator[Server]:
    with closing(Server(endpoint, host="0.0.0.0", token=TOKEN, timeout=5)) as server:
        yield server


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


def send_all(connection: socket.socket, content: bytes) -> None:
    """Send these bytes and then EOF; the server may close the connection at any time."""
    with contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def disconnected(connection: socket.socket) -> bool:
    """Read until the learner closes the connection."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def frame(head: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">4sIQ", MAGIC, len(head), len(payload)) + head + payload


def test_episodes_and_weights_travel(tmp_path: Path, endpoint: LearnerEndpoint, server: Server) -> None:
    spool = open_spool(tmp_path / "spool")
    endpoint.publisher.publish({"w": np.arange(1000, dtype=np.float32)})
    made = [spool.put(make(seed=seed)) for seed in range(40)]
    before = {message.header.episode_id: message.payload for message in spool.unacknowledged()}
    sender = Sender(spool, TcpLink("127.0.0.1", server.port))
    spool.wait_until_empty(timeout=60)
    while sender.latest_weights is None:
        threading.Event().wait(0.01)
    sender.close()
    assert contents(endpoint.inbox) == before
    assert set(before) == set(made)
    np.testing.assert_array_equal(sender.latest_weights.arrays()["w"], np.arange(1000))


def test_acks_come_in_order_and_hold_the_outcome(server: Server) -> None:
    link = TcpLink("127.0.0.1", server.port)
    good, bad = message(episode_id(0)), message_of(episode_id(1), b"garbage" * 9)
    acks = list(link.send([good, bad, good, message(episode_id(2))]))
    assert [ack.outcome for ack in acks] == ["accepted", "rejected", "duplicate", "accepted"]
    assert "episode 1 of actor arm" in acks[1].reason
    link.close()


def test_weights_are_sent_only_if_they_are_newer(endpoint: LearnerEndpoint, server: Server) -> None:
    link = TcpLink("127.0.0.1", server.port)
    assert link.weights(-1) is None
    endpoint.publisher.publish({"w": np.zeros(1, np.float32)})
    latest = link.weights(-1)
    assert latest is not None
    assert latest == endpoint.publisher.latest()
    assert link.weights(latest.version) is None
    link.close()


def test_weights_may_be_larger_than_an_episode(
    endpoint: LearnerEndpoint, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real run 4 GiB and 64 GiB."""
    monkeypatch.setattr(tcp_link, "Channel", partial(Channel, max_payload=1000))
    monkeypatch.setattr(wire, "_MAX_KEPT_BYTES", 2000)
    endpoint.publisher.publish({"w": np.arange(5000, dtype=np.float32)})
    link = TcpLink("127.0.0.1", server.port)
    weights = link.weights(-1)
    link.close()
    assert weights is not None
    np.testing.assert_array_equal(weights.arrays()["w"], np.arange(5000))


def test_a_link_reconnects_to_a_restarted_learner(tmp_path: Path, endpoint: LearnerEndpoint) -> None:
    first = Server(endpoint)
    port = first.port
    link = TcpLink("127.0.0.1", port)
    assert [r.outcome for r in link.send([message(episode_id(0))])] == ["accepted"]
    first.close()
    with pytest.raises(LinkDown, match=f"no learner at 127.0.0.1:{port}"):
        list(link.send([message(episode_id(1))]))
    endpoint.close()
    with closing(Server(open_endpoint(tmp_path), port=port)):
        acks = list(link.send([message(episode_id(0)), message(episode_id(1))]))
        assert [r.outcome for r in acks] == ["duplicate", "accepted"]
        link.close()


def test_a_link_that_is_left_early_does_not_mistake_one_answer_for_another(
    server: Server, endpoint: LearnerEndpoint
) -> None:
    link = TcpLink("127.0.0.1", server.port)
    acks = link.send([message(episode_id(n)) for n in range(5)])
    next(acks)
    acks.close()
    assert link.weights(-1) is None
    assert {r.header.episode_id: r.outcome for r in link.send([message(episode_id(9))])} == {episode_id(9): "accepted"}
    link.close()


def test_an_error_of_the_learner_is_not_a_rejection(
    server: Server, endpoint: LearnerEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(received: Message) -> None:
        raise ProjectError("no space left on the disk")

    link = TcpLink("127.0.0.1", server.port)
    with monkeypatch.context() as broken:
        broken.setattr(endpoint.inbox, "receive", full)
        with pytest.raises(LinkDown, match="no space left on the disk"):
            list(link.send([message(episode_id(0))]))
    assert [r.outcome for r in link.send([message(episode_id(0))])] == ["accepted"]
    link.close()


def test_listening_elsewhere_needs_a_token_that_cannot_be_guessed(endpoint: LearnerEndpoint) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(StreamError, match="can be reached from other machines"):
            Server(endpoint, host=host)
    with pytest.raises(StreamError, match="short enough to guess"):
        Server(endpoint, host="0.0.0.0", token="secret")


def test_an_actor_with_the_token_is_accepted(guarded: Server) -> None:
    link = TcpLink("127.0.0.1", guarded.port, token=TOKEN)
    assert [r.outcome for r in link.send([message(episode_id(0))])] == ["accepted"]
    link.close()


@pytest.mark.parametrize(("token", "reason"), [(None, "asks for a token"), ("x" * 20, "is not the learner's")])
def test_an_actor_without_the_token_gets_an_error_and_stores_nothing(
    endpoint: LearnerEndpoint, guarded: Server, caplog: pytest.LogCaptureFixture, token: str | None, reason: str
) -> None:
    link = TcpLink("127.0.0.1", guarded.port, token=token)
    with pytest.raises(LinkDown, match=reason):
        list(link.send([message(episode_id(0))]))
    assert not len(endpoint.inbox)


def test_an_actor_with_a_token_sends_nothing_to_a_learner_without_one(
    endpoint: LearnerEndpoint, server: Server
) -> None:
    with pytest.raises(LinkDown, match="asks for no token"):
        list(TcpLink("127.0.0.1", server.port, token=TOKEN).send([message(episode_id(0))]))


def test_a_proof_cannot_be_replayed(guarded: Server) -> None:
    """A fake learner that sends the actor's own proof back is not authenticated."""
    listener = socket.create_server(("127.0.0.1", 0))

    def repeat() -> None:
        actor, _ = listener.accept()
        with actor, connect(guarded) as real:
            real.settimeout(5)
            actor.settimeout(5)
            actor.sendall(real.recv(65536))
            actor.sendall(actor.recv(65536))
            disconnected(actor)

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
def test_a_hostile_client_is_disconnected_and_others_are_not_affected(
    endpoint: LearnerEndpoint, where: str, which: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    server: Server = request.getfixturevalue(where)
    link = TcpLink("127.0.0.1", server.port, token=TOKEN if where == "guarded" else None)
    assert [r.outcome for r in link.send([message(episode_id(0))])] == ["accepted"]
    with connect(server) as connection, caplog.at_level(logging.WARNING):
        send_all(connection, HOSTILE[which])
        assert disconnected(connection)
    assert [r.outcome for r in link.send([message(episode_id(1))])] == ["accepted"]
    assert which == "nothing" or "closed the connection of 127.0.0.1" in caplog.text
    link.close()


HELLO_BACK = frame(b"\x82\xa5nonce\xc4\x20" + b"n" * 32 + b"\xa5proof\xc4\x00")
ACTOR = b"\xa5actor\xa9elsewhere"
ASKED = frame(b"\x83\xa3ask\xa5store\xa3key\xa4evil" + ACTOR, b"x" * 100)


@pytest.mark.parametrize(
    "asked",
    [
        ASKED,
        frame(b"\x82\xa3ask\xa4exec" + ACTOR),
        frame(b"\x83\xa3ask\xa5store\xa3key\xc0" + ACTOR),
        frame(b"\x82\xa3ask\xa5actor\xc0"),
    ],
)
def test_a_client_that_turns_hostile_after_the_handshake_is_disconnected(
    endpoint: LearnerEndpoint, server: Server, asked: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(HELLO_BACK + asked)
        assert disconnected(connection)
    assert not len(endpoint.inbox)


class WatchedRoster(Roster):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.an_end_was_noted = threading.Event()

    def note_end(self, connection: Hashable) -> None:
        super().note_end(connection)
        self.an_end_was_noted.set()


def test_an_actor_is_there_while_a_slow_upload_or_download_lasts(endpoint: LearnerEndpoint) -> None:
    now = [0.0]
    roster = WatchedRoster(clock=lambda: now[0])
    endpoint.publisher.publish({"network": np.zeros(2**25, np.uint8)})
    download = frame(b"\x83\xa3ask\xa7weights\xaanewer_than\xff" + ACTOR.replace(b"elsewhere", b"downloads"))
    with closing(Server(replace(endpoint, roster=roster))) as server, connect(server) as up, connect(server) as down:
        up.sendall(HELLO_BACK + ASKED[:-1])
        down.sendall(HELLO_BACK + download)
        while len(roster.present()) < 2:
            time.sleep(0.01)
        now[0] += ABSENT_SECONDS + 1
        assert roster.present() == ["downloads", "elsewhere"]
        up.close()
        assert roster.an_end_was_noted.wait(60)
        now[0] += ABSENT_SECONDS + 1
        assert roster.present() == ["downloads"], "an actor that died in the middle of an upload has gone"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200), polite=st.booleans())
def test_random_bytes_do_not_stop_a_learner(
    endpoint: LearnerEndpoint, server: Server, noise: bytes, polite: bool
) -> None:
    with connect(server) as connection:
        send_all(connection, (HELLO_BACK if polite else b"") + noise)
        assert disconnected(connection)
    link = TcpLink("127.0.0.1", server.port)
    assert link.weights(-1) is None
    link.close()


def test_slow_and_silent_clients_time_out_and_block_no_others(
    endpoint: LearnerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Server(endpoint)) as server:
        with monkeypatch.context() as hasty:
            hasty.setattr(server_module, "HANDSHAKE_TIMEOUT", 0.5)
            slow = [connect(server) for _ in range(5)]
            assert [connection.recv(len(MAGIC)) for connection in slow] == [MAGIC] * 5  # their timeout is set
        slow[0].sendall(HELLO_BACK + ASKED[:-1])
        slow[1].sendall(HELLO_BACK[:3])
        link = TcpLink("127.0.0.1", server.port)
        assert [r.outcome for r in link.send([message(episode_id(0))])] == ["accepted"]
        for connection in slow[1:]:
            assert disconnected(connection)
            connection.close()
        slow[0].close()
        assert [r.outcome for r in link.send([message(episode_id(1))])] == ["accepted"]
        link.close()


def test_strangers_that_say_nothing_keep_actors_out_for_a_short_time_only(
    endpoint: LearnerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 2)
    with closing(Server(endpoint)) as server:
        links = [TcpLink("127.0.0.1", server.port) for _ in range(3)]
        assert [link.weights(-1) for link in links] == [None] * 3, "connections that are proved take no such place"
        monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT", 0.2)
        with connect(server) as silent:
            assert disconnected(silent)
        for link in links:
            link.close()


def test_too_many_connections_are_turned_away(endpoint: LearnerEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(server_module, "MAX_HANDSHAKES", 1)
    with closing(Server(endpoint)) as server:
        link = TcpLink("127.0.0.1", server.port)
        assert link.weights(-1) is None
        with connect(server) as second, connect(server) as third:
            assert second.recv(4) == MAGIC
            assert disconnected(third)
            assert link.weights(-1) is None
        link.close()


def test_an_episode_too_large_for_the_learner_is_rejected_and_those_behind_it_arrive(endpoint: LearnerEndpoint) -> None:
    small, large = message(episode_id(0)), message(episode_id(1), metadata={"note": "x" * 10_000})
    with closing(Server(endpoint, max_payload=len(small.payload))) as server:
        link = TcpLink("127.0.0.1", server.port)
        acks = {r.header.episode_id.number: r for r in link.send([small, large, message(episode_id(2))])}
        link.close()
    assert {number: r.outcome for number, r in acks.items()} == {0: "accepted", 1: "rejected", 2: "accepted"}
    assert f"the learner takes {len(small.payload)}" in acks[1].reason


def test_a_frame_larger_than_allowed_is_not_taken_into_memory(
    endpoint: LearnerEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Server(endpoint, max_payload=100)) as server, connect(server) as connection:
        send_all(connection, HELLO_BACK + frame(b"\x80", b"x" * 101))
        assert disconnected(connection)
    assert "the frame has 1 + 101 bytes" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [b"", b"x" * 100, frame(b"\x80"), frame(b"\x81\xa8protocol\x01"), frame(b"\x82\xa8protocol\x04\xa7secured\xc2")],
)
def test_an_actor_survives_a_learner_that_sends_invalid_frames(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def nonsense() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=nonsense)
        thread.start()
        with pytest.raises(LinkDown, match="no learner at"):
            TcpLink("127.0.0.1", listener.getsockname()[1], timeout=5).weights(-1)
        thread.join()


def test_closing_leaves_no_thread_and_no_port(endpoint: LearnerEndpoint) -> None:
    before = set(threading.enumerate())
    server = Server(endpoint)
    port = server.port
    link = TcpLink("127.0.0.1", port)
    assert link.weights(-1) is None
    with connect(server):
        server.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(LinkDown):
        link.weights(-1)
    Server(endpoint, port=port).close()
