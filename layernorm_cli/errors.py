"""Every error that layernorm raises on purpose.

LayernormError
├── UsageError         exit 2   options or shapes that do not fit together
├── InputError         exit 3   an input is missing or unreadable
│   └── FormatError    exit 3   an input is malformed, or not what its name says
├── OutputError        exit 3   an output cannot be written
├── MissingEngine      exit 4   an engine or extra is not installed
├── FilesFailed        exit 5   some files of a batch failed
└── WorkerDied         exit 3   a worker process ended without a result

BaseException
├── Interrupted        exit 128 + the signal's number
└── PipeClosed         exit 0   the reader of standard output has seen enough

The message of each is at most three lines: what was found (with the name as typed), what was
expected, what to try.
"""

from __future__ import annotations

__all__ = [
    "FilesFailed",
    "FormatError",
    "InputError",
    "Interrupted",
    "LayernormError",
    "MissingEngine",
    "OutputError",
    "PipeClosed",
    "UsageError",
    "WorkerDied",
    "printable",
]


def printable(text: str) -> str:
    """Return text with control characters and lone surrogates escaped, as a terminal may show it.

    >>> printable("a\\x1b[31mb\\n")
    'a\\\\x1b[31mb\\\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class LayernormError(Exception):
    """What was found, what was expected, what to try; where names the file, tensor or option."""

    exit_code = 1

    def __init__(
        self, where: str, found: str, expected: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(where, found, expected, hint)
        self.where, self.found, self.expected, self.hint = where, found, expected, hint

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}" if self.where else self.found]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(printable(line) for line in lines)


class UsageError(LayernormError):
    """Options, or tensors that do not fit together."""

    exit_code = 2


class InputError(LayernormError):
    """An input is missing or cannot be read."""

    exit_code = 3


class FormatError(InputError):
    """An input is malformed, or not what its name says."""


class OutputError(LayernormError):
    """An output cannot be written."""

    exit_code = 3


class MissingEngine(LayernormError):
    """An engine or extra is not installed; the hint is the line that installs it."""

    exit_code = 4


class FilesFailed(LayernormError):
    """Some files of a batch failed; the others are done."""

    exit_code = 5


class WorkerDied(LayernormError):
    """A worker process ended without a result, for want of memory perhaps."""

    exit_code = 3


class Interrupted(BaseException):
    """A signal asked the program to stop; not an Exception, so that only cleanup sees it pass."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


class PipeClosed(BaseException):
    """Whoever read standard output has closed it; no error, but there is nothing left to do."""

    exit_code = 0
