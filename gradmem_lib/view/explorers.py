"""What the explorers share: controls above a picture, which answers in words and as an SVG."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..display import in_kernel
from .live import live
from .place import place, show_bundle, still_html

STILL = "This picture stands still. To explore it, run the cell again."


@cache
def _answer_class():
    # In a function, so that a plain script never imports the widget machinery.
    import anywidget
    import traitlets

    class Answer(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("explorer.js")
        _css = Path(__file__).with_name("explorer.css")
        svg = traitlets.Unicode("").tag(sync=True)
        verdict = traitlets.Unicode("").tag(sync=True)
        detail = traitlets.Unicode("").tag(sync=True)
        # Whether something fits; None if that was not the question.
        fits = traitlets.Bool(None, allow_none=True).tag(sync=True)
        pending = traitlets.Bool(False).tag(sync=True)

    return Answer


class Explorer:
    """Settings, and the widgets that change them once they are shown.

    A class of its own has ``defaults`` and a ``text`` (its output's text/plain), and says which
    controls it has, what happens when one has changed, and which still picture stands for it.
    """

    defaults: dict
    text: str

    def __init__(self, **settings):
        if unknown := sorted(set(settings) - set(self.defaults)):
            raise TypeError(
                f"no setting named {', '.join(unknown)}: choose from {', '.join(self.defaults)}"
            )
        self.settings = self.defaults | settings
        self.controls: dict = {}
        self.answer = None

    def make_controls(self) -> None:
        """Fill ``controls``, by the names of the settings."""
        raise NotImplementedError

    def changed(self, change=None) -> None:
        """Answer what the controls now say."""
        raise NotImplementedError

    def picture(self):
        """The ``Picture`` of the starting settings."""
        raise NotImplementedError

    def add(self, name: str, kind, label: str, **options) -> None:
        """Add a control: a class of ipywidgets, with its ``options``."""
        from ipywidgets import Layout

        layout = Layout(width="auto", margin="2px 14px 2px 0")
        looks = {"style": {"description_width": "96px"}, "layout": layout}
        self.controls[name] = kind(description=label, **looks, **options)

    def widget(self):
        """The controls over the picture, as one ipywidget."""
        from ipywidgets import GridBox, Layout, VBox

        self.make_controls()
        self.answer = _answer_class()()
        for control in self.controls.values():
            control.observe(self.changed, "value")
        self.changed()
        columns = "repeat(auto-fit, minmax(300px, 1fr))"
        grid = Layout(grid_template_columns=columns, max_width="820px")
        return VBox([GridBox(list(self.controls.values()), layout=grid), self.answer])

    def show(self) -> None:
        """Display the explorer in a notebook.

        The output also contains the still picture, for readers without a kernel.
        ``GRADMEM_LIVE=0``: only the picture.
        """
        if not in_kernel():
            return
        picture = self.picture()
        picture.plain_text = self.text
        data, metadata = picture.bundle()
        if live():
            data["text/html"] = place(self.widget()).html(still_html((data, metadata), STILL))
        show_bundle(data, metadata)
