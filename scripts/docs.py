"""Writes what the pages have of the code: docs/parameters.md and the packages on docs/extending.md.

Example: python scripts/docs.py

Of docs/parameters.md the text around the tables and the names elsewhere (the last columns) are written by hand and
kept; the rest of a row comes from config.py (its docstrings are the meanings) and params.yaml. A new parameter gets a
row; its names elsewhere are then filled in on the page. Tests compare both pages with what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nightshift import config

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = ROOT / "docs" / "parameters.md"
EXTENDING = ROOT / "docs" / "extending.md"
GENERATED = "<!-- scripts/docs.py writes from here on -->"
END = "<!-- to here -->"

ELSEWHERE = ("papers", "verl / SimpleVLA-RL", "RLinf", "CleanRL")
"""Columns of names in other places."""
ELSEWHERE_OF_RLPD = ("papers", "RLPD (Ball et al.)", "HIL-SERL", "elsewhere")
OWN_COLUMNS = ("parameter", "value", "default", "meaning")
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "name", NoneType: "null"}
COLLECTIONS: dict[Any, tuple[str, int]] = {tuple: ("list of", 0), dict: ("names, each with", 1)}
"""In words, and which of the type's arguments is what they hold."""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A row of the page."""

    name: str
    value: str
    """Type and range, in words."""
    meaning: str
    family: str = ""
    """Of the policies that have it; empty outside the section policy."""


def parameters_page(page: str) -> str:
    """The page with its tables written anew."""
    head, _, rest = page.partition(GENERATED)
    _, _, tail = rest.partition(END)
    names = _names_elsewhere(page)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    tables = [_top(params, names)]
    for section, field in _sections():
        tables.append(_table(section, field, params, names))
    return "\n\n".join([f"{head}{GENERATED}", *tables, f"{END}{tail}"])


def extending_page(page: str) -> str:
    """The page with the text of every file in examples/ that it names."""

    def shown(match: re.Match[str]) -> str:
        path, language = match[1], match[2]
        return f"`{path}`:\n\n```{language}\n{(ROOT / path).read_text()}```"

    return re.sub(r"`(examples/[a-z_/.]+)`:\n\n```(\w+)\n.*?```", shown, page, flags=re.DOTALL)


def _names_elsewhere(page: str) -> dict[str, list[str]]:
    """The last columns of every row that the page has, by parameter."""
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|(.*)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", cells)][-len(ELSEWHERE) :] for name, cells in rows}


def _sections() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in config.Params.model_fields.items():
        if name == "policy" or _models(field.annotation):
            yield field.alias or name, field


def _top(params: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> str:
    plain = {name: field for name, field in config.Params.model_fields.items() if name != "policy"}
    rows = [
        Parameter(name=name, value=_value(field.annotation, field.metadata), meaning=_meaning(config.Params, name))
        for name, field in plain.items()
        if not _models(field.annotation)
    ]
    return _rows(rows, params, names, ELSEWHERE)


def _table(section: str, field: FieldInfo, params: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> str:
    models = get_args(config.OurPolicy) if section == "policy" else _models(field.annotation)
    found = [each for model in models for each in _parameters(model, section, _family(model))]
    columns = ELSEWHERE_OF_RLPD if section in ("rlpd", "classifier") else ELSEWHERE
    about = "" if section == "policy" else _about(models[0])
    return f"## {section}\n\n{about}{_rows(_merged(found), params, names, columns)}"


def _about(model: type[BaseModel]) -> str:
    text = model.__dict__.get("__doc__")
    return f"{_linked(inspect.cleandoc(text))}\n\n" if text else ""


def _parameters(model: type[BaseModel], prefix: str, family: str) -> Iterator[Parameter]:
    for name, field in model.model_fields.items():
        dotted, inner = f"{prefix}.{name}", _models(field.annotation)
        if not inner or len(inner) < len(_options(field.annotation)):  # it can also be null, or a name
            value, meaning = _value(field.annotation, field.metadata), _meaning(model, name)
            yield Parameter(name=dotted, value=value, meaning=meaning, family=family)
        for each in inner:
            yield from _parameters(each, dotted, family)


def _merged(found: Sequence[Parameter]) -> list[Parameter]:
    """One row where several families have a parameter of the same name."""
    by_name: dict[str, list[Parameter]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    families = len({each.family for each in found})
    return [_one(same, of_all=len(same) == families) for same in by_name.values()]


def _one(same: Sequence[Parameter], *, of_all: bool) -> Parameter:
    """A family without a docstring of its own has the first one."""
    first = next((each.meaning for each in same if each.meaning), "")
    if not first:
        raise SystemExit(f"{same[0].name} has no docstring in config.py: write one below the field")
    families: dict[str, list[str]] = {}
    for each in same:
        families.setdefault(each.meaning or first, []).append(f"`{each.family}`")
    if of_all and len(families) == 1:
        meaning = first
    else:
        meaning = " ".join(f"{', '.join(whose)}: {text}" for text, whose in families.items())
    return Parameter(
        name=same[0].name, value=_joined(list(dict.fromkeys(each.value for each in same))), meaning=meaning
    )


def _joined(values: Collection[str]) -> str:
    """Those of families that differ: each option once."""
    if len(values) == 1:
        return next(iter(values))
    return " or ".join(dict.fromkeys(option for value in values for option in value.split(" or ")))


def _rows(
    found: Sequence[Parameter],
    params: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    elsewhere: Sequence[str],
) -> str:
    lines = [_line([*OWN_COLUMNS, *elsewhere]), _line(["---"] * (len(OWN_COLUMNS) + len(elsewhere)))]
    for each in found:
        known = names.get(each.name, ["–"] * len(elsewhere))
        lines.append(_line([f"`{each.name}`", each.value, _default(each.name, params), _linked(each.meaning), *known]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _default(name: str, params: Any) -> str:
    """The value in params.yaml; that file is of one family of policies."""
    for part in name.split("."):
        if not isinstance(params, Mapping) or part not in params:
            return "–"
        params = params[part]
    text = yaml.safe_dump(params, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"


def _linked(text: str) -> str:
    """A sentence of the code on a page: links to other pages, and no line breaks."""
    return re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", " ".join(text.split()))


def _family(model: type[BaseModel]) -> str:
    family = model.model_fields.get("family")
    return str(get_args(family.annotation)[0]) if family else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [each for each in _options(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _value(annotation: Any, metadata: Sequence[Any]) -> str:
    """Type and range in words. Example: "number > 0 or null" """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _value(inner, [*metadata, *(m for each in more for m in getattr(each, "metadata", [each]))])
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_value(each, metadata) for each in options)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{each}`" for each in get_args(annotation))
    if get_origin(annotation) in COLLECTIONS:
        words, place = COLLECTIONS[get_origin(annotation)]
        return f"{words}: {_value(get_args(annotation)[place], ())}"
    return " ".join([WORDS[annotation], " and ".join(_bounds(metadata))]).rstrip()


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for each in metadata:
        for bound, sign in SIGNS.items():
            if hasattr(each, bound):
                yield f"{sign} {getattr(each, bound):g}"


@cache
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """The docstrings below the fields of every class in config.py."""
    tree = ast.parse(Path(config.__file__).read_text())
    return {node.name: dict(_of_class(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            yield field.target.id, str(value.value) if isinstance(value, ast.Constant) else ""


def _meaning(model: type[BaseModel], field: str) -> str:
    return _docstrings()[model.__name__].get(field, "")


def main() -> None:
    for path, write in ((PARAMETERS, parameters_page), (EXTENDING, extending_page)):
        path.write_text(write(path.read_text()))


if __name__ == "__main__":
    main()
