"""The memory explorer: closed forms under your fingers, as one stacked bar against a card.

Every control is an argument of ``accounting.estimate``; the picture is its answer. Nothing is run and nothing is loaded,
so a 70B model is as quick to explore as a tiny one.
"""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path

from .. import accounting
from ..units import format_bytes
from .live import in_kernel, live_enabled
from .static import bar_svg, display_size, plot_bars, png

PLAIN_TEXT = "Memory explorer"
BATCH_SIZES = tuple(2**k for k in range(9))
SEQUENCE_LENGTHS = tuple(2**k for k in range(6, 16))
DEFAULTS = {
    "model": "SmolLM2-135M",
    "batch_size": 4,
    "seq_len": 512,
    "precision": "bf16",
    "optimizer": "AdamW",
    "attention": "fused",
    "checkpointing": "none",
    "segment": 4,
    "card": "8 GB card",
}


def estimate(settings: dict) -> accounting.Estimate:
    """The peak of a step under ``settings`` (keys as in ``DEFAULTS``)."""
    shape = _known(accounting.SHAPES, settings["model"], "model")
    options = {k: v for k, v in settings.items() if k not in ("model", "card", "segment")}
    segment = min(settings["segment"], shape.layers) if settings["checkpointing"] == "segments" else None
    return accounting.estimate(shape, **options, segment=segment)


def verdict(total: int, card: str) -> str:
    """Whether ``total`` bytes go into ``card``, in words."""
    room = _known(accounting.CARDS, card, "card") - total
    if room >= 0:
        return f"Fits with {format_bytes(room)} to spare: {format_bytes(total)} on the {card}."
    return f"Exceeds by {format_bytes(-room)}: {format_bytes(total)} on the {card}."


def detail(result: accounting.Estimate, settings: dict) -> str:
    """What the bar is made of: its exact bytes, its largest part, and the moment of the peak."""
    parts = result.by_category
    main = max(parts, key=parts.get)
    words = (
        f"Largest part: {main}, {format_bytes(parts[main])} ({parts[main] / result.total:.0%} of {result.total:,} bytes). "
        f"The peak is expected in: {result.moment}."
    )
    positions = accounting.SHAPES[settings["model"]].positions
    if positions and settings["seq_len"] > positions:
        words += f" {settings['model']} knows only {positions:,} positions: this length needs a longer table."
    return words


def picture(settings: dict) -> str:
    """The stacked bar as an inline SVG."""
    result = estimate(settings)
    card = settings["card"]
    return bar_svg(
        {_label(settings): result.by_category},
        cards={card: accounting.CARDS[card]},
        title=f"{settings['model']} at the peak of a training step. {verdict(result.total, card)}",
    )


def _label(settings: dict) -> str:
    kept = settings["checkpointing"]
    if kept == "segments":
        kept = f"segments of {settings['segment']}"
    return (
        f"{settings['model']} · {settings['batch_size']} × {settings['seq_len']:,} tokens · {settings['precision']} · "
        f"{settings['optimizer']} · {settings['attention']} attention · checkpointing: {kept}"
    )


def _known(table: dict, key: str, what: str):
    if key not in table:
        raise ValueError(f"{what} is {key!r}: choose one of {', '.join(map(repr, table))}")
    return table[key]


@cache
def _picture_class():
    import anywidget
    import traitlets

    class ExplorerPicture(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("explorer.js")
        _css = Path(__file__).with_name("explorer.css")
        svg = traitlets.Unicode("").tag(sync=True)
        verdict = traitlets.Unicode("").tag(sync=True)
        detail = traitlets.Unicode("").tag(sync=True)
        fits = traitlets.Bool(True).tag(sync=True)

    return ExplorerPicture


class Explorer:
    """The explorer's settings, and its widgets once they are shown.

    Arguments are the starting settings; their names and values are those of ``accounting.estimate``, with ``model`` a key
    of ``accounting.SHAPES`` and ``card`` a key of ``accounting.CARDS``. Raises ``ValueError`` for a value that is unknown,
    ``TypeError`` for a setting that is.
    """

    def __init__(self, **settings):
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise TypeError(
                f"no setting named {', '.join(sorted(unknown))}: choose from {', '.join(DEFAULTS)}"
            )
        self.settings = DEFAULTS | settings
        verdict(
            estimate(self.settings).total, self.settings["card"]
        )  # a mistake shows here, not in a callback
        self.controls: dict = {}
        self._picture = None

    def still_bundle(self) -> tuple[dict, dict]:
        """The picture of the starting settings as a mimebundle: (data, metadata)."""
        settings, result = self.settings, estimate(self.settings)
        card, words = settings["card"], verdict(estimate(settings).total, settings["card"])
        figure = plot_bars(
            {_label(settings): result.by_category},
            cards={card: accounting.CARDS[card]},
            title=words.split(":")[0],
        )
        data = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": PLAIN_TEXT}
        alt = f"{_label(settings)}. {words} {detail(result, settings)}"
        return data, {"image/png": {**display_size(figure), "alt": alt}}

    def widget(self):
        """The controls over the picture, as one ipywidget."""
        import ipywidgets

        start, made = self.settings, self.controls

        def looks() -> dict:  # a layout of its own for each control: they are hidden one by one
            layout = ipywidgets.Layout(width="auto", margin="2px 14px 2px 0")
            return {"style": {"description_width": "96px"}, "layout": layout}

        def slider(name: str, label: str, values) -> None:
            options = [(f"{v:,}", v) for v in sorted({*values, start[name]})]
            made[name] = ipywidgets.SelectionSlider(
                options=options, value=start[name], description=label, **looks()
            )

        def menu(name: str, label: str, options) -> None:
            made[name] = ipywidgets.Dropdown(
                options=list(options), value=start[name], description=label, **looks()
            )

        menu("model", "model", accounting.SHAPES)
        menu("card", "card", accounting.CARDS)
        slider("batch_size", "micro-batch", BATCH_SIZES)
        slider("seq_len", "sequence", SEQUENCE_LENGTHS)
        menu("precision", "precision", accounting.PRECISIONS)
        menu("optimizer", "optimizer", accounting.OPTIMIZERS)
        menu("attention", "attention", accounting.ATTENTION)
        menu("checkpointing", "checkpointing", accounting.CHECKPOINTING)
        slider("segment", "segment", (2, 4, 8, 16))
        self._picture = _picture_class()()
        for control in made.values():
            control.observe(self._changed, "value")
        self._changed()
        grid = ipywidgets.Layout(
            grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))", max_width="820px"
        )
        return ipywidgets.VBox([ipywidgets.GridBox(list(made.values()), layout=grid), self._picture])

    def _changed(self, _=None) -> None:
        now = {name: control.value for name, control in self.controls.items()}
        self.controls["segment"].layout.display = "" if now["checkpointing"] == "segments" else "none"
        result = estimate(now)
        with self._picture.hold_sync():
            self._picture.svg = picture(now)
            self._picture.verdict = verdict(result.total, now["card"])
            self._picture.detail = detail(result, now)
            self._picture.fits = result.total <= accounting.CARDS[now["card"]]


def explore(**settings) -> None:
    """Display the explorer, starting from ``settings`` (see ``Explorer``). Under ``GRADMEM_LIVE=0`` a still picture."""
    explorer = Explorer(**settings)
    if not in_kernel():
        return
    from IPython.display import display

    data, metadata = explorer.still_bundle()
    if live_enabled():
        bundle = explorer.widget()._repr_mimebundle_()
        live = bundle[0] if isinstance(bundle, tuple) else bundle
        data = {**data, **live, "text/plain": PLAIN_TEXT}
    display(data, metadata=metadata, raw=True)
