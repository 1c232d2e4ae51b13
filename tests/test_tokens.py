"""Tokens are compared in constant time, on every path: how long a refusal takes tells nothing of the token."""

from __future__ import annotations

import ast
import hmac
import http.client
from contextlib import closing
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from nightshift import config
from nightshift.access import Access
from nightshift.robot_server.controller import Controller
from tests.conftest import REPOSITORY
from tests.robots.parts import faulty_server
from tests.teleop.serving import served, visitor

TOKEN = "0123456789abcdef0123456789abcdef"
WRONG = TOKEN[:-1] + "0"
SECRETS = ("token", "proof", "authorization")
CHECKED = ("access.py", "stream", "robot_server", "teleop", "interventions", "cli")
"""Where secrets of other machines arrive."""


class Spy:
    """`hmac.compare_digest`, and what it was asked to compare."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._compare = hmac.compare_digest
        self.compared: list[tuple[bytes, bytes]] = []
        monkeypatch.setattr(hmac, "compare_digest", self)

    def __call__(self, left: bytes, right: bytes) -> bool:
        self.compared.append((left, right))
        return self._compare(left, right)

    def saw(self, left: str, right: str) -> bool:
        return (left.encode(), right.encode()) in self.compared


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("given", [TOKEN, WRONG, "", "é"])
def test_of_the_page_by_socket_and_by_header(params: config.Params, spy: Spy, given: str) -> None:
    with served(params, token=TOKEN) as at:
        try:
            with visitor(at, token=given) as page:
                page.hear("welcome")
            admitted = True
        except ConnectionClosed:
            admitted = False
        assert admitted == (given == TOKEN)
        assert spy.saw(given, TOKEN)
        spy.compared.clear()
        with closing(http.client.HTTPConnection("127.0.0.1", at.port, timeout=60)) as connection:
            header = f"Bearer {given}".encode().decode("latin-1")
            connection.request("GET", "/episodes/0/film", headers={"Authorization": header})
            assert connection.getresponse().status == (404 if admitted else 401)
        assert len(spy.compared) == 1


def test_of_a_robot_server(spy: Spy) -> None:
    with faulty_server() as server:
        guarded = Controller(server.arm, token=TOKEN)
        for given, status in ((TOKEN, 200), (WRONG, 401)):
            assert guarded.handle("getstate", b"{}", f"Bearer {given}")[0] == status
            assert spy.saw(f"Bearer {given}", f"Bearer {TOKEN}")


def test_a_server_without_a_token_admits_everybody(spy: Spy) -> None:
    assert Access(None).admits("anything") and not spy.compared


def _compared_names(comparison: ast.Compare) -> set[str]:
    found = [node for side in (comparison.left, *comparison.comparators) for node in ast.walk(side)]
    return {node.id for node in found if isinstance(node, ast.Name)} | {
        node.attr for node in found if isinstance(node, ast.Attribute)
    }


def _careless(path: Path) -> list[str]:
    """Comparisons of a secret by == or its like, which stop at the first character that differs."""
    by_content = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(operator, by_content) for operator in node.ops)
        and any(secret in name.lower() for name in _compared_names(node) for secret in SECRETS)
    ]


def test_no_code_compares_a_secret_by_its_characters() -> None:
    source = REPOSITORY / "src" / "nightshift"
    files = [file for name in CHECKED for file in ([source / name] if "." in name else (source / name).rglob("*.py"))]
    assert len(files) > len(CHECKED)
    assert [line for file in files for line in _careless(file)] == []
