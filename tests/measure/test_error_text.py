"""Out-of-memory errors as people report them, figure by figure.

Each row is a message's wording with the figures that a person reads in it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from gradmem_lib import explain
from gradmem_lib.measure.error_text import cuda_message, read_error
from gradmem_lib.units import GiB, KiB, MiB

OLD_HINT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
SPLIT_HINT = (
    " If reserved but unallocated memory is large try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)


def hint(variable: str) -> str:
    return (
        f" If reserved but unallocated memory is large try setting {variable}="
        "expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


NEW_HINT = hint("PYTORCH_CUDA_ALLOC_CONF")
G, M, K = GiB, MiB, KiB
# (the message, the figures, the cases that must be said)
MESSAGES = {
    "1.3, others": (
        "CUDA out of memory. Tried to allocate 352.00 MiB (GPU 0; 7.92 GiB total capacity; 1.67 "
        "GiB already allocated; 156.00 MiB free; 124.28 MiB cached)",
        dict(asked=352 * M, total=7.92 * G, allocated=1.67 * G, free=156 * M, idle=124.28 * M),
        ["outside"],
    ),
    "1.2, KiB": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total "
        "capacity; 10.90 GiB already allocated; 576.00 KiB free; 30.96 MiB cached)",
        dict(asked=1 * M, total=11.17 * G, allocated=10.9 * G, free=576 * K, idle=30.96 * M),
        ["in pieces"],
    ),
    "1.1, free is more": (
        "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 "
        "MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
        dict(asked=12.5 * M, total=10.92 * G, allocated=8.57 * M, free=9.28 * G, idle=4.68 * M),
        ["enough is free", "outside"],
    ),
    "1.4, outside": (
        "CUDA out of memory. Tried to allocate 384.00 MiB (GPU 0; 14.76 GiB total capacity; 11.04 "
        "GiB already allocated; 259.75 MiB free; 11.10 GiB reserved in total by PyTorch)",
        dict(asked=384 * M, total=14.76 * G, allocated=11.04 * G, free=259.75 * M, idle=0.06 * G),
        ["outside"],
    ),
    "1.7, idle": (
        "CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB "
        "already allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)",
        dict(asked=2.87 * G, total=14.76 * G, allocated=8.77 * G, free=19.75 * M, idle=4.94 * G),
        ["in pieces"],
    ),
    "1.8, free is more": (
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 "
        "MiB already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) ",
        dict(asked=2.26 * G, total=6 * G, allocated=781.59 * M, free=3.03 * G),
        ["enough is free", "outside"],
    ),
    "1.13, full": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 5; "
        "23.70 GiB total capacity; 23.29 GiB already allocated; 58.56 MiB free; 23.29 GiB reserved "
        "in total by PyTorch)" + OLD_HINT,
        dict(asked=64 * M, total=23.7 * G, allocated=23.29 * G, free=58.56 * M, idle=0),
        ["full"],
    ),
    "2.0, no bytes free": (
        "CUDA out of memory. Tried to allocate 38.00 MiB (GPU 0; 4.00 GiB total capacity; 3.41 GiB "
        "already allocated; 0 bytes free; 3.44 GiB reserved in total by PyTorch)" + OLD_HINT,
        dict(asked=38 * M, total=4 * G, allocated=3.41 * G, free=0),
        ["full"],
    ),
    "2.0, half the card": (
        "CUDA out of memory. Tried to allocate 12.55 GiB (GPU 1; 23.69 GiB total capacity; 12.58 "
        "GiB already allocated; 10.38 GiB free; 12.58 GiB reserved in total by PyTorch)" + OLD_HINT,
        dict(asked=12.55 * G, total=23.69 * G, allocated=12.58 * G, free=10.38 * G, idle=0),
        ["one large request"],
    ),
    "2.0, the host's memory": (
        "CUDA out of memory. Tried to allocate 5.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB "
        "already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)" + OLD_HINT,
        dict(asked=5.73 * G, total=8 * G, allocated=17.2 * G, free=0, idle=1.95 * G),
        ["more than the card"],
    ),
    "2.0, one request": (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 222.41 GiB (GPU 0; 23.56 GiB "
        "total capacity; 583.94 MiB already allocated; 22.66 GiB free; 612.00 MiB reserved in "
        "total by PyTorch)",
        dict(asked=222.41 * G, total=23.56 * G, allocated=583.94 * M, free=22.66 * G),
        ["larger than the card"],
    ),
    "2.1, capacty": (
        "CUDA out of memory. Tried to allocate 355.43 GiB. GPU 0 has a total capacty of 79.32 GiB "
        "of which 18.06 GiB is free. Including non-PyTorch memory, this process has 61.25 GiB "
        "memory in use. Of the allocated memory 52.51 GiB is allocated by PyTorch, and 8.25 GiB is "
        "reserved by PyTorch but unallocated." + SPLIT_HINT,
        dict(
            asked=355.43 * G,
            total=79.32 * G,
            free=18.06 * G,
            this_process=61.25 * G,
            allocated=52.51 * G,
            idle=8.25 * G,
        ),
        ["larger than the card"],
    ),
    "2.1, Windows": (
        "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of "
        "which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 "
        "GiB is reserved by PyTorch but unallocated." + SPLIT_HINT,
        dict(asked=1.7 * G, total=6 * G, free=0, allocated=2.93 * G, idle=2.3 * G),
        ["in pieces"],
    ),
    "2.1, container": (
        "CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of 14.75 GiB "
        "of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated "
        "memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but "
        "unallocated." + SPLIT_HINT,
        dict(asked=496 * M, total=14.75 * G, free=235.06 * M, own_process=14.52 * G),
        ["in pieces", "container"],
    ),
    "2.3, container": (
        "CUDA out of memory. Tried to allocate 36.00 MiB. GPU 0 has a total capacity of 39.56 GiB "
        "of which 2.81 MiB is free. Process 16368 has 39.55 GiB memory in use. Of the allocated "
        "memory 38.05 GiB is allocated by PyTorch, and 1021.72 MiB is reserved by PyTorch but "
        "unallocated." + NEW_HINT,
        dict(total=39.56 * G, free=2.81 * M, own_process=39.55 * G, idle=1021.72 * M),
        ["in pieces", "container"],
    ),
    "2.4, two processes": (
        "CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.33 GiB "
        "of which 508.44 MiB is free. Process 629 has 494.00 MiB memory in use. Process 1134 has "
        "78.33 GiB memory in use. Of the allocated memory 74.24 GiB is allocated by PyTorch, with "
        "57.88 MiB allocated in private pools (e.g., CUDA Graphs), and 185.89 MiB is reserved by "
        "PyTorch but unallocated." + NEW_HINT,
        dict(own_process=78.33 * G, other_processes=494 * M, private=57.88 * M, idle=185.89 * M),
        ["outside", "container", "private pools"],
    ),
    "2.9, other process": (
        "CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 has a total capacity of 7.60 GiB "
        "of which 15.38 MiB is free. Process 3936 has 5.38 GiB memory in use. Including "
        "non-PyTorch memory, this process has 2.19 GiB memory in use. Of the allocated memory "
        "217.80 MiB is allocated by PyTorch, and 8.20 MiB is reserved by PyTorch but unallocated."
        + hint("PYTORCH_ALLOC_CONF"),
        dict(this_process=2.19 * G, other_processes=5.38 * G, allocated=217.8 * M),
        ["other process"],
    ),
    "2.6, free is more": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB "
        "of which 2.35 GiB is free. Of the allocated memory 825.15 MiB is allocated by PyTorch, "
        "and 24.85 MiB is reserved by PyTorch but unallocated." + NEW_HINT,
        dict(asked=20 * M, total=4 * G, free=2.35 * G, allocated=825.15 * M, idle=24.85 * M),
        ["enough is free"],
    ),
    "2.6, 0 bytes": (
        "CUDA out of memory. Tried to allocate 2.63 GiB. GPU 7 has a total capacity of 79.11 GiB "
        "of which 2.61 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory "
        "in use. Of the allocated memory 48.15 GiB is allocated by PyTorch, with 50.00 MiB "
        "allocated in private pools (e.g., CUDA Graphs), and 3.49 GiB is reserved by PyTorch but "
        "unallocated." + NEW_HINT,
        dict(this_process=None, private=50 * M, allocated=48.15 * G, idle=3.49 * G),
        ["in pieces", "unknown process", "private pools", "outside"],
    ),
    "WSL": (
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 8.00 GiB "
        "of which 0 bytes is free. Including non-PyTorch memory, this process has "
        "17179869184.00 GiB memory in use. Of the allocated memory 7.03 GiB is allocated by "
        "PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated." + NEW_HINT,
        dict(asked=64 * M, total=8 * G, free=0, this_process=None, allocated=7.03 * G),
        ["full", "unknown process"],
    ),
    "HIP, limit": (
        "HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 255.98 GiB "
        "of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is "
        "allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and "
        "54.99 MiB is reserved by PyTorch but unallocated." + NEW_HINT,
        dict(asked=64 * M, allowed=1.05 * G, total=255.98 * G, private=17 * M, idle=54.99 * M),
        ["limit", "private pools", "outside"],
    ),
    "HIP, free is more": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a "
        "total capacity of 15.92 GiB of which 7.12 GiB is free. Of the allocated memory 8.08 GiB "
        "is allocated by PyTorch, and 321.96 MiB is reserved by PyTorch but unallocated."
        + hint("PYTORCH_HIP_ALLOC_CONF"),
        dict(asked=432 * M, total=15.92 * G, free=7.12 * G, allocated=8.08 * G, idle=321.96 * M),
        ["enough is free"],
    ),
    "HIP, in pieces": (
        "HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of "
        "which 6.22 GiB is free. Of the allocated memory 5.34 GiB is allocated by PyTorch, and "
        "7.10 GiB is reserved by PyTorch but unallocated." + hint("PYTORCH_HIP_ALLOC_CONF"),
        dict(asked=6.64 * G, total=19.92 * G, free=6.22 * G, allocated=5.34 * G, idle=7.1 * G),
        ["in pieces"],
    ),
    "HIP, larger": (
        "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB "
        "of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and "
        "0 bytes is reserved by PyTorch but unallocated." + hint("PYTORCH_HIP_ALLOC_CONF"),
        dict(asked=16 * G, total=15.24 * G, free=15.09 * G, allocated=0, idle=0),
        ["larger than the card"],
    ),
    "XPU": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total "
        "capacity of 5.65 GiB of which 5.65 GiB is free. Of the allocated memory 195.50 KiB is "
        "allocated by PyTorch, and 1.81 MiB is reserved by PyTorch but unallocated. Please use "
        "`empty_cache` to release all unoccupied cached memory.",
        dict(asked=4.66 * G, total=5.65 * G, free=5.65 * G, allocated=195.5 * K, idle=1.81 * M),
        ["enough is free"],
    ),
    "IPEX": (
        "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total "
        "capacity; 176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)",
        dict(asked=1.71 * G, total=15.56 * G, allocated=176 * M, idle=0, free=None),
        ["full"],
    ),
    "MPS, GB": (
        "MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max "
        "allowed: 18.13 GB). Tried to allocate 375.40 MB on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may "
        "cause system failure).",
        dict(asked=375.4 * M, allowed=18.13 * G, allocated=11.14 * G, other=6.65 * G),
        ["mps"],
    ),
    "MPS, GiB": (
        "MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max "
        "allowed: 18.13 GiB). Tried to allocate 5.81 GiB on private pool.",
        dict(asked=5.81 * G, allowed=18.13 * G, allocated=15.72 * G, other=2.41 * M),
        ["mps"],
    ),
    "MPS, bytes": (
        "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max "
        "allowed: 18.13 GB). Tried to allocate 256 bytes on shared pool.",
        dict(asked=256, allowed=18.13 * G, allocated=16 * G, other=3.31 * G),
        ["mps"],
    ),
    "driver": ("RuntimeError: CUDA error: out of memory", dict(asked=None), ["no figures"]),
    "bitsandbytes": (
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        dict(asked=None),
        ["no figures"],
    ),
    "NCCL": (
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out "
        "of memory'",
        dict(asked=None),
        ["no figures"],
    ),
    "cuBLAS": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        dict(asked=None),
        ["no figures"],
    ),
    "host": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 17,179,869,184 bytes. Error code 12 (Cannot "
        "allocate memory)",
        dict(asked=16 * G),
        ["host"],
    ),
    "2.5, cut off": (
        "OutOfMemoryError('CUDA out of memory. Tried to allocate 1.27 GiB. GPU 0 has a total "
        "capacity of 79.33 GiB of which 109.81 MiB is free. Process 23 has 79.19 GiB memory in "
        "use. Of the allocated memory 67.68 GiB is allocated by PyTorch, with 76.00 MiB allocated "
        "in private pools (e.g., CUDA Gra phs), and 1.47 GiB is reserved by PyTorch but "
        "unallocated. If reserv...",
        dict(asked=1.27 * G, own_process=79.19 * G, idle=1.47 * G, private=76 * M),
        ["in pieces", "container", "private pools"],
    ),
    "numpy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with "
        "shape (40000, 40000) and data type float64",
        dict(asked=12 * G, total=None),
        ["host"],
    ),
    "1 GiB card": (
        "RuntimeError: CUDA out of memory. Tried to allocate 72.00 MiB (GPU 0; 1024.00 MiB total "
        "capacity; 378.05 MiB already allocated; 0 bytes free; 418.00 MiB reserved in total by "
        "PyTorch)",
        dict(asked=72 * M, total=1 * G, allocated=378.05 * M, free=0, idle=39.95 * M),
        ["outside"],
    ),
    "2 GiB card": (
        "CUDA out of memory. Tried to allocate 264.00 MiB (GPU 0; 2.00 GiB total capacity; 788.51 "
        "MiB already allocated; 145.93 MiB free; 1.02 GiB reserved in total by PyTorch)",
        dict(asked=264 * M, total=2 * G, allocated=788.51 * M, free=145.93 * M),
        ["in pieces"],
    ),
    "1.1, KiB cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 25.00 MiB (GPU 0; 3.94 GiB total "
        "capacity; 3.14 GiB already allocated; 21.56 MiB free; 634.00 KiB cached)",
        dict(asked=25 * M, total=3.94 * G, allocated=3.14 * G, free=21.56 * M, idle=634 * K),
        ["full"],
    ),
    "1.3, free is more": (
        "RuntimeError: CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total "
        "capacity; 643.57 MiB already allocated; 8.20 GiB free; 32.43 MiB cached)",
        dict(asked=8.13 * G, total=10.76 * G, free=8.2 * G, idle=32.43 * M),
        ["enough is free", "outside"],
    ),
    "2.0, larger": (
        "CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 "
        "GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)" + OLD_HINT,
        dict(asked=10.73 * G, total=8 * G, allocated=17.2 * G, free=0),
        ["larger than the card"],
    ),
    "2.0, others": (
        "CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity; 649.97 "
        "MiB already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch)" + OLD_HINT,
        dict(asked=1.69 * G, total=14.56 * G, allocated=649.97 * M, free=1.31 * G),
        ["outside"],
    ),
    "2.1, Windows, shared memory": (
        "CUDA out of memory. Tried to allocate 27.12 GiB. GPU 0 has a total capacty of 11.99 GiB "
        "of which 0 bytes is free. Of the allocated memory 16.16 GiB is allocated by PyTorch, and "
        "144.59 MiB is reserved by PyTorch but unallocated." + SPLIT_HINT,
        dict(asked=27.12 * G, total=11.99 * G, free=0, allocated=16.16 * G, idle=144.59 * M),
        ["larger than the card"],
    ),
    "cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated "
        "    : 15.16 GiB\nRequested               : 512.00 KiB\nDevice limit            : 15.99 "
        "GiB\nFree (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory "
        "fraction)\n                        : 17179869184.00 GiB",
        dict(asked=512 * K, total=15.99 * G, free=0, allocated=15.16 * G, idle=None),
        ["not divided"],
    ),
    "cudaMallocAsync, others": (
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        "memory)\nCurrently allocated     : 6.89 GiB\nRequested               : 320.00 MiB\n"
        "Device limit            : 23.69 GiB\nFree (according to CUDA): 2.94 MiB\nPyTorch limit "
        "(set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        dict(asked=320 * M, total=23.69 * G, free=2.94 * M, allocated=6.89 * G),
        ["not divided"],
    ),
    "NPU": (
        "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total "
        "capacity; 49.47 GiB already allocated; 49.47 GiB current active; 1.32 GiB free; 57.55 GiB "
        "reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
        "max_split_size_mb to avoid fragmentation.",
        dict(asked=5.03 * G, total=60.96 * G, allocated=49.47 * G, free=1.32 * G, idle=8.08 * G),
        ["in pieces"],
    ),
    "NPU, full": (
        "RuntimeError: NPU out of memory. Tried to allocate 30.00 MiB (NPU 3; 60.96 GiB total "
        "capacity; 60.34 GiB already allocated; 60.34 GiB current active; 14.24 MiB free; 60.60 "
        "GiB reserved in total by PyTorch)",
        dict(asked=30 * M, total=60.96 * G, allocated=60.34 * G, free=14.24 * M, idle=0.26 * G),
        ["in pieces"],
    ),
    "cut off before PyTorch": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.00 GiB. GPU 0 has a "
        "total capacity of 79.15 GiB of which 8.13 GiB is free.",
        dict(asked=13 * G, total=79.15 * G, free=8.13 * G, allocated=None),
        ["cut off"],
    ),
    "JAX": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
        "allocate 7406166528 bytes.",
        dict(asked=7406166528, total=None),
        ["other library"],
    ),
    "JAX, allocating": (
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 20029400304 bytes.",
        dict(asked=20029400304, count=1),
        ["other library"],
    ),
    "TensorFlow": (
        "(0) Resource exhausted: Out of memory while trying to allocate 68852648264 bytes.",
        dict(asked=68852648264),
        ["other library"],
    ),
    "TensorFlow, a tensor": (
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,512,512] and type float "
        "on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        dict(asked=None, count=1),
        ["other library"],
    ),
    "NCCL's warning": (
        "[0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
        dict(asked=None),
        ["no figures"],
    ),
    "cuDNN": (
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        dict(asked=None),
        ["no figures"],
    ),
    "Level Zero": (
        "RuntimeError: Native API failed. Native API returns: 39 "
        "(UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        dict(asked=None),
        ["no figures"],
    ),
    "MPS, one buffer": (
        "RuntimeError: Invalid buffer size: 24.00 GB",
        dict(asked=24 * G, total=None),
        ["mps"],
    ),
    "host, Windows": (
        "OSError: [WinError 1455] The paging file is too small for this operation to complete. "
        "Error loading torch_cuda.dll or one of its dependencies.",
        dict(asked=None),
        ["host"],
    ),
    "loader, killed": (
        "RuntimeError: DataLoader worker (pid 2637) is killed by signal: Killed.",
        dict(asked=None, count=1),
        ["killed"],
    ),
    "loader, shared memory": (
        "RuntimeError: DataLoader worker (pid 4321) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory. Please try to raise your shared "
        "memory limit.",
        dict(asked=None),
        ["shared memory"],
    ),
    "Slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some of the step tasks "
        "have been OOM Killed.",
        dict(asked=None, count=1),
        ["killed"],
    ),
    "ComfyUI": ("torch.OutOfMemoryError: Allocation on device", dict(asked=None), ["no figures"]),
    "Kubernetes": (
        "State: Terminated\n Reason: OOMKilled\n Exit Code: 137\n Started: Mon",
        dict(asked=None, count=1),
        ["killed"],
    ),
    "TensorFlow, its allocator": (
        "W bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to allocate "
        "1.50GiB (rounded to 1610612736)requested by op",
        dict(asked=1.5 * G, total=None, count=1),
        ["other library"],
    ),
    "ONNX Runtime": (
        "BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested "
        "buffer of size 536870912",
        dict(total=None, count=1),
        ["other library"],
    ),
    "vLLM, one request": (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (9.37 GiB).",
        dict(asked=None),
        ["vllm"],
    ),
    "vLLM": (
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        dict(asked=None),
        ["vllm"],
    ),
    "bitsandbytes, weights that do not fit": (
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough "
        "GPU RAM to fit the quantized model.",
        dict(asked=None, count=1),
        ["dispatched"],
    ),
    "accelerate, weights that do not fit": (
        "Some parameters are on the meta device because they were offloaded to the cpu.",
        dict(asked=None, count=1),
        ["dispatched"],
    ),
    "a full disk": (
        "OSError: [Errno 28] No space left on device",
        dict(asked=None, count=1),
        ["disk"],
    ),
    "torchrun": (
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4711)\n  traceback : Signal 9 "
        "(SIGKILL) received by PID 4711",
        dict(asked=None),
        ["killed"],
    ),
}


def same(found: int | None, wanted: float | None) -> bool:
    """Equal up to the two digits that a message has."""
    if found is None or wanted is None:
        return found is wanted
    return abs(found - wanted) <= max(2, 0.011 * GiB if wanted > GiB else 0)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_figure_is_named_and_the_case_is_right(name):
    text, figures, cases = MESSAGES[name]
    error = read_error(text)
    for figure, wanted in figures.items():
        assert same(getattr(error, figure), wanted), figure
    explanation = explain(text)
    assert explanation.cases[0] == cases[0]
    assert set(explanation.cases) == set(cases)


def ansi(text: str) -> str:
    return f"\x1b[31m\x1b[1m{text[:40]}\x1b[0m{text[40:]}"


FORMS = {
    "wrapped": lambda text: "\n".join(textwrap.wrap(text, 50)),
    "wrapped in a word": lambda text: "\n".join(text[i : i + 37] for i in range(0, len(text), 37)),
    "rank": lambda text: f"[rank0]: Traceback (most recent call last):\n[rank0]: {text}",
    "wrapped, each line with its rank": lambda text: "\n".join(
        f"[rank3]: {part}" for part in textwrap.wrap(text, 60)
    ),
    "colours": ansi,
    "quoted": lambda text: "\n".join(f"> {part}" for part in textwrap.wrap(text, 70)),
    "vLLM": lambda text: "\n".join(
        f"(Worker_TP0 pid=548) ERROR 07-29 21:48:54 [multiproc_executor.py:962] {part}"
        for part in text.splitlines()
    ),
    "time": lambda text: f"2025-11-12T11:25:13.4961658Z {text}",
    "launcher": lambda text: f"{text}\nexitcode  : -9 (pid: 12)\nCUDA error: out of memory",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["1.3, others", "2.0, no bytes free", "2.6, 0 bytes", "MPS, GB"])
def test_logs_wraps_and_colours_change_no_figure(name, form):
    text, figures, _ = MESSAGES[name]
    error = read_error(FORMS[form](text))
    for figure, wanted in figures.items():
        assert same(getattr(error, figure), wanted), figure


def test_of_several_errors_the_first_is_read_and_all_are_counted():
    first, second = MESSAGES["1.3, others"][0], MESSAGES["2.6, 0 bytes"][0]
    lines = []
    for one, other in zip(textwrap.wrap(second, 90), textwrap.wrap(first, 25), strict=False):
        lines += [f"[rank1]: {other}", f"[rank0]: {one}"]  # two ranks write at once
    error = read_error("\n".join(["epoch 1", *lines]))
    assert (error.count, error.stream, error.asked) == (2, "[rank1]", 352 * MiB)


PREFIX = "/usr/lib/python3.11/site-packages/"
STEP = [("train.py", "main"), ("train.py", "train_epoch")]
MODULE = (PREFIX + "torch/nn/modules/module.py", "_call_impl")
MOMENTS = {
    "forward": [*STEP, MODULE, ("model.py", "forward"), (PREFIX + "torch/nn/functional.py", "x")],
    "loss": [*STEP, (PREFIX + "torch/nn/functional.py", "cross_entropy")],
    "backward": [
        *STEP,
        (PREFIX + "torch/_tensor.py", "backward"),
        (PREFIX + "torch/utils/checkpoint.py", "recompute_fn"),
        MODULE,
        (PREFIX + "torch/nn/modules/linear.py", "forward"),
    ],
    "optimizer step": [*STEP, (PREFIX + "torch/optim/adamw.py", "step")],
    "evaluation": [*STEP, (PREFIX + "transformers/trainer.py", "evaluate"), MODULE],
    "generation": [("chat.py", "main"), (PREFIX + "transformers/utils.py", "generate"), MODULE],
    "load": [("train.py", "main"), (PREFIX + "transformers/modeling.py", "from_pretrained")],
    "save": [*STEP, (PREFIX + "torch/serialization.py", "save")],
}
MOMENTS_AGAIN = {
    "Lightning's closure": (
        "forward",
        [
            ("fit.py", "main"),
            (PREFIX + "torch/optim/adam.py", "step"),
            (PREFIX + "lightning/loops/automatic.py", "closure"),
            ("fit.py", "training_step"),
            MODULE,
        ],
    ),
    "a step in backward": (
        "optimizer step",
        [
            *STEP,
            (PREFIX + "torch/autograd/__init__.py", "backward"),
            ("train.py", "hook"),
            (PREFIX + "torch/optim/sgd.py", "step"),
        ],
    ),
    "to the card": ("load", [("a.py", "main"), (MODULE[0], "to"), (MODULE[0], "_apply")]),
    "no sign": ("", [("a.py", "main"), ("a.py", "make_batch")]),
}


def traceback_of(frames) -> str:
    lines = ["Traceback (most recent call last):"]
    for i, (file, name) in enumerate(frames):
        lines += [f'  File "{file}", line {i + 7}, in {name}', "    do(this)"]
    return "\n".join([*lines, f"torch.OutOfMemoryError: {MESSAGES['2.3, container'][0]}"])


@pytest.mark.parametrize(
    "moment, frames", [*MOMENTS.items(), *MOMENTS_AGAIN.values()], ids=[*MOMENTS, *MOMENTS_AGAIN]
)
def test_the_traceback_shows_the_moment_and_the_users_line(moment, frames):
    explanation = explain("step 3\n" + traceback_of(frames))
    assert explanation.moment == moment
    own = max(i for i, (file, _) in enumerate(frames) if "site-packages" not in file)
    assert (explanation.own_line.file, explanation.own_line.line) == (frames[own][0], str(own + 7))
    assert explanation.own_line.code == "do(this)"
    text = str(explanation)
    assert ("rows" in text and "micro-batches" in text) == (
        moment in ("forward", "loss", "backward")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072",
        "IndexError: list index out of range",
        "Epoch 3: loss 2.31, 12.5 GiB of memory used",
        "grpc: RESOURCE_EXHAUSTED: received a message larger than max (5 vs. 4)",
        "memory allocation on device 0: 5 GB",
        "I bfc_allocator.cc:246] Allocator (GPU_0_bfc) has 3 chunks",
        "the server exited with code 1370",
    ],
)
def test_what_cannot_be_read_is_said_and_asked_for(text):
    explanation = explain(text)
    assert explanation.error is None and explanation.cases == ("nothing found",)
    assert "Give the line that contains the words" in " ".join(str(explanation).split())


def test_a_notebooks_traceback_shows_the_cells_own_line():
    text = """OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 3
      1 model = make()
----> 3 model.to("cuda")

File /opt/python3.10/site-packages/torch/nn/modules/module.py:1340, in Module.to(self, *args)
   1339 \n-> 1340     return self._apply(convert)

OutOfMemoryError: """
    explanation = explain(text + MESSAGES["2.3, container"][0])
    assert explanation.moment == "load"
    own = explanation.own_line
    assert (own.file, own.line, own.code) == ("Cell In[7]", "3", 'model.to("cuda")')


def test_half_a_message_asks_for_the_rest():
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    explanation = explain(text)
    assert explanation.figures == {"asked": 2 * GiB}
    assert "give the whole line" in " ".join(str(explanation).split())


@pytest.mark.parametrize(
    "name, says, does_not",
    [
        ("1.7, idle", "no setting that its message names", "Set PYTORCH"),
        ("2.1, Windows", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "max_split"),
        ("2.5, cut off", "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "max_split"),
        ("2.3, container", "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "ROCm"),
        ("HIP, in pieces", "Set PYTORCH_HIP_ALLOC_CONF=expandable_segments:True", "max_split"),
    ],
)
def test_the_setting_is_the_one_of_that_version(name, says, does_not):
    text = " ".join(str(explain(MESSAGES[name][0])).split())
    assert says in text and does_not not in text
    # On Windows the setting does not work.
    windows = MESSAGES[name][0] + '\n  File "C:\\run\\train.py", line 3, in main'
    assert "Set PYTORCH" not in str(explain(windows)).replace("\n", " ") or "1.7" in name


def test_the_bar_is_the_sum_of_the_card():
    for name, (text, _, _) in MESSAGES.items():
        explanation = explain(text)
        error = explanation.error
        if error.total and error.free is not None and (error.allocated or 0) <= error.total:
            total = sum(explanation.parts().values())
            assert abs(total - error.total) <= 0.02 * error.total, name
        width = max(len(line) for line in explanation.to_text(80).splitlines())
        assert width <= 80, name
        assert "<svg" not in explanation._repr_html_() or "<desc" in explanation._repr_html_()


def test_it_reads_what_the_course_itself_raises():
    text = cuda_message(
        asked=192 * MiB,
        total=4 * GiB,
        free=40 * MiB,
        process=4056 * MiB,
        allocated=3300 * MiB,
        idle=256 * MiB,
    )
    explanation = explain(text)
    assert explanation.figures["context"] == pytest.approx(500 * MiB, rel=0.05)
    assert explanation.cases == ("in pieces",)


def test_it_reads_a_budget():
    import torch

    from gradmem_lib import BudgetExceeded, MemoryTracker

    with pytest.raises(BudgetExceeded) as caught, MemoryTracker(budget=10_000):
        kept = torch.zeros(2_000)
        torch.zeros(1_000)
    del kept
    explanation = explain(caught.value)
    assert explanation.cases == ("budget",)
    assert explanation.figures["asked"] == 4_000
    assert explanation.figures["allocated"] == 8_000
    assert explanation.figures["total"] == 10_000


def test_only_a_text_or_an_exception_is_explained():
    with pytest.raises(TypeError, match="explain was given int"):
        explain(3)


def test_reading_needs_no_torch():
    code = "import sys, gradmem_lib as g; g.explain('CUDA error: out of memory')"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
