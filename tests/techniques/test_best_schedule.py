"""``every="best"`` on whole models: never above one checkpoint a layer, whatever comes after the
layers.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
import transformers
from support.families import OLDER, tiny_config
from support.nightly import ALL, each
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.course import models
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.schedules import extra_forwards

LAYERS = 4
SIZES = dict(hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=96)
FEW_HEADS = SIZES | dict(num_key_value_heads=1)
MODELS = {
    "gpt_neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, SIZES),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        FEW_HEADS | dict(head_dim=16),
    ),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, FEW_HEADS),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        dict(n_embd=32, n_layer=LAYERS, n_head=2),
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
        FEW_HEADS | dict(head_dim=16),
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, SIZES),
    "smollm2": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        FEW_HEADS | dict(num_hidden_layers=8, tie_word_embeddings=True),
    ),
}


def language_model(family, vocab=600, **settings):
    kind, config, sizes = MODELS[family]
    torch.manual_seed(0)
    return kind(config(vocab_size=vocab, use_cache=False, **sizes | settings)).train()


def peaks(model, every, ids):
    """Peaks in bytes: of a first step, in which "best" measures, of a second micro-batch, and of
    another step.
    """
    found = []
    with checkpoint_layers(model, every) as handle, MemoryTracker(model, live=False) as tracker:
        for fresh in (True, False, True):
            if fresh:
                model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()
            found.append(tracker.window_peak().total)
    model.zero_grad(set_to_none=True)
    return found, handle


def peak(model, every, run, part=None):
    tracker = MemoryTracker(model, live=False)
    with checkpoint_layers(part or model, every) as handle, tracker:
        run()
    model.zero_grad(set_to_none=True)
    return tracker.peak.total, handle


@pytest.mark.parametrize("family", ["olmo2", "clip"])
def test_while_best_measures_autocast_keeps_no_casts(family):
    config = tiny_config(family)
    config.num_hidden_layers, config.use_cache = 5, False
    model = model_class(config)(config).train()
    batch = example_batch(model, 4, 48)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()

    assert peak(model, "best", run)[0] <= peak(model, 1, run)[0]


SETTINGS = list(itertools.product(((1, 8), (4, 48)), (True, False)))


@pytest.mark.parametrize("family", each(2, MODELS))
def test_best_is_never_above_one_a_layer_on_a_whole_language_model(family):
    """Few tokens and many, trained and frozen: two of the four in turn, and every night all."""
    model, turn = language_model(family), list(MODELS).index(family) % 2
    for shape, trained in SETTINGS if ALL else (SETTINGS[turn], SETTINGS[3 - turn]):
        ids = torch.randint(0, 500, shape)
        model.requires_grad_(trained)
        model.get_input_embeddings().weight.requires_grad_(True)
        single, _ = peaks(model, 1, ids)
        best, handle = peaks(model, "best", ids)
        assert all(b <= s for b, s in zip(best, single, strict=True)), (shape, trained, handle)


def test_measuring_needs_no_more_than_one_a_layer_where_layers_return_more_than_a_state():
    """Bloom's return the attention's weights too, which are kept for backward and which no gradient
    comes from.
    """
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=LAYERS, n_head=4, vocab_size=64, use_cache=False
    )
    model, ids = transformers.BloomForCausalLM(config).train(), torch.randint(0, 64, (2, 128))

    def run():
        model(input_ids=ids, labels=ids).loss.backward()

    single, _ = peak(model, 1, run)
    best, handle = peak(model, "best", run)
    weights = 2 * 4 * 128 * 128 * 4  # rows, heads, tokens, tokens, bytes
    assert best <= single and min(handle.internal) > weights


def test_best_is_below_one_a_layer_where_layers_keep_little():
    model = language_model("smollm2", vocab=64, num_hidden_layers=16)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    ids = torch.randint(0, 64, (4, 48))
    (single, _), (best, handle) = (peaks(model, every, ids) for every in (1, "best"))
    assert best[-1] < single[-1] and len(handle.segments) < len(handle.layers)


def test_best_given_the_list_alone_or_a_loss_outside_of_the_model_is_never_above_one_a_layer():
    model = language_model("llama")
    ids = torch.randint(0, 500, (4, 48))

    def run():
        logits = model(input_ids=ids).logits.float()
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    for part in (model, model.model.layers):
        assert peak(model, "best", run, part)[0] <= peak(model, 1, run, part)[0]


def test_layers_of_different_kinds_get_segments_of_their_own_from_best():
    model = language_model("gemma2")
    ids = torch.randint(0, 500, (2, 8))
    mask = torch.ones_like(ids)
    with checkpoint_layers(model, "best") as handle:
        model(input_ids=ids, labels=ids).loss.backward()
        assert handle.segments == [1] * LAYERS and not handle.keep_last
        mask[0, :3] = 0  # sliding and full attention have masks of their own now
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()


# Models with two lists, and other ways to run.


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=3,
            num_heads=2,
            num_decoder_layers=4,
            decoder_start_token_id=0,
            dropout_rate=0.2,
        )
    )


def test_encoder_and_decoder_get_a_schedule_each_and_the_same_gradients():
    torch.manual_seed(0)
    model = t5().train()
    model.config.use_cache = False
    ids = torch.randint(3, 50, (3, 8))
    inputs = {"input_ids": ids}

    def step(every):
        found = None
        with nullcontext() if every is None else checkpoint_layers(model, every) as handle:
            for _ in range(2):  # the first one measures
                model.zero_grad(set_to_none=True)
                with MemoryTracker(model, live=False) as tracker:
                    torch.manual_seed(2)
                    loss = model(**inputs, labels=ids, use_cache=False).loss
                    loss.backward()
                found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return found, tracker.peak.total, handle

    expected, plain, _ = step(None)
    peak = {}
    for every in (1, "best", "per-layer"):
        found, peak[every], handle = step(every)
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found)), every
        assert [sum(segments) for segments in handle.segments.values()] == [3, 4]
        assert list(handle.layers) == list(handle.segments) and len(handle.layers) == 2
    assert peak["best"] <= peak[1] < plain
    with pytest.raises(ValueError, match="several lists"):
        checkpoint_layers(model, [2, 1])
    # Its first layer makes the position bias of the others.
    several = pytest.raises(RuntimeError, match="more than their hidden state")
    with checkpoint_layers(model, 2), several:
        model(**inputs, labels=ids)


def half(model, how):
    layers = list(model.model.layers)[:2]
    if how == "ours":
        return checkpoint_layers(nn.ModuleList(layers), 1)
    if how == "a part of a layer":
        return checkpoint_layers(nn.Sequential(layers[0].mlp), 1)
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    return nullcontext()


@pytest.mark.parametrize(
    "how", ["ours", "a part of a layer", *([] if OLDER else ["every_n_layers"])]
)
def test_a_model_with_some_of_its_layers_checkpointed_already_is_refused(how):
    model = language_model("llama")
    with half(model, how), pytest.raises(RuntimeError, match="three times"):
        checkpoint_layers(model, 1)


def test_compiled_models_are_right_and_compiled_layers_refused():
    model, ids = language_model("llama", num_hidden_layers=3), torch.randint(0, 500, (2, 8))

    def gradients(run):
        model.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected, calls = gradients(model), []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda *a: calls.append(1))
        for layer in model.model.layers
    ]
    with checkpoint_layers(model, "best") as handle:
        compiled = torch.compile(model, backend="eager")
        gradients(compiled)
        calls.clear()
        assert torch.allclose(gradients(compiled), expected, atol=1e-6)
        assert len(calls) == 3 + extra_forwards(handle.segments, handle.keep_last)
    for hook in handles:
        hook.remove()
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match="compiled"):
        checkpoint_layers(model, 1)
    torch.compiler.reset()


@pytest.mark.parametrize("before", [True, False])
def test_best_is_refused_on_layers_that_fsdp_spreads_and_others_run_again(before):
    """In test_sharding.py the gradients are compared between real processes."""
    with fake_process_group(2, 0) as mesh:
        model = models.tiny_llama(layers=4, hidden=32, heads=2, intermediate=48, vocab=64)
        ids, calls = torch.randint(0, 64, (2, 8)), []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *a: calls.append(1))

        def spread():
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)

        if not before:
            spread()
        handle = checkpoint_layers(model, [[1, 1], 2] if before else [2, 2])
        if before:
            spread()
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(calls) == 4 + extra_forwards(handle.segments, handle.keep_last)
        handle.remove()
        with checkpoint_layers(model, "best"), pytest.raises(RuntimeError, match="spread"):
            model(input_ids=ids, labels=ids)
