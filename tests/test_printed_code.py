"""The code that a plan prints runs, for every kind of model that plan accepts, and takes the step of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoConfig, TrainerCallback

from gradmem_lib.planning.code import code
from gradmem_lib.planning.options import Option
from gradmem_lib.planning.plan import plan
from gradmem_lib.training.recipe import Recipe

ROWS, TOKENS, VOCAB, IMAGE_TOKEN = 4, 16, 96, 95
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = WIDE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
VIT = {
    name: WIDE[name]
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
VIT |= {"image_size": 16, "patch_size": 8}
KINDS = {
    "LlamaForCausalLM": ("llama", WIDE),
    "GPT2LMHeadModel": (
        "gpt2",
        TEXT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "BertForMaskedLM": ("bert", BERT),
    "RobertaForMaskedLM": ("roberta", BERT),
    "DebertaV2ForMaskedLM": ("deberta-v2", BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "BertForTokenClassification": ("bert", BERT | {"num_labels": 5}),
    "T5ForConditionalGeneration": (
        "t5",
        TEXT | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
                "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": (
        "bart",
        TEXT | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
                "max_position_embeddings": 64},
    ),
    "ViTForImageClassification": ("vit", VIT | {"num_labels": 3}),
    "LlavaForConditionalGeneration": (
        "llava",
        {"vision_config": {"model_type": "clip_vision_model", **VIT}, "text_config": {"model_type": "llama", **WIDE},
         "image_token_index": IMAGE_TOKEN, "image_seq_length": 4, "vision_feature_layer": -1},
    ),
}  # fmt: skip


def config_of(name: str):
    kind, fields = KINDS[name]
    config = AutoConfig.for_model(kind, **fields)
    config.architectures = [name]
    return config


def model_of(name: str):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, name)(config_of(name)).train()


class Rows(Dataset):
    """Rows of one kind, whose numbers of labels that count are 15, 9, 6 and 2 where they can differ."""

    def __init__(self, name: str):
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, IMAGE_TOKEN, (ROWS, TOKENS), generator=draw)
        labels = ids.clone()
        for row, counted in enumerate((15, 9, 6, 2)):
            labels[row, : TOKENS - counted] = -100
            if row == 0:
                labels[0, :1] = ids[0, :1]  # a label that a shifted loss leaves out
        self.rows = {"input_ids": ids, "labels": labels}
        if name.endswith("SequenceClassification"):
            self.rows["labels"] = torch.tensor([0, 2, 1, 1])
        elif name.endswith("TokenClassification"):
            self.rows["labels"] = torch.where(labels == -100, -100, labels % 5)
        elif name.startswith("ViT"):
            self.rows = {
                "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=draw),
                "labels": torch.tensor([0, 2, 1, 1]),
            }
        elif name.startswith("Llava"):
            ids[:, 1:5] = IMAGE_TOKEN
            labels[:, 1:5] = -100
            self.rows["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict:
        return {name: tensor[i] for name, tensor in self.rows.items()}


class Gradients(TrainerCallback):
    """The gradients that an optimizer's step is taken with."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run(text: str, folder, **space) -> dict:
    """What the code leaves behind, with one step of its trainer watched: nothing else of it is changed."""
    more = f", max_steps=1, max_grad_norm=0, live=False, progress=False, callbacks=callbacks, output_dir={str(folder)!r}"
    text = text.replace("train_dataset=train_dataset", "train_dataset=train_dataset" + more)
    exec(compile(text, "plan", "exec"), space)
    return space


def option_of(made, **changes) -> Option:
    option = made.closest
    return replace(option, recipe=Recipe(**changes), micro_batch=ROWS // changes.get("accumulation", 1))


@pytest.fixture(scope="module")
def planned():
    """A plan for each kind of model, made once: that plan accepts the kind is part of what is tested."""
    made = {}

    def of(name: str):
        if name not in made:
            model = model_of(name)
            made[name] = plan(model, card="1 GiB", seq_len=TOKENS, global_batch=ROWS, target="cpu")
        return made[name]

    return of


def whole_batch(name: str) -> tuple[torch.nn.Module, dict]:
    model, rows = model_of(name), Rows(name).rows
    model(**rows).loss.backward()
    return model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", KINDS)
def test_the_trainer_of_printed_code_has_the_whole_batchs_gradient(name, planned, tmp_path):
    made = planned(name)
    text = code(option_of(made, optimizer="sgd", accumulation=ROWS), config_of(name), made.config, "cpu")
    assert f"import {name}" in text
    gradients = Gradients()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        run(text, tmp_path, config=config_of(name), train_dataset=Rows(name), callbacks=[gradients])
    _, wanted = whole_batch(name)
    assert wanted.keys() == gradients.found.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients.found[parameter], gradient, rtol=2e-5, atol=2e-6, msg=parameter)


@pytest.mark.parametrize("name", KINDS)
def test_the_loop_of_printed_code_steps_as_torch_does(name, planned, tmp_path):
    made = planned(name)
    text = code(option_of(made, optimizer="sgd", in_backward=True), config_of(name), made.config, "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        space = run(text, tmp_path, config=config_of(name), train_dataset=Rows(name))
    model, gradients = whole_batch(name)
    assert len(gradients) > 10 and space["loss"] == pytest.approx(
        model(**Rows(name).rows).loss.item(), rel=1e-5
    )
    found = dict(space["model"].named_parameters())
    for parameter, before in model.named_parameters():
        assert found[parameter].grad is None
        if parameter in gradients:
            after = before.detach() - 1e-4 * gradients[parameter]
            torch.testing.assert_close(found[parameter].detach(), after, rtol=1e-6, atol=1e-8, msg=parameter)
