"""Text from outside, in a form that can be stored, sent and logged: data files, responses, error messages."""

from __future__ import annotations

MAX_MESSAGE_CHARS = 500


def encodable(text: str) -> str:
    """Returns the text with lone surrogates escaped; no encoding has a form for them."""
    return encoded(text)[0]


def encoded(text: str) -> tuple[str, bytes]:
    """Returns the text with lone surrogates escaped, and the same in UTF-8."""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        escaped = text.encode(errors="backslashreplace")
        return escaped.decode(), escaped


def printable(text: str) -> str:
    """Returns the text with control characters escaped, except for line ends and tabs."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text
    )


def one_line(text: str) -> str:
    """Returns the text on one line, printable and encodable, cut off after `MAX_MESSAGE_CHARS`."""
    line = printable(encodable(" ".join(text.split())))
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 3]}..."
