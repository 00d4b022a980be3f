"""Reads an out-of-memory error out of any text: a message, a traceback, or the log of many ranks.

It gives the figures of the message, in bytes. ``error_frames`` reads the traceback. Nothing here
imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..units import GiB, KiB, MiB, TiB

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What loggers and launchers write before a line. Those with a rank or a process name its stream.
_LABEL = re.compile(r"\s*(\[(?:default|rank)?\d+\]:?|\([\w.-]+,? (?:pid|rank)=\d+[^)]*\))\s?")
_STAMP = re.compile(
    r"\s*(?:\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s?"
    r"|(?:ERROR|INFO|WARNING|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]+\]\s?"
    r"|\[(?:ERROR|INFO|WARNING)\]\s?|[>│|]+ ?)"
)

# No size of this world: the driver writes 2**64 - 1 bytes for a figure that it does not have, and
# PyTorch "more than 1EB" for a request.
ENDLESS = 2**60
# A unit of CUDA's messages. Apple's write GB and mean powers of 1024, too (see MPSAllocator.mm).
_UNITS = {"bytes": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_UNITS |= {"kb": KiB, "mb": MiB, "gb": GiB, "tb": TiB, "eb": ENDLESS}
_UNITS |= {"k": KiB, "m": MiB, "g": GiB, "t": TiB}
_SIZE = r"([\d][\d.,]*)(bytes|[KMGT]i?B)"

# How each error begins, in a text without white space: a message may be wrapped anywhere, also
# inside a word. Of two that begin at one place, the upper one is meant.
_STARTS = {
    "cuda": r"CUDAoutofmemory\.?Triedtoallocate",
    "hip": r"HIPoutofmemory\.?Triedtoallocate",
    "npu": r"NPUoutofmemory\.?Triedtoallocate",
    # The backend cudaMallocAsync, which writes five lines of its own.
    "async": r"Allocationondevice\d*wouldexceedallowedmemory",
    "xpu": r"XPUoutofmemory|CurrentplatformcanNOTallocatememoryblock",
    "mps": r"MPSbackendoutofmemory|Invalidbuffersize:[\d.]+[KMGT]i?B",
    "budget": r"outofbudgetby[\d,]+bytes",
    "shared memory": (
        r"workersareoutofsharedmemory|insufficientsharedmemory"
        r"|received0itemsofancdata|Toomanyopenfiles"
        r"|unableto(?:writetofile|opensharedmemoryobject|resizefile|mmap\d+bytesfromfile)</torch_"
    ),
    "host": (
        r"DefaultCPUAllocator:(?:can'tallocatememory|notenoughmemory)"
        r"|Unabletoallocate[\d.]+[KMGT]iBforanarray|(?<!OutOf)(?<!Array)MemoryError(?!:Unable)"
        r"|WinError1455|pagingfileistoosmall|unabletommap\d+bytes|std::bad_alloc"
        r"|(?:Errno12\]?|fork|mmapfailed):?Cannotallocatememory"
        r"|CUDNN_STATUS_\w*HOST_ALLOCATION_FAILED|OUT_OF_HOST_MEMORY|failedtoalloc\d+bytesonhost"
        r"|couldnotallocatepinnedhostmemory|cudaHost(?:Alloc|Register).{0,60}?outofmemory"
        # pinned memory is the computer's, and CUDA refuses it in the same words as its own
        r"|(?:inpinmemorythread|\.pin_memory\().{0,600}?CUDAerror:outofmemory"
    ),
    "no figures": (
        r"(?:CUDA|HIP|CUDAdriver)error:outofmemory"
        r"|(?:CUDA|HIP)outofmemory(?!\.?Triedtoallocate|occurredwhenwarmingup)"
        r"|cudaruntimeerror\(2\):outofmemory|CUDAfailedwitherroroutofmemory"
        r"|Erroroutofmemoryatline|Cudafailure\d?'outofmemory'|FailedtoCUDAcalloc"
        r"|(?:CU|HIP|ROC)[A-Z]{2,8}_(?:STATUS_)?\w{0,40}ALLOC(?:ATION)?_FAILED"
        r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
        r"|OutOfMemoryError:Allocationondevice(?!\d*would)"
        r"|(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"
        r"|notenoughGPUvideomemory|CallbackErrorOutOfMemory"
    ),
    "library": (
        r"findavalid(?:cuDNN)?algorithm|wasunabletofindanengine|novalidconvolutionalgorithms"
        r"|CU(?:BLAS|DNN)_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR(?!_)"
        r"|outofresource:sharedmemory"
    ),
    "vllm": (
        r"Noavailablememoryforthecacheblocks|lessthandesiredGPUmemoryutilization"
        r"|[\d.]+GiBKVcacheisneeded|CUDAoutofmemoryoccurredwhenwarmingup"
        r"|Notenoughmemory\.Pleasetrytoincrease--mem-fraction-static"
    ),
    "dispatched": (
        r"modulesaredispatchedontheCPUorthedisk"
        r"|parametersareonthemetadevice(?:device)?becausetheywereoffloaded"
    ),
    "disk": r"Errno28\]?:?Nospaceleftondevice",
    "other library": (
        r"RESOURCE_?EXHAUSTED(?=.{0,80}(?:memory|allocat|OOM))"
        r"|(?<!ResourceExhaustedError:)OOMwhenallocatingtensor|BFCArena.{0,80}Failedtoallocate"
        r"|Allocator\(GPU_\d+_bfc\)ranoutofmemory"
        r"|(?:allocating[\d.]+MiBondevice\d+:)?cudaMallocfailed:outofmemory"
        r"|(?<!EXHAUSTED:)Outofmemoryallocating[\d,]+bytes"
    ),
    # A process was ended. The kernel says which one, others that the computer's memory was full ...
    "kernel": r"outofmemory:Kill(?:ed)?process",
    "out of RAM": (
        r"oom.?kill|usingallavailableRAM|Killedsignalterminatedprogram"
        r"|morememorythanisavailable|killedduetomemorypressure|noderunninglowonmemory"
        r"|srun:error:.{1,60}?:OutOfMemory"
    ),
    # ... and others nothing. DeepSpeed's sigkill_handler reports every exit.
    "killed": (
        r"(?:code|status)(?:of|is|was)?\W{0,3}?(?:-9|137)(?!\d)|SIGKILL(?!_handler)"
        r"|signal:?(?:9(?!\d)|kill)|worker\(pid\S{1,40}?\)exitedunexpectedly"
        r"|kernel.{0,60}?appearstohavedied|Kernelcrashedwhileexecuting|DeadKernelError|Kerneldied"
        r"|Canceledfutureforexecute_request"
        r"|processpoolwasterminatedabruptly|subprocesseshasabruptlydied"
        r"|executorwasunexpectedlyterminated"
    ),
}
_START = re.compile(
    "|".join(f"(?P<{name.replace(' ', '_')}>{words})" for name, words in _STARTS.items()),
    re.IGNORECASE,
)
# A line of a shell about a process, such as "train.sh: line 28:  8156 Killed   python train.py".
_SHELL = re.compile(r"(?:\S+: )*(?:line \d+: *)?(?:\d+ )? *[Kk]illed(?:: 9)?(?: {4,}\S.*)?")
# Of several errors, one says more than another that follows from it. The others come first.
_SAYS_LESS = dict.fromkeys(
    ("no figures", "library", "vllm", "other library", "dispatched", "disk"), 1
)
_SAYS_LESS |= {"kernel": 2, "out of RAM": 3, "killed": 4}
# One error of these writes several lines that begin as one.
SEVERAL_LINES = ("other library", "kernel", "out of RAM", "killed", "shared memory", "host")
_LONGEST = 1500  # characters of one message without white space

# The figures of a message, each by the words that stand beside it.
_FIGURES = {
    # of the message's own request. XLA writes 6.48G, and a budget of this library no unit
    "asked": r"(?:toalloc(?:ate)?|allocating|reserve|askedfor)(?:morethan)?([\d.,]+)"
    rf"(bytes|[KMGTE](?:i?B)?)|Requested:{_SIZE}|Invalidbuffersize:{_SIZE}|{_SIZE}KVcache",
    "live": r"bytes:([\d,]+)live",
    "total": rf"{_SIZE}totalcapacity|totalcapac[i]?tyof{_SIZE}|Devicelimit:{_SIZE}"
    r"|\),([\d,]+)allowed",
    "free": rf"{_SIZE}free;|{_SIZE}isfree|Free\(accordingtoCUDA\):{_SIZE}"
    rf"|available(?:KVcache)?memory\({_SIZE}\)",
    "allowed": rf"{_SIZE}allowed;|maxallowed:{_SIZE}",
    "allocated": rf"{_SIZE}alreadyallocated|{_SIZE}isallocatedbyPyTorch|MPSallocated:{_SIZE}"
    rf"|Currentlyallocated:{_SIZE}",
    "reserved": rf"{_SIZE}reservedintotal",
    "cached": rf"{_SIZE}cached\)",
    "idle": rf"{_SIZE}isreservedbyPyTorchbutunallocated",
    "private": rf"with{_SIZE}allocatedinprivatepools",
    "other": rf"otherallocations:{_SIZE}",
    "this_process": rf"thisprocesshas{_SIZE}memoryinuse",
    "resident": rf"anon-rss:{_SIZE}",
}
_SEGMENTS = "expandable_segments:True"
# (words of a message of CUDA's, the setting that helps, the versions of PyTorch that write so)
_VERSIONS = (
    (rf"{_SIZE}cached\)", "", "PyTorch 1.0 to 1.3"),  # without the allocated bytes
    (r"reservedintotal(?!.*max_split_size_mb)", "", "PyTorch 1.4 to 1.10"),
    (r"reservedintotal", "max_split_size_mb", "PyTorch 1.10 to 2.0"),
    (r"PYTORCH_ALLOC_CONF=expandable_segments", _SEGMENTS, "PyTorch 2.9 or later"),
    (r"expandable_segments", _SEGMENTS, "PyTorch 2.2 or later"),
    (r"max_split_size_mb|capactyof", _SEGMENTS, "PyTorch 2.1"),
    # cut off before the hint
    (r"ofwhich.*Oftheallocatedmemory", _SEGMENTS, "PyTorch 2.1 or later"),
)
_PROCESS = re.compile(rf"Process(\d+)has{_SIZE}memoryinuse", re.IGNORECASE)


@dataclass(frozen=True)
class ErrorText:
    """One error of a text. All figures are bytes; ``None``: the text does not give it.

    ``kind``: a key of the table of beginnings. ``asked``: the request that was refused.
    ``total``: the card. ``allowed``: a limit below it. ``allocated``: live tensors, as PyTorch
    counts them. ``idle``: reserved from the driver, without a tensor. ``private``: the part of
    ``allocated`` that lies free in private pools. ``other``: what Metal holds besides.
    ``this_process`` and ``processes`` (by process number): what the driver says of processes;
    ``unknown_process``: it wrote a process without a usable figure. ``resident``: what the process
    held that the kernel killed.
    ``setting``: the environment variable that the message names. ``version``: the versions of
    PyTorch that write so. ``line``: of the text, from 0. ``stream``: the rank or process that wrote
    it. ``count``: errors in the whole text.
    """

    kind: str
    line: int
    stream: str
    count: int
    message: str
    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    allocated: int | None = None
    idle: int | None = None
    private: int | None = None
    other: int | None = None
    this_process: int | None = None
    resident: int | None = None
    processes: dict[int, int] = field(default_factory=dict)
    unknown_process: bool = False
    setting: str = ""
    version: str = ""

    @property
    def is_cut_off(self) -> bool:
        """Whether it ends before the figures of PyTorch."""
        return self.free is not None and self.allocated is None

    @property
    def reserved(self) -> int | None:
        """What PyTorch has taken from the driver."""
        if self.allocated is None or self.idle is None:
            return None
        return self.allocated + self.idle

    @property
    def outside(self) -> int | None:
        """What is neither free nor PyTorch's: the context, other libraries, other processes."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        return max(0, self.total - self.free - self.reserved)

    @property
    def own_number(self) -> int | None:
        """The number of this run among ``processes``.

        In a container, the process has another number than the driver's, and the message calls it
        "Process N". It is in the list if PyTorch's bytes would have no room next to the list's. It
        is the smallest process that has room for these bytes.
        """
        if self.this_process is not None or self.total is None or self.reserved is None:
            return None
        used = self.total - (self.free or 0)
        if sum(self.processes.values()) + self.reserved <= 1.01 * used:
            return None
        fitting = [n for n, nbytes in self.processes.items() if nbytes >= 0.99 * self.reserved]
        return min(fitting, key=self.processes.__getitem__, default=None)

    @property
    def own_process(self) -> int | None:
        """What the driver counts for this process."""
        if self.own_number is not None:
            return self.processes[self.own_number]
        return self.this_process

    @property
    def others(self) -> dict[int, int]:
        """The processes that are not this run, the largest first."""
        found = sorted(self.processes.items(), key=lambda process: -process[1])
        return {number: nbytes for number, nbytes in found if number != self.own_number}

    @property
    def other_processes(self) -> int | None:
        """What the message says that other processes hold; ``None`` where it does not say."""
        if not self.processes:
            return None
        return sum(self.others.values())

    @property
    def victim(self) -> str:
        """The process that the kernel ended, such as "process 31044 (python)"."""
        match = re.search(r"Kill(?:ed)?process(\d+)\((.*?)\)", self.message)
        if match is None:
            return ""
        return f"process {match[1]} ({match[2]})"

    @property
    def other_ranks(self) -> bool:
        """Whether it looks as if other ranks of this run were on its card.

        Either a later rank computes on card 0, or several processes hold as much as one another:
        each has loaded the same program.
        """
        rank = re.search(r"(?:rank|default)=?(\d+)", self.stream)
        if rank and int(rank[1]) > 0 and "GPU0" in self.message:
            return True
        sizes = list(self.others.values())
        return len(set(sizes)) < len(sizes)


@dataclass(frozen=True)
class Line:
    """A line of a log without what loggers put before it; ``number`` counts from 0."""

    number: int
    text: str


def streams(text: str) -> dict[str, list[Line]]:
    """The lines of a log by the rank or process that wrote them.

    A line without a label continues the one above it.
    """
    found: dict[str, list[Line]] = {}
    label = ""
    for number, line in enumerate(ANSI.sub("", text).splitlines()):
        rest = line
        while match := _LABEL.match(rest) or _STAMP.match(rest):
            if match.re is _LABEL:
                label = match[1].strip(":")
            rest = rest[match.end() :]
        if _SHELL.fullmatch(rest.strip()):
            rest = f"signal 9: {rest}"
        found.setdefault(label, []).append(Line(number, rest))
    return found


def read_error(text: str) -> ErrorText | None:
    """The first out-of-memory error of ``text``, or ``None`` if there is none.

    An error that says more comes before one that follows from it, such as a killed process.
    """
    found = []
    for label, lines in streams(text).items():
        squeezed = "".join("".join(line.text.split()) for line in lines)
        numbers = [line.number for line in lines for _ in "".join(line.text.split())]
        starts = list(_START.finditer(squeezed))
        for match in starts:
            end = match.start() + _LONGEST
            later = [other.start() for other in starts if other.start() > match.start()]
            message = squeezed[match.start() : min([end, *later])]
            kind = str(match.lastgroup).replace("_", " ")
            found.append((kind, numbers[match.start()], label, message))
    if not found:
        return None
    least = min(_SAYS_LESS.get(error[0], 0) for error in found)
    told = [error for error in found if _SAYS_LESS.get(error[0], 0) == least]
    kind, line, label, message = min(told, key=lambda error: error[1])
    count = len(told)
    if kind in SEVERAL_LINES:
        count = 1
    return _read_message(kind, line, label, count, message)


def _read_message(kind: str, line: int, stream: str, count: int, message: str) -> ErrorText:
    figures: dict[str, Any] = {name: _figure(words, message) for name, words in _FIGURES.items()}
    processes = {int(pid): _bytes(*size) for pid, *size in _PROCESS.findall(message)}
    known = {number: nbytes for number, nbytes in processes.items() if 0 < nbytes < ENDLESS}
    figures |= {"processes": known, "unknown_process": known != processes}
    own = figures["this_process"]
    if own is not None and not 0 < own < ENDLESS:
        figures |= {"this_process": None, "unknown_process": True}
    asked, live = figures["asked"], figures.pop("live")
    if live is not None and asked is not None:  # a budget counts the refused request as live
        figures |= {"allocated": live - asked, "idle": 0}
    reserved, cached = figures.pop("reserved"), figures.pop("cached")
    if cached is not None:  # up to 1.3
        figures["idle"] = cached
    elif reserved is not None and figures["allocated"] is not None:
        figures["idle"] = max(0, reserved - figures["allocated"])
    figures["setting"], figures["version"] = _version(kind, message)
    return ErrorText(kind, line, stream, count, message, **figures)


def _figure(words: str, message: str) -> int | None:
    match = re.search(words, message, re.IGNORECASE)
    if match is None:
        return None
    return _bytes(*filter(None, match.groups()))


def _bytes(number: str, unit: str = "bytes") -> int:
    return round(float(number.replace(",", "").strip(".")) * _UNITS[unit.lower()])


def _version(kind: str, message: str) -> tuple[str, str]:
    """(the setting that the message names, the versions of PyTorch that write so)."""
    if kind == "npu":
        return "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", ""
    if kind not in ("cuda", "hip"):
        return "", ""
    named = re.search(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF", message)
    variable = named[0] if named else "PYTORCH_CUDA_ALLOC_CONF"
    for words, setting, version in _VERSIONS:
        if re.search(words, message, re.IGNORECASE):
            return setting and f"{variable}={setting}", version
    return "", ""


def cuda_message(
    *, asked: int, total: int, free: int, process: int, allocated: int, idle: int
) -> str:
    """PyTorch's own words (2.10 to 2.13) for a request that a CUDA card refused."""
    return (
        f"CUDA out of memory. Tried to allocate {pytorch_size(asked)}. GPU 0 has a total "
        f"capacity of {pytorch_size(total)} of which {pytorch_size(free)} is free. Including "
        f"non-PyTorch memory, this process has {pytorch_size(process)} memory in use. Of the "
        f"allocated memory {pytorch_size(allocated)} is allocated by PyTorch, and "
        f"{pytorch_size(idle)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
        "to avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def pytorch_size(nbytes: int) -> str:
    """As PyTorch's allocator writes it: a size of exactly 1 MiB in KiB."""
    for unit, factor in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if nbytes > factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} bytes"
