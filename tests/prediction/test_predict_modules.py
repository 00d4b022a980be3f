"""Predictions for modules and batches that are no plain language model: what is set on them counts,
and what their kernels keep.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.families import OLDER
from support.nightly import each
from support.predicted import assert_predicted, assert_same, measured, tracked
from torch import nn
from transformers import (
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    RobertaConfig,
)

from gradmem_lib.compat import operators
from gradmem_lib.compat.dispatch_modes import TorchDispatchMode
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction import corrections
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.prediction.trace import traced
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.training.recipe import Recipe

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ASK = {"batch_size": 2, "seq_len": 16, "target": "cpu"}


def own_loop(model, rows=2, tokens=16) -> MemoryTracker:
    """The second step of a loop that someone writes without a recipe."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    ids = torch.randint(0, 96, (rows, tokens))

    def once() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    once()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        once()
    return tracker


def test_another_attention_is_another_question():
    recipe = Recipe(attention=None)
    found = {}
    for attention in ("sdpa", "eager"):
        config = GPTNeoXConfig(**SMALL, attn_implementation=attention)
        found[attention] = predict(config, **ASK, recipe=recipe).peak
        batch = example_batch(LlamaForCausalLM(LlamaConfig(**SMALL)), 2, 16)
        assert (
            found[attention]
            == tracked(model_class(config)(copy.deepcopy(config)), batch, recipe).peak
        )
    assert found["sdpa"].total != found["eager"].total


@pytest.mark.parametrize("change", ["default dtype", "patched layer", "patched function"])
def test_what_is_set_around_a_step_is_part_of_the_question(change, monkeypatch):
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(**SMALL)
    before = predict(config, **ASK).peak

    class Wider(modeling_llama.LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x.sin().sin().sin())  # each keeps its input

    cross_entropy = F.cross_entropy
    if change == "default dtype":
        torch.set_default_dtype(torch.float64)
    elif change == "patched layer":
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Wider)
    else:
        monkeypatch.setattr(
            F, "cross_entropy", lambda x, *args, **kwargs: cross_entropy(x * 1.0, *args, **kwargs)
        )
    try:
        changed = predict(config, **ASK).peak
        model = model_class(config)(copy.deepcopy(config))
        assert changed == tracked(model, example_batch(model, 2, 16)).peak
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed != before


def test_autocast_belongs_into_the_recipe():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="leave that block"):
        predict(LlamaConfig(**SMALL), **ASK)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_prediction_is_of_training_wherever_it_is_asked_for(around):
    x = torch.randn(32, 64)
    with around():
        predicted = predict(Flagged(), batch=(x, x), target="cpu")
    assert predicted.peak == tracked(Flagged(), (x, x)).peak


@pytest.mark.parametrize("every", [1, [1, [1, 1]], "transformers"])
def test_checkpoints_on_a_module_are_predicted(every):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, use_cache=False))
    if every == "transformers":
        model.gradient_checkpointing_enable()
    else:
        checkpoint_layers(model.model.layers, every=every)
    assert predict(model, batch_size=2, seq_len=16, target="cpu").peak == own_loop(model).peak


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_cache_that_is_on_is_predicted(use_cache):
    config = LlamaConfig(
        **SMALL, num_key_value_heads=2, use_cache=use_cache, attn_implementation="eager"
    )
    model = LlamaForCausalLM(config)
    predicted = predict(model, **ASK, recipe=Recipe(attention=None))
    assert predicted.peak == own_loop(model).peak
    without = predict(config, **ASK, recipe=Recipe(attention=None))  # a recipe's own step has none
    assert (predicted.peak == without.peak) == (not use_cache)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(8, 24, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, 1)

    def forward(self, x):
        return self.head(self.layers(x)[0]).square().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.1}]
)
def test_recurrent_layers(kind, options):
    assert_predicted(Recurrent(kind, **options), torch.randn(37, 5, 8))


class Frozen(Recurrent):
    """A recurrent layer runs without gradients first, and stays in evaluation mode."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.layers.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            # the step's peak
            shift = self.layers(x)[0].mean() + self.layers(x.repeat(1, 9, 1))[0].mean()
        return super().forward(x + shift)


def test_a_recurrent_layer_in_evaluation_mode_and_without_gradients():
    assert_predicted(Frozen(nn.LSTM), torch.randn(37, 5, 8))


class Unfolded(nn.Module):
    """Windows of neighbours, and added up again: both ways through ``col2im``."""

    def __init__(self, window: int, stride: int):
        super().__init__()
        self.taken = {
            "kernel_size": (window, 1),
            "padding": (window // 2, 0),
            "stride": (stride, 1),
        }
        self.weight = nn.Parameter(torch.randn(6 * window, 6 * window))

    def forward(self, x):
        windows = self.weight @ F.unfold(x * x.sin(), **self.taken)
        return F.fold(windows, x.shape[2:], **self.taken).square().mean()


@pytest.mark.parametrize(("window", "stride"), [(9, 1), (3, 3), (1, 2)])
def test_folds_keep_the_storage_of_their_columns(window, stride):
    assert_predicted(Unfolded(window, stride), torch.randn(2, 6, 18, 1, requires_grad=True))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 300, 100), (33, 7, 64, 256), (5, 3, 257, 64), (128, 8, 256, 100)]
)
def test_the_workspace_of_an_lstm_is_what_its_kernel_returns(sizes):
    seq, batch, inputs, hidden = sizes
    kept = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is operators.lstm_layer:
                kept.append(out[3].untyped_storage().nbytes())
            return out

    with Look():
        nn.LSTM(inputs, hidden)(torch.randn(seq, batch, inputs))
    assert corrections.lstm_workspace(*sizes) == kept[0] == operators.lstm_workspace(*sizes)


def test_what_recurrent_layers_keep_on_a_card_is_refused():
    with pytest.raises(CannotTrace, match="cuDNN"):
        predict(Recurrent(nn.LSTM), batch=torch.randn(7, 2, 8), target="cuda")


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN computes no bf16 on this processor, and PyTorch's own LSTM keeps no workspace",
)
def test_what_onednns_lstm_keeps_in_bf16_is_refused():
    with pytest.raises(CannotTrace, match="workspace"):
        batch = torch.randn(7, 2, 8, dtype=torch.bfloat16)
        predict(Recurrent(nn.LSTM), batch=batch, recipe=Recipe(precision="bf16"), target="cpu")


LOSSES = (
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.l1_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.kl_div,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
)


@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_may_keep_more_than_its_number(function, reduction):
    def loss(model, batch):
        found = function(model(batch[0]).sigmoid(), batch[1], reduction=reduction)
        return found.mean() if reduction == "none" else found

    assert_predicted(nn.Linear(16, 16), (torch.randn(60, 16), torch.rand(60, 16)), loss=loss)


def llava() -> LlavaForConditionalGeneration:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    text = {"model_type": "llama", **SMALL}
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    )


def test_parameters_without_a_gradient_have_no_states():
    """A vision-language model that is given text alone: its vision tower has no gradients."""
    model = llava()
    ids = torch.randint(0, 90, (2, 16))
    assert_predicted(copy.deepcopy(model), {"input_ids": ids, "labels": ids})
    held = predict(model.config, **ASK).current.by_category
    assert held["optimizer"] < 2 * held["parameters"]


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, target, double=False):
        return ((self.linear(x) - target) * (2 if double else 1)).square().mean()


def test_one_tensor_twice_and_flags_in_a_batch():
    x = torch.randn(32, 64)
    scaled = {"by": torch.tensor(2.0), "x": x, "target": x}
    assert_predicted(
        Flagged(), scaled, Recipe(accumulation=2), lambda m, b: m(b["x"], b["target"] * b["by"])
    )
    with pytest.raises(ValueError, match="without a tensor of rows"):
        predict(Flagged(), batch={"double": torch.tensor(True)}, target="cpu")
    assert_predicted(Flagged(), {"x": x, "target": x})
    assert_predicted(Flagged(), (x, x))
    assert_predicted(Flagged(), {"x": x, "target": x[:, :1], "double": True})
    assert_predicted(Flagged(), {"x": x.clone().requires_grad_(), "target": x})


@pytest.mark.parametrize("end", [4, 7])
def test_a_short_range_may_be_read(end):
    """As a Dice loss reads the dimensions that it sums over."""

    def loss(model, batch):
        dimensions = torch.arange(1, batch.dim()).tolist()
        steps = torch.arange(0, end, 3)
        return model(batch).sin().sum(dimensions).mean() * sum(int(n) for n in steps)

    assert_predicted(nn.Linear(16, 16), torch.randn(6, 5, 16), loss=loss)


def test_a_range_that_is_written_to_has_no_known_numbers():
    def loss(model, batch):
        counts = torch.arange(3)
        counts[1] = batch.argmax()
        return model(batch).mean() * counts[1].item()

    with pytest.raises(CannotTrace, match="reads a tensor's value"):
        predict(nn.Linear(16, 16), batch=torch.randn(6, 16), loss=loss, target="cpu")


class Depthwise(nn.Module):
    """As in Segformer: tokens laid out as a picture between two linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.between, self.after = (
            nn.Linear(8, 16),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        picture = self.before(x).transpose(1, 2).view(len(x), 16, 6, 6)
        return self.after(self.between(picture).flatten(2).transpose(1, 2)).square().mean()


class Counts(nn.Module):
    """Keeps more in every fifth call than in the others."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        # the same values, so that the loss may be cut
        return (y.exp().log().exp().log() if self.calls % 5 == 4 else y).square().mean()


def test_every_micro_batch_of_a_module_is_traced():
    """What a module of one's own does may change from one to the next: none stands for others."""
    assert_predicted(Counts(), torch.randn(35, 8), Recipe(accumulation=5))
    on_card = predict(
        Counts(), batch=torch.randn(35, 8), recipe=Recipe(accumulation=5), target="cuda"
    )
    assert on_card.requests() == traced(on_card._question, None).requests


@pytest.mark.parametrize("rows", [1, 2])
def test_a_view_of_one_row_has_strides_of_its_own(rows):
    assert_predicted(Depthwise(), torch.randn(rows, 36, 8), Recipe(optimizer="sgd"))
    assert_predicted(
        Depthwise(), torch.randn(2 * rows, 36, 8), Recipe(accumulation=2, optimizer="sgd")
    )


HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


# in steps in which each family and each head comes
@pytest.mark.parametrize(("family", "head"), each(2, product(["Llama", "Roberta"], HEADS)))
def test_other_heads_from_a_config(family, head):
    config = {"Llama": LlamaConfig, "Roberta": RobertaConfig}[family](
        **SMALL,
        architectures=[f"{family}For{head}"],
        num_labels=2 if head == "QuestionAnswering" else 3,
    )
    predicted = predict(config, **ASK)
    model = model_class(config)(copy.deepcopy(config))
    assert type(model).__name__ == f"{family}For{head}"
    tracker = tracked(model, example_batch(model, 2, 16))
    assert (predicted.peak, predicted.peak_by_phase) == (tracker.peak, tracker.peak_by_phase)


def test_a_compiled_module_is_refused():
    with pytest.raises(CannotTrace, match=r"torch\.compile"):
        predict(torch.compile(nn.Linear(4, 1)), batch=torch.randn(2, 4), target="cpu")


def test_what_a_first_step_leaves_in_a_module_is_there_before_the_second():
    """Rotary frequencies of long sequences, which a first long one makes."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
    }
    rope |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    cfg = LlamaConfig(**SMALL, **{"rope_scaling" if OLDER else "rope_parameters": rope})
    if OLDER:  # reads how long the row is
        with pytest.raises(CannotTrace, match=r"reads a tensor's value.*rope"):
            predict(cfg, **ASK)
        return
    assert_same(predict(cfg, **ASK), measured(cfg, batch_size=2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rounds = nn.Linear(16, 16), [1]

    def forward(self, x):
        x = self.linear(x)
        for _ in range(self.rounds[0]):
            x = x.sin()
        return x


class Stack(nn.Module):
    """Nine blocks that hold the same, of which the sixth may work longer, and the last ones may be
    left out.
    """

    def __init__(self, rounds: int = 1, used: int = 9):
        super().__init__()
        self.blocks, self.used = nn.ModuleList(Block() for _ in range(9)), used
        self.blocks[5].rounds = [rounds]

    def forward(self, x):
        for block in self.blocks[: self.used]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("options", [{"rounds": 4}, {"used": 6}])
def test_layers_that_hold_the_same_may_do_something_else(options):
    assert_predicted(Stack(**options), torch.randn(40, 16))


class Bagged(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, **options)

    def forward(self, x):
        return self.bag(x).sin().square().mean()


def test_sparse_gradients_and_parameters_of_another_module_are_refused():
    ids, x, teacher = (
        torch.randint(0, 50, (6, 5)),
        torch.randn(6, 16),
        nn.Linear(16, 16).requires_grad_(False),
    )
    with pytest.raises(CannotTrace, match=r"sparse_coo.*sparse=False"):
        predict(
            Bagged(mode="sum", sparse=True), batch=ids, recipe=Recipe(optimizer="sgd"), target="cpu"
        )
    with pytest.raises(CannotTrace, match="a parameter that is not in the module: give one module"):
        predict(
            nn.Linear(16, 16), batch=x, loss=lambda m, b: F.mse_loss(m(b), teacher(b)), target="cpu"
        )
