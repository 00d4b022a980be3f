"""What a tracker notes of each call of a module, beside what the test itself counts around the
same calls.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker
from gradmem_lib.model.structure import NO_MODEL


class Net(nn.Module):
    """Keeps nothing, and makes more than it returns."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


class Takes(nn.Module):
    """Takes anything, and makes nothing."""

    def forward(self, *args, **kwargs):
        return None


def test_what_is_alive_around_each_call():
    """The bytes before and after, and the most in between, as the test reads them itself; also
    where something was dropped right before, and inside at the very end.
    """
    net, x = Net(), torch.ones(16, 8)
    seen = []
    with MemoryTracker(net) as tracker:
        for with_grad in (True, False, True):
            dropped = torch.zeros(1000)
            del dropped
            before = tracker.current.total
            before += x.nbytes if not seen else 0  # it is counted as soon as a call reads it
            tracker.window_peak()
            with torch.set_grad_enabled(with_grad):
                out = net(x)
            seen.append((before, tracker.current.total, tracker.window_peak().total))
            if with_grad:
                out.sum().backward()
            del out
    found = [(p.live_before, p.live_after, p.peak) for p in tracker.forwards]
    found[0] = (found[0][0] + x.nbytes, *found[0][1:])  # its batch came with the call
    assert found == seen
    _, evaluation, _ = tracker.forwards
    assert evaluation.peak > evaluation.live_after
    assert [p.with_grad for p in tracker.forwards] == [True, False, True]
    assert [p.has_graph for p in tracker.forwards] == [True, False, True]
    assert [p.used for p in tracker.forwards] == [True, False, True]
    assert [p.used_in_turn for p in tracker.forwards] == [0, -1, 1]
    assert [p.turn for p in tracker.forwards] == [0, 0, 1]
    assert {p.line.function for p in tracker.forwards} == {"test_what_is_alive_around_each_call"}
    ends = [(p.first_sample, p.end_sample) for p in tracker.forwards]
    assert all(first < end for first, end in ends) and ends == sorted(ends)


def test_what_a_call_frees_when_it_returns_is_not_alive_after_it():
    class Drops(nn.Module):
        def forward(self, x):
            made = x * 2
            result = made + 1
            del made
            return result

    with MemoryTracker() as tracker:
        out = Drops()(torch.ones(100))
    [done] = tracker.forwards
    assert done.live_after == done.live_before + out.nbytes


def test_a_result_is_what_a_call_has_made_and_returned():
    same, x = nn.Identity(), torch.ones(9, requires_grad=True)
    with MemoryTracker() as tracker:
        out = nn.ReLU()(x)
        passed_on = x * 2
        same(out)
        same([passed_on, passed_on])
        at_once = nn.Tanh()(out)  # it is made by the first operation of its call
    results = {h.op: h.is_result for h in tracker.holders("now")}
    assert results["aten.relu"] and results["aten.tanh"] and not results["aten.mul.Tensor"]
    assert at_once.shape == x.shape


def test_no_result_of_a_call_that_raises():
    class Fails(Net):
        def forward(self, x):
            self.kept = super().forward(x)
            raise ValueError("as it should")

    fails, net, x = Fails(), Net(), torch.ones(16, 8)
    with MemoryTracker(net) as tracker:
        with pytest.raises(ValueError, match="as it should"):
            fails(x)
        net(x)
    raised, after = tracker.forwards
    assert raised.live_after and after.live_before == raised.live_after
    assert not any(h.is_result for h in tracker.holders("now"))


def test_a_loss_is_what_is_given_a_models_output_and_has_no_weights():
    net, loss = Net(), nn.CrossEntropyLoss(weight=torch.ones(8))
    with MemoryTracker(net) as tracker:
        out = net(torch.ones(16, 8))
        loss(out, torch.zeros(16, dtype=torch.long)).backward()
    model, criterion = tracker.forwards
    assert (model.chained, model.has_weights) == (False, True)
    assert (criterion.chained, criterion.has_weights) == (True, False)
    assert {"training forward", "loss", "backward"} <= set(tracker.timeline.moments)


class Hides:
    """It hides a model from the module that calls it."""

    def __init__(self, model):
        self.model = model


class Outer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.hidden = Hides(model)

    def forward(self, x):
        return self.hidden.model(x)


def test_a_module_that_hides_its_weights_has_them():
    outer, net = Outer(Net()), Outer(nn.Sequential(nn.ReLU()))
    with MemoryTracker() as tracker:
        outer(torch.ones(16, 8))
        net(torch.ones(16, 8))
    assert [p.has_weights for p in tracker.forwards] == [True, False]


def test_weights_that_were_computed_chain_a_call():
    net, x = Net(), torch.ones(16, 8)
    with MemoryTracker(net) as tracker:
        fast = {name: p * 0.5 for name, p in net.named_parameters()}
        functional_call(net, fast, x)
        net(x)
        net(torch.ones(16, 8, requires_grad=True).exp())
    assert [p.chained for p in tracker.forwards] == [True, False, True]


def test_of_a_call_with_computed_weights_it_is_not_said_that_no_optimizer_has_them():
    """The module's own weights, which no optimizer has, stand aside while it runs."""
    net, scale, x = Net(), nn.Parameter(torch.ones(())), torch.ones(16, 8)
    with MemoryTracker(net, SGD([scale], lr=0.1)) as tracker:
        made = {name: p.detach() * scale for name, p in net.named_parameters()}
        functional_call(net, made, x)
        net(x)
    assert [done.for_no_optimizer for done in tracker.forwards] == [False, True]


def test_calls_of_one_module_have_one_number_and_others_another():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    other, relu, x = nn.Linear(8, 8), nn.ReLU(), torch.ones(4, 8)
    with MemoryTracker(net) as tracker:
        for module in (net, other, relu, net, net[:-1], net[:-1], relu):
            module(x)
        for _ in range(3):
            nn.Linear(8, 8)(x)  # each may be at the address of the one before
    numbers = [p.number for p in tracker.forwards]
    first, of_other, of_relu, again, part, part_again, relu_again, *dropped = numbers
    assert again == first and relu_again == of_relu and part_again == part
    assert len({first, of_other, of_relu, *dropped}) == 6
    modes = [p.training_mode for p in tracker.forwards]
    assert all(modes)


def test_whose_weights_they_are():
    """Of the tracked model, of another one that is trained or that waits for its first step, or of
    one that no optimizer has.
    """
    net, trained, waiting, frozen, free = Net(), Net(), Net(), Net(), Net()
    frozen.requires_grad_(False)
    x = torch.ones(4, 8)
    stepping = SGD([*net.parameters(), *trained.parameters()], lr=0.1)
    waits = SGD(waiting.parameters(), lr=0.1)
    models = {"net": net, "trained": trained, "waiting": waiting, "frozen": frozen, "free": free}
    with MemoryTracker(net, [stepping, waits]) as tracker:
        for model in models.values():
            model.eval()
            model(x).sum()
        net(x).sum().backward()
        stepping.step()
        assert tracker.facts.optimized == {name for name, _ in net.named_parameters()}
    of = dict(zip(models, tracker.forwards, strict=False))
    assert {name for name, done in of.items() if done.has_tracked_weights} == {"net"}
    assert {name for name, done in of.items() if done.for_no_optimizer} == {"free"}
    assert {name for name, done in of.items() if done.waits_for_step} == {"waiting"}
    assert {name for name, done in of.items() if not done.has_graph} == {"frozen"}
    assert not any(done.training_mode for done in of.values())
    assert tracker.facts.optimized == {name for name, _ in net.named_parameters()}
    assert tracker.facts.untrained == frozenset()


def test_without_an_optimizer_nothing_is_known_of_one():
    net = Net()
    with MemoryTracker(net) as tracker:
        net(torch.ones(4, 8))
    assert tracker.facts.optimized is None
    with MemoryTracker() as tracker:
        pass
    assert tracker.facts.structure is NO_MODEL


def test_after_an_error_the_optimizers_that_wait_are_found():
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), MemoryTracker(net) as tracker:
        net(torch.ones(4, 8))
        raise ZeroDivisionError
    [done] = tracker.forwards
    assert done.waits_for_step and not done.for_no_optimizer
    assert tracker.facts.optimized and optimizer.param_groups


def test_rows_of_batches_and_where_they_change():
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with MemoryTracker(net, optimizer) as tracker:
        for rows in (4, 4, 6):
            with torch.no_grad():
                net(torch.ones(9, 8))
            for _ in range(2):  # the second one of a turn says nothing
                net(torch.ones(rows, 8)).sum()
                rows += 1
            net(torch.ones(rows, 8)).sum().backward()
            optimizer.step()
    assert [rows for _, rows in tracker.timeline.batches] == [4, 6]
    operations = [operation for operation, _ in tracker.timeline.batches]
    assert 0 < operations[0] < operations[1]


def test_a_batch_from_before_is_counted_where_it_is_given_and_named_so():
    net, x = Net(), torch.ones(16, 8)
    mask = {"mask": [torch.ones(7)]}
    with MemoryTracker(net) as tracker:
        Takes()(x, mask)
        [first] = tracker.forwards
        assert first.live_before + x.nbytes + 28 == tracker.current.total
        tracker.watch(x, "optimizer")
        net(x)
        held = {h.nbytes: h for h in tracker.holders("now") if h.step == -1}
    assert (held[x.nbytes].category, held[x.nbytes].module) == ("optimizer", "watched")
    assert (held[28].category, held[28].module) == ("other", "inputs")


def test_a_batch_that_goes_with_its_call_was_there():
    batches = [torch.ones(1000)]
    with MemoryTracker() as tracker:
        Takes()(batches.pop())
    assert (tracker.peak.total, tracker.current.total) == (4000, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again_in_backward_is_no_call(reentrant):
    net, x = Net(), torch.ones(16, 8, requires_grad=True)
    with MemoryTracker(net) as tracker:
        net(x).sum().backward()
        assert not tracker.facts.recomputed
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    assert len(tracker.forwards) == 2 and tracker.facts.recomputed


def test_a_layer_that_a_checkpoint_only_begins_again_is_recomputed():
    """Its backward needs the input alone, so that none of its operations runs again."""
    layer, x = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    with MemoryTracker(layer) as tracker:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert tracker.facts.recomputed


def test_modules_of_other_threads():
    """The tracked model is refused there, and another one is let through, uncounted. Without a
    model, all are refused.
    """
    net, other, x = Net(), Net(), torch.ones(16, 8)
    refused, done = [], []

    def run(module):
        try:
            done.append(module(x))
        except RuntimeError as error:
            refused.append(str(error))

    for tracked, modules in ((net, (net, net.first, other)), (None, (other,))):
        with MemoryTracker(tracked) as tracker:
            for module in modules:
                thread = threading.Thread(target=run, args=(module,))
                thread.start()
                thread.join()
        assert tracker.forwards == [] and "another thread" in refused[-1]
    assert [text.split()[0] for text in refused] == ["Net", "Linear", "Net"] and len(done) == 1


@pytest.mark.parametrize("place", ["", "inner"])
def test_a_model_that_is_compiled_is_refused_at_once_and_in_the_block(place):
    compiled = torch.compile(Net())
    model = nn.ModuleDict({place: compiled}) if place else compiled
    tracker = MemoryTracker(model)
    with pytest.raises(RuntimeError, match=f"^{place or 'OptimizedModule'} is compiled"), tracker:
        pass
    assert MemoryTracker._running is None
    refused = pytest.raises(RuntimeError, match=r"^OptimizedModule is compiled")
    with refused, MemoryTracker():
        compiled(torch.ones(16, 8))


def test_nothing_stays_after_the_block():
    """The model goes, its modules' names stay, and calls run as they did before."""
    net, x = Net(), torch.ones(16, 8)
    call, resize = nn.Module.__call__, torch.UntypedStorage.resize_
    with MemoryTracker(net) as tracker:
        out = net(x)
        tracker.window_peak()
        kept = net.first(x)
        wrapped = nn.Module.__call__  # as compiled code keeps it
        assert wrapped is not call
    assert nn.Module.__call__ is call and torch.UntypedStorage.resize_ is resize
    counted = len(tracker.forwards)
    wrapped(net, x).sum().backward()
    SGD(net.parameters(), lr=0.1).step()
    assert len(tracker.forwards) == counted and tracker.steps == 0
    gone = weakref.ref(net)
    out, kept = out.detach(), kept.detach()
    del net
    gc.collect()
    assert gone() is None
    names = {h.module for h in tracker.holders() if h.category == "activations"}
    assert "first" in names


def test_a_replaced_weight_is_found_at_the_next_call_and_at_the_end():
    net, x = Net(), torch.ones(16, 8)
    with MemoryTracker(net) as tracker:
        net.first = nn.Linear(8, 64, bias=False)
        net(x)
        mine = {h.module for h in tracker.holders("now") if h.category == "parameters"}
        assert "first.weight" in mine and "first.bias" not in mine
        net.last = nn.Linear(64, 16, bias=False)
    after = tracker.current.by_category["parameters"]
    assert after == sum(p.nbytes for p in net.parameters())


def test_a_list_that_holds_what_grows_is_found_when_a_call_begins():
    net, kept = Net(), []
    x = torch.ones(64, 8)
    with MemoryTracker(net) as tracker:
        for _ in range(6):
            kept.append(net(x))
        del net
    held = [h.held for h in tracker.holders("now") if h.held is not None]
    assert any("kept" in str(each) for each in held)
    assert len(kept) == 6
