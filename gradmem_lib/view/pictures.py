"""The functions that draw measurements and plans, under the names that ``display`` looks up."""

from .live import LivePlot, show_timeline
from .plan_code import plan_code
from .plan_text import plan_dict, plan_text, prediction_table

__all__ = [
    "LivePlot",
    "plan_code",
    "plan_dict",
    "plan_text",
    "plot_schedule",
    "plot_timeline",
    "prediction_table",
    "show_timeline",
]


def plot_timeline(timeline, **about):
    """See ``timeline_picture``, which is imported with matplotlib when it first draws."""
    from .timeline_picture import plot_timeline

    return plot_timeline(timeline, **about)


def plot_schedule(record):
    """See ``schedules``."""
    from .schedules import plot_schedule

    return plot_schedule(record)
