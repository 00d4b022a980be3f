"""The old names of modules that moved when the library was divided into floors, so that older
notebooks still import them.

``gradmem_lib.accumulation`` is ``gradmem_lib.techniques.accumulation``, one module under two names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "accounting": "course.accounting",
    "accumulation": "techniques.accumulation",
    "adam": "techniques.adam",
    "checkpointing": "techniques.checkpointing",
    "claims": "course.claims",
    "doctor": "course.doctor",
    "exercises": "course.exercises",
    "exercises.core": "course.check",
    "exercises.progress": "course.progress",
    "finetune": "training.trainer",
    "models": "course.models",
    "recipe": "training.recipe",
    "texts": "course.texts",
    "tracker": "measure.tracker",
    **{f"exercises.lesson_{n:02}": f"course.exercises.lesson_{n:02}" for n in range(5)},
    "exercises.lesson_05": "course.exercises.lesson_06",
}
# Names that an old module had, and where each of them is now.
BESIDES = {
    "accumulation": {"next_token_loss": "techniques.losses", "count_targets": "techniques.losses"},
    "checkpointing": dict.fromkeys(
        ("best_segments", "extra_forwards", "schedule_peak", "uniform_segments"),
        "techniques.schedules",
    ),
    "exercises": {"core": "course.check"}
    | dict.fromkeys(("all_exercises", "check", "get", "judge"), "course.check"),
    "recipe": {"LoRALinear": "techniques.lora", "add_lora": "techniques.lora"},
    "tracker": {"BudgetExceeded": "measure.budget"},
}
ROOT = __package__


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == ROOT and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.partition(".")[2]
        module = import_module(f"{ROOT}.{MOVED[name]}")
        for own, home in BESIDES.get(name, {}).items():
            if own not in vars(module):
                there = import_module(f"{ROOT}.{home}")
                setattr(module, own, getattr(there, own, there))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the module has already run, under its new name


def register() -> None:
    """Let Python find modules by their old names."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        # before the finder that would load a lesson a second time
        sys.meta_path.insert(0, _Moved())
