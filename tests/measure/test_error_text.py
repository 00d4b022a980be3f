"""Out-of-memory errors as people report them, figure by figure, and what is said to them.

Whatever the message: a sentence about its figures must be true of the figures that it prints.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap

import pytest

from gradmem_lib import explain
from gradmem_lib.__main__ import parser
from gradmem_lib.measure.error_text import cuda_message, read_error
from gradmem_lib.planning.cards import find_card
from gradmem_lib.units import GiB, MiB, format_bytes, parse_bytes

HINTS = {
    "<old hint>": "If reserved memory is >> allocated memory try setting max_split_size_mb to "
    "avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF",
    "<split hint>": "If reserved but unallocated memory is large try setting max_split_size_mb to "
    "avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF",
    r"<hint: (\w+)>": r"If reserved but unallocated memory is large try setting "
    r"\1=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    r"Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)",
}
# For each: its name and the cases that must be said, how the answer begins, the figures that a
# person reads in it, and the message.
TABLE = """
1.3, others | outside
About 5.98 GiB of the card's 7.92 GiB are held outside PyTorch's
asked=352MiB total=7.92GiB allocated=1.67GiB free=156MiB idle=124.28MiB
CUDA out of memory. Tried to allocate 352.00 MiB (GPU 0; 7.92 GiB total capacity; 1.67 GiB
already allocated; 156.00 MiB free; 124.28 MiB cached)

1.2, KiB | full
The card is full
asked=1MiB total=11.17GiB allocated=10.9GiB free=576KiB idle=30.96MiB
RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total
capacity; 10.90 GiB already allocated; 576.00 KiB free; 30.96 MiB cached)

1.1, free is more | enough is free; outside
9.28 GiB are free
asked=12.5MiB total=10.92GiB allocated=8.57MiB free=9.28GiB idle=4.68MiB
CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB
already allocated; 9.28 GiB free; 4.68 MiB cached)

1.4, outside | outside
About 3.41 GiB of the card's 14.76 GiB are held outside PyTorch's
asked=384MiB total=14.76GiB allocated=11.04GiB free=259.75MiB idle=61.44MiB
CUDA out of memory. Tried to allocate 384.00 MiB (GPU 0; 14.76 GiB total capacity; 11.04 GiB
already allocated; 259.75 MiB free; 11.10 GiB reserved in total by PyTorch)

1.7, idle | in pieces
19.75 MiB are free and 4.94 GiB are idle
asked=2.87GiB total=14.76GiB allocated=8.77GiB free=19.75MiB idle=4.94GiB
CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB
already allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)

1.8, free is more | enough is free; outside
3.03 GiB are free
asked=2.26GiB total=6GiB allocated=781.59MiB free=3.03GiB
CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB
already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)

1.13, full | full
The card is full
asked=64MiB total=23.7GiB allocated=23.29GiB free=58.56MiB idle=0B
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 5; 23.70 GiB
total capacity; 23.29 GiB already allocated; 58.56 MiB free; 23.29 GiB reserved in total by
PyTorch) <old hint>

2.0, no bytes free | full
The card is full
asked=38MiB total=4GiB allocated=3.41GiB free=0B
CUDA out of memory. Tried to allocate 38.00 MiB (GPU 0; 4.00 GiB total capacity; 3.41 GiB
already allocated; 0 bytes free; 3.44 GiB reserved in total by PyTorch) <old hint>

2.0, half the card | one large request
This one request
asked=12.55GiB total=23.69GiB allocated=12.58GiB free=10.38GiB idle=0B
CUDA out of memory. Tried to allocate 12.55 GiB (GPU 1; 23.69 GiB total capacity; 12.58 GiB
already allocated; 10.38 GiB free; 12.58 GiB reserved in total by PyTorch) <old hint>

2.0, the host's memory | more than the card
PyTorch counts 17.20 GiB of tensors
asked=5.73GiB total=8GiB allocated=17.2GiB free=0B idle=1.95GiB
CUDA out of memory. Tried to allocate 5.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB
already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch) <old hint>

2.0, one request | larger than the card
One request asked for 222.41 GiB
asked=222.41GiB total=23.56GiB allocated=583.94MiB free=22.66GiB
OutOfMemoryError: CUDA out of memory. Tried to allocate 222.41 GiB (GPU 0; 23.56 GiB total
capacity; 583.94 MiB already allocated; 22.66 GiB free; 612.00 MiB reserved in total by PyTorch)

2.1, capacty | larger than the card
One request asked for 355.43 GiB
asked=355.43GiB this_process=61.25GiB allocated=52.51GiB idle=8.25GiB
CUDA out of memory. Tried to allocate 355.43 GiB. GPU 0 has a total capacty of 79.32 GiB of
which 18.06 GiB is free. Including non-PyTorch memory, this process has 61.25 GiB memory in use.
Of the allocated memory 52.51 GiB is allocated by PyTorch, and 8.25 GiB is reserved by PyTorch
but unallocated. <split hint>

2.1, Windows | in pieces
0 B are free and 2.30 GiB are idle
asked=1.7GiB total=6GiB free=0B allocated=2.93GiB idle=2.3GiB
CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0
bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is
reserved by PyTorch but unallocated. <split hint>

2.1, container | full; in pieces; container
The card is full
asked=496MiB total=14.75GiB free=235.06MiB own_process=14.52GiB
CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of 14.75 GiB of
which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory
14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated. <split
hint>

2.3, container | full; in pieces; container
The card is full
total=39.56GiB free=2.81MiB own_process=39.55GiB idle=1021.72MiB
CUDA out of memory. Tried to allocate 36.00 MiB. GPU 0 has a total capacity of 39.56 GiB of
which 2.81 MiB is free. Process 16368 has 39.55 GiB memory in use. Of the allocated memory 38.05
GiB is allocated by PyTorch, and 1021.72 MiB is reserved by PyTorch but unallocated. <hint:
PYTORCH_CUDA_ALLOC_CONF>

2.4, two processes | full; outside; container; private pools
The card is full
own_process=78.33GiB other_processes=494MiB private=57.88MiB idle=185.89MiB
CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.33 GiB of
which 508.44 MiB is free. Process 629 has 494.00 MiB memory in use. Process 1134 has 78.33 GiB
memory in use. Of the allocated memory 74.24 GiB is allocated by PyTorch, with 57.88 MiB
allocated in private pools (e.g., CUDA Graphs), and 185.89 MiB is reserved by PyTorch but
unallocated. <hint: PYTORCH_CUDA_ALLOC_CONF>

2.9, other process | other process; outside
Other processes hold 5.38 GiB of the card's 7.60 GiB
this_process=2.19GiB other_processes=5.38GiB allocated=217.8MiB
CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 has a total capacity of 7.60 GiB of which
15.38 MiB is free. Process 3936 has 5.38 GiB memory in use. Including non-PyTorch memory, this
process has 2.19 GiB memory in use. Of the allocated memory 217.80 MiB is allocated by PyTorch,
and 8.20 MiB is reserved by PyTorch but unallocated. <hint: PYTORCH_ALLOC_CONF>

2.6, free is more | enough is free
2.35 GiB are free
asked=20MiB total=4GiB free=2.35GiB allocated=825.15MiB idle=24.85MiB
CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which
2.35 GiB is free. Of the allocated memory 825.15 MiB is allocated by PyTorch, and 24.85 MiB is
reserved by PyTorch but unallocated. <hint: PYTORCH_CUDA_ALLOC_CONF>

2.6, 0 bytes | outside; in pieces; unknown process; private pools
About 24.86 GiB of the card's 79.11 GiB are held outside
this_process=none private=50MiB allocated=48.15GiB idle=3.49GiB
CUDA out of memory. Tried to allocate 2.63 GiB. GPU 7 has a total capacity of 79.11 GiB of which
2.61 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the
allocated memory 48.15 GiB is allocated by PyTorch, with 50.00 MiB allocated in private pools
(e.g., CUDA Graphs), and 3.49 GiB is reserved by PyTorch but unallocated. <hint:
PYTORCH_CUDA_ALLOC_CONF>

WSL | full; unknown process
The card is full
asked=64MiB total=8GiB free=0B this_process=none allocated=7.03GiB
CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which
0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in
use. Of the allocated memory 7.03 GiB is allocated by PyTorch, and 20.00 MiB is reserved by
PyTorch but unallocated. <hint: PYTORCH_CUDA_ALLOC_CONF>

HIP, limit | limit; outside; private pools
PyTorch holds 1.05 GiB and asked for 64.00 MiB
asked=64MiB allowed=1.05GiB total=255.98GiB private=17MiB idle=54.99MiB
HIP out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 255.98 GiB of
which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by
PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved
by PyTorch but unallocated. <hint: PYTORCH_CUDA_ALLOC_CONF>

HIP, free is more | enough is free
7.12 GiB are free
asked=432MiB total=15.92GiB free=7.12GiB allocated=8.08GiB idle=321.96MiB
torch.OutOfMemoryError: HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total
capacity of 15.92 GiB of which 7.12 GiB is free. Of the allocated memory 8.08 GiB is allocated
by PyTorch, and 321.96 MiB is reserved by PyTorch but unallocated. <hint:
PYTORCH_HIP_ALLOC_CONF>

HIP, in pieces | in pieces
6.22 GiB are free and 7.10 GiB are idle
asked=6.64GiB total=19.92GiB free=6.22GiB allocated=5.34GiB idle=7.1GiB
HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of which
6.22 GiB is free. Of the allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 GiB is
reserved by PyTorch but unallocated. <hint: PYTORCH_HIP_ALLOC_CONF>

HIP, larger | larger than the card
One request asked for 16.00 GiB
asked=16GiB total=15.24GiB free=15.09GiB allocated=0B idle=0B
HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB of which
15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is
reserved by PyTorch but unallocated. <hint: PYTORCH_HIP_ALLOC_CONF>

XPU | enough is free
5.65 GiB are free
asked=5.65GiB total=5.65GiB free=5.65GiB allocated=195.5KiB idle=1.81MiB
torch.OutOfMemoryError: XPU out of memory. Tried to allocate 5.65 GiB. GPU 0 has a total
capacity of 5.65 GiB of which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated
by PyTorch, and 1.81 MiB is reserved by PyTorch but unallocated. Please use `empty_cache` to
release all unoccupied cached memory.

IPEX | free is not given
The message does not say how much is free
asked=1.71GiB total=15.56GiB allocated=176MiB idle=0B free=none
RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity;
176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)

MPS, GB | mps
Apple's GPU: 17.79 GiB are taken and 375.40
asked=375.4MiB allowed=18.13GiB allocated=11.14GiB other=6.65GiB
MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max allowed:
18.13 GB). Tried to allocate 375.40 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0
to disable upper limit for memory allocations (may cause system failure).

MPS, GiB | mps
Apple's GPU: 15.72 GiB are taken and 5.81
asked=5.81GiB allowed=18.13GiB allocated=15.72GiB other=2.41MiB
MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed:
18.13 GiB). Tried to allocate 5.81 GiB on private pool.

MPS, bytes | mps
Apple's GPU: 19.31 GiB are taken and 256 B
asked=256B allowed=18.13GiB allocated=16GiB other=3.31GiB
MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed:
18.13 GB). Tried to allocate 256 bytes on shared pool.

2.5, cut off | outside; in pieces; container; private pools
About 10.04 GiB of the card's 79.33 GiB are held by this process
asked=1.27GiB own_process=79.19GiB idle=1.47GiB private=76MiB
OutOfMemoryError('CUDA out of memory. Tried to allocate 1.27 GiB. GPU 0 has a total capacity of
79.33 GiB of which 109.81 MiB is free. Process 23 has 79.19 GiB memory in use. Of the allocated
memory 67.68 GiB is allocated by PyTorch, with 76.00 MiB allocated in private pools (e.g., CUDA
Gra phs), and 1.47 GiB is reserved by PyTorch but unallocated. If reserv...

1 GiB card | outside
About 606.00 MiB of the card's 1.00 GiB are held outside
asked=72MiB total=1GiB allocated=378.05MiB free=0B idle=39.95MiB
RuntimeError: CUDA out of memory. Tried to allocate 72.00 MiB (GPU 0; 1024.00 MiB total
capacity; 378.05 MiB already allocated; 0 bytes free; 418.00 MiB reserved in total by PyTorch)

2 GiB card | in pieces
145.93 MiB are free and 255.97 MiB are idle
asked=264MiB total=2GiB allocated=788.51MiB free=145.93MiB
CUDA out of memory. Tried to allocate 264.00 MiB (GPU 0; 2.00 GiB total capacity; 788.51 MiB
already allocated; 145.93 MiB free; 1.02 GiB reserved in total by PyTorch)

1.1, KiB cached | full
The card is full
asked=25MiB total=3.94GiB allocated=3.14GiB free=21.56MiB idle=634KiB
RuntimeError: CUDA out of memory. Tried to allocate 25.00 MiB (GPU 0; 3.94 GiB total capacity;
3.14 GiB already allocated; 21.56 MiB free; 634.00 KiB cached)

1.3, free is more | enough is free; outside
8.20 GiB are free
asked=8.13GiB total=10.76GiB free=8.2GiB idle=32.43MiB
RuntimeError: CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total capacity;
643.57 MiB already allocated; 8.20 GiB free; 32.43 MiB cached)

2.0, larger | larger than the card
One request asked for 10.73 GiB
asked=10.73GiB total=8GiB allocated=17.2GiB free=0B
CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity; 17.20 GiB
already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch) <old hint>

2.0, others | outside
About 12.24 GiB of the card's 14.56 GiB are held outside
asked=1.69GiB total=14.56GiB allocated=649.97MiB free=1.31GiB
CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity; 649.97 MiB
already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch) <old hint>

2.1, Windows, shared memory | larger than the card
One request asked for 27.12 GiB
asked=27.12GiB total=11.99GiB free=0B allocated=16.16GiB idle=144.59MiB
CUDA out of memory. Tried to allocate 27.12 GiB. GPU 0 has a total capacty of 11.99 GiB of which
0 bytes is free. Of the allocated memory 16.16 GiB is allocated by PyTorch, and 144.59 MiB is
reserved by PyTorch but unallocated. <split hint>

cudaMallocAsync | not divided
PyTorch's tensors take 15.16 GiB of 15.99 GiB
asked=512KiB total=15.99GiB free=0B allocated=15.16GiB idle=none
Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 15.16 GiB
Requested               : 512.00 KiB
Device limit            : 15.99 GiB
Free (according to CUDA): 0 bytes
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB

cudaMallocAsync, more than is left beside tensors | full
Live tensors take 10.35 GiB of the card's 11.99 GiB. Even without anything else
asked=3.16GiB total=11.99GiB free=0B allocated=10.35GiB
Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 10.35 GiB
Requested               : 3.16 GiB
Device limit            : 11.99 GiB
Free (according to CUDA): 0 bytes

cudaMallocAsync, others | not divided
PyTorch's tensors take 6.89 GiB of 23.69 GiB
asked=320MiB total=23.69GiB free=2.94MiB allocated=6.89GiB
torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 6.89 GiB
Requested               : 320.00 MiB
Device limit            : 23.69 GiB
Free (according to CUDA): 2.94 MiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB

NPU | in pieces
1.32 GiB are free and 8.08 GiB are idle
asked=5.03GiB total=60.96GiB allocated=49.47GiB free=1.32GiB idle=8.08GiB
RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity;
49.47 GiB already allocated; 49.47 GiB current active; 1.32 GiB free; 57.55 GiB reserved in
total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to
avoid fragmentation.

NPU, full | full
The card is full
asked=30MiB total=60.96GiB allocated=60.34GiB free=14.24MiB idle=266.24MiB
RuntimeError: NPU out of memory. Tried to allocate 30.00 MiB (NPU 3; 60.96 GiB total capacity;
60.34 GiB already allocated; 60.34 GiB current active; 14.24 MiB free; 60.60 GiB reserved in
total by PyTorch)

cut off before PyTorch | cut off
The message ends before PyTorch's own figures
asked=13GiB total=79.15GiB free=8.13GiB allocated=none
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.00 GiB. GPU 0 has a total
capacity of 79.15 GiB of which 8.13 GiB is free.

MPS, one buffer | mps
Apple's GPU: one tensor of 24.00 GiB is more
asked=24GiB total=none
RuntimeError: Invalid buffer size: 24.00 GB

2.6, ranks on card 0 | ranks
Other processes hold 22.44 GiB of the card
asked=20MiB total=23.65GiB free=7.06MiB idle=22MiB own_process=1.14GiB other_processes=22.44GiB
[rank2]: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65
GiB of which 7.06 MiB is free. Process 71 has 20.08 GiB memory in use. Process 72 has 1.18 GiB
memory in use. Process 73 has 1.18 GiB memory in use. Including non-PyTorch memory, this process
has 1.14 GiB memory in use. Of the allocated memory 690.00 MiB is allocated by PyTorch, and
22.00 MiB is reserved by PyTorch but unallocated.

2.1, contexts of other ranks | ranks; outside; in pieces
Other processes hold 17.08 GiB of the card
asked=52MiB idle=655MiB own_process=14.62GiB other_processes=17.08GiB
CUDA out of memory. Tried to allocate 52.00 MiB. GPU 0 has a total capacity of 31.74 GiB of
which 40.12 MiB is free. Process 11 has 2.44 GiB memory in use. Process 12 has 2.44 GiB memory
in use. Process 13 has 2.44 GiB memory in use. Process 14 has 2.44 GiB memory in use. Process 15
has 2.44 GiB memory in use. Process 16 has 2.44 GiB memory in use. Process 17 has 2.44 GiB
memory in use. Including non-PyTorch memory, this process has 14.62 GiB memory in use. Of the
allocated memory 12.20 GiB is allocated by PyTorch, and 655.00 MiB is reserved by PyTorch but
unallocated.

2.1, two processes, the smaller is this run | other process; container
Other processes hold 37.90 GiB of the card's 47.54 GiB
asked=32MiB idle=118.5MiB own_process=9.6GiB other_processes=37.9GiB
CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of 47.54 GiB of
which 21.06 MiB is free. Process 91 has 37.90 GiB memory in use. Process 95 has 9.60 GiB memory
in use. Of the allocated memory 9.01 GiB is allocated by PyTorch, and 118.50 MiB is reserved by
PyTorch but unallocated.

2.6, full, more is idle than asked for | full; in pieces
The card is full
asked=1GiB total=23.64GiB free=702MiB idle=430MiB own_process=22.95GiB
CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 23.64 GiB of
which 702.00 MiB is free. Including non-PyTorch memory, this process has 22.95 GiB memory in
use. Of the allocated memory 22.08 GiB is allocated by PyTorch, and 430.00 MiB is reserved by
PyTorch but unallocated.

2.0, full, printed alike | full
The card is full
asked=1.5GiB total=23.69GiB free=1021MiB idle=512MiB
CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 23.69 GiB total capacity; 22.10 GiB already
allocated; 1021.00 MiB free; 22.60 GiB reserved in total by PyTorch) <old hint>

2.6, nearly full | full; in pieces
The card is nearly full
asked=1.9GiB total=23.64GiB free=1.6GiB idle=512MiB own_process=22.04GiB
CUDA out of memory. Tried to allocate 1.90 GiB. GPU 0 has a total capacity of 23.64 GiB of which
1.60 GiB is free. Including non-PyTorch memory, this process has 22.04 GiB memory in use. Of the
allocated memory 20.60 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but
unallocated.

2.5, a large request | one large request; other process
This one request
asked=15.3GiB idle=6.8GiB own_process=67.63GiB other_processes=6.12GiB
CUDA out of memory. Tried to allocate 15.30 GiB. GPU 0 has a total capacity of 79.15 GiB of
which 5.40 GiB is free. Process 8 has 6.12 GiB memory in use. Including non-PyTorch memory, this
process has 67.63 GiB memory in use. Of the allocated memory 60.20 GiB is allocated by PyTorch,
and 6.80 GiB is reserved by PyTorch but unallocated.

HIP, outside | outside
About 69.95 GiB of the card's 127.90 GiB are held outside
asked=3.2GiB total=127.9GiB free=790MiB idle=80MiB
HIP out of memory. Tried to allocate 3.20 GiB. GPU 0 has a total capacity of 127.90 GiB of which
790.00 MiB is free. Of the allocated memory 57.10 GiB is allocated by PyTorch, and 80.00 MiB is
reserved by PyTorch but unallocated.

XPU, free is not given | full
The card is full
asked=500MiB total=16.4GiB idle=0B
XPU out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total capacity of 16.40 GiB. Of the
allocated memory 16.40 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but
unallocated.

XPU, free is not given, the rest is too small | full
Live tensors take 14.20 GiB of the card's 15.91 GiB
asked=2.25GiB total=15.91GiB idle=340MiB
XPU out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 15.91 GiB. Of the
allocated memory 14.20 GiB is allocated by PyTorch, and 340.00 MiB is reserved by PyTorch but
unallocated.

MPS, mostly others | mps
Apple's GPU: 6.78 GiB are taken and 10.60
asked=10.6MiB allowed=6.77GiB
RuntimeError: MPS backend out of memory (MPS allocated: 2.45 GB, other allocations: 4.33 GB, max
allowed: 6.77 GB). Tried to allocate 10.60 MB on private pool.

a request without a size | larger than the card
One request asked for more than a billion GiB
total=none
CUDA out of memory. Tried to allocate more than 1EB memory.
"""
# Errors with no sum to make: (the case, how the answer begins, the command to type, messages).
# "|" ends a line.
OTHERS = (
    (
        "killed",
        "The computer's memory was full, not the card's: ",
        "free -h",
        """
[83742.1] Out of memory: Killed process 310 (python) total-vm:98213412kB, anon-rss:6123418kB, UID:10
May 15 23:09:27 vm kernel: [ 51.6] Memory cgroup out of memory: Killed process 156 (python3) total-v
kernel: Out of memory: Kill process 287 (python) score 883 or sacrifice child
python invoked oom-killer: order=0|Tasks:|Out of memory: Killed process 310 (python) total-vm:9kB
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,global_oom,task=python,pid=78,uid=0
slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0. Some tasks have been OOM Killed.
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=19.batch cgroup.
srun: error: node17: task 0: Out Of Memory
State: Terminated| Reason: OOMKilled| Exit Code: 137| Started: Mon
Your session crashed after using all available RAM. View runtime logs
Your notebook tried to allocate more memory than is available. It has restarted.
(raylet) node_manager.cc:3069: 2 Workers (tasks / actors) killed due to memory pressure (OOM)
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
""",
    ),
    (
        "killed",
        "The computer's memory was full, not the card's: a compiler was ended",
        "free -h",
        "c++: fatal error: Killed signal terminated program cc1plus|ninja: build stopped.",
    ),
    (
        "open files",
        "This is not memory: the process has too many open files",
        "ulimit -n",
        """
RuntimeError: received 0 items of ancdata
OSError: [Errno 24] Too many open files: '/dev/shm/torch_3012'
""",
    ),
    (
        "killed",
        "The computer's memory was full, not the card's, most likely: ",
        'dmesg -T | grep -i "killed process"',
        """
  rank      : 1 (local_rank: 1)|  exitcode  : -9 (pid: 4711)|  traceback : Signal 9 (SIGKILL) recei
E0325 20:57:27.620000 26 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9)
[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = -9
subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.
Process 1 terminated with code -9
process 0 terminated with signal SIGKILL
subprocess.CalledProcessError: Command 'python train.py' returned non-zero exit status -9.
Process finished with exit code 137 (interrupted by signal 9: SIGKILL)
Error: Kernel died with exit code -9.
The kernel for train.ipynb appears to have died. It will restart automatically.
The Kernel crashed while executing code in the current cell or a previous cell.
nbclient.exceptions.DeadKernelError: Kernel died
RuntimeError: DataLoader worker (pid 2637) is killed by signal: Killed.
RuntimeError: DataLoader worker (pid(s) 321, 322) exited unexpectedly
BrokenProcessPool: A process in the process pool was terminated abruptly while the future ran
RuntimeError: One of the subprocesses has abruptly died during map operation.
/var/spool/slurm_script: line 28:  8156 Killed                  python3 main.py --epochs 4
Epoch 3, loss 0.5504|Killed
zsh: killed     python train.py
""",
    ),
    (
        "host",
        "The computer's memory was full, not the card's",
        "free -h",
        """
DefaultCPUAllocator: can't allocate memory: you tried to allocate 17,179,869,184 bytes.
DefaultCPUAllocator: not enough memory: you tried to allocate 17179869184 bytes.
_ArrayMemoryError: Unable to allocate 16.0 GiB for an array with shape (40000, 40000)
MemoryError: Unable to allocate 16.0 GiB for an array with shape (40000, 40000)
failed to alloc 17179869184 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory
RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
    self.pid = os.fork()|OSError: [Errno 12] Cannot allocate memory
    x = bytearray(n)|MemoryError
terminate called after throwing an instance of 'std::bad_alloc'
Caught RuntimeError in pin memory thread for device 0.|CUDA error: out of memory
bash: fork: Cannot allocate memory
cudaHostAlloc(&pointer, bytes, 0) failed: out of memory
""",
    ),
    (
        "host",
        "The computer's memory was full, not the card's: Windows",
        "systeminfo | findstr Memory",
        """
OSError: [WinError 1455] The paging file is too small for this operation to complete.
The paging file is too small for this operation to complete. (os error 1455)
""",
    ),
    (
        "shared memory",
        "The loader's workers hand over batches in the host's shared memory",
        "df -h /dev/shm",
        """
killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.
Unexpected bus error in worker. This might be caused by insufficient shared memory (shm).
RuntimeError: unable to mmap 29764 bytes from file </torch_101_302>: Cannot allocate memory (12)
RuntimeError: unable to open shared memory object </torch_59_408> in read-write mode
""",
    ),
    (
        "no figures",
        "This error comes from the driver or from a library",
        "nvidia-smi",
        """
RuntimeError: CUDA error: out of memory
torch.OutOfMemoryError: Allocation on device
Error out of memory at line 380 in file /src/csrc/ops.cu
ncclUnhandledCudaError: Call to CUDA function failed.|Last error:|Cuda failure 2 'out of memory'
[0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)
UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)
""",
    ),
    (
        "no figures",
        "This error comes from the driver or from a library, and has no figures. It came in the",
        "nvidia-smi",
        """
  File "/opt/bitsandbytes/optim/adam.py", line 9, in step|Error out of memory at line 3
  File "/opt/site-packages/torch/_tensor.py", line 9, in backward|CUDA error: out of memory
""",
    ),
    (
        "library",
        "cuDNN or cuBLAS could not start its work, most often because the card has no room left",
        "nvidia-smi",
        """
RuntimeError: Unable to find a valid cuDNN algorithm to run convolution
RuntimeError: GET was unable to find an engine to execute this computation
RuntimeError: no valid convolution algorithms available in CuDNN
RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
""",
    ),
    (
        "vllm",
        "This is the plan of vLLM or SGLang, not a request",
        "nvidia-smi",
        """
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.
""",
    ),
    (
        "vllm",
        "This is vLLM's plan, not a request: a row of max_model_len tokens needs 16.00 GiB",
        "nvidia-smi",
        """
16.00 GiB KV cache is needed, which is larger than the available memory (9.37 GiB).
(16.0 GiB KV cache is needed, which is larger than the available KV cache memory (9.31 GiB). Based
""",
    ),
    (
        "vllm",
        "vLLM's cache has taken the share of the card that gpu_memory_utilization gives",
        "nvidia-smi",
        "CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
    ),
    (
        "library",
        "This is the shared memory of one multiprocessor on the chip, not the card's",
        "nvidia-smi",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072",
    ),
    (
        "other library",
        "llama.cpp (or ollama) asked the card for 16.00 GiB",
        "nvidia-smi",
        "alloc_buffer: allocating 16384.00 MiB on device 0: cudaMalloc failed: out of memory",
    ),
    (
        "vllm",
        "Before vLLM began, the card had less free memory",
        "nvidia-smi",
        """
Free memory on device (19.7/22.0 GiB) on startup is less than desired GPU memory utilization
""",
    ),
    (
        "dispatched",
        "No allocation failed here",
        "nvidia-smi",
        """
ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM.
Some parameters are on the meta device because they were offloaded to the cpu.
""",
    ),
    ("disk", "This is a disk, not memory", "df -h", "OSError: [Errno 28] No space left on device"),
    (
        "other library",
        "This error is not PyTorch's",
        "nvidia-smi",
        """
RESOURCE_EXHAUSTED: Attempting to reserve 16.00G at the bottom of memory. That was not possible.
XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.
(0) Resource exhausted: Out of memory while trying to allocate 17179869184 bytes.
Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB (rounded)
ResourceExhaustedError: OOM when allocating tensor with shape[64,512] by allocator GPU_0_bfc
BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer of size 5
""",
    ),
    (
        "nothing found",
        "No out-of-memory error was found in this text. Give the line that contains the words",
        "",
        """
IndexError: list index out of range
Epoch 3: loss 2.31, 12.5 GiB of memory used, 2 workers killed
grpc: RESOURCE_EXHAUSTED: received a message larger than max (5 vs. 4)
memory allocation on device 0: 5 GB
I bfc_allocator.cc:246] Allocator (GPU_0_bfc) has 3 chunks
the server exited with code 1370
[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1
""",
    ),
)


def texts(block: str) -> list[str]:
    return [line.replace("|", "\n") for line in block.strip("\n").split("\n")]


def read_table() -> dict[str, tuple[str, str, str, str]]:
    """By name: the message, its figures, the cases, how the answer begins."""
    found = {}
    for record in TABLE.strip().split("\n\n"):
        title, begins, figures, message = record.split("\n", 3)
        name, cases = title.split(" | ")
        for short, words in HINTS.items():
            message = re.sub(short, words, message)
        found[name] = (message, figures, cases, begins)
    return found


MESSAGES = read_table()
ALL = [row[0] for row in MESSAGES.values()]
ALL += [text for *_, block in OTHERS for text in texts(block)]


def words_of(explanation) -> str:
    return " ".join(" ".join(explanation.sentences).split())


def check_figures(error, figures: str) -> None:
    """Equal up to the two digits that a message has."""
    for figure in figures.split():
        name, wanted = figure.split("=")
        found = getattr(error, name)
        if wanted == "none":
            assert found is None, figure
        elif wanted == "0B":
            assert found == 0, figure
        else:
            assert found == pytest.approx(parse_bytes(wanted), rel=0, abs=0.011 * GiB), figure


@pytest.mark.parametrize("name", MESSAGES)
def test_every_figure_is_named_and_the_answer_stands_first(name):
    text, figures, cases, begins = MESSAGES[name]
    explanation = explain(text)
    check_figures(explanation.error, figures)
    assert "; ".join(explanation.cases) == cases
    said = explanation.to_text(200)
    assert said.startswith(begins)
    command = said.index(f"  {explanation.command}\n")
    assert explanation.command.startswith("gradmem ")
    table = said.find("  the request that was refused")
    assert table == -1 or command < table


@pytest.mark.parametrize("case, begins, command, block", OTHERS)
def test_an_error_without_a_sum_has_its_row(case, begins, command, block):
    for text in texts(block):
        explanation = explain(text)
        assert explanation.cases == (case,), text
        assert words_of(explanation).startswith(begins), text
        assert explanation.command == command, text
        if explanation.error is not None:
            assert explanation.error.asked in (None, 16 * GiB), text
            assert explanation.error.count == 1, text


SIZE = r"(\d[\d.]* (?:B|[KMGT]iB))"
COMPARISON = re.compile(rf"{SIZE}[^\d{{}}]*?, (less than|more than|as much as) the {SIZE}")
SUM = re.compile(rf"{SIZE}[^\d]*? and [^\d]*?{SIZE}[^\d]*?: together {SIZE}")
PART = re.compile(rf"{SIZE} of (?:its|the card's) {SIZE}")


def test_every_comparison_sum_and_part_holds_for_the_figures_that_it_prints():
    kinds = set()
    for text in ALL:
        said = words_of(explain(text))
        for one, word, other in COMPARISON.findall(said):
            difference = parse_figure(one) - parse_figure(other)
            kinds.add(word)
            assert (difference > 0) == (word == "more than"), said
            assert (difference < 0) == (word == "less than"), said
        for one, other, together in SUM.findall(said):
            digits = 0.01 * parse_bytes("1 " + together.split()[1])
            together = parse_figure(together)
            assert abs(parse_figure(one) + parse_figure(other) - together) < digits, said
        for one, whole in PART.findall(said):
            assert parse_figure(one) <= parse_figure(whole), said
        # None escapes these patterns.
        assert len(re.findall(r"(?:than|as) the \d", said)) == len(COMPARISON.findall(said)), said
        assert said.count("together") == len(SUM.findall(said)), said
        assert "{" not in said.replace('{"": 0}', ""), said
    assert kinds == {"less than", "more than", "as much as"}
    assert "together" not in words_of(explain(MESSAGES["2.0, full, printed alike"][0]))


def parse_figure(figure: str) -> int:
    """``parse_bytes``, and "0 B"."""
    return 0 if figure == "0 B" else parse_bytes(figure)


def test_the_killed_process_and_this_run_among_others_are_named():
    said = words_of(explain(texts(OTHERS[0][3])[0]))
    assert "process 310 (python), which held 5.84 GiB" in said
    assert "the kernel ended process 310" in words_of(explain(texts(OTHERS[0][3])[3]))
    said = words_of(explain(MESSAGES["2.1, two processes, the smaller is this run"][0]))
    assert "process 91 holds 37.90 GiB" in said and "Process 95 (9.60 GiB) is this run" in said


@pytest.mark.parametrize(
    "before, name, command",
    [
        ("", "2.9, other process", "MODEL --card 7.60GiB --seq-len 2048 --global-batch 8"),
        ("batch_size=4", "1.7, idle", 'MODEL --card "T4 16GB" --seq-len 2048 --global-batch 4'),
        (
            "'--model_name_or_path', 'facebook/opt-125m', '--eval_batch_size', '9', "
            "'--per_device_train_batch_size', '2', '--max_seq_length', '512'",
            "2.3, container",
            'facebook/opt-125m --card "A100 40GB" --seq-len 512 --global-batch 2',
        ),
        (
            'm = AutoModel.from_pretrained("gpt2")',
            "HIP, in pieces",
            "gpt2 --card 19.92GiB --seq-len 2048 --global-batch 8",
        ),
    ],
)
def test_the_command_has_the_card_and_what_the_text_shows_of_the_step(before, name, command):
    explanation = explain(f"{before}\n{MESSAGES[name][0]}")
    assert explanation.command == f"gradmem plan {command}"
    options = parser().parse_args(shlex.split(explanation.command)[1:])
    error_card = explanation.error.total
    assert find_card(options.card).nbytes == pytest.approx(error_card, rel=0.02)
    assert ("MODEL, the one word" in words_of(explanation)) == ("MODEL" in command)
    assert ("are an example" in words_of(explanation)) == ("2048" in command)
    given = explain(MESSAGES[name][0], model="gpt2", batch_size=3, seq_len=64)
    assert given.command.startswith("gradmem plan gpt2 --card ")
    assert given.command.endswith("--seq-len 64 --global-batch 3")


FORMS = {
    "wrapped": lambda text: "\n".join(textwrap.wrap(text, 50)),
    "wrapped in a word": lambda text: "\n".join(text[i : i + 37] for i in range(0, len(text), 37)),
    "rank": lambda text: f"[rank0]: Traceback (most recent call last):\n[rank0]: {text}",
    "wrapped, each line with its rank": lambda text: "\n".join(
        f"[rank3]: {part}" for part in textwrap.wrap(text, 60)
    ),
    "colours": lambda text: f"\x1b[31m\x1b[1m{text[:40]}\x1b[0m{text[40:]}",
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
    text, figures, *_ = MESSAGES[name]
    check_figures(read_error(FORMS[form](text)), figures)


def test_of_several_errors_the_first_is_read_and_all_are_counted():
    first, second = MESSAGES["1.3, others"][0], MESSAGES["2.6, 0 bytes"][0]
    lines = []
    for one, other in zip(textwrap.wrap(second, 90), textwrap.wrap(first, 25), strict=False):
        lines += [f"[rank1]: {other}", f"[rank0]: {one}"]  # two ranks write at once
    error = read_error("\n".join(["epoch 1", *lines]))
    assert (error.count, error.stream, error.asked) == (2, "[rank1]", 352 * MiB)


# The moment, and the frames that show it: file:function. A "/" stands for a library's folder.
MOMENTS = """
forward          train.py:main /nn/modules/module.py:_call_impl m.py:forward /nn/functional.py:x
loss             train.py:main train.py:epoch /nn/functional.py:cross_entropy
backward         train.py:main /_tensor.py:backward /checkpoint.py:recompute /nn/linear.py:forward
optimizer step   train.py:main train.py:epoch /optim/adamw.py:step
evaluation       train.py:main /transformers/trainer.py:evaluate /nn/modules/module.py:_call_impl
generation       chat.py:main /transformers/utils.py:generate /nn/modules/module.py:_call_impl
load             train.py:main /transformers/modeling.py:from_pretrained
load             a.py:main /nn/modules/module.py:to /nn/modules/module.py:_apply
save             train.py:main train.py:epoch /serialization.py:save
forward          fit.py:main /optim/adam.py:step /lightning/loop.py:closure fit.py:training_step
optimizer step   train.py:main /autograd/__init__.py:backward train.py:hook /optim/sgd.py:step
                 a.py:main a.py:make_batch
"""


@pytest.mark.parametrize("row", MOMENTS.strip("\n").split("\n"))
def test_the_traceback_shows_the_moment_and_the_users_line(row):
    moment = row[:17].strip()
    lines = ["step 3", "Traceback (most recent call last):"]
    own = ""
    for number, frame in enumerate(row[17:].split()):
        file, name = frame.replace("/", "/usr/lib/python3.11/site-packages/torch/", 1).split(":")
        lines += [f'  File "{file}", line {number}, in {name}', "    do(this)"]
        if not frame.startswith("/"):
            own = f"{file}, line {number}: do(this)"
    explanation = explain("\n".join([*lines, MESSAGES["2.3, container"][0]]))
    assert explanation.moment == moment
    said = words_of(explanation)
    assert f"Your own line: {own}" in said
    helps = "rows" in said.partition("Your own line")[2].partition("Type next")[0]
    assert helps == (moment in ("forward", "loss", "backward", "optimizer step", "generation"))


def test_a_notebooks_traceback_shows_the_cells_own_line():
    text = """OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 3
      1 model = make()
----> 3 model.to("cuda")

File /opt/python3.10/site-packages/torch/nn/modules/module.py:1340, in Module.to(self, *args)
   1339 \n-> 1340     return self._apply(convert)

OutOfMemoryError: """
    explanation = explain(text + MESSAGES["2.3, container"][0])
    own = explanation.own_line
    assert (explanation.moment, own.file, own.line) == ("load", "Cell In[7]", "3")
    assert own.code == 'model.to("cuda")'


def test_half_a_message_asks_for_the_rest():
    explanation = explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert explanation.figures == {"asked": 2 * GiB}
    assert "give the whole line" in words_of(explanation)


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
    text = words_of(explain(MESSAGES[name][0]))
    assert says in text and does_not not in text
    # On Windows the setting does not work.
    windows = explain(MESSAGES[name][0] + '\n  File "C:\\run\\train.py", line 3, in main')
    assert "Set PYTORCH" not in words_of(windows)


def test_the_bar_is_the_sum_of_the_card():
    for name, (text, *_) in MESSAGES.items():
        explanation = explain(text)
        error = explanation.error
        if error.total and error.free is not None and (error.allocated or 0) <= error.total:
            total = sum(explanation.parts().values())
            assert abs(total - error.total) <= 0.02 * error.total, name
        for line in explanation.to_text(80).splitlines():
            assert len(line) <= 80 or explanation.command in line, name
        page = explanation._repr_html_()
        assert page.count("flex:") == len(explanation.parts())
        assert ("role='img'" in page) == bool(explanation.parts())
        assert all(format_bytes(nbytes) in page for nbytes in explanation.figures.values()), name


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
    figures = [explanation.figures[name] for name in ("asked", "allocated", "total")]
    assert figures == [4_000, 8_000, 10_000]
    assert explanation.moment == "" and explanation.own_line.file == __file__
    assert explanation.command == (
        "gradmem plan MODEL --card 9.77KiB --seq-len 2048 --global-batch 8 --target cpu"
    )


def test_only_a_text_or_an_exception_is_explained():
    with pytest.raises(TypeError, match="explain was given int"):
        explain(3)


def test_reading_needs_no_torch():
    code = "import sys, gradmem_lib as g; g.explain('CUDA error: out of memory')"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
