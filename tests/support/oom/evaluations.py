"""Evaluations, generation, and what they leave in a training.

Each program returns its tracker, and does with ``remedied=True`` what the diagnosis tells it to.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from support.oom import (
    COLLECTED,
    EVALUATION,
    GENERATION,
    IN_EACH_STEP,
    SECOND,
    STAYS,
    Net,
    adamw,
    has,
    llama,
    rows,
    sgd,
    stepped,
    trained,
    trains,
    updated,
)
from torch import nn

from gradmem_lib import MemoryTracker


@has(COLLECTED)
def logits_in_a_list(remedied=False):
    model, ids, results = llama(), rows(), []
    with MemoryTracker(model) as tracker, torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=ids, use_cache=False).logits
            results.append(logits.argmax(-1).tolist() if remedied else logits)
    return tracker


@has(COLLECTED)
def logits_in_one_tensor(remedied=False):
    model, ids, gathered = llama(), rows(), None
    with MemoryTracker(model) as tracker, torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=ids, use_cache=False).logits
            logits = logits.argmax(-1) if remedied else logits
            gathered = logits if gathered is None else torch.cat([gathered, logits])
    return tracker


@has(EVALUATION)
def larger_validation(remedied=False, each=4):
    """After every fourth step."""
    net, x = Net(), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        if i % each == each - 1:
            with torch.no_grad():
                for part in torch.randn(1024, 64).split(64 if remedied else 512):
                    net(part).square().mean()

    return trained(net, optimizer, step, steps=2 * each)


@has(IN_EACH_STEP)
def validation_in_each_step(remedied=False):
    """Its calls look like those of a teacher."""
    return larger_validation(remedied, each=1)


@has(IN_EACH_STEP, SECOND)
def teacher_in_each_step(remedied=False):
    """The remedy: micro-batches, for the teacher too."""
    student, teacher, x = Net(16), Net().requires_grad_(False), torch.randn(2048, 64)
    optimizer = sgd(student)

    def step(i):
        for part in x.split(256 if remedied else 2048):
            with torch.no_grad():
                wanted = teacher(part).softmax(-1)
            loss = (student(part).softmax(-1) - wanted).square().sum() / len(x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(student, optimizer, step, steps=3)


@has(EVALUATION, SECOND)
def teacher_of_the_whole_batch():
    """It does not run between two micro-batches."""
    student, teacher, x = Net(16), Net().requires_grad_(False), torch.randn(2048, 64)
    optimizer = sgd(student)

    def step(i):
        with torch.no_grad():
            wanted = teacher(x)
        for part, targets in zip(x.chunk(4), wanted.chunk(4), strict=True):
            F.mse_loss(student(part), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(student, optimizer, step, steps=6)


@has(EVALUATION)
def chain_of_forwards_after_each_step():
    """More than two in a row are a generation, or a validation's loop."""
    net = Net()
    optimizer = sgd(net)

    def step(i):
        stepped(net(torch.randn(8, 64)).square().mean(), optimizer)
        with torch.no_grad():
            x = torch.randn(2048, 64)
            for _ in range(3):
                x = net(x)

    return trained(net, optimizer, step, steps=6)


@has(GENERATION, EVALUATION)
def generation(remedied=False):
    model = llama(vocab=256)
    ids = rows(8 if remedied else 32, 8, 256)
    with MemoryTracker(model) as tracker:
        model.eval().generate(
            ids, max_new_tokens=40, min_new_tokens=40, use_cache=True, pad_token_id=0
        )
    return tracker


@has(SECOND, IN_EACH_STEP)
def teachers_in_a_list():
    """Three forwards without gradients, each of another module, whose results are averaged."""
    teachers, student, x = [Net(512) for _ in range(3)], Net(32), torch.randn(256, 64)

    def loss(i):
        with torch.no_grad():
            expected = torch.stack([teacher(x).softmax(-1) for teacher in teachers]).mean(0)
        return F.mse_loss(student(x), expected)

    return trains(student, loss, adamw)


@has(STAYS, line="features = net(", says="outputs.cpu()")
def feature_bank(remedied=False):
    """Features of all training rows for a nearest-neighbour evaluation, which stay in memory."""
    net = Net(64)
    optimizer = sgd(net)
    bank = []

    def epoch(i):
        with torch.no_grad():
            for _ in range(16):
                features = net(torch.randn(256, 64))
                bank.append(features.tolist() if remedied else features)
        for _ in range(2):
            updated(net(torch.randn(256, 64)).square().mean(), optimizer)

    return trained(net, optimizer, epoch, steps=1)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n: int):
        self.ids = rows(n, 16, 512)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def evaluation_of_a_trainer(remedied="", batch=2):
    """Metrics of all logits. ``remedied``: by which of the arguments."""
    from transformers import Trainer, TrainingArguments

    arguments = {
        "eval_accumulation_steps": {"eval_accumulation_steps": 1},
        "prediction_loss_only": {"prediction_loss_only": True},
    }
    keep_less = None
    if remedied == "preprocess_logits_for_metrics":

        def keep_less(logits, labels):
            return logits.argmax(-1)

    model = llama(layers=1, hidden=16, intermediate=16, vocab=512)
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                per_device_eval_batch_size=batch,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                **arguments.get(remedied, {}),
            ),
            eval_dataset=Rows(24),
            compute_metrics=lambda found: {"n": float(len(found.predictions))},
            preprocess_logits_for_metrics=keep_less,
        )
        trainer.log = lambda *given, **named: None
        with MemoryTracker(model) as tracker:
            trainer.evaluate()
    return tracker


class Attends(nn.Module):
    """Keys and values of all tokens so far, for each beam."""

    def __init__(self):
        super().__init__()
        self.project, self.cache = nn.Linear(64, 128), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.project(x)
        self.cache = new if self.cache is None else torch.cat([self.cache, new], dim=1)
        keys, values = self.cache.split(64, dim=-1)
        return F.scaled_dot_product_attention(x, keys, values)

    def reorder(self, beams: torch.Tensor) -> None:
        self.cache = self.cache[beams]


@has(GENERATION)
def beams(remedied=False):
    net, n = Attends(), 4 if remedied else 32
    with MemoryTracker(net) as tracker, torch.no_grad():
        x = torch.randn(n, 1, 64)
        for _ in range(40):
            x = net(x)
            net.reorder(torch.arange(n).roll(1))
    return tracker
