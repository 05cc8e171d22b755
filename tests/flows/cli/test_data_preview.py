"""`vitline data preview` writes a page; bad requests are refused in one sentence."""

import json


def test_the_views_of_a_mixture_have_its_classes(vitline, two_corpora, tmp_path):
    page = tmp_path / "views.html"
    small = ("--set", "recipe.input.global_batch_size=8", "--set", "recipe.input.num_lanes=2")
    given = ("birds=3", "city", "--class-map", "prefixed", "--recipe", "digits", *small, "--root", two_corpora)
    code, _, err = vitline("data", "preview", *given, "--out", str(page), "--examples", "8", "--views", "1")
    assert code == 0, err
    text = page.read_text()
    assert "Training views of birds and city" in text
    assert ["birds, row" in text, "city, row" in text] == [True, True]
    assert ["birds/jay" in text or "birds/owl" in text, "city/" in text] == [True, True]


def test_a_page_is_written_for_a_corpus_and_recipe(vitline, digits_root, tmp_path):
    page = tmp_path / "views.html"
    given = ("data", "preview", "digits", "--recipe", "digits", "--root", digits_root)
    mixing = ("--set", "recipe.input.augment.mixup_alpha=0.2")
    code, out, err = vitline(*given, *mixing, "--out", str(page), "--examples", "2", "--mixed", "1", "--json")
    assert code == 0, err
    assert json.loads(out) == {"page": str(page), "examples": 2, "mixed": 1}
    assert "Training views of digits" in page.read_text()
    assert "lambda" in page.read_text()
    for wrong, reason in (
        (("--out", str(tmp_path / "none" / "views.html")), "is not a file in an existing folder"),
        (("--set", "recipe.input.augment.mixup_alpha=0"), "mixup_alpha"),
        (("--set", "recipe.input.augment.mixup=1"), "mixup_alpha"),
    ):
        code, _, err = vitline(*given, *wrong)
        assert code != 0
        assert reason in err
