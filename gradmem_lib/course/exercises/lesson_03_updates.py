"""Lesson 03's exercises about one update: clipping, a batch that does not fit, and Trainer."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ...techniques.accumulation import split
from ...techniques.losses import count_targets, next_token_loss
from ..exercise import Exercise, Mistake, measure
from .lesson_03 import accumulate, accumulates, mean_of_means, step_and_zero, unequal
from .settings import CARD, Bigrams, batch_setting, bigram_loss, flat
from .trainer import one_batch, trainer_logs, trainer_setting


def clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm) -> float:
    """One update on a list of micro-batches, its gradient clipped to ``max_norm``; the norm before clipping."""
    accumulate(micro_batches, loss_and_count)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    step_and_zero(optimizer)
    return norm.item()


def _clips(model, optimizer, micro_batches, loss_and_count, max_norm, *, wrong):
    parameters, total = list(model.parameters()), sum(loss_and_count(micro)[1] for micro in micro_batches)
    kept = [torch.zeros_like(p) for p in parameters]
    for micro in micro_batches:
        (loss_and_count(micro)[0] / (1 if wrong == "the sum" else total)).backward()
        if wrong in ("inside", "each"):
            norm = clip_grad_norm_(parameters, max_norm)
        if wrong == "each":
            kept = [held + p.grad for held, p in zip(kept, parameters, strict=True)]
            optimizer.zero_grad()
    if wrong == "too late":
        optimizer.step()
    if wrong == "each":
        for held, parameter in zip(kept, parameters, strict=True):
            parameter.grad = held
    elif wrong == "values":
        norm = flat(p.grad for p in parameters).norm()
        clip_grad_value_(parameters, max_norm)
    elif wrong != "inside":
        norm = clip_grad_norm_(parameters, max_norm / (len(micro_batches) if wrong == "max_norm / K" else 1))
    if wrong == "the sum":
        for parameter in parameters:
            parameter.grad /= total
    if wrong != "too late":
        optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def _observe_clip(candidate):
    found = {}
    for name, max_norm in (("a norm that is too large", 0.1), ("a norm that is small enough", 100.0)):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norm = candidate(model, optimizer, unequal(), bigram_loss(model), max_norm)
        found[name] = {"weights": flat(model.parameters()), "norm": norm}
        candidate(model, optimizer, unequal(), bigram_loss(model), max_norm)
        found[f"{name}, a second update"] = {"weights": flat(model.parameters())}
    return found


def train_64(model, optimizer, batch, loss_and_count) -> float:
    """One update on all rows of ``batch``, in micro-batches that fit; the mean loss over all tokens."""
    loss = accumulate(list(split(batch, 8)), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _updates(size, accumulate=accumulate):
    def wrong(model, optimizer, batch, loss_and_count):
        loss = accumulate(list(split(batch, size)), loss_and_count)
        step_and_zero(optimizer)
        return loss

    return wrong


def _one_backward(micro_batches, loss_and_count):
    pairs = [loss_and_count(micro) for micro in micro_batches]
    loss = sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
    loss.backward()
    return loss.item()


def _retains_every_graph(micro_batches, loss_and_count):
    total, losses = sum(count_targets(m["labels"]) for m in micro_batches), []
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward(retain_graph=True)
        losses.append(loss)
    return sum(loss.item() for loss in losses) / total


def _steps_each(model, optimizer, batch, loss_and_count):
    loss_sum = items = 0
    for micro in split(batch, 8):
        loss, count = loss_and_count(micro)
        (loss / count).backward()
        step_and_zero(optimizer)
        loss_sum, items = loss_sum + loss.item(), items + count
    return loss_sum / items


def _observe_64(candidate):
    model, optimizer, batch = batch_setting()

    def run():
        loss = candidate(model, optimizer, batch, lambda micro: next_token_loss(model, micro))
        # Adam's first step moves every weight by about the learning rate, whatever its gradient's size: look at m.
        moments = [optimizer.state[p]["exp_avg"].double() for p in model.parameters() if p in optimizer.state]
        return {
            "loss": loss,
            "size of the gradient": 10 * math.sqrt(sum(m.square().sum().item() for m in moments)),
        }

    return measure(run, budget=CARD, model=model, optimizer=optimizer)


def _heeds(model, batch) -> bool:
    """Does the model's loss depend on the number of items that it is told?"""
    few, many = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 1000))
    return few != many


def mended(model, batch):
    """``model``, told to ``Trainer`` as what it is: one that heeds the number of items, or one that does not."""
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


def _observe_mended(candidate):
    from transformers import default_data_collator

    found = {}
    for kind in ("BertForSequenceClassification", "LlamaForCausalLM"):
        model, examples = trainer_setting(kind)
        batch = default_data_collator(examples)
        right = one_batch(trainer_setting(kind)[0], batch)
        logged = trainer_logs(candidate(model, batch), examples, 4)
        found[kind] = {
            "loss, over that of one batch": logged["loss"] / right["loss"],
            "gradient norm, over that of one batch": logged["grad_norm"] / right["grad_norm"],
        }
    return found


EXERCISES = (
    Exercise(
        id="3.6", title="clipping, in its place", difficulty=2, minutes=5,
        trains="clipping the gradient of the update, not its parts",
        reference=clipped_update,
        observe=_observe_clip,
        mistakes=(
            Mistake("inside", partial(_clips, wrong="inside"),
                    "this clips inside the window: what has been gathered is cut again and again, and early micro-batches lose most."),
            Mistake("each", partial(_clips, wrong="each"),
                    "this clips each micro-batch by itself: their sum is not the clipped gradient, and can be longer than max_norm."),
            Mistake("too late", partial(_clips, wrong="too late"),
                    "the update used the gradient as it was: clip after the last backward and before the step."),
            Mistake("the sum", partial(_clips, wrong="the sum"),
                    "this clips before dividing: it is the mean's norm that max_norm is meant for."),
            Mistake("max_norm / K", partial(_clips, wrong="max_norm / K"),
                    "this clips to max_norm / K: the gradient is that of one update, so it gets the whole max_norm."),
            Mistake("values", partial(_clips, wrong="values"),
                    "this clips each number by itself, which changes the gradient's direction: clip its norm."),
        ),
    ),
    Exercise(
        id="3.7", title="a batch of 64 where 16 do not fit", difficulty=3, minutes=10,
        trains="choosing a micro-batch by its bytes, and letting go of each graph",
        reference=train_64,
        observe=_observe_64,
        tolerance=1e-4,
        mistakes=(
            Mistake("all at once", _updates(64), "all 64 sequences go through at once: that is the batch that does not fit."),
            Mistake("micro-batches of 16", _updates(16), "the micro-batch has 16 sequences, and 16 are too many for this card."),
            Mistake("one backward", _updates(8, _one_backward),
                    "one backward at the end keeps every micro-batch's graph until then: that is the full batch again."),
            Mistake("retains every graph", _updates(8, _retains_every_graph),
                    "retain_graph=True and a list of losses keep every graph alive: keep loss.item()."),
            Mistake("by K", _updates(8, accumulates(lambda loss, count, k, total: loss / count / k, mean_of_means)),
                    "it fits, and dividing by K weights the sequences wrongly: their lengths differ, so divide by the tokens of all 64."),
            Mistake("steps each", _steps_each, "it fits, and it makes eight updates: the exercise asks for one."),
        ),
    ),
    Exercise(
        id="3.8", title="mend a Trainer run", difficulty=2, minutes=6,
        trains="asking a model whether it heeds the number of items",
        reference=mended,
        observe=_observe_mended,
        tolerance=1e-4,
        changes=("model",),
        mistakes=(
            Mistake("unchanged", lambda model, batch: model,
                    "the classifier's loss and gradient are still multiplied by the 4 accumulation steps."),
            Mistake("every model", _told(lambda heeds: False),
                    "the classifier is mended and the language model is spoiled: it does heed the number of items, so leave it alone."),
            Mistake("True", _told(lambda heeds: not heeds),
                    "accepts_loss_kwargs is the wrong way round: False makes Trainer divide by the accumulation steps itself."),
            Mistake("a quarter of the gradient", _one_in_four,
                    "the gradient is right for 4 accumulation steps and no others, and the logged loss is still 4 times too large."),
        ),
    ),
)  # fmt: skip
