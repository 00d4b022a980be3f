"""Models by name: sizes as their makers publish them, spellings, and what is said to a name that is
not known.
"""

from __future__ import annotations

import pytest
from torch import nn
from transformers import LlamaConfig

from gradmem_lib.course.material.models import tiny_llama
from gradmem_lib.planning.models import find_model, known_model, model_table
from gradmem_lib.prediction.configs import model_class, skeleton

# Parameters as counted by the hub from each model's weights, a tied output layer and masked
# language models' heads included once.
PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "GPT-2": 124_439_808,
    "GPT-2 medium": 354_823_168,
    "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200,
    "DistilGPT-2": 81_912_576,
    "OPT-125M": 125_239_296,
    "TinyLlama-1.1B": 1_100_048_384,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Mistral-7B": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "OLMoE-1B-7B": 6_919_161_856,
    "Phi-1.5": 1_418_270_720,
    "Phi-2": 2_779_683_840,
    "Phi-3-mini": 3_821_079_552,
    "Phi-4": 14_659_507_200,
    "Gemma-2B": 2_506_172_416,
    "Gemma-7B": 8_537_680_896,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Pythia-160M": 162_322_944,
    "Pythia-410M": 405_334_016,
    "Pythia-1B": 1_011_781_632,
    "Pythia-1.4B": 1_414_647_808,
    "Pythia-2.8B": 2_775_208_960,
    "Pythia-6.9B": 6_857_302_016,
    "BERT-base": 109_514_298,
    "BERT-large": 335_174_458,
    "DistilBERT": 66_985_530,
    "RoBERTa-base": 124_697_433,
    "RoBERTa-large": 355_412_057,
    "T5-small": 60_506_624,
    "T5-base": 222_903_552,
    "BART-base": 139_420_416,
    "BART-large": 406_291_456,
    "ViT-base": 86_567_656,
    "ViT-large": 304_326_632,
}


def test_sizes_are_the_published_totals():
    assert sorted(PUBLISHED) == sorted(set(model_table()) - {"tiny Llama"})
    for name, total in PUBLISHED.items():
        model = skeleton(known_model(name)[1])
        assert sum(p.numel() for p in model.parameters()) == total, name


@pytest.mark.parametrize(
    "written, name, hub_id",
    [
        ("qwen2.5 7b", "Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3_8B", "Qwen3-8B", "Qwen/Qwen3-8B"),
        ("QWEN 3 1.7b", "Qwen3-1.7B", "Qwen/Qwen3-1.7B"),
        ("phi-1_5", "Phi-1.5", "microsoft/phi-1_5"),
        ("Mistral 7B", "Mistral-7B", "mistralai/Mistral-7B-v0.1"),
        (
            "mistralai/Mistral-7B-Instruct-v0.3",
            "Mistral-7B-v0.3",
            "mistralai/Mistral-7B-Instruct-v0.3",
        ),
        ("llama3-8B", "Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3.1-8B-Instruct", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B", "meta-llama/Llama-2-7b-chat-hf"),
        ("gemma 2b", "Gemma-2B", "google/gemma-2b"),
        ("gemma-2-2b-it", "Gemma-2-2B", "google/gemma-2-2b-it"),
        ("phi2", "Phi-2", "microsoft/phi-2"),
        ("gpt2", "GPT-2", "openai-community/gpt2"),
        ("bert-base-uncased", "BERT-base", "google-bert/bert-base-uncased"),
        ("t5 small", "T5-small", "google-t5/t5-small"),
    ],
)
def test_names_as_people_type_them(written, name, hub_id):
    assert known_model(written)[::2] == (name, hub_id)


@pytest.mark.parametrize(
    "other",
    [
        "Llama-9",
        "bert-base-cased",
        "Qwen2.5-8B",
        "qwen",
        "someone/my-Qwen2.5-7B",
        "",
        # of other sizes, written nearly so
        "Qwen3-17B",
        "Qwen2.5-15B",
        "Qwen2-57B",
        "Llama-27B",
        "Gemma-31B",
        "SmolLM2-17B",
    ],
)
def test_what_is_not_known_is_not_taken_for_what_is(other):
    assert known_model(other) is None


def test_an_unknown_name_is_shown_those_like_it(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError,
        match=r"no model is known as 'mistral'.*Known by name.*Mistral-7B, Mistral-7B-v0.3",
    ):
        find_model("mistral")
    with pytest.raises(ValueError, match=r"needs\s+a network, and for some") as told:
        find_model("nobody/nothing")
    assert "Known by name" not in str(told.value)


@pytest.mark.parametrize(
    "written, like",
    [("mistrl", "Mistral-7B"), ("someone/gemmma", ""), ("phi", "Phi-2"), ("nobody/ba", "")],
)
def test_those_like_it_begin_like_it(written, like, monkeypatch):
    """By five letters, so that a slip after them does not matter; by two, anything would be like
    anything.
    """
    monkeypatch.setattr("gradmem_lib.prediction.configs._hub_answers", lambda: False)
    with pytest.raises(ValueError, match="no model is known as") as told:
        find_model(written)
    shown = str(told.value).partition("Known by name, without a network: ")[2].split(", ")
    assert like in shown and bool(like) == any(shown)


def test_a_model_is_taken_by_its_class_and_a_name_by_its_sizes():
    """The config that a model has itself stays as it is: what is asked of the copy is not written
    into it.
    """
    model = tiny_llama(layers=1, hidden=16, heads=2, intermediate=32, vocab=64)
    before = model.config.to_dict()
    config, title = find_model(model)
    assert title == "LlamaForCausalLM" and config.architectures == ["LlamaForCausalLM"]
    assert (
        config is not model.config and model.config.to_dict() == before and config.hidden_size == 16
    )
    config, title = find_model("gpt2")
    assert title == "GPT-2" and (config.n_layer, config.n_embd) == (12, 768)
    with pytest.raises(
        ValueError, match=r"Linear has no config.*predict\(model, batch=\.\.\., recipe="
    ):
        find_model(nn.Linear(2, 2))


def test_a_class_that_transformers_has_not_is_not_taken_for_its_familys():
    """A class of one's own may do more than the one it comes from, and a reward model is no
    language model.
    """

    class Twice(type(tiny_llama())):
        pass

    config, _ = find_model(Twice(tiny_llama().config))
    other = LlamaConfig(architectures=["LlamaRewardModel"])
    for asked, name in ((config, "Twice"), (other, "LlamaRewardModel")):
        with pytest.raises(
            ValueError, match=rf"the config is of {name}, which transformers does not have"
        ):
            model_class(asked)
    other.architectures = None
    assert model_class(other).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "said, ends",
    [
        ("2 fields:\n  one is odd\n  two is odd\n", "AttributeError: two is odd)"),
        ("", "AttributeError: )"),
    ],
)
def test_of_what_is_wrong_with_a_config_the_last_line_is_said(said, ends, monkeypatch):
    def wrong(given):
        raise AttributeError(said)

    monkeypatch.setattr("gradmem_lib.planning.models.find_config", wrong)
    with pytest.raises(ValueError, match="the config of folder/ is not valid") as told:
        find_model("folder/")
    assert str(told.value).endswith(ends)
