"""What a plan says: the recipes that fit, fastest first, and why the others do not."""

import textwrap

from ..planning.options import Option
from ..planning.report import Plan
from ..units import format_bytes


def plan_text(plan: Plan) -> str:
    rows = f"{plan.seq_len:,} tokens" if plan.seq_len else "images"
    lines = [
        f"{plan.title} on {plan.card.name} ({plan.card.nbytes:,} bytes), global batch {plan.global_batch} x {rows}, "
        f"method {plan.method}, target {plan.target}",
        "",
    ]
    if plan.fits:
        lines += [
            "Fits, fastest first. Times are estimates, from counted operations and bytes moved; of those within 10 %",
            "of each other, the recipe that changes training least comes first.",
            *_table(plan.fits),
        ]
    else:
        lines += ["Nothing fits. Closest:", *_table([plan.closest])]
        lines += ["", _wrapped(f"It {plan.closest.why_not()}.")]
    lines += [_wrapped(line, "  * ") for line in plan.advice]
    faster = plan.next_faster
    if faster is not None:
        lines += ["", f"The next faster one does not fit: {faster}", _wrapped(f"It {faster.why_not()}.")]
    if plan.ruled_out:
        lines += ["", "Ruled out without a prediction:"]
    for why in dict.fromkeys(out.why for out in plan.ruled_out):
        kinds = "; ".join(str(out) for out in plan.ruled_out if out.why == why)
        lines.append(_wrapped(f"{kinds}: {why}.", "  * "))
    return "\n".join(lines)


def _table(options: list[Option]) -> list[str]:
    lines = [f"  {'us/token':>8} {'needs':>10} {'spare':>10}   recipe"]
    for o in options:
        spare = ("-" if o.spare < 0 else "") + format_bytes(abs(o.spare))
        lines.append(f"  {o.seconds * 1e6:8.2f} {format_bytes(o.needs):>10} {spare:>10}   {o}")
    return lines


def _wrapped(text: str, bullet: str = "  ") -> str:
    return textwrap.fill(text, 110, initial_indent=bullet, subsequent_indent=" " * len(bullet))
