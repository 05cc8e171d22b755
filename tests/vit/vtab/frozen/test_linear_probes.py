"""Probes on synthetic features, compared with other closed forms and with scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vitline.vit.features.linear_probes import BIAS_FEATURE, RIDGE, Scaling, draw_shots, least_squares, logistic_fits
from vitline.vit.features.nearest import nearest


def synthetic(num_rows: int, num_features: int, num_classes: int, seed: int = 0):
    """Overlapping classes; features of very different scales, of which one is constant."""
    rng = np.random.default_rng(seed)
    labels = np.arange(num_rows) % num_classes
    centres = rng.normal(size=(num_classes, num_features))
    features = (centres[labels] + 1.5 * rng.normal(size=(num_rows, num_features))) * np.logspace(-2, 2, num_features)
    features[:, 0] = 7.0
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels)


def scaled(features: torch.Tensor) -> np.ndarray:
    x = features.double().numpy()
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5)


@pytest.mark.parametrize(("num_rows", "num_features"), [(200, 13), (30, 64)])
def test_least_squares_is_the_minimum_of_the_augmented_system(num_rows, num_features):
    features, labels = synthetic(num_rows, num_features, 4)
    readout = least_squares(features, labels, 4)
    x = np.hstack([scaled(features), np.full((num_rows, 1), BIAS_FEATURE)])
    y = np.where(labels.numpy()[:, None] == np.arange(4), 1.0, -1.0)
    # min |XW - Y|^2 + ridge |W|^2 is an ordinary least-squares problem with sqrt(ridge) * I below X.
    above = np.vstack([x, np.sqrt(RIDGE) * np.eye(x.shape[1])])
    expected = np.linalg.lstsq(above, np.vstack([y, np.zeros((x.shape[1], 4))]), rcond=None)[0]
    np.testing.assert_allclose(readout.weight.numpy(), expected[:-1], atol=1e-10)
    np.testing.assert_allclose(readout.bias.numpy(), BIAS_FEATURE * expected[-1], atol=1e-8)


@pytest.mark.parametrize("strength", [1e-1, 1e-3])
def test_logistic_regression_agrees_with_scikit_learn(strength):
    features, labels = synthetic(300, 12, 4)
    (fit,) = logistic_fits(features, labels, [strength])
    assert fit.converged
    theirs = LogisticRegression(C=1 / (strength * 300), tol=1e-10, max_iter=5000).fit(scaled(features), labels.numpy())
    # scikit-learn leaves the biases free up to a constant, which changes no probability.
    ours = (torch.from_numpy(scaled(features)) @ fit.readout.weight + fit.readout.bias).softmax(dim=1)
    np.testing.assert_allclose(ours.numpy(), theirs.predict_proba(scaled(features)), atol=1e-5)
    np.testing.assert_allclose(fit.readout.weight.numpy(), theirs.coef_.T, atol=1e-4)


def test_logistic_fit_does_not_depend_on_its_start():
    features, labels = synthetic(300, 12, 4)
    along_a_path = [fit.readout.weight for fit in logistic_fits(features, labels, (1.0, 1e-2, 1e-4))]
    (alone,) = logistic_fits(features, labels, (1e-4,))
    torch.testing.assert_close(along_a_path[-1], alone.readout.weight, atol=1e-3, rtol=0)


def test_fit_on_chunked_features_equals_the_fit_on_all(monkeypatch):
    features, labels = synthetic(300, 12, 4)
    (whole,) = logistic_fits(features, labels, (1e-2,))
    monkeypatch.setattr("vitline.vit.features.linear_probes._CHUNK_ROWS", 77)
    (chunked,) = logistic_fits(features, labels, (1e-2,))
    torch.testing.assert_close(chunked.readout.weight, whole.readout.weight, atol=1e-5, rtol=0)
    torch.testing.assert_close(Scaling.of(features).scale.numpy(), features.double().numpy().std(axis=0) + 1e-5)


def test_class_without_examples_is_never_predicted():
    features, labels = synthetic(100, 6, 3)
    (fit,) = logistic_fits(features, labels * 2, (1e-2,))
    assert fit.converged
    assert set(fit.readout.predict(features).tolist()) == {0, 2, 4}


def test_shots_are_drawn_per_class_and_more_shots_include_fewer():
    labels = torch.tensor([0] * 7 + [1] * 30 + [3] * 12)[torch.randperm(49)]
    few, many = (draw_shots(labels, 4, shots, seed=1) for shots in (5, 10))
    assert labels[few].bincount(minlength=4).tolist() == [5, 5, 0, 5]
    assert labels[many].bincount(minlength=4).tolist() == [7, 10, 0, 10]
    assert set(few.tolist()) < set(many.tolist())
    assert few.tolist() != draw_shots(labels, 4, 5, seed=2).tolist()
    # One generator permutes class after class, as in the authors' code; here the first class is drawn explicitly.
    first = np.random.default_rng(1).permutation(np.flatnonzero(labels.numpy() == 0))[:5]
    assert few[:5].tolist() == first.tolist()


@pytest.mark.parametrize("rows_per_part", [1000, 64, 1])
def test_neighbours_agree_with_scikit_learn_for_any_part_size(rows_per_part):
    features, labels = synthetic(500, 16, 6)
    queries, _ = synthetic(90, 16, 6, seed=1)
    features, queries = features / features.std(dim=0).clamp_min(1), queries / features.std(dim=0).clamp_min(1)
    found = nearest(queries, zip(features.split(rows_per_part), labels.split(rows_per_part), strict=True))

    def weight(distance):  # scikit-learn's cosine distance is 1 - similarity
        return np.exp((1 - distance) / 0.07)

    theirs = KNeighborsClassifier(20, weights=weight, algorithm="brute", metric="cosine").fit(features, labels)
    distance, index = theirs.kneighbors(queries)
    np.testing.assert_allclose(found.similarity.numpy(), 1 - distance, atol=1e-6)
    assert (found.labels.numpy() == labels.numpy()[index]).mean() > 0.999  # equal similarities may be in another order
    assert found.vote(6).tolist() == theirs.predict(queries).tolist()


def test_all_examples_vote_if_there_are_fewer_than_neighbours():
    features, labels = synthetic(7, 5, 2)
    found = nearest(features, [(features, labels)])
    assert found.similarity.shape == (7, 7)
    assert found.vote(2, temperature=1e-3).tolist() == labels.tolist()
