"""``explain``: what an out-of-memory error says, in sentences and in one bar."""

from __future__ import annotations

import hashlib
import shutil
import textwrap
import traceback
from dataclasses import dataclass, field
from html import escape

from ..measure.error_frames import Frame, frames_of, moment_of, own_line
from ..measure.error_text import ErrorText, read_error
from ..units import GiB, format_bytes
from .svg import frame as svg_frame
from .svg import svg_text

CONTEXT = 1 * GiB  # CUDA's own bytes in a process stay below this, in most programs
SMALL_CARD = 0.5  # of a card: where a context takes more, the card is too small for it
LARGE = 0.25  # of the card: a request so large says more than the rest does
NAMES = {
    "asked": "the request that was refused",
    "total": "the card",
    "allowed": "the limit that was set",
    "allocated": "live tensors (allocated by PyTorch)",
    "private": "of these, free blocks of private pools",
    "idle": "reserved by PyTorch, without a tensor",
    "other": "other allocations of Metal in this process",
    "context": "this process outside PyTorch's allocator",
    "other_processes": "other processes",
    "outside": "outside PyTorch's allocator",
    "rest": "the rest, which the message does not divide",
    "free": "free",
}
# (sign of the text bar, colour) of each part, in the order of the bar.
PARTS = {
    "allocated": ("#", "#234a8a"),
    "idle": ("=", "#f0893c"),
    "other": ("o", "#1b9880"),
    "context": ("c", "#1b9880"),
    "other_processes": ("x", "#bd2b52"),
    "outside": ("x", "#bd2b52"),
    "rest": ("?", "#7a5195"),
    "free": (".", "#b4bfcd"),
}
ASK = (
    "No out-of-memory error was found in this text. Give the line that contains the words "
    '"out of memory" ("CUDA out of memory. Tried to allocate ..."), and the lines from "Traceback" '
    "on, if there are any. For a process that was killed, give the lines of the launcher."
)

WHAT_HELPS = {
    "forward": (
        "Forward keeps activations for backward. Smaller micro-batches (with accumulation), "
        "shorter rows and checkpointing lower them."
    ),
    "loss": (
        "The loss holds the logits, rows x tokens x vocabulary, and copies of them. Smaller "
        "micro-batches, shorter rows, or the loss in chunks lower them."
    ),
    "backward": (
        "In backward, activations are still there and gradients arrive. Smaller micro-batches, "
        "shorter rows and checkpointing lower the activations. LoRA lowers the gradients."
    ),
    "optimizer step": (
        "The first step makes the optimizer's states: for Adam, two numbers for each trained "
        "weight. Fewer rows do not change them. 8-bit or factored states, LoRA, sharding, or a "
        "fused optimizer (foreach needs temporary copies) lower these bytes."
    ),
    "evaluation": (
        "In evaluation no gradients are needed: run it under torch.no_grad(), with a smaller "
        "evaluation batch, and move what you collect to the CPU (Trainer: "
        "eval_accumulation_steps, prediction_loss_only). Accumulation changes nothing here."
    ),
    "generation": (
        "Generation keeps keys and values of all tokens: fewer rows at once or fewer new tokens "
        "lower them. The training batch changes nothing here."
    ),
    "load": (
        "The weights themselves do not fit yet, so the batch changes nothing. Load them in bf16 or "
        'in 4 bits, read a checkpoint with map_location="cpu", or shard the model.'
    ),
    "save": (
        "Saving collected tensors on the card. The batch changes nothing: move the state to the "
        "CPU as it is collected (a full state dict of a sharded model: with CPU offload, on rank "
        "0 only)."
    ),
}


@dataclass(frozen=True)
class Explanation:
    """What the error says. ``figures``: bytes by name. ``cases``: which cases hold, the first one
    is the main one. ``sentences``: one for each thing to know. ``moment``: of the run, if a
    traceback shows it.
    """

    error: ErrorText | None
    figures: dict[str, int] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    moment: str = ""
    own_line: Frame | None = None

    def parts(self) -> dict[str, int]:
        """The bar: bytes by part, in the order of ``PARTS``."""
        found = {name: self.figures[name] for name in PARTS if self.figures.get(name)}
        if "context" in found or "other_processes" in found:
            found.pop("outside", None)
        return found

    def __str__(self) -> str:
        return self.to_text(min(100, max(40, shutil.get_terminal_size((80, 24)).columns)))

    __repr__ = __str__

    def to_text(self, width: int = 80) -> str:
        lines = []
        if self.figures:
            label = max(len(NAMES[name]) for name in self.figures)
            for name, nbytes in self.figures.items():
                lines.append(f"  {NAMES[name]:<{label}}  {format_bytes(nbytes):>10}")
            lines.append("")
        if self.parts():
            lines += [*_bar(self.parts(), width), ""]
        for sentence in self.sentences:
            lines += textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(NAMES[name])}</td>"
            f"<td>{format_bytes(nbytes)}</td></tr>"
            for name, nbytes in self.figures.items()
        )
        table = f"<table>{rows}</table>" if rows else ""
        words = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        picture = _bar_svg(self.parts()) if self.parts() else ""
        return f"<div>{picture}{table}{words}</div>"


def _bar(parts: dict[str, int], width: int) -> list[str]:
    """One line of signs, and a line for each sign."""
    room = width - 4
    total = sum(parts.values())
    signs = ""
    reached = 0
    for name, nbytes in parts.items():
        reached += nbytes
        signs += PARTS[name][0] * (round(reached / total * room) - len(signs))
    legend = [
        f"  {PARTS[name][0]} {NAMES[name]}, {format_bytes(nbytes)}"
        for name, nbytes in parts.items()
    ]
    return [f" [{signs}]", *legend]


def _bar_svg(parts: dict[str, int], width: int = 760) -> str:
    total = sum(parts.values())
    words = ", ".join(f"{NAMES[name]}: {format_bytes(n)}" for name, n in parts.items())
    key = "gm" + hashlib.sha1(words.encode()).hexdigest()[:8]
    height = 46 + 20 * len(parts)
    shapes = []
    x = 2.0
    for row, (name, nbytes) in enumerate(parts.items()):
        color = PARTS[name][1]
        share = nbytes / total * (width - 4)
        y = 60 + 20 * row
        shapes.append(f'<rect x="{x:.1f}" y="4" width="{share:.1f}" height="34" fill="{color}"/>')
        shapes.append(f'<rect x="2" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        shapes.append(svg_text(20, y, f"{NAMES[name]}, {format_bytes(nbytes)}", size=12))
        x += share
    start = svg_frame(key, width, height, 13, title="Where the memory is", words=words + ".")
    return f"{start}{''.join(shapes)}</svg>"


def explain(text: str | BaseException) -> Explanation:
    """What an out-of-memory error says: each figure by name, which case it is, and what helps.

    ``text``: the message, a traceback, or a whole log with one; or the exception itself. It reads
    the messages of PyTorch for CUDA, ROCm, XPU, NPU and Apple's GPUs, those of libraries without
    figures, and this course's ``BudgetExceeded``. A text without such an error gives an explanation
    that says which line is needed.

    Raises ``TypeError`` for anything but a text or an exception.
    """
    if isinstance(text, BaseException):
        text = "".join(traceback.format_exception(text))
    if not isinstance(text, str):
        raise TypeError(f"explain was given {type(text).__name__}: give the error's text")
    error = read_error(text)
    if error is None:
        return Explanation(None, sentences=(ASK,), cases=("nothing found",))
    frames = frames_of(text, error)
    moment = moment_of(frames)
    own = own_line(frames)
    figures = _figures(error)
    found = _cases(error, figures, is_windows="\\" in text and ":\\" in text)
    sentences = [sentence for _, sentence in found]
    if error.count > 1:
        ranks = f" (the first is from {error.stream})" if error.stream else ""
        sentences.insert(0, f"The text has {error.count} such errors; this is the first{ranks}.")
    if error.version:
        sentences.append(f"{error.version} writes this message.")
    sentences += _moment_sentences(moment, own, bool(frames), found[0][0])
    return Explanation(
        error, figures, tuple(case for case, _ in found), tuple(sentences), moment, own
    )


def _figures(error: ErrorText) -> dict[str, int]:
    """The message's figures, and those that follow from them."""
    found: dict[str, int | None] = {
        "asked": error.asked,
        "total": error.total,
        "allowed": error.allowed,
        "allocated": error.allocated,
        "private": error.private,
        "idle": error.idle,
        "other": error.other,
    }
    reserved, own = error.reserved, error.own_process
    if own is not None and reserved is not None and own >= reserved * 0.99:
        found["context"] = max(0, own - reserved)
        if error.outside is not None:
            rest = error.outside - found["context"]
            found["other_processes"] = rest if rest > 0.01 * (error.total or 0) else None
    elif error.other_processes:
        found["other_processes"] = error.other_processes
        if error.outside is not None:
            rest = error.outside - error.other_processes
            found["context"] = rest if rest > 0 else None
    elif error.outside is not None:
        found["outside"] = error.outside
    elif error.total is not None and error.free is not None:
        found["rest"] = max(0, error.total - error.free - (error.allocated or 0))
    if error.other_processes:
        found["other_processes"] = error.other_processes
    found["free"] = error.free
    return {name: nbytes for name, nbytes in found.items() if nbytes is not None}


def _cases(error: ErrorText, figures: dict[str, int], *, is_windows: bool) -> list[tuple[str, str]]:
    """(the case, its sentence) of all cases that hold, the one that decides first."""
    if error.kind not in ("cuda", "hip", "xpu", "npu", "async"):
        return [_case_of_kind(error)]
    if error.asked is None or error.total is None:
        return [
            (
                "no figures",
                "The message has no figures, so that no sum can be made: give the whole line "
                'that begins with "Tried to allocate".',
            )
        ]
    found = [_main_case(error, figures, is_windows=is_windows)]
    found += _further_cases(error, figures)
    names = [name for name, _ in found]
    return [pair for i, pair in enumerate(found) if pair[0] not in names[:i]]


def _main_case(error: ErrorText, figures: dict[str, int], *, is_windows: bool) -> tuple[str, str]:
    return (
        _beyond_the_card(error)
        or _not_the_cards_size(error)
        or _not_divided(error, figures)
        or _fragmented(error, is_windows=is_windows)
        or _held_by_others(error, figures)
        or _full(error)
    )


def _beyond_the_card(error: ErrorText) -> tuple[str, str] | None:
    asked, total, free = error.asked, error.total, error.free or 0
    request = format_bytes(asked)
    if asked > total:
        return (
            "larger than the card",
            f"One request, {request}, is larger than the whole card ({format_bytes(total)}). No "
            "setting and no free memory can help: this one tensor must become smaller. Look at its "
            "shape. Attention that is not fused grows with the square of the row's length, and "
            "logits with rows x tokens x vocabulary.",
        )
    if error.allowed is not None and (error.reserved or 0) + asked > error.allowed:
        return (
            "limit",
            f"This process may take only {format_bytes(error.allowed)} of the card "
            "(set_per_process_memory_fraction, or the same setting of a server), and it has "
            f"{format_bytes(error.reserved or 0)}. Raise that limit: the card has "
            f"{format_bytes(free)} free.",
        )
    if (error.allocated or 0) > total:
        return (
            "more than the card",
            f"PyTorch counts {format_bytes(error.allocated)} of tensors, more than the card's "
            f"{format_bytes(total)}. So a part of them lies in the host's memory (the Windows "
            "driver's shared memory, or managed memory). The run is much too large for this card.",
        )
    return None


def _not_the_cards_size(error: ErrorText) -> tuple[str, str] | None:
    free, request = error.free or 0, format_bytes(error.asked)
    if error.free is None:
        return (
            "full",
            f"The message does not say how much is free. {request} were asked for: look at "
            "nvidia-smi (xpu-smi, rocm-smi) for what else is on the card.",
        )
    if error.asked <= free:
        return (
            "enough is free",
            f"{format_bytes(free)} are free, which is more than the {request} that were asked "
            "for, so the card's size is not the limit. Something else refused: a limit of the "
            "driver, of the host's memory (on Windows, the page file), of a virtual or shared "
            "card; or another process gave memory back after the refusal. Look at nvidia-smi while "
            "it runs, and make the page file larger on Windows.",
        )
    return None


def _not_divided(error: ErrorText, figures: dict[str, int]) -> tuple[str, str] | None:
    """Messages that do not say what PyTorch has reserved."""
    if "rest" not in figures:
        return None
    rest, total = format_bytes(figures["rest"]), format_bytes(error.total)
    if error.is_cut_off:
        return (
            "cut off",
            f"The message ends before PyTorch's own figures, so that nobody can say who holds the "
            f"{rest} of {total} that are not free: give the whole message, up to "
            '"reserved by PyTorch but unallocated".',
        )
    return (
        "not divided",
        f"PyTorch's tensors take {format_bytes(error.allocated)} of {total}. This is the message "
        f"of the backend cudaMallocAsync, which does not divide the rest: {rest} are idle bytes of "
        "its pool, the context, and other processes. nvidia-smi shows the processes.",
    )


def _fragmented(error: ErrorText, *, is_windows: bool) -> tuple[str, str] | None:
    asked, total, free, idle = error.asked, error.total, error.free or 0, error.idle or 0
    request = format_bytes(asked)
    if asked <= free + idle and idle >= asked / 2:
        later = "If the step needs more than the card has, it fails later."
        if idle < 0.05 * total:
            later = (
                f"But idle bytes are only {idle / total:.0%} of the card: it is nearly full of "
                "live tensors, and the run most likely needs fewer of them, too."
            )
        return (
            "in pieces",
            f"Free and idle bytes together, {format_bytes(free + idle)}, are enough for the "
            f"{request}, but not in one piece: this is fragmentation. "
            f"{_setting(error, is_windows=is_windows)} This can serve the one request. {later}",
        )
    return None


def _held_by_others(error: ErrorText, figures: dict[str, int]) -> tuple[str, str] | None:
    asked, total, free = error.asked, error.total, error.free or 0
    outside = figures.get("outside", 0)
    others = figures.get("other_processes", 0)
    context = figures.get("context", 0)
    if others > max(asked - free, 0.05 * total):
        return (
            "other process",
            f"Other processes hold {format_bytes(others)} of the card, which this run cannot use. "
            "Find them by nvidia-smi and end those that you do not need (often a notebook's kernel "
            "or an earlier run).",
        )
    if max(outside, context) > min(CONTEXT + 0.02 * total, SMALL_CARD * total):
        held = format_bytes(max(outside, context))
        whose = (
            "by another process, by the context of this one, or by a library of this process that "
            "takes memory by itself. nvidia-smi shows whose it is"
        )
        if context > outside:
            whose = (
                "by this process: its context, and libraries that take memory by themselves (NCCL, "
                "a second framework, an inference engine)"
            )
        return (
            "outside",
            f"About {held} are held outside PyTorch's allocator, {whose}. A smaller batch does not "
            "change them.",
        )
    return None


def _full(error: ErrorText) -> tuple[str, str]:
    asked, total, free, idle = error.asked, error.total, error.free or 0, error.idle or 0
    request = format_bytes(asked)
    if asked > LARGE * total:
        return (
            "one large request",
            f"This one request, {request}, is {asked / total:.0%} of the card, and more than all "
            f"that is left: free and idle bytes together are {format_bytes(free + idle)}. No "
            "setting of the allocator can help. Look first at what this tensor is (a copy of all "
            "weights or gradients in one piece, logits, attention that is not fused), then at the "
            f"{format_bytes(error.allocated or 0)} of live tensors.",
        )
    return (
        "full",
        f"The card is full of live tensors: {format_bytes(error.allocated or 0)} of "
        f"{format_bytes(total)}. Free and idle bytes together, {format_bytes(free + idle)}, are "
        f"less than the {request} of this request, so no setting of the allocator can help. The "
        "run needs fewer or smaller tensors. The request is the first that was too many, not all "
        "that is missing.",
    )


def _setting(error: ErrorText, *, is_windows: bool) -> str:
    """What to set against fragmentation, in the words of that version."""
    if error.kind == "xpu":
        return (
            "torch.xpu.empty_cache() between phases, and rows of equal lengths, make fewer pieces."
        )
    if error.setting.endswith("expandable_segments:True"):
        if is_windows:
            return (
                "The setting that the message names (expandable_segments) does not work on "
                "Windows. Rows of equal lengths make fewer pieces."
            )
        if error.kind == "hip":
            return (
                f"Set {error.setting} before the start. It needs ROCm 7 or later: with an older "
                "one, PyTorch warns and ignores it. Rows of equal lengths make fewer pieces, too."
            )
        return (
            f"Set {error.setting} in the environment before the start, and give rows equal lengths."
        )
    if error.setting:
        return (
            "In this version, set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 in the environment "
            "before the start: larger blocks are then not split. (From 2.1 on, "
            "expandable_segments:True is better.)"
        )
    return (
        "This version has no setting that its message names: rows of equal lengths make fewer "
        "pieces, and PyTorch 2.1 or later has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


def _further_cases(error: ErrorText, figures: dict[str, int]) -> list[tuple[str, str]]:
    found = []
    if error.unknown_process:
        found.append(
            (
                "unknown process",
                "The bytes that the message gives for a process (0, or 2**64) are no figure: the "
                "driver cannot count processes here, as in many containers and in WSL. "
                f"About {format_bytes(error.outside or 0)} are outside PyTorch's allocator. "
                "nvidia-smi on the host shows whose they are.",
            )
        )
    elif error.this_process is None and error.own_process is not None:
        number = max(error.processes, key=lambda pid: error.processes[pid])
        found.append(
            (
                "container",
                f"Process {number} is this run itself: next to PyTorch's own bytes there would be "
                "no room for it. In a container a process has another number than the driver's.",
            )
        )
    if error.private:
        found.append(
            (
                "private pools",
                f"{format_bytes(error.private)} are free blocks in private pools, which the "
                "message counts as allocated. Only the CUDA graphs (torch.compile with "
                "reduce-overhead, vLLM) of each pool can use them: fewer graphs give them back.",
            )
        )
    if figures.get("other_processes", 0) > 0.05 * (error.total or 1):
        found.append(
            (
                "other process",
                f"Other processes hold {format_bytes(figures['other_processes'])} of the card.",
            )
        )
    if figures.get("outside", 0) > CONTEXT + 0.02 * (error.total or 0):
        found.append(
            (
                "outside",
                f"About {format_bytes(figures['outside'])} are held outside PyTorch's allocator: "
                "by another process, or by this one's context and libraries.",
            )
        )
    return found


# The errors of which nothing has to be computed.
SENTENCES = {
    "shared memory": (
        "The loader's workers hand over batches in the host's shared memory (/dev/shm), and this "
        "is full. It is not the card's. Start a container with more of it (docker run "
        "--shm-size=8g, or --ipc=host), or use fewer workers and smaller batches."
    ),
    "killed": (
        "A process was killed by signal 9 without an error of its own. In most cases the "
        "system ended it because the computer's memory (not the card's) was full: `dmesg` says "
        'so in a line with "Out of memory". Use fewer loader workers, or load the model on one '
        "rank at a time. If an error of PyTorch stands above in the log, give that part too."
    ),
    "vllm": (
        "This is vLLM's plan, not a request: the model and its profile run leave no room for "
        "the cache in the share of the card that gpu_memory_utilization gives. Raise it if the "
        "card is otherwise free, lower max_model_len, or take a smaller model."
    ),
    "dispatched": (
        "No allocation failed here: device_map found that the weights do not fit into the card's "
        "free memory, and put some of them on the CPU or the disk. Such a model cannot be trained "
        "as it is. nvidia-smi shows what fills the card before this run. If nothing does, load the "
        "model in 4 bits instead of 8, or take a smaller model or a larger card. With "
        'device_map={"": 0} everything goes to the first card, and an error with figures comes '
        "if it does not fit."
    ),
    "disk": (
        "This is a disk, not memory: `df -h` shows which. Checkpoints of a run are most often "
        "what fills it (save_total_limit=1 in TrainingArguments keeps the last one), then "
        "~/.cache/huggingface. If the path is below /dev/shm, it is the host's shared memory."
    ),
    "no figures": (
        "This error comes from the driver or from a library, and has no figures: the memory was "
        "asked for outside PyTorch's allocator (a context, cuBLAS, NCCL, bitsandbytes), or by a "
        "call that failed earlier. Most often another process has filled the card before this one "
        "began: look at nvidia-smi. If there is a line with "
        '"Tried to allocate", give that one, too.'
    ),
}


def _case_of_kind(error: ErrorText) -> tuple[str, str]:
    """The errors that have no sum of a card."""
    if error.kind in SENTENCES:
        return error.kind, SENTENCES[error.kind]
    if error.kind == "mps":
        return _case_of_mps(error)
    if error.kind == "budget":
        return _case_of_budget(error)
    amount = "" if error.asked is None else f" {format_bytes(error.asked)} were asked for."
    if error.kind == "host":
        return (
            "host",
            f"This is the computer's own memory, not the card's.{amount} Read data and checkpoints "
            "in parts, use fewer loader workers, or load on one rank at a time.",
        )
    return (
        "other library",
        "This error is not PyTorch's: JAX and XLA, TensorFlow, ONNX Runtime, CuPy, llama.cpp and "
        f"others have allocators of their own.{amount} Who holds the memory cannot be read from it "
        "here.",
    )


def _case_of_budget(error: ErrorText) -> tuple[str, str]:
    if error.total is None:
        return "budget", "This is BudgetExceeded of this library: give all lines of it."
    return (
        "budget",
        f"This is the budget of MemoryTracker ({format_bytes(error.total)}), not a card's limit. "
        "The message itself names the holders and what could bring the moment within the budget.",
    )


def _case_of_mps(error: ErrorText) -> tuple[str, str]:
    if "Invalidbuffersize" in error.message:
        return (
            "mps",
            f"Apple's GPU: one tensor of {format_bytes(error.asked)} is more than Metal gives to "
            "one buffer. Free memory does not change that: this tensor must become smaller. "
            "Attention that is not fused, and logits, are the usual ones.",
        )
    if error.allowed is None or error.allocated is None or error.asked is None:
        return (
            "mps",
            "Apple's GPU is out of memory, and some of the figures are missing: give the "
            'whole line, with "MPS allocated", "max allowed" and "Tried to allocate".',
        )
    together = error.allocated + (error.other or 0)
    return (
        "mps",
        f"Apple's GPU: {format_bytes(together)} are held, and {format_bytes(error.asked)} more "
        f"would pass the limit of {format_bytes(error.allowed)}. (Where the message writes GB it "
        "means powers of 1024, GiB here.) The limit is a multiple of what the system recommends, "
        "1.7 by default. PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 takes it away, but then the computer "
        "swaps or fails: it adds no memory. Fewer or smaller tensors help.",
    )


# These do not come from a moment of a training step: it is neither asked for nor answered.
WITHOUT_MOMENT = ("dispatched", "disk", "killed", "shared memory", "vllm")


def _moment_sentences(moment: str, own: Frame | None, has_frames: bool, case: str) -> list[str]:
    if not has_frames:
        if case in WITHOUT_MOMENT:
            return []
        return [
            'There is no traceback in this text, so the moment is not known: the lines from "'
            'Traceback" on would show it.'
        ]
    found = []
    where = ""
    if own is not None:
        where = f" Your own line: {own.file}, line {own.line}"
        if own.code:
            where += f": {own.code}"
        where += "."
    if case in WITHOUT_MOMENT:
        return [where.strip()] if where else []
    if moment:
        found.append(f"It happened in: {moment}.{where}")
    else:
        found.append(f"The traceback has no frame that shows the moment.{where}")
    if moment in WHAT_HELPS and case != "host":
        found.append(WHAT_HELPS[moment])
    return found
