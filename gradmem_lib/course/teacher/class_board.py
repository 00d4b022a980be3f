"""A board of a class, from the learners' progress files: how far they are, which exercises hold
them, and what they guessed.

It is one HTML file that reloads itself every few seconds. There is no server and no script, and the
page loads nothing else. Measured values can be put on separate pages, in a folder beside the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..catalogue import MOVED
from ..learner import progress
from .class_board_page import SIGN, measured_pages, page
from .class_board_tables import Rows

SECONDS = 5
PLACES = tuple(  # paths below a home folder: Linux, macOS, Windows
    Path(place, "gradmem", "progress.json")
    for place in (".local/share", "Library/Application Support", "AppData/Local/gradmem")
)
_BESIDE = {".bak": "an old copy, from before a reset", ".tmp": "a file half copied"}
_FOREIGN = "not a progress file, or only a part of one"


def run_board(folder: Path, out: Path, *, once: bool = False, **look: bool) -> None:
    """Write the board of ``folder`` to ``out``, and again every few seconds until Ctrl-C.

    Raises ``OSError``, ``ValueError``.
    """
    if out.is_file():
        with open(out, "rb") as file:
            if SIGN.encode() not in file.read(2000):
                raise ValueError(
                    f"{out} is not a board, so it is not overwritten: name another file by --out"
                )
    board, refresh = Board(folder, out, **look), 0 if once else SECONDS
    board.write(refresh)
    print(
        f"{out.absolute()} is written" + ("" if once else f", again every {SECONDS} s until Ctrl-C")
    )
    told: dict[Path, str] = {}
    _tell_unreadable(board, told)
    said = ""
    try:
        while not once:
            time.sleep(SECONDS)
            try:
                board.write(refresh)
                _tell_unreadable(board, told)
                said = ""
            except OSError as error:  # a share that is gone for a moment, a locked page
                if str(error) != said:
                    print(said := str(error), file=sys.stderr)
    except KeyboardInterrupt:
        board.write(0)


def _tell_unreadable(board: Board, told: dict[Path, str]) -> None:
    """Print which files this account may not read, and why, each once: the page has no names."""
    for path, why in board.unreadable.items():
        if told.get(path) != why:
            print(f"{path}: {why}", file=sys.stderr)
    told.clear()
    told.update(board.unreadable)


class Board:
    """The files of a folder, read again at each ``write``.

    Learners keep their numbers as long as this object lives.
    """

    def __init__(self, folder: Path, out: Path, *, names: bool = False, hide: bool = False):
        self.folder, self.out, self.names = folder, out, names
        self.beside = out.with_name(f"{out.stem}-measured")  # a folder, maybe from an earlier board
        self.measured = self.beside if hide else None
        self.learners: dict[Path, dict[str, Any]] = {}
        self.remarks: list[tuple[Path, str]] = []
        self.unreadable: dict[Path, str] = {}  # what this account may not read, and why
        self._read: dict[Path, tuple[tuple, dict | None, str]] = {}
        self._numbers: dict[Path, int] = {}
        self._salt = secrets.token_bytes(16)  # sorted names would show who is who

    def write(self, refresh: int) -> None:
        """Read all files and write the page, which reloads itself after ``refresh`` seconds (0:
        never).
        """
        self._look()
        rows = [(self.label(path), found) for path, found in self.learners.items()]
        if self.measured:
            self.measured.mkdir(exist_ok=True)
            for name, content in measured_pages(rows, back=self.out.name, refresh=refresh).items():
                _replace(self.measured / name, content)
        _replace(self.out, self._page(rows, refresh))

    def _page(self, rows: Rows, refresh: int) -> str:
        remarks = [
            (str(path.relative_to(self.folder)) if self.names else f"file {i}", remark)
            for i, (path, remark) in enumerate(self.remarks, 1)
        ]
        measured = self.measured.name if self.measured else ""
        return page(rows, remarks, names=self.names, refresh=refresh, measured=measured)

    def label(self, path: Path) -> str:
        """A learner's name on the board: a number; with ``names``, the name of the home folder or
        of the file.
        """
        if not self.names:
            return f"learner {self._numbers[path]}"
        inside = path.relative_to(self.folder)
        home = next(
            (inside.parents[len(p.parts) - 1] for p in PLACES if path.match(str(Path("*", p)))),
            None,
        )
        return str(home or inside).removesuffix(".json")

    def _look(self) -> None:
        self.learners, self.remarks, self.unreadable = {}, [], {}
        files, folders = _inside(self.folder)
        for path in files:
            self._take(path, tell=True)
        for home in folders:
            if home.absolute() == self.beside.absolute():
                continue
            before = len(self.learners) + len(self.remarks)
            try:
                for path in usual if (usual := _usual(home)) else _inside(home)[0]:
                    self._take(path, tell=bool(usual) or path.suffix == ".json")
                if before == len(self.learners) + len(self.remarks):
                    self.remarks.append((home, "no progress file in it yet"))
            except OSError as error:
                self.remarks.append((home, self._why(home, error)))
        new = [path for path in self.learners if path not in self._numbers]
        for path in sorted(new, key=lambda p: hashlib.sha256(self._salt + os.fsencode(p)).digest()):
            self._numbers[path] = len(self._numbers) + 1
        order = str if self.names else self._numbers.__getitem__
        self.learners = {path: self.learners[path] for path in sorted(self.learners, key=order)}

    def _take(self, path: Path, *, tell: bool) -> None:
        if path.absolute() == self.out.absolute():
            return
        found, remark = self._reading(path)
        if found is not None:
            self.learners[path] = found
        if remark and (tell or found is not None):
            self.remarks.append((path, remark))

    def _reading(self, path: Path) -> tuple[dict | None, str]:
        """The content of a file, or ``None``, and a remark about it.

        A file that has not changed is not read again.
        """
        if path.suffix in _BESIDE or ".corrupt-" in path.name:
            return None, _BESIDE.get(
                path.suffix, "moved away by the course, because it was damaged"
            )
        _, last, _ = known = self._read.get(path, ((), None, ""))
        try:
            real = path.resolve(strict=True)
            state = real.stat()
            signature = (state.st_mtime_ns, state.st_size, state.st_ino)
            if known[0] == signature:
                return known[1:]
            found, whole = progress.read_file(real)
        except (OSError, RuntimeError) as error:
            return last, self._why(path, error)
        if whole or found["checks"] or found["guesses"]:
            made = _clean(found, whole)
        else:
            made = (last, _FOREIGN + ("; shown as it was before" if last else ""))
        # a younger file may change within the clock's step
        settled = abs(time.time() - state.st_mtime) > 2
        self._read[path] = (signature if settled else (), *made)
        return made

    def _why(self, path: Path, error: BaseException) -> str:
        """Why ``path`` cannot be used. Where permissions are the reason, whose and what helps."""
        if not isinstance(error, PermissionError) or os.name == "nt":  # there, modes say little
            return progress.reason(error)
        said = _missing_permission(path, self.folder)
        self.unreadable[path] = said
        return said


def _missing_permission(path: Path, folder: Path) -> str:
    """What this account may not do on the way from ``folder`` to ``path``, in a sentence without
    a name of a learner.
    """
    inside = path.relative_to(folder)
    for place in [*reversed(inside.parents)][1:]:
        # Only the first part of the path is a learner's name.
        below = Path(*place.parts[1:])
        name = "their folder" if len(place.parts) == 1 else f"the folder {below} in it"
        if not _may_enter(folder / place):
            return _not_allowed("enter", name, folder / place, stat.S_IXOTH)
    if path.is_dir():
        return _not_allowed("list and enter", "their folder", path, stat.S_IROTH | stat.S_IXOTH)
    return _not_allowed("read", "the file", path, stat.S_IROTH)


def _may_enter(folder: Path) -> bool:
    try:
        os.lstat(folder / "anything")
    except PermissionError:
        return False
    except OSError:  # there is no such file, which only somebody sees who may enter
        return True
    return True


def _not_allowed(verb: str, name: str, path: Path, needed: int) -> str:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    said = f"this account may not {verb} {name}, whose mode is {mode:04o}"
    if mode & needed == needed:  # a list of access rights, a mandatory policy
        return f"{said}: something else than the mode forbids it, so ask who runs the machine"
    letters = "r" * bool(needed & stat.S_IROTH) + "x" * bool(needed & stat.S_IXOTH)
    return f"{said}: its owner runs chmod o+{letters} on it"


def _replace(path: Path, content: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with open(handle, "wb") as file:
            file.write(content.encode("utf-8", "replace"))  # file names may be anything
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files and folders in a folder, in order, without hidden ones (such as the course's unfinished
    files) and locks.
    """
    with os.scandir(folder) as entries:
        seen = sorted((e.name, e.is_dir()) for e in entries if not e.name.startswith("."))
    files = [
        folder / name for name, is_folder in seen if not is_folder and not name.endswith(".lock")
    ]
    return files, [folder / name for name, is_folder in seen if is_folder]


def _usual(home: Path) -> list[Path]:
    """The places in a home folder where there is a progress file.

    Also those that this account may not look at, since a file may be there.
    """
    found = []
    for place in PLACES:
        try:
            os.lstat(home / place)
        except PermissionError:
            if not _may_enter(home):
                raise
        except OSError:  # nothing there
            continue
        found.append(home / place)
    return found


def _clean(found: dict, whole: bool) -> tuple[dict, str]:
    """The entries that can be shown: known names, and numbers that can be drawn."""
    guesses = {}
    for id, entry in found["guesses"].items():
        guess, measured = _drawable(entry["guess"]), _drawable(entry.get("measured"))
        if re.fullmatch(r"\d{1,2}\.[a-z]", id, re.ASCII) and guess is not None:
            guesses[id] = (guess, measured, entry["unit"][:24])
    checks: dict[str, tuple[bool, int]] = {}
    for id, entry in found["checks"].items():
        id, tries = MOVED.get(id, id), _drawable(entry["tries"]) or 0
        passed = entry["outcome"] == "passed" or checks.get(id, (False,))[0]
        checks[id] = (passed, max(int(tries), 1))
    left_out = len(found["guesses"]) - len(guesses)
    remarks = [] if whole else ["a part cannot be read; the rest is shown"]
    remarks += [
        f"guesses left out, because no lesson asks for them or they are out of range: {left_out}"
    ] * (left_out > 0)
    return {"checks": checks, "guesses": guesses}, "; ".join(remarks)


def _drawable(number: Any) -> int | float | None:
    good = isinstance(number, (int, float)) and not isinstance(number, bool)
    return number if good and (number == 0 or 1e-30 <= abs(number) <= 1e30) else None
