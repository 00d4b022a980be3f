"""Which of a script's models are found, what they are called, and which are in training."""

import copy
import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

from gradmem_lib.measure.recording import Recording
from gradmem_lib.measure.timeline import MemorySnapshot
from gradmem_lib.names import CATEGORIES, MOMENTS
from gradmem_lib.run.models import FoundModels
from gradmem_lib.run.report import Report
from gradmem_lib.run.steps import KEPT, StepPeaks, in_rows
from gradmem_lib.run.tracking import ScriptRecording, ScriptTracker
from gradmem_lib.view.diagnosis import diagnose


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return self.down(self.up(x).relu())


def nbytes(module):
    return sum(p.nbytes for p in module.parameters())


@pytest.fixture
def tracker():
    made = ScriptTracker(None)
    with made:
        yield made


def train(model, optimizer, x, target=0):
    (model(x) - target).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def follow(student, teacher, optimizer, no_grad=True):
    """Steps towards what a teacher says."""
    for _ in range(3):
        x = torch.randn(4, 16)
        with torch.set_grad_enabled(not no_grad):
            target = teacher(x)
        train(student, optimizer, x, target.detach())


def ended(tracker):
    """The bytes of parameters at the peak, the names of their holders, and the causes."""
    tracker.end()
    names = {h.module for h in tracker.holders() if h.category == "parameters"}
    causes = {cause.name: cause for cause in diagnose(tracker).causes}
    return tracker.peak.by_category["parameters"], names, causes


SECOND, COPIES = "A second model is in memory", "The weights are there more than once"


def test_a_model_is_known_by_its_class_when_it_is_gone(tracker):
    model = Net()
    expected, parts = nbytes(model), len(list(model.parameters()))
    optimizer = sgd(model)
    for _ in range(2):
        train(model, optimizer, torch.randn(4, 16))
    del model, optimizer
    gc.collect()
    found, names, _ = ended(tracker)
    assert found == tracker.peak.by_category["gradients"] == expected
    assert names == {"Net.up.weight", "Net.up.bias", "Net.down.weight", "Net.down.bias"}
    assert len(tracker.facts.structure.shapes) == parts


def test_two_models_with_two_optimizers_are_both_in_training(tracker):
    one, two = Net(32), Net(48)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (one, two)]
    for _ in range(3):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            train(model, optimizer, torch.randn(4, 16))
    found, names, causes = ended(tracker)
    assert found == nbytes(one) + nbytes(two)
    assert {"Net.up.weight", "Net 2.up.weight"} <= names
    assert not tracker.facts.untrained and SECOND not in causes


@pytest.mark.parametrize(
    ("no_grad", "late"), [(True, False), (False, False), (True, True)], ids=str
)
def test_a_teacher_is_a_second_model(tracker, no_grad, late):
    student, teacher = Net(8), Net(512)
    optimizer = torch.optim.Adam(student.parameters())
    if late:  # the student is in training before the teacher is called
        train(student, optimizer, torch.randn(4, 16))
    follow(student, teacher, optimizer, no_grad)
    found, _, causes = ended(tracker)
    assert found == nbytes(student) and causes[SECOND].nbytes == nbytes(teacher)
    assert {line.function for line in causes[SECOND].lines} == {"Net.__init__"}


@pytest.mark.parametrize("widths", [(512, 32), (32, 512)])
def test_of_several_trainings_the_one_at_the_peak_is_told(tracker, widths):
    def training(width):
        student, teacher = Net(8), Net(width)
        follow(student, teacher, torch.optim.Adam(student.parameters()))
        return nbytes(teacher)

    largest = max([training(width) for width in widths])
    _, _, causes = ended(tracker)
    assert causes[SECOND].nbytes == largest
    shapes = tracker.facts.structure.shapes
    assert len(shapes) == 4 and len({name.split(".")[0] for name in shapes}) == 1
    assert len(tracker.meter.models.found) == 2


def test_weights_that_a_trained_and_an_untrained_model_share_are_there_once(tracker):
    base = nn.Linear(16, 100).requires_grad_(False)
    policy = nn.Sequential(base, nn.Linear(100, 100))
    reference = nn.Sequential(base, nn.Softmax(-1))
    follow(policy, reference, sgd(policy[1]))
    found, _, causes = ended(tracker)
    assert found == nbytes(policy) and not {COPIES, SECOND} & causes.keys()


def test_a_model_is_in_training_once_its_parameters_are_added_to_the_optimizer(tracker):
    head, encoder = Net(8), Net(64)
    optimizer = sgd(head)
    with torch.no_grad():
        x = encoder(torch.randn(4, 16))
    train(head, optimizer, x)
    optimizer.add_param_group({"params": encoder.parameters()})
    for _ in range(2):
        train(head, optimizer, encoder(torch.randn(4, 16)))
    assert ended(tracker)[0] == nbytes(head) + nbytes(encoder)
    assert not tracker.facts.untrained


def test_a_reference_with_the_same_shapes_is_a_second_copy(tracker):
    model = Net(256)
    follow(model, copy.deepcopy(model).requires_grad_(False), sgd(model))
    cause = ended(tracker)[2][COPIES]
    assert cause.nbytes == nbytes(model) and "not the tracked one" in cause.evidence


def test_slices_of_a_network_are_its_layers(tracker):
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = sgd(net)
    for _ in range(3):
        train(net[2:], optimizer, net[:2](torch.randn(4, 16)))
    found, _, causes = ended(tracker)
    assert found == nbytes(net) and COPIES not in causes and not tracker.facts.untrained


def test_a_wrapper_takes_the_place_of_what_it_wraps():
    models, inner = FoundModels(Recording(torch.device("cpu"))), Net()
    assert models.add(inner, with_grad=True) and not models.add(inner, with_grad=True)
    assert not models.add(inner.up, with_grad=True)  # a part of it
    assert not models.add(nn.MSELoss(), with_grad=True)  # nothing to train
    wrapper = nn.Sequential(inner)
    assert models.add(wrapper, with_grad=True) and models.note_step(sgd(inner))
    assert next(name for name, _ in models.named_modules()) == "Sequential"
    assert models.name_of(inner.up) == "Sequential.0.up"
    assert len(models.found) == 1


def test_a_loop_by_hand_and_a_script_without_gradients_have_their_models_in_use():
    by_hand, sampled = [FoundModels(Recording(torch.device("cpu"))) for _ in range(2)]
    used, unused = Net(), Net()
    by_hand.add(used, with_grad=True)
    by_hand.add(unused, with_grad=False)
    by_hand.note_step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    assert {id(p) for _, p in by_hand.named_parameters()} == set(map(id, used.parameters()))
    sampled.add(unused, with_grad=False)
    assert {id(p) for _, p in sampled.named_parameters()} == set(map(id, unused.parameters()))


def test_what_a_tracker_refuses_becomes_a_note(tracker):
    import threading

    model = Net()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(4, 16)
    expected = model(x)
    assert torch.equal(compiled(x), expected)
    thread = threading.Thread(target=lambda: model(x))
    thread.start()
    thread.join()
    tracker.end()
    notes = "\n".join(tracker.notes)
    assert "uncompiled" in notes and "another thread" in notes


def test_an_error_of_the_measurement_does_not_reach_the_script(tracker, monkeypatch):
    model = Net()
    monkeypatch.setattr(tracker.meter, "_count_reads", lambda *args: 1 / 0)
    assert model(torch.ones(2, 16)).shape == (2, 16)
    monkeypatch.undo()
    tracker.end()
    assert "ZeroDivisionError" in "".join(tracker.notes)


class Storage:
    """As much of a storage as a recording asks for, on a device that is not here."""

    def __init__(self, device, size):
        self.device, self.size, self._cdata = torch.device(device), size, id(self)

    def nbytes(self):
        return self.size

    def data_ptr(self):
        return id(self)


def test_from_an_accelerators_first_storage_on_only_its_bytes_count():
    recording = ScriptRecording(torch.device("cpu"), 100)
    on_cpu, on_card, later = Storage("cpu", 64), Storage("cuda:0", 256), Storage("cpu", 32)
    recording.on_alloc(on_cpu, 0)
    recording.sample()
    assert recording.total == 64
    recording.on_alloc(on_card, 0)
    recording.on_alloc(later, 0)
    recording.sample()
    del on_cpu
    recording.drain()
    assert recording.total == 256 and recording.device == torch.device("cuda")
    assert recording.at(recording.run_peak).total == 256
    assert recording.rows()[:, 2].tolist() == [0, 256]


def test_bytes_of_several_cards_are_added_up_and_the_report_says_so():
    tracker = ScriptTracker(None)
    recording = tracker.recording
    kept = [Storage("cuda:0", 256), Storage("cuda:1", 128)]
    recording.on_alloc(kept[0], 0)
    assert not any("cards" in note for note in tracker.notes)
    recording.on_alloc(kept[1], 0)
    assert recording.total == 384
    assert any("uses 2 cards, and their bytes are added up" in note for note in tracker.notes)


def highest_of_each_moment(timeline):
    highest = {}
    for moment, total in zip(timeline.moments, timeline.totals, strict=True):
        highest[moment] = max(total, highest.get(moment, 0))
    return highest


def test_the_highest_of_each_moment_is_exact_in_a_long_run(monkeypatch):
    measured = []
    for samples in (4, 10**6):
        monkeypatch.setattr("gradmem_lib.measure.tracker.TIMELINE_SAMPLES", samples)
        model = Net()
        with ScriptTracker(None) as tracker:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(4):
                train(model, optimizer, torch.randn(256, 16))
                with torch.no_grad():
                    model(torch.randn(8, 16))
            tracker.end()
        measured.append(tracker)
    short, long = measured
    expected = highest_of_each_moment(long.timeline)
    assert len(expected) == len(MOMENTS)
    assert highest_of_each_moment(short.timeline) != expected
    report = Report.of(short, "train.py", ended="", failed=False, error="")
    assert dict(report.by_moment()) == expected
    assert short.peak_by_phase == long.peak_by_phase
    totals = [total for _, total in report.by_moment()]
    assert totals == sorted(totals, reverse=True) and totals[0] == short.peak.total


def snapshot(total):
    return MemorySnapshot(total, dict.fromkeys(CATEGORIES, 0), "backward", "backward")


def test_a_long_run_keeps_a_bounded_list_and_its_highest_step():
    steps = StepPeaks()
    for step in range(1, 5001):
        steps.add(snapshot(10_000 if step == 3333 else step), step, step)
    assert len(steps.peaks) < KEPT
    rows = in_rows(steps.peaks, 40)
    assert len(rows) <= 40 and rows[0].first == 1 and rows[-1].last == 5000
    assert all(a.last + 1 == b.first for a, b in pairwise(rows))
    [highest] = [row for row in rows if row.total == 10_000]
    assert highest.first <= 3333 <= highest.last
