"""A learner's progress: one small JSON file that survives crashes, two notebooks at once, and its
own corruption.

Nothing here ever stops a lesson. A file that cannot be written costs one sentence per process, and
one that cannot be understood is moved aside, not overwritten. Single entries that cannot be
understood, such as those of a later version, are not shown, and stay in the file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..machine import environment

VERSION = 1
LOCK_SECONDS = 10
MOST_BYTES = 2**24  # a course's progress is a few KB
# By section: the number and the text that each entry has.
FIELDS = {
    "checks": ("tries", "outcome"),
    "guesses": ("guess", "unit"),
    "puzzles": ("seconds", "recipe"),
}
_warned: set[str] = set()


class ProgressError(OSError):
    """The progress file cannot be reset. The message says what to do."""


def location() -> Path:
    """Where progress is kept: ``GRADMEM_PROGRESS`` if set, else ``progress.json`` in the user's
    data folder.
    """
    import platformdirs

    chosen = environment.progress_file()
    path = chosen or platformdirs.user_data_path("gradmem") / "progress.json"
    # no such home, a loop of links: what is done with the path will say so
    with suppress(OSError, RuntimeError):
        return path.expanduser().resolve()  # so that replacing the file keeps a link to it
    return path.absolute()


def load() -> dict[str, Any]:
    """All progress: ``{"version", "checks": {id: {"outcome", "tries"}}, "guesses": {id: {"guess",
    "unit", "measured"}}}``, and once a puzzle is solved, ``"puzzles": {id: {"seconds",
    "recipe"}}``.
    """
    path = location()
    try:
        return understood(read_file(path))
    except FileNotFoundError:
        return _empty()
    except ValueError:
        return understood(_locked(path, lambda: _read_or_move_aside(path)) or _empty())
    except OSError as error:
        _warn_unusable(path, error)
        return _empty()


def record_check(id: str, outcome: str) -> None:
    """Record one ``check``: ``"passed"``, ``"not yet"`` or ``"not attempted"``.

    What has passed once stays passed.
    """
    if outcome == "not attempted":
        return  # nothing happened, and most of a first Run All is this

    def note(progress: dict) -> None:
        entry = progress["checks"].setdefault(id, {"outcome": outcome, "tries": 0})
        entry["tries"] += 1
        entry["outcome"] = "passed" if "passed" in (entry["outcome"], outcome) else outcome

    _update(note)


def record_guess(
    id: str, guess: float, measured: float | None = None, *, unit: str = "bytes"
) -> None:
    """Record a prediction, and the measured value once it is known, both in ``unit``."""
    _update(
        lambda progress: progress["guesses"].update(
            {id: {"guess": guess, "unit": unit, "measured": measured}}
        )
    )


def record_puzzle(id: str, seconds: float, recipe: str) -> None:
    """Record a solved puzzle: the recipe, as it is written, and its estimated seconds a token.

    The fastest one is kept.
    """

    def note(progress: dict) -> None:
        solved = progress["puzzles"]
        if id not in solved or seconds < solved[id]["seconds"]:
            solved[id] = {"seconds": seconds, "recipe": recipe}

    _update(note)


def reset() -> str:
    """Start afresh, keeping the old file as ``progress.json.bak``.

    Returns a sentence; raises ``ProgressError``.
    """
    path = location()
    backup = path.with_name(path.name + ".bak")
    try:
        with _lock(path):
            _check_regular(path)
            os.replace(path, backup)
    except FileNotFoundError:
        return f"there is no progress to clear at {path}"
    except OSError as error:
        raise ProgressError(f"could not clear {path} ({reason(error)}): {_REMEDY}") from error
    return f"progress cleared; the old file is kept as {backup}"


_REMEDY = "set GRADMEM_PROGRESS to a file in a folder that you can write to"


def _empty() -> dict[str, Any]:
    return {"version": VERSION} | {section: {} for section in FIELDS}


def _check_regular(path: Path) -> None:
    """Raise ``OSError`` for a folder, a device, and a pipe, whose reader waits for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


def read_file(path: Path) -> dict[str, Any]:
    """The whole file.

    Raises ``ValueError`` for what is no progress file, and ``OSError``.
    """
    _check_regular(path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is too large for a progress file")
    text = path.read_text(encoding="utf-8-sig")
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"{path} is no progress file of this course")
    found = {"puzzles": {}} | found  # the first version of the course had none
    if not all(isinstance(found.get(section), dict) for section in FIELDS):
        raise ValueError(f"{path} is a part of a progress file")
    return found


def understood(progress: dict[str, Any]) -> dict[str, Any]:
    """The entries of a file that the rest of the course can show and compare. A file may be
    damaged, forged, or from a later version.
    """
    found = _empty()
    for section in FIELDS:
        for id, entry in progress[section].items():
            if _is_entry(section, id, entry):
                found[section][id] = entry
    return found


def _is_entry(section: str, id: str, entry: Any) -> bool:
    number, text = FIELDS[section]
    if not isinstance(entry, dict) or not isinstance(entry.get(text), str):
        return False
    if not (id + entry[text]).isprintable():  # half a surrogate pair cannot be printed
        return False
    if not _is_number(entry.get(number)):
        return False
    if section == "puzzles":
        return entry[number] > 0  # else the fastest would be none at all
    measured = entry.get("measured")
    return measured is None or _is_number(measured)


def _is_number(value: Any) -> bool:
    """A number that a float can hold, so neither infinite nor NaN."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _read_or_move_aside(path: Path) -> dict[str, Any]:
    """The content of the file.

    A file that is not understood is kept beside a new one. Needs the lock.
    """
    try:
        return read_file(path)
    except FileNotFoundError:
        return _empty()
    except ValueError:
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.corrupt-{number}")):
            number += 1
        os.replace(path, aside)
        _say(
            f"The progress file could not be understood, so it was moved to {aside}, and a new one "
            "was made."
        )
        return _empty()


def _update(change: Callable[[dict], None]) -> None:
    path = location()

    def work() -> None:
        progress = _read_or_move_aside(path)
        known = understood(progress)
        change(known)
        for section in FIELDS:
            progress[section] |= known[section]
        _write(path, progress)

    _locked(path, work)


def _write(path: Path, progress: dict[str, Any]) -> None:
    """Write beside the file and rename over it: readers, also after a crash, find the old file or
    the new one. Needs the lock.
    """
    temporary = path.with_name(f".{path.name}-new")
    temporary.unlink(missing_ok=True)  # from a run that was killed
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(progress, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        # A new file has the permissions of the umask, so that a teacher's board can read it where
        # other files can be read.
        with suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _lock(path: Path):
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    # After one wait in vain, do not wait again at every check.
    return FileLock(lock, timeout=0 if "locked" in _warned else LOCK_SECONDS)


def _locked(path: Path, work: Callable[[], Any]) -> Any:
    """``work()`` under the file's lock; ``None`` and one warning per process when the place does
    not allow it.
    """
    from filelock import Timeout

    try:
        with _lock(path):
            _warned.discard("locked")
            return work()
    except Timeout as error:
        _warned.add("locked")
        _warn_unusable(path, error)
    except (OSError, RuntimeError) as error:  # NotImplementedError: a file system without locks
        _warn_unusable(path, error)
    return None


def _warn_unusable(path: Path, error: BaseException) -> None:
    if "unusable" not in _warned:
        _warned.add("unusable")
        _say(
            f"Your progress is not being saved, because {path} cannot be used ({reason(error)}): "
            f"{_REMEDY}; the course itself goes on."
        )


def reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
