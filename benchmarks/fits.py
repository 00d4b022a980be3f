"""What fits which card: ten models on twelve cards by three methods, as ``plan`` says without a
margin, in one table for the site.

    python benchmarks/fits.py [--models SmolLM2-135M ...] [--cards "RTX 4090 24GB" ...] [--methods
    qlora] [--path FILE]

A step is 16,384 tokens: 8 rows of 2,048, or 16 of 1,024 where a model takes no more. A prediction
of bytes depends on no card, so that each is made once for all of them. It takes most of an hour;
where it was interrupted, it goes on.
"""

from __future__ import annotations

import datetime
import itertools
import json
from pathlib import Path

from shared import RESULTS, parser, where

from gradmem_lib.model.configs import skeleton
from gradmem_lib.model.inputs import most_positions
from gradmem_lib.model.known import known_model
from gradmem_lib.planning import plan as planning
from gradmem_lib.planning import search
from gradmem_lib.planning.cards import CARDS
from gradmem_lib.planning.options import METHODS

MODELS = (
    "SmolLM2-135M",
    "Qwen2.5-0.5B",
    "Llama-3.2-1B",
    "GPT-2 XL",
    "Gemma-2B",
    "Llama-3.2-3B",
    "Llama-2-7B",
    "Llama-3.1-8B",
    "Llama-2-13B",
    "Qwen2.5-14B",
)
ON = (
    "RTX 2060 6GB",
    "RTX 3070 8GB",
    "RTX 3080 10GB",
    "RTX 3060 12GB",
    "T4 16GB",
    "L4 24GB",
    "RTX 3090 24GB",
    "RTX 4090 24GB",
    "RTX 5090 32GB",
    "A100 40GB",
    "L40S 48GB",
    "H100 80GB",
)
SEQ_LEN, TOKENS = 2048, 8 * 2048


def entries(model: str, cards=ON, methods=METHODS) -> list[dict]:
    """A row of the table for each card and method."""
    predict, advice, known = search.predict, planning._advice, {}

    def once(config, **asked):
        key = tuple(asked.items())
        if key not in known:
            known[key] = predict(config, **asked)
        return known[key]

    # What would fit instead is said by the rest of the table.
    search.predict, planning._advice = once, lambda *asked: []
    try:
        return [entry(model, card, method) for method in methods for card in cards]
    finally:
        search.predict, planning._advice = predict, advice


def entry(model: str, card: str, method: str) -> dict:
    """What ``plan`` says. ``parts`` sum to ``needs``: bytes at the peak by category, and what lies
    beside them.
    """
    seq_len = min(SEQ_LEN, most_positions(skeleton(known_model(model)[1])) or SEQ_LEN)
    sizes = {"seq_len": seq_len, "global_batch": TOKENS // seq_len}
    # The whole card: what is to spare stands in the row, and the page says that ``plan`` keeps 3 %.
    made = planning.plan(model, card=card, method=method, margin=0, **sizes)
    best, faster = made.closest, made.next_faster
    live = {name: n for name, n in best.prediction.peak.by_category.items() if n}
    return {
        "model": model,
        "card": card,
        "method": method,
        **sizes,
        "fits": best.fits,
        "recipe": str(best),
        "needs": best.needs,
        "spare": best.spare,
        "parts": live | best.parts,
        "us_per_token": round(best.seconds * 1e6, 3),
        "code": made.code or None,
        "why_not": "" if best.fits else f"It {best.why_not()}.",
        "next_faster": f"{faster}: it {faster.why_not()}." if faster else None,
    }


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=MODELS)
    command.add_argument("--cards", nargs="+", default=ON)
    command.add_argument("--methods", nargs="+", default=METHODS)
    command.add_argument("--path", type=Path, default=RESULTS / "fits.json")
    asked = command.parse_args(arguments)
    found = where()
    table = {
        "versions": {name: found[name] for name in ("python", "torch", "transformers")},
        "date": datetime.date.today().isoformat(),
        "settings": {"tokens of a step": TOKENS, "seq_len": SEQ_LEN, "target": "cuda"},
        "models": list(asked.models),
        "cards": [{"name": name, "nbytes": CARDS[name].nbytes} for name in asked.cards],
        "methods": list(asked.methods),
    }
    part = asked.path.with_suffix(".part")
    done = json.loads(part.read_text(encoding="utf-8")) if part.exists() else {}
    rows = []
    for model, method in itertools.product(table["models"], table["methods"]):
        name = f"{model} {method}"
        if name not in done:
            done[name] = entries(model, asked.cards, [method])
            part.write_text(json.dumps(done), encoding="utf-8")
            fit = sum(e["fits"] for e in done[name])
            print(f"{model}, {method}: fits {fit} of {len(asked.cards)} cards", flush=True)
        rows += done[name]
    asked.path.write_text(json.dumps(table | {"entries": rows}, indent=1) + "\n", encoding="utf-8")
    part.unlink()
    print("wrote", asked.path.name)


if __name__ == "__main__":
    main()
