"""Lesson 06's exercises in arithmetic: an error's numbers, what scales with the rows, and which
technique comes next.
"""

from __future__ import annotations

import copy
from ast import literal_eval
from functools import partial
from itertools import combinations

from ....units import GiB, MiB
from ...judge.compare import describe, difference, plain
from ...judge.exercise import Exercise, HiddenCase, Mistake, calls
from ...judge.hints import nearest_mistake, shares


def read_error(asked, total, free, process, allocated, idle) -> dict:
    """What an out-of-memory error says between the lines, from its six numbers (bytes)."""
    return {
        "context": process - allocated - idle,
        "others": total - free - process,
        "in_pieces": free + idle >= asked,
    }


def _reads(asked, total, free, process, allocated, idle, *, wrong):
    found = read_error(asked, total, free, process, allocated, idle)
    return (
        found
        | {
            "idle forgotten": {"context": process - allocated},
            "others in the context": {"context": total - free - allocated - idle},
            "this process too": {"others": total - free},
            "but the tensors": {"others": total - free - allocated},
            "free too": {"others": total - process},
            "idle alone": {"in_pieces": idle >= asked},
            "free alone": {"in_pieces": free >= asked},
            "its own context": {"others": total - free - allocated - idle},
            "too little free": {"in_pieces": asked > free},
            "more than enough": {"in_pieces": free + idle > asked},
            "turned round": {"in_pieces": free + idle < asked},
        }[wrong]
    )


def _explain_error(got, expected):
    """What is said of the first wrong entry, if it is wrong in the same way in every case."""
    numbers = {case: _by_name(case) for case in expected}
    for entry in ("context", "others", "in_pieces"):
        mine = {case: got[case][entry] for case in expected}
        right = {case: expected[case][entry] for case in expected}
        if not difference(mine, right):
            continue
        if entry == "in_pieces":
            return _why_pieces(mine, right)
        return _why_sum(entry, mine, numbers)
    return None


# What is added (1) and subtracted (-1) for an entry.
_SUMS = {
    "context": {"process": 1, "allocated": -1, "idle": -1},
    "others": {"total": 1, "free": -1, "process": -1},
}
_NAMES = ("asked", "total", "free", "process", "allocated", "idle")
_ENTRIES = {"context": "the context", "others": "the others' memory"}
_WHY_NOT = {
    "context": {
        "asked": "the driver refused these bytes, so no process holds them.",
        "total": "the context is a part of what this process has in use.",
        "free": "no process holds these bytes.",
    },
    "others": {
        "asked": "the driver refused these bytes, so no process holds them.",
        "allocated": "they belong to this process, whose bytes are subtracted as a whole.",
        "idle": "they belong to this process, whose bytes are subtracted as a whole.",
    },
}
_WHY = {
    "context": {
        "process": "begin with what this process has in use.",
        "allocated": "the tensors are no part of the context, so subtract them.",
        "idle": "PyTorch has reserved these, so subtract them.",
    },
    "others": {
        "total": "begin with all that the card has.",
        "free": "no process holds these, so subtract them.",
        "process": "subtract all that this process has in use.",
    },
}
_WORDS = {
    "asked": "the requested bytes",
    "total": "the card's capacity",
    "free": "the card's free bytes",
    "process": "this process's bytes",
    "allocated": "the allocated bytes",
    "idle": "the idle blocks",
}


def _why_sum(entry: str, mine: dict, numbers: dict) -> str | None:
    """What is said of a sum of the six numbers: which of them is in it, and should not be, or is
    not in it as it should.
    """
    terms = [{case: given[name] for case, given in numbers.items()} for name in _NAMES]
    found = shares(mine, *terms)
    if found is None or any(times != round(times) for times in found):
        return None
    if all(times == -_SUMS[entry].get(name, 0) for name, times in zip(_NAMES, found, strict=True)):
        return f"{_ENTRIES[entry]} has the wrong sign: the subtraction is turned round."
    for name, times in zip(_NAMES, found, strict=True):
        should = _SUMS[entry].get(name, 0)
        if times != should:
            why = _WHY[entry][name] if should else _WHY_NOT[entry][name]
            verb = "is" if name == "total" else "are"
            return f"{_WORDS[name]} {verb} {_done(times, should)} {_ENTRIES[entry]}: {why}"
    return None


def _done(times: float, should: int) -> str:
    """What is done to a number that is in a sum ``times`` times, but ``should`` times."""
    if times == 0:
        return "not subtracted from" if should < 0 else "missing from"
    if abs(times) > 1:
        return f"counted {abs(times):g} times in"
    return "added to" if times > 0 else "subtracted from"


def _why_pieces(mine: dict, right: dict) -> str | None:
    """In which cases ``in_pieces`` is the wrong way, if it is a truth in all of them."""
    if not all(plain(truth) in (True, False) for truth in mine.values()):
        return None
    wrong = []
    if any(mine[case] and not right[case] for case in right):
        wrong.append("True in a case where free and idle bytes together are too few")
    if any(right[case] and not mine[case] for case in right):
        wrong.append("False in a case where free and idle bytes together are enough")
    return f"in_pieces is {', and '.join(wrong)}: compare their sum with `asked`."


def _by_name(case: str) -> dict[str, int]:
    """The six numbers of an error's case."""
    return dict(zip(_NAMES, literal_eval(case), strict=True))


def _error(asked, total, context, allocated, idle, others=0) -> tuple[int, ...]:
    process = context + allocated + idle
    return tuple(
        n * MiB for n in (asked, total, total - process - others, process, allocated, idle)
    )


# The message that the lesson begins with, as it is printed, in the order of ``read_error``.
REAL_MESSAGE = (
    24 * MiB,
    round(7.60 * GiB),
    round(15.38 * MiB),
    round(2.19 * GiB),
    round(217.80 * MiB),
    round(8.20 * MiB),
)

MOMENTS = ("forward", "backward", "optimizer_step")
GROW = ("activations", "temporaries", "other")
STAY = ("parameters", "gradients", "optimizer")
STEP_HAS = (*STAY, "temporaries")  # the categories with bytes in the optimizer's step


def with_rows(moments, rows, new) -> float:
    """The peak with ``new`` rows, from the highest moment of each phase with ``rows`` (bytes by
    category).
    """
    return max(_at(phase, parts, new / rows) for phase, parts in moments.items())


def _at(phase: str, parts: dict, factor: float, grow=GROW, step=()) -> float:
    grow = step if phase == "optimizer_step" else grow
    return sum(n * (factor if name in grow else 1) for name, n in parts.items())


def _scales(moments, rows, new, *, grow=GROW, step=(), which=max):
    return which(_at(phase, parts, new / rows, grow, step) for phase, parts in moments.items())


def _at_the_peak(moments, rows, new):
    phase = max(moments, key=lambda phase: sum(moments[phase].values()))
    return _at(phase, moments[phase], new / rows)


def _moments(
    resident: int, gradients: int, batch: tuple[int, ...], step: int
) -> dict[str, dict[str, int]]:
    """``batch``: activations, temporaries and others when backward begins; ``step``: temporaries of
    the optimizer's. In MiB.
    """
    stay = {"parameters": resident * MiB, "gradients": 0, "optimizer": 2 * resident * MiB}
    activations, temporaries, other = (n * MiB for n in batch)
    end = {"activations": activations, "temporaries": temporaries, "other": other}
    return {
        "forward": stay | end | {"temporaries": temporaries // 2},
        "backward": stay | end | {"gradients": gradients * MiB},
        "optimizer_step": stay
        | {"gradients": resident * MiB, "activations": 0, "temporaries": step * MiB, "other": 0},
    }


ROWS = {
    "8 rows to 4": (_moments(512, 64, (1800, 384, 12), 108), 8, 4),
    "16 rows to 4": (_moments(100, 0, (96, 40, 2), 64), 16, 4),
    "4 rows to 8": (_moments(256, 32, (1024, 256, 8), 256), 4, 8),
    HiddenCase("8 rows to 2"): (_moments(300, 16, (640, 96, 16), 300), 8, 2),
    HiddenCase("2 rows to 1"): (_moments(300, 16, (640, 96, 16), 0), 2, 1),
    HiddenCase("6 rows to 12"): (_moments(100, 0, (500, 100, 4), 0), 6, 12),
}
ROWS["6 rows to 12"][0]["forward"]["temporaries"] = 300 * MiB  # the peak is in the first moment


def _observe_rows(candidate):
    return {
        case: candidate(copy.deepcopy(moments), rows, new)
        for case, (moments, rows, new) in ROWS.items()
    }


def _explain_rows(got, expected) -> str | None:
    def is_answered_by(wrong) -> bool:
        return not difference(got, {case: wrong(*given) for case, given in ROWS.items()})

    def highest_of(phases):
        def wrong(moments, rows, new):
            return max(_at(phase, moments[phase], new / rows) for phase in phases)

        return wrong

    for phase in MOMENTS:
        if is_answered_by(highest_of([phase])):
            return f"only the moment of {phase} is looked at: another one may be the highest."
    if is_answered_by(highest_of(MOMENTS[:2])):
        return (
            "the optimizer's step is left out: with few rows its moment may be the highest of all."
        )
    for wrong, says in _OTHER_FACTORS:
        if is_answered_by(wrong):
            return says
    return _why_scaled(got)


def _why_scaled(got) -> str | None:
    """What is said of an answer that scales the wrong categories by new / rows, where all ways to
    come to its numbers agree on one of them.
    """
    ways = [
        set(grow)
        for grow in _subsets((*GROW, *STAY))
        for step in _subsets(STEP_HAS)
        if not difference(
            got, {case: _scales(*given, grow=grow, step=step) for case, given in ROWS.items()}
        )
    ]
    if not ways:
        return None
    for name in STAY:
        if all(name in grow for grow in ways):
            return (
                f"`{name}` is scaled in forward and backward: it does not depend on the number of "
                "rows."
            )
    for name in GROW:
        if all(name not in grow for grow in ways):
            return f"`{name}` is not scaled in forward and backward: it grows with the rows."
    return None


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for size in range(len(names) + 1) for some in combinations(names, size)]


_OTHER_FACTORS = (
    (
        lambda moments, rows, new: with_rows(moments, 2, 1),
        "the batch is halved in every case: the factor is new / rows.",
    ),
    (
        lambda moments, rows, new: new * with_rows(moments, rows, 1),
        "this is the peak of one row, times the rows: weights, gradients and states are there "
        "once, however many rows there are.",
    ),
    (
        lambda moments, rows, new: with_rows(moments, 1, max(1, new // rows)),
        "the factor is rounded to a whole number: divide by /, which gives a fraction.",
    ),
    (
        lambda moments, rows, new: with_rows(moments, 1, new),
        "the factor is `new` itself, as if there had been one row: it is new / rows.",
    ),
)


NAMES = ("micro-batches", "checkpointing", "8-bit states", "LoRA", "QLoRA")


def next_technique(phase, parts, rows, card) -> str:
    """The first of ``NAMES`` that may bring the peak within ``card`` bytes, or "none"."""
    return _chosen(phase, parts, rows, card)


def _chosen(phase, parts, rows, card, *, wrong="", order=NAMES) -> str:
    takes = _takes(phase, parts, rows, wrong)
    if wrong == "the most":
        return max(NAMES, key=lambda name: takes[name])
    total = sum(parts.values())
    if wrong == "below":
        card -= 1  # all bytes are whole numbers
    return next((name for name in order if total - takes[name] <= card), "none")


def _stacked(phase, parts, rows, card) -> str:
    left = dict(parts)
    for name in NAMES:
        for part in parts:
            # What this technique takes of this part alone.
            without = _takes(phase, parts | {part: 0}, rows, "")[name]
            left[part] -= min(left[part], _takes(phase, parts, rows, "")[name] - without)
        if sum(left.values()) <= card:
            return name
    return "none"


def _takes(phase, parts, rows, wrong) -> dict[str, int]:
    """The bytes that each technique takes away, by itself. ``wrong``: a known mistake, or ""."""
    in_step = phase == "optimizer_step"
    if wrong == "forward":
        in_step = phase != "backward"
    takes: dict[str, int] = dict.fromkeys(NAMES, 0)
    if not in_step or wrong == "the phase":
        takes |= _takes_from_the_batch(phase, parts, rows, wrong)
    if wrong == "in the step alone" and phase == "forward":
        return takes
    # In the optimizer's step, the temporaries belong to the states' update.
    update = parts["temporaries"] if in_step and wrong != "the step's" else 0
    return takes | _takes_from_training(parts, update, wrong)


def _takes_from_the_batch(phase, parts, rows, wrong) -> dict[str, int]:
    """What smaller micro-batches and checkpoints take away in forward and backward."""
    takes = {"checkpointing": parts["activations"]}
    if wrong == "logits":
        takes["checkpointing"] += parts["temporaries"]
    if rows > 1 or wrong == "one row":  # a single row cannot be cut
        takes["micro-batches"] = parts["activations"]
        no_logits = wrong == "logits in backward" and phase == "forward"
        if wrong != "activations alone" and not no_logits:
            takes["micro-batches"] += parts["temporaries"]
    return takes


def _takes_from_training(parts, update, wrong) -> dict[str, int]:
    """What fewer or smaller states, gradients and weights take away. ``update``: the temporaries of
    the optimizer's step.
    """
    states = parts["optimizer"] + update
    if wrong == "8-bit gradients":
        states += parts["gradients"]
    if wrong == "a quarter stays":
        states *= 0.75
    adapters = parts["optimizer"] + parts["gradients"]
    if wrong != "adapters' step":
        adapters += update
    quantized = parts["parameters"]
    if wrong != "the base alone":
        quantized += adapters  # QLoRA is LoRA too
    if wrong == "the base":
        adapters += parts["parameters"]
    return {"8-bit states": states, "LoRA": adapters, "QLoRA": quantized}


def _case(phase: str, parts: tuple[int, ...], rows: int, card: int) -> tuple:
    names = ("parameters", "gradients", "optimizer", "activations", "temporaries")
    return phase, dict(zip(names, parts, strict=True)), rows, card


_ONE_OF = f'return text: one of {", ".join(NAMES)}, or the word "none".'


def _explain_next(got, expected):
    if not any(isinstance(value, str | None) for value in got.values()):
        return _ONE_OF
    said = {describe(value) for value in got.values()}
    if len(said) == 1:
        return (
            f"the answer is {said.pop()} for every breakdown: it must depend on phase, parts, "
            "rows and card."
        )
    case = next(case for case in expected if difference(got[case], expected[case]))
    mine = got[case]
    if isinstance(mine, str):
        mine = mine.strip()
    names = {name.casefold(): name for name in (*NAMES, "none")}
    if mine is None:
        return 'where no technique can be enough, return the word "none", and not None.'
    if not isinstance(mine, str) or mine.casefold() not in names:
        return _ONE_OF
    return _named(got, expected) or _why_next(case, names[mine.casefold()], expected[case])


def _named(got, expected) -> str:
    """The sentence of the known mistake that is in ``got``, perhaps beside another one."""
    (own,) = (exercise for exercise in EXERCISES if exercise.id == "6.6")
    known = []
    for mistake in own.mistakes:
        answers = {case: mistake.function(*literal_eval(case)) for case in expected}
        known.append((mistake.says, answers))
    return nearest_mistake(got, expected, known, own.tolerance)


def _why_next(case: str, mine: str, right: str) -> str:
    """Why ``mine`` is not the answer to a case: what it takes is not enough, or ``right`` comes
    before it.
    """
    order = [*NAMES, "none"]
    is_hidden = isinstance(case, HiddenCase)  # then its numbers are not shown
    phase, parts, rows, card = literal_eval(case)
    total = sum(parts.values())
    takes = _takes(phase, parts, rows, "")
    if order.index(mine) < order.index(right):
        taken = []
        for part in parts:
            without_it = _takes(phase, parts | {part: 0}, rows, "")
            if without_it[mine] < takes[mine]:
                taken.append(part)
        only = " and ".join(taken) or "nothing"
        numbers = ""
        if not is_hidden:
            numbers = f": {total} - {takes[mine]} = {total - takes[mine]} are left"
        takes_away = "take away" if mine.endswith("s") else "takes away"
        return f"in {phase}, {mine} {takes_away} {only}, which cannot be enough here{numbers}."
    if is_hidden:
        return f"in {phase}, a technique that comes before your answer can be enough."
    comes = "come" if right.endswith("s") else "comes"
    return (
        f"in {phase}, {right} {comes} before {mine} and can be enough: {total} - {takes[right]} = "
        f"{total - takes[right]} are left, and the card has {card}."
    )


EXERCISES = (
    Exercise(
        id="6.1",
        title="between the lines of an error",
        difficulty=1,
        minutes=4,
        trains="telling tensors, idle blocks, the context and other processes apart",
        reference=read_error,
        explain=_explain_error,
        observe=calls(
            REAL_MESSAGE,
            _error(192, 4096, 500, 3290, 123),
            _error(3072, 24_210, 430, 20_100, 600, 900),
            _error(790, 8_000, 510, 6_700, 330),  # asked for to the byte
            hidden=(
                _error(2048, 24_210, 380, 14_000, 3100, 5000),
                _error(64, 8_000, 510, 7_200, 260),
                _error(300, 8_000, 510, 6_700, 200, 380),
                _error(256, 8_000, 510, 6_200, 700, 390),  # idle bytes are enough, but in pieces
            ),
        ),
        mistakes=(
            Mistake(
                "idle forgotten",
                partial(_reads, wrong="idle forgotten"),
                (
                    "the context is too large by the idle blocks: PyTorch has reserved these from "
                    "the driver too."
                ),
            ),
            Mistake(
                "others in the context",
                partial(_reads, wrong="others in the context"),
                (
                    "the context includes the memory of other processes: begin with what this "
                    "process has in use."
                ),
            ),
            Mistake(
                "this process too",
                partial(_reads, wrong="this process too"),
                "the others' memory includes this process: subtract what this process has in use.",
            ),
            Mistake(
                "but the tensors",
                partial(_reads, wrong="but the tensors"),
                (
                    "the others' memory includes this process's context and idle blocks: this "
                    "process holds more than its allocated bytes."
                ),
            ),
            Mistake(
                "turned round",
                partial(_reads, wrong="turned round"),
                (
                    "in_pieces is turned round: the bytes are there, in pieces, where free and "
                    "idle bytes together are at least what was requested."
                ),
            ),
            Mistake(
                "idle alone",
                partial(_reads, wrong="idle alone"),
                (
                    "in_pieces uses only the idle blocks: the free bytes of the card can be added "
                    "to them."
                ),
            ),
            Mistake(
                "free alone",
                partial(_reads, wrong="free alone"),
                (
                    "in_pieces is always False here, as `free >= asked` is in every out-of-memory "
                    "error: add the idle blocks of this process to the free bytes."
                ),
            ),
            Mistake(
                "its own context",
                partial(_reads, wrong="its own context"),
                (
                    "the others' memory includes this process's context: subtract all that this "
                    "process has in use."
                ),
            ),
            Mistake(
                "more than enough",
                partial(_reads, wrong="more than enough"),
                (
                    "free and idle bytes may be exactly as many as were requested: that is "
                    "enough, so compare with >=."
                ),
            ),
            Mistake(
                "too little free",
                partial(_reads, wrong="too little free"),
                (
                    "in_pieces is always True here, as `asked > free` is in every out-of-memory "
                    "error: compare the requested bytes with free and idle bytes together."
                ),
            ),
        ),
    ),
    Exercise(
        id="6.2",
        title="half the rows",
        difficulty=2,
        minutes=4,
        trains="telling what a batch is made of from what stays, moment by moment",
        reference=with_rows,
        observe=_observe_rows,
        explain=_explain_rows,
        mistakes=(
            Mistake(
                "upside down",
                lambda moments, rows, new: with_rows(moments, new, rows),
                "the factor is upside down: it is new / rows.",
            ),
            Mistake(
                "as it is",
                lambda moments, rows, new: with_rows(moments, 1, 1),
                "`rows` and `new` have no effect on your answer.",
            ),
            Mistake(
                "not the others",
                partial(_scales, grow=("activations", "temporaries")),
                (
                    "`other` is not scaled: it holds the token ids, and they belong to the batch "
                    "too."
                ),
            ),
            Mistake(
                "all of it",
                partial(_scales, grow=(*GROW, *STAY), step=(*GROW, *STAY)),
                "everything is scaled, weights and states too: they do not depend on the batch.",
            ),
            Mistake(
                "all of it, before the step",
                partial(_scales, grow=(*GROW, *STAY)),
                (
                    "in forward and backward everything is scaled, weights and states too: they "
                    "do not depend on the batch."
                ),
            ),
            Mistake(
                "all but the weights",
                partial(_scales, grow=(*GROW, "gradients", "optimizer")),
                (
                    "in forward and backward the gradients and the optimizer's states are scaled: "
                    "they do not depend on the batch."
                ),
            ),
            Mistake(
                "activations alone",
                partial(_scales, grow=("activations",)),
                (
                    "only activations are scaled: in forward and backward, temporaries depend on "
                    "the batch too, above all the logits' gradients."
                ),
            ),
            Mistake(
                "states too",
                partial(_scales, grow=(*GROW, "optimizer")),
                "the optimizer's states are scaled: they are as large as the weights.",
            ),
            Mistake(
                "rounded down",
                lambda moments, rows, new: max(
                    _at(phase, parts, new // rows) for phase, parts in moments.items()
                ),
                "the factor is rounded to a whole number: divide by /, which gives a fraction.",
            ),
            Mistake(
                "gradients too",
                partial(_scales, grow=(*GROW, "gradients")),
                (
                    "gradients are scaled: they have one number for each weight, however many rows "
                    "there are."
                ),
            ),
            Mistake(
                "the step's too",
                partial(_scales, step=("temporaries",)),
                (
                    "the optimizer's step is scaled: its temporaries are as large as the weights "
                    "it works on."
                ),
            ),
            Mistake(
                "one moment",
                _at_the_peak,
                (
                    "only the highest moment is scaled: with fewer rows another moment may be the "
                    "highest."
                ),
            ),
            Mistake(
                "the lowest",
                partial(_scales, which=min),
                "this is the lowest of the moments: the peak is the highest one.",
            ),
            Mistake(
                "a sum",
                partial(_scales, which=sum),
                "the moments are added: they come one after another, so the highest one counts.",
            ),
        ),
    ),
    Exercise(
        id="6.6",
        title="what comes next",
        difficulty=2,
        minutes=4,
        trains="choosing by the parts of the peak, the cheapest first",
        reference=next_technique,
        observe=calls(
            _case("backward", (6, 0, 12, 30, 12), 8, 24),
            _case("optimizer_step", (10, 10, 20, 0, 14), 8, 41),
            _case("backward", (10, 0, 20, 12, 2), 1, 33),
            hidden=(
                _case("backward", (10, 4, 20, 4, 12), 1, 36),
                _case("optimizer_step", (10, 10, 8, 0, 4), 8, 15),
                _case("optimizer_step", (10, 10, 4, 0, 4), 8, 9),
                _case("backward", (10, 10, 20, 4, 12), 4, 38),
                _case("backward", (20, 10, 10, 0, 30), 1, 24),
                _case("forward", (12, 2, 4, 30, 1), 1, 20),
                _case("optimizer_step", (12, 12, 12, 1, 1), 4, 24),
                _case("backward", (13, 9, 6, 2, 1), 1, 16),
                _case("optimizer_step", (10, 10, 8, 0, 12), 8, 22),
                _case("backward", (10, 0, 10, 20, 4), 2, 30),
                # Only two techniques together would be enough.
                _case("backward", (10, 0, 10, 10, 0), 8, 12),
                _case("backward", (10, 10, 10, 10, 10), 1, 19),
                _case("optimizer_step", (10, 10, 10, 0, 10), 8, 5),
                _case("optimizer_step", (12, 12, 12, 20, 1), 4, 40),
                # LoRA is enough only with the step's temporaries.
                _case("optimizer_step", (10, 10, 8, 0, 6), 8, 12),
                # Micro-batches and checkpointing are both enough, with many rows.
                _case("forward", (10, 2, 8, 24, 3), 16, 30),
                _case("backward", (4, 4, 8, 10, 10), 3, 26),
                # In forward, states, gradients, weights and temporaries count too.
                _case("forward", (12, 2, 14, 2, 1), 4, 18),
                _case("forward", (12, 8, 10, 2, 1), 4, 16),
                _case("forward", (14, 2, 6, 2, 1), 4, 6),
                _case("forward", (10, 2, 8, 14, 8), 4, 20),
                # 8-bit states and LoRA do not take the temporaries of forward.
                _case("forward", (12, 2, 10, 4, 6), 1, 20),
            ),
        ),
        explain=_explain_next,
        mistakes=(
            Mistake(
                "the phase",
                partial(_chosen, wrong="the phase"),
                (
                    "the phase has no effect: in the optimizer's step the temporaries belong to "
                    "the step, and neither smaller micro-batches nor checkpoints change them."
                ),
            ),
            Mistake(
                "forward",
                partial(_chosen, wrong="forward"),
                (
                    "forward is treated as the optimizer's step: in forward, smaller "
                    "micro-batches and checkpoints help as they do in backward."
                ),
            ),
            Mistake(
                "in the step alone",
                partial(_chosen, wrong="in the step alone"),
                (
                    "in forward, 8-bit states, LoRA and QLoRA take nothing away here: states, "
                    "weights and accumulated gradients are in memory then too."
                ),
            ),
            Mistake(
                "logits in backward",
                partial(_chosen, wrong="logits in backward"),
                (
                    "in forward, micro-batches leave the temporaries here: they grow with the "
                    "rows in forward too, as in backward."
                ),
            ),
            Mistake(
                "the step's",
                partial(_chosen, wrong="the step's"),
                (
                    "the temporaries of the optimizer's step are not made smaller here: 8-bit "
                    "states, LoRA and QLoRA make them smaller too, as the chart marks."
                ),
            ),
            Mistake(
                "adapters' step",
                partial(_chosen, wrong="adapters' step"),
                (
                    "LoRA and QLoRA leave the temporaries of the optimizer's step here: the chart "
                    "marks them in that half, as for 8-bit states."
                ),
            ),
            Mistake(
                "activations alone",
                partial(_chosen, wrong="activations alone"),
                (
                    "micro-batches remove only activations here: in forward and backward the "
                    "temporaries are logits' gradients, and these grow with the rows too."
                ),
            ),
            Mistake(
                "the base alone",
                partial(_chosen, wrong="the base alone"),
                (
                    "QLoRA removes only the weights here: it is LoRA too, so gradients and states "
                    "go as well."
                ),
            ),
            Mistake(
                "one row",
                partial(_chosen, wrong="one row"),
                "micro-batches of one row are cut again: one row cannot be cut.",
            ),
            Mistake(
                "logits",
                partial(_chosen, wrong="logits"),
                (
                    "checkpointing removes temporaries here: those are the logits' gradients, and "
                    "running layers again does not make them smaller."
                ),
            ),
            Mistake(
                "the base",
                partial(_chosen, wrong="the base"),
                (
                    "LoRA removes the weights here: they are frozen but stay in memory; only QLoRA "
                    "makes them smaller."
                ),
            ),
            Mistake(
                "8-bit gradients",
                partial(_chosen, wrong="8-bit gradients"),
                "8-bit states remove the gradients here: the gradients do not change.",
            ),
            Mistake(
                "the most",
                partial(_chosen, wrong="the most"),
                (
                    "this takes what saves most: take the first one that can be enough, since "
                    "they are in the order of their price."
                ),
            ),
            Mistake(
                "the last",
                partial(_chosen, order=NAMES[::-1]),
                (
                    "this takes the last one that can be enough: take the first one, since they "
                    "are in the order of their price."
                ),
            ),
            Mistake(
                "below",
                partial(_chosen, wrong="below"),
                "what is left may be exactly `card`: at most means <=.",
            ),
            Mistake(
                "a quarter stays",
                partial(_chosen, wrong="a quarter stays"),
                (
                    "8-bit states leave a quarter here: the question is what can be enough at "
                    "best, so count each marked part whole."
                ),
            ),
            Mistake(
                "checkpointing first",
                partial(_chosen, order=("checkpointing", "micro-batches", *NAMES[2:])),
                "checkpointing is asked first: micro-batches are cheaper, so they come first.",
            ),
            Mistake(
                "stacked",
                _stacked,
                (
                    "each technique takes away from what the ones before it have left: ask each "
                    "by itself, since only one is chosen."
                ),
            ),
        ),
    ),
)
