"""The functions that draw measurements and plans, under the names that ``display`` looks up."""

from .live import LivePlot, show_timeline
from .plan_code import plan_code
from .plan_text import plan_dict, plan_text, prediction_table
from .schedules import schedule_bundle
from .timeline import plot_timeline

__all__ = [
    "LivePlot",
    "plan_code",
    "plan_dict",
    "plan_text",
    "plot_timeline",
    "prediction_table",
    "schedule_bundle",
    "show_timeline",
]
