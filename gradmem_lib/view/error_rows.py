"""The answers to an out-of-memory error: for which facts, in which words, what helps. The table is
``error_rows.toml``.

A sentence names facts in braces, and what compares two of them is computed: "{free|asked}" becomes
"less than the 2.00 GiB", or "more than", or "as much as". So no sentence can contradict its own
figures. All figures are used as they are printed, with two digits.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..measure.error_text import ENDLESS, ErrorText
from ..units import GiB, format_bytes, parse_bytes

CONTEXT = 1 * GiB  # CUDA's own bytes in a process stay below this, in most programs
SMALL_CARD = 0.5  # of a card: where a context takes more, the card is too small for it
LARGE = 0.15  # of a card: a request so large says more than the rest does
FULL = 0.9  # of a card: with so many live tensors, it needs no other reason
MUCH = 0.05  # of a card: what is less than this is not why a card is full
LITTLE = 0.01  # of a card: what is less than this needs no word
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

    def share(self, name: str) -> float:
        """Of the card."""
        if not self["total"]:
            return 0.0
        return self[name] / self["total"]


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


def facts_of(error: ErrorText, figures: dict[str, int], *, is_windows: bool) -> Facts:
    """The figures as they are printed, their sums, and the words that a sentence may need."""
    facts = Facts({name: shown(nbytes) for name, nbytes in figures.items()})
    if "free" in facts:
        facts["left"] = shown(facts["free"] + facts["idle"])
    facts["held"] = shown(facts["allocated"] + facts["idle"] + facts["other"])
    facts["wanted"] = shown(facts["held"] + facts["asked"])
    if error.own_number is not None:
        facts |= {"number": str(error.own_number), "own": shown(error.own_process)}
    facts["names"] = _names(error.others) or "nvidia-smi shows whose they are"
    facts["setting"] = _setting(error, is_windows=is_windows)
    for name in ("is_cut_off", "other_ranks", "unknown_process", "victim", "message"):
        facts[name] = getattr(error, name)
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
    when: Sequence[str] = ()
    also: bool = False
    kind: str = ""

    def answers(self, kind: str, facts: Facts, signs: dict[str, bool]) -> bool:
        named = set(re.findall(r"\{(\w+)|\|(\w+)\}", self.says + self.helps))
        is_known = all((one or other) in facts for one, other in named)
        is_kind = kind == self.kind or (not self.kind and kind in CARD_KINDS)
        return is_kind and is_known and all(signs[sign] for sign in self.when)


@cache
def all_rows() -> list[Row]:
    """The table, in its order. A name of words, as in "<the card>", that it does not have is an
    error.
    """
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))

    def filled(text: str) -> str:
        return re.sub(r"<([^<>]+)>", lambda name: table["words"][name[1]], text)

    rows = []
    for fields in table["row"]:
        fields["says"] = filled(fields["says"])
        fields["helps"] = filled(fields.get("helps", ""))
        rows.append(Row(**fields))
    return rows


def rows_of(kind: str, facts: Facts) -> list[Row]:
    """The row that answers, and those that add to it."""
    signs = signs_of(facts)
    found: list[Row] = []
    for row in all_rows():
        is_new = row.case not in [other.case for other in found]
        if is_new and (row.also or not found) and row.answers(kind, facts, signs):
            found.append(row)
    return found


def signs_of(f: Facts) -> dict[str, bool]:
    """What a row's ``when`` asks for, by name."""
    missing = f["asked"] - f["free"]
    # The request would fit if other processes were gone.
    others_suffice = f["other_processes"] > max(missing, MUCH * f["total"])
    # More than a context is held outside the allocator, and more than lies idle in it.
    context = min(CONTEXT + 0.02 * f["total"], SMALL_CARD * f["total"])
    is_much_outside = max(f["outside"], f["context"]) > max(f["idle"], context)
    return {
        "endless": f["asked"] >= ENDLESS,
        "no sum": "asked" not in f or "total" not in f,
        "one is larger than the card": f["asked"] > f["total"],
        "above the limit": f["wanted"] > f["allowed"],
        "tensors are more than the card": f["allocated"] > f["total"],
        "enough is free": f["free"] >= f["asked"],
        "cut off": f["is_cut_off"],
        "full": f.share("allocated") >= FULL,
        "enough is left": f["left"] >= f["asked"],
        "too little is left": f["left"] < f["asked"],
        "in pieces": f["free"] < f["asked"] < f["left"],
        "much is idle": f.share("idle") >= MUCH,
        "some is idle": f.share("idle") >= LITTLE,
        "one is large": f.share("asked") > LARGE,
        "most is context": f["context"] > f["outside"],
        "much is outside": is_much_outside,
        "others suffice": others_suffice,
        "other ranks": f["other_ranks"],
        "others are not named": f.share("other_processes") > MUCH
        and not (f["other_ranks"] and others_suffice),
        "unknown process": f["unknown_process"],
        "one buffer": "Invalidbuffersize" in f["message"],
        "before vLLM": f["message"].startswith("lessthandesired"),
    }


def _setting(error: ErrorText, *, is_windows: bool) -> str:
    """What to set against fragmentation, in the words of that version."""
    if error.kind == "xpu":
        return (
            "torch.xpu.empty_cache() between phases, and rows of equal lengths, make fewer pieces."
        )
    if error.setting.endswith("expandable_segments:True"):
        if is_windows:
            return (
                "The setting that the message names (expandable_segments) does not work on "
                "Windows. Rows of equal lengths make fewer pieces."
            )
        if error.kind == "hip":
            return (
                f"Set {error.setting} before the start. It needs ROCm 7 or later: with an older "
                "one, PyTorch warns and ignores it. Rows of equal lengths make fewer pieces, too."
            )
        return (
            f"Set {error.setting} in the environment before the start, and give rows equal lengths."
        )
    if error.setting:
        return (
            "In this version, set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 in the environment "
            "before the start: larger blocks are then not split. (From 2.1 on, "
            "expandable_segments:True is better.)"
        )
    return (
        "This version has no setting that its message names: rows of equal lengths make fewer "
        "pieces, and PyTorch 2.1 or later has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )
