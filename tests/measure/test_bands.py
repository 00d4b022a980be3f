"""What a timeline says of a run beside its bytes: those that grow, and the sizes of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from support import oom
from support.oom import evaluations, growth

from gradmem_lib import diagnose
from gradmem_lib.names import CATEGORIES

SIZE = 4 * 512 * 64  # bytes of an output in these programs


def test_the_band_is_what_the_program_keeps():
    timeline = growth.losses_in_a_list().timeline
    band = timeline.growing[:, CATEGORIES.index("activations")]
    assert np.array_equal(band, timeline.growing.sum(axis=1))
    seen = sorted(set(band.tolist()))
    assert seen == [SIZE * kept for kept in range(oom.STEPS)]
    # Each step adds one output, in its own forward.
    for step in range(oom.STEPS - 1):
        of_step = band[np.array(timeline.steps) == step]
        assert (of_step[0], of_step[-1]) == (SIZE * step, SIZE * (step + 1))


@pytest.mark.parametrize(
    "program",
    [
        growth.losses_in_a_list,
        growth.outputs_after_a_warm_up,
        evaluations.logits_in_a_list,
        growth.predictions_joined_in_each_step,  # the shorter one is there beside the longer
    ],
)
def test_the_band_has_as_many_bytes_as_the_cause(program):
    tracker = program()
    timeline = tracker.timeline
    at_peak = timeline.growing[timeline.peak_index]
    assert at_peak.sum() == diagnose(tracker).causes[0].nbytes > 0
    assert (timeline.growing <= timeline.rows[:, 3:9]).all()
    shown = timeline.decimate(40)
    assert (shown.growing.sum(axis=1) == at_peak.sum()).any()


def test_a_tensor_that_a_longer_one_replaces_has_a_band():
    timeline = growth.predictions_joined_in_each_step().timeline
    band = timeline.growing.sum(axis=1)
    ends = []
    for step in sorted(set(timeline.steps))[:-1]:  # the last one is replaced by nothing
        ends.append(int(band[np.array(timeline.steps) == step][-1]))
    rises = np.diff(ends)
    assert len(ends) >= 6 and (rises > 0).all()
    assert rises.max() == rises.min()  # each step adds as much


def test_there_is_no_band_where_nothing_grows():
    timeline = growth.the_last_outputs().timeline
    assert timeline.growing is None and timeline.batches == ()
