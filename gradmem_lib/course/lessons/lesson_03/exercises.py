"""Lesson 03's exercises but its leak: windows of micro-batches, and the update that each makes."""

import math
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch.nn import utils

from ....names import IGNORED
from ....techniques.accumulation import split
from ....techniques.losses import next_token_loss
from ...judge.compare import Measured
from ...judge.exercise import Exercise, calls, measured
from ..shared.hf_trainer import one_batch, trainer_logs, trainer_setting
from ..shared.residual_net import labelled_rows, residual_net
from ..shared.settings import (
    adamw,
    bigram_loss,
    bigrams,
    gradients_of,
    gradients_of_updates,
    have_graphs,
    quietly,
    rows,
    sgd,
    text_batch,
    tiny_llama,
    weights_of,
    with_large_gradients,
)

# 3.1


def plan_window(
    tokens_per_update: int, micro_batch: int, seq_len: int, gpus: int
) -> tuple[int, int]:
    """Micro-batches that each GPU needs for at least ``tokens_per_update``, and the tokens that
    makes.
    """
    at_once = micro_batch * seq_len * gpus
    steps = math.ceil(tokens_per_update / at_once)
    return steps, steps * at_once


PLAN = Exercise(
    "3.1",
    plan_window,
    calls(
        (524288, 4, 2048, 1),
        (524288, 4, 2048, 8),
        (500000, 4, 2048, 1),
        (1000, 4, 2048, 1),
        hidden=[(100_000, 3, 700, 7), (77, 1, 10, 6)],
    ),
    """
    math.ceil → math.floor
        this rounds down, and the update gets fewer tokens than asked for: the remaining tokens need
        a micro-batch too.
    math.ceil(tokens_per_update / at_once) → math.floor(tokens_per_update / at_once) + 1
        this adds a micro-batch even where the division has no remainder: round up only when there
        is one.
    math.ceil(tokens_per_update / at_once) → round(tokens_per_update / at_once)
        this rounds to the nearest: "at least" means up.
    seq_len * gpus → seq_len
        this forgets the GPUs: each of them works on a micro-batch of its own at the same time.
    micro_batch * seq_len * gpus → micro_batch * gpus
        this counts sequences: a micro-batch has micro_batch times seq_len tokens.
    return steps, steps * at_once → return steps, tokens_per_update
        the steps are right; the tokens are those asked for, not the tokens of that many whole
        micro-batches.
    return steps, steps * at_once → return steps * gpus, steps * at_once
        these are the steps of all GPUs together: return the steps of each GPU.
    micro_batch * seq_len * gpus → micro_batch * (seq_len - 1) * gpus
        this counts seq_len - 1 tokens for each sequence: the plan counts all tokens, micro_batch
        times seq_len in a micro-batch.
    """,
)

# 3.2


def count_targets(labels: torch.Tensor) -> int:
    """How many tokens a causal language model predicts, for labels (batch, sequence) in which -100
    is to be ignored.
    """
    return int((labels[:, 1:] != IGNORED).sum())


def count_cases(answer):
    yield "sequences of 5, 3 and 8 tokens", answer(rows(5, 3, 8))
    prompt = rows(8, 8)
    prompt[:, :3] = IGNORED
    yield "two sequences of 8 tokens, the first 3 of which have the label -100", answer(prompt)
    zeros = rows(6, 4)
    zeros[0, 2] = zeros[1, 1] = 0
    yield "sequences of 6 and 4 tokens, two of which have the id 0", answer(zeros)


TARGETS = Exercise(
    "3.2",
    count_targets,
    count_cases,
    """
    int((labels[:, 1:] != IGNORED).sum()) → labels.numel()
        this counts padding: a label of -100 adds nothing to the loss.
    int((labels[:, 1:] != IGNORED).sum()) → labels[:, 1:].numel()
        this still counts padding, after the shift: a label of -100 adds nothing to the loss.
    != IGNORED → == IGNORED
        this counts the labels that are ignored: count those that are not -100.
    labels[:, 1:] → labels[1:]
        labels[1:] leaves out the first sequence: positions are the second dimension, labels[:, 1:].
    labels[:, 1:] → labels
        this counts position 0: nothing comes before the first token, so nothing predicts it.
    labels[:, 1:] → labels[:, :-1]
        this drops the last label and keeps the first: logits lose their last position, labels their
        first.
    int((labels[:, 1:] != IGNORED).sum()) → int((labels != IGNORED).sum()) - len(labels)
        where the first label is already -100, a real label is lost: the shift leaves out the first
        label of a sequence, whatever it is, and no other.
    != IGNORED → > 0
        this treats token 0 as padding: it is a token like any other, and only -100 is ignored.
    """,
)

# 3.3


def accumulate(micro_batches, loss_and_count) -> float:
    """Leave the gradient of the mean loss over all tokens of a list of micro-batches; return that
    mean.
    """
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
        mean += loss.item() / total
    return mean


UNEQUAL = ((3,), (9, 3), (12, 12), (6,))
WINDOWS = {
    "micro-batches that predict 10, 10 and 10 tokens": ((6, 6), (6, 6), (6, 6)),
    "micro-batches that predict 2, 10, 22 and 5 tokens": UNEQUAL,
    "a micro-batch of one token, which predicts nothing": ((4,), (1,), (7,)),
}


def micro_batches_of(lengths) -> list[torch.Tensor]:
    """The token ids of micro-batches whose sequences have these lengths."""
    return [rows(*each, seed=seed) for seed, each in enumerate(lengths)]


LONG = 512  # tokens


def one_graph_at_a_time(run) -> Measured:
    """The peak of ``run(model, optimizer, micro_batches, loss_and_count)`` on 4 long
    micro-batches.

    A graph keeps 128 bytes a token. With its backward there are 338, or 378 where the last graph
    still has its name, and 466 beside another graph.
    """
    model = bigrams()
    long = micro_batches_of([(LONG,)] * 4)
    return measured(
        lambda: run(model, sgd(model), long, bigram_loss(model)),
        422 * LONG,
        "graphs",
        128 * LONG,
        model,
    )


def accumulation_cases(answer):
    for name, lengths in WINDOWS.items():
        model = bigrams()
        loss = answer(micro_batches_of(lengths), bigram_loss(model))
        yield f"{name}, the gradient", gradients_of(model)
        yield f"{name}, the loss that is returned", loss
    yield "one graph at a time", one_graph_at_a_time(lambda model, _, *given: answer(*given))


DIVISOR = Exercise(
    "3.3",
    accumulate,
    accumulation_cases,
    """
    (loss / total) → loss
        no division: this is the gradient of the sum, as many times too large as there are tokens.
    loss, _ → loss, count
    (loss / total) → (loss / count)
        this adds up the gradients of the micro-batches' means: with K of them it is about K times
        too large.
    loss, _ → loss, count
    (loss / total) → (loss / count / len(micro_batches))
        dividing by K gives every micro-batch the same weight: a token of a short one then counts
        more than one of a long one.
    (loss / total) → (loss / len(micro_batches))
        loss is a sum already: divide it by the tokens of all micro-batches, not by K.
    loss, _ → loss, count
    loss.item() / total → (loss / count / len(micro_batches)).item()
        the loss that is returned is an unweighted average of the micro-batches' means.
    mean += loss.item() / total → mean += loss.item()
        the loss that is returned is the sum over all items: divide it by their number.
    loss_and_count(micro)[1] for → count_targets(micro["labels"]) for
        a micro-batch may be anything that loss_and_count takes (here it is a tensor, and no dict
        with labels): loss_and_count(micro) also says how many items it has.
    total = sum( → pairs = [loss_and_count(micro) for micro in micro_batches]; total = sum(
    loss_and_count(micro)[1] for micro in micro_batches) → count for _, count in pairs)
    for micro in micro_batches: → for loss, _ in pairs:
    loss, _ = loss_and_count(micro) →
        the graphs of all micro-batches are in memory at once: call backward on each of them before
        the next forward. Count the items first.
    """,
    pairs=True,
)

# 3.4


def train(model, optimizer, micro_batches, window, loss_and_count) -> list[float]:
    """An update after every ``window`` micro-batches and one for what is left; each update's mean
    loss.
    """
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        total = sum(loss_and_count(micro)[1] for micro in held)
        mean = 0.0
        for micro in held:
            loss, _ = loss_and_count(micro)
            (loss / total).backward()
            mean += loss.item() / total
        losses.append(mean)
        optimizer.step()
        optimizer.zero_grad()
    return losses


# Micro-batch n predicts n tokens.
LENGTHS = ((2,), (2, 2), (4,), (3, 3), (4, 3), (7,))
STREAM, LARGE = 20, 16_384  # micro-batches of so many tokens, 128 KiB each


def train_cases(answer):
    for n, window, kind in ((6, 3, list), (5, 2, iter)):
        name = f"{n} micro-batches in windows of {window}"
        model = bigrams()
        with_large_gradients(model[0], 10)
        optimizer = sgd(model, 0.05, momentum=0.5)
        updates = gradients_of_updates(model, optimizer)
        given = kind(micro_batches_of(LENGTHS[:n]))
        losses = answer(model, optimizer, given, window, bigram_loss(model))
        yield f"{name}, updates by the given optimizer", len(updates)
        yield f"{name}, the gradient of each update", updates
        yield f"{name}, the mean losses", losses
        yield f"{name}, the weights at the end", weights_of(model)
        yield f"{name}, whether the losses have graphs", have_graphs(losses)

    def in_one_window(model, optimizer, micro_batches, loss):
        answer(model, optimizer, iter(micro_batches), 4, loss)

    yield "one graph at a time", one_graph_at_a_time(in_one_window)

    def on_a_stream():
        model = bigrams()
        loss = bigram_loss(model)
        stream = (torch.full((1, LARGE), n % 11) for n in range(STREAM))
        # Only three tokens of each are used: what is measured is the micro-batches themselves.
        return answer(model, sgd(model), stream, 2, lambda micro: loss(micro[:, :3]))

    # A window, the next one, and two micro-batches to spare.
    run = measured(on_a_stream, 6 * 8 * LARGE, "micro-batches", 8 * LARGE)
    yield f"a stream of {STREAM} large micro-batches, of which one window of 2 is held", run


LOOP = Exercise(
    "3.4",
    train,
    train_cases,
    """
    for micro in held: → for micro in (optimizer.zero_grad() or micro for micro in held):
        this zeroes the gradients inside the window: only the last micro-batch's gradients are left.
    while held := list(islice(rest, window)): → while held := list(islice(rest, 1)):
        this steps after every micro-batch: that trains with small batches and accumulates nothing.
    held := list(islice(rest, window)) → (held := list(islice(rest, window)))[window - 1 :]
        this drops the last window when it is not full: its micro-batches were read but not used.
    (loss / total).backward() → (loss / total * len(held) / window).backward()
        the last window is divided as if it were full: with fewer micro-batches its gradient is too
        small.
    optimizer.zero_grad() →
        without zero_grad between windows, every update repeats the gradients of all those before
        it.
    loss, _ → loss, count
    (loss / total) → (loss / count / len(held))
    loss.item() / total → loss.item() / count / len(held)
        the windows are right; inside a window every micro-batch has the same weight, however many
        tokens it has.
    optimizer.step() → optimizer.zero_grad(); optimizer.step()
        the gradient is zero at the step: call zero_grad() after step(), and not between backward
        and step().
    iter(micro_batches) → iter(list(micro_batches))
        list() reads all micro-batches at once, and a long stream does not fit into memory: hold one
        window at a time.
    """,
)

# 3.5


def window_loss(means: list[float], counts: list[int]) -> float:
    """The mean loss of a window's items, from each micro-batch's mean loss and its number of
    items.
    """
    weighted = [mean * count for mean, count in zip(means, counts, strict=True)]
    return sum(weighted) / sum(counts)


LOGGED = Exercise(
    "3.5",
    window_loss,
    calls(
        ([2.0, 4.0], [10, 30]),
        ([3.0, 1.0, 2.5], [5, 0, 20]),
        hidden=[([1.5, 4.5, 0.5, 2.0], [7, 1, 9, 3])],
    ),
    """
    sum(weighted) / sum(counts) → sum(means) / len(means)
        this averages the means without weights: a micro-batch with few tokens counts as much as one
        with many.
    sum(weighted) / sum(counts) → sum(means) / len(means) ** 2
        this divides by K before logging, and then averages: K times too small. Log before dividing,
        or add up instead of averaging.
    sum(weighted) / sum(counts) → means[-1]
        this logs only the last micro-batch.
    sum(weighted) / sum(counts) → means[0]
        this logs only the first micro-batch.
    / sum(counts) →
        this is the sum over all items: divide it by their number.
    sum(weighted) / sum(counts) → sum(means)
        this adds up means: K times too large.
    / sum(counts) → / max(counts)
        the sum over all items is divided by the largest count: divide it by the number of items.
    / sum(counts) → / len(counts)
        the sum over all items is divided by K: divide it by the number of items.
    """,
)

# 3.6


def multiply(model, factor) -> None:
    for p in model.parameters():
        p.grad *= factor


def clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm) -> float:
    """One update on a list of micro-batches, its gradient clipped to ``max_norm``; the norm before
    clipping.
    """
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
    norm = utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def clip_cases(answer):
    for words, max_norm in (("larger", 100.0), ("smaller", 0.1), ("smaller", 0.5)):
        name = f"max_norm {max_norm:g}, which is {words} than the norm"
        model = bigrams()
        optimizer = sgd(model, 1.0, momentum=0.5)
        updates = gradients_of_updates(model, optimizer)
        given = micro_batches_of(UNEQUAL), bigram_loss(model), max_norm
        norm = answer(model, optimizer, *given)
        yield f"{name}, the gradient at the step of the given optimizer", updates[:]
        yield f"{name}, the norm before clipping, which is returned", norm
        answer(model, optimizer, *given)
        yield f"{name}, the gradients of two updates in turn", updates
    yield "one graph at a time", one_graph_at_a_time(lambda *given: answer(*given, 1.0))


CLIPPED = Exercise(
    "3.6",
    clipped_update,
    clip_cases,
    """
    norm = utils.clip_grad_norm_(model.parameters(), max_norm) →
    .backward() → .backward(); norm = utils.clip_grad_norm_(model.parameters(), max_norm)
        this clips inside the window: the accumulated gradient is clipped again and again, and early
        micro-batches lose most.
    optimizer.step() →
    norm = utils → optimizer.step(); norm = utils
        the update used the unclipped gradient: clip after the last backward and before the step.
    optimizer.step() → multiply(model, min(1.0, norm / max_norm)); optimizer.step()
    norm = utils.clip_grad_norm_(model.parameters(), max_norm) → norm = gradients_of(model).norm()
        the factor is turned round: it is max_norm / norm, and at most 1.
    (loss / total) → loss
    optimizer.step() → multiply(model, 1 / total); optimizer.step()
        this clips before dividing: max_norm is meant for the norm of the mean.
    parameters(), max_norm) → parameters(), max_norm / len(micro_batches))
        this clips to max_norm / K: the gradient is that of one update, so it gets the whole
        max_norm.
    optimizer.step() → utils.clip_grad_value_(model.parameters(), max_norm); optimizer.step()
    utils.clip_grad_norm_(model.parameters(), max_norm) → gradients_of(model).norm()
        this clips each number by itself, which changes the gradient's direction: clip its norm.
    optimizer.step() → utils.clip_grad_norm_(model[0].weight, max_norm); optimizer.step()
    optimizer.step() → utils.clip_grad_norm_(model[1].weight, max_norm); optimizer.step()
    utils.clip_grad_norm_(model.parameters(), max_norm) → gradients_of(model).norm()
        each parameter is clipped by its own norm: use one norm, that of all parameters together.
    optimizer.zero_grad() →
        the first update is right and a second one repeats its gradient: zero_grad() is missing.
    """,
    pairs=True,
)

# 3.7


def train_64(model, optimizer, batch, loss_and_count) -> float:
    """One update on all rows of ``batch``, in micro-batches that fit; the mean loss over all
    tokens.
    """
    pieces = list(split(batch, 8))
    total = sum(count_targets(piece["labels"]) for piece in pieces)
    mean = 0.0
    for piece in pieces:
        loss, _ = loss_and_count(piece)
        (loss / total).backward()
        mean += loss.item() / total
    optimizer.step()
    optimizer.zero_grad()
    return mean


CARD = "8 MiB"


def batch_setting() -> tuple:
    """Exercise 3.7's tiny Llama, its optimizer and a batch of 64 sequences of unequal lengths."""
    model = tiny_llama(1, 1024)
    lengths = [2 + i * i % 31 for i in range(64)]
    return model, adamw(model, lr=0.01), text_batch(*lengths, vocab=1024)


def card_cases(answer):
    def run(model, optimizer):
        return answer(model, optimizer, batch, partial(next_token_loss, model))

    model, _, batch = batch_setting()
    with_large_gradients(model.lm_head, 100)  # longer than what people clip to
    optimizer = sgd(model, 1e-4)
    updates = gradients_of_updates(model, optimizer)
    loss = run(model, optimizer)
    yield "updates by the given optimizer", len(updates)
    yield "the gradient of the update", updates[:]
    yield "the mean loss over all tokens", loss
    run(model, optimizer)
    yield "the gradient of a second update, without that of the first", updates[1:]
    model, optimizer, _ = batch_setting()
    update = measured(lambda: run(model, optimizer), CARD, model=model, optimizer=optimizer)
    yield f"the peak on a card of {CARD}", update


ON_THE_CARD = Exercise(
    "3.7",
    train_64,
    card_cases,
    """
    split(batch, 8) → split(batch, 64)
        all 64 sequences go through at once: that is the batch that does not fit.
    split(batch, 8) → split(batch, 16)
        the micro-batch has 16 sequences, and 16 are too many for this card.
    mean = 0.0 → mean = whole = 0.0
    (loss / total).backward() → whole = whole + loss / total
    optimizer.step() → whole.backward(); optimizer.step()
        one backward at the end keeps every micro-batch's graph until then: that is the full batch
        again.
    mean = 0.0 → mean, kept = 0.0, []
    (loss / total).backward() → (loss / total).backward(retain_graph=True); kept.append(loss)
        retain_graph=True and a list of losses keep every graph alive: keep loss.item().
    loss, _ → loss, count
    (loss / total) → (loss / count / len(pieces))
    loss.item() / total → loss.item() / count / len(pieces)
        it fits, but dividing by K weights the sequences wrongly: their lengths differ, so divide by
        the tokens of all 64.
    loss, _ → loss, count
    optimizer.step() →
    (loss / total).backward() → (loss / count).backward(); optimizer.step(); optimizer.zero_grad() #
        it fits, but it makes eight updates: the exercise asks for one.
    optimizer.zero_grad() →
        the first update is right and a second one repeats its gradient: zero_grad() is missing.
    list(split(batch, 8)) → split(batch, 8)
        nothing is trained: what `split` returns can be read only once, and counting has read it.
        Make a list of it.
    """,
    tolerance=1e-4,
)

# 3.8


def mended(model, batch):
    """``model``, told to ``Trainer`` as what it is: one that heeds the number of items, or one that
    does not.
    """
    training = model.training
    model.eval()
    few = model(**batch, num_items_in_batch=torch.tensor(1)).loss.item()
    many = model(**batch, num_items_in_batch=torch.tensor(1000)).loss.item()
    model.train(training)
    if few == many:
        model.accepts_loss_kwargs = False
    return model


class PlainMean:
    """A model whose loss does not heed the number of items."""

    def forward(self, num_items_in_batch=None, **given):
        return super().forward(**given)  # type: ignore[misc]


# The kind of model, and what its class begins with. The last one has a language model's head, too.
MODELS = {
    "a BERT classifier": ("BertForSequenceClassification", ()),
    "a causal Llama": ("LlamaForCausalLM", ()),
    "a causal Llama whose loss is a plain mean": ("LlamaForCausalLM", (PlainMean,)),
}


def set_dropout(model, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p


@quietly
def trainer_cases(answer):
    from transformers import default_data_collator

    for name, (kind, bases) in MODELS.items():
        model, examples = trainer_setting(kind)
        batch = default_data_collator(examples)
        right = one_batch(trainer_setting(kind)[0], batch)
        # a class whose name tells nothing
        model.__class__ = type("Tiny", (*bases, type(model)), {})
        set_dropout(model, 0.1)
        fixed = answer(model, batch)
        on_the_class = "accepts_loss_kwargs" in vars(type(model))
        yield f"{name}, whether the attribute is set on its class, for all models", on_the_class
        set_dropout(fixed, 0.0)
        fixed.zero_grad()
        logged = trainer_logs(fixed, examples, 4)
        for what in ("loss", "grad_norm"):
            words = f"{name}, the {what} that Trainer logs in 4 steps, over that of one batch"
            yield words, logged[what] / right[what]


TRAINER = Exercise(
    "3.8",
    mended,
    trainer_cases,
    """
    if few == many: → if False:
        the classifier's loss and gradient are still multiplied by the 4 accumulation steps.
    if few == many: → if True:
        the classifier is now right, but the language model is wrong, because it does use the number
        of items: ask each model itself, because neither its name nor its signature says so.
    if few == many: → if few != many:
        accepts_loss_kwargs is set on the wrong models: set it to False where the number makes no
        difference.
    if few == many: → if "num_items" not in str(__import__("inspect").signature(model.forward)):
        the signature does not say it: a model may take the number in **kwargs and use it, or have
        the argument and ignore it. Compare its losses for two numbers.
    if few == many: → if not hasattr(model, "lm_head"):
        a model with a language model's head may ignore the number too: compare its losses for two
        numbers.
    model.eval() →
        a classifier with dropout is judged wrongly: in training mode dropout makes any two losses
        differ, so ask it in eval mode.
    """,
    # Trainer puts it into training mode itself; a classifier's forward writes into its config
    changes="model.mode model.config",
    tolerance=1e-4,
)

# 3.9

PIECE = 3


def fair_error(model, batch, accumulate) -> float:
    """The relative error of the gradient of ``batch`` in pieces of 3 rows, with all layers in
    evaluation mode.

    Afterwards each module is in the mode in which it was, and no gradient is left.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    gradients = []
    for pieces in ([batch], list(split(batch, PIECE))):
        model.zero_grad(set_to_none=True)
        accumulate(pieces)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    for module, mode in modes.items():
        module.training = mode
    once, cut = gradients
    return ((cut - once).norm() / once.norm()).item()


def of_each_row(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="sum")


def of_a_piece(outputs, labels):
    return (outputs - outputs.mean(dim=0)).square().sum()


def fair_cases(answer):
    for name, n, loss in (
        ("a loss of each row", 12, of_each_row),
        ("a loss that compares the rows of a piece", 17, of_a_piece),
    ):
        model = residual_net(dtype=torch.float64)
        model.blocks[0].eval()  # it was so before, and has to stay so
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.01)

        def accumulate(pieces, loss=loss, n=n, model=model):
            for piece in pieces:
                (loss(model(piece["x"]), piece["labels"]) / n).backward()

        error = answer(model, labelled_rows(n, dtype=torch.float64), accumulate)
        name = f"{n} rows with {name}"
        yield f"{name}: the error", round(float(error), 6)
        trained = sum(module.training for module in model.modules())
        yield f"{name}: modules in training mode afterwards", trained
        yield f"{name}: whether a gradient is left", bool(gradients_of(model).any())


FAIR = Exercise(
    "3.9",
    fair_error,
    fair_cases,
    """
    model.eval() →
        dropout and drop path draw other numbers in each forward, so even a right loop is off:
        switch these layers off for the comparison, by model.eval().
    module.training = mode → model.train()
        the model is not as it was: note `training` of each module before model.eval(), and set it
        again, since a block that was in evaluation mode has to stay there.
    model.zero_grad(set_to_none=True) → if not gradients: model.zero_grad()
        the second gradient is added to the first one: call zero_grad between the two measurements.
    / once.norm() →
        this is the length of the difference: divide it by the length of the full batch's gradient.
    (cut - once).norm() / once.norm() → (cut.norm() / once.norm() - 1).abs()
        this compares the lengths of the two gradients: two of the same length may point elsewhere,
        so take the length of their difference.
    / once.norm() → / cut.norm()
        this divides by the length of the gradient in pieces: divide by that of the full batch's.
    / once.norm()) → / once.norm()).square()
        this is the square of the error: a length is the root of the sum of the squares.
    split(batch, PIECE) → [batch]
        the batch is not cut: the second gradient must be that of pieces of 3 rows.
    """,
    changes="model.mode",  # a case of its own
)
