"""Lesson 03's exercises: windows and their items, the right divisor, the whole loop, clipping, a budget, and Trainer."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Iterable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ...techniques.accumulation import split
from ...techniques.losses import next_token_loss
from ..exercise import Exercise, Mistake, calls, measure

IGNORED = -100


class Bigrams(nn.Module):
    """The smallest language model: the next token from this one. Ids (batch, sequence) to logits, in float64."""

    def __init__(self, vocab: int = 11, hidden: int = 4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocab, hidden, generator=generator, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(hidden, vocab, generator=generator, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids] @ self.head


def bigram_loss(model: Bigrams):
    """``loss_and_count`` for token ids whose padding is -100: (summed loss, predicted tokens)."""

    def loss_and_count(labels):
        logits, targets = model(labels.clamp(min=0))[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, int((targets != IGNORED).sum())

    return loss_and_count


def rows(*lengths: int, seed: int = 0, vocab: int = 11) -> torch.Tensor:
    """Token ids (batch, longest) of sequences of these lengths, with -100 where a sequence has ended."""
    ids = torch.randint(0, vocab, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], IGNORED)


EQUAL = (rows(6, 6), rows(6, 6, seed=1), rows(6, 6, seed=2))
UNEQUAL = (rows(2), rows(9, 3, seed=1), rows(12, 12, seed=2), rows(5, seed=3))
WITH_EMPTY = (rows(4), torch.full((1, 5), IGNORED), rows(7, seed=1))


def _flat(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat(
        [torch.zeros(0, dtype=torch.float64) if t is None else t.detach().flatten() for t in tensors]
    )


def plan_window(tokens_per_update: int, micro_batch: int, seq_len: int, gpus: int) -> tuple[int, int]:
    """Micro-batches that each GPU needs for at least ``tokens_per_update``, and the tokens that makes."""
    at_once = micro_batch * seq_len * gpus
    steps = math.ceil(tokens_per_update / at_once)
    return steps, steps * at_once


def _window(steps=math.ceil, *, tokens=None, batch=True, length=True, cards=True):
    def wrong(tokens_per_update, micro_batch, seq_len, gpus):
        at_once = micro_batch**batch * seq_len**length * gpus**cards
        k = steps(tokens_per_update / at_once)
        return k, tokens_per_update if tokens == "asked for" else k * at_once

    return wrong


def count_targets(labels: torch.Tensor) -> int:
    """How many tokens a causal language model predicts, for labels (batch, sequence) in which -100 is to be ignored."""
    return int((labels[:, 1:] != IGNORED).sum())


def _observe_count(candidate):
    prompt = rows(8, 8)
    prompt[:, :3] = IGNORED
    zeros = rows(6, 4)
    zeros[0, 2] = zeros[1, 1] = 0
    cases = {
        "sequences of 5, 3 and 8 tokens": rows(5, 3, 8),
        "a prompt that is not trained on": prompt,
        "padding on the left": rows(5, 3).flip(1),
        "a real token with id 0": zeros,
        "nothing but padding": torch.full((2, 4), IGNORED),
    }
    return {name: candidate(labels) for name, labels in cases.items()}


def accumulate(micro_batches, loss_and_count) -> float:
    """Leave the gradient of the mean loss over all tokens of a list of micro-batches; return that mean."""
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
        mean += loss.item() / total
    return mean


def _accumulates(backward, report=None):
    """A wrong ``accumulate``: what it calls backward on, and what it returns, from (loss, count, K, total, losses, counts)."""

    def wrong(micro_batches, loss_and_count):
        pairs = [loss_and_count(micro) for micro in micro_batches]
        losses, counts = [loss.item() for loss, _ in pairs], [count for _, count in pairs]
        for loss, count in pairs:
            backward(loss, count, len(pairs), sum(counts)).backward()
        return (report or _mean_over_items)(losses, counts)

    return wrong


def _mean_over_items(losses, counts):
    return sum(losses) / sum(counts)


def _each_mean(losses, counts):
    return [loss / count if count else math.nan for loss, count in zip(losses, counts, strict=True)]


def _mean_of_means(losses, counts):
    return sum(_each_mean(losses, counts)) / len(losses)


def _mean_times_count(losses, counts):
    return sum(m * c for m, c in zip(_each_mean(losses, counts), counts, strict=True)) / sum(counts)


def _observe_accumulate(candidate):
    found = {}
    for name, micro_batches in {
        "micro-batches of equal counts": EQUAL,
        "micro-batches of unequal counts": UNEQUAL,
        "one micro-batch without a label": WITH_EMPTY,
    }.items():
        model = Bigrams()
        loss = candidate(list(micro_batches), bigram_loss(model))
        found[name] = {"gradient": _flat(p.grad for p in model.parameters()), "loss": loss}
    return found


def train(model, optimizer, micro_batches, window, loss_and_count) -> list[float]:
    """An update after every ``window`` micro-batches and one for what is left; each update's mean loss."""
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        losses.append(accumulate(held, loss_and_count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _trains(
    *, per_micro=lambda optimizer: None, last=True, zero=True, scale=lambda held, window: 1.0, each=False
):
    def wrong(model, optimizer, micro_batches, window, loss_and_count):
        losses, rest = [], iter(micro_batches)
        while held := list(islice(rest, window)):
            if len(held) < window and not last:
                break
            total = sum(loss_and_count(micro)[1] for micro in held)
            mean = 0.0
            for micro in held:
                loss, count = loss_and_count(micro)
                (loss / (count if each else total) * scale(held, window)).backward()
                mean += loss.item() / total
                per_micro(optimizer)
            if not each:
                optimizer.step()
            if zero:
                optimizer.zero_grad()
            losses.append(mean)
        return losses

    return wrong


def _step_and_zero(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def _zero_before(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        total = sum(loss_and_count(micro)[1] for micro in held)
        mean = 0.0
        for micro in held:
            optimizer.zero_grad()
            loss, _ = loss_and_count(micro)
            (loss / total).backward()
            mean += loss.item() / total
        optimizer.step()
        losses.append(mean)
    return losses


def _by_k(model, optimizer, micro_batches, window, loss_and_count):
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        means = []
        for micro in held:
            loss, count = loss_and_count(micro)
            (loss / count / len(held)).backward()
            means.append(loss.item() / count)
        _step_and_zero(optimizer)
        losses.append(sum(means) / len(means))
    return losses


def _one_early(model, optimizer, micro_batches, window, loss_and_count):
    losses, held = [], []
    for i, micro in enumerate(micro_batches):
        held.append(micro)
        if i % window == 0:
            losses.append(accumulate(held, loss_and_count))
            _step_and_zero(optimizer)
            held = []
    if held:
        losses.append(accumulate(held, loss_and_count))
        _step_and_zero(optimizer)
    return losses


def _observe_train(candidate):
    found = {}
    for name, lengths, window in (
        ("6 micro-batches in windows of 3", ((2,), (9, 3), (12, 12), (5,), (4, 4), (7,)), 3),
        ("7 micro-batches in windows of 3", ((2,), (9, 3), (12, 12), (5,), (4, 4), (7,), (6, 2)), 3),
        ("5 micro-batches in windows of 2", ((6,), (3,), (8,), (5,), (4,)), 2),
    ):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        micro_batches = (rows(*each, seed=seed) for seed, each in enumerate(lengths))
        losses = candidate(model, optimizer, micro_batches, window, bigram_loss(model))
        found[name] = {"losses": losses, "weights": _flat(model.parameters())}
    return found


def window_loss(means: list[float], counts: list[int]) -> float:
    """The mean loss of a window's items, from each micro-batch's mean loss and its number of items."""
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


def clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm) -> float:
    """One update on a list of micro-batches, its gradient clipped to ``max_norm``; the norm before clipping."""
    accumulate(micro_batches, loss_and_count)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    _step_and_zero(optimizer)
    return norm.item()


def _clips_inside(model, optimizer, micro_batches, loss_and_count, max_norm):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()
        norm = clip_grad_norm_(model.parameters(), max_norm)
    _step_and_zero(optimizer)
    return norm.item()


def _clips_each(model, optimizer, micro_batches, loss_and_count, max_norm):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for micro in micro_batches:
        (loss_and_count(micro)[0] / total).backward()
        norm = clip_grad_norm_(model.parameters(), max_norm)
        for held, parameter in zip(kept, model.parameters(), strict=True):
            held += parameter.grad
        optimizer.zero_grad()
    for held, parameter in zip(kept, model.parameters(), strict=True):
        parameter.grad = held
    _step_and_zero(optimizer)
    return norm.item()


def _clips_too_late(model, optimizer, micro_batches, loss_and_count, max_norm):
    accumulate(micro_batches, loss_and_count)
    optimizer.step()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()
    return norm.item()


def _clips_the_sum(model, optimizer, micro_batches, loss_and_count, max_norm):
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    for micro in micro_batches:
        loss_and_count(micro)[0].backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    for parameter in model.parameters():
        parameter.grad /= total
    _step_and_zero(optimizer)
    return norm.item()


def _clips_to_a_part(model, optimizer, micro_batches, loss_and_count, max_norm):
    return clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm / len(micro_batches))


def _clips_values(model, optimizer, micro_batches, loss_and_count, max_norm):
    accumulate(micro_batches, loss_and_count)
    norm = _flat(p.grad for p in model.parameters()).norm()
    clip_grad_value_(model.parameters(), max_norm)
    _step_and_zero(optimizer)
    return norm.item()


def _observe_clip(candidate):
    found = {}
    for name, max_norm in (("a norm that is too large", 0.1), ("a norm that is small enough", 100.0)):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        norm = candidate(model, optimizer, list(UNEQUAL), bigram_loss(model), max_norm)
        found[name] = {"weights": _flat(model.parameters()), "norm": norm}
    return found


CARD = "8 MiB"
BATCH_SETTING = dict(layers=1, hidden=64, heads=4, intermediate=172, vocab=1024)


def batch_setting():
    """A tiny Llama, its optimizer and a batch of 64 sequences of unequal lengths, made afresh."""
    from ..models import tiny_llama

    model = tiny_llama(**BATCH_SETTING)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    lengths = (2 + i * i % 31 for i in range(64))
    labels = rows(*lengths, vocab=BATCH_SETTING["vocab"])
    mask = (labels != IGNORED).long()
    return model, optimizer, {"input_ids": labels.clamp(min=0), "attention_mask": mask, "labels": labels}


def train_64(model, optimizer, batch, loss_and_count) -> float:
    """One update on all rows of ``batch``, in micro-batches that fit; the mean loss over all tokens."""
    loss = accumulate(list(split(batch, 8)), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _updates(size, accumulate=accumulate):
    def wrong(model, optimizer, batch, loss_and_count):
        loss = accumulate(list(split(batch, size)), loss_and_count)
        _step_and_zero(optimizer)
        return loss

    return wrong


def _one_backward(micro_batches, loss_and_count):
    pairs = [loss_and_count(micro) for micro in micro_batches]
    loss = sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
    loss.backward()
    return loss.item()


def _retains_every_graph(micro_batches, loss_and_count):
    total, losses = sum(int((m["labels"][:, 1:] != IGNORED).sum()) for m in micro_batches), []
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward(retain_graph=True)
        losses.append(loss)
    return sum(loss.item() for loss in losses) / total


def _mean_by_k(micro_batches, loss_and_count):
    means = []
    for micro in micro_batches:
        loss, count = loss_and_count(micro)
        (loss / count / len(micro_batches)).backward()
        means.append(loss.item() / count)
    return sum(means) / len(means)


def _steps_each(model, optimizer, batch, loss_and_count):
    loss_sum = items = 0
    for micro in split(batch, 8):
        loss, count = loss_and_count(micro)
        (loss / count).backward()
        _step_and_zero(optimizer)
        loss_sum, items = loss_sum + loss.item(), items + count
    return loss_sum / items


def _only_eight(model, optimizer, batch, loss_and_count):
    return train_64(model, optimizer, {name: tensor[:8] for name, tensor in batch.items()}, loss_and_count)


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


TINY = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def trainer_setting(kind: str):
    """A tiny model and four training examples: ``"BertForSequenceClassification"``, ``"LlamaForSequenceClassification"``
    or ``"LlamaForCausalLM"``, whose examples have 4, 6, 10 and 16 tokens."""
    import transformers

    config = transformers.BertConfig(**TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if kind.startswith("Llama"):
        config = transformers.LlamaConfig(**TINY, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
    ids = torch.randint(1, 100, (4, 16), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(ids)]
    if kind.endswith("ForCausalLM"):
        examples = [
            {"input_ids": row, "labels": row.masked_fill(torch.arange(16) >= n, IGNORED)}
            for row, n in zip(ids, (4, 6, 10, 16), strict=True)
        ]
    return model, examples


def trainer_logs(model, examples, accumulation_steps: int) -> dict[str, float]:
    """What Hugging Face's ``Trainer`` logs, ``loss`` and ``grad_norm``, in its one update on four examples."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        torch.random.fork_rng(devices=[]),  # Trainer seeds the global generator
    ):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(examples) // accumulation_steps,
            gradient_accumulation_steps=accumulation_steps,
            num_train_epochs=1,
            max_grad_norm=1e9,  # it logs the norm, and clips nothing
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=examples, data_collator=default_data_collator
        )
        trainer.train()
    return {name: trainer.state.log_history[0][name] for name in ("loss", "grad_norm")}


def one_batch(model, batch) -> dict[str, float]:
    """``loss`` and ``grad_norm`` of one batch, with nothing between the model and autograd."""
    loss = model(**batch).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return {"loss": loss.item(), "grad_norm": norm.item()}


def mended(model, batch):
    """``model``, told to ``Trainer`` as what it is: one that heeds the number of items, or one that does not."""
    few, many = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 1000))
    if few == many:
        model.accepts_loss_kwargs = False
    return model


def _unchanged(model, batch):
    return model


def _every_model(model, batch):
    model.accepts_loss_kwargs = False
    return model


def _true(model, batch):
    few, many = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 1000))
    model.accepts_loss_kwargs = few == many
    return model


def _one_in_four(model, batch):
    few, many = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 1000))
    if few == many:
        for parameter in model.parameters():
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
        id="3.1",
        title="from tokens per update to micro-batches",
        difficulty=1,
        minutes=4,
        trains="micro-batch, accumulation and GPUs, with remainders",
        reference=plan_window,
        observe=calls(
            (524288, 4, 2048, 1), (524288, 4, 2048, 8), (500000, 4, 2048, 1), (524288, 8, 1000, 3), (1000, 4, 2048, 1)
        ),
        mistakes=(
            Mistake("rounds down", _window(math.floor),
                    "this rounds down, and the update gets fewer tokens than asked for: whatever is left needs a micro-batch too."),
            Mistake("one more", _window(lambda n: math.floor(n) + 1),
                    "this adds a micro-batch even where the division comes out even: round up only when something is left."),
            Mistake("rounds", _window(round),
                    "this rounds to the nearest, which is down as often as up: at least the tokens asked for means up."),
            Mistake("without the GPUs", _window(cards=False),
                    "this forgets the GPUs: each of them works on a micro-batch of its own at the same time."),
            Mistake("sequences", _window(length=False),
                    "this counts sequences: a micro-batch has micro_batch times seq_len tokens."),
            Mistake("one sequence", _window(batch=False),
                    "this takes micro-batches of one sequence: multiply by micro_batch."),
            Mistake("asked for", _window(tokens="asked for"),
                    "the steps are right; the tokens are those asked for, not those that so many whole micro-batches make."),
        ),
    ),
    Exercise(
        id="3.2",
        title="what counts as an item",
        difficulty=1,
        minutes=5,
        trains="padding, -100 and the causal shift",
        reference=count_targets,
        observe=_observe_count,
        mistakes=(
            Mistake("everything", lambda labels: labels.numel(),
                    "this counts padding: a label of -100 adds nothing to the loss."),
            Mistake("everything but the first", lambda labels: labels[:, 1:].numel(),
                    "this counts padding, if only after the shift: a label of -100 adds nothing to the loss."),
            Mistake("position 0", lambda labels: int((labels != IGNORED).sum()),
                    "this counts position 0: nothing comes before the first token, so nothing predicts it."),
            Mistake("the last dropped", lambda labels: int((labels[:, :-1] != IGNORED).sum()),
                    "this drops the last label and keeps the first: logits lose their last position, labels their first."),
            Mistake("sequence by sequence", lambda labels: int((labels != IGNORED).sum()) - len(labels),
                    "this takes one off for every sequence: one whose first label is -100 anyway loses a real one."),
            Mistake("id 0 is padding", lambda labels: int((labels[:, 1:] > 0).sum()),
                    "this takes token 0 for padding: it is a token like any other, and -100 alone is ignored."),
            Mistake("the ignored ones", lambda labels: int((labels[:, 1:] == IGNORED).sum()),
                    "this counts the labels that are ignored: turn the comparison around."),
            Mistake("sequences", lambda labels: len(labels),
                    "this counts sequences: a language model's items are the tokens that it predicts."),
        ),
    ),
    Exercise(
        id="3.3",
        title="the right divisor",
        difficulty=2,
        minutes=8,
        trains="the gradient of a mean, taken piece by piece",
        reference=accumulate,
        observe=_observe_accumulate,
        mistakes=(
            Mistake("no division", _accumulates(lambda loss, count, k, total: loss),
                    "no division: this is the gradient of the sum, as many times too large as there are tokens."),
            Mistake("sum of means", _accumulates(lambda loss, count, k, total: loss / count, lambda ls, cs: sum(_each_mean(ls, cs))),
                    "this adds up the means of the micro-batches: with K of them the result is about K times too large."),
            Mistake("each by its count", _accumulates(lambda loss, count, k, total: loss / count),
                    "each micro-batch is divided by its own count, so the gradients of K means are added: divide by the whole window's."),
            Mistake("by K", _accumulates(lambda loss, count, k, total: loss / count / k, _mean_of_means),
                    "dividing by K gives every micro-batch the same weight: a token of a short one then counts more than one of a long one."),
            Mistake("by K, logged right", _accumulates(lambda loss, count, k, total: loss / count / k),
                    "the loss is right, and the gradient is divided by K: it needs the tokens of the window, like the loss."),
            Mistake("sum by K", _accumulates(lambda loss, count, k, total: loss / k),
                    "the summed loss is divided by K, the number of micro-batches: divide by the number of tokens."),
            Mistake("logged unweighted", _accumulates(lambda loss, count, k, total: loss / total, _mean_of_means),
                    "the gradient is right; the loss is an unweighted average of the micro-batches' means."),
            Mistake("logged last", _accumulates(lambda loss, count, k, total: loss / total, lambda ls, cs: ls[-1] / cs[-1]),
                    "the gradient is right; the loss is the last micro-batch's alone."),
            Mistake("logged sum", _accumulates(lambda loss, count, k, total: loss / total, lambda ls, cs: sum(ls)),
                    "the gradient is right; the loss is the sum: divide it by the tokens too."),
            Mistake("mean times count", _accumulates(lambda loss, count, k, total: loss / total, _mean_times_count),
                    "a micro-batch without labels has 0 / 0 for a mean, and times 0 that is still not a number: stay with the sum."),
        ),
    ),
    Exercise(
        id="3.4",
        title="the whole loop, and what is left at its end",
        difficulty=2,
        minutes=8,
        trains="when to step, when to zero, and the last incomplete window",
        reference=train,
        observe=_observe_train,
        mistakes=(
            Mistake("zeroes inside", _zero_before,
                    "this zeroes the gradients inside the window: only the last micro-batch's survive."),
            Mistake("zeroes after each backward", _trains(per_micro=lambda optimizer: optimizer.zero_grad()),
                    "this zeroes the gradients after every backward: nothing is left for the step, and the weights stay as they are."),
            Mistake("steps every micro-batch", _trains(per_micro=_step_and_zero, each=True),
                    "this steps after every micro-batch: that trains with small batches and accumulates nothing."),
            Mistake("steps and keeps", _trains(per_micro=lambda optimizer: optimizer.step()),
                    "this steps inside the window: the weights change between micro-batches that belong to one update."),
            Mistake("drops the last", _trains(last=False),
                    "this drops the last window when it is not full: its micro-batches were read and taught nothing."),
            Mistake("last one by the full window", _trains(scale=lambda held, window: len(held) / window),
                    "the last window is divided as if it were full: with fewer micro-batches its gradient comes out too small."),
            Mistake("never zeroes", _trains(zero=False),
                    "without zero_grad between windows, every update repeats the gradients of all those before it."),
            Mistake("one early", _one_early,
                    "this steps one micro-batch early (i % window == 0 is true for i = 0): the first window has one micro-batch."),
            Mistake("by K", _by_k,
                    "the windows are right; inside them every micro-batch has the same weight, however many tokens it has."),
        ),
    ),
    Exercise(
        id="3.5",
        title="the loss to log",
        difficulty=1,
        minutes=3,
        trains="weighting what is logged as what is trained",
        reference=window_loss,
        observe=calls(([2.0, 4.0], [10, 30]), ([3.0, 1.0, 2.5], [5, 0, 20]), ([2.5, 3.5], [8, 8])),
        mistakes=(
            Mistake("unweighted", lambda means, counts: sum(means) / len(means),
                    "this averages the means without weights: a micro-batch with few tokens counts as much as one with many."),
            Mistake("after dividing", lambda means, counts: sum(means) / len(means) ** 2,
                    "this logs after dividing by K and then averages: K times too small. Log before dividing, or add up after."),
            Mistake("the last", lambda means, counts: means[-1], "this logs the last micro-batch alone."),
            Mistake("the sum", lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)),
                    "this is the sum over all items: divide it by their number."),
            Mistake("added up", lambda means, counts: sum(means), "this adds up means: K times too large."),
            Mistake("by K", lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)) / len(means),
                    "the sum over all items is divided by K: divide it by the number of items."),
        ),
    ),
    Exercise(
        id="3.6",
        title="clipping, in its place",
        difficulty=2,
        minutes=5,
        trains="clipping the gradient of the update, not its parts",
        reference=clipped_update,
        observe=_observe_clip,
        mistakes=(
            Mistake("inside", _clips_inside,
                    "this clips inside the window: what has been gathered is cut again and again, and early micro-batches lose most."),
            Mistake("each", _clips_each,
                    "this clips each micro-batch by itself: their sum is not the clipped gradient, and can be longer than max_norm."),
            Mistake("too late", _clips_too_late,
                    "the update used the gradient as it was: clip after the last backward and before the step."),
            Mistake("the sum", _clips_the_sum,
                    "this clips before dividing: it is the mean's norm that max_norm is meant for."),
            Mistake("max_norm / K", _clips_to_a_part,
                    "this clips to max_norm / K: the gradient is that of one update, so it gets the whole max_norm."),
            Mistake("values", _clips_values,
                    "this clips each number by itself, which changes the gradient's direction: clip its norm."),
        ),
    ),
    Exercise(
        id="3.7",
        title="a batch of 64 where 16 do not fit",
        difficulty=3,
        minutes=10,
        trains="choosing a micro-batch by its bytes, and letting go of each graph",
        reference=train_64,
        observe=_observe_64,
        tolerance=1e-4,
        mistakes=(
            Mistake("all at once", _updates(64), "all 64 sequences go through at once: that is the batch that does not fit."),
            Mistake("micro-batches of 32", _updates(32), "the micro-batch has 32 sequences: cut it further."),
            Mistake("micro-batches of 16", _updates(16), "the micro-batch has 16 sequences, and 16 are too many for this card."),
            Mistake("one backward", _updates(8, _one_backward),
                    "one backward at the end keeps every micro-batch's graph until then: that is the full batch again."),
            Mistake("retains every graph", _updates(8, _retains_every_graph),
                    "retain_graph=True and a list of losses keep every graph alive: keep loss.item()."),
            Mistake("by K", _updates(8, _mean_by_k),
                    "it fits, and dividing by K weights the sequences wrongly: their lengths differ, so divide by the tokens of all 64."),
            Mistake("steps each", _steps_each, "it fits, and it makes eight updates: the exercise asks for one."),
            Mistake("only eight", _only_eight, "it fits, for this trains on 8 of the 64 sequences."),
        ),
    ),
    Exercise(
        id="3.8",
        title="mend a Trainer run",
        difficulty=2,
        minutes=6,
        trains="asking a model whether it heeds the number of items",
        reference=mended,
        observe=_observe_mended,
        tolerance=1e-4,
        mistakes=(
            Mistake("unchanged", _unchanged,
                    "the classifier's loss and gradient are still multiplied by the 4 accumulation steps."),
            Mistake("every model", _every_model,
                    "the classifier is mended and the language model is spoiled: it does heed the number of items, so leave it alone."),
            Mistake("True", _true,
                    "accepts_loss_kwargs is the wrong way round: False makes Trainer divide by the accumulation steps itself."),
            Mistake("a quarter of the gradient", _one_in_four,
                    "the gradient is right for 4 accumulation steps and no others, and the logged loss is still 4 times too large."),
        ),
    ),
)  # fmt: skip
