"""The table of answers to an out-of-memory error: for which facts, in which words, what helps.

A sentence names facts in braces, and what compares two of them is computed: "{free|asked}" becomes
"less than the 2.00 GiB", or "more than", or "as much as". So no sentence can contradict its own
figures. All figures are used as they are printed, with two digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..measure.error_text import ENDLESS, ErrorText
from ..units import GiB, format_bytes, parse_bytes

CONTEXT = 1 * GiB  # CUDA's own bytes in a process stay below this, in most programs
SMALL_CARD = 0.5  # of a card: where a context takes more, the card is too small for it
LARGE = 0.15  # of a card: a request so large says more than the rest does
FULL = 0.9  # of a card: with so many live tensors, it needs no other reason
MUCH = 0.05  # of a card: what is less than this is not why a card is full
LITTLE = 0.01  # of a card: what is less than this needs no word
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
    "resident": "the process that was killed, in the computer's memory",
}
CARD_KINDS = ("cuda", "hip", "xpu", "npu", "async")
PLAN = "plan"  # the next command is ``gradmem plan``, with what is known filled in
RUN = "run"  # or ``gradmem run``, with the script of the traceback


class Facts(dict):
    """Bytes and words by name. What the message does not give counts as 0."""

    def __missing__(self, name: str) -> int:
        return 0

    def share(self, name: str) -> float:
        """Of the card."""
        if not self["total"]:
            return 0.0
        return self[name] / self["total"]


def shown(nbytes: int) -> int:
    """The bytes that ``format_bytes`` prints for ``nbytes``."""
    if nbytes <= 0:
        return 0
    return parse_bytes(format_bytes(nbytes))


def figures_of(error: ErrorText) -> dict[str, int]:
    """The message's figures, and those that follow from them."""
    found: dict[str, int | None] = {name: getattr(error, name, None) for name in NAMES}
    for name in ("private", "other_processes"):
        found[name] = found[name] or None  # 0 bytes are nothing to speak of
    reserved, own, outside = error.reserved, error.own_process, found.pop("outside")
    # What is outside PyTorch's allocator is divided as far as the message says whose it is.
    if own is not None and reserved is not None and own >= reserved * 0.99:
        found["context"] = max(0, own - reserved)
        if outside is not None and not error.other_processes:
            rest = outside - found["context"]
            if rest > 0.01 * (error.total or 0):
                found["other_processes"] = rest
    elif error.other_processes:
        if outside is not None and outside > error.other_processes:
            found["context"] = outside - error.other_processes
    elif outside is not None:
        found["outside"] = outside
    elif error.total is not None and error.free is not None:
        found["rest"] = max(0, error.total - error.free - (error.allocated or 0))
    return {name: found[name] for name in NAMES if found.get(name) is not None}


def facts_of(error: ErrorText, figures: dict[str, int], *, is_windows: bool) -> Facts:
    """The figures as they are printed, their sums, and the words that a sentence may need."""
    facts = Facts({name: shown(nbytes) for name, nbytes in figures.items()})
    if "free" in facts:
        facts["left"] = shown(facts["free"] + facts["idle"])
    facts["held"] = shown(facts["allocated"] + facts["idle"] + facts["other"])
    facts["wanted"] = shown(facts["held"] + facts["asked"])
    if error.own_number is not None:
        facts |= {"number": str(error.own_number), "own": shown(error.own_process)}
    facts["names"] = _names(error.others) or "nvidia-smi shows whose they are"
    facts["setting"] = _setting(error, is_windows=is_windows)
    for name in ("is_cut_off", "other_ranks", "unknown_process", "victim", "message"):
        facts[name] = getattr(error, name)
    return facts


def _names(processes: dict[int, int]) -> str:
    names = [f"process {n} holds {format_bytes(nbytes)}" for n, nbytes in processes.items()]
    if len(names) > 4:
        names = [*names[:3], f"and {len(names) - 3} more"]
    return ", ".join(names)


def fill(sentence: str, facts: Facts) -> str:
    """``sentence`` with its figures and comparisons."""

    def compared(match: re.Match) -> str:
        one, other = facts[match[1]], facts[match[2]]
        word = "as much as"
        if one != other:
            word = "less than" if one < other else "more than"
        return f"{word} the {format_bytes(other)}"

    def named(match: re.Match) -> str:
        fact = facts[match[1]]
        return fact if isinstance(fact, str) else format_bytes(fact)

    return re.sub(r"\{(\w+)\}", named, re.sub(r"\{(\w+)\|(\w+)\}", compared, sentence))


@dataclass(frozen=True)
class Row:
    """A row answers where all facts that its sentences name are known, and ``holds`` is true of
    them. ``says``: the sentence. ``helps``: the remedy. ``then``: the command to type next.
    ``also``: it is said as well where another row answers. ``kind``: of errors; "" for all with the
    figures of a card.
    """

    case: str
    says: str
    helps: str = ""
    then: str = PLAN
    holds: Callable[[Facts], bool] = lambda f: True
    also: bool = False
    kind: str = ""

    def answers(self, kind: str, facts: Facts) -> bool:
        named = set(re.findall(r"\{(\w+)|\|(\w+)\}", self.says + self.helps))
        is_known = all((one or other) in facts for one, other in named)
        is_kind = kind == self.kind or (not self.kind and kind in CARD_KINDS)
        return is_kind and is_known and self.holds(facts)


def rows_of(kind: str, facts: Facts) -> list[Row]:
    """The row that answers, and those that add to it."""
    found: list[Row] = []
    for row in ROWS:
        is_new = row.case not in [other.case for other in found]
        if is_new and (row.also or not found) and row.answers(kind, facts):
            found.append(row)
    return found


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


def _is_full(f: Facts) -> bool:
    return f.share("allocated") >= FULL


def _others_suffice(f: Facts) -> bool:
    """Whether the request would fit if other processes were gone."""
    return f["other_processes"] > max(f["asked"] - f["free"], MUCH * f["total"])


def _is_much_outside(f: Facts) -> bool:
    """Whether more than a context is held outside the allocator, and more than lies idle in it."""
    held = max(f["outside"], f["context"])
    return held > max(f["idle"], min(CONTEXT + 0.02 * f["total"], SMALL_CARD * f["total"]))


def _is_in_pieces(f: Facts) -> bool:
    return f["free"] < f["asked"] < f["left"]


CARD_IS_FULL = "The card is full: live tensors take {allocated} of its {total}."
IN_PIECES = (
    "{free} are free and {idle} are idle: together {left}, {left|asked} asked for, but not in one "
    "piece. This is fragmentation."
)
ONE_PIECE = (
    "{setting} This can serve the one request. If the step needs more than the card has, it fails "
    "later."
)
NOTHING_LEFT = (
    "{free} are free and {idle} are idle: together {left}, {left|asked} asked for. So no setting "
    "of the allocator can help."
)
FEWER = (
    "The run needs fewer or smaller tensors. The request is the first that was too many, not all "
    "that is missing."
)
THE_COMPUTERS = "The computer's memory was full, not the card's"
LESS_ON_THE_HOST = (
    "Use fewer loader workers, read data in parts, offload less to the CPU, and load the model on "
    "one rank at a time. A job or a container may have a limit below the computer's memory (Slurm: "
    "--mem, Docker: --memory)."
)

ROWS = (
    # It fails however much of the card is free.
    Row(
        "larger than the card",
        "One request asked for more than a billion GiB. No tensor of a model is so large, so a "
        "size in the program is wrong.",
        "Look at the shape in your own line: a negative or mistaken size makes such a number.",
        RUN,
        holds=lambda f: f["asked"] >= ENDLESS,
    ),
    Row(
        "no figures",
        "The message has no figures, so that no sum can be made: give the whole line that begins "
        'with "Tried to allocate".',
        then="nvidia-smi",
        holds=lambda f: "asked" not in f or "total" not in f,
    ),
    Row(
        "larger than the card",
        "One request asked for {asked}, {asked|total} of the whole card.",
        "No setting and no free memory can help: this one tensor must become smaller. Look at its "
        "shape. Attention that is not fused grows with the square of the row's length, and logits "
        "with rows x tokens x vocabulary.",
        holds=lambda f: f["asked"] > f["total"],
    ),
    Row(
        "limit",
        "PyTorch holds {held} and asked for {asked}: together {wanted}, {wanted|allowed} that "
        "this process may take (set_per_process_memory_fraction, or the same setting of a server).",
        "Raise that limit: the card has {free} free.",
        holds=lambda f: f["wanted"] > f["allowed"],
    ),
    Row(
        "more than the card",
        "PyTorch counts {allocated} of tensors, {allocated|total} of the card. So a part of them "
        "lies in the host's memory (the Windows driver's shared memory, or managed memory).",
        "The run is much too large for this card.",
        holds=lambda f: f["allocated"] > f["total"],
    ),
    Row(
        "enough is free",
        "{free} are free, {free|asked} that were asked for, so the card's size is not the limit.",
        "Something else refused: a limit of the driver, of the host's memory (on Windows, the page "
        "file), of a virtual or shared card; or another process gave memory back after the "
        "refusal. Look at nvidia-smi while it runs, and make the page file larger on Windows.",
        holds=lambda f: f["free"] >= f["asked"],
    ),
    # The message does not say who holds the card.
    Row(
        "cut off",
        "The message ends before PyTorch's own figures, so that nobody can say who holds the "
        "{rest} of {total} that are not free.",
        'Give the whole message, up to "reserved by PyTorch but unallocated".',
        holds=lambda f: f["is_cut_off"],
    ),
    Row(
        "not divided",
        "PyTorch's tensors take {allocated} of {total}. This is the message of the backend "
        "cudaMallocAsync, which does not divide the rest: {rest} are idle bytes of its pool, the "
        "context, and other processes.",
        "nvidia-smi shows the processes.",
    ),
    # Who holds the card: this run's tensors, other processes, the context, or idle blocks.
    Row(
        "full",
        f"{CARD_IS_FULL} {NOTHING_LEFT}",
        FEWER,
        holds=lambda f: _is_full(f) and f["left"] < f["asked"],
    ),
    Row(
        "full",
        CARD_IS_FULL,
        FEWER,
        holds=_is_full,
    ),
    Row(
        "ranks",
        "Other processes hold {other_processes} of the card, most likely other ranks of the same "
        "run: {names}.",
        "Each rank must compute on a card of its own. Call "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of CUDA, and '
        'load checkpoints with map_location="cpu", or each rank opens a context on card 0.',
        holds=lambda f: f["other_ranks"] and _others_suffice(f),
    ),
    Row(
        "other process",
        "Other processes hold {other_processes} of the card's {total}, which this run cannot use: "
        "{names}.",
        "Find them with nvidia-smi and end those that you do not need (often a notebook's kernel "
        "or an earlier run).",
        holds=_others_suffice,
    ),
    Row(
        "outside",
        "About {context} of the card's {total} are held by this process outside PyTorch's "
        "allocator: its context, and libraries that take memory by themselves (NCCL, a second "
        "framework, an inference engine).",
        "A smaller batch does not change them.",
        holds=lambda f: f["context"] > f["outside"] and _is_much_outside(f),
        also=True,
    ),
    Row(
        "outside",
        "About {outside} of the card's {total} are held outside PyTorch's allocator: by another "
        "process, by the context of this one, or by a library that takes memory by itself.",
        "nvidia-smi shows whose they are. A smaller batch does not change them.",
        holds=_is_much_outside,
        also=True,
    ),
    Row(
        "in pieces",
        IN_PIECES,
        ONE_PIECE,
        holds=lambda f: f.share("idle") >= MUCH and _is_in_pieces(f),
    ),
    Row(
        "full",
        "The card is nearly full: live tensors take {allocated} of its {total}, and only {idle} "
        "are idle.",
        FEWER,
        holds=lambda f: f["left"] >= f["asked"],
    ),
    Row(
        "one large request",
        f"This one request, {{asked}}, is a large part of the card's {{total}}. {NOTHING_LEFT}",
        "Look first at what this tensor is (a copy of all weights or gradients in one piece, "
        "logits, attention that is not fused), then at the {allocated} of live tensors.",
        holds=lambda f: f.share("asked") > LARGE,
    ),
    Row(
        "full",
        f"{CARD_IS_FULL} {NOTHING_LEFT}",
        FEWER,
    ),
    Row(
        "free is not given",
        "The message does not say how much is free: {asked} were asked for, and live tensors take "
        "{allocated} of the card's {total}.",
        "Look at nvidia-smi (xpu-smi, rocm-smi) for what else is on the card.",
    ),
    # What has to be known besides.
    Row(
        "in pieces",
        IN_PIECES,
        ONE_PIECE,
        holds=lambda f: f.share("idle") >= LITTLE and _is_in_pieces(f),
        also=True,
    ),
    Row(
        "other process",
        "Other processes hold {other_processes} of the card: {names}.",
        holds=lambda f: (
            f.share("other_processes") > MUCH and not (f["other_ranks"] and _others_suffice(f))
        ),
        also=True,
    ),
    Row(
        "unknown process",
        "The bytes that the message gives for a process (0, or 2**64) are no figure: the driver "
        "cannot count processes here, as in many containers and in WSL.",
        "nvidia-smi on the host shows whose the rest of the card is.",
        holds=lambda f: f["unknown_process"],
        also=True,
    ),
    Row(
        "container",
        "Process {number} ({own}) is this run itself: PyTorch's {held} are in it, and next to "
        "the processes of the list there would be no room for them. In a container a process has "
        "another number than the driver's.",
        also=True,
    ),
    Row(
        "private pools",
        "{private} are free blocks in private pools, which the message counts as allocated.",
        "Only the CUDA graphs (torch.compile with reduce-overhead, vLLM) of each pool can use "
        "them: fewer graphs give them back.",
        also=True,
    ),
    # Apple's GPUs, and this library's budget.
    Row(
        "mps",
        "Apple's GPU: one tensor of {asked} is more than Metal gives to one buffer.",
        "Free memory does not change that: this tensor must become smaller. Attention that is not "
        "fused, and logits, are the usual ones.",
        RUN,
        holds=lambda f: "Invalidbuffersize" in f["message"],
        kind="mps",
    ),
    Row(
        "mps",
        "Apple's GPU: {held} are taken and {asked} were asked for: together {wanted}, "
        "{wanted|allowed} of the limit. Tensors take {allocated}, other allocations of Metal "
        "{other}.",
        "(Where the message writes GB it means powers of 1024, GiB here.) Fewer or smaller tensors "
        "help, and fewer other programs. The limit is a multiple of what the system recommends, "
        "1.7 by default. PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 takes it away, but then the computer "
        "swaps or fails: it adds no memory.",
        kind="mps",
    ),
    Row(
        "mps",
        "Apple's GPU is out of memory, and some of the figures are missing.",
        'Give the whole line, with "MPS allocated", "max allowed" and "Tried to allocate".',
        RUN,
        kind="mps",
    ),
    Row(
        "budget",
        "This is the budget of MemoryTracker ({total}), not a card's limit.",
        "The message itself names the holders and what could bring the moment within the budget.",
        RUN,
        kind="budget",
    ),
    Row(
        "budget",
        "This is BudgetExceeded of this library: give all lines.",
        then=RUN,
        kind="budget",
    ),
    # The computer's memory.
    Row(
        "killed",
        f"{THE_COMPUTERS}: the kernel ended {{victim}}, which held {{resident}} of it.",
        LESS_ON_THE_HOST,
        "free -h",
        kind="kernel",
    ),
    Row(
        "killed",
        f"{THE_COMPUTERS}: the kernel ended {{victim}}.",
        LESS_ON_THE_HOST,
        "free -h",
        kind="kernel",
    ),
    Row(
        "killed",
        f"{THE_COMPUTERS}: a process was ended because of it, as the text says.",
        LESS_ON_THE_HOST,
        "free -h",
        kind="out of RAM",
    ),
    Row(
        "killed",
        f"{THE_COMPUTERS}, most likely: a process ended without an error of its own, as the "
        "system's signal 9 ends it.",
        f'If so, `dmesg` has a line with "Out of memory". {LESS_ON_THE_HOST} If an error of '
        "PyTorch stands above in the log, give that part too.",
        'dmesg -T | grep -i "killed process"',
        kind="killed",
    ),
    Row(
        "host",
        f"{THE_COMPUTERS}: {{asked}} were asked for in one piece.",
        f"{LESS_ON_THE_HOST} On Windows, make the page file larger.",
        "free -h",
        kind="host",
    ),
    Row(
        "host",
        f"{THE_COMPUTERS}.",
        f"{LESS_ON_THE_HOST} On Windows, make the page file larger. Pinned memory "
        "(pin_memory=True) is the computer's, too.",
        "free -h",
        kind="host",
    ),
    Row(
        "shared memory",
        "The loader's workers hand over batches in the host's shared memory (/dev/shm), and this "
        "is full. It is not the card's.",
        "Start a container with more of it (docker run --shm-size=8g, or --ipc=host), or use fewer "
        "workers and smaller batches.",
        "df -h /dev/shm",
        kind="shared memory",
    ),
    Row(
        "disk",
        "This is a disk, not memory: `df -h` shows which.",
        "Checkpoints of a run are most often what fills it (save_total_limit=1 in "
        "TrainingArguments keeps the last one), then ~/.cache/huggingface. If the path is below "
        "/dev/shm, it is the host's shared memory.",
        "df -h",
        kind="disk",
    ),
    # Libraries.
    Row(
        "vllm",
        "Before vLLM began, the card had less free memory than gpu_memory_utilization asks for: "
        "another process, or an earlier run, holds the rest.",
        "End it, or lower gpu_memory_utilization.",
        "nvidia-smi",
        holds=lambda f: f["message"].startswith("lessthandesired"),
        kind="vllm",
    ),
    Row(
        "vllm",
        "This is vLLM's plan, not a request: the model and its profile run leave no room for the "
        "cache in the share of the card that gpu_memory_utilization gives.",
        "Raise it if the card is otherwise free, lower max_model_len, or take a smaller model.",
        "nvidia-smi",
        kind="vllm",
    ),
    Row(
        "dispatched",
        "No allocation failed here: device_map found that the weights do not fit into the card's "
        "free memory, and put some of them on the CPU or the disk. Such a model cannot be trained "
        "as it is.",
        "nvidia-smi shows what fills the card before this run. If nothing does, load the model in "
        '4 bits instead of 8, or take a smaller model or a larger card. With device_map={"": 0} '
        "everything goes to the first card, and an error with figures comes if it does not fit.",
        "nvidia-smi",
        kind="dispatched",
    ),
    Row(
        "library",
        "cuDNN or cuBLAS could not start its work, most often because the card has no room left "
        "for its workspace. The message itself does not speak of memory.",
        "Halve the batch: if the error goes, it was memory. If it stays, look at the versions of "
        "CUDA and cuDNN, and with CUDA_LAUNCH_BLOCKING=1 for an index out of range.",
        "nvidia-smi",
        kind="library",
    ),
    Row(
        "no figures",
        "This error comes from the driver or from a library, and has no figures: the memory was "
        "asked for outside PyTorch's allocator (a context, cuBLAS, NCCL, bitsandbytes), or by a "
        "call that failed earlier.",
        "Most often another process has filled the card before this one began: look at nvidia-smi. "
        'If there is a line with "Tried to allocate", give that one, too.',
        "nvidia-smi",
        kind="no figures",
    ),
    Row(
        "other library",
        "This error is not PyTorch's: JAX and XLA, TensorFlow, ONNX Runtime, CuPy, llama.cpp and "
        "others have allocators of their own. {asked} were asked for.",
        "Who holds the memory cannot be read from it here.",
        "nvidia-smi",
        kind="other library",
    ),
    Row(
        "other library",
        "This error is not PyTorch's: JAX and XLA, TensorFlow, ONNX Runtime, CuPy, llama.cpp and "
        "others have allocators of their own.",
        "Who holds the memory cannot be read from it here.",
        "nvidia-smi",
        kind="other library",
    ),
)
