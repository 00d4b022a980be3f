"""A small exercise for tests of how a check judges: the area of a rectangle."""

from gradmem_lib.course.judge.exercise import Exercise, Mistake, calls


def exercise_of(reference, observe, *mistakes, **fields):
    fields = {
        "id": "0.7",
        "title": "a test",
        "difficulty": 2,
        "minutes": 3,
        "trains": "testing",
        **fields,
    }
    return Exercise(reference=reference, observe=observe, mistakes=mistakes, **fields)


def area(width, height):
    return width * height


AREA = exercise_of(
    area,
    calls((3, 5), (2.5, 4)),
    Mistake("perimeter", lambda w, h: 2 * (w + h), "this is the way around it."),
    Mistake("sum", lambda w, h: w + h, "this adds the sides."),
    Mistake("width", lambda w, h: w * w, "this squares the width."),
    Mistake("string", lambda w, h: w * str(h), "this repeats text."),
)
