"""A list in JSON, an item at a time, however the text is cut."""

import json

import pytest

from data_prep.corpora.official import json_items as module
from data_prep.corpora.official.json_items import json_items

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
def test_items_are_those_of_the_whole_text_wherever_it_is_cut(num_bytes, indent):
    pieces = cut(json.dumps(CONTENT, indent=indent, ensure_ascii=False), num_bytes)
    assert list(json_items(pieces, "scenes")) == CONTENT["scenes"]
    assert next(pieces, None) is None  # to the end, where what reads them compares a checksum
    assert list(json_items(cut('{"scenes": [ ] }', num_bytes), "scenes")) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it ends early"),
        ("[1]", r"character 0 is '\[' where '{' should be"),
        ('{"info": {}}', "no list 'scenes'"),
        ('{"scenes": {}}', r"character 11 is '{' where '\[' should be"),
        ('{"scenes": [{"a": 1}, {"a": ', "in the value at character 22"),
        ('{"scenes": [{} {}]}', "character 15 is '{' where ',' should be"),
        ('{"scenes": [' + "[" * 100_000, "in the value|nested too deeply"),
    ],
)
def test_what_is_no_such_list_is_refused_by_its_character(text, says):
    with pytest.raises(ValueError, match=says):
        list(json_items(cut(text, 5000), "scenes"))


def test_an_item_that_does_not_end_is_not_read_on_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_MAX_VALUE_CHARACTERS", 1000)
    pieces = iter([b'{"scenes": ["', *[b"a" * 100] * 10_000])
    with pytest.raises(ValueError, match="in the value at character 12: Unterminated string"):
        list(json_items(pieces, "scenes"))
    assert len(list(pieces)) > 9900
