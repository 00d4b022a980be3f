"""More small programs that need more memory than they should: loops that copy gradients, keep what
they have computed, or differentiate twice.

As in ``oom_programs``, each returns its tracker, and does with ``remedied=True`` what the diagnosis
tells it to. Programs without this argument only look like one of the others.
"""

from __future__ import annotations

import copy
from collections import deque
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from support.oom_programs import Net, adamw, llama, rows, sgd
from support.oom_programs_around import trained
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker


def updated(loss, optimizer):
    """The rest of a step, in which no variable keeps its tensor."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Copies of gradients


def norm_of_all_gradients(remedied=False):
    """``remedied``: of one gradient after another."""
    net, x = Net(2048), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        gradients = [p.grad for p in net.parameters()]
        if remedied:
            torch.stack([gradient.norm() for gradient in gradients]).norm()
        else:
            torch.cat([gradient.flatten() for gradient in gradients]).norm()
        optimizer.step()

    return trained(net, optimizer, step, steps=3)


def gradients_of_all_tasks(remedied=False):
    """``remedied``: one running sum."""
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        kept = []
        for task in range(4):
            optimizer.zero_grad()
            net(x)[:, 16 * task : 16 * (task + 1)].square().mean().backward()
            gradients = [p.grad.clone() for p in net.parameters()]
            if remedied and kept:
                torch._foreach_add_(kept[0], gradients)
            else:
                kept.append(gradients)
        for parameter, *of_tasks in zip(net.parameters(), *kept, strict=True):
            parameter.grad.copy_(sum(of_tasks))
        optimizer.step()

    return trained(net, optimizer, step, steps=2)


def gradients_in_two_dtypes(remedied=False):
    """Weights in bf16, and float32 copies that the optimizer trains."""
    net, x = Net(2048).bfloat16(), torch.randn(16, 64).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, foreach=False)

    def step(i):
        net(x).float().square().mean().backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.float()
            if remedied:
                parameter.grad = None
        optimizer.step()
        net.zero_grad()
        optimizer.zero_grad()

    return trained(net, optimizer, step, steps=3)


def gradients_that_are_clipped():
    net, x = Net(1024), torch.randn(16, 64)
    optimizer = sgd(net)

    def step(i):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return trained(net, optimizer, step, steps=3)


def gradients_of_frozen_layers(remedied=False):
    """``remedied``: they go when the layers are frozen."""
    net, few, many = Net(2048), torch.randn(16, 64), torch.randn(256, 64)
    optimizer = sgd(net)
    with MemoryTracker(net, live=False) as tracker:
        updated(net(few).square().mean(), optimizer)
        net.body[0].requires_grad_(False)
        if remedied:
            net.zero_grad()
        optimizer = sgd(net.body[2])
        for _ in range(2):
            updated(net(many).square().mean(), optimizer)
    return tracker


# float64


def targets_in_float64(remedied=False):
    """Numbers of numpy, whose dtype is float64."""
    net, x = Net(64), torch.randn(512, 64)
    optimizer = sgd(net)

    def step(i):
        y = torch.rand(512, 64, dtype=torch.float64)
        if remedied:
            y = y.float()
        updated((net(x) - y).tanh().square().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


def all_in_float64():
    net, x = Net(64).double(), torch.randn(512, 64, dtype=torch.float64)
    optimizer = sgd(net)
    return trained(net, optimizer, lambda i: updated(net(x).square().mean(), optimizer), steps=2)


# Bytes that grow


class KeepsMasks(nn.Module):
    """Attention with a cache of masks, one for each length."""

    def __init__(self, remedied: bool):
        super().__init__()
        self.remedied, self.masks = remedied, {}
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[1]
        if tokens not in self.masks:
            if self.remedied:
                self.masks.clear()
            self.masks[tokens] = torch.full((1, tokens, tokens), -1e9).triu(1)
        q, k, v = self.project(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[tokens])


def masks_of_all_lengths(remedied=False):
    net = KeepsMasks(remedied)
    optimizer = sgd(net)

    def step(i):
        updated(net(torch.randn(2, 90 + 7 * i % 20, 16)).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=12)


def models_of_all_folds(remedied=False):
    """Cross-validation. No model is given, since each fold has its own."""
    kept, x = [], torch.randn(16, 64)
    with MemoryTracker(live=False) as tracker:
        for _ in range(4):
            net = Net(256)
            optimizer = adamw(net)
            for _ in range(2):
                updated(net(x).square().mean(), optimizer)
            if not remedied:
                kept.append((net, optimizer))
    return tracker


def errors_that_are_kept(remedied=False):
    """A large batch is tried, fails after its forward, and a smaller one follows."""
    net, errors = Net(), []
    optimizer = adamw(net)

    def run(n):
        out = net(torch.randn(n, 64))
        if n > 64:
            raise ValueError("too large")
        updated(out.square().mean(), optimizer)

    def step(i):
        for n in (256, 64):
            try:
                run(n)
            except ValueError as error:
                errors.append(str(error) if remedied else error)

    return trained(net, optimizer, step, steps=6)


def first_examples():
    """Outputs of the first three steps, for a picture at the end."""
    net, x, kept = Net(), torch.randn(256, 64), []
    optimizer = adamw(net)

    def step(i):
        out = net(x)
        if i < 3:
            kept.append(out.detach())
        updated(out.square().mean(), optimizer)

    return trained(net, optimizer, step, steps=12)


# Graphs


def targets_of_a_copy(remedied=False):
    """A copy of the network makes targets. Its graph is detached in the loss, and kept until then.

    ``remedied``: it has none.
    """
    net, x = Net(), torch.randn(512, 64)
    other = copy.deepcopy(net)
    optimizer = adamw(net)

    def step(i):
        with torch.set_grad_enabled(not remedied):
            target = other(x)
        updated(F.mse_loss(net(x), target.detach()), optimizer)

    return trained(net, optimizer, step, steps=2)


def queue_of_features():
    """The latest features, detached. The forwards that made them keep nothing else."""
    net, x, queue = Net(), torch.randn(128, 64), deque(maxlen=4)
    optimizer = sgd(net)

    def step(i):
        updated(net(x).square().mean(), optimizer)
        queue.append(net(x).detach())

    return trained(net, optimizer, step)


def rollouts_with_graph():
    """Log-probabilities of a rollout go into a buffer, and keep the graph of their forward."""
    policy, buffer = Net(), []
    optimizer = adamw(policy)

    def step(i):
        states = torch.randn(16, 64)
        for _ in range(4):
            buffer.append(policy(states).log_softmax(-1)[:, 0])
        updated(policy(states).square().mean(), optimizer)

    return trained(policy, optimizer, step, steps=6)


def predictions_of_a_function(remedied=False):
    """The model is a function, and no module is ever called."""
    weights = [torch.randn(64, 256, requires_grad=True), torch.randn(256, 64, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=False)

    def model(x):
        return (x @ weights[0]).relu() @ weights[1]

    with MemoryTracker(optimizer=optimizer, live=False) as tracker:
        for _ in range(4):
            updated(model(torch.randn(64, 64)).square().mean(), optimizer)
        with torch.set_grad_enabled(not remedied):
            predictions = [model(torch.randn(128, 64)).argmax(-1) for _ in range(2)]
            scores = [model(torch.randn(128, 64)) for _ in range(4)]
    assert len(predictions) + len(scores) == 6
    return tracker


class ReturnsItsStates(nn.Module):
    """The states need no graph: the loss takes the logits alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> dict:
        h = self.body(x)
        states = [h.detach().clamp(min=threshold) for threshold in (0.1, 0.2, 0.3, 0.4)]
        return {"logits": self.head(h), "states": states}


def outputs_of_the_step_before(remedied=False):
    """A model that returns what its layers have computed. ``remedied``: the variable is deleted."""
    net, x = ReturnsItsStates(), torch.randn(256, 64)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            out = net(x)
            updated(out["logits"].square().mean(), optimizer)
            if remedied:
                del out
    return tracker


class ComputesItsLoss(nn.Module):
    """As the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> SimpleNamespace:
        logits = self.net(x)
        return SimpleNamespace(loss=F.mse_loss(logits, y), logits=logits)


def losses_of_the_model_added_up(remedied=False):
    model, x, y = ComputesItsLoss(), torch.randn(256, 64), torch.randn(256, 64)
    optimizer = sgd(model)

    def step(i):
        summed = 0
        for _ in range(6):
            loss = model(x, y).loss / 6
            if remedied:
                loss.backward()
            else:
                summed = summed + loss
            del loss
        if not remedied:
            summed.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, optimizer, step, steps=2)


def inner_steps(remedied=False):
    """Meta-learning: the loss goes through all steps of an inner training."""
    net, x = Net(64), torch.randn(64, 64)
    optimizer = sgd(net)

    def step(i):
        fast = dict(net.named_parameters())
        for _ in range(6):
            inner = functional_call(net, fast, x).square().mean()
            gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=not remedied)
            changed = zip(fast.items(), gradients, strict=True)
            fast = {name: weight - 0.1 * gradient for (name, weight), gradient in changed}
        updated(functional_call(net, fast, x).square().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


def rows_of_a_hessian(remedied=False):
    """``remedied``: the last derivative has no graph."""
    net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))
    x = torch.randn(32, 16, requires_grad=True)
    with MemoryTracker(net, live=False) as tracker:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        rows = []
        for column in gradient.sum(dim=0):
            row = torch.autograd.grad(column, x, retain_graph=True, create_graph=not remedied)
            rows += row
    assert len(rows) == 16
    return tracker


# Evaluations


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
        with MemoryTracker(model, live=False) as tracker:
            trainer.evaluate()
    return tracker


def scores_before_an_update(remedied=False):
    """Logits of a scoring stay while the training goes on. ``remedied``: only what is needed."""
    net = nn.Sequential(nn.Embedding(512, 32), nn.Linear(32, 512))
    optimizer = sgd(net)

    def step(i):
        ids = torch.randint(0, 512, (8, 16))
        logits, chosen = [], []
        with torch.no_grad():
            for row in ids:
                out = net(row)
                chosen.append(out.log_softmax(-1)[range(16), row])
                if not remedied:
                    logits.append(out)
        for row, expected in zip(ids, chosen, strict=True):
            found = net(row).log_softmax(-1)[range(16), row]
            updated((found - expected).exp().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


def teachers_in_a_list():
    """Three forwards without gradients, each of another module, whose results are averaged."""
    teachers, student, x = [Net(512) for _ in range(3)], Net(32), torch.randn(256, 64)
    optimizer = adamw(student)

    def step(i):
        with torch.no_grad():
            expected = torch.stack([teacher(x).softmax(-1) for teacher in teachers]).mean(0)
        updated(F.mse_loss(student(x), expected), optimizer)

    return trained(student, optimizer, step, steps=3)


# One kind of tensor, one tensor


def segmented_images():
    """Square images, with one number for each class."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 1))
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            x, y = torch.randn(2, 3, 32, 32), torch.randint(0, 16, (2, 32, 32))
            shares = net(x).softmax(1)
            target = F.one_hot(y, 16).permute(0, 3, 1, 2).float()
            updated(1 - (shares * target).sum() / shares.sum(), optimizer)
    return tracker


def attention_of_three_dimensions(remedied=False):
    """PyTorch's own attention, whose inputs have no dimension for heads."""
    project, x = nn.Linear(16, 48), torch.randn(4, 96, 16)
    optimizer = sgd(project)

    def step(i):
        q, k, v = project(x).chunk(3, dim=-1)
        if remedied:
            q, k, v = q[:, None], k[:, None], v[:, None]
        updated(F.scaled_dot_product_attention(q, k, v).square().mean(), optimizer)

    return trained(project, optimizer, step, steps=2)


def vocabulary_beside_a_reference(remedied=False):
    """The last layer of an ``nn.Sequential`` makes logits. The second model is small beside them.

    ``remedied``: a row at a time, checkpointed.
    """
    net = nn.Sequential(nn.Embedding(1024, 32), nn.Linear(32, 32), nn.Linear(32, 1024))
    reference = copy.deepcopy(net).requires_grad_(False)
    optimizer = sgd(net)

    def score(layers, hidden, ids):
        return layers[-1](hidden).log_softmax(-1).gather(-1, ids[..., None])

    def scores(layers, ids):
        if not remedied:
            return layers(ids).log_softmax(-1).gather(-1, ids[..., None])
        parts = []
        for row in ids:
            hidden = layers[1](layers[0](row))
            parts.append(checkpoint(score, layers, hidden, row, use_reentrant=False))
        return torch.stack(parts)

    def step(i):
        ids = torch.randint(0, 1024, (32, 8))
        with torch.no_grad():
            expected = scores(reference, ids)
        updated((scores(net, ids) - expected).exp().mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


def outputs_of_a_decoder():
    """A cell and a head are called in turns, and one loss takes all outputs."""
    cell, head = nn.GRUCell(32, 32), nn.Linear(32, 128)
    net, x = nn.ModuleList([cell, head]), torch.randn(64, 32)
    optimizer = sgd(net)

    def step(i):
        state, outputs = torch.zeros(64, 32), []
        for _ in range(6):
            state = cell(x, state)
            outputs.append(head(state))
        updated(torch.stack(outputs).logsumexp(-1).mean(), optimizer)

    return trained(net, optimizer, step, steps=2)


def dense_neighbours(remedied=False):
    """A matrix of all pairs of nodes, almost all of them zeros."""
    nodes = 400
    neighbours = torch.zeros(nodes, nodes)
    neighbours[torch.randint(0, nodes, (800,)), torch.randint(0, nodes, (800,))] = 1
    if remedied:
        neighbours = neighbours.to_sparse()
    net, x = nn.Linear(8, 8), torch.randn(nodes, 8)
    optimizer = sgd(net)
    return trained(
        net, optimizer, lambda i: updated((neighbours @ net(x)).square().mean(), optimizer), steps=4
    )
