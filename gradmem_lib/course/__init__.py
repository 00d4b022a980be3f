"""The parts of the lessons besides the library itself: models, texts, claims, exercises and their
settings.
"""

from importlib import import_module

_HOMES = {
    "judge.exercise": "Exercise calls measured",
    "learner.guesses": "Guess",
    "catalogue": "UnknownExercise all_exercises get",
    "lessons.lesson_01.exercises": "train_budget train_setting",
    "lessons.lesson_01.exercises_puzzle": "LINES",
    "lessons.lesson_01.exercises_leak": "history_setting",
    "lessons.lesson_02.exercises_puzzle": "PACKING",
    "lessons.lesson_03.exercises": "CARD batch_setting",
    "lessons.lesson_03.exercises_leak": "window_setting",
    "lessons.lesson_03.exercises_puzzle": "CUTTING",
    "lessons.lesson_04.exercises": "chain_budget chain_setting",
    "lessons.lesson_05.exercises_leak": "resume_setting",
    "lessons.lesson_05.exercises_puzzle": "SWITCHES",
    "lessons.lesson_06.exercises": "classifier_setting evaluation_leak_setting t5_setting",
    "lessons.lesson_06.exercises_puzzle": "RENTED",
    "lessons.lesson_07.claims": "trainer_dtypes",
    "lessons.lesson_07.exercises_puzzle": "UNROUNDED",
    "lessons.lesson_09.exercises": "adam_update smollm2_peak",
    "lessons.lesson_09.exercises_puzzle": "ADAPTERS",
    "lessons.lesson_10.exercises_puzzle": "SHARING",
    "lessons.lesson_11.puzzles": "puzzle",
    "lessons.lesson_11.stars": "stars",
    "lessons.shared.hf_trainer": "quiet_arguments trainer_factors",
    "lessons.shared.residual_net": "labelled_rows residual_net",
    "lessons.shared.settings": "text_batch",
    "machine.run_ranks": "RanksFailed run_ranks",
    "machine.torchrun": "torchrun",
    "material.first_run": "first_run",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {
    "bert_large": "ledger.bert_large",
    "claims": "ledger",
    "lesson_06": "lessons.lesson_06.exercises",
    "models": "material.models",
    "progress": "learner.progress",
    "published": "ledger.published",
    "runs": "material.smollm2_runs",
    "texts": "material.texts",
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
