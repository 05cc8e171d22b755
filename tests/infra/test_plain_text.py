"""Terminal output of other programs, cleaned for tables and messages; CSV whose texts a spreadsheet does not run."""

import csv
import io

import pytest

from vitline.infra.plain_text import csv_text, last_words, plain


def test_plain_removes_escape_sequences_and_overwritten_text():
    assert plain(
        "\x1b[36m(f pid=7)\x1b[0m a\x1b]0;title\x07b\n 10%\r100%\r\nc\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"
    ) == ("(f pid=7) ab\n100%\nclink")
    assert plain("no [escape] 1;31m") == "no [escape] 1;31m"


def test_last_words_returns_the_last_error_of_a_log():
    log = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    raise ValueError("x")
sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) \x1b[31mfile is not a database\x1b[0m
[SQL: PRAGMA main.table_info("a")]
(Background on this error at: https://sqlalche.me/e/20/4xp6)
"""
    assert last_words(log) == "sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) file is not a database"
    assert last_words("one\n\n two \n") == "two"
    assert last_words("") == "its log is empty"


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
