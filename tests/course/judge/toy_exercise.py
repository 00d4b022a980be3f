"""Small exercises for tests of how a check judges."""

from gradmem_lib.course.judge.exercise import Exercise, calls


def exercise_of(right, cases, mistakes="", **fields):
    """``cases``: what the exercise takes, or a function that returns the one thing to look at."""

    def yields(answer):
        yield "it", cases(answer)

    takes = cases if hasattr(cases, "arguments") or fields.pop("yields", False) else yields
    return Exercise("0.7", right, takes, mistakes, **fields)


def area(width, height):
    return width * height


AREA = exercise_of(
    area,
    calls((3, 5), (2.5, 4), hidden=[(7, 11)]),
    """
    width * height → 2 * (width + height)
        this is the way around it.
    width * height → width + height
        this adds the sides.
    width * height → width * str(height)
        this repeats text.
    """,
)
