"""Where the learner of `rlpd` listens."""

from __future__ import annotations

from nightshift.access import EXPORT_TOKEN, token_of_user
from nightshift.config import host_and_port
from nightshift.errors import ConfigError
from nightshift.project import ports

_LOOPBACK = "127.0.0.1"


def address(listen: str) -> tuple[str, int]:
    """Host and port of machine.listen; without it a free port on loopback. ConfigError if others need a token."""
    if not listen:
        return _LOOPBACK, 0
    if token_of_user() is None:
        raise ConfigError(
            f"machine.listen is {listen}, and other machines need a token to connect",
            f"{EXPORT_TOKEN}, here and there",
        )
    return host_and_port(listen)


def check(listen: str) -> None:
    """ConfigError if the learner could not listen there, unless it does: in a run of this project."""
    host, port = address(listen)
    if listen and not ports.holder(port):
        from nightshift.teleop.server import listen as bind

        bind(host, port, "change machine.listen in params.yaml").close()
