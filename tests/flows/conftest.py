"""The console command, called in this process as people call it in a shell."""

import sys

import pytest

from flows import cli


@pytest.fixture
def vitline(monkeypatch, capsys):
    """vitline(*arguments): exit code, stdout and stderr of the command, run in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["vitline", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(vitline):
    """refused(*arguments): the one sentence with which a mistake is answered, after checking that it is one."""

    def call(*arguments):
        code, out, err = vitline(*arguments)
        assert code == 2, err
        assert out == ""
        assert "Traceback" not in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert len(err) < 400
        return err

    return call
