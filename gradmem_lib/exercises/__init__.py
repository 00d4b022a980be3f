"""Exercises that check themselves: every exercise, its reference answer and its known mistakes.

Lesson NN keeps its exercises in ``lesson_NN.py`` as a tuple ``EXERCISES``, imported when one of them is first asked for.
"""

from .core import Exercise, Mistake, UnknownExercise, all_exercises, audit, calls, check, get, judge, measure
from .prediction import Prediction, predict_first

__all__ = [
    "Exercise",
    "Mistake",
    "Prediction",
    "UnknownExercise",
    "all_exercises",
    "audit",
    "calls",
    "check",
    "get",
    "judge",
    "measure",
    "predict_first",
]
