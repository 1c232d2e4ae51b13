"""Messages to people by mail, chat or webhook. The only file that imports apprise."""

from __future__ import annotations

import logging
import re

_log = logging.getLogger(__name__)


def send(addresses: str, title: str, body: str) -> bool:
    """Send to every address (Apprise URLs, separated by spaces or commas); whether all took it.

    An address is a secret: it is neither logged nor part of an error. A message that cannot be sent ends no run.
    """
    import apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its messages contain addresses
    # Without body_format it takes the text to be HTML already, and a mail would have one line.
    told = [
        bool((receiver := apprise.Apprise()).add(address))
        and bool(receiver.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT))
        for address in re.split(r"[,\s]+", addresses.strip())
    ]
    if not all(told):
        _log.warning("%d of %d notifications were not sent: check NIGHTSHIFT_NOTIFY", told.count(False), len(told))
    return all(told)
