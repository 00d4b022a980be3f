"""chunked_loss is the model's own loss, or refused: for every kind of output layer, found by
running both.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from support.families import tiny_config
from support.gradients import error, gradient, own_loss, taken_gradient
from support.nightly import each
from support.trainers import small
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gradmem_lib import MemoryTracker, Recipe, next_token_loss, predict
from gradmem_lib.training.losses import (
    check_pieces,
    chunked_loss,
    count_items,
    form_or_refusal,
)
from gradmem_lib.training.tiny import VOCABULARY, tiny_model


def causal(name, **options):
    config = getattr(transformers, f"{name}Config")(**options)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


def batch_of(ids):
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("name", "options"),
    each(
        2,
        [
            ("Llama", {}),
            ("GPT2", {}),
            ("Mixtral", {}),
            ("Mamba", {}),
            # with a bias, scaled, or capped
            ("Phi", {}),
            ("GPTJ", {}),
            ("GraniteMoe", {"logits_scaling": 6.0}),
            ("Cohere2", {}),
            ("RecurrentGemma", {}),
            ("FalconH1", {"lm_head_multiplier": 0.02}),
            ("Gemma2", {"final_logit_softcapping": 7.0}),
        ],
    ),
)
def test_what_is_equal_is_taken(name, options):
    """In float64, loss and gradient are those of the model's own logits."""
    cls, config = causal(name, **options)
    assert not isinstance(form_or_refusal(cls, config), str)
    torch.manual_seed(0)
    model, limit = tiny_model(cls, config).eval(), 1e-5
    if name not in ("Mixtral", "GraniteMoe", "Mamba"):  # parts of them run in float32 alone
        model, limit = model.double(), 1e-10
    head = model.get_output_embeddings()
    for parameter in head.parameters():
        parameter.data.normal_(std=5 / head.in_features**0.5)
    ids = torch.randint(3, VOCABULARY, (2, 80))
    own = own_loss(model, batch_of(ids))
    own.backward()
    expected = taken_gradient(model)
    loss = chunked_loss(model, batch_of(ids))
    loss.backward()
    assert loss.item() == pytest.approx(own.item(), rel=limit)
    assert error(gradient(model), expected) <= limit


def test_a_scale_of_the_width_is_refused():
    """The tiny copy's would be another one."""
    cls, config = causal("Llama")

    class Scaled(cls):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / self.config.hidden_size
            if kwargs.get("labels") is not None:
                out.loss = self.loss_function(out.logits, kwargs["labels"], out.logits.shape[-1])
            return out

    assert "more than a cross-entropy" in form_or_refusal(Scaled, config)


def test_what_is_no_language_model_and_what_has_flags_is_refused():
    classifier = transformers.BertForSequenceClassification
    assert isinstance(form_or_refusal(classifier, tiny_config("bert")), str)
    assert "is none" in form_or_refusal(torch.nn.Linear, None)
    ids, chunked = torch.randint(3, VOCABULARY, (2, 10)), Recipe(chunked_loss=True)
    model, routed = tiny_model(*causal("Mixtral")), causal("Mixtral", output_router_logits=True)
    for refused, more, says in (
        (model, {"output_router_logits": True}, "no flags"),
        (model, {"shift_labels": ids}, "other labels"),
        (tiny_model(*routed), {}, r"leave chunked_loss out: .*more than a cross-entropy"),
    ):
        with pytest.raises(ValueError, match=says):
            chunked_loss(refused, batch_of(ids) | more)
    with pytest.raises(ValueError, match="Linear is none"):
        predict(torch.nn.Linear(2, 2), batch=torch.ones(2, 2), recipe=chunked, target="cpu")


def with_a_cap(model):
    class Capped(torch.nn.Linear):
        def forward(self, x):
            return 2 * torch.tanh(super().forward(x) / 2)

    model.lm_head = Capped(model.config.hidden_size, model.config.vocab_size, bias=False)


def with_a_hook(model):
    model.lm_head.register_forward_hook(lambda module, args, out: out.tanh())


def with_a_forward(model):
    model.lm_head.forward = lambda x: 5 * torch.nn.functional.linear(x, model.lm_head.weight)


def with_a_loss(model):
    model.loss_function = lambda logits, labels, **more: logits.square().mean()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_a_cap, "on the output layer"),
        (with_a_hook, "on the output layer"),
        (with_a_forward, "on the output layer"),
        (with_a_loss, "a loss_function of its own"),
    ],
)
def test_what_was_changed_on_a_model_is_not_lost_in_chunks(change, says):
    model = tiny_model(*causal("Llama"))
    ids = torch.randint(3, VOCABULARY, (2, 40))
    chunked_loss(model, batch_of(ids))
    change(model)
    with pytest.raises(ValueError, match=f"leave chunked_loss out: .*{says}"):
        chunked_loss(model, batch_of(ids))


class Renamed(transformers.LlamaForCausalLM):
    """A name that says nothing."""


class LlamaForCausalLM(torch.nn.Module):
    """A name alone makes no language model."""


@pytest.mark.parametrize(
    ("model", "counted"),
    [
        (tiny_model(*causal("Llama")), 3),
        (tiny_model(Renamed, transformers.LlamaConfig()), 3),
        (tiny_model(*causal("GPT2")), 3),
        (LlamaForCausalLM(), 5),
        (torch.nn.Linear(1, 1), 5),
    ],
)
def test_labels_that_usually_count(model, counted):
    """Of two rows of 4, the first column predicts nothing where the model shifts, and -100 counts
    nowhere.
    """
    labels = torch.tensor([[7, 5, 2, -100], [1, -100, -100, 9]])
    assert count_items(model, {"labels": labels}) == counted
    wrapped = torch.nn.DataParallel(model)  # which has it as DistributedDataParallel has
    assert count_items(wrapped, {"labels": labels}) == counted
    assert count_items(model, {"labels": [1, 2], "input_ids": torch.zeros(3, 4)}) == 3  # rows
    assert count_items(model, (labels,)) == 2 and count_items(model, {}) == 1


def made(cls, **options):
    """A model without weights: what is asked of it is its class and its config."""
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(**options)
    return model


PLAIN, ROUTED = torch.nn.Linear(2, 2), "output_router_logits"


@pytest.mark.parametrize(
    ("cls", "options", "batch", "says"),
    [
        ("Linear", {}, {"return_loss": True}, "return_loss=True"),
        ("MixtralForCausalLM", {ROUTED: True}, {}, f"{ROUTED}=True"),
        ("MixtralForCausalLM", {ROUTED: False}, {ROUTED: True}, f"{ROUTED}=True"),
        ("MixtralForCausalLM", {ROUTED: True}, {ROUTED: False}, None),
        (
            "Qwen3VLMoeForConditionalGeneration",
            {"text_config": SimpleNamespace(output_router_logits=True)},
            {},
            f"{ROUTED}=True",
        ),
    ],
)
def test_a_loss_that_pieces_do_not_have_is_refused(cls, options, batch, says):
    model = made(getattr(transformers, cls), **options) if cls != "Linear" else PLAIN
    rows = {"input_ids": torch.zeros(2, 4)} | batch
    if says is None:
        check_pieces(model, rows, "accumulation=2")
    else:
        with pytest.raises(ValueError, match=f"accumulation=2 cuts the batch, and with {says}"):
            check_pieces(model, rows, "accumulation=2")
    check_pieces(PLAIN, torch.ones(2, 2), "accumulation=2")


def test_nobody_who_watches_sees_the_tiny_copy():
    model = small(layers=2)
    cls, config = type(model), model.config
    config.rope_theta = 12345.0
    ids, peaks = torch.randint(3, 200, (2, 40)), []
    for _ in range(2):  # the first time makes it
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with MemoryTracker(model, live=False) as tracker:
            chunked_loss(model, batch_of(ids)).backward()
        peaks.append((tracker.peak.total, torch.rand(()).item()))
    assert peaks[0] == peaks[1]
    config.rms_norm_eps = 2e-6  # and predict, whose tensors have no values
    recipe = Recipe(chunked_loss=True)
    assert predict(config, batch_size=2, seq_len=40, recipe=recipe, target="cpu").peak.total > 0
    # a name that Llama does not look at
    config.rms_norm_eps, config.final_logit_softcapping = 3e-6, 30.0
    assert not isinstance(form_or_refusal(cls, config), str)


def test_a_part_that_compares_tokens_is_said():
    model = tiny_model(*causal("Mixtral", output_router_logits=True))
    batch = batch_of(torch.randint(3, VOCABULARY, (2, 10)))
    with pytest.raises(ValueError, match=f"^set model.config.{ROUTED} = False"):
        next_token_loss(model, batch)
    model.config.output_router_logits = False
    assert next_token_loss(model, batch)[0] > 0


def test_logits_of_other_tokens_are_said():
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny_model(*causal("Llama")), settings)
    ids = torch.randint(3, VOCABULARY, (2, 10))
    said = r"^take the model's own loss.* logits of 14 tokens in a row, and there are 10 labels"
    with pytest.raises(ValueError, match=said):
        next_token_loss(model, batch_of(ids))
