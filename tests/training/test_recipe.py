"""What a recipe refuses, and what it does to real tensors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from functools import partial
from itertools import combinations

import pytest
import torch
import transformers
from support.oracle import allocator_peak
from torch import nn

from gradmem_lib import AdamW8bit, LoRALinear, Recipe
from gradmem_lib.model.linear import linear_layers
from gradmem_lib.names import CHECKPOINTING, OFFLOAD, PRECISIONS, SELECTIVE, SHARDING
from gradmem_lib.techniques.losses import chunked_cross_entropy
from gradmem_lib.techniques.precision import MasterAdamW
from gradmem_lib.techniques.quantized import Linear4bit


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"precision": "fp8"}, "choose one of"),
        ({"precision": 16}, "did you mean 'autocast-fp16'"),
        ({"optimizer": "paged_adamw_8bit"}, "did you mean 'adamw-8bit'"),
        ({"attention": "flash"}, "did you mean 'fused'"),
        ({"attention": "flash_attention_2"}, "choose precision='autocast-bf16'"),
        ({"checkpointing": "first_5"}, "did you mean 'first-5'"),
        ({"precision": torch.bfloat16}, "did you mean 'bf16'"),
        ({"optimizer": partial(torch.optim.NAdam, weight_decay=0.1)}, "not to functools.partial"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "give the class"),
        ({"optimizer": int}, "optimizer=.*int"),
        ({"optimizer": torch.optim.Adam, "sharding": "fsdp"}, "may need whole weights.*zero1"),
        ({"optimizer": torch.optim.Adam, "precision": "float32-master"}, "for the class Adam"),
        ({"accumulation": 0}, "at least 1"),
        ({"lora_rank": 2.5}, "whole number"),
        ({"lora_targets": "all-linear"}, "without a rank"),
        ({"lora_alpha": 8}, "lora_alpha=8 without a rank"),
        ({"lora_dropout": 0.1}, r"lora_dropout=0.1 without a rank"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora_dropout=1.0: give a number from 0"),
        ({"lora_rank": 4, "lora_dropout": True}, "lora_dropout=True: give a number from 0"),
        ({"lora_rank": 4, "lora_alpha": float("nan")}, "lora_alpha=nan: give a positive"),
        ({"momentum": 1, "optimizer": "sgd"}, "below 1"),
        ({"chunked_loss": 1024}, "True or False"),
        ({"in_backward": True, "accumulation": 2}, "with accumulation=2"),
        ({"in_backward": True, "precision": "autocast-fp16"}, "with precision='autocast-fp16'"),
        ({"in_backward": True, "sharding": "ddp"}, "with sharding='ddp'"),
    ],
)
def test_impossible_recipes(settings, says):
    """Which two choices do not go together is in the table below."""
    with pytest.raises(ValueError, match=says):
        Recipe(**settings)


VALUES = {
    "precision": (*PRECISIONS, None),
    # Those of the table below. Another one's refusals follow from its row (test_rows.py).
    "optimizer": (
        "adamw",
        "adamw-foreach",
        "adamw-fused",
        "adamw-8bit",
        "adamw-stochastic",
        "adafactor",
        "adafactor-torch",
        "sgd",
    ),
    "momentum": (0.0, 0.5),
    "in_backward": (False, True),
    "checkpointing": (None, *CHECKPOINTING, *SELECTIVE, "first-1", 2, (1, 1)),
    "every_n_layers": (None, 1, 2),
    "offload": (None, *OFFLOAD),
    "sharding": (None, *SHARDING),
    "accumulation": (1, 2),
    "lora_rank": (None, 2),
    "lora_targets": ((), ("q_proj",)),
    "quantized_base": (False, True, "fp4"),
    "compute_dtype": (None, "bf16"),
    "chunked_loss": (False, True),
}
EXACT, SHARDS = {None, "float32", "bf16", "autocast-bf16", "autocast-fp16"}, {"zero2", "fsdp"}
# optimizers that want whole weights
WHOLE = {"precision": EXACT, "sharding": {None, "ddp", "zero1"}}
# What a choice leaves to the others.
PARTNERS = {
    ("momentum", 0.5): {"optimizer": {"sgd"}},
    ("in_backward", True): {
        "accumulation": {1},
        "sharding": {None, *SHARDS},
        "precision": {*EXACT, "float32-master"} - {"autocast-fp16"},
    },
    ("optimizer", "adamw-8bit"): WHOLE,
    ("optimizer", "adafactor"): WHOLE,
    ("optimizer", "adafactor-torch"): WHOLE,
    ("optimizer", "adamw-stochastic"): {"precision": {"bf16", None}, "sharding": {None, "zero1"}},
    ("optimizer", "sgd"): {"precision": EXACT},
    ("lora_targets", ("q_proj",)): {"lora_rank": {2}},
    ("quantized_base", True): {"lora_rank": {2}},
    ("quantized_base", "fp4"): {"lora_rank": {2}},
    ("compute_dtype", "bf16"): {"quantized_base": {True, "fp4"}},
    ("every_n_layers", 1): {"checkpointing": {None}},
    ("every_n_layers", 2): {"checkpointing": {None}},
    ("checkpointing", "best"): {
        "offload": {None, "boundaries", "parameters"},
        "sharding": {None, "ddp", "zero1"},
    },
    ("chunked_loss", True): {"sharding": {None}},
    ("offload", "parameters"): {"sharding": {"fsdp"}},
}
BASES = [
    {},
    {"lora_rank": 2, "precision": "bf16"},
    {"checkpointing": "per-layer", "precision": None},
    {"sharding": "fsdp", "precision": "float32-master"},
    {"sharding": "zero1", "optimizer": "adamw-stochastic", "precision": "bf16"},
    {"optimizer": "sgd", "in_backward": True},
]


def test_what_goes_with_what():
    """Every two choices on top of each base: refused where the table says so, and nowhere else."""
    choices = [(field, value) for field, values in VALUES.items() for value in values]
    plain = {field: next(iter(values)) for field, values in VALUES.items()}
    for base in BASES:
        for pair in combinations(choices, 2):
            fields = plain | base | dict(pair)
            partners = [PARTNERS.get(choice, {}) for choice in fields.items()]
            fine = all(
                fields[field] in allowed for others in partners for field, allowed in others.items()
            )
            inputs = fields["every_n_layers"] or fields["checkpointing"] not in (None, *SELECTIVE)
            fine = fine and (inputs or fields["offload"] != "boundaries")
            cut = fields["sharding"] in SHARDS and fields["precision"] == "float32-master"
            fine = fine and not (cut and fields["lora_rank"])
            try:
                Recipe(**fields)
            except ValueError:
                assert not fine, fields
            else:
                assert fine, fields


def test_rows_of_a_micro_batch():
    recipe = Recipe(accumulation=4, lora_rank=2, lora_targets="q_proj")
    assert recipe.micro_batch(12) == 3
    assert recipe.lora_targets == ("q_proj",)
    with pytest.raises(
        ValueError, match="batch_size=6 cannot be cut into equal micro-batches by accumulation=4"
    ):
        recipe.micro_batch(6)
    with pytest.raises(ValueError, match="batch_size=0: give a whole number"):
        recipe.micro_batch(0)


def test_a_recipe_is_a_key():
    """Equal ones are the same key, also where the schedule was given as a list, and none changes
    afterwards.
    """
    recipe = Recipe(checkpointing=[2, 1])
    assert {recipe: 1}[Recipe(checkpointing=(2, 1))] == 1
    assert Recipe(lora_rank=4, lora_targets="all-linear") == Recipe(lora_rank=4)
    with pytest.raises(FrozenInstanceError):
        recipe.precision = "bf16"


@pytest.mark.parametrize(
    ("precision", "sharding", "weights", "computed"),
    [
        ("float32", None, torch.float32, None),
        ("bf16", "fsdp", torch.bfloat16, None),
        (None, None, None, None),
        ("float32-master", "zero1", torch.bfloat16, None),
        ("float32-master", "zero2", torch.float32, None),
        ("autocast-fp16", "ddp", torch.float32, torch.float16),
    ],
)
def test_dtypes_of_a_precision(precision, sharding, weights, computed):
    recipe = Recipe(precision=precision, sharding=sharding)
    assert (recipe.weight_dtype, recipe.autocast_dtype) == (weights, computed)


LAID_OUT = {
    "in rows": lambda t: t,
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT.contiguous().mT,
    "complex": lambda t: torch.complex(t, t.flip(0)),
}


def end_of(kind, start, gradients, **settings):
    """Where steps with these gradients lead."""
    parameter = nn.Parameter(start.clone())
    optimizer = kind([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.to(start.dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("how", LAID_OUT)
# With 8-bit states, of a whole number of blocks and not; and, below 4,096 numbers, without.
@pytest.mark.parametrize("width", [9, 3])
def test_8bit_steps_go_where_those_of_32_bits_go(how, width):
    torch.manual_seed(0)
    start, *gradients = (LAID_OUT[how](torch.randn(16, width, 5, 6)) for _ in range(4))
    kinds = AdamW8bit, torch.optim.AdamW
    ours, theirs = (end_of(kind, start, gradients, lr=0.01, weight_decay=0.1) for kind in kinds)
    assert ours.stride() == start.stride()
    assert (ours - theirs).abs().max() < (1e-6 if width == 3 else 0.002)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64])
def test_masters_are_adamw_in_float32_rounded_or_in_what_holds_more(dtype):
    """Each update of a weight in bf16 is far below its last bit."""
    torch.manual_seed(0)
    start = torch.randn(4, 75, dtype=dtype)
    gradients = [torch.randn(4, 75, dtype=dtype) + 0.5 for _ in range(20)]
    wide = start.to(torch.promote_types(dtype, torch.float32))
    ours = end_of(MasterAdamW, start, gradients, lr=1e-4)
    theirs = end_of(torch.optim.AdamW, wide, gradients, lr=1e-4).to(dtype)
    assert not torch.equal(ours, start)
    torch.testing.assert_close(ours, theirs, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
@pytest.mark.parametrize("autocast", [False, True])
def test_chunked_cross_entropy_is_cross_entropy(frozen, autocast):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 12), torch.randn(30, 12)
    tensors = {"hidden": hidden, "weight": weight}
    trained = [t.requires_grad_() for name, t in tensors.items() if name != frozen]
    labels = torch.randint(0, 30, (50,))
    labels[::7] = -100
    own = nn.functional.cross_entropy(hidden @ weight.T, labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunks = chunked_cross_entropy(hidden, weight, labels, 16)
    limit = 0.02 if autocast else 1e-5
    assert chunks.item() == pytest.approx(own.item(), rel=limit)
    found, expected = (torch.autograd.grad(loss * 3, trained) for loss in (chunks, own))
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - exact).norm() < limit * exact.norm()


def test_a_chunk_is_let_go_before_the_next():
    """By the CPU allocator's events: three chunks need what one does, and the gradient of
    two more.
    """
    weight, tokens, width = torch.randn(4000, 8, requires_grad=True), 16, 8
    peaks = []
    for chunks in (1, 3):
        hidden = torch.randn(chunks * tokens, width, requires_grad=True)
        labels = torch.zeros(len(hidden), dtype=torch.long)
        peaks.append(allocator_peak(partial(chunked_cross_entropy, hidden, weight, labels, tokens)))
    logits = tokens * len(weight) * 4
    assert 2 * logits < peaks[0] and peaks[1] - peaks[0] < logits // 10


CONV1D = transformers.pytorch_utils.Conv1D(10, 6)


@pytest.mark.parametrize("base", [nn.Linear(6, 10), CONV1D])
def test_lora_starts_at_the_base_is_scaled_by_alpha_over_rank_and_merges(base):
    torch.manual_seed(1)
    layer, x = LoRALinear(base, 3, alpha=12), torch.randn(4, 6)
    torch.manual_seed(1)
    assert torch.equal(layer.A, nn.Linear(6, 3, bias=False).weight)
    assert torch.equal(layer(x), base(x)) and LoRALinear(base, 3).scale == 2
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["A", "B"]
    nn.init.normal_(layer.B)
    expected = base(x) + 4 * (x @ layer.A.T @ layer.B.T)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.merged()(x), expected)


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class NeedsMore(nn.Linear):
    def forward(self, x, residual):
        return super().forward(x) + residual


class Loud(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_linear_layers_take_a_tensor_and_return_one():
    model = nn.Sequential(Router(4, 4), NeedsMore(4, 4), Loud(4, 4), nn.Linear(4, 4))
    assert list(linear_layers(model)) == ["2", "3"]


@pytest.mark.parametrize(
    "base", [nn.Embedding(9, 9), Linear4bit(nn.Linear(64, 64)), None, nn.Linear(9, 9)]
)
def test_lora_is_for_linear_layers_and_a_rank(base):
    with pytest.raises(
        ValueError, match=r"give an nn\.Linear or Conv1D, and a rank of at least 1, not"
    ):
        LoRALinear(base, 0 if type(base) is nn.Linear else 4)
