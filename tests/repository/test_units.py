import pytest

from gradmem_lib.units import format_bytes, parse_bytes

SIZES = {
    1: 1,
    "2 GiB": 2 * 1024**3,
    "2gib": 2 * 1024**3,
    "1.5 MB": 1_500_000,
    "1_000": 1000,
    "1,000 B": 1000,
    "24,576 MiB": 24 * 1024**3,
    "6e8": 600_000_000,
    1.5e9: 1_500_000_000,
    "2 TB": 2 * 10**12,
    2**63 - 2**10: 2**63 - 2**10,
}
# The first is a decimal comma, or a slip: not 245.
BAD = ["24,5 GiB", "2 gigs", "", "GiB", "0 B", "-3 MB", "1e99 TiB", "8388608 TiB"]
BAD += [-1, 0, None, True, float("nan"), 2**63, [1]]
WRITTEN = {
    0: "0 B",
    512: "512 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    3 * 1024**2: "3.00 MiB",
    1.5 * 1024**3: "1.50 GiB",
    2.5 * 1024**4: "2.50 TiB",
    -2048: "-2.00 KiB",
}


def test_sizes_are_read_and_written():
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    assert {nbytes: format_bytes(nbytes) for nbytes in WRITTEN} == WRITTEN


def test_bad_sizes_get_a_sentence():
    whole = r'^cannot read .* or a number with a unit, such as "2 GiB" .* 1024\)$'
    for bad in BAD:
        with pytest.raises(ValueError, match=whole):
            parse_bytes(bad)
