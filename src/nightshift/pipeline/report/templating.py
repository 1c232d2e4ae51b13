"""What the templates of all pages share: filters, charts, and files inside the page."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nightshift.pipeline import results, summary
from nightshift.pipeline.report import svg
from nightshift.project import packages
from nightshift.statistics.intervals import Rate

BOTH, WON, LOST, NEITHER, INVALID = "both", "won", "lost", "neither", "invalid"
SYMBOLS = {BOTH: "●", WON: "▲", LOST: "▼", NEITHER: "○", INVALID: "×"}


@functools.cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("nightshift.pipeline.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals |= {"svg": svg, "symbols": SYMBOLS, "writer": _writer()}
    made.filters |= {
        "percent": lambda figures: f"{100 * figures['rate']:.1f} %",
        "interval": interval,
        "clock": summary.clock,
        "p_value": summary.p_value,
        "rate": lambda figures: Rate(figures["successes"], figures["episodes"]),
        "title": lambda name: name.replace("_", " "),
        "breakable": lambda name: Markup("_<wbr>").join(name.split("_")),
    }
    return made


def _writer() -> str:
    """Example: "nightshift 0.1.0"; without a version where it is not installed, as on a compute node."""
    release = packages.release("nightshift")
    return "nightshift" if release == packages.NONE else f"nightshift {release}"


def interval(figures: Mapping[str, float], sign: str = "-") -> str:
    """Example: interval({"low": 0.05, "high": 0.14}, "+") == "+5.0 to +14.0" """
    return results.interval(figures["low"], figures["high"], sign)


def data_uri(kind: str, content: bytes) -> Markup:
    """A file inside the page."""
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")
