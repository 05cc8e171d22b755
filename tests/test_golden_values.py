"""Names and digests of given requests stay the same when code is moved or renamed: `golden/values.py`."""

import json

from .golden import values


def test_names_and_digests_equal_the_golden_values(tmp_path):
    found = json.loads(json.dumps(values.found(tmp_path)))
    assert found == json.loads(values.VALUES.read_text())
