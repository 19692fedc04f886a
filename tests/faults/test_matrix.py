"""The matrix of faults with real processes. `make faults` plays all of it and prints it as a table."""

import pytest

from tests.faults.load import Tokens, judge
from tests.faults.play import PROPERTY, play
from tests.faults.rows import ROWS

PARAMS = [
    pytest.param(row, id=f"{row.number} {row.fault}", marks=() if row.is_short else pytest.mark.nightly) for row in ROWS
]


@pytest.mark.parametrize("row", PARAMS)
async def test_row(row, stage, record_property):
    try:
        report = await play(row, stage)
    except Exception as error:
        error.add_note(stage.cluster.logs())
        raise
    record_property(PROPERTY, _cells(row, report))
    troubles = report.troubles(row)
    assert not troubles, "\n".join([*troubles, stage.cluster.logs()])


def _cells(row, report):
    tokens = report.tokens
    seconds = ["-" if each is None else f"{each:.2f}" for each in (report.detect_s, report.recover_s)]
    counts = [report.num_ok, report.failed.total(), report.num_retried]
    return [
        *(row.number, row.fault),
        *map(str, counts),
        *seconds,
        *map(str, (tokens.lost, tokens.doubled, tokens.wrong, report.num_leaked)),
    ]


def test_every_fault_has_a_row():
    assert {row.number for row in ROWS} == {f"F{number}" for number in range(1, 24)}
    assert len({(row.number, row.fault) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("pieces", "is_whole", "expected"),
    [
        ([(0, [5, 6]), (2, [7])], True, Tokens()),
        ([(0, [5, 6])], False, Tokens()),
        ([(0, [5, 6])], True, Tokens(lost=1)),
        ([(0, [5]), (2, [7])], False, Tokens(lost=1)),
        ([(0, [5, 6]), (1, [6, 7])], True, Tokens(doubled=1)),
        ([(0, [5, 7]), (2, [7])], True, Tokens(wrong=1)),
        ([(0, [5, 6, 7, 8])], True, Tokens(wrong=1)),
        ([], False, Tokens()),
        ([], True, Tokens(lost=3)),
    ],
)
def test_tokens_are_judged(pieces, is_whole, expected):
    assert judge(pieces, [5, 6, 7], is_whole=is_whole) == expected
