"""MemoryTracker on real ranks, against the CPU allocator's events and PyTorch's FSDPMemTracker."""

import warnings

import pytest
import torch
from nightly import each
from oracle import allocator_peak
from transformers import LlamaConfig, LlamaForCausalLM

from gradmem_lib import MemoryTracker, Recipe, compat
from gradmem_lib.course import run_ranks
from gradmem_lib.names import SHARDING
from gradmem_lib.training.prepare import prepare

# Large enough that a checkpoint's random-number states, which the tracker cannot see, are small.
SIZES = {
    "vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
WAYS = {
    **{how: {"sharding": how} for how in SHARDING},
    "with checkpoints": {"sharding": "fsdp", "checkpointing": "per-layer"},
    "offloaded": {"sharding": "fsdp", "offload": "parameters"},
    "mixed": {"sharding": "fsdp", "precision": "float32-master"},
    "4 bits": {"sharding": "fsdp", "precision": "bf16", "lora_rank": 8, "quantized_base": True},
}
WAYS = dict(each(2, WAYS.items(), start=1))
MEANT_FOR = ("zero2", "fsdp", "with checkpoints", "offloaded", "4 bits")  # FSDPMemTracker takes no DDP
MEANT_FOR = [way for way in WAYS if way in MEANT_FOR]


class Settled(compat.Unguarded, compat.TorchDispatchMode):
    """Nobody listens; but gloo has let go of a collective's tensors when it returns, so that this thread frees them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        if func in compat.collectives:
            return compat.settled(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def of_a_rank(ways: dict[str, dict]) -> dict[str, tuple]:
    """By way: peaks above the start of several tracked steps, of the allocator, and FSDPMemTracker's own figure of the peak."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    warnings.filterwarnings("ignore")
    found = {}
    for way, fields in ways.items():
        torch.manual_seed(0)
        run = prepare(LlamaForCausalLM(LlamaConfig(**SIZES)), Recipe(**fields))
        ids = torch.randint(0, 256, (2, 64))

        def step(run=run, ids=ids):
            run.model(input_ids=ids, labels=ids).loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

        def settled_step(step=step):
            with Settled():
                step()

        step()
        step()
        peaks = []
        for _ in range(3):
            with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
                tracker.watch(ids, "other")
                step()
            peaks.append(tracker.peak.total)
        start = tracker.timeline.totals[1]  # with the batch; buckets are found later, and were there
        theirs = None
        if way in MEANT_FOR:
            theirs = FSDPMemTracker(run.model, run.optimizer)
            theirs.track_inputs((ids,))
            with Settled(), theirs:
                step()
            theirs = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        found[way] = peaks, start, allocator_peak(settled_step, before=1), theirs
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(of_a_rank, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_the_peak_is_the_cpu_allocators_within_a_thousandth(way, found):
    for rank in found:
        peaks, start, allocated, _ = rank[way]
        assert peaks[0] - start == pytest.approx(allocated, rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_same_from_run_to_run(way, found):
    for rank in found:
        assert len(set(rank[way][0])) == 1


@pytest.mark.parametrize("way", MEANT_FOR)
def test_the_peak_is_fsdps_own_trackers(way, found):
    for rank in found:
        peaks, _, _, theirs = rank[way]
        assert peaks[0] == theirs
