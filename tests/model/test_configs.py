"""Configs: the class that trains on one, as transformers' own classes say, and batches that the
model itself takes.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.families import tiny_config
from torch import Tensor, nn

from gradmem_lib import plan
from gradmem_lib.course.material.models import tiny_llama
from gradmem_lib.model import classes, configs, inputs
from gradmem_lib.model.wrappers import inside_peft, inside_wrapper, without_wrappers

ROWS, TOKENS = 3, 16
AS = {  # without an architecture, what transformers' own class for the task makes of the config
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "bert": transformers.AutoModelForMaskedLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "clip": transformers.AutoModelForZeroShotImageClassification,
    "vit": transformers.AutoModelForImageClassification,
}


@pytest.mark.parametrize("family", AS)
def test_the_class_that_trains_on_a_config(family):
    config = tiny_config(family)
    with torch.device("meta"):
        expected = AS[family].from_config(config)
    made = configs.skeleton(config)
    assert type(made) is type(expected)
    assert all(parameter.is_meta for parameter in made.parameters()) and made.config is not config


def test_the_first_known_architecture_is_taken():
    config = tiny_config("bert")
    config.architectures = ["NotThere", "BertForTokenClassification", "BertForMaskedLM"]
    assert classes.model_class(config) is transformers.BertForTokenClassification
    # Of two classes for one task (this one with a teacher besides), too.
    assert classes.model_class(tiny_config("deit")) is transformers.DeiTForImageClassification
    none = transformers.LlamaConfig(architectures=["NotThere", "NorThis"])
    for config, says in (
        (transformers.EncodecConfig(), r"known for a EncodecConfig: .*Name one in config\.arch"),
        (none, "is of NotThere, NorThis, which transformers does not have"),
    ):
        with pytest.raises(ValueError, match=says):
            classes.model_class(config)


TEXT = {"input_ids", "labels"}
POSITIONS = {"input_ids", "start_positions", "end_positions"}
# The family, its head, the number of labels, and the names in the batch.
BATCHES = [
    ("whisper", None, 4, {"input_features", "labels"}),
    ("t5", None, 4, TEXT),
    ("gpt2", None, 4, TEXT),
    ("clip", None, 4, {"input_ids", "pixel_values", "return_loss"}),
    ("vit", None, 4, {"pixel_values", "labels"}),
    ("bert", "BertForMaskedLM", 4, TEXT),
    ("bert", "BertForQuestionAnswering", 2, POSITIONS),
    *(("bert", "BertForSequenceClassification", labels, TEXT) for labels in (1, 2, 4)),
    *(("bert", "BertForTokenClassification", labels, TEXT) for labels in (1, 2, 4)),
]


@pytest.mark.parametrize(("family", "head", "labels", "names"), BATCHES)
def test_the_model_learns_from_its_example(family, head, labels, names):
    config = tiny_config(family)
    config.num_labels, config.architectures = labels, head and [head]
    model = classes.model_class(config)(config)
    batch = inputs.example_batch(model, ROWS, TOKENS)
    assert set(batch) == names
    assert all(len(value) == ROWS for value in batch.values() if isinstance(value, Tensor))
    assert "input_ids" not in batch or batch["input_ids"].shape == (ROWS, TOKENS)
    if head == "BertForTokenClassification":
        assert batch["labels"].shape == (ROWS, TOKENS)
    if head == "BertForSequenceClassification":
        assert batch["labels"].shape == (ROWS,)
        assert batch["labels"].is_floating_point() is (labels == 1)
    loss = model(**batch).loss
    assert loss.isfinite()
    loss.backward()


@pytest.mark.parametrize("head", ["MultipleChoice", "NextSentencePrediction", "PreTraining"])
def test_a_head_whose_labels_are_not_known_asks_for_a_batch(head):
    config = tiny_config("bert")
    config.architectures = [f"BertFor{head}"]
    with pytest.raises(
        ValueError, match=rf"what BertFor{head} trains on .*takes input_ids.*give batch="
    ):
        inputs.example_batch(configs.skeleton(config), ROWS, TOKENS)


PICTURES = {
    "vit": ({"image_size": 16}, (3, 16, 16)),
    "vit, wide": ({"image_size": (16, 32), "num_channels": 1}, (1, 16, 32)),
    "vit, a list": ({"image_size": [32, 16]}, (3, 32, 16)),
    "resnet": ({}, (3, 224, 224)),
    "clip": ({}, None),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_size_that_a_model_takes(name):
    config = tiny_config(name.split(",")[0])
    settings, shape = PICTURES[name]
    for key, value in settings.items():
        setattr(config, key, value)
    vision = getattr(config, "vision_config", config)
    found = inputs.picture_shape(config)
    assert found == (shape or (vision.num_channels, vision.image_size, vision.image_size))
    if shape is not None:
        pixels = torch.empty(2, *found, device="meta")
        logits = configs.skeleton(config)(pixel_values=pixels).logits
        assert logits.shape == (2, config.num_labels)


def test_pictures_are_in_colours_where_nothing_is_said():
    assert inputs.picture_shape(SimpleNamespace(image_size=8)) == (3, 8, 8)


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "opt"])
def test_as_many_positions_as_the_model_takes(family):
    config = tiny_config(family)
    if family in ("bert", "roberta"):
        # a table of words is no table of positions
        config.vocab_size = config.max_position_embeddings
    model = classes.model_class(config)(config).eval()
    most = inputs.most_positions(model)
    ids = torch.full((1, most + 1), 5)
    assert model(input_ids=ids[:, :most]).logits.shape[:2] == (1, most)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        model(input_ids=ids)


PAIR = [transformers.BertConfig(max_position_embeddings=n) for n in (48, 32)]
SAID = [({"max_position_embeddings": n}, n) for n in (1, 77)]
SAID += [({"max_position_embeddings": wrong}, None) for wrong in (None, -1, 0, "many")]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        *((SimpleNamespace(**fields), most) for fields, most in [*SAID, ({}, None)]),
        # the decoder's
        (transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*PAIR), 32),
    ],
)
def test_positions_as_a_config_says(config, most):
    model = nn.Linear(2, 2)
    model.config = config
    assert inputs.most_positions(model) == most


def test_a_config_from_where_it_was_given(tmp_path):
    config, folder = tiny_config("bert"), tmp_path / "my-bert"
    assert configs.find_config(config) is config and configs.title_of(config, config) == "bert"
    with pytest.raises(TypeError, match="and was given int"):
        configs.find_config(3)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"my-bert has no config\.json: give one"):
        configs.find_config(folder)
    config.save_pretrained(folder)
    for given in (folder, str(folder)):
        found = configs.find_config(given)
        assert type(found) is type(config)
        assert found.to_diff_dict() == found.from_pretrained(given).to_diff_dict()
        assert configs.title_of(given, config) == "my-bert"
    Path(folder, "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no model is known as .*my-bert"):
        configs.find_config(folder)


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_last_and_only_where_it_answers(answers, monkeypatch, tmp_path):
    asked = []

    def from_pretrained(name, local_files_only=False, trust_remote_code=None):
        assert trust_remote_code is False  # or it may ask, and wait for an answer
        asked.append(local_files_only)
        if local_files_only:
            raise OSError("not here")
        return "a config"

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(configs, "_hub_answers", lambda: answers)
    if answers:
        assert configs.find_config("nobody/nothing") == "a config" and asked == [True, False]
        Path(tmp_path, "nothing").touch()  # there is such a file, so it is none of the hub's
    asked.clear()
    with pytest.raises(ValueError, match=r"no model is known as .*nothing' \(not here\)"):
        configs.find_config(tmp_path / "nothing" if answers else "nobody/nothing")
    assert asked == [True]


PROXIES = [name for name in os.environ if name.lower().endswith("_proxy")]


@pytest.mark.parametrize(
    ("url", "address"),
    [("https://hub.example", ("hub.example", 443)), ("http://127.0.0.1:8", ("127.0.0.1", 8))],
)
def test_whether_there_is_a_way_to_the_hub(url, address, monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name)
    constants, asked = huggingface_hub.constants, []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)

    def connect(address, timeout):
        asked.append(address)
        if closed:
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    for closed in (True, False):
        assert configs._hub_answers() is (not closed)
    assert asked == [address] * 2
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert configs._hub_answers() is True and len(asked) == 2  # the way may lead through a proxy
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert configs._hub_answers() is False
    monkeypatch.delenv("https_proxy")
    assert configs._hub_answers() is False and len(asked) == 2


# What is around a model: processes, and PEFT.


def test_each_wrapper_is_taken_off_and_no_part_that_is_only_called_so():
    model = tiny_llama()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped = nn.DataParallel(adapted)
    assert inside_wrapper(wrapped) is adapted and inside_peft(adapted) is model
    assert without_wrappers(wrapped) is model and inside_peft(wrapped) is wrapped
    own = nn.Module()
    own.module = model
    assert without_wrappers(own) is own


def test_a_plan_of_a_wrapped_model_says_that_it_has_no_config():
    with pytest.raises(ValueError, match="DataParallel has no config, so its inputs are not known"):
        plan(nn.DataParallel(tiny_llama()), card="1 GiB", seq_len=8, global_batch=1)
