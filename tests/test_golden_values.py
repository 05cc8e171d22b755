"""The same requests have the names and digests that they have always had, whatever moves: `golden/values.py`."""

import json

from .golden import values


def test_names_and_digests_are_those_that_were_written_down(tmp_path):
    found = json.loads(json.dumps(values.found(tmp_path)))
    assert found == json.loads(values.VALUES.read_text())
