"""Sentences about what was found on a module, where it changes the figures."""

from torch import nn

from ..hf_names import LAYER_SWITCH
from ..techniques.checkpointing import checkpoints_of
from ..training.prepare import left_in_eval_mode
from .question import Question

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def notes_of(question: Question) -> tuple[str, ...]:
    """What a reader of the prediction should know about the module. Empty if there is nothing."""
    model = question.source.skeleton
    if not question.source.is_user_module:
        return _about_the_class(model)
    kept = _about_kept_scores(model)
    trains = any(module.training for module in model.modules())
    if trains and not left_in_eval_mode(model):
        return kept
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
        *kept,
    )


def _about_kept_scores(model: nn.Module) -> tuple[str, ...]:
    """What AdaLoRA's loop keeps and no step shows: it calls ``update_and_allocate`` after a step.

    That call keeps three tensors like each trained one of its additions (``ipt``, ``exp_avg_ipt``
    and ``exp_avg_unc``), until ``total_step - tfinal`` steps are done. Source: the class
    ``RankAllocator`` of PEFT, the file ``tuners/adalora/layer.py``.
    """
    if not callable(getattr(getattr(model, "base_model", None), "update_and_allocate", None)):
        return ()
    nbytes = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            nbytes += 3 * parameter.nbytes
    return (
        f"update_and_allocate, which AdaLoRA's loop calls after a step, keeps {nbytes:,} bytes of "
        "scores for its ranks until total_step - tfinal steps are done, and these bytes are not in "
        "the figures: add them",
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
