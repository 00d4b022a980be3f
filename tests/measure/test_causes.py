"""Each cause is found in programs that have it, its remedy takes away the bytes that were said, and
programs that only look like it are not accused.
"""

from __future__ import annotations

import pytest
from support import oom_programs as programs

from gradmem_lib import diagnose

GROWS = "Bytes grow from step to step"
COLLECTED = "An evaluation collects its results"
UNUSED = "A forward's graph is never used"
ADDED_UP = "Losses are added up before one backward"
COPIED = "The weights are there more than once"
SECOND = "A second model is in memory"
FIRST_STEP = "The first optimizer step makes its states"
WIDE = "Weights are wider than needed"
LOGITS = "The logits are the largest part"
SCORES = "Attention stores its scores"
IDLE = "Checkpointing is on and does nothing"
EVALUATION = "An evaluation is the peak"
GENERATION = "Generation keeps keys and values"

HAVE = {
    programs.losses_in_a_list: GROWS,
    programs.detached_losses_in_a_list: GROWS,
    programs.outputs_in_a_list: GROWS,
    programs.metrics_with_their_graph: GROWS,
    programs.batches_in_a_list: GROWS,
    programs.logits_in_a_list: COLLECTED,
    programs.logits_in_one_tensor: COLLECTED,
    programs.hidden_states_in_a_list: COLLECTED,
    programs.one_large_evaluation: EVALUATION,
    programs.generation: GENERATION,
    programs.validation_with_gradients: UNUSED,
    programs.sampling_with_gradients: UNUSED,
    programs.scores_with_gradients: UNUSED,
    programs.losses_added_up: ADDED_UP,
    programs.losses_in_a_stack: ADDED_UP,
    programs.deepcopy_at_save: COPIED,
    programs.cloned_state_dict: COPIED,
    programs.average_before_the_block: COPIED,
    programs.reference_model: COPIED,
    programs.checkpoint_after_resume: COPIED,
    programs.teacher: SECOND,
    programs.convolutional_teacher: SECOND,
    programs.first_step: FIRST_STEP,
    programs.first_step_of_a_convolution: FIRST_STEP,
    programs.double_weights: WIDE,
    programs.frozen_float32: WIDE,
    programs.large_vocabulary: LOGITS,
    programs.stored_scores: SCORES,
    programs.own_scores: SCORES,
    programs.checkpointing_in_eval_mode: IDLE,
    programs.reentrant_on_frozen_inputs: IDLE,
    programs.ignored_switch: IDLE,
}
DO_NOT_HAVE = {
    programs.numbers_in_a_list: GROWS,
    programs.the_last_outputs: GROWS,
    programs.the_best_outputs: GROWS,
    programs.counted_evaluation: COLLECTED,
    programs.one_large_evaluation: COLLECTED,
    programs.generation: COLLECTED,
    programs.logits_in_a_list: GENERATION,
    programs.ordinary_training: UNUSED,
    programs.frozen_second_forward: UNUSED,
    programs.losses_added_up: UNUSED,
    programs.recurrent_cell: ADDED_UP,
    programs.two_views: ADDED_UP,
    programs.ordinary_training: ADDED_UP,
    programs.copy_of_one_layer: COPIED,
    programs.gradients_kept_for_logging: COPIED,
    programs.teacher: COPIED,
    programs.reference_model: SECOND,
    programs.small_helper_module: SECOND,
    programs.a_later_step: FIRST_STEP,
    programs.frozen_bf16: WIDE,
    programs.first_step: WIDE,
    programs.wide_hidden_layer: LOGITS,
    programs.square_images: SCORES,
    programs.working_checkpoints: IDLE,
    programs.logits_in_one_tensor: EVALUATION,
}
# A smaller evaluation, or a second model in a narrower dtype, is still the largest part.
REMAIN = (EVALUATION, SECOND)
# The remedy of these takes away all that was said, except for numbers and what took its place.
TAKE_ALL = (GROWS, COPIED, ADDED_UP, COLLECTED, GENERATION)
SLACK = 0.03


def name(program) -> str:
    return program.__name__


@pytest.mark.parametrize("program", HAVE, ids=name)
def test_a_program_is_told_its_cause_first_and_the_remedy_takes_the_bytes_away(program):
    before = diagnose(program())
    assert before.causes, before
    cause = before.causes[0]
    assert cause.name == HAVE[program]
    after = diagnose(program(remedied=True))
    if cause.name not in REMAIN:
        assert cause.name not in [other.name for other in after.causes]
    if program is not programs.reentrant_on_frozen_inputs:  # its layers learn nothing before
        assert after.peak.total < before.peak.total
    if cause.name in TAKE_ALL:
        said = before.peak.total - cause.nbytes
        assert after.peak.total <= said + SLACK * before.peak.total
    text = str(before)
    assert text.index(cause.evidence) < text.index("What ")
    assert f"Remedy: {cause.remedy}" in text


@pytest.mark.parametrize("program", DO_NOT_HAVE, ids=name)
def test_a_program_that_only_looks_like_it_is_not_accused(program):
    assert DO_NOT_HAVE[program] not in [cause.name for cause in diagnose(program()).causes]
