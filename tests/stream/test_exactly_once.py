"""Any order of faults between a spool and an inbox: nothing is lost, doubled or changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nightshift.errors import StreamError
from nightshift.stream.identity import Identity
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LinkDown
from nightshift.stream.message import Parcel, Receipt
from nightshift.stream.spool import Room, Spool
from tests.data.examples import make
from tests.stream.parts import RUN, contents, open_spool

ACTORS = ("left", "right")
Fault = st.sampled_from(["none", "none", "request lost", "reply lost", "request doubled", "late copy"])


class Lossy:
    """Each parcel meets the next of `faults`. A late copy arrives after later ones, as from a connection given up."""

    def __init__(self, inbox: Inbox, faults: list[str]) -> None:
        self._inbox = inbox
        self._faults = iter(faults)
        self.late: list[Parcel] = []

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        for parcel in parcels:
            fault = next(self._faults, "none")
            if fault == "request lost":
                raise LinkDown(fault)
            if fault == "request doubled":
                self._inbox.receive(parcel)
            if fault == "late copy":
                self.late.append(parcel)
                raise LinkDown(fault)
            receipt = self._inbox.receive(parcel)
            if fault == "reply lost":
                raise LinkDown(fault)
            yield receipt


class Stream(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.inbox = self._open_inbox()
        self.spools = {actor: self._open_spool(actor) for actor in ACTORS}
        self.put: dict[Identity, bytes] = {}
        self.acknowledged: set[Identity] = set()
        self.late: list[Parcel] = []
        self.met: list[Identity] = []
        self.position = 0
        self.seed = 0

    @rule(actor=st.sampled_from(ACTORS))
    def put_episode(self, actor: str) -> None:
        spool = self.spools[actor]
        before = [parcel.label.identity for parcel in spool.waiting()]
        self.seed += 1
        try:
            identity = spool.put(make(steps=2, seed=self.seed))
        except StreamError:
            assert len(before) == 3
            return
        assert len(before) < 3
        assert identity not in self.put
        self.put[identity] = {p.label.identity: bytes(p.content) for p in spool.waiting()}[identity]

    @rule(actor=st.sampled_from(ACTORS), faults=st.lists(Fault, max_size=3))
    def deliver(self, actor: str, faults: list[str]) -> None:
        link = Lossy(self.inbox, faults)
        try:
            for receipt in link.send(self.spools[actor].waiting()):
                assert receipt.outcome != "rejected"
                self.acknowledged.add(receipt.label.identity)
                self.spools[actor].settle(receipt)
        except LinkDown:
            pass
        self.late.extend(link.late)

    @rule(actor=st.sampled_from(ACTORS))
    def acknowledge_and_crash_before_the_spool_heard(self, actor: str) -> None:
        for receipt in Lossy(self.inbox, []).send(self.spools[actor].waiting(1)):
            assert receipt.outcome != "rejected"
        self.crash_actor(actor)

    @precondition(lambda self: self.late)
    @rule()
    def late_copy_arrives(self) -> None:
        parcel = self.late.pop(0)
        assert self.inbox.receive(parcel).outcome in ("accepted", "duplicate")

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
        for arrival in self.inbox.since(self.position)[:most]:
            self.met.append(arrival.label.identity)
            self.position = arrival.position

    @invariant()
    def what_was_acknowledged_is_stored_and_what_is_not_still_waits(self) -> None:
        stored = contents(self.inbox)
        waiting = {p.label.identity for spool in self.spools.values() for p in spool.waiting()}
        assert self.acknowledged <= set(stored)
        assert set(stored) | waiting == set(self.put)
        assert all(self.put[identity] == content for identity, content in stored.items())

    def teardown(self) -> None:
        for actor in ACTORS:
            self.deliver(actor, [])
        assert contents(self.inbox) == self.put
        self.consume(10**6)
        assert len(self.met) == len(set(self.met)) == len(self.put)
        self.inbox.close()
        for spool in self.spools.values():
            spool.close()
        shutil.rmtree(self.folder)

    def _open_inbox(self) -> Inbox:
        return Inbox(self.folder / "inbox", run=RUN)

    def _open_spool(self, actor: str) -> Spool:
        return open_spool(self.folder / actor, actor, room=Room(episodes=3, patience=0))


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
