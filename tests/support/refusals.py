"""The sentence that refuses, as a rank sends it back."""

from __future__ import annotations

from collections.abc import Callable


def refusal(run: Callable, *args, **given) -> str:
    """What the ``ValueError`` of ``run(*args)`` says; empty if there is none."""
    try:
        run(*args, **given)
    except ValueError as error:
        return str(error)
    return ""
