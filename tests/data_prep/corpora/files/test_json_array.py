"""An array in JSON, one item at a time, however the text is split."""

import json

import pytest

from vitline.data_prep.archives import json_array
from vitline.data_prep.archives.json_array import json_items

CONTENT = {
    "info": {"scenes": [1], "é": ']}\\"'},
    "version": -1.5e3,
    "scenes": [{"a": [1, 2.5]}, {}, 12.25, "ü,"],
    "x": 1,
}


def cut(text, num_bytes):
    data = text.encode()
    return (data[i : i + num_bytes] for i in range(0, len(data), num_bytes))


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_items_do_not_depend_on_where_the_text_is_split(num_bytes, indent):
    pieces = cut(json.dumps(CONTENT, indent=indent, ensure_ascii=False), num_bytes)
    assert list(json_items(pieces, "scenes")) == CONTENT["scenes"]
    assert next(pieces, None) is None  # the text was read to its end, where a checksum is compared
    assert list(json_items(cut('{"scenes": [ ] }', num_bytes), "scenes")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'{' is expected, found ''"),
        ("[1]", r"character 0: '{' is expected, found '\['"),
        ('{"info": {}}', "no array 'scenes'"),
        ('{"scenes": {}}', r"character 11: '\[' is expected, found '{'"),
        ('{"scenes": [{"a": 1}, {"a": ', "character 22: an element is not JSON"),
        ('{"scenes": [{} {}]}', "character 15: '{' stands behind an element"),
        ('{"scenes": [' + "[" * 100_000, "not JSON|nested too deeply"),
    ],
)
def test_invalid_lists_are_refused_with_the_position(text, message):
    with pytest.raises(ValueError, match=message):
        list(json_items(cut(text, 5000), "scenes"))


def test_an_item_without_end_is_refused_at_the_limit(monkeypatch):
    monkeypatch.setattr(json_array, "_MAX_ITEM_CHARS", 1000)
    pieces = iter([b'{"scenes": ["', *[b"a" * 100] * 10_000])
    with pytest.raises(ValueError, match="character 12: an element is not JSON, or too long: Unterminated string"):
        list(json_items(pieces, "scenes"))
    assert len(list(pieces)) > 9900
