"""The page of views shows what the training reads."""

import numpy as np
import pytest

from vitline.infra.config import replace
from vitline.vit.corpora.training_corpora import TrainingCorpora, TrainingCorpus
from vitline.vit.pages import views as module
from vitline.vit.pages.views import collect_views, views_html

from ...batches import train_batches
from ..input.conftest import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    made = make_corpus(tmp_path_factory.mktemp("views"))
    made.store.write_json("classes.json", {"classes": [{"name": f"<b>{i}"} for i in range(5)]})
    return made


@pytest.fixture
def recipe(tiny_recipe):
    augment = {"randaugment_layers": 2, "randaugment_magnitude": 10, "mixup_alpha": 0.8, "cutmix_alpha": 1.0}
    return replace(tiny_recipe, **{f"input.augment.{name}": value for name, value in augment.items()})


def alone(corpus):
    part = TrainingCorpus(corpus.store, corpus.manifest, "tiny", single_label=corpus.manifest.single_label)
    return TrainingCorpora((part,))


def test_pairs_and_views_are_those_of_the_batches(corpus, recipe, monkeypatch):
    monkeypatch.setattr(module, "decode_sandboxed", module_decode)
    found = collect_views(alone(corpus), "train", recipe, examples=8, views=2, mixed=6)
    given = {"seed": recipe.seed, "micro_batch_size": 8}
    steps = list(train_batches(corpus.store, corpus.manifest, "train", recipe.input, num_steps=6, **given))
    for step, ([batch], shown) in enumerate(zip(steps, found.mixed, strict=True)):
        image, partner, mixed = shown.views
        assert (mixed.pixels == batch.images[step].numpy()).all()
        assert image.lines[0] == f"<b>{int(batch.labels[step])}"
        assert partner.lines[0] == f"<b>{int(batch.mixed_labels[step])}"
        assert f"lambda {float(batch.lam[step]):.3f}" in mixed.lines[0]

    plain = replace(recipe, **{"input.augment.mixup_alpha": None, "input.augment.cutmix_alpha": None})
    [[batch]] = train_batches(corpus.store, corpus.manifest, "train", plain.input, num_steps=1, **given)
    assert len(found.examples) == 8
    for i, shown in enumerate(found.examples):
        assert [view.heading for view in shown.views] == ["original", "evaluation", "epoch 0", "epoch 1"]
        assert (shown.views[2].pixels == batch.images[i].numpy()).all()
        assert not np.array_equal(shown.views[2].pixels, shown.views[3].pixels)
        assert shown.views[2].lines[0].startswith("crop ")
        assert not collect_views(alone(corpus), "train", plain, examples=1, views=1, mixed=3).mixed


def module_decode(data, policy):
    from vitline.data_prep.decode import decode

    return decode(data, policy)


def test_the_page_escapes_names_and_names_every_setting(corpus, recipe):
    found = collect_views(alone(corpus), "train", recipe, examples=2, views=1, mixed=1)
    page = views_html(found, recipe, title="Training views of <i>", lead="seed 0")
    assert "<b>0" not in page
    assert "Training views of &lt;i&gt;" in page
    assert page.count("data:image/webp") == 2 * 3 + 3
    for name in ("randaugment_layers", "mixup_alpha", "min_area_fraction"):
        assert f"<td>{name}</td>" in page


def test_an_image_that_cannot_be_decoded_is_named(corpus_of_noise, recipe):
    with pytest.raises(ValueError, match=r"row \d+ of split 'train'\) cannot be decoded: .* lists all such images"):
        collect_views(alone(corpus_of_noise), "train", recipe, examples=1, views=1, mixed=0)


@pytest.fixture
def corpus_of_noise(tmp_path):
    made = make_corpus(tmp_path, segments=(8,), undecodable=set(range(8)))
    made.store.write_json("classes.json", {"classes": [{"name": str(i)} for i in range(5)]})
    return made
