"""Lesson 01's answers about one block of a Transformer: its scores, its feed-forward part, and what
it really keeps.

The closed forms of ``accounting`` answer, which tests compare with real blocks to the byte.
"""

from ....units import GiB
from ...ledger import Finding, answers
from ...ledger.finding import about, each, gb
from ...material import accounting
from .claims import SEVEN


def _halves(batch_size: int, seq_len: int, attention: str):
    """Saved bytes of the attention half and of the MLP half of a Llama-2-7B block in bf16."""
    options = {"attention": attention, "precision": "bf16"}
    first = accounting.attention_activations(SEVEN, batch_size, seq_len, **options)
    second = accounting.mlp_activations(SEVEN, batch_size, seq_len, precision="bf16")
    return sum(first.values()), sum(second.values())


def _softmax(batch_size: int, seq_len: int) -> int:
    """Saved bytes of such a block's softmax under eager attention."""
    items = accounting.attention_activations(SEVEN, batch_size, seq_len, attention="eager")
    return sum(nbytes for name, nbytes in items.items() if "softmax" in name)


@answers("C37")
def one_layer() -> Finding:
    batch, seq, width, heads, layers = 8, 2048, 4096, 32, 32
    qkv = 3 * batch * seq * width * 2
    scores = batch * heads * seq**2 * 2
    ffn = batch * seq * 4 * width * 2
    fused, eager = (sum(_halves(batch, seq, attention)) for attention in ("fused", "eager"))
    softmax = _softmax(batch, seq)
    return Finding(
        own=(
            about("a layer's feed-forward product", "0.80 GB", ffn, within=0.2),
            about("32 layers that store scores", "100 GB", layers * eager, within=0.2),
        ),
        beyond=about("32 layers, fused attention", "100 GB", layers * fused, within=0.2),
        says=f"""
            fails: Layers that store scores keep three times that much. Fused attention comes
                near the sum, but stores no scores.
            holds: A layer of that size stores what is claimed.
            why: The document's products are {gb(qkv)}, {gb(scores)} and {gb(ffn)}:
                {gb(layers * (qkv + scores + ffn))} over 32 layers. Eager attention keeps the
                softmax twice, in float32 and in bf16: {gb(softmax)} a layer. A layer also keeps
                more of its feed-forward part than that product counts.
            """,
        figures={
            "queries, keys and values by the document's product": qkv,
            "scores by its product": scores,
            "feed-forward by its product": ffn,
            "block with fused attention, closed form": fused,
            "block with eager attention, closed form": eager,
            "of which softmax": softmax,
        },
    )


@answers("C38")
def long_sequence() -> Finding:
    seq = 8192
    one_copy = {batch: batch * SEVEN.heads * seq**2 * 2 for batch in (2, 8)}
    softmax, fused = _softmax(8, seq), accounting.attention_activations(SEVEN, 8, seq)
    lse = fused["attention: log-sum-exp"]
    return Finding(
        own=about("scores of a layer, batch 8", "8 GB", one_copy[8]),
        beyond=about("the same, batch 2", "8 GB", one_copy[2]),
        says=f"""
            fails: Its own batch of 8 needs four times as much: 4 times the sequence makes the
                scores 16 times as large, not 4.
            holds: One copy of the scores at its own batch is that large.
            why: For this batch, eager attention really keeps {gb(softmax)}, since softmax is kept
                in float32 and in bf16. Fused attention keeps no scores, only one number for each
                query of each head: {lse:,} bytes.
            """,
        figures=each("one bf16 copy of the scores, batch {}", one_copy),
    )


@answers("C52")
def attention_over_mlp() -> Finding:
    batch, seq, width = 8, 4096, 4096
    head, ffn = seq * seq * batch * 2, batch * seq * 4 * width * 2
    scores = SEVEN.heads * head
    halves = {attention: _halves(batch, seq, attention) for attention in ("fused", "eager")}
    ratio = {attention: first / second for attention, (first, second) in halves.items()}
    return Finding(
        own=(
            about("scores / feed-forward, 4096 tokens", "8×", scores / ffn),
            about("attention / MLP, eager", "8×", ratio["eager"], within=0.15),
        ),
        elsewhere=about("attention / MLP, fused", "8×", ratio["fused"]),
        says=f"""
            only if: attention is eager, which its example counts; with fused attention the
                feed-forward half is larger.
            fails: The scores are not 8 times the feed-forward part.
            why: One head takes {head // 2**20} MiB, 32 heads take {scores / GiB:.0f} GiB, and
                the feed-forward part takes {ffn / GiB:.0f} GiB. This counts one copy of each; a
                real layer keeps several copies of both.
            """,
        figures={
            "one head": head,
            "all heads": scores,
            "feed-forward by the document's product": ffn,
        }
        | each("{}: attention half / MLP half", halves, "{:,} / {:,}"),
    )
