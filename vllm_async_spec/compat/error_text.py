"""What an exception says, as text that a terminal and every report can hold."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Control characters but tab and line ends, lone surrogates, and what else XML 1.0 forbids."""


def printable(text: str) -> str:
    r"""The text with characters that a terminal obeys or XML forbids as `\xNN` and `\uNNNN`."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def message_of(error: BaseException) -> str:
    """`str(error)`; if that raises, a clause that says so."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"its message can't be read, because str() of it raises {type(failure).__name__}"
