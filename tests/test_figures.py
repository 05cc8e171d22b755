"""The tables of measured figures in the documents are those of the recorded scores."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import figures
from recorded_scores import measurements


def test_recorded_scores_have_several_seeds_and_documents_show_them():
    assert {score.seed for found in measurements() for score in found.scores} >= {0, 1, 2}
    shown = figures.documents()
    assert {path.name for path in shown} == {"README.md"}, shown
    for path in shown:
        assert figures.with_figures(path.read_text()) == path.read_text(), (
            f"{path}: its figures are not those that were measured; run tests/benchmarks/figures.py --write"
        )
