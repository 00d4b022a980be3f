"""The code that a plan prints runs, for every kind of model that plan accepts, and takes the step
of the whole batch.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import transformers
from support.families import OLDER, PICTURES, tiny_config
from support.nightly import each
from support.predicted import tiny
from torch.utils.data import Dataset
from transformers import AutoConfig, TrainerCallback

from gradmem_lib.model.known import known_model
from gradmem_lib.planning.cards import find_card
from gradmem_lib.planning.options import Option
from gradmem_lib.planning.plan import plan
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.view.plan_code import plan_code

ROWS, TOKENS, IMAGE_TOKEN = 4, 16, 95
# The class that trains, its family, and what differs from the family's tiny config.
CLASSES = """
LlamaForCausalLM                llama
GPT2LMHeadModel                 gpt2
BertForMaskedLM                 bert
RobertaForMaskedLM              roberta
DebertaV2ForMaskedLM            deberta-v2  relative_attention=True, pos_att_type=["p2c", "c2p"]
BertForTokenClassification      bert        num_labels=5
BertForSequenceClassification   bert        num_labels=3
LlamaForSequenceClassification  llama       num_labels=3
BertForQuestionAnswering        bert
T5ForConditionalGeneration      t5
BartForConditionalGeneration    bart
ViTForImageClassification       vit
WhisperForConditionalGeneration whisper
LlavaForConditionalGeneration   llava
"""
KINDS = {}
for line in CLASSES.strip().splitlines():
    name, family, *settings = line.split(maxsplit=2)
    KINDS[name] = family, eval(f"dict({''.join(settings)})")
LLAVA = {"image_token_index": IMAGE_TOKEN, "image_seq_length": 4, "vision_feature_layer": -1}


def config_of(name: str):
    """Without dropout, so that two steps have the same gradients."""
    family, settings = KINDS[name]
    if family == "llava":
        vision = PICTURES["clip"]["vision_config"] | {"model_type": "clip_vision_model"}
        text = tiny_config("llama").to_dict()
        config = AutoConfig.for_model("llava", vision_config=vision, text_config=text, **LLAVA)
    else:
        config = tiny_config(family)
    for setting, value in vars(config).items():
        if "drop" in setting and isinstance(value, float):
            setattr(config, setting, 0.0)
    for setting, value in settings.items():
        setattr(config, setting, value)
    config.architectures = [name]
    return config


def model_of(name: str):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, name)(config_of(name)).train()


class Rows(Dataset):
    """Rows of one kind, whose numbers of labels that count are 15, 9, 6 and 2 where they can
    differ.
    """

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
        elif name.endswith("QuestionAnswering"):
            ends = {
                "start_positions": torch.tensor([0, 2, 1, 1]),
                "end_positions": torch.tensor([0, 5, 15, 3]),
            }
            self.rows = {"input_ids": ids} | ends
        elif name.startswith("ViT"):
            pixels = torch.randn(ROWS, 3, 32, 32, generator=draw)
            self.rows = {"pixel_values": pixels, "labels": torch.tensor([0, 2, 1, 1])}
        elif name.startswith("Whisper"):
            spectrogram = torch.randn(ROWS, 8, 32, generator=draw)
            self.rows = {"input_features": spectrogram, "labels": labels}
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
    """What the code leaves behind, with the first step of its trainer watched: nothing else of it
    is changed.
    """
    more = (
        ", max_steps=1, max_grad_norm=0, progress=False, "
        f"callbacks=callbacks, output_dir={str(folder)!r}"
    )
    text = text.replace("train_dataset=train_dataset", "train_dataset=train_dataset" + more)
    exec(compile(text, "plan", "exec"), space)
    return space


def option_of(made, **changes) -> Option:
    option = made.closest
    return replace(
        option, recipe=Recipe(**changes), micro_batch=ROWS // changes.get("accumulation", 1)
    )


if OLDER:
    del KINDS["BartForConditionalGeneration"]  # whose layers are drawn for: not predicted


@pytest.fixture(scope="module")
def planned():
    """A plan for each kind of model, made once: that plan accepts the kind is part of what is
    tested.
    """
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


def run_printed(name: str, made, folder, option: Option, **space) -> dict:
    """What the printed code of an option leaves behind, with its own rows."""
    config = config_of(name)
    text = plan_code(option, config, made.config, "cpu", example=made.example)
    assert f"import {name}" in text
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return run(text, folder, config=config, train_dataset=Rows(name), **space)


@pytest.mark.parametrize("name", each(3, KINDS))
def test_the_trainer_of_printed_code_has_the_whole_batchs_gradient(name, planned, tmp_path):
    made, gradients = planned(name), Gradients()
    option = option_of(made, optimizer="sgd", accumulation=ROWS)
    run_printed(name, made, tmp_path, option, callbacks=[gradients])
    _, wanted = whole_batch(name)
    assert wanted.keys() == gradients.found.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(
            gradients.found[parameter], gradient, rtol=2e-5, atol=2e-6, msg=parameter
        )


@pytest.mark.parametrize("name", each(3, KINDS, start=1))
def test_the_loop_of_printed_code_steps_as_torch_does(name, planned, tmp_path):
    made = planned(name)
    option = option_of(made, optimizer="sgd", in_backward=True)
    space = run_printed(name, made, tmp_path, option)
    model, gradients = whole_batch(name)
    rate = transformers.TrainingArguments("out").learning_rate
    assert len(gradients) > 10 and space["loss"] == pytest.approx(
        model(**Rows(name).rows).loss.item(), rel=1e-5
    )
    found = dict(space["model"].named_parameters())
    for parameter, before in model.named_parameters():
        assert found[parameter].grad is None
        if parameter in gradients:
            after = before.detach() - rate * gradients[parameter]
            torch.testing.assert_close(
                found[parameter].detach(), after, rtol=1e-6, atol=1e-8, msg=parameter
            )


BF16 = Recipe(precision="bf16", optimizer="adamw-fused")
LLAMA, BOTH = "LlamaForCausalLM", replace(BF16, checkpointing="first-1")


@pytest.mark.parametrize(
    ("name", "recipe"),
    each(
        3,
        [
            (LLAMA, replace(BF16, precision="autocast-bf16", every_n_layers=2)),
            (LLAMA, BOTH),
            (LLAMA, replace(BF16, chunked_loss=True, checkpointing="per-layer")),
            ("ViTForImageClassification", BOTH),
            (LLAMA, replace(BF16, optimizer="adafactor-torch", checkpointing="per-layer")),
            (LLAMA, replace(BF16, optimizer="adamw-8bit")),
            (LLAMA, replace(BF16, lora_rank=16, quantized_base=True)),
            ("WhisperForConditionalGeneration", BOTH),
        ],
    ),
)
def test_printed_code_needs_what_was_predicted(name, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(name)
    work = count(config, TOKENS)
    option = Search(work, find_card("24 GiB"), TOKENS, 2, "cpu").option(
        replace(recipe, accumulation=2)
    )
    text = plan_code(option, config, config, "cpu", example=work.example)
    more = ", max_steps=2, progress=False"
    text = text.replace("train_dataset=train_dataset", "train_dataset=train_dataset" + more)
    rows = Rows(name)
    if name != LLAMA:
        assert " (bfloat16)" in text  # the code says what the rows have to be
    for key, tensor in rows.rows.items():
        if tensor.is_floating_point():
            rows.rows[key] = tensor.bfloat16()
    space = {"config": config, "train_dataset": rows}
    exec(compile(text, "plan", "exec"), space)
    assert space["trainer"].state.global_step == 2
    expected, found = option.prediction.peak, space["trainer"].memory.by_step[2]
    assert found.phase == expected.phase
    wanted = dict(expected.by_category)
    # the tracker sees the dataset, since each row of it is a view
    wanted["other"] += sum(tensor.nbytes for tensor in rows.rows.values())
    if name == LLAMA:
        # A prediction's tokens are its labels too, and a loader makes two tensors.
        wanted["other"] += 2 * TOKENS * torch.int64.itemsize
    for category, nbytes in wanted.items():
        # The loss's few numbers apart.
        assert 0 <= found.by_category[category] - nbytes <= 16, category


def text_of(given, config, recipe, target) -> str:
    return plan_code(Option(recipe, 2, 0.0, 0, None, {}), given, config, target)


def test_printed_code_word_for_word():
    config = known_model("Llama-2-7B")[1]
    recipe = Recipe(precision="bf16", optimizer="adamw-8bit", every_n_layers=2, accumulation=8)
    assert text_of("llama 2 7b", config, recipe, "cuda") == (
        """\
from transformers import LlamaForCausalLM

from gradmem_lib import Recipe, make_trainer

model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
recipe = Recipe(
    precision="bf16",
    optimizer="adamw-8bit",
    every_n_layers=2,
    accumulation=8,
)
trainer = make_trainer(model, recipe, batch_size=16, train_dataset=train_dataset, use_cpu=False)
trainer.train()
"""
    )
    recipe = Recipe(in_backward=True, chunked_loss=True)
    assert text_of(config, config, recipe, "cuda") == (
        """\
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, default_data_collator

from gradmem_lib import Recipe, prepare, step

model = LlamaForCausalLM(config)
recipe = Recipe(
    precision="float32",
    optimizer="adamw",
    in_backward=True,
    chunked_loss=True,
)
model, optimizer, undo = prepare(model, recipe)
model.to("cuda")
loader = DataLoader(train_dataset, 2, shuffle=True, collate_fn=default_data_collator)
for rows in loader:
    loss = step(model, optimizer, {name: tensor.to("cuda") for name, tensor in rows.items()}, \
recipe)
"""
    )


def test_printed_code_for_several_cards_word_for_word():
    config = known_model("Llama-2-7B")[1]
    recipe = Recipe(precision="bf16", optimizer="adamw-fused", sharding="fsdp", accumulation=4)
    option = Option(recipe, 2, 0.0, 0, None, {}, cards=2)
    assert plan_code(option, "llama 2 7b", config, "cuda") == (
        """\
# Save this as train.py, and start it with: torchrun --nproc-per-node=2 train.py, or: \
accelerate launch --multi_gpu --num_processes=2 train.py
from torch.distributed import destroy_process_group, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM, default_data_collator

from gradmem_lib import Recipe, prepare, step

mesh = init_device_mesh("cuda", (2,))  # meets the other processes
model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
recipe = Recipe(
    precision="bf16",
    optimizer="adamw-fused",
    sharding="fsdp",
    accumulation=4,
)
model, optimizer, undo = prepare(model, recipe, mesh=mesh)
loader = DataLoader(train_dataset, 8, sampler=DistributedSampler(train_dataset), \
drop_last=True, collate_fn=default_data_collator)
for rows in loader:
    loss = step(model, optimizer, {name: tensor.to("cuda") for name, tensor in rows.items()}, \
recipe)
destroy_process_group()
"""
    )
    ddp = plan_code(replace(option, recipe=replace(recipe, sharding="ddp")), config, config, "cpu")
    assert ddp.startswith(
        "# Save this as train.py, and start it with: torchrun --nproc-per-node=2 train.py, or: "
        "accelerate launch --multi_gpu --num_processes=2 train.py\nfrom transf"
    )
    assert ddp.endswith(
        "trainer = make_trainer(model, recipe, batch_size=8, "
        "train_dataset=train_dataset)\ntrainer.train()\n"
    )


def loaded_by(text: str):
    """The model that printed code makes before its recipe."""
    space = {}
    exec(text.partition("recipe =")[0], space)
    return space["model"]


def test_printed_code_loads_the_model_as_it_was_given(tmp_path):
    recipe, config, start = Recipe(), tiny().config, "from transformers import LlamaForCausalLM\n"
    if os.name != "nt":  # where such a name is no file's
        tmp_path /= 'a "b"\\new ü'
    whole, sizes = tmp_path / "whole", tmp_path / "sizes"
    tiny().save_pretrained(whole)
    config.save_pretrained(sizes)
    for given in (str(whole), whole, whole / "config.json"):
        text = text_of(given, config, recipe, "cpu")
        assert text.startswith(start) and "model = LlamaForCausalLM.from_pretrained(" in text
        assert loaded_by(text).state_dict().keys() == tiny().state_dict().keys()
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    assert text_of(whole, config, recipe, "cpu") == text
    for given in (sizes, sizes / "config.json"):
        text = text_of(given, config, recipe, "cpu")
        assert "config = AutoConfig.from_pretrained(" in text
        assert "\nmodel = LlamaForCausalLM(config)\n" in text
        assert loaded_by(text).num_parameters() == tiny().num_parameters()
    text = text_of("tiny llama", config, recipe, "cpu")
    assert 'config = known_model("tiny Llama")[1]' in text and loaded_by(text)
    chat = text_of("Qwen/Qwen2.5-7B-Instruct", known_model("Qwen2.5-7B")[1], recipe, "cpu")
    assert 'Qwen2ForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct")' in chat
    quoted = text_of("me/'mine\\x\"", config, recipe, "cpu")
    assert 'from_pretrained("me/\'mine\\\\x\\"")' in quoted
    text = text_of(tiny(), config, recipe, "cpu")
    assert "model =" not in text and "from_pretrained" not in text and "transformers" not in text
