"""Where the learner of `rlpd` listens, and the token that actors on other machines need."""

from __future__ import annotations

import os

from nightshift.errors import ConfigError
from nightshift.stream.handshake import check_token

TOKEN_VARIABLE = "NIGHTSHIFT_TOKEN"
"""The environment variable with the token that a learner and its actors on other machines share."""
_LOOPBACK = "127.0.0.1"
_LOOPBACK_OF = {"0.0.0.0": _LOOPBACK, "::": "::1"}


def token_of_user() -> str | None:
    """None if there is none; StreamError if it is short enough to guess."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    check_token(token)
    return token


def address(listen: str) -> tuple[str, int]:
    """Host and port of machine.listen; without it a free port on loopback. ConfigError if others need a token."""
    if not listen:
        return _LOOPBACK, 0
    if token_of_user() is None:
        raise ConfigError(
            f"machine.listen is {listen}, and other machines need a token to connect",
            f'export {TOKEN_VARIABLE}=$(python -c "import secrets; print(secrets.token_hex())"), here and there',
        )
    host, _, port = listen.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def host_of_this_machine(host: str) -> str:
    """What actors on the learner's machine connect to: a learner that listens everywhere is not at that address."""
    return _LOOPBACK_OF.get(host, host)
