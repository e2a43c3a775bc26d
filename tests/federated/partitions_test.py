import collections
import functools

import numpy as np
import pytest

from synthq_jax.federated import clients, partitions, passages


@functools.cache
def judged(number, questions=1):
  """Passages p0, p1, ... of one sentence, the first ones with a question."""
  return passages.JudgedPassages(
    passages=tuple(
      passages.Passage(id=f"p{i}", sentences=(f"Text {i}.",), client="old")
      for i in range(number)
    ),
    questions=tuple(
      passages.Question(
        id=f"q{i}",
        text=f"{'who' if i % 2 else 'what'} is {i}",
        split="test" if i % 5 == 0 else "train",
        answers={f"p{i}": (0,)},
        client="old",
      )
      for i in range(questions)
    ),
  )


def sizes(data):
  return collections.Counter(passage.client for passage in data.passages)


def test_each_label_is_a_client_and_takes_its_questions_with_it():
  data = partitions.by_label(judged(3, 2), {"p0": "x", "p1": "y", "p2": "x"})
  built = {c.name: c for c in clients.build(data)[0]}
  assert built["x"].passage_ids == ("p0", "p2")
  assert built["x"].splits["test"].ids == ("q0",)
  assert built["y"].splits["train"].ids == ("q1",)


def test_genres_come_from_urls_and_unknown_ones_are_joined():
  url = "http://cnn.com/2009/{}/05/04/story/index.html"
  genres = ["WORLD", "WORLD", "US", "US"]
  urls = {f"p{i}": url.format(name) for i, name in enumerate(genres)}
  data = partitions.by_genre(judged(6), urls)
  assert sizes(data) == {"world": 2, "us": 2, "other": 2}


def test_questions_label_the_passages_that_answer_them():
  labels = partitions.label_by_questions(judged(4, 3))
  assert labels == {"p0": "what", "p1": "who", "p2": "what"}


LABELS = {f"p{i}": f"label {i % 10}" for i in range(2000)}


def purity(data, labels):
  """The mean share of a client's most frequent label."""
  held = collections.defaultdict(collections.Counter)
  for passage in data.passages:
    held[passage.client][labels[passage.id]] += 1
  shares = [max(c.values()) / c.total() for c in held.values()]
  return float(np.mean(shares))


def deal(alpha, num_clients=20, seed=0, number=2000, labels=LABELS):
  return partitions.dirichlet(
    judged(number, number // 2),
    labels,
    num_clients=num_clients,
    alpha=alpha,
    seed=seed,
  )


def test_every_passage_is_dealt_once_and_clients_are_equally_large():
  for alpha in (0.05, 1.0):
    counts = sizes(deal(alpha, num_clients=21))
    assert len(counts) == 21
    assert sum(counts.values()) == 2000
    assert set(counts.values()) == {95, 96}


def test_a_smaller_alpha_skews_more_and_a_large_one_not_at_all():
  skews = [purity(deal(alpha), LABELS) for alpha in (0.1, 1, 10, 1e6)]
  assert skews == sorted(skews, reverse=True)
  # 10 labels, 100 passages: one label has some 16 of them at most by chance.
  assert skews[0] > 0.6
  assert 0.1 < skews[-1] < 0.2


@pytest.mark.slow
def test_a_clients_shares_have_the_variance_of_the_dirichlet_distribution():
  # The first client draws freely. Of L equal labels, Dirichlet(alpha / L, ...)
  # has variance (1/L)(1 - 1/L) / (alpha + 1); 100 draws add p(1 - p) / 100.
  found, alpha = [], 2.0
  for seed in range(300):
    data = partitions.dirichlet(
      judged(2000), LABELS, num_clients=20, alpha=alpha, seed=seed
    )
    own = [p.id for p in data.passages if p.client == "client_00"]
    found.append(sum(LABELS[id_] == "label 0" for id_ in own) / len(own))
  shares = 0.09 / (alpha + 1)
  expected = shares + (0.09 - shares) / 100
  assert np.mean(found) == pytest.approx(0.1, abs=0.03)
  assert np.var(found) == pytest.approx(expected, rel=0.35)


def test_passages_without_a_label_are_dealt_equally():
  labels = {f"p{i}": f"label {i % 3}" for i in range(100)}
  data = deal(0.1, num_clients=9, number=1000, labels=labels)
  assert set(sizes(data).values()) == {111, 112}
  labelled = collections.Counter(
    p.client for p in data.passages if p.id in labels
  )
  assert set(labelled.values()) == {11, 12}


def test_more_clients_than_passages_are_refused():
  with pytest.raises(ValueError, match="got num_clients=4"):
    partitions.dirichlet(judged(3), {}, num_clients=4, alpha=1, seed=0)
