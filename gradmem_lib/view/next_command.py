"""The command to type after an out-of-memory error, with what its text shows filled in."""

from __future__ import annotations

import re

from ..measure.error_frames import Frame
from ..measure.error_text import ErrorText
from ..planning.cards import CARDS
from ..units import format_bytes
from .error_rows import PLAN, RUN, Row

SAME_CARD = 0.02  # drivers let programs use a little more or less of one card
EXAMPLES = {"model": "MODEL", "rows": "8", "tokens": "2048"}
# How options, settings and code spell them.
_SPELLINGS = {
    "model": r"(?:model_name_or_path|model_id|--model)['\"]?[\s=:,'\"]+([\w.-]+(?:/[\w.-]+)*)"
    r"|from_pretrained\(\s*['\"]([\w./-]+)['\"]",
    "rows": r"(?<!eval_)batch[_-]size['\"]?[\s=:,'\"]+(\d+)",
    "tokens": r"(?:max_seq(?:uence)?_length|seq_len|seq-len|cutoff_len)['\"]?[\s=:,'\"]+(\d+)",
}


def step_of(text: str) -> dict[str, str]:
    """What a log shows of the step: its ``model``, its ``rows`` and the ``tokens`` of a row."""
    found = {}
    for name, words in _SPELLINGS.items():
        if match := re.search(words, text):
            found[name] = match[match.lastindex or 0]
    return found


def command_after(row: Row, error: ErrorText, step: dict[str, str], own: Frame | None) -> str:
    """What to type next."""
    if row.then == RUN:
        script = "train.py"
        if own is not None and own.file.endswith(".py"):
            script = own.file
        return f"gradmem run {script}"
    if row.then != PLAN:
        return row.then
    filled = EXAMPLES | step
    command = (
        f"gradmem plan {filled['model']} --card {_card(error)} --seq-len {filled['tokens']} "
        f"--global-batch {filled['rows']}"
    )
    # Budgets are for where there is no card: on one, the words say what to leave out.
    return f"{command} --target cpu" if error.kind == "budget" else command


def words_before(row: Row, step: dict[str, str]) -> str:
    """What the command does, and what in it is the reader's to replace."""
    if row.then != PLAN:
        return "Type next:"
    words = "Type next, to see what fits such a card"
    if "model" not in step:
        words += ", with your model's name for MODEL, the one word to replace"
    examples = []
    for name in ("rows", "tokens"):
        if name not in step:
            examples.append(f"{EXAMPLES[name]} {name}")
    if examples:
        words += f" ({' and '.join(examples)} are an example)"
    if row.case == "budget":
        words += "; for a model on a card, without --target cpu"
    return f"{words}:"


def _card(error: ErrorText) -> str:
    """The error's card as ``gradmem plan`` reads it: by name if the table has one of its size."""
    nbytes = error.allowed or error.total or 0
    nearest = min(CARDS.values(), key=lambda card: abs(card.nbytes - nbytes))
    is_its_size = abs(nearest.nbytes - nbytes) < SAME_CARD * nbytes
    if error.kind in ("cuda", "async") and is_its_size:
        return f'"{nearest.name}"'
    return format_bytes(nbytes).replace(" ", "")
