"""A part of each layer runs again: same gradients, fewer bytes, bytes as predicted, and
refusals.
"""

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from math import inf

import pytest
import torch
from support.checkpointed import N, batch_for, made, same, step
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib import MemoryTracker, Recipe, checkpoint_layers, checkpoint_parts
from gradmem_lib.course import models
from gradmem_lib.names import SELECTIVE
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.cost import seconds_per_token
from gradmem_lib.planning.work import count
from gradmem_lib.techniques.layer_arguments import CACHE_WARNING

SHAPE = dict(layers=2, hidden=64, heads=4, intermediate=172, vocab=128)
IDS = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))


def most_activations(model) -> int:
    with MemoryTracker(model, live=False) as tracker:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    model.zero_grad()
    return max(tracker.timeline.by_category["activations"])


def calls_of(model, kind: str) -> int:
    """How often modules whose class is named so run in a step."""
    calls = []
    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_pre_hook(lambda *given: calls.append(1))
    step("llama", model, batch_for("llama"))
    return len(calls)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "elementwise"),
        ("bert", "attention"),
        ("qwen3", "mlp"),
    ],
)
def test_gradients_are_the_same_to_the_bit(family, part):
    model, batch = made(family), batch_for(family)
    model.set_attn_implementation("eager" if family == "bert" else "sdpa")
    expected = step(family, model, batch)
    with checkpoint_parts(model, part):
        same(step(family, model, batch), expected)
    same(step(family, model, batch), expected)


def test_parts_keep_less_than_nothing_checkpointed_and_more_than_whole_layers():
    model = models.tiny_llama(**SHAPE | {"layers": 4}, attention="eager")
    nothing = most_activations(model)
    with checkpoint_layers(model, 1):
        whole = most_activations(model)
    for part in SELECTIVE:
        with checkpoint_parts(model, part):
            assert whole < most_activations(model) < nothing, part
    assert most_activations(model) == nothing


@pytest.mark.parametrize(
    ("part", "attention", "mlp"), [("attention", 2, 1), ("mlp", 1, 2), ("elementwise", 2, 2)]
)
def test_what_runs_again_is_that_part(part, attention, mlp):
    model = made("llama")
    with checkpoint_parts(model, part):
        assert calls_of(model, "LlamaAttention") == attention * N
        assert calls_of(model, "LlamaMLP") == mlp * N
        copied = copy.deepcopy(model)
        assert calls_of(model.eval(), "LlamaMLP") == N
    assert calls_of(model.train(), "LlamaAttention") == N
    assert calls_of(copied, "LlamaAttention") == attention * N


@pytest.mark.parametrize(
    ("family", "part", "says"),
    [
        ("bert", "mlp", r"inside a BertLayer is a \.\.\.MLP"),
        ("llama", "norms", "'attention', 'mlp', 'elementwise'"),
    ],
)
def test_what_cannot_be_is_refused(family, part, says):
    with pytest.raises(ValueError, match=says):
        checkpoint_parts(made(family), part)


class Mixer(nn.Module):
    """Mixes tokens, under a name that says nothing."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):  # (rows, tokens, 16)
        return self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class Block(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.mixer, self.in_place = Mixer(), in_place
        self.wide = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        x = x + self.mixer(x)
        if self.in_place:
            x += self.wide(x)
            return x
        return x + self.wide(x)


def test_the_class_of_a_part_may_be_given():
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)])
    rows = torch.randn(2, 5, 16)

    def gradients_and_activations():
        blocks.zero_grad()
        with MemoryTracker(blocks, live=False) as tracker:
            blocks(rows).square().mean().backward()
        kept = max(tracker.timeline.by_category["activations"])
        return [p.grad for p in blocks.parameters()], kept

    expected, most = gradients_and_activations()
    for part in (Mixer, nn.Sequential):
        with checkpoint_parts(blocks, part):
            found, kept = gradients_and_activations()
        assert all(map(torch.equal, found, expected)) and kept < most
    with pytest.raises(ValueError, match=r"^give the class of a part"):
        checkpoint_parts(blocks, "attention")
    with pytest.raises(ValueError, match="no module inside a Block is a Conv2d"):
        checkpoint_parts(blocks, nn.Conv2d)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_part_was_called_with_may_not_change(in_place):
    blocks = nn.Sequential(Block(in_place), Block(in_place))
    refused = pytest.raises(RuntimeError, match="changed in place later")
    with checkpoint_parts(blocks, nn.Sequential), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = blocks(torch.randn(2, 5, 16)).square().mean()
        with refused if in_place else nullcontext():
            loss.backward()


@pytest.mark.parametrize(
    "checkpoints",
    [partial(checkpoint_parts, part="attention"), partial(checkpoint_layers, every=2)],
)
def test_a_key_value_cache_is_left_out_with_one_warning(checkpoints):
    model, batch = made("llama"), batch_for("llama")
    expected = step("llama", model, batch)
    with checkpoints(model):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")  # Python says it once for a line
            same(step("llama", model, batch, use_cache=True), expected)
        assert [str(w.message) for w in said] == [CACHE_WARNING]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step("llama", model, batch)


def test_plan_weighs_the_operations_that_torch_counts_again():
    """All but what a part's last product does, which is left before its end."""
    work = count(models.tiny_llama(**SHAPE).config)
    work.sized.causal = False  # torch counts all pairs
    card = Card("one operation a second, endless bandwidth", 1, 2.0, 2.0, inf)
    last = {"attention": 64 * 64, "mlp": 172 * 64, "elementwise": 0}

    def both(part):
        model = models.tiny_llama(**SHAPE, attention="eager")
        ids = torch.randint(0, 128, (2, 32))
        with (
            checkpoint_parts(model, part) if part else nullcontext(),
            FlopCounterMode(display=False) as counter,
        ):
            model(input_ids=ids, labels=ids).loss.backward()
        seconds = seconds_per_token(work, Recipe(checkpointing=part), card, 2, 32)
        return counter.get_total_flops() / 64 + 2 * 2 * last.get(part, 0), seconds

    plain = both(None)
    for part in SELECTIVE:
        counted, estimated = both(part)
        assert estimated - plain[1] == pytest.approx(counted - plain[0], abs=1e-6), part


class Residual(nn.Module):
    """A product that is changed in place where it is added to, or where its bias is."""

    def __init__(self, how: str):
        super().__init__()
        self.inner, self.how = nn.Linear(8, 8, bias=how == "bias, then in place"), how

    def forward(self, x):
        y = self.inner(x)[:, None]
        if self.how == "4-D, in place":
            y = x[:, None] @ self.inner.weight
        y += x[:, None]
        return y.tanh()[:, 0]


@pytest.mark.parametrize("how", ["bias, then in place", "4-D, in place"])
def test_a_product_that_is_changed_in_place_is_refused(how):
    """Run again, the change would be made twice, in what was kept."""
    layers, x = nn.Sequential(Residual(how), Residual(how)), torch.randn(2, 3, 8)
    with checkpoint_parts(layers, "elementwise"):
        loss = layers(x).square().sum()
        with pytest.raises(RuntimeError, match="has been mutated"):
            loss.backward()
