"""Sentences about what was found on a module, where it changes the figures."""

from torch import nn

from ..hf_names import LAYER_SWITCH
from ..techniques.checkpointing import checkpoints_of
from .question import Question

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def notes_of(question: Question) -> tuple[str, ...]:
    """What a reader of the prediction should know about the module. Empty if there is nothing."""
    model = question.source.skeleton
    if not question.source.is_user_module:
        return _about_the_class(model)
    if any(module.training for module in model.modules()):
        return ()
    switched_off = []
    if has_checkpoints(model) or question.recipe.checkpointing or question.recipe.every_n_layers:
        switched_off.append("checkpointing is on and does nothing")
    if any(isinstance(module, _DROPOUT) and module.p > 0 for module in model.modules()):
        switched_off.append("dropout does nothing")
    if not switched_off:
        switched_off.append("the figures are those of a step in that mode")
    return (
        f"{' and '.join(switched_off)}: the model is in eval mode, as from_pretrained leaves it. "
        "If your loop calls model.train(), call it before predict too",
    )


def _about_the_class(model: nn.Module) -> tuple[str, ...]:
    """That the model is not of the class that its config names."""
    named = getattr(getattr(model, "config", None), "architectures", None) or ()
    name = type(model).__name__
    if not named or name in named:
        return ()
    return (
        f"{named[0]} has no loss of its own, so the figures are those of {name}, the usual class "
        "for training it",
    )


def has_checkpoints(model: nn.Module) -> bool:
    """Whether layers of ``model`` are checkpointed, by transformers or by this library."""
    by_transformers = any(
        getattr(module, LAYER_SWITCH, False) is True for module in model.modules()
    )
    return by_transformers or bool(checkpoints_of(model))
