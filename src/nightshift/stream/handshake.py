"""The handshake of a connection: both sides prove that they know the token without sending it.

    learner ─▶ {protocol, secured, nonce, largest, incarnation}
    actor   ─▶ {nonce, proof: HMAC(token, "actor" + both nonces)}
    learner ─▶ {proof: HMAC(token, "learner" + both nonces)}, or {error}

The token authenticates both sides; it does not encrypt the connection. Use a tunnel on networks that others can read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from nightshift.errors import StreamError
from nightshift.stream.wire import Channel, ProtocolError, bytes_field, int_field, str_field

PROTOCOL = 4
_NONCE_BYTES = 32


class AuthenticationError(StreamError):
    """The two sides do not have the same token, or not the same protocol version."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a learner says of itself."""

    largest: int
    """Bytes of the largest episode that it accepts."""
    incarnation: str
    """Differs whenever a learner is started."""


def server_handshake(channel: Channel, token: str | None, incarnation: str) -> None:
    """The learner's side of the handshake."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    secured = token is not None
    welcome = {"largest": channel.max_payload, "incarnation": incarnation}
    channel.send({"protocol": PROTOCOL, "secured": secured, "nonce": ours, **welcome})
    answer, _ = channel.receive(max_payload=0)
    theirs = _nonce(bytes_field(answer, "nonce"))
    if token is None:
        channel.send({"proof": b""})
        return
    if not hmac.compare_digest(bytes_field(answer, "proof"), _proof(token, b"actor", ours + theirs)):
        channel.send({"error": "the token of this actor is not the learner's"})
        raise AuthenticationError("the actor does not have the learner's token")
    channel.send({"proof": _proof(token, b"learner", ours + theirs)})


def client_handshake(channel: Channel, token: str | None) -> Welcome:
    """The actor's side of the handshake."""
    hello, _ = channel.receive(max_payload=0)
    if int_field(hello, "protocol") != PROTOCOL:
        raise AuthenticationError(f"the learner uses protocol version {hello['protocol']} and this actor {PROTOCOL}")
    if hello.get("secured") is not (token is not None):
        raise AuthenticationError("the learner asks for a token" if token is None else "the learner asks for no token")
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = _nonce(bytes_field(hello, "nonce")) + ours
    channel.send({"nonce": ours, "proof": _proof(token, b"actor", nonces) if token else b""})
    answer, _ = channel.receive(max_payload=0)
    if "error" in answer:
        raise AuthenticationError(str_field(answer, "error"))
    if token and not hmac.compare_digest(bytes_field(answer, "proof"), _proof(token, b"learner", nonces)):
        raise AuthenticationError("the learner does not know the token")
    return Welcome(int_field(hello, "largest"), str_field(hello, "incarnation"))


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonces, hashlib.sha256)


def _nonce(value: bytes) -> bytes:
    if len(value) != _NONCE_BYTES:
        raise ProtocolError(f"the nonce has {len(value)} bytes, not {_NONCE_BYTES}")
    return value
