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

from gradmem_lib import known_model
from gradmem_lib.course.material.models import tiny_llama
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.configs import find_model, skeleton
from gradmem_lib.model.known import _sizes_of, model_table

# Parameters as counted by the hub from each model's weights, a tied output layer and masked
# language models' heads included once. (Without the pooler and the head for pairs of sentences that
# the multilingual BERT's file has besides, and without the layers that predict several tokens at
# once in the files of Qwen3.5, Qwen3-Next, GLM-4.5 and DeepSeek-V3, which transformers leaves out,
# and the scales of Ministral's 8-bit files. FLAN-T5 and mT5 have a head of their own in their
# files, the small one 32,128 x 512 of 76,961,152; transformers 5 ties it.)
PUBLISHED = {}
for row in """\
SmolLM2-135M                       134,515,008
SmolLM2-360M                       361,821,120
SmolLM2-1.7B                     1,711,376,384
GPT-2                              124,439,808
GPT-2 medium                       354,823,168
GPT-2 large                        774,030,080
GPT-2 XL                         1,557,611,200
DistilGPT-2                         81,912,576
OPT-125M                           125,239,296
TinyLlama-1.1B                   1,100,048,384
Llama-2-7B                       6,738,415,616
Llama-2-13B                     13,015,864,320
Llama-2-70B                     68,976,648,192
Llama-3-8B                       8,030,261,248
Llama-3-70B                     70,553,706,496
Llama-3.1-8B                     8,030,261,248
Llama-3.1-70B                   70,553,706,496
Llama-3.2-1B                     1,235,814,400
Llama-3.2-3B                     3,212,749,824
Llama-3.3-70B                   70,553,706,496
Qwen2.5-0.5B                       494,032,768
Qwen2.5-1.5B                     1,543,714,304
Qwen2.5-3B                       3,085,938,688
Qwen2.5-7B                       7,615,616,512
Qwen2.5-14B                     14,770,033,664
Qwen2.5-32B                     32,763,876,352
Qwen2.5-72B                     72,706,203,648
Qwen3-0.6B                         596,049,920
Qwen3-1.7B                       1,720,574,976
Qwen3-4B                         4,022,468,096
Qwen3-8B                         8,190,735,360
Qwen3-14B                       14,768,307,200
Qwen3-32B                       32,762,123,264
Mistral-7B                       7,241,732,096
Mistral-7B-v0.3                  7,248,023,552
OLMoE-1B-7B                      6,919,161,856
Phi-1.5                          1,418,270,720
Phi-2                            2,779,683,840
Phi-3-mini                       3,821,079,552
Phi-4                           14,659,507,200
Gemma-2B                         2,506,172,416
Gemma-7B                         8,537,680,896
Gemma-2-2B                       2,614,341,888
Gemma-2-9B                       9,241,705,984
Gemma-2-27B                     27,227,128,320
Gemma-3-270M                       268,098,176
Gemma-3-1B                         999,885,952
Pythia-160M                        162,322,944
Pythia-410M                        405,334,016
Pythia-1B                        1,011,781,632
Pythia-1.4B                      1,414,647,808
Pythia-2.8B                      2,775,208,960
Pythia-6.9B                      6,857,302,016
BERT-base                          109,514,298
BERT-large                         335,174,458
DistilBERT                          66,985,530
RoBERTa-base                       124,697,433
RoBERTa-large                      355,412,057
T5-small                            60,506,624
T5-base                            222,903,552
BART-base                          139,420,416
BART-large                         406,291,456
ViT-base                            86,567,656
ViT-large                          304,326,632
LLaMA-7B                         6,738,415,616
LLaMA-13B                       13,015,864,320
LLaMA-30B                       32,528,943,616
LLaMA-65B                       65,285,660,672
CodeLlama-7B                     6,738,546,688
CodeLlama-13B                   13,016,028,160
CodeLlama-34B                   33,743,970,304
Llama-3.1-405B                 405,853,388,800
SmolLM-135M                        134,515,008
SmolLM-360M                        361,821,120
SmolLM-1.7B                      1,711,376,384
SmolLM3-3B                       3,075,098,624
Yi-6B                            6,061,035,520
Yi-1.5-9B                        8,829,407,232
Yi-34B                          34,388,917,248
Falcon3-1B                       1,669,408,768
Falcon3-3B                       3,227,655,168
Falcon3-7B                       7,455,550,464
Falcon3-10B                     10,305,653,760
DeepSeek-R1-Distill-Llama-8B     8,030,261,248
DeepSeek-R1-Distill-Llama-70B   70,553,706,496
DeepSeek-R1-Distill-Qwen-1.5B    1,777,088,000
DeepSeek-R1-Distill-Qwen-7B      7,615,616,512
DeepSeek-R1-Distill-Qwen-14B    14,770,033,664
DeepSeek-R1-Distill-Qwen-32B    32,763,876,352
DeepSeek-R1-0528-Qwen3-8B        8,190,735,360
Qwen2-0.5B                         494,032,768
Qwen2-1.5B                       1,543,714,304
Qwen2-7B                         7,615,616,512
Qwen2-72B                       72,706,203,648
Qwen2.5-Coder-0.5B                 494,032,768
Qwen2.5-Coder-1.5B               1,543,714,304
Qwen2.5-Coder-3B                 3,085,938,688
Qwen2.5-Coder-7B                 7,615,616,512
Qwen2.5-Coder-14B               14,770,033,664
Qwen2.5-Coder-32B               32,763,876,352
Qwen2.5-Math-1.5B                1,543,714,304
Qwen2.5-Math-7B                  7,615,616,512
QwQ-32B                         32,763,876,352
Qwen3-30B-A3B                   30,532,122,624
Qwen3-235B-A22B                235,093,634,560
Qwen3-4B-2507                    4,022,468,096
Mistral-7B-v0.2                  7,241,732,096
Mistral-Nemo-12B                12,247,782,400
Mistral-Small-24B               23,572,403,200
Ministral-8B                     8,019,808,256
Mistral-Large-123B             122,610,069,504
Mixtral-8x7B                    46,702,792,704
Mixtral-8x22B                  140,630,071,296
OLMo-2-1B                        1,484,916,736
OLMo-2-7B                        7,298,617,344
OLMo-2-13B                      13,716,198,400
OLMo-2-32B                      32,234,279,936
Phi-3.5-mini                     3,821,079,552
Phi-3-medium                    13,960,238,080
Phi-4-mini                       3,836,021,760
Phi-4-reasoning                 14,659,507,200
gpt-oss-20B                     20,914,757,184
gpt-oss-120B                   116,829,156,672
Gemma-3-4B                       4,300,079,472
Gemma-3-12B                     12,187,325,040
Gemma-3-27B                     27,432,406,640
CodeGemma-7B                     8,537,680,896
Whisper-tiny                        37,760,640
Whisper-base                        72,593,920
Whisper-small                      241,734,912
Whisper-medium                     763,857,920
Whisper-large-v2                 1,543,304,960
Whisper-large-v3                 1,543,490,560
Whisper-large-v3-turbo             808,878,080
DINOv2-small                        22,056,576
DINOv2-base                         86,580,480
DINOv2-large                       304,368,640
DINOv2-giant                     1,136,480,768
ViT-huge                           632,404,480
ModernBERT-base                    149,655,232
ModernBERT-large                   395,881,664
XLM-RoBERTa-base                   278,295,186
XLM-RoBERTa-large                  560,142,482
BERT-base-cased                    108,340,804
BERT-large-cased                   333,610,308
BERT-base-multilingual-cased       177,974,523
BLOOM-560M                         559,214,592
BLOOM-1B1                        1,065,314,304
BLOOM-1B7                        1,722,408,960
BLOOM-3B                         3,002,557,440
BLOOM-7B1                        7,069,016,064
OPT-350M                           331,196,416
OPT-1.3B                         1,315,758,080
OPT-2.7B                         2,651,596,800
OPT-6.7B                         6,658,473,984
OPT-13B                         12,853,473,280
GPT-Neo-125M                       125,198,592
GPT-Neo-1.3B                     1,315,575,808
GPT-Neo-2.7B                     2,651,307,520
GPT-J-6B                         6,050,882,784
GPT-NeoX-20B                    20,554,567,680
Pythia-70M                          70,426,624
Pythia-12B                      11,846,072,320
T5-large                           737,668,096
StarCoder2-3B                    3,030,371,328
StarCoder2-7B                    7,173,923,840
StarCoder2-15B                  15,957,889,024
Granite-3.1-2B                   2,533,531,648
Granite-3.1-8B                   8,170,848,256
CLIP-ViT-B/32                      151,277,313
CLIP-ViT-L/14                      427,616,513
NLLB-200-600M                      615,073,792
Llama-4-Scout                  108,641,793,536
DeepSeek-V2-Lite                15,706,484,224
StableLM-2-1.6B                  1,644,515,328
Falcon-7B                        6,921,720,704
Phi-3.5-MoE                     41,873,153,344
Qwen3-VL-2B                        2,127,532,032
Qwen3-VL-4B                        4,437,815,808
Qwen3-VL-8B                        8,767,123,696
Qwen3-VL-32B                      33,357,390,064
Qwen3-VL-30B-A3B                  31,070,754,032
Qwen3-Next-80B-A3B                79,674,391,296
Qwen3.5-0.8B                         852,985,920
Qwen3.5-2B                         2,213,241,664
Qwen3.5-4B                         4,539,265,536
Qwen3.5-9B                         9,409,813,744
Qwen3.5-27B                       27,356,728,560
Qwen3.5-35B-A3B                   35,107,181,936
Qwen2.5-VL-3B                      3,754,622,976
Qwen2.5-VL-7B                      8,292,166,656
Qwen2.5-VL-32B                    33,452,718,336
Qwen2.5-VL-72B                    73,410,777,344
Qwen2-VL-2B                        2,208,985,600
Qwen2-VL-7B                        8,291,375,616
Qwen3-Embedding-0.6B                 595,776,512
Qwen3-Embedding-4B                 4,021,774,336
Qwen1.5-0.5B                         463,987,712
Qwen1.5-1.8B                       1,836,828,672
Qwen1.5-4B                         3,950,369,280
Qwen1.5-7B                         7,721,324,544
Qwen1.5-14B                       14,167,290,880
Qwen1.5-32B                       32,512,218,112
Qwen1.5-MoE-A2.7B                 14,315,784,192
GLM-4-9B                           9,399,951,360
GLM-4-9B-0414                      9,400,279,040
GLM-4.5-Air                      106,852,245,504
OLMo-3-7B                          7,298,011,136
OLMo-3-32B                        32,233,522,176
OLMo-1B                            1,176,764,416
OLMo-7B                            6,888,095,744
LFM2-350M                            354,483,968
LFM2-700M                            742,489,344
LFM2-1.2B                          1,170,340,608
LFM2-2.6B                          2,569,272,320
LFM2-8B-A1B                        8,339,929,856
Granite-4.0-350M                     352,379,904
Granite-4.0-micro                  3,402,836,480
Granite-4.0-H-tiny                 6,939,037,248
Granite-4.1-3B                     3,402,836,480
DeepSeek-V3                      671,026,404,352
DeepSeek-Coder-1.3B                1,346,471,936
DeepSeek-Coder-6.7B                6,740,512,768
DeepSeek-LLM-7B                    6,910,365,696
DeBERTa-v3-xsmall                     70,682,112
DeBERTa-v3-small                     141,304,320
DeBERTa-v3-base                      183,831,552
DeBERTa-v3-large                     434,012,160
ELECTRA-base                         108,891,648
ELECTRA-large                        334,092,288
Mamba-130M                           129,135,360
Mamba-370M                           371,516,416
Mamba-790M                           793,204,224
Mamba-1.4B                         1,372,178,432
Mamba-2.8B                         2,768,345,600
SigLIP-base                          203,155,970
wav2vec2-base                         94,396,320
Command-R7B                        8,028,033,024
Aya-Expanse-8B                     8,028,033,024
EXAONE-4.0-1.2B                    1,279,391,488
EXAONE-4.0-32B                    32,003,216,384
ERNIE-4.5-0.3B                       360,748,032
ERNIE-4.5-21B-A3B                 21,825,437,888
MiniLM-L6                             22,713,216
MiniLM-L12                            33,360,000
BGE-small-en-v1.5                     33,360,000
BGE-base-en-v1.5                     109,482,240
BGE-large-en-v1.5                    335,141,888
BGE-M3                               567,754,752
Multilingual-E5-large                559,890,432
mBART-large-50                       610,879,488
Mistral-Small-3.1-24B             24,011,361,280
Ministral-3-3B                     3,849,090,048
Ministral-3-8B                     8,918,026,240
Ministral-3-14B                   13,945,031,680
Pixtral-12B                       12,682,739,712
Llama-3.2-11B-Vision              10,642,941,475
LLaVA-1.5-7B                       7,063,427,072
LLaVA-1.5-13B                     13,351,494,656
SmolVLM-256M                         256,484,928
SmolVLM-500M                         507,482,304
SmolVLM-2.2B                       2,246,272,880
SmolVLM2-2.2B                      2,246,784,880
EuroLLM-9B                         9,152,319,488
EuroLLM-1.7B                       1,656,850,432
EmbeddingGemma-300M                  302,863,104
Apertus-8B                         8,053,338,176
Seed-OSS-36B                      36,151,104,512
AFM-4.5B                           4,619,184,640
Gemma-4-31B                       31,273,086,512
Gemma-4-26B-A4B                   25,805,933,872
Nemotron-3-Nano-30B-A3B           31,577,937,344
Nemotron-Nano-9B-v2                8,888,227,328
StableLM-3B                        2,795,443,200
FLAN-T5-small                         60,511,616
FLAN-T5-base                         222,903,552
FLAN-T5-large                        750,251,008
FLAN-T5-XL                         2,783,959,040
FLAN-T5-XXL                       11,003,736,064
mT5-small                            172,119,424
mT5-base                             390,315,264
BART-large-CNN                       406,290,432
Swin-tiny                             28,288,354
ResNet-50                             25,557,032
""".splitlines():
    name, total = row.rsplit(maxsplit=1)
    PUBLISHED[name] = int(total.replace(",", ""))
# Published without the head that they get here to be trained with.
HEADLESS = {
    "DeBERTa-v3-xsmall",
    "DeBERTa-v3-small",
    "DeBERTa-v3-base",
    "DeBERTa-v3-large",
    "ELECTRA-base",
    "ELECTRA-large",
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
    if name in HEADLESS:
        model = model.base_model
    assert sum(p.numel() for p in model.parameters()) == total


# As people type it, the name in the table, and the id on the hub.
TYPED = """\
qwen2.5 7b | Qwen2.5-7B | Qwen/Qwen2.5-7B
Qwen/Qwen2.5-7B-Instruct | Qwen2.5-7B | Qwen/Qwen2.5-7B-Instruct
qwen3_8B | Qwen3-8B | Qwen/Qwen3-8B
QWEN 3 1.7b | Qwen3-1.7B | Qwen/Qwen3-1.7B
phi-1_5 | Phi-1.5 | microsoft/phi-1_5
Mistral 7B | Mistral-7B | mistralai/Mistral-7B-v0.1
mistralai/Mistral-7B-Instruct-v0.3 | Mistral-7B-v0.3 | mistralai/Mistral-7B-Instruct-v0.3
llama3-8B | Llama-3-8B | meta-llama/Meta-Llama-3-8B
Llama-3.1-8B-Instruct | Llama-3.1-8B | meta-llama/Llama-3.1-8B-Instruct
meta-llama/Llama-2-7b-chat-hf | Llama-2-7B | meta-llama/Llama-2-7b-chat-hf
gemma 2b | Gemma-2B | google/gemma-2b
gemma-2-2b-it | Gemma-2-2B | google/gemma-2-2b-it
phi2 | Phi-2 | microsoft/phi-2
gpt2 | GPT-2 | openai-community/gpt2
bert-base-uncased | BERT-base | google-bert/bert-base-uncased
t5 small | T5-small | google-t5/t5-small
google/flan-t5-xl | FLAN-T5-XL | google/flan-t5-xl
facebook/bart-large-cnn | BART-large-CNN | facebook/bart-large-cnn
lmsys/vicuna-7b-v1.5 | Llama-2-7B | lmsys/vicuna-7b-v1.5
Qwen3-8B-Instruct | Qwen3-8B | Qwen/Qwen3-8B
unsloth/Qwen2.5-7B-Instruct-bnb-4bit | Qwen2.5-7B | Qwen/Qwen2.5-7B
unsloth/llama-3-8b-bnb-4bit | Llama-3-8B | meta-llama/Meta-Llama-3-8B
TheBloke/Llama-2-13B-chat-GPTQ | Llama-2-13B | meta-llama/Llama-2-13b-hf
unsloth/gemma-3-1b-it-GGUF | Gemma-3-1B | google/gemma-3-1b-pt
Mistral-7B-Instruct-v0.2 | Mistral-7B-v0.2 | mistralai/Mistral-7B-Instruct-v0.2
mistral-7b-v0.3-bnb-4bit | Mistral-7B-v0.3 | mistralai/Mistral-7B-v0.3
deepseek-r1-distill-qwen-7b | DeepSeek-R1-Distill-Qwen-7B | -
openai/whisper-large-v3 | Whisper-large-v3 | openai/whisper-large-v3
qwen3-vl-8b | Qwen3-VL-8B | Qwen/Qwen3-VL-8B-Instruct
unsloth/Qwen3.5-9B-GGUF | Qwen3.5-9B | Qwen/Qwen3.5-9B
olmo3 7b | OLMo-3-7B | allenai/Olmo-3-1025-7B
deberta-v3-base | DeBERTa-v3-base | microsoft/deberta-v3-base
all-MiniLM-L6-v2 | MiniLM-L6 | sentence-transformers/all-MiniLM-L6-v2
"""


@pytest.mark.parametrize("row", TYPED.splitlines())
def test_names_as_people_type_them(row):
    written, name, hub_id = row.split(" | ")
    found, _, found_id = known_model(written)
    assert found == name and hub_id in (found_id, "-")


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
    monkeypatch.setattr("gradmem_lib.model.configs._hub_answers", lambda: False)
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

    monkeypatch.setattr("gradmem_lib.model.configs.find_config", wrong)
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
