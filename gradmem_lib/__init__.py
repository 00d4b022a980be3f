"""The library behind the gradmem course: where training memory goes, and how to make a run fit."""

from importlib import import_module

from . import display

_HOMES = {
    "measure.tracker": "MemoryTracker",
    "measure.timeline": "MemorySnapshot Timeline",
    "measure.budget": "BudgetExceeded",
    "techniques.adam": "Adam AdamW",
    "techniques.accumulation": "Accumulated accumulate_gradients",
    "techniques.representations": "accumulate_through_embeddings",
    "techniques.pieces": "check_pieces_add_up",
    "techniques.splitting": "split",
    "techniques.losses": "count_targets next_token_loss",
    "techniques.optimizers": "AdamW8bit",
    "techniques.offload": "offload_activations",
    "techniques.selective": "checkpoint_parts tiled",
    "techniques.schedules": "best_segments extra_forwards schedule_peak uniform_segments",
    "techniques.lora": "LoRALinear",
    "techniques.precision": "GradScaler stochastic_round",
    "training.prepare": "prepare",
    "training.recipe": "Recipe",
    "training.step": "step",
    "training.adapters": "merge_adapters",
    "training.memory_callback": "MemoryCallback",
    "training.trainer": "make_trainer",
    "training.trainer_arguments": "arguments",
    "training.own_trainers": "check_accumulation",
    "prediction.predict": "Prediction predict",
    "prediction.loop": "Loop",
    "prediction.fit": "checkpoint_layers fit",
    "planning.cards": "BUSES CARDS find_card",
    "model.known": "known_model",
    "planning.plan": "plan",
    "planning.report": "Plan",
    "view.decisions": "show_decisions",
    "view.diagnosis": "diagnose",
    "view.explanation": "explain",
    "view.descent": "show_losses show_paths",
    "view.frontier": "show_frontier",
    "view.schedule_explorer": "explore_schedule",
    "view.schedule_record": "record_schedule",
    "view.schedules": "show_schedule",
    "view.waterfall": "Waterfall",
    "course.learner.check": "check",
    "course.setup.doctor": "doctor",
    "course.material.dtypes": "operation_dtypes",
    "course.learner.explorer": "explore",
    "course.material.out_of_memory": "out_of_memory",
    "course.learner.guesses": "predict_first",
    "course.material.flops": "count_operations",
    "units": "format_bytes parse_bytes",
}
HOMES = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = {"accounting": "course.material.accounting"}
__all__ = sorted([*HOMES, *_MODULES])

display.register(lambda: import_module(".view.pictures", __package__))


def __getattr__(name: str):
    # Imported on first use, so that `python -m gradmem_lib doctor` works even where torch does not
    # import.
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
