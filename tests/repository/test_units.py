import pytest

from gradmem_lib.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        ("2 GiB", 2 * 1024**3),
        ("2gib", 2 * 1024**3),
        ("1.5 MB", 1_500_000),
        ("1_000", 1000),
        ("1,000 B", 1000),
        ("24,576 MiB", 24 * 1024**3),
        ("6e8", 600_000_000),
        (1.5e9, 1_500_000_000),
        ("2 TB", 2 * 10**12),
        (2**63 - 2**10, 2**63 - 2**10),
    ],
)
def test_parse(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "bad",
    [
        "2 gigs",
        "24,5 GiB",  # a decimal comma, or a slip: not 245
        "",
        "GiB",
        -1,
        0,
        "0 B",
        "-3 MB",
        None,
        True,
        float("nan"),
        "1e99 TiB",
        2**63,
        "8388608 TiB",
        [1],
    ],
)
def test_bad_sizes_get_a_sentence(bad):
    whole = r'^cannot read .* or a number with a unit, such as "2 GiB" .* 1024\)$'
    with pytest.raises(ValueError, match=whole):
        parse_bytes(bad)


def test_format():
    assert [
        format_bytes(n)
        for n in (0, 512, 1023, 1024, 2048, 3 * 1024**2, 1.5 * 1024**3, 2.5 * 1024**4, -2048)
    ] == [
        "0 B",
        "512 B",
        "1023 B",
        "1.00 KiB",
        "2.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
        "2.50 TiB",
        "-2.00 KiB",
    ]
