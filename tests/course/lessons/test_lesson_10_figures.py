"""What lesson 10 says in figures that none of its cells prints, and its file of settings for
accelerate.
"""

import re

import pytest
from support.paths import ROOT

from gradmem_lib import known_model
from gradmem_lib.course.material import models
from gradmem_lib.planning.cards import BUS_UTILIZATION, BUSES, CARDS
from gradmem_lib.prediction.configs import skeleton

SOURCE = (ROOT / "solutions" / "10_beyond_one_card.py").read_text(encoding="utf-8")
TEXT = " ".join(SOURCE.replace("#", " ").split())


def numbers_of(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_small_llama():
    (sizes,) = re.findall(r"models.tiny_llama\((.*?)\)", SOURCE)
    weights = numbers_of(
        models.tiny_llama(**{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", sizes)})
    )
    assert f"a Llama with {weights:,} weights" in TEXT and f"/ {weights:_}" in TEXT
    assert (
        f"all {4 * weights:,} bytes of gradients" in TEXT
        and f"has {4 * weights:,} bytes of weights" in TEXT
    )


def test_the_70b():
    weights = numbers_of(skeleton(known_model("Llama-2-70B")[1]))
    assert f"{weights / 1e9:.0f} billion weights: {2 * weights / 1e9:.0f} GB in bf16" in TEXT
    assert f"{2 * weights / 1e9:.0f} GB in bf16." in TEXT
    assert (
        f"Eight processes that each load a 70B in bf16 need 8 × {2 * weights / 1e9:.0f} GB there."
    ) in TEXT
    nbytes = CARDS["RTX 4090 24GB"].nbytes
    assert f"the card's {nbytes / 2**30:.1f} GiB are {nbytes / 1e9:.1f} GB" in TEXT


def test_the_7b_and_the_links():
    weights = numbers_of(skeleton(known_model("Llama-2-7B")[1]))
    assert TEXT.count(f"{weights / 1e9:.2f}e9") == 2
    assert (
        f"We take {100 * BUS_UTILIZATION:.0f} % of a link's rate" in TEXT
        and f"{BUS_UTILIZATION} * card.link" in TEXT
    )
    assert (
        CARDS["RTX 4090 24GB"].link == BUSES["PCIe 4"] == 31.5e9 and "PCIe 4 has 31.5 GB/s" in TEXT
    )
    assert (
        f"An RTX 4090 computes {CARDS['RTX 4090 24GB'].half / 1e12:.0f} trillion operations" in TEXT
    )
    assert CARDS["H100 80GB"].link == 450e9 and "NVLink has 450" in TEXT


def test_accelerate_reads_the_settings(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    (settings,) = re.findall(r'settings = """\\\n(.*?)"""', SOURCE, re.DOTALL)
    path = tmp_path / "fsdp.yaml"
    path.write_text(settings, encoding="utf-8")
    read = load_config_from_file(str(path))
    assert (read.distributed_type.value, read.num_processes, read.mixed_precision) == (
        "FSDP",
        2,
        "bf16",
    )
    known = {f"fsdp_{name}" for name in FullyShardedDataParallelPlugin.__dataclass_fields__}
    assert set(read.fsdp_config) <= known | {"fsdp_version"}, set(read.fsdp_config) - known
    path.write_text(settings.replace("fsdp_version", "fsdp_versoin"), encoding="utf-8")
    assert "fsdp_versoin" in load_config_from_file(str(path)).fsdp_config
    path.write_text(settings.replace("num_processes", "num_proceses"), encoding="utf-8")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(path))
