"""``python -m gradmem_lib predict`` and ``plan``: what they print, and what they say to
bad input.
"""

from __future__ import annotations

import json
import re

import pytest
from support.families import tiny_config

from gradmem_lib.__main__ import main
from gradmem_lib.course.material import models
from gradmem_lib.planning.options import METHODS
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB


@pytest.fixture
def config():
    return models.tiny_llama(layers=2, hidden=64, heads=4, intermediate=172, vocab=512).config


def command(capsys, *words) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_command_predict_prints_a_table_and_json(capsys, tmp_path, config):
    config.save_pretrained(tmp_path)
    words = [
        "predict",
        str(tmp_path),
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--target",
        "cpu",
        "--precision",
        "bf16",
    ]
    code, out, _ = command(capsys, *words)
    wanted = predict(
        config, batch_size=2, seq_len=32, recipe=Recipe(precision="bf16"), target="cpu"
    )
    assert code == 0 and f"{wanted.peak.total:,}" in out
    code, out, _ = command(capsys, "predict", str(tmp_path / "config.json"), *words[2:], "--json")
    assert json.loads(out)["peak"]["total"] == json.loads(out)["needs"] == wanted.peak.total
    code, out, _ = command(capsys, *words, "--checkpointing", "1,1", "--json")
    assert json.loads(out)["peak"]["total"] < wanted.peak.total


def test_command_plan_prints_what_fits_with_code_and_json(capsys, tmp_path, config):
    config.save_pretrained(tmp_path)
    words = [
        "plan",
        str(tmp_path),
        "--card",
        "1GiB",
        "--seq-len",
        "32",
        "--global-batch",
        "2",
        "--method",
        "qlora",
        "--target",
        "cpu",
    ]
    code, out, _ = command(capsys, *words)
    assert code == 0 and "Fits, fastest first" in out and "make_trainer(" in out
    code, out, _ = command(capsys, *words, "--json")
    found = json.loads(out)
    assert (
        found["fits"][0]["needs"] <= found["card"]["nbytes"] == GiB and found["method"] in METHODS
    )
    words[3] = "100KB"
    code, out, _ = command(capsys, *words)
    assert code == 1 and "Nothing fits" in out


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["plan", "tiny-llama", "--card", "GTX9", "--seq-len", "8", "--global-batch", "2"],
            "no card is known",
        ),
        (
            ["plan", "tiny-llama", "--card", "1GiB", "--seq-len", "8", "--global-batch", "-1"],
            "at least 1",
        ),
        (
            ["plan", "tiny-llama", "--card", "1GiB", "--seq-len", "9999", "--global-batch", "1"],
            "positions",
        ),
        (
            ["predict", "tiny-llama", "--batch-size", "2", "--seq-len", "8", "--lora-rank", "0"],
            "lora_rank=0: give a whole number of at least 1",
        ),
        (
            ["predict", "tiny-llama", "--batch-size", "3", "--seq-len", "8", "--accumulation", "2"],
            "multiple of 2",
        ),
        (
            [
                "predict",
                "tiny-llama",
                "--batch-size",
                "3",
                "--seq-len",
                "8",
                "--checkpointing",
                "0",
            ],
            "at least 1",
        ),
        (["predict", "tiny-llama", "--batch-size", "3"], "seq_len"),
        (
            [
                "predict",
                "tiny-llama",
                "--batch-size",
                "4",
                "--seq-len",
                "8",
                "--accumulation",
                "2",
                "--in-backward",
            ],
            "choose one of the two",
        ),
    ],
)
def test_command_refuses_bad_input_in_a_sentence(capsys, words, says):
    code, out, err = command(capsys, *words)
    assert code == 2 and says in err and not out and "Traceback" not in err


def test_command_leaves_a_models_attention_as_it_is(capsys, tmp_path):
    config = tiny_config("mamba")
    config.save_pretrained(tmp_path)
    words = [
        "predict",
        str(tmp_path),
        "--batch-size",
        "2",
        "--seq-len",
        "8",
        "--target",
        "cpu",
        "--json",
    ]
    code, _, err = command(capsys, *words)
    assert code == 2 and "attention=None" in err  # what there is a word for
    code, out, _ = command(
        capsys, *words, "--attention", "none", "--offload", "none", "--sharding", "none"
    )
    wanted = predict(config, batch_size=2, seq_len=8, recipe=Recipe(attention=None), target="cpu")
    assert code == 0 and json.loads(out)["peak"]["total"] == wanted.peak.total


def test_command_without_a_network_says_what_to_give(capsys, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = command(
        capsys, "plan", "nobody/nothing", "--card", "T4", "--seq-len", "8", "--global-batch", "1"
    )
    assert code == 2 and "no model is known as 'nobody/nothing'" in err and "config.json" in err
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = command(capsys, "predict", str(empty), "--batch-size", "1", "--seq-len", "8")
    assert code == 2 and "has no config.json" in err


OTHERS = {
    "ResNetForImageClassification": "resnet",
    "ViTForImageClassification": "vit",
    "CLIPModel": "clip",
    "SiglipModel": "siglip",
    "WhisperForConditionalGeneration": "whisper",
    "BertForMultipleChoice": "bert",
    "BertForNextSentencePrediction": "bert",
    "BertForPreTraining": "bert",
    "BertModel": "bert",
    "TapasForQuestionAnswering": "tapas",
    "LxmertForQuestionAnswering": "lxmert",
    "ViltForQuestionAnswering": "vilt",
}


@pytest.mark.parametrize(
    "fields, says",
    [
        (
            {"model_type": "llama", "hidden_size": "x"},
            "the config of .* is not valid .*hidden_size",
        ),
        ({"model_type": "llama", "num_attention_heads": 0}, "the config of .* is not valid .*zero"),
        (
            {"model_type": "llama", "hidden_size": 65},
            "the config of .* is not valid .*not a multiple",
        ),
        *(
            ({"model_type": kind, "architectures": [name]}, f"{name} takes other inputs: .*batch=")
            for name, kind in OTHERS.items()
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "give the model as it was",
        ),
        (
            {"model_type": "llama", "hidden_act": "gelux"},
            "cannot build LlamaForCausalLM from .*KeyError: 'gelux'",
        ),
        ({"model_type": "llama", "num_key_value_heads": 3}, "fails in its prediction"),
        (
            {"model_type": "imagegpt", "architectures": ["ImageGPTForCausalImageModeling"]},
            "micro-batches and ImageGPT.*differs in pieces",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}},
            "no model is known as .*custom code",
        ),
        ({"size": 1}, "no model is known as"),
        (None, "the config of .* is not valid"),
    ],
)
def test_command_plan_refuses_models_in_a_sentence(capsys, tmp_path, fields, says):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ["plan", str(tmp_path), "--card", "4090", "--seq-len", "8", "--global-batch", "1"]
    code, out, err = command(capsys, *words)
    assert code == 2 and re.search(says, err) and not out and "Traceback" not in err


def test_command_turns_what_no_check_has_foreseen_into_a_sentence(capsys, monkeypatch):
    from gradmem_lib.planning import plan as module

    def fails(*args, **kwargs):
        raise AttributeError("no attribute 'weight'")

    monkeypatch.setattr(module, "plan", fails)
    code, out, err = command(
        capsys, "plan", "tiny-llama", "--card", "T4", "--seq-len", "8", "--global-batch", "1"
    )
    assert code == 2 and not out
    assert "tiny-llama: AttributeError: no attribute 'weight'" in err and "python -X dev" in err


def test_missing_options_leave_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        main(["plan", "tiny-llama"])
    assert left.value.code == 2 and "--card" in capsys.readouterr().err
