"""How a connection begins: both sides prove that they know the token, and neither says it.

    learner ─▶ {protocol, secured, nonce, largest}
    actor   ─▶ {nonce, proof: HMAC(token, "actor" + both nonces)}
    learner ─▶ {proof: HMAC(token, "learner" + both nonces)}, or {error}

The token tells who is who. It does not hide what follows: between machines that others can listen to, use a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from nightshift.errors import StreamError
from nightshift.stream.wire import BrokenFrame, Channel, number, octets, text

PROTOCOL = 1
_NONCE_BYTES = 32
_SHORTEST_TOKEN = 16


class NotTrusted(StreamError):
    """The other side does not know the token, or we do not."""


def check_token(token: str | None) -> None:
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise StreamError(
            f"the token has {len(token)} characters and can be guessed",
            f'use at least {_SHORTEST_TOKEN}: python -c "import secrets; print(secrets.token_hex())"',
        )


def greet(channel: Channel, token: str | None) -> None:
    """The learner's side."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    hello = {"protocol": PROTOCOL, "secured": token is not None, "nonce": ours, "largest": channel.largest}
    channel.send(hello)
    answer, _ = channel.receive(largest=0)
    theirs = _nonce(octets(answer, "nonce"))
    if token is None:
        channel.send({"proof": b""})
        return
    if not hmac.compare_digest(octets(answer, "proof"), _proof(token, b"actor", ours + theirs)):
        channel.send({"error": "the token of this actor is not the learner's"})
        raise NotTrusted("it does not know the token")
    channel.send({"proof": _proof(token, b"learner", ours + theirs)})


def enter(channel: Channel, token: str | None) -> int:
    """The actor's side; returns how many bytes an episode may have."""
    hello, _ = channel.receive(largest=0)
    if number(hello, "protocol") != PROTOCOL:
        raise NotTrusted(f"the learner speaks version {hello['protocol']} of the protocol, and this actor {PROTOCOL}")
    if hello.get("secured") is not (token is not None):
        raise NotTrusted("the learner asks for a token" if token is None else "the learner asks for no token")
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = _nonce(octets(hello, "nonce")) + ours
    channel.send({"nonce": ours, "proof": _proof(token, b"actor", nonces) if token else b""})
    answer, _ = channel.receive(largest=0)
    if "error" in answer:
        raise NotTrusted(text(answer, "error"))
    if token and not hmac.compare_digest(octets(answer, "proof"), _proof(token, b"learner", nonces)):
        raise NotTrusted("the learner does not know the token")
    return number(hello, "largest")


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonces, hashlib.sha256)


def _nonce(value: bytes) -> bytes:
    if len(value) != _NONCE_BYTES:
        raise BrokenFrame(f"a nonce of {len(value)} bytes")
    return value
