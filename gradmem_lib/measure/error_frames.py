"""Reads a traceback: at which moment of a training run the memory ran out, and at which line of the
user's own code.

A traceback is text, so that names of files and functions are all there is. They stand in one table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .error_text import ErrorText, Line, streams

_FRAMES = (
    re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[\w.<>]+)'),
    re.compile(r"File (?P<file>\S+?):(?P<line>\d+), in (?P<name>[\w.<>]+)"),  # IPython
    re.compile(r"^(?P<file>\S+\.py) in (?P<name>[\w.<>]+)\((?P<line>)"),  # IPython before 8
    re.compile(r"(?P<file>Cell In ?\[\d+\]), line (?P<line>\d+)(?P<name>)"),
)
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|\\lib\\|<frozen|/tmp/torchinductor|gradmem_lib[/\\]"
)
_TRACKER = re.compile(r"gradmem_lib[/\\]measure[/\\]")  # where a budget ends a run

# (a part of the file's path, names of functions, the moment that it is a sign of)
FRAMES = (
    (r"torch[/\\]serialization", r"save", "save"),
    (r"safetensors", r"save_file", "save"),
    (
        "",
        r"save_pretrained|save_checkpoint|_save_checkpoint|save_model|save_state|_save"
        r"|_tuning_save_checkpoint|dump_checkpoint|save_file",
        "save",
    ),
    (r"torch[/\\]serialization", r"load|_load", "load"),
    (
        "",
        r"from_pretrained|load_state_dict|load_checkpoint|_load_from_checkpoint|load_model"
        r"|load_pretrained_model|_load_pretrained_model|load_file|dispatch_model"
        r"|load_from_checkpoint|_load_best_model|caching_allocator_warmup",
        "load",
    ),
    (r"torch[/\\]nn[/\\]modules[/\\]module", r"to|cuda|convert|_apply", "load"),
    (r"torch[/\\]optim[/\\]", r"step|_init_group|_multi_tensor_\w+|_fused_\w+", "optimizer step"),
    (r"bitsandbytes[/\\]optim", r"step|init_state|update_step|get_state_buffer", "optimizer step"),
    (r"deepspeed[/\\]runtime[/\\]", r"step|_take_model_step|_optimizer_step", "optimizer step"),
    (r"apex[/\\]optimizers", r"step", "optimizer step"),
    (r"torch[/\\]_tensor|torch[/\\]tensor", r"backward", "backward"),
    (r"torch[/\\]autograd", r"backward|grad|_engine_run_backward|apply", "backward"),
    (r"accelerate|lightning|deepspeed", r"backward", "backward"),
    (
        "",
        r"evaluate|evaluation_loop|prediction_loop|prediction_step|validation_step"
        r"|validate|run_evaluation|_run_eval\w*|_run_sanity_check",
        "evaluation",
    ),
    ("", r"test_step|eval_epoch|predict_step", "evaluation"),
    ("", r"generate|_sample|sample|greedy_search|beam_search|_beam_search", "generation"),
    (r"vllm[/\\]", r"execute_model|profile_run|determine_available_memory", "generation"),
    (r"torch[/\\]utils[/\\]_contextlib|grad_mode", r"decorate_context", "evaluation"),
    (r"torch[/\\]nn[/\\]modules[/\\]loss", r"forward", "loss"),
    (
        "",
        r"cross_entropy|nll_loss|ForCausalLMLoss|fixed_cross_entropy|ForMaskedLMLoss"
        r"|\w+_loss_function|mse_loss",
        "loss",
    ),
    (r"torch[/\\]nn[/\\]", r"_call_impl|forward|linear|softmax|dropout", "forward"),
    ("", r"forward|training_step", "forward"),
)

INNER = ("forward", "loss")  # they are a part of what is around them


@dataclass(frozen=True)
class Frame:
    """A line of a traceback; ``code``: what stands in that line."""

    file: str
    line: str
    name: str
    code: str = ""

    @property
    def is_library(self) -> bool:
        return bool(_LIBRARY.search(self.file))


def frames_of(text: str, error: ErrorText) -> list[Frame]:
    """The frames of the traceback that ends in ``error``, the outermost first."""
    lines = streams(text).get(error.stream, [])
    before = [line for line in lines if line.number <= error.line]
    begins = []
    for i, line in enumerate(before):
        if "Traceback (most recent call last)" in line.text:
            begins.append(i)
    found = _frames(before[begins[-1] :] if begins else before)
    if found:
        return found
    # Some loggers write the message first.
    return _frames([line for line in lines if line.number > error.line])


def _frames(lines: list[Line]) -> list[Frame]:
    found = []
    for i, line in enumerate(lines):
        following = lines[i + 1].text if i + 1 < len(lines) else ""
        match = _frame(line.text)
        if match is None and 'File "' in line.text:  # wrapped
            match = _frame(line.text.rstrip("\n") + following)
        if match is not None and not _TRACKER.search(match["file"]):
            code = _arrow(lines[i + 1 : i + 12]) or following.strip()
            if _frame(following) or code[:1] in "^~":
                code = ""
            found.append(Frame(match["file"], match["line"], match["name"], code))
    return found


def _arrow(following: list[Line]) -> str:
    """IPython's code of a frame: the line with an arrow, before the next frame."""
    for line in following:
        if _frame(line.text):
            return ""
        if match := re.match(r"-+> ?\d+ (.*)", line.text):
            return match[1].strip()
    return ""


def _frame(text: str) -> re.Match | None:
    for pattern in _FRAMES:
        if match := pattern.search(text):
            return match
    return None


def moment_of(frames: list[Frame]) -> str:
    """The moment that a traceback shows, or ``""``.

    From the outermost frame inwards, the last sign holds. A forward pass is the exception: inside
    an evaluation it is evaluation, and inside backward it is a checkpoint's recomputation. A
    closure ends its optimizer's step: Lightning runs forward and backward in one.
    """
    moment = ""
    for frame in frames:
        if "closure" in frame.name:
            moment = ""
        sign = _sign(frame)
        if sign in INNER and moment not in ("", *INNER):
            continue
        if sign == "forward" and moment == "loss" and frame.is_library:
            continue
        moment = sign or moment
    return moment


def _sign(frame: Frame) -> str:
    for path, names, moment in FRAMES:
        if re.search(path, frame.file) and re.fullmatch(names, frame.name.split(".")[-1]):
            return moment
    return ""


def own_line(frames: list[Frame]) -> Frame | None:
    """The innermost frame that is not a library's."""
    own = [frame for frame in frames if not frame.is_library]
    return own[-1] if own else None
