"""``python -m gradmem_lib predict`` and ``plan``: what they print, and what they say to
bad input.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import threading

import pytest
from support.families import tiny_config
from support.predicted import tiny

from gradmem_lib.__main__ import main, parser
from gradmem_lib.commands import plan as plan_command
from gradmem_lib.commands import terminal
from gradmem_lib.commands.model_step import command_words
from gradmem_lib.commands.step_options import chosen
from gradmem_lib.course.learner.progress import record_check
from gradmem_lib.course.learner.titles import titles
from gradmem_lib.planning.options import METHODS
from gradmem_lib.prediction.loop import Loop
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB


@pytest.fixture
def config():
    return tiny().config


def command(capsys, line: str, *more: str) -> tuple[int, str, str]:
    """What ``line`` with ``more`` words gives: (exit code, stdout, stderr without its line breaks).

    A word of ``line`` has no spaces.
    """
    try:
        code = main([*line.split(), *more])
    except SystemExit as left:  # argparse's own refusals
        code = left.code
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in err.splitlines() if " " in line), err
    return code, out, " ".join(err.split())


LOOP = Loop(zero_grad="before backward", keeps="loss", clips=True)
ASKED = [
    ("--precision bf16", {"recipe": Recipe(precision="bf16")}),
    ("--checkpointing 1,1", {"recipe": Recipe(checkpointing=[1, 1])}),
    ("--zero-grad before-backward --keeps loss --clips", {"loop": LOOP}),
]


@pytest.mark.parametrize(("words", "asked"), ASKED)
def test_command_predict_prints_a_table_and_json(capsys, tmp_path, config, words, asked):
    config.save_pretrained(tmp_path)
    options = f"--batch-size 2 --target cpu {words} --seq-len"
    code, out, _ = command(capsys, f"predict {tmp_path} {options} 32")
    peak = predict(config, batch_size=2, seq_len=32, target="cpu", **asked).peak.total
    assert code == 0 and f"{peak:,}" in out
    assert peak != predict(config, batch_size=2, seq_len=32, target="cpu").peak.total
    code, out, _ = command(capsys, f"predict {tmp_path}/config.json {options} 32 --json")
    assert json.loads(out)["peak"]["total"] == json.loads(out)["needs"] == peak
    beyond = config.max_position_embeddings + 1
    code, _, error = command(capsys, f"predict {tmp_path} {options} {beyond}")
    assert code == 2 and "if its positions are rotary" in error


def test_command_plan_prints_what_fits_with_code_and_json(capsys, tmp_path, config, monkeypatch):
    config.save_pretrained(tmp_path)
    sizes = "--seq-len 32 --global-batch 2 --method qlora --target cpu"
    line = f"plan {tmp_path} {sizes} --card"
    code, out, error = command(capsys, f"{line} 1GiB")
    assert code == 0 and "Fits" in out and "make_trainer(" in out
    assert "fastest" not in out  # no speed of a CPU is known
    assert "predicted" not in error  # no terminal
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        code, out, error = command(capsys, f"{line} 1GiB --margin 0.5")
    assert code == 0 and "Margin: 50.0% of what a recipe needs" in out
    assert "1 recipe predicted; the best so far: " in error
    code, out, _ = command(capsys, f"{line} 1GiB --json")
    found = json.loads(out)
    assert (
        found["fits"][0]["needs"] <= found["card"]["nbytes"] == GiB and found["method"] in METHODS
    )
    code, out, _ = command(capsys, f"{line} 100KB")
    assert code == 1 and "Nothing fits" in out


REFUSED = {
    "plan tiny-llama --card GTX9 --seq-len 8 --global-batch 2": "no card is known",
    "plan tiny-llama --card 1GiB --seq-len 8 --global-batch -1": "at least 1",
    "plan tiny-llama --card 1GiB --seq-len 9999 --global-batch 1": "positions",
    "plan Whisper-tiny --card T4 --global-batch 8": (
        "--seq-len is missing: Whisper-tiny reads or writes text"
    ),
    "predict tiny-llama --batch-size 2 --seq-len 8 --lora-rank 0": (
        "--lora-rank: '0' is not a whole number of at least 1"
    ),
    "predict tiny-llama --batch-size 3 --seq-len 8 --accumulation 2": "multiple of 2",
    "predict tiny-llama --batch-size 3 --seq-len 8 --checkpointing 0": "at least 1",
    "predict tiny-llama --batch-size 3": "--seq-len is missing",
    "predict tiny-llama --batch-size 4 --seq-len 8 --accumulation 2 --in-backward": (
        "choose one of the two"
    ),
    "predict gpt2 --batch-size 3 --precision f": "'f' is none of float32",
    "predict gpt2 --batch-size 7 --seq-len 8 --accumulation 2": (
        "--batch-size 7 cannot be cut into equal micro-batches by --accumulation 2"
    ),
    "class nowhere/at-all": "nowhere/at-all does not exist",
    "class Makefile": "Makefile is not a folder",
    "explain no-such-file.txt": "there is no such file",
    "plan tiny-llama": "--card",
    "predict gpt2 --batch-size 1 --card T4": (
        "--card T4 is not known. See python -m gradmem_lib predict --help"
    ),
    "plan gpt2 --method lroa": "did you mean lora? See python -m gradmem_lib plan --help",
}


@pytest.mark.parametrize("line", REFUSED)
def test_command_refuses_bad_input_in_a_sentence(capsys, line):
    code, out, err = command(capsys, line)
    assert code == 2 and REFUSED[line] in err and not out and "Traceback" not in err


def test_command_leaves_a_models_attention_as_it_is(capsys, tmp_path):
    config = tiny_config("mamba")
    config.save_pretrained(tmp_path)
    line = f"predict {tmp_path} --batch-size 2 --seq-len 8 --target cpu --json"
    code, _, err = command(capsys, line)
    assert code == 2 and "--attention" in err  # what there is a word for
    code, out, _ = command(capsys, f"{line} --attention none --offload none --sharding none")
    wanted = predict(config, batch_size=2, seq_len=8, recipe=Recipe(attention=None), target="cpu")
    assert code == 0 and json.loads(out)["peak"]["total"] == wanted.peak.total


def test_command_without_a_network_says_what_to_give(capsys, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = command(capsys, "plan nobody/nothing --card T4 --seq-len 8 --global-batch 1")
    assert code == 2 and "no model is known as 'nobody/nothing'" in err and "config.json" in err
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = command(capsys, f"predict {empty} --batch-size 1 --seq-len 8")
    assert code == 2 and "has no config.json" in err


def test_command_plan_takes_pictures_without_a_length(capsys, tmp_path):
    tiny_config("vit").save_pretrained(tmp_path)
    line = f"plan {tmp_path} --card 1GiB --global-batch 4 --target cpu --method qlora"
    code, out, err = command(capsys, line)
    # On a slow machine it says what takes so long, and how far it is.
    assert code == 0 and (not err or err.startswith("reading the model and trying its recipes"))
    assert "global batch 4 rows" in out and "A row: pixel_values 3 x 32 x 32" in out
    assert "ViTForImageClassification(config)" in out and "us/row" not in out
    code, out, err = command(capsys, f"{line} --json")
    assert "estimated_seconds_per_row" in json.loads(out)["fits"][0]
    tiny_config("whisper").save_pretrained(tmp_path)
    code, out, err = command(capsys, line)
    assert code == 2 and "--seq-len is not given: give a whole number of tokens" in err


NOT_VALID = "the config of .* is not valid"
CONFIGS = [
    ({"model_type": "llama", "hidden_size": "x"}, f"{NOT_VALID} .*hidden_size"),
    ({"model_type": "llama", "num_attention_heads": 0}, f"{NOT_VALID} .*zero"),
    ({"model_type": "llama", "hidden_size": 65}, f"{NOT_VALID} .*not a multiple"),
    (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        "give the model as it was",
    ),
    (
        {"model_type": "llama", "hidden_act": "gelux"},
        "cannot build LlamaForCausalLM from .*KeyError: 'gelux'",
    ),
    (
        {"model_type": "llama", "num_key_value_heads": 3, "num_hidden_layers": 2},
        "fails in its prediction",
    ),
    (
        {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}},
        "no model is known as .*custom code",
    ),
    ({"size": 1}, "no model is known as"),
    (None, NOT_VALID),
]
WITHOUT_A_KNOWN_BATCH = {
    "BertForMultipleChoice": "bert",
    "BertForNextSentencePrediction": "bert",
    "BertForPreTraining": "bert",
    "BertModel": "bert",
    "TapasForQuestionAnswering": "tapas",
    "LxmertForQuestionAnswering": "lxmert",
    "ViltForQuestionAnswering": "vilt",
}
for name, kind in WITHOUT_A_KNOWN_BATCH.items():
    fields = {"model_type": kind, "architectures": [name]}
    CONFIGS.append((fields, f"what {name} trains on cannot .*batch="))


@pytest.mark.parametrize("fields, says", CONFIGS)
def test_command_plan_refuses_models_in_a_sentence(capsys, tmp_path, fields, says):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    line = f"plan {tmp_path} --card 4090 --seq-len 8 --global-batch 1"
    code, out, err = command(capsys, line)
    assert code == 2 and re.search(says, err) and not out and "Traceback" not in err


def test_command_turns_what_no_check_has_foreseen_into_a_sentence(capsys, monkeypatch):
    from gradmem_lib.planning import plan as module

    def fails(*args, **kwargs):
        raise AttributeError("no attribute 'weight'")

    monkeypatch.setattr(module, "plan", fails)
    line = "plan tiny-llama --card T4 --seq-len 8 --global-batch 1"
    code, out, err = command(capsys, line)
    assert code == 2 and not out
    assert "tiny-llama: AttributeError: no attribute 'weight'" in err and "python -X dev" in err


def test_without_a_command_the_commands_are_listed(capsys):
    code, out, _ = command(capsys, "")
    assert code == 0
    for name in ("lab", "doctor", "run", "explain", "predict", "plan", "progress", "class"):
        assert re.search(rf"^    {name} ", out, re.MULTILINE), name


def test_the_version_is_the_packages(capsys):
    code, out, _ = command(capsys, "--version")
    assert code == 0 and re.fullmatch(r"gradmem \d+\.\d+\.\d+\S*\n", out)


def test_the_targets_of_lora_do_not_swallow_the_model():
    words = ["predict", "--lora-targets", "q_proj,v_proj", "gpt2", "--batch-size", "1"]
    options = parser().parse_args(words)
    assert options.lora_targets == ("q_proj", "v_proj") and options.model == "gpt2"


def test_without_options_a_step_is_the_default_one():
    options = parser().parse_args(["predict", "gpt2", "--batch-size", "1"])
    assert chosen(Recipe, options) == Recipe() and chosen(Loop, options) == Loop()


WITHOUT_TORCH = [
    "",
    "--version",
    "--help",
    "progress",
    "class nowhere",
    "class {folder} --once --out {folder}/b.html",
    "explain CUDA error: out of memory",
    "plan gpt2 --card GTX9 --seq-len 8 --global-batch 2",
    "plan gpt2 --card T4 --seq-len 8 --global-batch 0",
    "predict gpt2 --batch-size 3",
    "predict gpt2 --batch-size 3 --seq-len 8 --accumulation 2",
    "explain CUDA error: out of memory --model gpt2 --batch-size 3",
]
RUN_ALL = """
import sys
from gradmem_lib.__main__ import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit:
        pass
    if "torch" in sys.modules:
        sys.exit(f"this imports torch: {line}")
"""


def test_what_needs_no_torch_does_not_import_it(tmp_path):
    """In a new Python."""
    lines = [line.format(folder=tmp_path) for line in WITHOUT_TORCH]
    code = [sys.executable, "-c", RUN_ALL, *lines]
    done = subprocess.run(code, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_read_enough_is_no_error():
    """As ``gradmem explain error.txt | head -1``."""
    words = [sys.executable, "-m", "gradmem_lib", "explain", "CUDA error: out of memory"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 1


def test_progress_is_one_screen_with_its_signs_explained(capsys):
    code, out, _ = command(capsys, "progress")
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 24 and all(len(line) <= 80 for line in lines[:-1])
    assert "●○○ easy" in out and "1.1" in out


def test_progress_counts_what_has_passed_and_names_the_next(capsys):
    record_check("1.1", "passed")
    record_check("1.2", "not yet")
    _, out, _ = command(capsys, "progress")
    of = sum(title.id.startswith("1.") for title in titles())
    assert re.search(rf"01     1 of {of} +1\.2 .*\(tries: 1\)", out)


def test_explain_reads_a_file_standard_input_and_words(capsys, tmp_path, monkeypatch):
    text = (
        "CUDA out of memory. Tried to allocate 352.00 MiB (GPU 0; 7.92 GiB total capacity; "
        "1.67 GiB already allocated; 156.00 MiB free; 124.28 MiB cached)"
    )
    log = tmp_path / "log.txt"
    log.write_text(f"[rank0]: {text}\n")
    code, from_file, _ = command(capsys, f"explain {log}")
    assert code == 0 and from_file.startswith("About 5.98 GiB of the card's 7.92 GiB")
    _, from_words, _ = command(capsys, f"explain {text}")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    _, from_input, _ = command(capsys, "explain")
    assert from_words == from_input == from_file
    code, out, _ = command(capsys, "explain", "nothing of the kind")
    assert code == 1 and "Give the line" in " ".join(out.split())


def test_each_step_of_the_path_ends_with_the_command_of_the_next(capsys):
    text = (
        "python train.py --model_name_or_path meta-llama/Llama-2-7b-hf --max_seq_length 2048 "
        "--per_device_train_batch_size 8\nCUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 "
        "has a total capacity of 23.64 GiB of which 31.38 MiB is free. Including non-PyTorch "
        "memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.86 GiB is "
        "allocated by PyTorch, and 302.06 MiB is reserved by PyTorch but unallocated."
    )
    _, out, _ = command(capsys, "explain", text)
    *_, words, last = out.splitlines()
    assert words == "Type next, to see what fits such a card:"
    assert last.split()[:3] == ["gradmem", "plan", "meta-llama/Llama-2-7b-hf"]
    chosen = parser().parse_args(shlex.split(last)[1:])
    assert (chosen.card, chosen.seq_len, chosen.global_batch) == ("RTX 4090 24GB", 2048, 8)
    assert "capacity" not in last and out.count("Type next") == 1
    then = shlex.split(plan_command.SEE_IT.splitlines()[-1])
    assert parser().parse_args(then[1:]).steps == 2


def test_explain_lays_the_prediction_beside_the_error(capsys, tmp_path, config):
    config.save_pretrained(tmp_path)
    line = f"explain --model {tmp_path} --batch-size 2 --seq-len 32"
    text = (
        "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; {} total capacity; "
        "10.00 MiB already allocated; 1.00 MiB free; 10.00 MiB reserved in total by PyTorch)"
    )
    code, out, _ = command(capsys, line, text.format("8.00 GiB"))
    wanted = predict(config, batch_size=2, seq_len=32, recipe=Recipe(), target="cuda")
    assert code == 0 and f"{wanted.peak.total:,}" in out and "fits the error's card" in out
    assert f"gradmem plan {tmp_path} --card 8.00GiB --seq-len 32 --global-batch 2\n" in out
    _, out, _ = command(capsys, line, text.format("12.00 MiB"))
    assert "does not fit the error's card" in out


def test_what_takes_long_is_said(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "SILENT_SECONDS", 0)
    with terminal.saying("reading ..."):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capsys.readouterr().err == "reading ...\n"


@pytest.mark.parametrize(
    "message, shown",
    [
        ("seq_len=None: give a number", "--seq-len is not given: give a number"),
        ("in_backward=True frees", "--in-backward frees"),
        ("give precision=None, which", "give --precision none, which"),
        ("give lora_rank, such as 16", "give --lora-rank, such as 16"),
        ("precision='bf16' with it", "--precision 'bf16' with it"),
        ("a precision of two digits", "a precision of two digits"),
    ],
)
def test_a_message_has_the_command_lines_spelling(message, shown):
    names = ["seq_len", "in_backward", "lora_rank", "precision"]
    assert command_words(message, names) == shown
