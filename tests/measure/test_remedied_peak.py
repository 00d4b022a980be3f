"""The peak that is promised with a remedy holds when the remedy is applied, whatever other moments
of the run need.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without


def mlp(width: int = 256, layers: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def train(model, optimizer, rows: int) -> None:
    model(torch.randn(rows, 256)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def validation_with_gradients(remedied: bool) -> MemoryTracker:
    """The steps after a validation need two thirds of what its graph needs."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            train(model, optimizer, rows=1024)
            with torch.no_grad() if remedied else nullcontext():
                score = model(torch.randn(1536, 256)).mean()
            del score
        train(model, optimizer, rows=1024)
    return tracker


def logits_of_one_batch(remedied: bool) -> MemoryTracker:
    """Beside one large loss over a vocabulary, the steps of another head have large activations."""
    model = nn.ModuleDict({"words": nn.Linear(64, 4096), "body": mlp()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pieces = 8 if remedied else 1
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model["body"], optimizer, rows=768)
        x, y = torch.randn(512, 64), torch.randint(0, 4096, (512,))
        for piece, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = nn.functional.cross_entropy(model["words"](piece), labels) / pieces
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        train(model["body"], optimizer, rows=768)
    return tracker


def losses_kept_before_a_large_step(remedied: bool) -> MemoryTracker:
    """Losses of one step are added up, and an ordinary step of many rows comes later."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        total = 0
        for _ in range(4):
            loss = model(torch.randn(512, 256)).pow(2).mean()
            if remedied:
                loss.backward()
                del loss
            else:
                total = total + loss
        if not remedied:
            total.backward()
            del total, loss
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rows=1280)
    return tracker


def data_beside_an_evaluation(remedied: bool) -> MemoryTracker:
    """All rows are on the device during the steps; an evaluation without them comes first."""
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        with torch.no_grad():
            model(torch.randn(4096, 256))
        if remedied:
            for _ in range(4):
                train(model, optimizer, rows=64)
            return tracker
        data = torch.zeros(16384, 256)
        for first in range(0, 256, 64):
            model(data[first : first + 64]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def one_long_row_after_the_states(remedied: bool) -> MemoryTracker:
    """The next largest step is the first one, which had no optimizer states yet."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    longest = 1024 if remedied else 4096
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for rows in (1024, 64, 64, 64, 64, longest, 64):
            train(model, optimizer, rows)
    return tracker


def best_weights_of_two_epochs(remedied: bool) -> MemoryTracker:
    """The second copy is made after the peak, and takes the place of the first one."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    best = {}
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for step in range(6):
            train(model, optimizer, rows=32)
            if step in (1, 3) and not remedied:
                best = {name: p.detach().clone() for name, p in model.named_parameters()}
    del best
    return tracker


def outputs_of_uneven_batches(remedied: bool) -> MemoryTracker:
    """Outputs are kept; the largest of them belongs to a step that needs it."""
    model = nn.Linear(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for rows in (512, 512, 1280, *([512] * 8), 768):
            outputs = model(torch.randn(rows, 256))
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(outputs.mean().item() if remedied else outputs.detach())
            del outputs
    return tracker


def models_of_rounds_of_other_sizes(remedied: bool) -> MemoryTracker:
    """Each round trains a model for several steps. The second round has the largest batches, and
    needs its own model in all of them.
    """
    kept = []
    with MemoryTracker(live=False) as tracker:
        for rows in (64, 800, 64, 64, 64, 64, 64, 64, 64):
            model = mlp()
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                train(model, optimizer, rows)
            if not remedied:
                kept.append(model)
    return tracker


def optimizers_of_rounds(remedied: bool) -> MemoryTracker:
    """A new optimizer in each round, and the first ones are kept with their states."""
    model, kept = mlp(), []
    with MemoryTracker(model, live=False) as tracker:
        for rows in (64, 1200, 64, 64, 64, 64, 64):
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                train(model, optimizer, rows)
            if not remedied:
                kept.append(optimizer)
    return tracker


def answers_of_an_evaluation(remedied: bool) -> MemoryTracker:
    """A list of an evaluation's answers is there in the training; the last one is a variable."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = deque(maxlen=1 if remedied else 6)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            kept.clear()
            for _ in range(6):
                with torch.no_grad():
                    kept.append(model[0](torch.randn(512, 256)))
            train(model, optimizer, rows=256)
    return tracker


def logits_of_few_tokens(remedied: bool) -> MemoryTracker:
    """The backward of each piece makes a gradient of the whole head, larger than its logits."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4096, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

    def loss_of(hidden, labels):
        logits = model[1](hidden)
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / 192

    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            hidden, labels = model[0](torch.randn(192, 64)), torch.randint(0, 4096, (192,))
            if remedied:
                parts = zip(hidden.chunk(8), labels.chunk(8), strict=True)
                losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
                loss = sum(losses)
                del losses
            else:
                loss = loss_of(hidden, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, hidden
    return tracker


class Features(nn.Module):
    """Runs its layers one by one, and keeps the output of each until it returns, as an encoder of
    images does.
    """

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        features = []
        for layer in self.layers:
            x = layer(x)
            features.append(x)
        return torch.stack([feature.mean() for feature in features])


def features_of_a_validation(remedied: bool) -> MemoryTracker:
    """Without a graph, the validation's forward still has the outputs of all layers."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    model = Features(nn.ModuleList(blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model, optimizer, rows=16)
        with torch.no_grad() if remedied else nullcontext():
            score = model(torch.randn(1024, 256)).mean()
        del score
        train(model, optimizer, rows=16)
    return tracker


class RunsAgain(nn.Module):
    """One layer that runs eight times. All of its outputs are collected, as in deep supervision."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.GELU())])
        self.head = nn.Linear(256, 1)

    def forward(self, x):
        outputs = []
        for _ in range(8):
            x = self.layers[0](x)
            outputs.append(x)
        return torch.stack([self.head(output).mean() for output in outputs])


def _validation(model: nn.Module, remedied: bool) -> MemoryTracker:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            train(model, optimizer, rows=16)
            with torch.no_grad() if remedied else nullcontext():
                score = model(torch.randn(1024, 256)).mean()
            del score
    return tracker


def outputs_of_a_layer_that_runs_again(remedied: bool) -> MemoryTracker:
    return _validation(RunsAgain(), remedied)


def chain(layers: int = 8) -> nn.Sequential:
    """Layers that keep one tensor each for a backward."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(256, 1))


def validation_of_a_chain(remedied: bool) -> MemoryTracker:
    return _validation(chain(), remedied)


def validation_of_a_chain_whose_outputs_a_hook_collects(remedied: bool) -> MemoryTracker:
    model, features = chain(), []
    for layer in model:
        layer.register_forward_hook(lambda layer, args, output: features.append(output))
    model.register_forward_hook(lambda layer, args, output: features.clear())
    return _validation(model, remedied)


class RemembersItsOutput(nn.Linear):
    def forward(self, x):
        self.output = super().forward(x)
        return self.output.relu()


def validation_of_a_chain_whose_layers_remember_outputs(remedied: bool) -> MemoryTracker:
    layers = [RemembersItsOutput(256, 256) for _ in range(8)]
    return _validation(nn.Sequential(*layers, nn.Linear(256, 1)), remedied)


class JumpingKnowledge(nn.Module):
    """Adds each layer's output to what it was given, and collects the sums."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x):
        sums = []
        for layer in self.layers:
            x = x + layer(nn.functional.gelu(x))
            sums.append(x)
        return torch.stack([each.mean() for each in sums])


def validation_of_a_model_that_collects_sums(remedied: bool) -> MemoryTracker:
    return _validation(JumpingKnowledge(), remedied)


def validation_of_a_chain_whose_layers_are_called_one_by_one(remedied: bool) -> MemoryTracker:
    return _validation(Features(chain()), remedied)


def validation_of_a_chain_whose_inputs_a_hook_collects(remedied: bool) -> MemoryTracker:
    model, inputs = chain(), []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
    model.register_forward_hook(lambda layer, args, output: inputs.clear())
    return _validation(model, remedied)


def validation_of_a_chain_with_hooks_for_its_time(remedied: bool) -> MemoryTracker:
    """The hooks are gone when the block ends."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model, optimizer, rows=16)
        features = []
        hooks = []
        for layer in model:
            hook = layer.register_forward_hook(lambda layer, args, out: features.append(out))
            hooks.append(hook)
        with torch.no_grad() if remedied else nullcontext():
            model(torch.randn(1024, 256))
        for hook in hooks:
            hook.remove()
        features.clear()
        train(model, optimizer, rows=16)
    return tracker


def validation_of_a_chain_with_a_hook_of_its_own(remedied: bool) -> MemoryTracker:
    model = chain()
    model.register_forward_pre_hook(lambda model, args: (2 * args[0],))
    return _validation(model, remedied)


def outputs_of_six_micro_batches(remedied: bool) -> MemoryTracker:
    """The remedy keeps the classes, which are int64."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            kept = []
            for _ in range(6):
                output = model(torch.randn(512, 256))
                (output.square().mean() / 6).backward()
                kept.append(output.argmax(-1) if remedied else output)
                del output
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def scores_of_pixels_of_six_micro_batches(remedied: bool) -> MemoryTracker:
    """The classes are the second dimension: ``argmax(1)``."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            kept = []
            for _ in range(6):
                scores = model(torch.randn(8, 3, 32, 32))
                (scores.square().mean() / 6).backward()
                kept.append(scores.argmax(1) if remedied else scores)
                del scores
            optimizer.step()
            optimizer.zero_grad()
    return tracker


class TokensFirst(nn.Module):
    """The batch is the second dimension, as is PyTorch's default, and a mask is made for tokens."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.layer(x, src_mask=mask).mean((0, 2))


class Positions(nn.Module):
    """Tokens come first, and what is made of their positions has no rows."""

    def __init__(self):
        super().__init__()
        self.of_positions = nn.Sequential(nn.Linear(1, 1024), nn.GELU(), nn.Linear(1024, 32))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        positions = torch.arange(len(x)).float()[:, None]
        return self.head(x + self.of_positions(positions)[:, None]).mean((0, 2))


def evaluation_with_positions(remedied: bool) -> MemoryTracker:
    return _evaluation_with_tokens_first(Positions(), remedied)


class TableOfTokens(nn.Module):
    """A forward makes a table of tokens with tokens, for each of four heads."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 8), nn.Linear(8, 8)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).float()
        table = (places[:, None, None] - places) * torch.arange(1.0, 5.0)[:, None]
        return self.head(self.embedding(ids)).mean() + table.mean()


def evaluation_of_as_many_rows_as_tokens(remedied: bool) -> MemoryTracker:
    model = TableOfTokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            model(torch.randint(0, 100, (8, 16))).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randint(0, 100, (64 if remedied else 128, 128)))
    return tracker


def evaluation_with_tokens_first(remedied: bool) -> MemoryTracker:
    return _evaluation_with_tokens_first(TokensFirst(), remedied)


def _evaluation_with_tokens_first(model: nn.Module, remedied: bool) -> MemoryTracker:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            model(torch.randn(32, 8, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(512, 1 if remedied else 2, 32))
    return tracker


def rollouts_before_updates(remedied: bool) -> MemoryTracker:
    """A policy acts for some time, with gradients, before it is trained on what it has seen."""
    policy = mlp(layers=3)
    optimizer = torch.optim.Adam(policy.parameters())
    with MemoryTracker(policy, optimizer, live=False) as tracker:
        for _ in range(3):
            scores = []
            for _ in range(24):
                with torch.no_grad() if remedied else nullcontext():
                    scores.append(policy(torch.randn(128, 256)))
            for _ in range(2):
                train(policy, optimizer, rows=256)
    return tracker


@pytest.mark.parametrize(
    "program",
    [
        validation_with_gradients,
        logits_of_one_batch,
        losses_kept_before_a_large_step,
        data_beside_an_evaluation,
        one_long_row_after_the_states,
        best_weights_of_two_epochs,
        outputs_of_uneven_batches,
        models_of_rounds_of_other_sizes,
        optimizers_of_rounds,
        answers_of_an_evaluation,
        features_of_a_validation,
        logits_of_few_tokens,
        outputs_of_a_layer_that_runs_again,
        validation_of_a_chain,
        validation_of_a_chain_whose_outputs_a_hook_collects,
        validation_of_a_chain_whose_layers_remember_outputs,
        validation_of_a_model_that_collects_sums,
        validation_of_a_chain_whose_layers_are_called_one_by_one,
        validation_of_a_chain_whose_inputs_a_hook_collects,
        validation_of_a_chain_with_hooks_for_its_time,
        validation_of_a_chain_with_a_hook_of_its_own,
        outputs_of_six_micro_batches,
        scores_of_pixels_of_six_micro_batches,
        evaluation_with_tokens_first,
        evaluation_with_positions,
        evaluation_of_as_many_rows_as_tokens,
        rollouts_before_updates,
    ],
    ids=lambda program: program.__name__,
)
def test_the_promised_peak_holds_beside_other_moments(program):
    before = diagnose(program(remedied=False))
    cause = before.causes[0]
    promised, _ = peak_without(cause, before.facts)
    measured = program(remedied=True).peak.total
    assert measured <= promised <= before.peak.total, before


@pytest.mark.parametrize("program", [validation_of_a_chain, rollouts_before_updates])
def test_much_is_promised_of_forwards_that_keep_one_output_of_their_layers(program):
    before = diagnose(program(remedied=False))
    promised, _ = peak_without(before.causes[0], before.facts)
    assert promised < 0.7 * before.peak.total, before


def test_a_chain_with_a_scripted_part_is_diagnosed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        encoder = torch.jit.script(chain())
    before = diagnose(_validation(nn.Sequential(encoder, nn.Linear(1, 1)), remedied=False))
    assert "A forward's graph is never used" in [cause.name for cause in before.causes]


def test_a_copy_that_is_replaced_after_the_peak_is_taken_away_as_well():
    before = diagnose(best_weights_of_two_epochs(remedied=False))
    promised, _ = peak_without(before.causes[0], before.facts)
    assert promised == best_weights_of_two_epochs(remedied=True).peak.total


def test_a_batch_that_a_kept_graph_needs_is_no_data_that_waits():
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    penalty = 0
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(10):
            x = torch.randn(256, 256)
            loss = model(x).square().mean()
            penalty = penalty + model(x[:64]).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    names = [cause.name for cause in diagnose(tracker).causes]
    assert names[0] == "Bytes grow from step to step"
    assert "Data waits on the device" not in names
