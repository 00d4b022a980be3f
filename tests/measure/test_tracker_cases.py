"""MemoryTracker where programs do what a plain training step does not: wrappers, copies,
transforms, closures, threads.
"""

from types import SimpleNamespace

import pytest
import torch
from support.oracle import nbytes, states
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradmem_lib import BudgetExceeded, MemoryTracker, predict
from gradmem_lib.course import run_ranks
from gradmem_lib.measure.meter import Meter
from gradmem_lib.measure.recording import Recording
from gradmem_lib.measure.timeline import Timeline
from gradmem_lib.prediction.question import CannotTrace


class Int8(torch.Tensor):
    """Looks like float32, and holds one byte a number and a scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device, strides=codes.stride()
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Int8(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int8(args[0].codes.detach(), args[0].scale.detach())
        plain = [a.codes.float() * a.scale if isinstance(a, Int8) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_a_quantized_weight_counts_what_is_inside():
    model = nn.Linear(64, 32, bias=False)
    codes, scale = torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1)
    model.weight = nn.Parameter(Int8(codes, scale), requires_grad=False)
    x = torch.randn(4, 64)
    with MemoryTracker(model) as tracker:
        assert tracker.current.by_category["parameters"] == codes.nbytes + scale.nbytes
        with torch.no_grad():
            model(x)
    with pytest.raises(
        CannotTrace, match=r"the model holds a Int8, .*measure one real step with MemoryTracker"
    ):
        predict(model, batch=x, target="cpu")
    # codes, scale, batch, and within the operation: the codes in float32, and their product with
    # the scale
    assert tracker.peak.total == codes.nbytes + scale.nbytes + x.nbytes + 2 * 4 * 32 * 64


def test_a_weight_in_bitsandbytes_4_bits_counts_its_scales_and_theirs():
    """Which lie beside it."""
    layer = nn.Linear(64, 32, bias=False)
    tensors = [torch.ones(n) for n in (32, 16, 4, 256, 1)]
    absmax, code, absmax2, code2, offset = tensors
    nested = SimpleNamespace(absmax=absmax2, code=code2, state2=None)
    layer.weight.quant_state = SimpleNamespace(
        absmax=absmax, code=code, offset=offset, shape=(32, 64), state2=nested
    )
    with MemoryTracker(layer) as tracker:
        kept = sum(t.nbytes for t in (layer.weight, *tensors))
        assert tracker.current.by_category["parameters"] == tracker.current.total == kept


# Where the numbers of each row or column begin, where they stand in it, and what they are: eight
# bytes for each place, and four for each number. Blocks have 2 x 2 numbers.
SPARSE = {
    "to_sparse_csr()": 8 * 7 + 8 * 3 + 4 * 3,
    "to_sparse_csc()": 8 * 5 + 8 * 3 + 4 * 3,
    "to_sparse_bsr((2, 2))": 8 * 4 + 8 * 2 + 4 * 8,
    "to_sparse_bsc((2, 2))": 8 * 3 + 8 * 2 + 4 * 8,
}


@pytest.mark.parametrize("convert", SPARSE)
def test_a_compressed_sparse_tensor_counts_its_three_parts(convert):
    dense = torch.zeros(6, 4)
    dense[0, 1] = dense[3, 0] = dense[3, 1] = 1.0
    made = eval(f"dense.{convert}.clone()")  # a clone has no more bytes than it needs
    with MemoryTracker() as tracker:
        copied = made.clone()
        assert copied.layout == made.layout
        assert tracker.current.total == 2 * SPARSE[convert]


class Unnamed(torch.Tensor):
    """A wrapper that does not say what is inside."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = [codes]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_bytes_of_subclasses_are_their_own_or_those_of_what_is_inside():
    plain, codes = torch.ones(3), torch.ones(5, dtype=torch.int8)
    own = plain.as_subclass(type("Named", (torch.Tensor,), {}))
    named = Int8(codes, torch.ones(1))
    named.cache = torch.ones(100)  # not among those that it names
    for tensors, expected in (([plain, own], 12), (Unnamed(codes), 5), (named, 5 + 4)):
        with MemoryTracker() as tracker:
            tracker.watch(tensors, "other")
            assert tracker.current.total == expected


def sharded_here():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with MemoryTracker(model, optimizer) as tracker:
        start = tracker.current.total
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return start, tracker.current


def test_fsdp_shards_count_their_own_half():
    half = 4 * 64 * 64 * 4 // 2
    for start, now in run_ranks(sharded_here):
        assert start == now.by_category["parameters"] == half
        assert now.by_category["optimizer"] == 2 * half + 4 * 4
        assert now.total < 4 * half, "what FSDP frees by resizing is gone from the count"


def test_a_storage_that_is_resized_is_seen_at_once():
    with MemoryTracker() as tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert tracker.current.total == 0
        x.untyped_storage().resize_(400)
        assert tracker.current.total == 400


def test_zeros_of_forward_mode_take_no_bytes():
    with MemoryTracker() as tracker:
        zeros = torch._efficientzerotensor((64, 64))
        assert tracker.current.total == 0
    assert zeros._is_zerotensor()


def test_lbfgs_has_states_in_lists_and_phases_within_its_step():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(8, 16)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with MemoryTracker(model) as tracker:
        optimizer.step(closure)
        now = tracker.current
    assert now.by_category["optimizer"] == nbytes(states(dict(optimizer.state)))
    assert all(tracker.peak_by_phase[p] for p in ("forward", "backward", "optimizer_step"))


def test_what_a_budget_stops_in_a_first_step_counts_the_states_that_have_come():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    size = 64 * 64 * 4
    with (
        pytest.raises(BudgetExceeded) as caught,
        MemoryTracker(model, budget=6 * size + 4096),
    ):
        # two weights, two gradients, and the moments of one
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    have_come = nbytes(states(dict(optimizer.state)))
    # What is asked for is a state too, though the optimizer has not put it into its states yet.
    assert caught.value.asked == size and have_come >= 2 * size
    assert caught.value.snapshot.by_category["optimizer"] == have_come + size
    assert caught.value.snapshot.by_category["temporaries"] == 0


def test_a_part_without_gradients_does_not_make_the_rest_a_forward_without():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.weight = nn.Linear(16, 16), nn.Parameter(torch.ones(16, 16))

        def forward(self, x):
            with torch.no_grad():
                x = self.frozen(x)
            return x @ self.weight

    model, x = Half(), torch.ones(4, 16)
    with MemoryTracker(model) as tracker:
        y = model(x)
        now = tracker.current.by_category
    assert (
        now["activations"] == x.nbytes + y.nbytes and now["temporaries"] == 0
    )  # the frozen part's output is as x


def test_a_view_of_something_older_that_backward_takes_is_no_bucket():
    """DDP's buckets were there from the start; whatever else backward looks at is counted from then
    on.
    """
    older = torch.ones(100_000)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            older.view(-1)
            return d

    model = nn.Linear(8, 8)
    with MemoryTracker(model) as tracker:
        Looks.apply(model(torch.ones(1, 8))).sum().backward()
    assert tracker.peak_by_phase["forward"] < older.nbytes < tracker.peak_by_phase["backward"]
    assert [h.module for h in tracker.largest_at_peak(99) if h.nbytes == older.nbytes] == [""]


def test_what_is_watched_is_part_of_the_peak_at_once_and_phases_that_were_not_are_0():
    older = torch.ones(1000)
    with torch.device("meta"):
        # the default device would be counted otherwise
        tracker = MemoryTracker(device="cpu")
    with tracker:
        elsewhere = torch.ones(7, device="meta")
        tracker.watch([older, elsewhere], "optimizer")
        assert tracker.peak.by_category["optimizer"] == tracker.peak.total == older.nbytes
    assert tracker.peak_by_phase == {
        "idle": older.nbytes,
        "forward": 0,
        "backward": 0,
        "optimizer_step": 0,
    }
    assert tracker.timeline.events[0] == 0


@pytest.mark.parametrize("foreach", [False, True])
def test_the_picture_tells_what_the_figures_tell(foreach):
    """In a first step states are named as soon as the step is over, and past samples with them."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 512, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    with MemoryTracker(model, optimizer) as tracker:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    timeline, peak = tracker.timeline, tracker.peak
    at = timeline.peak_index
    assert {name: values[at] for name, values in timeline.by_category.items()} == peak.by_category
    assert max(timeline.by_category["gradients"]) == sum(p.nbytes for p in model.parameters())
    last = timeline.by_category["optimizer"][-1]
    assert (
        last == tracker.current.by_category["optimizer"] == max(timeline.by_category["optimizer"])
    )
    on_the_way = []
    for nbytes_then, phase in zip(timeline.by_category["optimizer"], timeline.phases, strict=True):
        if phase == "optimizer_step" and 0 < nbytes_then < last:
            on_the_way.append(nbytes_then)
    assert len(on_the_way) >= 3, "as they came, not all at the end"


def test_bytes_that_a_kernel_has_for_a_moment_are_in_the_peak_and_gone_after():
    class Knows(Recording):
        def scratch(self, func, args):
            return 1000 if func is torch.ops.aten.mm.default else 0

    recording = Knows(torch.device("cpu"))
    with Meter(None, [], recording):
        x = torch.ones(4, 4)
        y = x @ x
        kept = x + y
    assert recording.total == x.nbytes + y.nbytes + kept.nbytes
    assert recording.at(recording.run_peak).total == x.nbytes + y.nbytes + 1000
    temporaries = Timeline(recording.rows()).by_category["temporaries"]
    assert sorted(temporaries)[-2:] == [0, 1000] and temporaries[-1] == 0
