"""Each cause is found in programs that have it, its remedy takes away the bytes that were said, and
programs that only look like it are not accused.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import oom_programs as programs
from support import oom_programs_around as around
from support import oom_programs_kept as kept
from support import oom_programs_mistaken as mistaken
from support import oom_programs_of_loops as loops
from support import oom_programs_of_tensors as tensors
from support import oom_programs_reported as reported
from support import programs_layers, programs_loops, programs_methods, programs_swaps
from support.programs import PROGRAMS
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker, diagnose
from gradmem_lib.measure.cause import within
from gradmem_lib.measure.diagnosis import CHUNKS, FUSED, MICRO_BATCHES, TECHNIQUES
from gradmem_lib.measure.remedied_peak import peak_without
from gradmem_lib.units import format_bytes

# They fill PROGRAMS.
assert programs_layers and programs_loops and programs_methods and programs_swaps

GROWS = "Bytes grow from step to step"
COLLECTED = "An evaluation collects its results"
UNUSED = "A forward's graph is never used"
ADDED_UP = "Losses are added up before one backward"
STAY = "Forwards stay in memory after their own backward"
COPIED = "The weights are there more than once"
SECOND = "A second model is in memory"
FIRST_STEP = "The first optimizer step makes its states"
WIDE = "Weights are wider than needed"
LOGITS = "The logits are the largest part"
SCORES = "Attention stores its scores"
IDLE = "Checkpointing is on and does nothing"
EVALUATION = "An evaluation is the peak"
IN_EACH_STEP = "A forward without gradients is the peak"
GENERATION = "Generation keeps keys and values"
FOR_NOBODY = "Gradients are computed for no optimizer"
DATA = "Data waits on the device"
ONE_STEP = "One step needs much more than the others"
TABLE = "The gradient of an embedding is the largest part"
EXPANDED = "One kind of tensor is the largest part"
GRADIENTS = "The gradients are there more than once"
DOUBLE = "Tensors are in float64"
STAYS = "Results of an evaluation stay during the training"
LEFT = "Tensors of the step before are still there"
TWICE = "Gradients keep graphs of their own"
ONE_TENSOR = "One tensor is most of the peak"
ONE_LINE = "One line makes most of the peak"
WAIT = "Gradients wait during the next forward"
EXCEPTION = "An exception keeps the variables of its functions"

HAVE = {
    programs.losses_in_a_list: GROWS,
    programs.detached_losses_in_a_list: GROWS,
    programs.outputs_in_a_list: GROWS,
    programs.metrics_with_their_graph: GROWS,
    programs.batches_in_a_list: GROWS,
    programs.logits_in_a_list: COLLECTED,
    programs.logits_in_one_tensor: COLLECTED,
    programs.hidden_states_in_a_list: COLLECTED,
    programs.outputs_beside_a_loss_module: COLLECTED,
    programs.outputs_of_a_hidden_model: COLLECTED,
    programs.second_list_of_outputs: COLLECTED,
    programs.one_large_evaluation: EVALUATION,
    programs.loss_module_of_one_large_evaluation: EVALUATION,
    programs.generation: GENERATION,
    programs.validation_with_gradients: UNUSED,
    programs.validation_before_the_backward: UNUSED,
    programs.validation_with_a_loss_module: UNUSED,
    programs.sampling_with_gradients: UNUSED,
    programs.scores_with_gradients: UNUSED,
    programs.losses_added_up: ADDED_UP,
    programs.loss_module_added_up: ADDED_UP,
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
    programs.scores_that_are_dropped: SCORES,
    programs.checkpointing_in_eval_mode: IDLE,
    programs.reentrant_on_frozen_inputs: IDLE,
    programs.ignored_switch: IDLE,
    around.hook_keeps_outputs: GROWS,
    around.weights_of_each_epoch: GROWS,
    around.gradients_of_each_step: GROWS,
    around.optimizer_of_each_epoch: GROWS,
    around.history_in_one_tensor: GROWS,
    around.history_in_one_row: GROWS,
    around.losses_without_an_optimizer: GROWS,
    around.hidden_state_carried: GROWS,
    around.own_keys_and_values: GENERATION,
    around.samples_that_stay: UNUSED,
    around.sum_of_a_validation: UNUSED,
    around.adversaries: STAY,
    around.two_losses_one_graph: STAY,
    around.tasks_added_up: ADDED_UP,
    around.entropy_added_up: STAY,
    around.norms_added_up: STAY,
    around.perceptual_loss: FOR_NOBODY,
    around.teacher_without_detach: FOR_NOBODY,
    around.head_alone_in_the_optimizer: FOR_NOBODY,
    around.data_set_on_the_device: DATA,
    around.full_replay_buffer: DATA,
    around.empty_replay_buffer: DATA,
    around.batches_of_an_epoch: DATA,
    around.one_long_row: ONE_STEP,
    around.large_table: TABLE,
    around.table_of_users: TABLE,
    around.one_hot_targets: EXPANDED,
    around.distances_of_all_pairs: EXPANDED,
    around.similarities_of_all_pairs: EXPANDED,
    around.mask_for_each_head: EXPANDED,
    around.distances_after_an_evaluation: EXPANDED,
    around.own_softmax: SCORES,
    loops.norm_of_all_gradients: GRADIENTS,
    loops.gradients_of_all_tasks: GRADIENTS,
    loops.gradients_in_two_dtypes: GRADIENTS,
    loops.gradients_of_frozen_layers: FOR_NOBODY,
    loops.targets_in_float64: DOUBLE,
    loops.masks_of_all_lengths: GROWS,
    loops.models_of_all_folds: GROWS,
    loops.errors_that_are_kept: EXCEPTION,
    loops.targets_of_a_copy: UNUSED,
    loops.predictions_of_a_function: UNUSED,
    loops.outputs_of_the_step_before: LEFT,
    loops.losses_of_the_model_added_up: ADDED_UP,
    loops.inner_steps: TWICE,
    loops.rows_of_a_hessian: TWICE,
    loops.scores_before_an_update: STAYS,
    loops.vocabulary_beside_a_reference: LOGITS,
    loops.dense_neighbours: ONE_TENSOR,
    loops.attention_of_three_dimensions: SCORES,
    reported.penalties_for_the_log: GROWS,
    reported.log_probabilities_of_all_episodes: GROWS,
    reported.running_average_of_a_metric: GROWS,
    reported.gradients_by_a_hook: GROWS,
    reported.pool_of_images: GROWS,
    reported.history_of_lbfgs: GROWS,
    reported.predictions_joined_in_each_step: GROWS,
    tensors.jacobian_of_a_batch: GROWS,
    reported.guided_sampling: GROWS,
    reported.queue_of_keys: UNUSED,
    reported.windows_through_time: STAY,
    reported.outputs_of_micro_batches: STAY,
    reported.slow_weights: COPIED,
    reported.checkpoint_that_is_written: COPIED,
    reported.snapshots_for_an_average: GROWS,
    reported.merged_adapters: COPIED,
    reported.states_of_a_checkpoint: COPIED,
    reported.states_of_a_checkpoint_in_float32: COPIED,
    reported.gradients_until_the_backward: WAIT,
    reported.gradients_of_each_row: EXPANDED,
    tensors.targets_of_another_shape: EXPANDED,
    tensors.one_hot_masks: EXPANDED,
    tensors.upsampled_scores: EXPANDED,
    tensors.keys_for_each_head: EXPANDED,
    tensors.patches_of_images: EXPANDED,
    tensors.messages_of_edges: EXPANDED,
    tensors.joint_of_a_transducer: EXPANDED,
    tensors.overlaps_of_boxes: EXPANDED,
    tensors.distances_to_codes: EXPANDED,
    tensors.nearest_neighbours: EXPANDED,
    tensors.volume_of_windows: EXPANDED,
    tensors.larger_validation: EVALUATION,
    tensors.validation_in_each_step: IN_EACH_STEP,
    tensors.teacher_in_each_step: IN_EACH_STEP,
    tensors.beams: GENERATION,
    tensors.pseudo_labels: DATA,
    tensors.scores_of_all_items: LOGITS,
    tensors.masks_of_the_collate: ONE_LINE,
    tensors.one_large_image: ONE_STEP,
    reported.maps_for_pictures: GROWS,
    reported.averages_in_new_tensors: COPIED,
    tensors.samples_along_rays: EXPANDED,
    reported.epochs_over_features: STAY,
    mistaken.classes_of_frames: LOGITS,
    mistaken.sharpness_aware: GRADIENTS,
    mistaken.sharpness_aware_with_weights: COPIED,
    mistaken.distances_under_a_checkpoint: EXPANDED,
}
HAVE |= {program: cause for program, (cause, _, _) in kept.EXPECTED.items()}
DO_NOT_HAVE = [
    (mistaken.targets_like_a_weight, COPIED),
    (mistaken.batches_like_a_weight, COPIED),
    (mistaken.augmented_batch, EXPANDED),
    (kept.summed_losses, GROWS),
    (kept.curvature_by_signs, TWICE),
    (kept.rate_finder, DATA),
    (programs.numbers_in_a_list, GROWS),
    (programs.the_last_outputs, GROWS),
    (programs.the_best_outputs, GROWS),
    (programs.counted_evaluation, COLLECTED),
    (programs.one_large_evaluation, COLLECTED),
    (programs.generation, COLLECTED),
    (programs.logits_in_a_list, GENERATION),
    (programs.ordinary_training, UNUSED),
    (programs.frozen_second_forward, UNUSED),
    (programs.losses_added_up, UNUSED),
    (programs.recurrent_cell, ADDED_UP),
    (programs.recurrent_cell, STAY),
    (programs.losses_added_up, STAY),
    (around.entropy_added_up, ADDED_UP),
    (programs.two_views, ADDED_UP),
    (programs.ordinary_training, ADDED_UP),
    (programs.copy_of_one_layer, COPIED),
    (programs.gradients_kept_for_logging, COPIED),
    (programs.teacher, COPIED),
    (programs.reference_model, SECOND),
    (programs.small_helper_module, SECOND),
    (programs.a_later_step, FIRST_STEP),
    (programs.frozen_bf16, WIDE),
    (programs.first_step, WIDE),
    (programs.wide_hidden_layer, LOGITS),
    (programs.recurrent_cell, LOGITS),
    (programs.square_images, SCORES),
    (programs.working_checkpoints, IDLE),
    (programs.reentrant_in_transformers, IDLE),
    (programs.logits_in_one_tensor, EVALUATION),
    (around.window_in_one_tensor, GROWS),
    (around.longer_and_longer_batches, GROWS),
    (around.gradients_that_stay, GROWS),
    (around.adversaries_detached, STAY),
    (around.adversaries_detached, UNUSED),
    (around.adversaries_detached, FOR_NOBODY),
    (around.gradient_penalty, STAY),
    (around.gradient_penalty, UNUSED),
    (around.frozen_body, FOR_NOBODY),
    (around.members_by_functional_call, FOR_NOBODY),
    (around.experts, ADDED_UP),
    (around.crops_of_one_image, ADDED_UP),
    (around.scores_of_a_reference_first, ADDED_UP),
    (around.data_like_a_weight, COPIED),
    (around.one_batch_for_all_steps, DATA),
    (around.rows_of_many_lengths, ONE_STEP),
    (programs.large_vocabulary, TABLE),
    (around.large_images, EXPANDED),
    (programs.wide_hidden_layer, EXPANDED),
    (programs.ordinary_training, EXPANDED),
    (around.own_softmax, LOGITS),
    (around.gradient_penalty, TWICE),
    (around.samples_that_stay, STAYS),
    (loops.gradients_that_are_clipped, GRADIENTS),
    (loops.all_in_float64, DOUBLE),
    (loops.first_examples, GROWS),
    (loops.masks_of_all_lengths, STAY),
    (loops.queue_of_features, UNUSED),
    (loops.rollouts_with_graph, ADDED_UP),
    (loops.predictions_of_a_function, ONE_STEP),
    (loops.inner_steps, ADDED_UP),
    (loops.teachers_in_a_list, GENERATION),
    (loops.segmented_images, SCORES),
    (loops.segmented_images, STAY),
    (loops.outputs_of_a_decoder, ADDED_UP),
    (reported.features_of_a_hook, LEFT),
    (reported.features_of_a_hook, STAY),
    (reported.states_of_a_checkpoint_before, COPIED),
    (reported.gradients_of_each_row, TWICE),
    (reported.curvature, COPIED),
    (reported.noise_of_the_weights_shapes, COPIED),
    (tensors.sines_in_a_list, DATA),
    (reported.best_weights_by_reference, COPIED),
    (reported.best_weights_by_reference, GROWS),
    (tensors.attention_with_a_table_of_positions, LOGITS),
    (around.gradients_that_stay, WAIT),
    (around.tasks_added_up, WAIT),
]
# A smaller evaluation or generation, or a narrower second model, may still be the largest part.
REMAIN = (EVALUATION, IN_EACH_STEP, GENERATION, SECOND, GRADIENTS)
# How much memory these remedies need is not known from the run, and nothing is said of it: that of
# an attention that stores no scores, of one layer that is recomputed, of a graph that ends earlier,
# of a gradient with a row for each entry of a batch, of half a batch beside its masks and tables.
NOT_SAID = (SCORES, IDLE, TWICE, TABLE, EVALUATION, IN_EACH_STEP, GRADIENTS, ONE_STEP, STAYS)
SOMETIMES_SAID = (STAY, UNUSED)


def name(program) -> str:
    return program.__name__


@pytest.mark.parametrize("program", HAVE, ids=name)
def test_a_program_is_told_its_cause_first_and_the_remedy_takes_the_bytes_away(program):
    before = diagnose(program())
    assert before.causes, before
    cause = before.causes[0]
    assert cause.name == HAVE[program]
    after = diagnose(program(remedied=True))
    # Gradients of a few rows at a time are still larger than what they are computed from.
    may_remain = cause.name in REMAIN or program is reported.gradients_of_each_row
    if not may_remain:
        assert cause.name not in [other.name for other in after.causes]
    if program is not programs.reentrant_on_frozen_inputs:  # its layers learn nothing before
        assert after.peak.total < before.peak.total
    if cause.name not in SOMETIMES_SAID:
        assert (cause.stays is None) == (cause.name in NOT_SAID)
    if cause.stays is None:
        assert not cause.limit
    else:
        said, _ = peak_without(cause, before.facts)
        assert after.peak.total <= said <= before.peak.total
    text = str(before)
    assert text.index(cause.evidence) < text.index("What ")
    assert f"Remedy: {cause.remedy}" in text


@pytest.mark.parametrize(
    ("program", "cause"), DO_NOT_HAVE, ids=[f"{name(p)}-{cause}" for p, cause in DO_NOT_HAVE]
)
def test_a_program_that_only_looks_like_it_is_not_accused(program, cause):
    assert cause not in [found.name for found in diagnose(program()).causes]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (programs.stored_scores, "attn_implementation='sdpa'"),
        (programs.scores_that_are_dropped, "set the dropout of the attention to 0"),
        (loops.attention_of_three_dimensions, "give it four"),
    ],
)
def test_a_remedy_is_not_one_that_the_program_has_already(program, words):
    [cause] = [cause for cause in diagnose(program()).causes if cause.name == SCORES]
    assert words in cause.remedy
    assert ("runs already" in cause.remedy) == (program is not programs.stored_scores)


# The other programs of ``PROGRAMS`` are told nothing but the first step's states.
OF_ORDINARY_STEPS = {
    "weight_tying": {LOGITS},
    "gradients_a_sample": {EXPANDED},
    "frozen_base_with_lora": {WIDE},
    "distillation": {WIDE, IN_EACH_STEP},
    "reptile": {COPIED},
    "sharpness_aware": {GRADIENTS},
    "sharpness_aware_by_swaps": {GRADIENTS},
    "float64_for_one_step": {DOUBLE},
    "proximal_policy": {EVALUATION},
    "q_learning_with_a_replay": {DATA},
    "two_heads_backward_twice": {STAY},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_steps_that_people_write_are_not_accused_of_what_they_do_not_do(program):
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[program]()
    with MemoryTracker(model, optimizers, live=False) as tracker:
        for _ in range(3):
            step()
    found = {cause.name for cause in diagnose(tracker).causes}
    assert found - {FIRST_STEP} == OF_ORDINARY_STEPS.get(program, set())


IN_THE_MIDDLE = [
    around.weights_of_each_epoch,
    around.history_in_one_tensor,
    around.hidden_state_carried,
    around.samples_that_stay,
    around.sum_of_a_validation,
    around.adversaries,
    around.tasks_added_up,
    around.data_set_on_the_device,
    around.one_long_row,
    around.distances_of_all_pairs,
    loops.norm_of_all_gradients,
    loops.masks_of_all_lengths,
    loops.losses_of_the_model_added_up,
    loops.vocabulary_beside_a_reference,
]


@pytest.mark.parametrize("program", IN_THE_MIDDLE, ids=name)
def test_a_run_that_ends_in_the_middle_is_told_the_same(program, monkeypatch):
    budget = program().peak.total * 9 // 10
    with_budget = partial(MemoryTracker, budget=budget)
    monkeypatch.setattr(around, "MemoryTracker", with_budget)
    monkeypatch.setattr(programs, "MemoryTracker", with_budget)
    monkeypatch.setattr(loops, "MemoryTracker", with_budget)
    with pytest.raises(BudgetExceeded) as caught:
        program()
    first = diagnose(caught.value).causes[0]
    assert first.name == HAVE[program]
    assert f"Remedy: {first.remedy}" in str(caught.value)
    if first.stays is not None:
        assert peak_without(first, caught.value.facts)[0] < budget
    if first.limit:  # the rest of the run is not known
        assert "the peak so far" in first.limit
    program(remedied=True)  # it fits now


def test_the_line_is_the_one_that_keeps_the_tensor_alive():
    found = diagnose(programs.batches_in_a_list()).causes[0]
    line = found.lines[0]
    with open(programs.__file__) as file:
        text = file.read().splitlines()[line.line - 1]
    assert line.file.endswith("oom_programs.py") and "kept.append" in text and "y.clone()" in text
    assert "128.00 KiB a step: float32 512 × 64 (clone)" in str(found)


@pytest.mark.parametrize("leak", ["features of ten steps", "forwards without a backward"])
def test_a_step_with_more_than_its_batch_is_not_blamed_on_the_batch(leak):
    net, x, kept = programs.Net(), torch.randn(256, 64), []
    optimizer = programs.adamw(net)
    with MemoryTracker(net, optimizer, live=False) as tracker:
        for i in range(30):
            if leak == "forwards without a backward" and i == 20:
                kept = [net(x).square().mean() for _ in range(20)]
            out = net(x)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leak == "features of ten steps" and 10 <= i < 20:
                kept.append(out.detach().repeat(1, 8))
            if i == 20:
                kept.clear()
    names = [cause.name for cause in diagnose(tracker).causes]
    assert "One step needs much more than the others" not in names


def test_micro_batches_help_a_teacher_and_not_an_evaluation():
    found = diagnose(tensors.teacher_in_each_step())
    assert MICRO_BATCHES in found.helps and "smaller micro-batches do that" in str(found)
    lowered = tensors.teacher_in_each_step(remedied=True).peak.total
    assert found.lowest[MICRO_BATCHES] <= lowered < found.peak.total / 2
    assert MICRO_BATCHES in diagnose(tensors.larger_validation()).cannot_help


def test_the_growth_is_that_of_the_list_at_the_peak():
    found = diagnose(programs.second_list_of_outputs()).causes[0]
    # 256 rows of 64 numbers in float32; a batch of the first list has twice as many.
    assert "about 64.00 KiB a forward" in found.evidence


def test_a_graph_that_is_used_is_not_blamed_on_the_forward_that_is_not():
    tracker = programs.validation_before_the_backward()
    found = diagnose(tracker).causes[0]
    rows, widths = 512, (256, 256)  # before GELU and after it; the output is there in any case
    assert found.nbytes == 4 * rows * sum(widths)
    assert tracker.peak.by_category["activations"] > 2 * found.nbytes
    assert "1 forward recorded" in found.evidence


def test_a_long_scoring_is_blamed_for_the_forwards_that_are_no_longer_in_the_list():
    net, x, scores = programs.Net(), torch.randn(8, 64), []
    with MemoryTracker(net, live=False) as tracker:
        for _ in range(400):
            scores.append(net(x).mean())
    found = diagnose(tracker).causes[0]
    assert found.name == UNUSED
    last_output = 4 * x.numel()  # it is there without a graph, too
    assert found.nbytes == tracker.peak.by_category["activations"] - last_output


def test_a_loss_module_is_no_forward_of_its_own():
    found = diagnose(programs.validation_with_a_loss_module()).causes[0]
    assert "1 forward recorded" in found.evidence


def test_bytes_outside_of_a_training_step_get_no_remedy_of_the_batch():
    found = diagnose(programs.logits_in_one_tensor())
    assert found.peak.moment in ("between steps", "evaluation or generation")
    batch = {technique.name for technique in TECHNIQUES if technique.of_the_step}
    assert len(batch) == 4 and batch <= set(found.cannot_help)
    assert "A smaller batch does not help" in str(found)


def test_fused_is_not_offered_where_the_first_states_do_not_fit():
    """With fused, the step fails at the same allocation."""
    asked = []
    for fused in (False, True):
        net = programs.Net(4096)
        optimizer = torch.optim.Adam(net.parameters(), foreach=False, fused=fused)
        x = torch.randn(8, 64)
        weights = 4 * sum(p.numel() for p in net.parameters())
        budget = int(3.6 * weights)
        with (
            pytest.raises(BudgetExceeded) as caught,
            MemoryTracker(net, optimizer, budget=budget, live=False),
        ):
            net(x).square().mean().backward()
            optimizer.step()
        asked.append(caught.value.asked)
        assert FUSED in diagnose(caught.value).cannot_help
        assert FIRST_STEP in str(caught.value)
        could = str(caught.value).partition("What could bring")[2].partition("\n")[0]
        assert FUSED not in could and "SGD" in could
    assert asked[0] == asked[1]


def test_chunks_of_the_loss_are_not_offered_for_an_embeddings_output():
    model = nn.ModuleDict({"embed": nn.Embedding(100, 512), "head": nn.Linear(512, 1000)})
    ids = torch.zeros(8, 64, dtype=torch.long)
    with (
        pytest.raises(BudgetExceeded) as caught,
        MemoryTracker(model, budget="2800 KiB", live=False),
    ):
        model["head"](model["embed"](ids))
    assert "embedding" in str(caught.value)
    assert CHUNKS in diagnose(caught.value).cannot_help


def test_a_trainers_evaluation_is_told_three_arguments_and_each_of_them_helps():
    before = diagnose(loops.evaluation_of_a_trainer())
    first = before.causes[0]
    assert first.name == COLLECTED
    for argument in (
        "preprocess_logits_for_metrics",
        "eval_accumulation_steps",
        "prediction_loss_only",
    ):
        assert argument in first.remedy
        after = loops.evaluation_of_a_trainer(argument)
        assert before.peak.total - after.peak.total >= first.nbytes // 2
    smaller_batch = loops.evaluation_of_a_trainer(batch=1)
    assert "A smaller batch does not help" in first.remedy
    assert smaller_batch.peak.total > before.peak.total - first.nbytes // 4


def test_an_error_says_the_causes_too():
    net, total, budget = programs.Net(), 0, 2 * 2**20
    x = torch.randn(256, 64)
    with pytest.raises(BudgetExceeded) as caught, MemoryTracker(net, budget=budget, live=False):
        for _ in range(8):
            total = total + net(x).square().mean()
    text = str(caught.value)
    assert ADDED_UP in text
    assert text.index(ADDED_UP) < text.index("What could bring")
    assert str(diagnose(caught.value).causes[0]).splitlines()[0] in text


ADVICE = [
    (reported.history_of_lbfgs, "history_size"),
    (tensors.jacobian_of_a_batch, "one row after another"),
    (reported.windows_through_time, "hidden.detach()"),
    (reported.outputs_of_micro_batches, "argmax(-1)"),
    (around.entropy_added_up, ".item()"),
    (tensors.targets_of_another_shape, "view_as"),
    (tensors.patches_of_images, "F.conv2d"),
    (tensors.messages_of_edges, "torch.sparse.mm"),
    (tensors.upsampled_scores, "smaller size"),
    (tensors.one_hot_masks, "gather"),
    (tensors.volume_of_windows, "device='cpu'"),
    (mistaken.classes_of_frames, "a few rows at a time"),
    (reported.gradients_until_the_backward, "right after optimizer.step()"),
]


@pytest.mark.parametrize(("program", "words"), ADVICE, ids=[name(p) for p, _ in ADVICE])
def test_the_remedy_is_the_one_of_this_program(program, words):
    """The argument or the call that the program's ``remedied`` uses."""
    assert words in diagnose(program()).causes[0].remedy


@pytest.mark.parametrize("program", kept.EXPECTED, ids=name)
def test_the_first_line_is_the_one_that_a_reader_would_change(program):
    _, code, words = kept.EXPECTED[program]
    first = diagnose(program()).causes[0]
    assert first.lines[0].file.endswith("oom_programs_kept.py")
    with open(kept.__file__) as file:
        text = file.read().splitlines()[first.lines[0].line - 1]
    assert code in text
    assert words in first.remedy


def test_another_moment_that_becomes_the_peak_is_said():
    before = diagnose(reported.predictions_joined_in_each_step())
    cause = before.causes[0]
    after = diagnose(reported.predictions_joined_in_each_step(remedied=True)).peak
    assert before.peak.total - cause.nbytes < after.total / 2  # the cause alone would say too much
    assert peak_without(cause, before.facts) == (after.total, after.moment)
    size = format_bytes(after.total)
    assert f"Without these bytes, the peak is at most {size}, in backward." in str(before)


def test_a_moment_between_steps_has_no_second_preposition():
    assert within("between steps") == "between steps"
    assert within("backward") == "in backward"


def test_gradients_that_a_backward_makes_again_are_not_promised():
    before = diagnose(reported.gradients_until_the_backward(squares=10))
    after = reported.gradients_until_the_backward(remedied=True, squares=10)
    found = {cause.name: cause for cause in before.causes}[WAIT]
    gradients = before.peak.by_category["gradients"]
    assert found.nbytes == before.peak.total - after.peak.total < gradients


def test_where_no_other_moment_becomes_the_peak_nothing_is_said_of_one():
    assert not diagnose(programs.losses_in_a_list()).causes[0].limit


def test_a_state_that_goes_on_with_its_graph_is_detached():
    """Truncated backpropagation through time, several windows for one step."""

    def causes_and_peak(detach: bool):
        model = nn.ModuleDict({"cell": nn.GRU(16, 64, batch_first=True), "out": nn.Linear(64, 50)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = torch.zeros(1, 8, 64)
        with MemoryTracker(model, optimizer, live=False) as tracker:
            for _ in range(8):
                states, hidden = model["cell"](torch.randn(8, 32, 16), hidden)
                if detach:
                    hidden = hidden.detach()
                model["out"](states).pow(2).mean().backward(retain_graph=not detach)
            optimizer.step()
        return diagnose(tracker).causes, tracker.peak.total

    [cause, *_], peak = causes_and_peak(detach=False)
    others, lower = causes_and_peak(detach=True)
    assert "hidden = hidden.detach()" in cause.remedy
    assert peak - lower >= cause.nbytes
    assert cause.name not in [other.name for other in others]
