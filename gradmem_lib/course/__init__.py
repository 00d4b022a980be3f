"""The parts of the lessons besides the library itself: models, texts, claims, exercises and their
settings.
"""

from importlib import import_module

_HOMES = {
    "awards": "stars",
    "check": "UnknownExercise all_exercises audit get",
    "exercise": "Exercise Mistake calls measure",
    "judging": "judge",
    "guesses": "Guess",
    "processes": "torchrun",
    "puzzles": "puzzle",
    "ranks": "run_ranks RanksFailed",
    "exercises.lesson_01": "train_budget",
    "exercises.lesson_06_models": "classifier_setting t5_setting",
    "exercises.lesson_09_capstone": "smollm2_peak",
    "exercises.lesson_09_galore": "adam_update",
    "exercises.settings": "CARD batch_setting chain_budget chain_setting text_batch train_setting",
    "exercises.trainer": "quiet_arguments trainer_factors",
    "claims.lesson_07": "trainer_dtypes",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {
    "bert_large": "claims.bert_large",
    "claims": "claims",
    "lesson_06": "exercises.lesson_06",
    "models": "models",
    "progress": "progress",
    "published": "published",
    "runs": "runs",
    "texts": "texts",
}
__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
