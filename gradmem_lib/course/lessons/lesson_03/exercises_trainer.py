"""Lesson 03's exercise about Hugging Face's ``Trainer``: a model whose loss it multiplies."""

from __future__ import annotations

import torch

from ...judge.compare import difference
from ...judge.exercise import Exercise, HiddenCase, Mistake
from ..shared.hf_trainer import one_batch, trainer_logs, trainer_setting
from ..shared.settings import quietly


def _heeds(model, batch) -> bool:
    """Does the model's loss depend on the number of items that it is told?

    Asked without dropout, which is random.
    """
    training = model.training
    model.eval()
    few, many = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 1000))
    model.train(training)
    return few != many


def mended(model, batch):
    """``model``, told to ``Trainer`` as what it is: one that heeds the number of items, or one that
    does not.
    """
    if not _heeds(model, batch):
        model.accepts_loss_kwargs = False
    return model


def _told(what):
    """A wrong ``mended``, which sets ``accepts_loss_kwargs`` to ``what(heeds)``."""

    def wrong(model, batch):
        model.accepts_loss_kwargs = what(_heeds(model, batch))
        return model

    return wrong


def _one_in_four(model, batch):
    for parameter in model.parameters() if not _heeds(model, batch) else ():
        parameter.register_hook(lambda gradient: gradient / 4)
    return model


# With a head like the language model's, and a loss that ignores the number of items.
_DEAF = "LlamaForCausalLM of another loss"


def _without_the_number(
    self, input_ids=None, labels=None, attention_mask=None, num_items_in_batch=None, **kwargs
):
    given = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    return super(type(self), self).forward(**given, **kwargs)


def _by_its_head(model, batch):
    if not hasattr(model, "lm_head"):
        model.accepts_loss_kwargs = False
    return model


def _nameless(kind: str):
    """Model and examples of ``trainer_setting``, of a class whose name tells nothing, with
    dropout.
    """
    model, examples = trainer_setting(kind.split()[0])
    members = {"forward": _without_the_number} if kind == _DEAF else {}
    model.__class__ = type("Tiny", (type(model),), members)
    _set_dropout(model, 0.1)
    if kind.endswith("SequenceClassification"):
        # which its forward writes there by itself
        model.config.problem_type = "single_label_classification"
    return model, examples


def _set_dropout(model, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p


_GIVEN_IN_EVAL = ("BertForSequenceClassification", "LlamaForCausalLM", _DEAF)
_IN_TRAINING = HiddenCase("a classifier in training mode")
_SETTING = "accepts_loss_kwargs"


def _on_classes(model) -> list[tuple[type, bool]]:
    return [(kind, vars(kind)[_SETTING]) for kind in type(model).__mro__ if _SETTING in vars(kind)]


@quietly
def _observe_fixed(candidate):
    from transformers import default_data_collator

    found = {}
    for kind in _GIVEN_IN_EVAL:
        model, examples = _nameless(kind)
        model.eval()
        batch, before = default_data_collator(examples), _on_classes(model)
        right = one_batch(trainer_setting(kind.split()[0])[0], batch)
        try:
            fixed = candidate(model, batch)
            after = _on_classes(model)
            _set_dropout(fixed, 0.0)
            fixed.zero_grad()
            logged = trainer_logs(fixed, examples, 4)
        finally:
            for kind_of, _ in set(_on_classes(model)) - set(before):
                delattr(kind_of, _SETTING)
            for kind_of, value in before:
                setattr(kind_of, _SETTING, value)
        found[kind] = {
            "loss, over that of one batch": logged["loss"] / right["loss"],
            "gradient norm, over that of one batch": logged["grad_norm"] / right["grad_norm"],
            "set on the whole class (1 is yes)": int(after != before),
        }
    return found | {_IN_TRAINING: _asked_in_training(candidate)}


def _asked_in_training(candidate) -> dict:
    """What the answer sets on a classifier in training mode, whose dropout makes any two losses
    differ. No ``Trainer`` runs, which would take seconds more.
    """
    from transformers import default_data_collator

    model, examples = _nameless(_GIVEN_IN_EVAL[0])
    candidate(model.train(), default_data_collator(examples))
    return {"accepts_loss_kwargs (0 is False)": int(bool(getattr(model, _SETTING, True)))}


def _explain_fixed(got, expected):
    if any(got[kind]["set on the whole class (1 is yes)"] for kind in _GIVEN_IN_EVAL):
        return (
            "the attribute is set on the class, and so on every model of this class: set it on "
            "this model only."
        )
    asked = _GIVEN_IN_EVAL[1:]  # models without dropout
    if not any(difference(got[kind], expected[kind], 1e-4) for kind in asked):
        return (
            "a classifier with dropout is judged wrongly: in training mode dropout makes any two "
            "losses differ, so ask it in eval mode."
        )
    return None


EXERCISES = (
    Exercise(
        id="3.8",
        title="fix a Trainer run",
        difficulty=2,
        minutes=6,
        trains="asking a model whether it uses the number of items",
        reference=mended,
        observe=_observe_fixed,
        explain=_explain_fixed,
        tolerance=1e-4,
        changes=("model.mode",),  # Trainer puts it into training mode itself
        mistakes=(
            Mistake(
                "unchanged",
                lambda model, batch: model,
                (
                    "the classifier's loss and gradient are still multiplied by the 4 accumulation "
                    "steps."
                ),
            ),
            Mistake(
                "every model",
                _told(lambda heeds: False),
                (
                    "the classifier is now right, but the language model is wrong, because it "
                    "does use the number of items: ask each model itself, because neither its "
                    "name nor its signature says so."
                ),
            ),
            Mistake(
                "True",
                _told(lambda heeds: not heeds),
                (
                    "accepts_loss_kwargs has the opposite value: False makes Trainer divide by the "
                    "accumulation steps itself."
                ),
            ),
            Mistake(
                "by its head",
                _by_its_head,
                (
                    "a model with a language model's head may ignore the number too: compare its "
                    "losses for two numbers."
                ),
            ),
            Mistake(
                "a quarter of the gradient",
                _one_in_four,
                (
                    "the gradient is right for 4 accumulation steps and no others, and the logged "
                    "loss is still 4 times too large."
                ),
            ),
        ),
    ),
)
