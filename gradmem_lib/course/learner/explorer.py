"""The memory explorer: controls for a training step, and its peak as one stacked bar against a
card.

Every control is an argument of the closed form, ``accounting.estimate``, and of the exact trace,
``predict``. The closed form answers while a control moves. A trace takes about a second, so it
begins when the controls rest, and its answer is kept. No model is run or loaded: a 70B model is as
quick to explore as a small one.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, replace
from typing import Any

from ...names import ATTENTION
from ...planning.cards import CARDS, find_card
from ...planning.held import overhead_bytes
from ...units import format_bytes
from ...view import explorers
from ...view.bars import plot_bar
from ...view.picture import Picture
from ...view.room import MemoryFit
from ..material import accounting

REST = 0.15  # seconds without a change, before a trace begins
BATCH_SIZES = tuple(2**k for k in range(9))
SEQUENCE_LENGTHS = tuple(2**k for k in range(6, 16))
# The entry of a menu, and its value in a recipe: a number is the number of layers in a segment.
CHECKPOINTING = {"none": None, "per-layer": "per-layer", "sqrt": "sqrt"} | {
    f"{k} layers a segment": k for k in (2, 4, 8, 16)
}
OPTIMIZERS = {name: name for name in accounting.OPTIMIZERS} | {"none: no step": None}
# The value None in a menu: for ipywidgets, None itself is no choice, and the menu shows nothing.
NONE = "none"
DEFAULTS = {
    "model": "SmolLM2-135M",
    "batch_size": 4,
    "seq_len": 512,
    "precision": "bf16",
    "optimizer": "adamw",
    "attention": "fused",
    "checkpointing": None,
    "card": "RTX 3070 8GB",
}


@dataclass(frozen=True)
class Answer:
    """The bytes at the peak by category; and in words, where the peak is and how it was found.
    ``reserved``: the bytes that a card's allocator holds for them, if it was replayed.
    """

    by_category: dict[str, int]
    words: str
    reserved: int | None = None

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def shape_of(settings: dict) -> accounting.Shape:
    """The model's shape. A learned position table is made as long as the sequence needs."""
    shape = _known(accounting.SHAPES, settings["model"], "model")
    return (
        replace(shape, positions=max(shape.positions, settings["seq_len"]))
        if shape.positions
        else shape
    )


def _options(settings: dict) -> dict:
    """The options that closed forms and recipes share. A segment is at most the whole model."""
    options = {
        name: settings[name] for name in ("precision", "optimizer", "attention", "checkpointing")
    }
    if type(options["checkpointing"]) is int:
        options["checkpointing"] = min(options["checkpointing"], shape_of(settings).layers)
    return options


def recipe_of(settings: dict):
    """The settings as a ``Recipe``.

    Raises ``ValueError`` for settings that closed forms can add up but no recipe can train.
    """
    from ...training.recipe import Recipe

    options = _options(settings)
    if options["optimizer"] is not None:
        return Recipe(**options)
    stand_in = "sgd"  # keeps and makes no bytes, like no step
    try:
        return Recipe(**options | {"optimizer": stand_in})
    except ValueError as error:  # names an optimizer that nobody chose
        raise ValueError(
            str(error).replace(f"optimizer={stand_in!r}", "there is no step")
        ) from None


def estimate(settings: dict) -> accounting.Estimate:
    """The closed form's peak of a step under ``settings`` (keys as in ``DEFAULTS``)."""
    sizes = {"batch_size": settings["batch_size"], "seq_len": settings["seq_len"]}
    return accounting.estimate(shape_of(settings), **sizes, **_options(settings))


def trace(settings: dict):
    """The exact peak on a card, as a ``Prediction``.

    Errors are those of ``predict`` and ``recipe_of``.
    """
    from ...prediction.predict import predict

    sizes = {"batch_size": settings["batch_size"], "seq_len": settings["seq_len"]}
    return predict(shape_of(settings).config(), **sizes, recipe=recipe_of(settings), target="cuda")


def preview(settings: dict) -> Answer:
    """The closed form's answer, without delay."""
    found = estimate(settings)
    return Answer(found.by_category, f"By the closed form, the peak is in: {found.moment}.")


def answer(settings: dict) -> Answer:
    """The trace's answer, and how far off the closed form is.

    If no trace is possible, the closed form and the reason.
    """
    from ...prediction.question import CannotTrace

    formula = estimate(settings)
    try:
        found = trace(settings)
    except (ValueError, CannotTrace) as error:
        closed = preview(settings)
        return replace(closed, words=f"{closed.words} There is no exact figure: {error}.")
    off = formula.total - found.peak.total
    if off:
        compared = f"{abs(off):,} bytes {'above' if off > 0 else 'below'}"
    else:
        compared = "equal"
    return Answer(
        found.peak.by_category,
        (
            f"The peak is in {found.peak.phase.replace('_', ' ')}, by an exact trace; the closed "
            f"form is {compared}."
        ),
        found.replay_allocator(),
    )


def room(found: Answer, card: str) -> int:
    """Bytes that ``card`` has for the tensors of ``found``: by ``plan``'s rule, without allocator,
    workspace and context.
    """
    known = find_card(card)
    return known.nbytes - sum(
        overhead_bytes(found.total, known.capability, found.reserved).values()
    )


def fits(found: Answer, card: str) -> bool:
    return found.total <= room(found, card)


def verdict(found: Answer, card: str) -> str:
    """Says in words whether the tensors, and what a card holds besides, fit ``card``."""
    known, spare = find_card(card), room(found, card) - found.total
    fit = (
        f"Fits with {format_bytes(spare)} to spare"
        if spare >= 0
        else f"Exceeds by {format_bytes(-spare)}"
    )
    needs, there = format_bytes(known.nbytes - spare), format_bytes(known.nbytes)
    return f"{fit}: {needs} needed, {there} on the card ({known.name})."


def detail(found: Answer, settings: dict) -> str:
    """The bar in words: its exact bytes, its largest part, and remarks about the peak."""
    parts = found.by_category
    main = max(parts, key=parts.get)
    words = (
        f"Largest part: {main}, {format_bytes(parts[main])} ({parts[main] / found.total:.0%} of "
        f"{found.total:,} bytes). {found.words}"
    )
    known = find_card(settings["card"])
    extra = overhead_bytes(found.total, known.capability, found.reserved)
    words += (
        " Beside the tensors, as other: "
        f"{', '.join(f'{what} {format_bytes(n)}' for what, n in extra.items())}."
    )
    positions = accounting.SHAPES[settings["model"]].positions
    if positions and settings["seq_len"] > positions:
        words += (
            f" {settings['model']} knows only {positions:,} positions: a longer table is counted."
        )
    return words


def picture(settings: dict, found: Answer) -> Picture:
    """The stacked bar with all that a card holds, and the card's bytes: what the card holds beside
    the tensors is ``other``, as in ``MemoryFit``.
    """
    card = find_card(settings["card"])
    held = found.by_category | overhead_bytes(found.total, card.capability, found.reserved)
    return plot_bar(_label(settings), MemoryFit("", "", 0, held).parts(), card.name, card.nbytes)


def _label(settings: dict) -> str:
    labels = {value: label for label, value in CHECKPOINTING.items()}
    kept = labels.get(settings["checkpointing"], f"{settings['checkpointing']} layers a segment")
    return (
        f"{settings['model']} · {settings['batch_size']} × {settings['seq_len']:,} tokens · "
        f"{settings['precision']} · {settings['optimizer'] or 'no step'} · {settings['attention']} "
        f"attention · checkpointing: {kept}"
    )


def _known(table: dict, key: str, what: str):
    if key not in table:
        raise ValueError(f"{what} is {key!r}: choose one of {', '.join(map(repr, table))}")
    return table[key]


class Explorer(explorers.Explorer):
    """The memory explorer.

    Arguments are the starting settings; their names and values are those of
    ``accounting.estimate``, with ``model`` a key of ``accounting.SHAPES`` and ``card`` an argument
    of ``find_card``. Raises ``ValueError`` for an unknown value, and ``TypeError`` for an unknown
    setting.
    """

    defaults = DEFAULTS
    text = "Memory explorer"

    def __init__(self, **settings):
        super().__init__(**settings)
        # a mistake shows here, not in a callback
        verdict(preview(self.settings), self.settings["card"])
        self._answers: dict[tuple, Answer] = {}
        self._drawing = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._loop = asyncio.get_running_loop()  # the kernel's, where cells run
        except RuntimeError:
            self._loop = None

    def picture(self) -> Picture:
        settings, found = self.settings, self._answer(self.settings)
        words = verdict(found, settings["card"])
        drawn = picture(settings, found)
        drawn.alt = f"{_label(settings)}. {words} {detail(found, settings)}"
        return drawn

    def make_controls(self) -> None:
        self._menu("model", "model", tuple(accounting.SHAPES))
        self._menu("card", "card", tuple(CARDS))
        self._slider("batch_size", "micro-batch", BATCH_SIZES)
        self._slider("seq_len", "sequence", SEQUENCE_LENGTHS)
        self._menu("precision", "precision", tuple(accounting.PRECISIONS))
        self._menu("optimizer", "optimizer", OPTIMIZERS)
        self._menu("attention", "attention", tuple(ATTENTION))
        self._menu("checkpointing", "checkpointing", CHECKPOINTING)

    def _slider(self, name: str, label: str, values) -> None:
        from ipywidgets import SelectionSlider

        start = self.settings[name]
        options = [(f"{v:,}", v) for v in sorted({*values, start})]
        self.add(name, SelectionSlider, label, options=options, value=start)

    def _menu(self, name: str, label: str, options) -> None:
        from ipywidgets import Dropdown

        pairs = list(options.items()) if isinstance(options, dict) else [(o, o) for o in options]
        values, start = [value for _, value in pairs], self.settings[name]
        if start not in values:
            pairs.append((str(start), start))
            values.append(start)
        pairs = [(text, NONE if value is None else value) for text, value in pairs]
        self.add(name, Dropdown, label, options=pairs, index=values.index(start))

    def _now(self) -> dict:
        found = {}
        for name, control in self.controls.items():
            found[name] = None if control.value == NONE else control.value
        return found

    def changed(self, change=None) -> None:
        now = self._now()
        known = self._answers.get(_key(now))
        self._draw(now, known or preview(now), pending=known is None)
        if known is not None:
            return
        if self._loop is None:
            self._settle()
        else:
            # JupyterLab may deliver changes on another thread, and a trace must not run beside a
            # cell's training step.
            self._loop.call_soon_threadsafe(self._wait_for_rest)

    def _wait_for_rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(REST, self._settle)

    def _settle(self) -> None:
        """Trace the current settings.

        If the controls have moved meanwhile, only the next trace draws.
        """
        now = self._now()
        found = self._answer(now)
        if now == self._now():
            self._draw(now, found, pending=False)

    def _answer(self, settings: dict) -> Answer:
        key = _key(settings)
        if key not in self._answers:
            self._answers[key] = answer(settings)
        return self._answers[key]

    def _draw(self, now: dict, found: Answer, *, pending: bool) -> None:
        words = verdict(found, now["card"])
        drawn = picture(now, found).svg(f"{now['model']} at the peak of a training step. {words}")
        with self._drawing, self.answer.hold_sync():
            self.answer.svg = drawn
            self.answer.verdict = words
            self.answer.detail = detail(found, now)
            self.answer.fits = fits(found, now["card"])
            self.answer.pending = pending


def _key(settings: dict) -> tuple:
    """The settings that an answer depends on: all but the card."""
    return tuple(settings[name] for name in DEFAULTS if name != "card")


def explore(**settings: Any) -> None:
    """Display the explorer, starting from ``settings`` (see ``Explorer``).

    With ``GRADMEM_LIVE=0``: a still picture.
    """
    Explorer(**settings).show()
