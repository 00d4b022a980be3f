"""Costs of a recipe against what is counted by hand, by torch, and on real models: absolute
numbers, not orders.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from support.families import OLDER
from support.nightly import each
from support.oracle import nbytes
from support.predicted import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, BertForMaskedLM, MixtralForCausalLM

from gradmem_lib import CARDS, Recipe, known_model, predict, prepare, step
from gradmem_lib.optimizers import OPTIMIZERS
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.cost import seconds_per_token
from gradmem_lib.planning.held import overhead_of_prediction, resident_bytes, saved_bytes_per_token
from gradmem_lib.planning.options import describe
from gradmem_lib.planning.recomputed import recompute_fraction
from gradmem_lib.planning.work import Work, count

FAST = Card("one operation a second, endless bandwidth", 1, 2.0, 2.0, math.inf)
WIDE = Card("endless operations, one byte a second", 1, math.inf, math.inf, 1.0)
RTX_4090 = CARDS["RTX 4090 24GB"]


@pytest.fixture(scope="module")
def work() -> Work:
    return count(tiny().config)


def test_sizes_of_llama_2_7b_by_hand():
    """From the paper's table: 32 layers of width 4096 with an MLP of 11008, 32,000 words, output
    layer not tied.
    """
    found = count(known_model("Llama-2-7B")[1])
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert found.sized.matrices == 32 * layer and found.sized.head_entries == 32000 * 4096
    assert found.parameters == 32 * (layer + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert found.linear_widths == 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert (
        found.sized.scores == 32 * 4096 and found.layers == 32 and found.sized.vocabulary == 32000
    )
    assert found.sized.causal and found.chunked and found.sized.fused and found.sized.experts == 0
    assert sum(map(math.prod, found.sized.trained_shapes.elements())) == found.parameters


def test_sizes_of_other_kinds_by_hand():
    bert = count(known_model("BERT-base")[1])
    assert (
        not bert.sized.causal
        and not bert.chunked
        and bert.sized.vocabulary == 30522
        and bert.sized.head_entries == 30522 * 768
    )
    assert bert.sized.matrices == 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 768
    t5 = count(known_model("T5-small")[1])
    assert t5.sized.scores == 3 * 6 * 8 * 64 and not t5.sized.causal
    assert t5.layers == 6 + 6 and recompute_fraction(t5, Recipe(checkpointing="first-3")) == 3 / 12
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    mixtral = count(
        AutoConfig.for_model("mixtral", num_local_experts=8, num_experts_per_tok=2, **sizes)
    )
    assert mixtral.sized.experts == 3 * 2 * (3 * 32 * 48) and mixtral.sized.matrices == 3 * (
        4 * 32 * 32
    )
    gemma = count(known_model("Gemma-2-2B")[1])
    # Its logits are capped, in chunks too; its heads are wider than hidden / heads.
    assert gemma.chunked and gemma.sized.scores == 26 * 8 * 256


def test_seconds_of_a_token_by_hand():
    """Llama-2-7B on an RTX 4090, 4 x 2 rows of 2,048 tokens: from the data sheet and the paper's
    sizes alone.
    """
    parameters, matrices, head, scores = 6_738_415_616, 6_476_005_376, 131_072_000, 131_072
    # two products of (2048, 128) matrices a head, half of them masked
    forward = 2 * (matrices + head) + 2 * 2048 * scores
    # Numbers a parameter: read in forward and backward; a gradient written twice over and read;
    # then weights read and written, gradients read, and two states read and written.
    moved = 4 * (2 + 3) + (4 * 3 + 4 * 4) / 4
    recipe = Recipe(optimizer="adamw-fused", accumulation=4)
    found = seconds_per_token(count(known_model("Llama-2-7B")[1]), recipe, RTX_4090, 2, 2048)
    computed = 3 * forward / (83e12 / 2)
    assert found == pytest.approx(computed + moved * parameters / 4096 / 1008e9, rel=1e-12)


def test_what_is_moved_crosses_the_bus_away_and_back():
    """The inputs of Llama-2-7B's 32 layers, 4,096 bf16 numbers a token, over PCIe 4 at 80 % of its
    31.5 GB a second.
    """
    work, alone = (
        count(known_model("Llama-2-7B")[1]),
        Recipe(precision="bf16", checkpointing="per-layer"),
    )
    moving, sizes = replace(alone, offload="boundaries"), (RTX_4090, 2, 2048)
    nbytes = 2 * 32 * 4096 * 2
    longer = seconds_per_token(work, moving, *sizes) - seconds_per_token(work, alone, *sizes)
    assert longer == pytest.approx(nbytes / (0.8 * 31.5e9))
    said = seconds_per_token(work, moving, *sizes, offload_bytes=nbytes)
    assert said == seconds_per_token(work, moving, *sizes)


def counted_by_torch(model, ids) -> int:
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    return flops.get_total_flops()


def test_operations_are_those_that_torch_counts_also_when_layers_run_twice_or_weights_are_frozen():
    # torch counts whole matrices of scores, also where half of them is masked.
    whole = count(tiny().config)
    whole.sized.causal = False

    def counted(recipe):
        model, _, undo = prepare(tiny(attention="eager"), recipe)
        with undo:
            return counted_by_torch(model, torch.randint(0, 512, (2, 64)))

    def estimated(recipe):
        return seconds_per_token(whole, recipe, FAST, 2, 64) * 2 * 64

    plain = Recipe(attention="eager")
    positions = 2 * 8 * 64 if OLDER else 0  # times frequencies, as a product of matrices
    assert estimated(plain) == counted(plain) - positions
    again = replace(plain, checkpointing="per-layer")
    # A checkpoint ends its second forward where the last tensor that it needs is made: without each
    # layer's last product.
    assert estimated(again) - counted(again) + positions == 2 * (2 * 172 * 64) * (2 * 64)
    assert (
        estimated(replace(plain, every_n_layers=2)) - estimated(plain)
        == (estimated(again) - estimated(plain)) / 2
    )
    lora = replace(plain, lora_rank=16)
    # The first layer's adapters need no gradient of the embedding.
    assert counted(lora) == pytest.approx(estimated(lora), rel=0.06)


@pytest.mark.parametrize("kind", [BertForMaskedLM, MixtralForCausalLM])
def test_operations_of_other_kinds(kind):
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
    )
    config = kind.config_class(**sizes, pad_token_id=0, attn_implementation="eager")
    if kind is MixtralForCausalLM:
        config.num_key_value_heads = 4
        config._experts_implementation = "eager"
    model = kind(config).train()
    counted = counted_by_torch(model, torch.randint(1, 128, (1, 64)))
    work = count(config)
    work.sized.causal = False  # the counter below counts all pairs
    found = seconds_per_token(work, Recipe(), FAST, 1, 64) * 64
    # The routers, of 8 columns, are no linear layers.
    assert found == pytest.approx(counted, rel=0.02)


def test_bytes_moved_by_hand(work):
    def moved(recipe, micro=1):
        return seconds_per_token(work, recipe, WIDE, micro, 1) * micro

    p, m, a = work.parameters, work.sized.matrices, 16 * work.linear_widths
    head = work.sized.head_entries
    sgd = Recipe(precision="bf16", optimizer="sgd")
    assert moved(sgd) == pytest.approx(2 * 2 * p + 6 * p + 6 * p)
    assert moved(replace(sgd, checkpointing=1)) == pytest.approx(moved(sgd) + 2 * p)
    assert moved(replace(sgd, every_n_layers=2)) == pytest.approx(moved(sgd) + p)
    assert moved(replace(sgd, accumulation=6)) == pytest.approx(moved(sgd) - 5 * p)
    assert moved(replace(sgd, momentum=0.9)) == pytest.approx(moved(sgd) + 2 * 2 * p)
    # The master copy, and two moments in float32, are read and written.
    masters = replace(sgd, precision="float32-master", optimizer="adamw-fused")
    assert moved(masters) == pytest.approx(moved(sgd) + 3 * 2 * 4 * p)
    mixed = replace(sgd, precision="autocast-bf16")
    assert moved(mixed) == pytest.approx(2 * (4 * p + 4 * (m + head)) + 12 * p + 12 * p)
    lora = replace(sgd, lora_rank=16)
    assert moved(lora) == pytest.approx(2 * 2 * p + 6 * a + 6 * a)
    assert moved(replace(lora, quantized_base=True)) == pytest.approx(moved(lora) + 2 * 2.5 * m)


def test_rates_by_precision_and_card(work):
    turing = replace(FAST, half=8.0, capability=(7, 5))

    def seconds(precision, card=turing):
        return seconds_per_token(work, Recipe(precision=precision), card, 1, 8)

    assert (
        seconds("float32")
        == seconds("bf16")
        == seconds("autocast-bf16")
        == 4 * seconds("autocast-fp16")
    )
    ampere = replace(turing, capability=(8, 0))
    assert seconds("bf16", ampere) == seconds("autocast-fp16") and seconds(
        "float32", ampere
    ) == seconds("float32")


def test_bytes_that_a_token_keeps_at_least(work):
    """Linear layers take and return 2 x (4 x 128 + 3 x 236) numbers a token, of which half is
    counted, and 512 logits.
    """
    layers = 4 * (64 + 64) + 3 * (64 + 172)

    def kept(**changes):
        return saved_bytes_per_token(work, Recipe(**changes))

    assert kept() == 4 * (layers + 512) and kept(precision="bf16") == 2 * (layers + 512)
    assert kept(precision="autocast-bf16", chunked_loss=True) == 2 * layers
    assert kept(every_n_layers=2) == 4 * (layers / 2 + 512)
    assert (
        kept(checkpointing="per-layer")
        == kept(checkpointing=1, chunked_loss=True)
        == 4 * layers / 2
    )
    with_one, with_many_words = replace(work), replace(work, sized=replace(work.sized))
    with_one.__dict__["layers"] = 0
    with_many_words.sized.vocabulary = 999
    assert saved_bytes_per_token(with_one, Recipe(checkpointing=1)) == 4 * layers
    assert saved_bytes_per_token(with_many_words, Recipe(checkpointing=1)) == 4 * 999


RESIDENTS = [
    *(Recipe(precision="bf16", optimizer=name) for name in OPTIMIZERS),
    *(Recipe(optimizer=name) for name, row in OPTIMIZERS.items() if not row.rounds_by_chance),
    *(
        Recipe(precision="float32-master", optimizer=name)
        for name, row in OPTIMIZERS.items()
        if row.master is not None
    ),
    Recipe(precision="bf16", optimizer="sgd", momentum=0.9),
    Recipe(precision="autocast-bf16", optimizer="adamw-fused"),
    Recipe(precision="bf16", optimizer="adafactor-torch", in_backward=True),
    Recipe(precision="bf16", lora_rank=16),
    Recipe(precision="autocast-bf16", lora_rank=16),
    Recipe(precision="bf16", lora_rank=16, quantized_base=True),
    Recipe(lora_rank=16, quantized_base=True),
    Recipe(precision="autocast-bf16", lora_rank=16, quantized_base=True),
]


@pytest.mark.parametrize("recipe", each(3, RESIDENTS), ids=describe)
def test_resident_bytes_are_those_of_real_models(work, recipe):
    model, optimizer, undo = prepare(tiny(), recipe)
    ids = torch.randint(0, 512, (1, 8))
    with undo:
        step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe)
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        found = resident_bytes(work, recipe)
        expected, smallest = found["optimizer"], 0
        if recipe.optimizer == "adamw-8bit":
            # Small tensors' states stay in the weights' dtype: they are left out here.
            smallest = 4096
            large = sum(p.numel() for p in model.parameters() if p.numel() >= smallest)
            expected *= large / work.parameters
            expected += 2 * 4 * 256  # what the codes of both moments mean: one table for each
        # AdamW counts its steps in tensors of 4 bytes, without dimensions.
        states = []
        for each in optimizers:
            for p, state in each.state.items():
                if p.numel() >= smallest:
                    states += [t for t in state.values() if torch.is_tensor(t) and t.dim()]
        assert nbytes(states) == pytest.approx(expected, rel=0, abs=1)
        slack = 0.01 if recipe.quantized_base else 0
        assert found["parameters"] == pytest.approx(nbytes(model.parameters()), rel=slack)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert found["gradients"] == nbytes(gradients)


def test_what_lies_beside_the_live_bytes():
    config = tiny().config
    found = predict(config, batch_size=1, seq_len=8, target="cuda")
    roughly = overhead_of_prediction(found, (8, 6), replay=False)
    assert roughly == {
        "allocator (estimate)": round(found.peak.total / 20),
        "cuBLAS workspace": 2 * (8 * 2**20 + 128 * 1024),
        "CUDA context": 500 * 2**20,
    }
    replayed = overhead_of_prediction(found, (9, 0))
    assert replayed == {
        "allocator's idle blocks": found.replay_allocator() - found.peak.total,
        "cuBLAS workspace": 2 * 32 * 2**20,
        "CUDA context": 500 * 2**20,
    }
    assert overhead_of_prediction(predict(config, batch_size=1, seq_len=8, target="cpu")) == {}


class TwoMeans(transformers.LlamaForCausalLM):
    """A loss of one's own: the mean over labels, and the mean over rows."""

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, labels=labels, **kwargs)
        per_row = output.logits.square().mean(dim=(1, 2))
        if labels is not None:
            lengths = labels.ne(-100).sum(dim=1)
            output.loss = output.loss + (per_row / (1 + lengths)).mean()
        return output


def test_a_plan_asks_a_tiny_copy_whether_the_loss_may_be_cut(monkeypatch):
    config, state = tiny().config, torch.get_rng_state()
    count(config)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(
        "gradmem_lib.prediction.predict.skeleton", lambda config: TwoMeans(config).to("meta")
    )
    with pytest.raises(ValueError, match="the loss of TwoMeans is no mean over labels or rows"):
        count(config)
