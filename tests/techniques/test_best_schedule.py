"""``every="best"`` on whole models: never above one checkpoint a layer, whatever comes after the
layers.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers
from support.families import tiny_config
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradmem_lib import MemoryTracker, extra_forwards
from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.model.classes import model_class
from gradmem_lib.techniques.checkpointing import checkpoint_layers

LAYERS = 4


def made(family="llama", **more):
    config = tiny_config(family, **{"num_hidden_layers": LAYERS, "vocab_size": 600} | more)
    config.use_cache = False
    torch.manual_seed(0)
    return model_class(config)(config).train()


def peaks(model, every, run, part):
    """Peaks in bytes: of a first step, in which "best" measures, of a second micro-batch, and of
    another step.
    """
    found = []
    checkpoints = checkpoint_layers(part, every)
    with checkpoints as handle, MemoryTracker(model, live=False) as tracker:
        for fresh in (True, False, True):
            if fresh:
                model.zero_grad(set_to_none=True)
            run()
            found.append(tracker.window_peak().total)
    model.zero_grad(set_to_none=True)
    return found, handle


def backward_of(shape, trained=True, autocast=False):
    """A step on so many rows and tokens; of a frozen model, the embedding is trained."""
    ids = torch.randint(3, 64, shape)

    def run(model):
        model.requires_grad_(trained)
        model.get_input_embeddings().weight.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    return run


def loss_outside(model):
    ids = torch.randint(0, 500, (4, 48), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids).logits.float()
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()


def bloom():
    """Its layers return the attention's weights too, which are kept for backward and which no
    gradient comes from.
    """
    sizes = {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4, "vocab_size": 64}
    config = transformers.BloomConfig(**sizes, use_cache=False)
    return transformers.BloomForCausalLM(config).train()


FEW, MANY = backward_of((1, 8)), backward_of((4, 48), trained=False)
STEPS = {
    "few tokens": (lambda: made("gpt_neox"), FEW),
    "two kinds of layers": (lambda: made("gemma2"), FEW),
    "frozen": (lambda: made("gemma2"), MANY),
    "frozen, masked": (lambda: made("bert"), MANY),
    # while best measures, autocast keeps no casts
    "autocast": (lambda: made("olmo2", num_hidden_layers=5), backward_of((4, 48), autocast=True)),
    "layers that return more": (bloom, backward_of((2, 128))),
    "a loss outside of the model": (made, loss_outside),
}


@pytest.mark.parametrize("name", STEPS)
def test_best_is_never_above_one_a_layer(name):
    make, run = STEPS[name]
    model = make()
    part = model.model.layers if run is loss_outside else model
    single, _ = peaks(model, 1, lambda: run(model), part)
    best, handle = peaks(model, "best", lambda: run(model), part)
    for ours, theirs in zip(best, single, strict=True):
        assert ours <= theirs, handle
    if make is bloom:
        assert min(handle.internal) > 2 * 4 * 128 * 128 * 4  # rows, heads, tokens, tokens, bytes


def test_layers_of_different_kinds_get_segments_of_their_own_from_best():
    model, ids = made("gemma2"), torch.randint(0, 500, (2, 8))
    mask = torch.ones_like(ids)
    with checkpoint_layers(model, "best") as handle:
        model(input_ids=ids, labels=ids).loss.backward()
        assert handle.segments == [1] * LAYERS and not handle.keep_last
        mask[0, :3] = 0  # sliding and full attention have masks of their own now
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()


# Models with two lists, and other ways to run.


def test_encoder_and_decoder_get_a_schedule_each_and_the_same_gradients():
    model = made("t5", num_hidden_layers=3, num_decoder_layers=4, dropout_rate=0.2)
    ids = torch.randint(3, 50, (3, 8))

    def step(every):
        with nullcontext() if every is None else checkpoint_layers(model, every) as handle:
            for _ in range(2):  # the first one measures
                model.zero_grad(set_to_none=True)
                with MemoryTracker(model, live=False) as tracker:
                    torch.manual_seed(2)
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return found, tracker.peak.total, handle

    expected, plain, _ = step(None)
    peak = {}
    for every in (1, "best"):
        found, peak[every], handle = step(every)
        assert len(expected) == len(found) and all(map(torch.equal, expected, found)), every
        assert [sum(segments) for segments in handle.segments.values()] == [3, 4]
        assert list(handle.layers) == list(handle.segments)
    assert peak["best"] <= peak[1] < plain
    with pytest.raises(ValueError, match="several lists"):
        checkpoint_layers(model, [2, 1])
    # Its first layer makes the position bias of the others.
    several = pytest.raises(RuntimeError, match="more than their hidden state")
    with checkpoint_layers(model, 2), several:
        model(input_ids=ids, labels=ids)


class OwnGradient(nn.Linear):
    """Moves against the gradient of an energy."""

    def forward(self, x):
        energy = super().forward(x).tanh().square().sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


class TwoStreams(nn.Linear):
    def forward(self, streams):
        x, y = streams
        return super().forward(x).tanh() + y, super().forward(y).tanh()


@pytest.mark.parametrize("kind", [OwnGradient, TwoStreams])
def test_layers_that_ask_for_gradients_and_such_that_hand_on_tuples_are_measured(kind):
    layers, grads = nn.ModuleList(kind(4, 4) for _ in range(3)), []
    for checkpoints in (nullcontext(), checkpoint_layers(layers, "best")):
        x = torch.ones(2, 4, requires_grad=True)
        hidden = x if kind is OwnGradient else (x, 2 * x)
        with checkpoints:
            for layer in layers:
                hidden = layer(hidden)
        loss = (hidden if kind is OwnGradient else hidden[0]).sum()
        grads.append([grad.tolist() for grad in torch.autograd.grad(loss, layers.parameters())])
    assert grads[0] == grads[1]


def counted_calls(model):
    """A list that grows with each forward of a layer's MLP."""
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *given: calls.append(1))
    return calls


def test_compiled_models_are_right_and_compiled_layers_refused():
    model, ids = made(num_hidden_layers=3), torch.randint(0, 500, (2, 8))

    def gradients(run):
        model.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected, calls = gradients(model), counted_calls(model)
    with checkpoint_layers(model, "best") as handle:
        compiled = torch.compile(model, backend="eager")
        gradients(compiled)
        calls.clear()
        assert torch.allclose(gradients(compiled), expected, atol=1e-6)
        assert len(calls) == 3 + extra_forwards(handle.segments, handle.keep_last)
    torch.compiler.reset()
    model.model.layers[1].compile(backend="eager")
    for layers in (model, nn.ModuleList([torch.jit.script(nn.Linear(2, 2))])):
        with pytest.raises(RuntimeError, match="compiled"):
            checkpoint_layers(layers, 1)


@pytest.mark.parametrize("before", [True, False])
def test_best_is_refused_on_layers_that_fsdp_spreads_and_others_run_again(before):
    """In test_sharding.py the gradients are compared between real processes."""
    with fake_process_group(2, 0) as mesh:
        model, ids = made(), torch.randint(0, 64, (2, 8))
        calls = counted_calls(model)

        def spread():
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)

        if not before:
            spread()
        handle = checkpoint_layers(model, [2, 2])
        if before:
            spread()
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(calls) == 4 + extra_forwards(handle.segments, handle.keep_last)
        handle.remove()
        with checkpoint_layers(model, "best"), pytest.raises(RuntimeError, match="spread"):
            model(input_ids=ids, labels=ids)
