"""A learner's progress: one small JSON file that survives crashes, two notebooks at once, and its own corruption.

Nothing here ever stops a lesson. A file that cannot be written costs one sentence per process, and a file that cannot
be understood is moved aside, not overwritten.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = 1
LOCK_SECONDS = 10
_warned: set[str] = set()


class ProgressError(OSError):
    """The progress file cannot be reset. The message says what to do."""


def location() -> Path:
    """Where progress is kept: ``GRADMEM_PROGRESS`` if set, else ``progress.json`` in the user's data folder."""
    import platformdirs

    chosen = os.environ.get("GRADMEM_PROGRESS")
    path = Path(chosen).expanduser() if chosen else platformdirs.user_data_path("gradmem") / "progress.json"
    return path.resolve()  # so that replacing the file keeps a link to it


def load() -> dict[str, Any]:
    """All progress: ``{"version", "checks": {id: {"outcome", "tries"}}, "guesses": {id: {"guess", "unit", "measured"}}}``."""
    path = location()
    try:
        return _read(path)
    except FileNotFoundError:
        return _empty()
    except ValueError:
        return _locked(path, lambda: _read_or_move_aside(path)) or _empty()
    except OSError as error:
        _warn_unusable(path, error)
        return _empty()


def record_check(id: str, outcome: str) -> None:
    """Note one ``check``: ``"passed"``, ``"not yet"`` or ``"not attempted"``. What has passed once stays passed."""
    if outcome == "not attempted":
        return  # nothing happened, and most of a first Run All is this

    def note(progress: dict) -> None:
        entry = progress["checks"].setdefault(id, {"outcome": outcome, "tries": 0})
        entry["tries"] += 1
        entry["outcome"] = "passed" if "passed" in (entry["outcome"], outcome) else outcome

    _update(note)


def record_guess(id: str, guess: float, measured: float | None = None, *, unit: str = "bytes") -> None:
    """Note a prediction, and the measured value once it is known, both in ``unit``."""
    _update(
        lambda progress: progress["guesses"].update(
            {id: {"guess": guess, "unit": unit, "measured": measured}}
        )
    )


def reset() -> str:
    """Start afresh, keeping the old file as ``progress.json.bak``. Returns a sentence; raises ``ProgressError``."""
    path = location()
    backup = path.with_name(path.name + ".bak")
    try:
        with _lock(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            os.replace(path, backup)
    except FileNotFoundError:
        return f"there is no progress to clear at {path}"
    except OSError as error:
        raise ProgressError(f"could not clear {path} ({_reason(error)}): {_REMEDY}") from error
    return f"progress cleared; the old file is kept as {backup}"


_REMEDY = "set GRADMEM_PROGRESS to a file in a folder that you can write to"


def _empty() -> dict[str, Any]:
    return {"version": VERSION, "checks": {}, "guesses": {}}


def _read(path: Path) -> dict[str, Any]:
    """The file's content. Raises ``ValueError`` when it is not what this module writes."""
    progress = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(progress, dict) or progress.get("version") != VERSION:
        raise ValueError("not a progress file of this version")
    for section, number in (("checks", "tries"), ("guesses", "guess")):
        entries = progress.get(section)
        if not isinstance(entries, dict) or not all(map(_is_entry(number), entries.values())):
            raise ValueError(f"{section} is damaged")
    return progress


def _is_entry(number: str) -> Callable[[Any], bool]:
    texts = {"tries": "outcome", "guess": "unit"}[number]

    def valid(entry: Any) -> bool:
        return (
            isinstance(entry, dict)
            and isinstance(entry.get(number), (int, float))
            and isinstance(entry.get(texts), str)
            and isinstance(entry.get("measured"), (int, float, type(None)))
        )

    return valid


def _read_or_move_aside(path: Path) -> dict[str, Any]:
    """The content of the file, or of a fresh one after a file that cannot be understood was moved aside. Needs the lock."""
    try:
        return _read(path)
    except FileNotFoundError:
        return _empty()
    except ValueError:
        number = 1
        while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
            number += 1
        os.replace(path, aside)
        _say(f"The progress file could not be understood, so it was moved to {aside} and a fresh one begun.")
        return _empty()


def _update(change: Callable[[dict], None]) -> None:
    path = location()

    def work() -> None:
        progress = _read_or_move_aside(path)
        change(progress)
        _write(path, progress)

    _locked(path, work)


def _write(path: Path, progress: dict[str, Any]) -> None:
    """Write beside the file and rename over it: a reader, or a crash, finds the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(progress, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _lock(path: Path):
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_SECONDS)


def _locked(path: Path, work: Callable[[], Any]) -> Any:
    """``work()`` under the file's lock; ``None`` and one warning per process when the place does not allow it."""
    try:
        with _lock(path):
            return work()
    except (
        OSError,
        NotImplementedError,
    ) as error:  # filelock raises the latter on file systems without locks
        _warn_unusable(path, error)
        return None


def _warn_unusable(path: Path, error: BaseException) -> None:
    if "unusable" not in _warned:
        _warned.add("unusable")
        _say(
            f"Your progress is not being saved, because {path} cannot be used ({_reason(error)}): {_REMEDY}; "
            "the course itself goes on."
        )


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
