"""What MemoryTracker keeps of a run: samples, phases, peaks and laps."""

import pytest
import torch
from support.steps import build
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker, Timeline
from gradmem_lib.measure.recording import Recording
from gradmem_lib.names import CATEGORIES


def test_phases_come_back_step_after_step_under_checkpointing():
    """Recomputation leaves a block's forward early, by an exception: the next forward must still be
    seen as one.
    """
    model, opt, _, step = build("llama", checkpointed=True)
    with MemoryTracker(model, opt) as tracker:
        for _ in range(3):
            step()
    phases = tracker.timeline.phases
    order = [p for i, p in enumerate(phases) if p != "idle" and (i == 0 or phases[i - 1] != p)]
    assert order == ["forward", "backward", "optimizer_step"] * 3


def fails_in_its_forward(model):
    model(input_ids=torch.full((1, 4), 10**6))


def fails_in_a_step(model):
    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise IndexError

    Broken(model.parameters()).step()


@pytest.mark.parametrize("fails", [fails_in_its_forward, fails_in_a_step])
def test_what_failed_leaves_the_next_step_right(fails):
    model, opt, _, step = build("llama")
    found = []
    for first in (fails, lambda model: 1 / 0):
        with MemoryTracker(model, opt) as tracker:
            with pytest.raises((IndexError, ZeroDivisionError)):
                first(model)
            step()
        assert tracker.peak_by_phase["forward"] > 0 and tracker.peak_by_phase["backward"] > 0
        found.append(tracker.timeline.by_category["activations"][-1])
    assert found[0] == found[1]


def test_laps_have_peaks_of_their_own_and_the_run_keeps_its_own():
    with MemoryTracker() as tracker:
        small = torch.ones(1000)
        first = tracker.window_peak()
        large = torch.ones(5000)
        del large
        second = tracker.window_peak()
        middle = torch.ones(2000)
        third = tracker.window_peak()
        assert [lap.total for lap in (first, second, third)] == [4000, 24000, 12000]
        assert tracker.peak == second
        assert [holder.nbytes for holder in tracker.largest_at_peak()] == [20000, 4000]
        del middle
        highest = torch.ones(9000)
    assert tracker.peak.total == 4000 + 36000
    assert [holder.nbytes for holder in tracker.largest_at_peak()] == [36000, 4000]
    assert small.numel() + highest.numel() == 10000


@pytest.mark.parametrize("keep", [4, 6, 16])
@pytest.mark.parametrize("n", [3, 4, 5, 9, 40, 123])
def test_a_long_run_is_thinned_to_the_largest_of_equal_windows(keep, n):
    recording, totals = Recording(torch.device("cpu"), max_samples=keep), torch.randperm(n).tolist()
    for recording.total in totals:
        recording.sample()
    window = 1
    while -(-n // window) > keep:
        window *= 2
    assert Timeline(recording.rows()).totals == [
        max(totals[i : i + window]) for i in range(0, n, window)
    ]


def test_states_that_were_there_are_in_every_sample():
    """Of an optimizer that was not given: they are found when it steps."""
    model, opt, _, step = build("mlp")
    step()
    states = sum(t.nbytes for state in opt.state.values() for t in state.values())
    model.zero_grad(set_to_none=True)
    with MemoryTracker(model) as tracker:
        step()
        lap = tracker.window_peak()
    parts = tracker.timeline.by_category
    assert min(parts["optimizer"]) == states == lap.by_category["optimizer"]
    assert [sum(each) for each in zip(*parts.values(), strict=True)] == tracker.timeline.totals
    assert (
        lap.total
        == sum(lap.by_category.values())
        == tracker.peak.total
        == max(tracker.timeline.totals)
    )
    assert tracker.peak_by_phase["forward"] == max(
        n
        for n, phase in zip(tracker.timeline.totals, tracker.timeline.phases, strict=True)
        if phase == "forward"
    )


def test_peaks_begin_anew_from_what_is_live():
    with MemoryTracker() as tracker:
        kept = torch.ones(1000)
        torch.ones(9000)
        tracker.reset_peak()
        assert tracker.peak.total == 4000
        torch.ones(500)
        assert tracker.peak.total == 6000 == tracker.peak_by_phase["idle"]
        assert tracker.window_peak().total == 6000
    assert max(tracker.timeline.totals) == 40_000 and kept.numel() == 1000


def test_no_bytes_are_held_by_nobody():
    with MemoryTracker() as tracker:
        empty, one = torch.empty(0), torch.ones(1)
    assert [holder.nbytes for holder in tracker.largest_at_peak()] == [
        4
    ] and empty.numel() < one.numel()


def test_what_is_freed_is_seen_with_the_next_operation():
    with MemoryTracker() as tracker:
        kept = torch.ones(10)
        large = torch.ones(1000)
        del large
        kept.add_(1)
        kept.add_(1)
        assert tracker.timeline.totals == [0, 40, 4040, 40]


def test_weights_that_nobody_dispatched_are_found_by_the_next_forward():
    model, other = torch.nn.Linear(10, 1, bias=False), torch.nn.Parameter(torch.ones(1, 100))
    model.forward = lambda x: x  # no operation
    with MemoryTracker(model) as tracker:
        model.weight = other
        model(None)
        assert tracker.peak.total == 400 == tracker.timeline.totals[-1]


def test_what_a_larger_size_asks_for_is_what_it_adds():
    storage = torch.ones(100).untyped_storage()
    with pytest.raises(BudgetExceeded) as caught, MemoryTracker(budget=900) as tracker:
        tracker.watch(torch.empty(0).set_(storage), "other")
        storage.resize_(1000)
    assert (caught.value.asked, caught.value.snapshot.total) == (600, 1000)


class Force(nn.Module):
    """An energy's slope, as in models of molecules, and a weight for it that is drawn anew."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(20, 1)

    def forward(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return slope * (torch.rand_like(x) + 1)


def test_what_follows_a_gradient_within_a_forward_is_forward():
    model, x = Force(), torch.ones(50, 20)
    with MemoryTracker(model) as tracker:
        out = model(x)
        assert tracker.timeline.phases[-2:] == ["forward", "forward"]
        assert tracker.current.by_category["other"] == x.nbytes
        out.sum().backward()
        torch.rand(7)
    assert tracker.timeline.phases[-1] == "idle"


def test_blocks_add_up_to_the_bytes_by_category_of_each_sample():
    """In a run of few storages all have a block, but for the scratch memory of kernels."""
    net = torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.Tanh(), torch.nn.Linear(70, 9))
    adam = torch.optim.Adam(net.parameters(), foreach=False)
    with MemoryTracker(net, adam) as tracker:
        assert tracker.timeline.blocks == ()
        for _ in range(2):
            net(torch.ones(11, 30)).square().sum().backward()
            adam.step()
            adam.zero_grad()
    for shown in (tracker.timeline, tracker.timeline.decimate(20)):
        found = {name: [0] * len(shown) for name in CATEGORIES}
        for block in shown.blocks:
            for sample in range(block.start, block.stop):
                found[block.holder.category][sample] += block.holder.nbytes
        assert found == shown.by_category
        weights = [b.holder for b in shown.blocks if b.holder.category == "parameters"]
        assert {holder.shape for holder in weights} == {(70, 30), (70,), (9, 70), (9,)}


def test_before_anything_runs_all_is_nought():
    with MemoryTracker() as tracker:
        pass
    assert (tracker.peak.total, tracker.peak.step, tracker.peak.turn) == (0, 0, 0)
    recording = Recording(torch.device("cpu"))
    for rows in (0, 1, 1, 0, 2):
        recording.note_batch(rows)
    assert [rows for _, rows in recording.batches] == [1, 2]
