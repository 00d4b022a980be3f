"""Shows a widget so that nothing in the saved notebook needs a kernel.

A front end prefers a widget to every other form of an output. A saved notebook has lost the
widget's state, so it would show an error instead of the picture beside it. Therefore an output here
never names a widget: it is HTML with the still content and an empty place. A second widget without
a view, the ``Place``, puts the first one there for as long as the kernel lives.
"""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path
from typing import Any

LEAST_OF_WIDTH = 0.75  # of a still picture's own width, on a narrow page


@cache
def _place_class():
    # In a function, so that a plain script never imports the widget machinery.
    import anywidget
    import ipywidgets
    import traitlets

    class Place(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("place.js")
        view = traitlets.Instance(ipywidgets.DOMWidget).tag(
            sync=True, **ipywidgets.widget_serialization
        )
        place = traitlets.Unicode().tag(sync=True)
        # Whether the widget stays on the page when its kernel has gone.
        keep = traitlets.Bool(False).tag(sync=True)

        def html(self, still: str) -> str:
            """An output that shows the widget while its kernel lives, else ``still`` (HTML)."""
            return f'<div data-gradmem-place="{self.place}"><div>{still}</div></div>'

    return Place


def place(widget, *, keep: bool = False) -> Any:
    """The ``Place`` of ``widget``. Close it before ``widget`` is closed."""
    return _place_class()(view=widget, place=widget.model_id, keep=keep)


def still_html(still: tuple[dict, dict], sentence: str) -> str:
    """A ``still`` mimebundle as HTML, with ``sentence``, if any, above it."""
    data, metadata = still
    words = f"<em>{html.escape(sentence)}</em><br>" if sentence else ""
    if "image/png" not in data:
        return words + data.get("text/html", "")
    shape = {"alt": "", **metadata.get("image/png", {})}
    # On a narrow page its words stay large enough to be read: the picture scrolls.
    shape["style"] = f"min-width:{round(LEAST_OF_WIDTH * shape.get('width', 0))}px"
    attributes = " ".join(f'{name}="{html.escape(str(value))}"' for name, value in shape.items())
    image = f'<img src="data:image/png;base64,{data["image/png"]}" {attributes}>'
    return f'{words}<div style="overflow-x:auto">{image}</div>'


def show_bundle(data: dict, metadata: dict) -> None:
    """Display an output of a notebook: a mimebundle and its metadata."""
    from IPython.display import display

    display(data, metadata=metadata, raw=True)
