"""What an answer of the ledger measures with, what that would have to give instead, and the verdict
then.
"""

from types import SimpleNamespace

from gradmem_lib.course.lessons.lesson_01 import claims as lesson_01
from gradmem_lib.course.lessons.lesson_03 import claims as lesson_03
from gradmem_lib.course.lessons.lesson_03 import claims_time
from gradmem_lib.course.lessons.lesson_04 import claims as lesson_04
from gradmem_lib.course.lessons.lesson_04 import claims_price
from gradmem_lib.course.lessons.lesson_06 import claims as lesson_06
from gradmem_lib.course.lessons.lesson_07 import claims as lesson_07
from gradmem_lib.course.lessons.lesson_08 import claims as lesson_08
from gradmem_lib.course.lessons.lesson_09 import claims as lesson_09
from gradmem_lib.course.lessons.lesson_10 import claims as lesson_10


def stub(value):
    return lambda *args, **kwargs: value


def tracker(peak: int):
    """A tracker whose figures depend on nothing."""
    timeline = SimpleNamespace(
        by_category={"activations": [peak, 0], "gradients": [0, peak], "parameters": [1, 1]},
        phases=["forward", "backward"],
    )
    return SimpleNamespace(
        timeline=timeline, peak=SimpleNamespace(total=2 * peak, by_category={"activations": peak})
    )


# An answer, what it measures with (a module and a name), what that would have to give, and the
# verdict then.
MOVES = [
    ("C11", lesson_07, "_peaks", stub((10, 9)), "does not hold"),
    (
        "C44",
        lesson_09,
        "adapters_step",
        lambda reentrant, enable, by_hand=False: 2 * enable,
        "holds",
    ),
    ("C44", lesson_09, "adapters_step", stub(2), "does not hold"),
    ("C02", lesson_01, "_destroyed", stub(0.0), "does not hold"),
    ("C02", lesson_01, "_destroyed", lambda dtype: dtype.itemsize == 2, "holds"),
    ("C08", lesson_03, "_update", lambda rows, k: tracker(100 // k), "holds"),
    ("C10", lesson_03, "_gradient_error", stub(0.5), "does not hold"),
    ("C10", lesson_03, "_gradient_error", stub(0.0), "holds"),
    ("C16", claims_time, "_published", stub(0.9), "does not hold"),
    ("C22", lesson_03, "_update", lambda rows, k, seq_len: tracker(100), "does not hold"),
    ("C29", claims_time, "_work", lambda k: (1, k), "does not hold"),
    ("C30", lesson_03, "_accumulated_error", stub(0.0), "holds"),
    (
        "C31",
        claims_time,
        "learning_rates",
        stub((1, {k: k / 4 for k in (1, 2, 4, 8)})),
        "holds",
    ),
    ("C35", lesson_03, "_logged", stub(0.25), "does not hold"),
    ("C35", lesson_03, "_logged", stub(1.0), "holds"),
    ("C19", lesson_04, "chain", lambda n, keeps, every: (1000 * n, n, n), "does not hold"),
    ("C26", lesson_04, "llama_bytes", lambda every: 100 // every, "holds"),
    ("C28", lesson_04, "_best_equal", lambda n, keeps: (1, n), "does not hold"),
    ("C20", claims_price, "llama_work", stub(0.5), "does not hold"),
    ("C39", claims_price, "_longest", lambda card, checkpointing: card, "does not hold"),
    ("C40", claims_price, "chain", stub((1, 128, 1)), "does not hold"),
    ("C50", claims_price, "share_left", stub(0.5), "holds"),
    ("C45", lesson_08, "part_of_the_saving", stub(0.5), "does not hold"),
    ("C45", lesson_08, "part_of_the_saving", stub(0.7), "holds"),
    ("C45", lesson_08, "extra_work", stub(0.2), "does not hold"),
    ("C48", lesson_08, "taken_off", stub(0.5), "does not hold"),
    ("C48", lesson_08, "taken_off", stub(0.85), "holds"),
    ("C47", lesson_08, "switched_on", stub("no layer"), "holds"),
    (
        "C53",
        lesson_08,
        "SHAPES",
        lesson_08.SHAPES | {"Llama-2-70B": lesson_08.SHAPES["Llama-2-13B"]},
        "does not hold",
    ),
    (
        "C55",
        lesson_06,
        "trio",
        stub(SimpleNamespace(peak=SimpleNamespace(total=10**12))),
        "does not hold",
    ),
    ("C17", lesson_10, "on_a_card", stub(26 * 10**9), "does not hold"),
    (
        "C49",
        lesson_10,
        "second_step",
        lambda mode, ids, every=None: (9 + (mode is True), 1, None),
        "does not hold",
    ),
    ("C57", lesson_06, "_times", stub({"accumulated": 2.0, "checkpointed": 1.0}), "holds"),
]
