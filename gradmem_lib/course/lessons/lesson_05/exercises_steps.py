"""Lesson 05's exercises about a step: switches that do switch, the loss in the log, and dtypes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ....names import IGNORED
from ....techniques.losses import count_targets
from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, Mistake, measure
from ...machine.compat import enable_checkpointing
from ..lesson_04.layers import count_calls
from ..shared.gradient_weights import parts_of, weights_of, why, why_clipped, why_loss
from ..shared.settings import gradients_of, quietly
from .settings import CHECKPOINTING_CARD, LOG_CARD, checkpointing_setting, log_setting


def _enable(model: nn.Module, kwargs: dict | None = None, **more) -> None:
    enable_checkpointing(model, {"use_reentrant": False} if kwargs is None else kwargs, **more)


def switch_on(model) -> None:
    """Checkpoint every layer of ``model``, in place, so that a training step does run
    them again.
    """
    model.train()
    _enable(model)


def _switch(model, layers: int, *, again: bool, cached: bool) -> str:
    """Which switch of ``model`` was found, where it saves too little; ``again``: parts of its
    layers do run twice; ``cached``: its forward keeps keys and values.
    """
    found = list(model.model.layers)
    if len(found) != layers:
        return "layers are gone"
    on = [layer.gradient_checkpointing for layer in found]
    if any(on):
        if not all(on):
            return "some layers"
        return "" if model.training else "eval mode"
    if again:
        return "the cache" if cached else "one segment"
    if getattr(model.config, "gradient_checkpointing", False):
        return "the config's"
    return (
        "an attribute"
        if {"gradient_checkpointing", "activation_checkpointing"} & {*vars(model)}
        else "none"
    )


def _left_in_eval(model):
    _enable(model)


def _train_mode_alone(model):
    model.train()
    model.config.use_cache = False


def _config_flag(model):
    model.train()
    model.config.gradient_checkpointing = True


def _one_layer_in_two(model):
    switch_on(model)
    for layer in model.model.layers[1::2]:
        layer.gradient_checkpointing = False


def _reentrant(model):
    model.train()
    _enable(model, {"use_reentrant": True})


def _in_bf16(model):
    switch_on(model)
    model.bfloat16()


@quietly
def _observe_checkpointing(candidate):
    model, ids = checkpointing_setting()
    layers = len(model.model.layers)
    candidate(model)

    cached = []

    def step():
        output = model(input_ids=ids, labels=ids)
        cached.append(output.past_key_values is not None)
        loss = output.loss
        del output
        loss.backward()
        return loss.item()

    # A learner's own checkpoint may be around a layer, or inside it, around its parts.
    parts = [layer.mlp for layer in model.model.layers if hasattr(layer, "mlp")]
    with count_calls(parts) as order:
        measured = measure(step, budget=CHECKPOINTING_CARD, model=model)
    again = max(order.times(parts), default=0) > 1
    found = {
        "a step on token ids": {"loss": measured.value, "gradients": gradients_of(model)},
        "the card": measured,
        # Tells ways of one peak apart.
        "what stands in the way": (
            _switch(model, layers, again=again, cached=cached[0]) if measured.over else ""
        ),
    }
    model, ids = checkpointing_setting()
    vectors = model.get_input_embeddings()(ids).detach()
    candidate(model)
    model(inputs_embeds=vectors.to(model.dtype), labels=ids).loss.backward()
    return found | {
        "a step on vectors (inputs_embeds)": {
            "gradients of the layers": gradients_of(model.model.layers)
        }
    }


_SAVES_TOO_LITTLE = {
    "eval mode": (
        "checkpointing is on and the model is in eval mode, as from_pretrained leaves it: layers "
        "check both, and save no memory without telling you; call model.train()."
    ),
    "none": (
        "no layer of this model checkpoints: train mode and a switched-off cache do not switch it "
        "on, and TrainingArguments or a copy do not reach this model."
    ),
    "the config's": (
        "model.config.gradient_checkpointing is read only when a model is made: call "
        "the model's method."
    ),
    "an attribute": (
        "model.gradient_checkpointing = True sets an attribute that no code reads: "
        "each layer has its own, and the model's method sets them all."
    ),
    "layers are gone": (
        "layers of the model are gone, and with them its loss: keep them all, and checkpoint each."
    ),
    "one segment": (
        "all layers are in one segment: the checkpoint runs all of them again at once, "
        "and saves nothing at the peak; checkpoint each layer separately."
    ),
    "the cache": (
        "layers run again, and still too much is kept. The key-value cache is on, and it keeps "
        "keys and values of every layer until backward: the model's own switch turns it off. Or "
        "the segments are too long."
    ),
    "some layers": (
        "only some of the layers are checkpointed, which saves too little for this "
        "card: leave every_n_layers at 1."
    ),
}


def _explain_checkpointing(got, expected):
    return _SAVES_TOO_LITTLE.get(got["what stands in the way"])


def train_and_log(model, window) -> float:
    """Leave the gradient of the mean loss over the window's predicted tokens; return that mean, to
    be logged.
    """
    counts = [count_targets(micro["labels"]) for micro in window]
    logged = 0.0
    for micro, count in zip(window, counts, strict=True):
        loss = model(**micro).loss * (count / sum(counts))
        loss.backward()
        logged += loss.item()
    return logged


def _logs(report, *, share=None, keep=lambda outputs, loss: loss.item()):
    """A wrong ``train_and_log``: a micro-batch's ``share`` of the gradient from (count, counts),
    the log from (means, counts).
    """

    def wrong(model, window):
        counts = [count_targets(micro["labels"]) for micro in window]
        means = []
        for micro, count in zip(window, counts, strict=True):
            outputs = model(**micro)
            (outputs.loss * (share(count, counts) if share else count / sum(counts))).backward()
            means.append(keep(outputs, outputs.loss))
        return report(means, counts)

    return wrong


def _sum(means, counts):
    return sum(means)


def _mean(means, counts):
    return sum(means) / len(means)


def _first_tokens_too(model, window):
    items, logged = sum(int((micro["labels"] != IGNORED).sum()) for micro in window), 0.0
    for micro in window:
        loss = model(**micro, num_items_in_batch=torch.tensor(items)).loss
        loss.backward()
        logged += loss.item()
    return logged


def _weighted(means, counts):
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


@quietly
def _observe_log(candidate):
    found = {}
    for kind in ("unequal", "equal"):
        model, window = log_setting(kind)
        backward: list[None] = []
        model.lm_head.weight.register_hook(
            lambda gradient, backward=backward: backward.append(None)
        )
        if kind == "unequal":
            measured = measure(
                lambda m=model, w=window: candidate(m, w), budget=LOG_CARD, model=model
            )
            logged = measured.value
            too_much = ""
            if measured.over:
                too_much = "kept" if len(backward) > 1 else "one backward"
            found["what is too much"] = too_much
            found["the card"] = replace(measured, value=None)
        else:
            logged = candidate(model, window)
        graph = isinstance(logged, torch.Tensor) and logged.requires_grad
        found[f"a window of {kind} lengths"] = {
            "gradients": gradients_of(model),
            "loss": logged.detach() if isinstance(logged, torch.Tensor) else logged,
            "what is returned hangs on a graph (1 is yes)": int(graph),
        }
    return found


_TOO_MUCH_TO_LOG = {
    "kept": (
        "the outputs of all micro-batches are kept until the end of the window, with their "
        "logits: keep only the loss as a number."
    ),
    "one backward": (
        "one backward at the end keeps every micro-batch's graph until then: call "
        "backward for each."
    ),
}


@quietly
def _explain_log(got, expected):
    if says := _TOO_MUCH_TO_LOG.get(got["what is too much"]):
        return says
    name = "a window of unequal lengths"
    mine, right = got[name], expected[name]
    model, window = log_setting("unequal")
    sums: list[float] = []

    def loss_and_count(micro):
        count = count_targets(micro["labels"])
        loss = model(**micro).loss * count
        sums.append(loss.item())
        return loss, count

    parts, counts = parts_of(loss_and_count, window, list(model.parameters()))
    if difference(mine["gradients"], right["gradients"]):
        if says := why_clipped(mine["gradients"], right["gradients"]):
            return says
        weights = weights_of(mine["gradients"], parts, 1e-3)
        return weights and (_by_padding(weights, counts, window) or why(weights, counts))
    what = why_loss(plain(mine["loss"]), sums, counts)
    return what and f"the gradient is right, but the log is {what}."


def _by_padding(weights, counts, window) -> str | None:
    """Is a micro-batch's mean weighted by all of its labels, or by those that are not shifted?"""
    for sizes, says in (
        (
            [micro["labels"].numel() for micro in window],
            (
                "padding has weight here: a micro-batch's share is its predicted tokens, not all "
                "of its labels."
            ),
        ),
        (
            [int((micro["labels"] != IGNORED).sum()) for micro in window],
            (
                "position 0 of each row has weight here, and nothing predicts it: count labels[:, "
                "1:], as count_targets does."
            ),
        ),
    ):
        shares = [
            w * count / size * sum(sizes)
            for w, count, size in zip(weights, counts, sizes, strict=True)
        ]
        if all(abs(share - 1) < 3e-3 for share in shares):
            return says
    return None


EXERCISES = (
    Exercise(
        id="5.2",
        title="checkpointing that happens",
        difficulty=2,
        minutes=6,
        trains="making sure that a switch has switched something",
        reference=switch_on,
        observe=_observe_checkpointing,
        explain=_explain_checkpointing,
        changes=("model.train", "model.hook", "model.config", "model.checkpointing"),
        mistakes=(
            Mistake("left in eval", _left_in_eval, _SAVES_TOO_LITTLE["eval mode"]),
            Mistake("train mode alone", _train_mode_alone, _SAVES_TOO_LITTLE["none"]),
            Mistake("a field of the config", _config_flag, _SAVES_TOO_LITTLE["the config's"]),
            Mistake("one layer in two", _one_layer_in_two, _SAVES_TOO_LITTLE["some layers"]),
            Mistake(
                "reentrant",
                _reentrant,
                (
                    "use_reentrant=True trains on token ids, because transformers lets the "
                    "embedding's output require a gradient; with input vectors that require none, "
                    "no layer gets a gradient: use_reentrant=False."
                ),
            ),
            Mistake(
                "bf16",
                _in_bf16,
                (
                    "it fits easily, but the weights have been rounded to bf16, which changes the "
                    "model: checkpointing changes no number."
                ),
            ),
        ),
    ),
    Exercise(
        id="5.4",
        title="the loss in the log",
        difficulty=2,
        minutes=6,
        trains="logging what is trained, and holding on to nothing for it",
        reference=train_and_log,
        observe=_observe_log,
        explain=_explain_log,
        mistakes=(
            Mistake(
                "times K",
                _logs(_sum, share=lambda count, counts: 1),
                (
                    "gradient and log are K times too large: every micro-batch's mean must be "
                    "weighted by its share of the tokens, which add up to 1."
                ),
            ),
            Mistake(
                "the last, divided by K",
                _logs(lambda means, counts: means[-1] / len(means)),
                (
                    "the gradient is right, but the log has what was left in `loss`: the last "
                    "micro-batch's loss, divided for its backward."
                ),
            ),
            Mistake(
                "mean of means, log",
                _logs(_mean),
                (
                    "the gradient is right, but the log is a mean of means: a micro-batch of few "
                    "tokens counts as much as one of many."
                ),
            ),
            Mistake(
                "mean of means, both",
                _logs(_mean, share=lambda count, counts: 1 / len(counts)),
                (
                    "the losses are divided by K, or weighted by their rows. So gradient and log "
                    "are a mean of means: weight each micro-batch by its share of the tokens."
                ),
            ),
            Mistake(
                "first tokens too",
                _first_tokens_too,
                (
                    "position 0 of each row is counted, and nothing predicts it: count labels[:, "
                    "1:], as count_targets does."
                ),
            ),
            Mistake(
                "a graph in the log",
                _logs(_weighted, keep=lambda outputs, loss: loss),
                (
                    "the number is right, but it is a tensor with a graph: it keeps 4 bytes a loss "
                    "after backward, and all activations if backward has not run, as in an "
                    "evaluation; log loss.item()."
                ),
            ),
        ),
    ),
)
