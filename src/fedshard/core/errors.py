"""The errors fedshard raises on purpose, each with its exit code and a mend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing wrong with the input.

    `key` is the path of what is wrong (`sync.every`, a file), `says` what is wrong with both numbers,
    `mend` what to do about it.
    """

    key: str
    says: str
    mend: str

    def __str__(self) -> str:
        return f"{self.key}: {self.says}. {self.mend}"


class FedshardError(Exception):
    """Base of every error that fedshard raises on purpose. `exit_code` is the process's."""

    exit_code = 1


class InputError(FedshardError):
    """Wrong input, found before any process group exists: all its faults at once; exit code 2."""

    exit_code = 2

    def __init__(self, faults: Iterable[Fault]):
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self):  # exceptions are pickled between processes by their args, which are the text here
        return type(self), (self.faults,)


class RunError(FedshardError):
    """A run that cannot go on (non-finite everywhere, groups that differ); exit code 1."""
