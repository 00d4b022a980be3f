"""The pictures that measurements ask for by name (``display``)."""

from .live import LivePlot, show_timeline
from .schedules import schedule_bundle
from .timeline import plot_timeline

__all__ = ["LivePlot", "plot_timeline", "schedule_bundle", "show_timeline"]
