"""fedshard: pre-train one language model on accelerators whose links are unequal.

`fedshard.Federation` is the library's door; it is loaded when it is first asked for, because torch is slow to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedshard.engine.federate import Federation as Federation
    from fedshard.engine.federate import RoundReport as RoundReport
    from fedshard.engine.outer import Mean as Mean
    from fedshard.engine.outer import Momentum as Momentum
    from fedshard.engine.outer import Nesterov as Nesterov

__version__ = "0.1.0"

_ROOMS = {
    "Federation": "fedshard.engine.federate",
    "Mean": "fedshard.engine.outer",
    "Momentum": "fedshard.engine.outer",
    "Nesterov": "fedshard.engine.outer",
    "RoundReport": "fedshard.engine.federate",
}

__all__ = ["Federation", "Mean", "Momentum", "Nesterov", "RoundReport", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return __all__
