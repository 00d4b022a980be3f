"""A board of a class, from the learners' progress files: how far they are, which exercises hold
them, and what they guessed.

It is one HTML file that reloads itself every few seconds. There is no server and no script, and the
page loads nothing else. Measured values can be put on separate pages, in a folder beside the file.
"""

from __future__ import annotations

import os
import random
import re
import sys
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
# What the course, or somebody who copies, puts beside a progress file.
OWN = re.compile(r"\.lock$|\.tmp$|\.bak$|\.corrupt-\d+$")
FOREIGN = "not a progress file, or only a part of one"
NOT_ALLOWED = (
    "this account may not read it: its owner runs chmod o+r on it, and chmod o+x on each folder "
    "on the way"
)
NOTHING_YET = "no progress file in it yet"


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
    told = _tell(board, {})
    said = ""
    try:
        while not once:
            time.sleep(SECONDS)
            try:
                board.write(refresh)
                told = _tell(board, told)
                said = ""
            except OSError as error:  # a share that is gone for a moment, a locked page
                if str(error) != said:
                    print(said := str(error), file=sys.stderr)
    except KeyboardInterrupt:
        board.write(0)


def _tell(board: Board, told: dict[Path, str]) -> dict[Path, str]:
    """Print what is new to say of files, since the page may have no names."""
    for path, remark in board.remarks.items():
        if remark not in (NOTHING_YET, told.get(path)):
            print(f"{path}: {remark}", file=sys.stderr)
    return board.remarks


class Board:
    """The files of a folder, read again at each ``write``.

    Learners keep their numbers as long as this object lives.
    """

    def __init__(self, folder: Path, out: Path, *, names: bool = False, hide: bool = False):
        self.folder, self.out, self.names = folder, out, names
        self.beside = out.with_name(f"{out.stem}-measured")  # a folder, maybe from an earlier board
        self.measured = self.beside if hide else None
        self.learners: dict[Path, dict[str, Any]] = {}
        self.remarks: dict[Path, str] = {}
        self._numbers: dict[Path, int] = {}

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
            for i, (path, remark) in enumerate(self.remarks.items(), 1)
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
        before, self.learners, self.remarks = self.learners, {}, {}
        files, folders = _inside(self.folder)
        for path in files:
            if path.absolute() != self.out.absolute():
                self._read(path, before)
        for home in folders:
            if home.absolute() != self.beside.absolute():
                self._read_home(home, before)
        new = [path for path in self.learners if path not in self._numbers]
        random.shuffle(new)  # sorted names would show who is who
        for path in new:
            self._numbers[path] = len(self._numbers) + 1
        order = str if self.names else self._numbers.__getitem__
        self.learners = {path: self.learners[path] for path in sorted(self.learners, key=order)}

    def _read_home(self, home: Path, before: dict[Path, dict[str, Any]]) -> None:
        """Read the progress file in its usual place; or, if there is none, each file of the folder
        that is one.
        """
        known = len(self.learners) + len(self.remarks)
        try:
            usual = _usual(home)
            for path in usual or _inside(home)[0]:
                self._read(path, before, tell=bool(usual) or path.suffix == ".json")
            if known == len(self.learners) + len(self.remarks):
                self.remarks[home] = NOTHING_YET
        except OSError as error:
            self.remarks[home] = _reason(error)

    def _read(self, path: Path, before: dict[Path, dict[str, Any]], tell: bool = True) -> None:
        """Read a file. One that is being written is shown as it was ``before``. ``tell``: what is
        no progress file is remarked.
        """
        try:
            self.learners[path] = _drawable(progress.understood(progress.read_file(path)))
            return
        except ValueError:
            remark = FOREIGN
        except OSError as error:
            remark = _reason(error)
        if path in before:
            self.learners[path] = before[path]
            remark += "; shown as it was before"
        if tell:
            self.remarks[path] = remark


def _usual(home: Path) -> list[Path]:
    """The places in a home folder where there is a progress file, or may be one behind a folder
    that this account may not look into.
    """
    found = []
    for place in PLACES:
        try:
            os.stat(home / place)
        except PermissionError:
            return [*found, home / place]
        except OSError:  # nothing there
            continue
        found.append(home / place)
    return found


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError) and os.name != "nt":
        return NOT_ALLOWED
    return progress.reason(error)


def _replace(path: Path, content: str) -> None:
    """Write beside the file and rename over it, so that a browser never reads half of it."""
    temporary = path.with_name(f".{path.name}-new")
    try:
        temporary.write_text(content, encoding="utf-8", errors="replace")  # of any file's name
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _inside(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files and folders in a folder, in order, without hidden ones and what the course puts beside
    a progress file.
    """
    seen = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in seen if path.is_file() and not OWN.search(path.name)]
    return files, [path for path in seen if path.is_dir()]


def _drawable(found: dict[str, Any]) -> dict[str, Any]:
    """The entries that can be shown: names of lessons, and numbers that can be drawn."""
    guesses = {}
    for id, entry in found["guesses"].items():
        guess, measured = entry["guess"], entry.get("measured")
        if re.fullmatch(r"\d{1,2}\.[a-z]", id, re.ASCII) and _is_drawable(guess):
            shown = measured if _is_drawable(measured) else None
            guesses[id] = (guess, shown, entry["unit"][:24])
    checks: dict[str, tuple[bool, int]] = {}
    for id, entry in found["checks"].items():
        id = MOVED.get(id, id)
        passed = entry["outcome"] == "passed" or checks.get(id, (False,))[0]
        checks[id] = (passed, max(int(entry["tries"]), 1))
    return {"checks": checks, "guesses": guesses}


def _is_drawable(number: float | None) -> bool:
    return number is not None and (number == 0 or 1e-30 <= abs(number) <= 1e30)
