"""The answers to an out-of-memory error: for which facts, in which words, what helps. The table is
``error_rows.toml``.

A sentence names facts in braces, and what compares two of them is computed: "{free|asked}" becomes
"less than the 2.00 GiB", or "more than", or "as much as". So no sentence can contradict its own
figures. All figures are used as they are printed, with two digits.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..measure.error_text import ENDLESS, ErrorText
from ..units import GiB, format_bytes, parse_bytes

NAMES = {
    "asked": "the request that was refused",
    "total": "the card",
    "allowed": "the limit that was set",
    "allocated": "live tensors (allocated by PyTorch)",
    "private": "of these, free blocks of private pools",
    "idle": "reserved by PyTorch, without a tensor",
    "other": "other allocations of Metal in this process",
    "context": "this process outside PyTorch's allocator",
    "other_processes": "other processes",
    "outside": "outside PyTorch's allocator",
    "rest": "the rest, which the message does not divide",
    "free": "free",
    "resident": "the process that was killed, in the computer's memory",
}
CARD_KINDS = ("cuda", "hip", "xpu", "npu", "async")
TABLE = Path(__file__).with_name("error_rows.toml")
PLAN = "plan"  # the next command is ``gradmem plan``, with what is known filled in
RUN = "run"  # or ``gradmem run``, with the script of the traceback


class Facts(dict):
    """Bytes and words by name. What the message does not give counts as 0."""

    def __missing__(self, name: str) -> int:
        return 0


def shown(nbytes: int) -> int:
    """The bytes that ``format_bytes`` prints for ``nbytes``."""
    if nbytes <= 0:
        return 0
    return parse_bytes(format_bytes(nbytes))


def figures_of(error: ErrorText) -> dict[str, int]:
    """The message's figures, and those that follow from them."""
    found: dict[str, int | None] = {name: getattr(error, name, None) for name in NAMES}
    for name in ("private", "other_processes"):
        found[name] = found[name] or None  # 0 bytes are nothing to speak of
    reserved, own, outside = error.reserved, error.own_process, found.pop("outside")
    # What is outside PyTorch's allocator is divided as far as the message says whose it is.
    if own is not None and reserved is not None and own >= reserved * 0.99:
        found["context"] = max(0, own - reserved)
        if outside is not None and not error.other_processes:
            rest = outside - found["context"]
            if rest > 0.01 * (error.total or 0):
                found["other_processes"] = rest
    elif error.other_processes:
        if outside is not None and outside > error.other_processes:
            found["context"] = outside - error.other_processes
    elif outside is not None:
        found["outside"] = outside
    elif error.total is not None and error.free is not None:
        found["rest"] = max(0, error.total - error.free - (error.allocated or 0))
    return {name: found[name] for name in NAMES if found.get(name) is not None}


def facts_of(error: ErrorText, figures: dict[str, int], moment: str, *, is_windows: bool) -> Facts:
    """The figures as they are printed, their sums, and the words that a sentence may need."""
    facts = Facts({name: shown(nbytes) for name, nbytes in figures.items()})
    if "free" in facts:
        facts["left"] = shown(facts["free"] + facts["idle"])
    if "total" in facts:
        facts["beside"] = shown(facts["total"] - facts["allocated"])
    facts["moment"] = moment
    facts["held"] = shown(facts["allocated"] + facts["idle"] + facts["other"])
    facts["wanted"] = shown(facts["held"] + facts["asked"])
    if error.own_number is not None:
        facts |= {"number": str(error.own_number), "own": shown(error.own_process)}
    facts["names"] = _names(error.others) or "nvidia-smi shows whose they are"
    for name in ("is_cut_off", "other_ranks", "unknown_process", "victim", "message"):
        facts[name] = getattr(error, name)
    named = {
        "kind": error.kind,
        "setting": error.setting,
        "names_segments": error.setting.endswith("expandable_segments:True"),
        "is_windows": is_windows,
    }
    settings = (row for row in table()["setting"] if value_of(row.get("when", "True"), **named))
    facts["setting"] = next(settings)["says"].format(**named)
    return facts


def _names(processes: dict[int, int]) -> str:
    names = [f"process {n} holds {format_bytes(nbytes)}" for n, nbytes in processes.items()]
    if len(names) > 4:
        names = [*names[:3], f"and {len(names) - 3} more"]
    return ", ".join(names)


def fill(sentence: str, facts: Facts) -> str:
    """``sentence`` with its figures and comparisons."""

    def compared(match: re.Match) -> str:
        one, other = facts[match[1]], facts[match[2]]
        word = "as much as"
        if one != other:
            word = "less than" if one < other else "more than"
        return f"{word} the {format_bytes(other)}"

    def named(match: re.Match) -> str:
        fact = facts[match[1]]
        return fact if isinstance(fact, str) else format_bytes(fact)

    return re.sub(r"\{(\w+)\}", named, re.sub(r"\{(\w+)\|(\w+)\}", compared, sentence))


@dataclass(frozen=True)
class Row:
    """A row of ``error_rows.toml``, which explains its fields."""

    case: str
    says: str
    helps: str = ""
    then: str = PLAN
    when: str = "True"
    also: bool = False
    kind: str = ""

    def answers(self, kind: str, facts: Facts, values: dict[str, Any]) -> bool:
        named = set(re.findall(r"\{(\w+)|\|(\w+)\}", self.says + self.helps))
        is_known = all((one or other) in facts for one, other in named)
        is_kind = kind == self.kind or (not self.kind and kind in CARD_KINDS)
        return is_kind and is_known and bool(value_of(self.when, **values))


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def value_of(expression: str, **values: Any) -> Any:
    """What an expression of the table gives for its named ``values``; no other name is known in it.

    It is Python, since ``gradmem explain`` has to run without any package.
    """
    return eval(expression, {"__builtins__": {}}, values)


@cache
def all_rows() -> list[Row]:
    """The table's rows, in its order. A name of words, as in "<the card>", that it does not have is
    an error.
    """
    words = table()["words"]

    def filled(text: str) -> str:
        return re.sub(r"<([^<>]+)>", lambda name: words[name[1]], text)

    rows = []
    for fields in table()["row"]:
        said = {name: filled(fields.get(name, "")) for name in ("says", "helps")}
        rows.append(Row(**fields | said))
    return rows


def rows_of(kind: str, facts: Facts) -> list[Row]:
    """The row that answers, and those that add to it."""
    values: dict[str, Any] = dict.fromkeys((*NAMES, "left", "beside"), 0)
    values |= facts | {"known": set(facts), "endless": ENDLESS, "GiB": GiB, "max": max, "min": min}
    for name, expression in table()["signs"].items():
        values[name] = value_of(expression, **values)
    found: list[Row] = []
    for row in all_rows():
        is_new = row.case not in [other.case for other in found]
        if is_new and (row.also or not found) and row.answers(kind, facts, values):
            found.append(row)
    return found
