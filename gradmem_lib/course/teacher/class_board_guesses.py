"""The guesses of a class: for each prediction its question, a picture, and what it shows in
sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import median
from urllib.parse import quote

from ..learner.guesses import how_far
from .class_board_picture import in_words, picture
from .class_board_tables import Rows

# A learner's guess, the value that their own lesson measured (or None), and the unit of both.
Entry = tuple[float, float | None, str]


def guesses_by_prediction(rows: Rows) -> dict[str, list[Entry]]:
    """All learners' entries of each prediction, in the course's order."""
    found: dict[str, list[Entry]] = {}
    for _, learner in rows:
        for id, entry in learner["guesses"].items():
            found.setdefault(id, []).append(entry)

    def position(id: str) -> tuple[int, str]:
        lesson = int(id.split(".")[0])
        return lesson, id

    return {id: found[id] for id in sorted(found, key=position)}


class Card:
    """A prediction's question, picture and sentences.

    Args:
        id: of the prediction, such as "1.a".
        entries: at least one. Those in another unit than most are counted, not drawn.
        measured_folder: if given, a measured value is not shown, and the card links to its page in
            this folder.
    """

    def __init__(self, id: str, entries: list[Entry], measured_folder: str = ""):
        unit = Counter(unit for _, _, unit in entries).most_common(1)[0][0]
        same_unit = [entry for entry in entries if entry[2] == unit]
        guesses = [guess for guess, _, _ in same_unit]
        values = [value for _, value, _ in same_unit if value is not None]

        count = "1 guess" if len(guesses) == 1 else f"{len(guesses)} guesses"
        sentences = [f"Median of {count}: {in_words(median(guesses), unit)}."]
        line = None  # where the picture has the line of the measured value
        self.address = ""
        if values and measured_folder:
            self.address = f"{quote(measured_folder)}/{id}.html"
        elif values:
            line = median(values)
            sentences += _about_the_measured(guesses, values, unit)
        else:
            sentences.append(
                "Nobody has shown the measured value yet, and it is in no file: there is no line."
            )
        self.picture, beyond = picture(id, unit, tuple(guesses), line, " ".join(sentences))
        if beyond:
            sentences.append(f"Beyond the picture: {beyond}.")
        left_out = len(entries) - len(same_unit)
        if left_out:
            sentences.append(f"In another unit, left out: {left_out}.")
        self.id, self.sentences, self.question = id, sentences, _questions().get(id)


def _about_the_measured(guesses: list[float], values: list[float], unit: str) -> list[str]:
    line = median(values)
    far = how_far(median(guesses), line)
    verb = "lies" if far.startswith("within") else "is"
    sentences = [f"Measured: {in_words(line, unit)}.", f"The median {verb} {far}."]
    low, high = min(values), max(values)
    if low != high:
        span = f"{in_words(low, unit)} to {in_words(high, unit)}"
        sentences.append(f"Machines differ ({span}): the line is the median of {len(values)}.")
    return sentences


@cache
def _questions() -> dict[str, str]:
    """What the lessons ask, by prediction."""
    return json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))
