"""Any order of faults between a spool and an inbox: nothing is lost, doubled or changed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nightshift.errors import StreamError
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LinkDown
from nightshift.stream.message import Ack, Message
from nightshift.stream.spool import Spool, SpoolLimits
from tests.data.examples import make
from tests.stream.parts import RUN, contents, open_spool

ACTORS = ("left", "right")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of small files are written and synced here; a disk would take most of the time."""
Fault = st.sampled_from(["none", "none", "request lost", "reply lost", "request doubled", "late copy"])


class Lossy:
    """Each message meets the next of `faults`. A late copy arrives after later ones, as from a connection given up."""

    def __init__(self, inbox: Inbox, faults: list[str]) -> None:
        self._inbox = inbox
        self._faults = iter(faults)
        self.late: list[Message] = []

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        for message in messages:
            fault = next(self._faults, "none")
            if fault == "request lost":
                raise LinkDown(fault)
            if fault == "request doubled":
                self._inbox.receive(message)
            if fault == "late copy":
                self.late.append(message)
                raise LinkDown(fault)
            ack = self._inbox.receive(message)
            if fault == "reply lost":
                raise LinkDown(fault)
            yield ack


class Stream(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.inbox = self._open_inbox()
        self.spools = {actor: self._open_spool(actor) for actor in ACTORS}
        self.put: dict[EpisodeId, bytes] = {}
        self.acknowledged: set[EpisodeId] = set()
        self.late: list[Message] = []
        self.seen: list[EpisodeId] = []
        self.position = 0
        self.seed = 0

    @rule(actor=st.sampled_from(ACTORS))
    def put_episode(self, actor: str) -> None:
        spool = self.spools[actor]
        before = [message.header.episode_id for message in spool.unacknowledged()]
        self.seed += 1
        try:
            episode_id = spool.put(make(steps=2, seed=self.seed))
        except StreamError:
            assert len(before) == 3
            return
        assert len(before) < 3
        assert episode_id not in self.put
        self.put[episode_id] = {p.header.episode_id: bytes(p.payload) for p in spool.unacknowledged()}[episode_id]

    @rule(actor=st.sampled_from(ACTORS), faults=st.lists(Fault, max_size=3))
    def deliver(self, actor: str, faults: list[str]) -> None:
        link = Lossy(self.inbox, faults)
        try:
            for ack in link.send(self.spools[actor].unacknowledged()):
                assert ack.outcome != "rejected"
                self.acknowledged.add(ack.header.episode_id)
                self.spools[actor].handle_ack(ack)
        except LinkDown:
            pass
        self.late.extend(link.late)

    @rule(actor=st.sampled_from(ACTORS))
    def acknowledge_and_crash_before_the_spool_handles_it(self, actor: str) -> None:
        for ack in Lossy(self.inbox, []).send(self.spools[actor].unacknowledged(1)):
            assert ack.outcome != "rejected"
        self.crash_actor(actor)

    @precondition(lambda self: self.late)
    @rule()
    def late_copy_arrives(self) -> None:
        message = self.late.pop(0)
        assert self.inbox.receive(message).outcome in ("accepted", "duplicate")

    @rule(actor=st.sampled_from(ACTORS))
    def crash_actor(self, actor: str) -> None:
        self.spools[actor].close()  # all that a kill leaves behind: the files, and no lock
        self.spools[actor] = self._open_spool(actor)

    @rule()
    def crash_learner(self) -> None:
        self.inbox.close()
        self.inbox = self._open_inbox()

    @rule(most=st.integers(1, 3))
    def consume(self, most: int) -> None:
        for stored in self.inbox.stored_after(self.position)[:most]:
            self.seen.append(stored.header.episode_id)
            self.position = stored.position

    @invariant()
    def acknowledged_episodes_are_stored_and_the_others_are_in_a_spool(self) -> None:
        stored = contents(self.inbox)
        spooled = {p.header.episode_id for spool in self.spools.values() for p in spool.unacknowledged()}
        assert self.acknowledged <= set(stored)
        assert set(stored) | spooled == set(self.put)
        assert all(self.put[episode_id] == content for episode_id, content in stored.items())

    def teardown(self) -> None:
        for actor in ACTORS:
            self.deliver(actor, [])
        assert contents(self.inbox) == self.put
        self.consume(10**6)
        assert len(self.seen) == len(set(self.seen)) == len(self.put)
        self.inbox.close()
        for spool in self.spools.values():
            spool.close()
        shutil.rmtree(self.folder)

    def _open_inbox(self) -> Inbox:
        return Inbox(self.folder / "inbox", run=RUN)

    def _open_spool(self, actor: str) -> Spool:
        return open_spool(self.folder / actor, actor, limits=SpoolLimits(max_episodes=3, timeout=0))


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
