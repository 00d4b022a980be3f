"""Models by name: sizes as their makers publish them, spellings, and what is said to a name that is
not known.
"""

from __future__ import annotations

import json

import known_models
import pytest
import torch
import transformers
from support.nightly import each
from torch import nn
from transformers import AutoConfig, LlamaConfig

from gradmem_lib.course.material.models import tiny_llama
from gradmem_lib.planning.models import _sizes_of, find_model, known_model, model_table
from gradmem_lib.prediction.configs import model_class, skeleton

# Parameters as counted by the hub from each model's weights, a tied output layer and masked
# language models' heads included once. (Without the pooler and the head for pairs of sentences that
# the multilingual BERT's file has besides.)
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
    "LLaMA-7B": 6_738_415_616,
    "LLaMA-13B": 13_015_864_320,
    "LLaMA-30B": 32_528_943_616,
    "LLaMA-65B": 65_285_660_672,
    "CodeLlama-7B": 6_738_546_688,
    "CodeLlama-13B": 13_016_028_160,
    "CodeLlama-34B": 33_743_970_304,
    "Llama-3.1-405B": 405_853_388_800,
    "SmolLM-135M": 134_515_008,
    "SmolLM-360M": 361_821_120,
    "SmolLM-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "Yi-6B": 6_061_035_520,
    "Yi-1.5-9B": 8_829_407_232,
    "Yi-34B": 34_388_917_248,
    "Falcon3-1B": 1_669_408_768,
    "Falcon3-3B": 3_227_655_168,
    "Falcon3-7B": 7_455_550_464,
    "Falcon3-10B": 10_305_653_760,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "DeepSeek-R1-0528-Qwen3-8B": 8_190_735_360,
    "Qwen2-0.5B": 494_032_768,
    "Qwen2-1.5B": 1_543_714_304,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2-72B": 72_706_203_648,
    "Qwen2.5-Coder-0.5B": 494_032_768,
    "Qwen2.5-Coder-1.5B": 1_543_714_304,
    "Qwen2.5-Coder-3B": 3_085_938_688,
    "Qwen2.5-Coder-7B": 7_615_616_512,
    "Qwen2.5-Coder-14B": 14_770_033_664,
    "Qwen2.5-Coder-32B": 32_763_876_352,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "QwQ-32B": 32_763_876_352,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-4B-2507": 4_022_468_096,
    "Mistral-7B-v0.2": 7_241_732_096,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Mistral-Small-24B": 23_572_403_200,
    "Ministral-8B": 8_019_808_256,
    "Mistral-Large-123B": 122_610_069_504,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_630_071_296,
    "OLMo-2-1B": 1_484_916_736,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-2-13B": 13_716_198_400,
    "OLMo-2-32B": 32_234_279_936,
    "Phi-3.5-mini": 3_821_079_552,
    "Phi-3-medium": 13_960_238_080,
    "Phi-4-mini": 3_836_021_760,
    "Phi-4-reasoning": 14_659_507_200,
    "gpt-oss-20B": 20_914_757_184,
    "gpt-oss-120B": 116_829_156_672,
    "Gemma-3-4B": 4_300_079_472,
    "Gemma-3-12B": 12_187_325_040,
    "Gemma-3-27B": 27_432_406_640,
    "CodeGemma-7B": 8_537_680_896,
    "Whisper-tiny": 37_760_640,
    "Whisper-base": 72_593_920,
    "Whisper-small": 241_734_912,
    "Whisper-medium": 763_857_920,
    "Whisper-large-v2": 1_543_304_960,
    "Whisper-large-v3": 1_543_490_560,
    "Whisper-large-v3-turbo": 808_878_080,
    "DINOv2-small": 22_056_576,
    "DINOv2-base": 86_580_480,
    "DINOv2-large": 304_368_640,
    "DINOv2-giant": 1_136_480_768,
    "ViT-huge": 632_404_480,
    "ModernBERT-base": 149_655_232,
    "ModernBERT-large": 395_881_664,
    "XLM-RoBERTa-base": 278_295_186,
    "XLM-RoBERTa-large": 560_142_482,
    "BERT-base-cased": 108_340_804,
    "BERT-large-cased": 333_610_308,
    "BERT-base-multilingual-cased": 177_974_523,
    "BLOOM-560M": 559_214_592,
    "BLOOM-1B1": 1_065_314_304,
    "BLOOM-1B7": 1_722_408_960,
    "BLOOM-3B": 3_002_557_440,
    "BLOOM-7B1": 7_069_016_064,
    "OPT-350M": 331_196_416,
    "OPT-1.3B": 1_315_758_080,
    "OPT-2.7B": 2_651_596_800,
    "OPT-6.7B": 6_658_473_984,
    "OPT-13B": 12_853_473_280,
    "GPT-Neo-125M": 125_198_592,
    "GPT-Neo-1.3B": 1_315_575_808,
    "GPT-Neo-2.7B": 2_651_307_520,
    "GPT-J-6B": 6_050_882_784,
    "GPT-NeoX-20B": 20_554_567_680,
    "Pythia-70M": 70_426_624,
    "Pythia-12B": 11_846_072_320,
    "T5-large": 737_668_096,
    "StarCoder2-3B": 3_030_371_328,
    "StarCoder2-7B": 7_173_923_840,
    "StarCoder2-15B": 15_957_889_024,
    "Granite-3.1-2B": 2_533_531_648,
    "Granite-3.1-8B": 8_170_848_256,
    "CLIP-ViT-B/32": 151_277_313,
    "CLIP-ViT-L/14": 427_616_513,
    "NLLB-200-600M": 615_073_792,
    "Llama-4-Scout": 108_641_793_536,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "StableLM-2-1.6B": 1_644_515_328,
    "Falcon-7B": 6_921_720_704,
    "Phi-3.5-MoE": 41_873_153_344,
}


def test_every_known_model_has_a_published_total():
    assert sorted(PUBLISHED) == sorted(set(model_table()) - {"tiny Llama"})


@pytest.mark.parametrize(("name", "total"), each(4, PUBLISHED.items()))
def test_sizes_are_the_published_totals(name, total):
    config = known_model(name)[1]
    model = skeleton(config)
    if config.architectures:  # DINOv2 was published without the head that it is trained with here
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
    assert sum(p.numel() for p in model.parameters()) == total


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
        # tuned or stored otherwise, by its maker or by a mirror
        ("Qwen3-8B-Instruct", "Qwen3-8B", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("unsloth/llama-3-8b-bnb-4bit", "Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("TheBloke/Llama-2-13B-chat-GPTQ", "Llama-2-13B", "meta-llama/Llama-2-13b-hf"),
        ("unsloth/gemma-3-1b-it-GGUF", "Gemma-3-1B", "google/gemma-3-1b-pt"),
        ("Mistral-7B-Instruct-v0.2", "Mistral-7B-v0.2", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("mistral-7b-v0.3-bnb-4bit", "Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("deepseek-r1-distill-qwen-7b", "DeepSeek-R1-Distill-Qwen-7B", None),
        ("openai/whisper-large-v3", "Whisper-large-v3", "openai/whisper-large-v3"),
    ],
)
def test_names_as_people_type_them(written, name, hub_id):
    found, _, found_id = known_model(written)
    assert found == name
    if hub_id is not None:
        assert found_id == hub_id


@pytest.mark.parametrize(
    "other",
    [
        "Llama-9",
        "bert-base-japanese",
        "t5",
        "SmolLM3",
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
        "someone/Qwen2.5-7B-Instruct-bnb-4bit",
        "unsloth/Qwen2.5-8B-bnb-4bit",
        "Mistral-7B-v0.9-bnb-4bit",
    ],
)
def test_what_is_not_known_is_not_taken_for_what_is(other):
    assert known_model(other) is None


def test_a_name_without_its_tuning_and_format_is_of_one_size():
    """So that "4bit" never turns one model into another."""
    owners = {}
    for name, row in model_table().items():
        ids = row.pop("ids")
        for written in (name, *(hub_id.rpartition("/")[2] for hub_id in ids)):
            other = owners.setdefault(_sizes_of(written), row)
            assert other == row, written


@pytest.mark.parametrize(
    "written, like",
    [
        ("mistral", ["Mistral-7B"]),
        ("mistrl 7b", ["Mistral-7B"]),
        ("someone/gemmma-2b", ["Gemma-2B", "Gemma-2-2B"]),
        ("Qwen3-9B", ["Qwen3-8B"]),
        ("nobody/nothing", []),
    ],
)
def test_an_unknown_name_is_shown_three_that_are_written_most_like_it(written, like, monkeypatch):
    monkeypatch.setattr("gradmem_lib.prediction.configs._hub_answers", lambda: False)
    with pytest.raises(ValueError, match="no model is known as") as told:
        find_model(written)
    assert "config.json" in str(told.value) and "LlamaConfig(" in str(told.value)
    _, _, shown = str(told.value).partition("written most like it: ")
    assert len(shown.split(", ")) <= 3 and bool(shown) == bool(like)
    assert all(name in shown.split(", ") for name in like)


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


def test_the_table_is_built_again_from_published_configs(capsys):
    """Without a network: the configs are those that the table's own rows make."""
    table = {name: model_table()[name] for name in ("Qwen3-8B", "SmolLM2-135M", "T5-base")}
    rows = {}
    for row in model_table().values():
        ids = row.pop("ids")
        if ids:
            rows[ids[0]] = row

    def load(hub_id):
        if hub_id not in rows:
            raise OSError("no such file")
        return AutoConfig.for_model(**rows[hub_id])

    again = known_models.built_again(table | {"Mine": {"ids": ["me/mine"]}}, load)
    assert "Mine: me/mine was not read (no such file)" in capsys.readouterr().err
    assert again.pop("Mine") == {"ids": ["me/mine"]}
    for name, row in again.items():
        assert row.pop("ids") == table[name].pop("ids")
        before, after = (AutoConfig.for_model(**one) for one in (table[name], row))
        assert before.to_dict() == after.to_dict(), name
    assert json.loads(known_models.written(again)) == again
