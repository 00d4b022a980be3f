"""Small programs that need more memory than they should, each after a report of somebody who ran
out of memory; and programs that look like them, and must not be accused.

Each function runs its program under a tracker and returns the tracker. With ``remedied=True``, the
program does what the diagnosis tells it to.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker
from gradmem_lib.course.material import models

STEPS = 8
VOCABULARY = 2048


class Net(nn.Module):
    """A body of 64 × 256 features."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def llama(**more) -> nn.Module:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128, "vocab": VOCABULARY}
    return models.tiny_llama(**(sizes | more))


def rows(n: int = 2, tokens: int = 64, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (n, tokens), generator=torch.Generator().manual_seed(0))


# Bytes that grow


def trained_with(keep, steps: int = STEPS) -> MemoryTracker:
    """Train ``Net``; after each step ``keep(i, net, x, y, out, loss)`` runs."""
    net, x, y = Net(), torch.randn(512, 64), torch.randn(512, 64)
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for i in range(steps):
            out = net(x)
            loss = F.mse_loss(out, y)
            metric = keep.before_backward(out, y) if hasattr(keep, "before_backward") else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            keep(i, net, x, y, out, metric if metric is not None else loss)
    return tracker


def losses_in_a_list(remedied=False):
    kept = []

    def keep(i, net, x, y, out, loss):
        kept.append(loss.item() if remedied else loss)

    return trained_with(keep)


def detached_losses_in_a_list(remedied=False):
    kept = []

    def keep(i, net, x, y, out, loss):
        kept.append(loss.item() if remedied else loss.detach())

    return trained_with(keep)


def outputs_in_a_list(remedied=False):
    kept = []

    def keep(i, net, x, y, out, loss):
        kept.append(out.mean().item() if remedied else {"loss": loss.item(), "outputs": out})

    return trained_with(keep)


class Metric:
    """A metric that is not in the loss, and keeps its graph."""

    def __init__(self, remedied: bool):
        self.remedied, self.kept = remedied, []

    def before_backward(self, out, y):
        return (out - y).square().mean(dim=0)

    def __call__(self, i, net, x, y, out, metric):
        self.kept.append(metric.tolist() if self.remedied else metric)


def metrics_with_their_graph(remedied=False):
    return trained_with(Metric(remedied))


def batches_in_a_list(remedied=False):
    """Targets for a plot at the end."""
    kept = []

    def keep(i, net, x, y, out, loss):
        kept.append(y.mean().item() if remedied else y.clone())

    return trained_with(keep)


def numbers_in_a_list():
    kept = []
    return trained_with(lambda i, net, x, y, out, loss: kept.append(loss.item()))


def the_last_outputs():
    """A window for a moving average: it ends to grow after three steps."""
    kept = deque(maxlen=3)
    return trained_with(lambda i, net, x, y, out, loss: kept.append(out.detach()))


def the_best_outputs():
    kept = {}
    return trained_with(lambda i, net, x, y, out, loss: kept.update(best=out.detach()))


# Evaluations


def evaluated(collect, forwards: int = 12, vocabulary: int = VOCABULARY, **arguments):
    model, ids, results = llama(vocab=vocabulary), rows(vocabulary=vocabulary), []
    with MemoryTracker(model, live=False) as tracker, torch.no_grad():
        for _ in range(forwards):
            results.append(collect(model(input_ids=ids, use_cache=False, **arguments)))
    return tracker


def logits_in_a_list(remedied=False):
    return evaluated(lambda out: out.logits.argmax(-1).tolist() if remedied else out.logits)


def logits_in_one_tensor(remedied=False):
    model, ids, gathered = llama(), rows(), None
    with MemoryTracker(model, live=False) as tracker, torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=ids, use_cache=False).logits
            logits = logits.argmax(-1) if remedied else logits
            gathered = logits if gathered is None else torch.cat([gathered, logits])
    return tracker


def hidden_states_in_a_list(remedied=False):
    def collect(out):
        return out.hidden_states[-1].mean() if remedied else out.hidden_states

    return evaluated(collect, vocabulary=128, output_hidden_states=True)


def counted_evaluation():
    return evaluated(lambda out: int(out.logits.argmax(-1).sum()))


def outputs_beside_a_loss_module(remedied=False):
    """The loss of a validation is a module too, with a weight for each class."""
    net, criterion = Net(), nn.CrossEntropyLoss(weight=torch.ones(64))
    batches = [(torch.randn(512, 64), torch.randint(64, (512,))) for _ in range(12)]
    losses, kept = [], []
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for x, y in batches:
            out = net(x)
            losses.append(criterion(out, y))
            kept.append(out.argmax(-1) if remedied else out)
    return tracker


def second_list_of_outputs(remedied=False):
    """A test after a validation, whose outputs are gone by then."""
    net, data = Net(), torch.randn(512, 64)
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for x, batches in ((data, 5), (data[:256], 200)):
            kept = []
            for _ in range(batches):
                out = net(x)
                kept.append(out.argmax(-1).tolist() if remedied else out)
            del kept, out
    return tracker


class Hides(nn.Module):
    """Has no parameters of its own: the model is in a list."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.hidden = [net]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](x)


def outputs_of_a_hidden_model(remedied=False):
    net, kept = Net(), []
    model = Hides(net)
    batches = [torch.randn(512, 64) for _ in range(12)]
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for x in batches:
            out = model(x)
            kept.append(out.argmax(-1) if remedied else out)
    return tracker


def loss_module_of_one_large_evaluation(remedied=False):
    """The loss is the peak: it computes as many numbers as there are logits."""
    net, criterion = nn.Linear(16, 1024), nn.CrossEntropyLoss()
    n = 128 if remedied else 512
    x, y = torch.randn(n, 16), torch.randint(1024, (n,))
    with MemoryTracker(net, live=False) as tracker, torch.no_grad():
        for _ in range(3):
            criterion(net(x), y)
    return tracker


def one_large_evaluation(remedied=False):
    model = llama()
    ids = rows(2 if remedied else 16)
    with MemoryTracker(model, live=False) as tracker, torch.no_grad():
        for _ in range(3):
            model(input_ids=ids, use_cache=False)
    return tracker


def generation(remedied=False):
    model = llama(vocab=256)
    ids = rows(8 if remedied else 32, 8, 256)
    with MemoryTracker(model, live=False) as tracker:
        model.eval().generate(
            ids, max_new_tokens=40, min_new_tokens=40, use_cache=True, pad_token_id=0
        )
    return tracker


# Graphs


def validation_with_gradients(remedied=False):
    net, x, y = Net(), torch.randn(64, 64), torch.randn(64, 64)
    optimizer, large = adamw(net), torch.randn(2048, 64)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(3):
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.set_grad_enabled(not remedied):
                net(large).square().mean().item()
    return tracker


def validation_before_the_backward(remedied=False):
    """The training's own graph is alive at the peak as well, and it is used."""
    net, x, y = Net(), torch.randn(512, 64), torch.randn(512, 64)
    optimizer, more = sgd(net), torch.randn(512, 64)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            loss = F.mse_loss(net(x), y)
            with torch.set_grad_enabled(not remedied):
                net(more)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def validation_with_a_loss_module(remedied=False):
    net, x, y = Net(), torch.randn(64, 64), torch.randint(64, (64,))
    criterion, large = nn.CrossEntropyLoss(), torch.randn(2048, 64)
    target = torch.randint(64, (2048,))
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(3):
            criterion(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.set_grad_enabled(not remedied):
                criterion(net(large), target).item()
    return tracker


def sampling_with_gradients(remedied=False):
    """A denoiser that is called again and again with its own output."""
    net, x = Net(), torch.randn(512, 64)
    with MemoryTracker(net, live=False) as tracker, torch.set_grad_enabled(not remedied):
        for _ in range(10):
            x = x - 0.1 * net(x)
    return tracker


def scores_with_gradients(remedied=False):
    """Scores of a whole data set by a model that is not trained."""
    net, x, scores = Net(), torch.randn(512, 64), []
    with MemoryTracker(net, live=False) as tracker, torch.set_grad_enabled(not remedied):
        for _ in range(10):
            scores.append(net(x).mean())
    return tracker


def ordinary_training():
    return trained_with(lambda *given: None, 3)


def frozen_second_forward():
    """A forward with gradients on, in which nothing needs one."""
    net, other = Net(), Net().requires_grad_(False)
    x, y, optimizer = torch.randn(512, 64), torch.randn(512, 64), adamw(net)
    with MemoryTracker(nn.ModuleList([net, other]), optimizer, live=False) as tracker:
        for _ in range(3):
            (F.mse_loss(net(x), y) + 0 * F.mse_loss(other(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def losses_added_up(remedied=False, forwards=6, criterion=F.mse_loss, targets=None):
    net = Net()
    optimizer = adamw(net)
    batches = []
    for _ in range(forwards):
        x, y = torch.randn(256, 64), torch.randn(256, 64)
        batches.append((x, y if targets is None else targets))
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            summed = 0
            for x, y in batches:
                loss = criterion(net(x), y) / forwards
                if remedied:
                    loss.backward()
                else:
                    summed = summed + loss
                del loss
            if not remedied:
                summed.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def loss_module_added_up(remedied=False, forwards=6):
    classes = torch.randint(64, (256,))
    return losses_added_up(remedied, forwards, nn.CrossEntropyLoss(), classes)


def losses_in_a_stack(remedied=False, forwards=4):
    net, x = Net(), torch.randn(256, 64)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            losses = []
            for _ in range(forwards):
                loss = net(x).abs().mean() / forwards
                if remedied:
                    loss.backward()
                else:
                    losses.append(loss)
                del loss
            if losses:
                torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def recurrent_cell():
    """Backward through time: each call continues the one before."""
    cell, x = nn.GRUCell(64, 64), torch.randn(256, 64)
    optimizer = sgd(cell)
    with MemoryTracker(cell, optimizer, live=False) as tracker:
        for _ in range(2):
            state = torch.zeros(256, 64)
            for _ in range(6):
                state = cell(x, state)
            state.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def two_views():
    """One loss that compares two outputs."""
    net, x = Net(), torch.randn(256, 64)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(3):
            first = net(x)
            second = net(x + 0.1)
            F.mse_loss(first, second).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


# Copies


def trained_beside(make, after=None, net=None, steps=2, remedied=False):
    net = Net(2048) if net is None else net
    optimizer, x, y = sgd(net), torch.randn(16, 64), torch.randn(16, 64)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        kept = make(net)
        for _ in range(steps):
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(kept, net)
        del kept
    return tracker


def deepcopy_at_save(remedied=False):
    def make(net):
        best = copy.deepcopy(net)
        return None if remedied else best

    return trained_beside(make)


def cloned_state_dict(remedied=False):
    def make(net):
        best = {name: value.clone() for name, value in net.state_dict().items()}
        return None if remedied else best

    return trained_beside(make)


def average_before_the_block(remedied=False):
    """On the host, the copy is not on the tracked device: it takes no part of its bytes."""
    net = Net(2048)
    average = None if remedied else copy.deepcopy(net).requires_grad_(False)

    def after(kept, net):
        if average is None:
            return
        with torch.no_grad():
            for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(p, 0.01)

    return trained_beside(lambda net: None, after, net)


def reference_model(remedied=False):
    net, x, y = Net(2048), torch.randn(16, 64), torch.randn(16, 64)
    reference = copy.deepcopy(net).requires_grad_(False)
    optimizer = sgd(net)
    if remedied:
        expected = reference(x)
        del reference
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            if not remedied:
                with torch.no_grad():
                    expected = reference(x)
            (F.mse_loss(net(x), y) + F.mse_loss(net(x), expected)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def checkpoint_after_resume(remedied=False):
    net = Net(2048)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)

    def make(net):
        loaded = torch.load(file)
        net.load_state_dict(loaded)
        return None if remedied else loaded

    return trained_beside(make, net=net)


def copy_of_one_layer():
    return trained_beside(lambda net: copy.deepcopy(net.body[0]))


def gradients_kept_for_logging():
    """Norms of gradients are numbers."""
    norms = []

    def after(kept, net):
        norms.append([p.norm().item() for p in net.parameters()])

    return trained_beside(lambda net: None, after)


def teacher(remedied=False):
    student, x = Net(), torch.randint(0, 4096, (4, 8))
    other = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 512)).requires_grad_(False)
    if remedied:
        other = other.to(torch.bfloat16)
    optimizer = sgd(student)
    with MemoryTracker(student, optimizer, live=False) as tracker:
        for _ in range(2):
            with torch.no_grad():
                other(x)
            student(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def convolutional_teacher(remedied=False):
    student = Net()
    other = nn.Conv2d(64, 256, 3).requires_grad_(False)
    x = torch.randn(1, 64, 4, 4)
    if remedied:
        other, x = other.to(torch.bfloat16), x.to(torch.bfloat16)
    optimizer = sgd(student)
    with MemoryTracker(student, optimizer, live=False) as tracker:
        for _ in range(2):
            with torch.no_grad():
                other(x)
            student(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def small_helper_module():
    """A loss with a weight of its own."""
    net, scale = Net(), nn.Linear(64, 1)
    optimizer = sgd(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            scale(net(torch.randn(512, 64))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


# States and weights


def first_step(remedied=False, steps=2, given=False):
    net = Net(4096)
    optimizer = sgd(net) if remedied else adamw(net)
    x, y = torch.randn(8, 64), torch.randn(8, 64)

    def run():
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    if given:
        run()
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(steps):
            run()
    return tracker


def first_step_of_a_convolution(remedied=False):
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 512))
    optimizer = sgd(net) if remedied else torch.optim.Adam(net.parameters(), foreach=True)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for _ in range(2):
            net(torch.randn(4, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def a_later_step():
    """The states are there already."""
    return first_step(given=True)


def double_weights(remedied=False):
    net = Net(4096) if remedied else Net(4096).double()
    x = torch.randn(8, 64, dtype=net.body[0].weight.dtype)
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(2):
            net(x).sum().backward()
            net.zero_grad()
    return tracker


def frozen_float32(remedied=False):
    net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.Linear(64, 2))
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    x = torch.randn(8, 64)
    if remedied:
        net, x = net.bfloat16(), x.bfloat16()
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(2):
            net(x).sum().backward()
    return tracker


def frozen_bf16():
    return frozen_float32(remedied=True)


# One kind of tensor


def large_vocabulary(remedied=False):
    from gradmem_lib import Recipe, prepare, step

    recipe = Recipe(chunked_loss=remedied, optimizer="sgd")
    made = prepare(llama(), recipe)
    ids = rows(8, 128)
    with MemoryTracker(made.model, made.optimizer, live=False) as tracker:
        for _ in range(2):
            step(made.model, made.optimizer, {"input_ids": ids, "labels": ids}, recipe)
    return tracker


def stored_scores(remedied=False):
    model = llama(vocab=128)
    model.set_attn_implementation("sdpa" if remedied else "eager")
    return trained_llama(model)


def scores_that_are_dropped(remedied=False):
    model = llama(vocab=128)
    model.set_attn_implementation("sdpa")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0 if remedied else 0.1
    return trained_llama(model)


def trained_llama(model):
    ids = rows(2, 192, 128)
    optimizer = sgd(model)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


class OwnAttention(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused, self.project = fused, nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def own_scores(remedied=False):
    net, x = OwnAttention(remedied), torch.randn(2, 256, 64)
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(2):
            net(x).sum().backward()
    return tracker


def square_images():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    with MemoryTracker(net, live=False) as tracker:
        net(torch.randn(8, 3, 32, 32)).softmax(1).sum().backward()
    return tracker


class Wide(nn.Module):
    """A hidden layer that is wider than its input, as logits are; but it is no loss's input."""

    def __init__(self):
        super().__init__()
        self.widen, self.narrow = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        return self.narrow(self.widen(x).relu())


def wide_hidden_layer():
    net = Wide()
    with MemoryTracker(net, live=False) as tracker:
        net(torch.randn(256, 64)).sum().backward()
    return tracker


# Checkpointing


def checkpointed(model, steps=2):
    ids = rows(4, 128)
    optimizer = adamw(model)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def checkpointing_in_eval_mode(remedied=False):
    model = llama(layers=4)
    model.gradient_checkpointing_enable()
    model.train(remedied)
    return checkpointed(model)


class Reentrant(nn.Module):
    """Checkpoints by the reentrant method, on inputs that need no gradient."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 64)

    def forward(self, input_ids, labels):
        x = F.one_hot(input_ids % 64, 64).float()
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer, x)
        return SimpleNamespace(loss=self.head(x).square().mean())


def reentrant_on_frozen_inputs(remedied=False):
    return checkpointed(Reentrant(not remedied))


def reentrant_in_transformers():
    """It gives the layers' input a gradient itself."""
    model = llama(layers=4)
    model.model.embed_tokens.requires_grad_(False)
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    return checkpointed(model)


class IgnoresTheSwitch(nn.Module):
    def __init__(self, uses_it: bool):
        super().__init__()
        self.uses_it, self.gradient_checkpointing = uses_it, True
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
        )

    def forward(self, input_ids, labels):
        x = F.one_hot(input_ids % 64, 64).float()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.uses_it else layer(x)
        return SimpleNamespace(loss=x.square().mean())


def ignored_switch(remedied=False):
    return checkpointed(IgnoresTheSwitch(remedied))


def working_checkpoints():
    return checkpointing_in_eval_mode(remedied=True)
