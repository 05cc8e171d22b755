"""CSV whose texts a spreadsheet does not run."""

import csv
import io

import pytest

from vitline.infra.csv_text import csv_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1", "'+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t'=1"),
        ("\r=1", "'\r'=1"),
        ("\n=1", "'\n'=1"),
        ("＝1", "'＝1"),
        ("jay;=1", "jay;'=1"),
        ("a-b = c@d+e", "a-b = c@d+e"),
        ('jay, "blue"', 'jay, "blue"'),
        ("", ""),
    ],
)
def test_text_that_a_spreadsheet_would_run_gets_an_apostrophe(text, shown):
    written = csv_text([text, "n"], [(text, -1.5), ("x", text)])
    assert list(csv.reader(io.StringIO(written, newline=""))) == [[shown, "n"], [shown, "-1.5"], ["x", shown]]
