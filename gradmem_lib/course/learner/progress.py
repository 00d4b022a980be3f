"""A learner's progress: one small JSON file that survives crashes, two notebooks at once, and its
own corruption.

Nothing here ever stops a lesson. A file that cannot be written costs one sentence per process, and
a file that cannot be understood is moved aside, not overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..machine import environment

VERSION = 1
LOCK_SECONDS = 10
MOST_BYTES = 2**24  # a course's progress is a few KB
DEEPEST = 20  # brackets in brackets; an entry is three deep
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
    try:
        return path.expanduser().resolve()  # so that replacing the file keeps a link to it
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # a loop of links, no such home: what is done with it will say so
        return path.absolute()


def load() -> dict[str, Any]:
    """All progress: ``{"version", "checks": {id: {"outcome", "tries"}}, "guesses": {id: {"guess",
    "unit", "measured"}}}``, and once a puzzle is solved, ``"puzzles": {id: {"seconds",
    "recipe"}}``.
    """
    path = location()
    try:
        progress, whole = read_file(path)
    except FileNotFoundError:
        return _empty()
    except (OSError, RuntimeError) as error:
        _warn_unusable(path, error)
        return _empty()
    return progress if whole else _locked(path, lambda: _read_or_move_aside(path)) or progress


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
        solved = progress.setdefault("puzzles", {})
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
            if backup.is_symlink() or backup.exists():
                _check_regular(backup)
            os.replace(path, backup)
    except FileNotFoundError:
        return f"there is no progress to clear at {path}"
    except OSError as error:
        raise ProgressError(f"could not clear {path} ({reason(error)}): {_REMEDY}") from error
    return f"progress cleared; the old file is kept as {backup}"


_REMEDY = "set GRADMEM_PROGRESS to a file in a folder that you can write to"


def _empty() -> dict[str, Any]:
    return {"version": VERSION, "checks": {}, "guesses": {}}


def _check_regular(path: Path) -> None:
    """Raise ``OSError`` for all but regular files: reading a pipe waits for ever, and replacing a
    device removes it for everybody.
    """
    kind = os.lstat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISLNK(kind):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "it is not a regular file")


def read_file(path: Path) -> tuple[dict[str, Any], bool]:
    """The part of the file that can be understood, and whether that is all of it."""
    _check_regular(path)
    # Without blocking, in case the file was just replaced by a pipe.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        text = content.decode("utf-8-sig") if len(content) <= MOST_BYTES else ""
        shallow = _shallow(text)
        found = json.loads(shallow, parse_int=_whole_number)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return _empty(), False
    # sections that came later than this version stay
    progress, whole = found | _empty(), shallow == text
    for section in ("checks", "guesses", *({"puzzles"} & found.keys())):  # which came later
        entries = found.get(section)
        entries, whole = (entries, whole) if isinstance(entries, dict) else ({}, False)
        progress[section] = {
            id: entry for id, entry in entries.items() if _is_entry(section, id, entry)
        }
        whole = whole and len(progress[section]) == len(entries)
    return progress, whole


def _shallow(text: str) -> str:
    """``text`` with ``null`` in place of values that are nested too deep, so that the rest can be
    read.
    """
    kept, depth = [], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|[][{}]|[^][{}"]+|"', text, re.DOTALL):
        depth += token in ("[", "{")
        if depth <= DEEPEST:
            kept.append(token)
        elif depth == DEEPEST + 1 and token in ("[", "{"):
            kept.append("null")
        depth -= token in ("]", "}")
    return "".join(kept)


def _whole_number(digits: str) -> int | float:
    """Above some thousand digits, ``int`` refuses; and no number of ours is above a float's
    largest.
    """
    return int(digits) if len(digits) < 400 else float(digits)


def _is_entry(section: str, id: str, entry: Any) -> bool:
    """Whether the rest of the course can show and compare this entry.

    A file may be damaged, forged, or from a later version.
    """
    number, text = {
        "checks": ("tries", "outcome"),
        "guesses": ("guess", "unit"),
        "puzzles": ("seconds", "recipe"),
    }[section]
    return (
        isinstance(entry, dict)
        and _is_number(entry.get(number))
        and isinstance(entry.get(text), str)
        and (id + entry[text]).isprintable()  # half a surrogate pair cannot be printed
        and (entry.get("measured") is None or _is_number(entry["measured"]))
        # else the fastest would be none at all
        and (section != "puzzles" or 1e-30 < entry["seconds"] < 1e30)
    )


def _is_number(value: Any) -> bool:
    """A number that a float can hold, so neither infinite nor NaN."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _read_or_move_aside(path: Path) -> dict[str, Any]:
    """The content of the file.

    A file that is not fully understood is kept beside a new one. Needs the lock.
    """
    try:
        progress, whole = read_file(path)
    except FileNotFoundError:
        return _empty()
    if not whole:
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.corrupt-{number}")):
            number += 1
        os.replace(path, aside)
        kept = progress != _empty()
        _say(
            f"{'A part of the' if kept else 'The'} progress file could not be understood, so it "
            f"was moved to {aside}, and a new one was made{' with all the rest' if kept else ''}."
        )
        if kept:
            _write(path, progress, like=aside)
    return progress


def _update(change: Callable[[dict], None]) -> None:
    path = location()

    def work() -> None:
        progress = _read_or_move_aside(path)
        change(progress)
        _write(path, progress)

    _locked(path, work)


def _write(path: Path, progress: dict[str, Any], like: Path | None = None) -> None:
    """Write beside the file and rename over it: readers, also after a crash, find the old file or
    the new one. Needs the lock. ``like`` is the file whose permissions it has, if not ``path``.
    """
    if os.path.lexists(path):
        _check_regular(path)
    prefix = f".{path.name}-"
    for name in os.listdir(path.parent):
        if name.startswith(prefix):  # from a killed run: nobody else writes while the lock is held
            with contextlib.suppress(OSError):
                os.unlink(path.parent / name)
    # The permissions are those of the old file. A new one is made as any program makes one, by the
    # umask, so that a teacher's board can read it where other files can be read.
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(os.lstat(like or path).st_mode)
    temporary = path.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(progress, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _lock(path: Path):
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    if os.path.lexists(lock):
        _check_regular(lock)
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
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # NotImplementedError: a file system without locks
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
