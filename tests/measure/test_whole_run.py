"""What people's scripts hold around a training step is counted: second models, targets, states that
optimizers keep in objects; and each moment and line is the script's own.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from support.oracle import nbytes
from torch import nn

from gradmem_lib import MemoryTracker
from gradmem_lib.measure.moments import KEPT_PASSES
from gradmem_lib.measure.source_lines import SourceLine
from gradmem_lib.names import MOMENTS, PHASE_OF_MOMENT, PHASES

# Storages that no tracked module brings


def test_what_nobody_reads_stays_uncounted():
    unread = torch.zeros(1000)
    with MemoryTracker() as tracker:
        made = torch.ones(10) + 1
    assert tracker.current.total == made.nbytes and len(unread)


# States


class InObjects(torch.optim.Optimizer):
    """Keeps what GaLore, Shampoo and others keep: tensors in objects inside ``.state``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["projector"] = Projector(p)
                    state["history"] = deque([torch.zeros_like(p)], maxlen=2)
                p.sub_(p.grad, alpha=0.1)


class Projector:
    def __init__(self, p):
        self.basis = torch.zeros(len(p), 4)
        self.inner = {"scales": [torch.ones(len(p))], "owner": p}


class InAttributes(torch.optim.SGD):
    """Keeps what LAMB and bitsandbytes keep: tensors in attributes of its own."""

    def step(self, closure=None):
        if not hasattr(self, "table"):
            self.table = {"map": torch.zeros(256), "of": self.param_groups[0]["params"]}
        super().step(closure)


def states_of(optimizer):
    if isinstance(optimizer, InAttributes):
        return [optimizer.table["map"]]
    found = []
    for state in optimizer.state.values():
        inner = state["projector"]
        found += [inner.basis, *inner.inner["scales"], *state["history"]]
    return found


@pytest.mark.parametrize("kind", [InObjects, lambda p: InAttributes(p, lr=0.1)])
def test_states_count_wherever_an_optimizer_keeps_them(kind):
    model = nn.Linear(16, 8)
    optimizer = kind(model.parameters())
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    now = tracker.current.by_category
    assert now["optimizer"] == nbytes(states_of(optimizer))
    assert now["parameters"] == nbytes(model.parameters()) and now["other"] == 0


# Moments, steps, lines


def test_each_moment_of_a_script_has_its_name():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = {}
    with MemoryTracker(model, optimizer) as tracker:

        def moment(name):
            torch.ones(3)  # an operation that allocates
            found[name] = tracker.current.moment

        model[1].register_forward_hook(lambda *_: moment("inside"))
        for _ in range(2):
            out = model(torch.ones(4, 8))
            moment("loss")
            loss = out.square().mean()
            loss.backward()
            moment("after backward")
            optimizer.step()
            moment("after the step")
            optimizer.zero_grad()
        del found["inside"]
        with torch.no_grad():
            model(torch.ones(4, 8))
        moment("after an evaluation")
    assert found == {
        "loss": "loss",
        "after backward": "between steps",
        "after the step": "between steps",
        "inside": "evaluation or generation",
        "after an evaluation": "between steps",
    }
    assert set(tracker.timeline.moments) == set(MOMENTS)
    phases = [PHASES[PHASE_OF_MOMENT[MOMENTS.index(m)]] for m in tracker.timeline.moments]
    assert tracker.timeline.phases == phases


def test_a_second_models_forward_leaves_the_loss_due():
    """As in preference tuning: the reference runs without gradients between forward and loss."""
    model, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    with MemoryTracker(model) as tracker:
        out = model(torch.ones(2, 4))
        with torch.no_grad():
            other = reference(torch.ones(2, 4))
        margin = out - other
        assert tracker.current.moment == "loss"
        margin.sum().backward()


def test_a_module_without_weights_before_the_model_is_a_forward():
    crop, net = nn.Upsample(scale_factor=2), nn.Conv2d(1, 1, 3)
    with MemoryTracker(net) as tracker:
        x = crop(torch.rand(1, 1, 8, 8))
        moment = tracker.current.moment
        net(x).mean().backward()
    assert moment == "training forward"


def test_calls_of_losses_push_out_no_calls_of_a_model():
    net, criterion = nn.Linear(4, 4), nn.MSELoss()
    x = torch.randn(2, 4)
    with MemoryTracker(net) as tracker:
        first = net(x)
        for _ in range(KEPT_PASSES + 20):
            criterion(first, x)
        second = net(x)
    forwards = tracker.forwards
    of_models = [done for done in forwards if done.has_weights]
    assert len(of_models) == 2 and second.shape == first.shape
    assert forwards[0] is of_models[0] and forwards[-1] is of_models[1]


def test_a_backward_is_known_though_its_samples_were_thinned_out(monkeypatch):
    monkeypatch.setattr("gradmem_lib.measure.tracker.TIMELINE_SAMPLES", 8)
    net, x = nn.Linear(64, 64), torch.randn(4, 64)
    with MemoryTracker(net) as tracker:
        net(x).sum().backward()
        net.zero_grad()
        kept = [torch.empty(64, 64) for _ in range(2000)]
    assert kept and "backward" not in tracker.timeline.phases
    assert tracker.facts.had_backward and not tracker.facts.had_optimizer_step


def test_steps_are_counted_once_for_optimizers_that_step_together():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with MemoryTracker(model, optimizers) as tracker:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert tracker.steps == 3
    assert sorted(set(tracker.timeline.steps)) == [0, 1, 2]


def test_what_is_kept_says_its_step_and_the_line_that_made_it():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with MemoryTracker(model, optimizer) as tracker:
        for _ in range(4):
            out = model(torch.ones(64, 4))
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(out.detach().clone())
    own = [h for h in tracker.holders("now") if h.shape == (64, 4) and h.op == "aten.clone"]
    assert [h.step for h in sorted(own)] == [0, 1, 2, 3] and len(kept) == 4
    for holder in own:
        line = holder.line
        assert "kept.append(" in Path(line.file).read_text().splitlines()[line.line - 1]
        assert str(line).endswith(f"test_whole_run.py:{line.line}, in {line.function}")
        assert holder.dtype == torch.float32


def test_a_cell_is_called_as_ipython_calls_it():
    assert str(SourceLine("Cell In[3]", 5, "<module>")) == "Cell In[3], line 5"
