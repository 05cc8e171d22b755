"""Class maps of mixtures: what is refused, by names, with prefixes, by tables."""

import json

import pytest

from vitline.vit.corpora.mixture_classes import CorpusClasses, mixture_classes

BIRDS = CorpusClasses("birds", ("crane", "jay", "owl"), ("n01", "n02", "n03"))
CITY = CorpusClasses("city", ("bus", "owl"), ("m1", "m2"))
SITES = CorpusClasses("sites", ("crane", "crane"), ("n01", "n77"))
HEAD = "corpus,class,mixture_class\n"
WHOLE = "birds,crane,bird\nbirds,jay,bird\nbirds,owl,owl\ncity,bus,\ncity,owl,owl\n"


@pytest.fixture
def table(tmp_path):
    def write(text, name="map.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows|has the columns of an empty file"),
        (HEAD, "has no rows"),
        ("corpus,class,target\n", "has the columns corpus, class, target"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (HEAD + "birds,jay\n", "line 2: 2 cells instead of 3"),
        (HEAD + "birds,a,b,c\n", "line 2: 4 cells instead of 3"),
        (HEAD + 'birds,"jay,x\n', "line 2: unexpected end of data"),
        (
            HEAD + "bird,jay,x\n",
            "line 2: the mixture has no corpus 'bird'; available: birds, city. Did you mean 'birds'?",
        ),
        (HEAD + "birds,jays,x\n", "line 2: birds has no class 'jays' by name or source id. Did you mean 'jay'?"),
        (HEAD + "birds,jay,x\nbirds,n02,y\n", "line 3: class 'n02' of birds has a row already"),
        (HEAD + "birds,jay,x\n", "has no row for 2 of the 3 classes of birds: 'crane', 'owl'. Give each a row"),
        (HEAD + WHOLE.replace("city,owl,owl", "city,owl,"), "drops every class of city"),
        ("{}", "is not a JSON list"),
        ("[1", "is not JSON"),
        ("[1]", "row 1: 1 does not have the fields"),
        ('[{"corpus": "birds", "class": "jay"}]', "row 1: .* does not have the fields"),
        ('[{"corpus": "birds", "class": "jay", "mixture_class": 3}]', "row 1: .* has a field that is not text"),
        ('[{"corpus": 1, "class": "jay", "mixture_class": ""}]', "row 1: .* has a field that is not text"),
    ],
)
def test_a_table_that_is_wrong_or_ambiguous_is_refused_with_its_place(table, text, message):
    with pytest.raises(ValueError, match=message):
        mixture_classes([BIRDS, CITY], table(text))


def test_a_missing_table_and_names_that_repeat_are_refused(table, tmp_path):
    with pytest.raises(
        ValueError, match=r"There is no class table at .*nowhere\.csv\. A class map is 'names', 'prefixed'"
    ):
        mixture_classes([BIRDS, CITY], str(tmp_path / "nowhere.csv"))
    for class_map in ("names", "prefixed"):
        with pytest.raises(
            ValueError, match=r"sites has several classes with the name 'crane' \(source ids n01, n77\)"
        ):
            mixture_classes([BIRDS, SITES], class_map)
    ambiguous = table(HEAD + "sites,crane,x\n")
    with pytest.raises(
        ValueError, match="line 2: 'crane' names 2 classes of sites; give the source id of one: n01, n77"
    ):
        mixture_classes([SITES], ambiguous)


def test_classes_of_one_name_are_one_class():
    found = mixture_classes([BIRDS, CITY], "names")
    assert found.names == ("crane", "jay", "owl", "bus")
    assert found.label_maps == ((0, 1, 2), (3, 2))


def test_prefixes_keep_all_classes_apart():
    found = mixture_classes([BIRDS, CITY], "prefixed")
    assert found.names == ("birds/crane", "birds/jay", "birds/owl", "city/bus", "city/owl")
    assert found.label_maps == ((0, 1, 2), (3, 4))


def test_a_table_merges_renames_and_drops(table):
    rows = [dict(zip(HEAD.strip().split(","), line.split(","), strict=True)) for line in WHOLE.split()]
    as_json = json.dumps([{**row, "mixture_class": row["mixture_class"] or None} for row in rows])
    for text in (HEAD + WHOLE, "\ufeff" + HEAD.replace("\n", "\r\n") + WHOLE.replace("\n", "\r\n\r\n"), as_json):
        found = mixture_classes([BIRDS, CITY], table(text))
        assert found.names == ("bird", "owl")
        assert found.label_maps == ((0, 0, 1), (None, 1))
    by_id = HEAD + "sites,n77,machine\nsites,n01,bird\n"
    assert mixture_classes([SITES], table(by_id)).label_maps == ((1, 0),)
