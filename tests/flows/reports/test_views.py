"""`vitline data views` writes a page; bad requests are refused in one sentence."""

import json


def test_a_page_is_written_for_a_corpus_and_recipe(vitline, digits_root, tmp_path):
    page = tmp_path / "views.html"
    given = ("data", "views", "digits", "--recipe", "digits", "--root", digits_root)
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
