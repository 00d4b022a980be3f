"""The library behind the gradmem course: where training memory goes, and how to make a run fit."""

from importlib import import_module

_HOME = {
    "MemoryTracker": "tracker",
    "MemorySnapshot": "tracker",
    "BudgetExceeded": "tracker",
    "check": "exercises",
    "predict_first": "exercises",
    "format_bytes": "units",
    "parse_bytes": "units",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    # On first use, so that `python -m gradmem_lib doctor` can speak even where torch does not import.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
