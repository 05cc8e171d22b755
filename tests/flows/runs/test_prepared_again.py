"""A request for a corpus that is already prepared checks its own options against the corpus, without a cluster."""

from types import SimpleNamespace

import pytest

from vitline.data_prep.config import ClassFolders, CorpusConfig
from vitline.data_prep.prepare.job import prepare
from vitline.flows.runs.prepare_corpus import prepare_corpora
from vitline.infra.config import replace

from ...pictures import noise
from ...tars import tar_of


def test_uncounted_losses_are_reported_each_time_and_refused_without_the_option(tmp_path):
    root, whole = f"file://{tmp_path}/root", tar_of({f"{'ab'[i % 2]}/{i}.png": noise(i) for i in range(30)})
    (tmp_path / "cut.tar").write_bytes(whole[: 25 * 1024])
    request = CorpusConfig(name="cut", source=ClassFolders(path=str(tmp_path / "cut.tar")))
    accepting = replace(request, **{"execution.uncounted_losses": "accept"})
    prepare([accepting], root)
    messages: list[str] = []
    services = SimpleNamespace(root=root, observer=SimpleNamespace(say=messages.append))
    (corpus,), key, _ = prepare_corpora([accepting], services)
    assert (corpus.reused, key) == (True, None)
    assert "warning: cut: 1 file could not be read to its end" in messages[0]
    with pytest.raises(ValueError, match=r"is prepared already.*with --set execution\.uncounted_losses=accept"):
        prepare_corpora([request], services)
