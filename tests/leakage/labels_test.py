"""Detectors on the labels of SPIRE 2022 do as docs/lab says."""

import collections

import numpy as np
import pytest
import shared_data

from synthq_jax.data import query_pairs
from synthq_jax.leakage import calibration, near_duplicates


@pytest.fixture(scope="module")
def folder():
  return shared_data.folder("query_leakage")


@pytest.fixture(scope="module")
def pairs(folder):
  return query_pairs.labelled_pairs(folder / "spire22_annotations.jsonl")


def labels_of(pairs):
  return np.array([not pair.different_topic for pair in pairs])


def test_the_labels_are_counted_as_in_table_2_of_the_paper(pairs):
  """Near-duplicates, their topics, other pairs, their topics; then types."""
  assert (len(pairs), labels_of(pairs).sum()) == (827, 721)
  for name, counts in (
    ("robust04", [648, 172, 93, 53]),
    ("core17", [138, 37, 21, 11]),
    ("core18", [157, 38, 19, 7]),
  ):
    own = [pair for pair in pairs if name in pair.collections]
    sides = ([p.topic for p in own if p.different_topic == x] for x in (0, 1))
    assert [n for x in sides for n in (len(x), len({*x}))] == counts
  types = [
    (*one.title_relations, "none")[0] for one in pairs if labels_of([one])
  ]
  assert collections.Counter(types) == {
    "identical": 187,
    "generalisation": 124,
    "specialisation": 228,
    "reformulation": 181,  # the paper's 182nd has no label of the title
    "none": 1,
  }


@pytest.mark.parametrize(
  ("name", "threshold", "found", "right"),
  [
    ("exact", 1.0, 229, 226),
    ("token set", 1.0, 330, 316),
    ("containment", 0.9, 529, 476),
    ("trigrams", 0.6, 599, 556),
  ],
)
def test_detectors_are_right_as_often_as_docs_say(
  pairs, name, threshold, found, right
):
  detector = {
    "exact": near_duplicates.Exact(),
    "token set": near_duplicates.TokenSet(),
    "containment": near_duplicates.Containment(),
    "trigrams": near_duplicates.Trigrams(),
  }[name]
  assert detector.threshold == pytest.approx(threshold, abs=1e-3)
  texts = ([p.query for p in pairs], [p.variant for p in pairs])
  said = detector.scores(*texts) >= detector.threshold
  assert (said.sum(), (said & labels_of(pairs)).sum()) == (found, right)


def test_the_lowest_cosine_of_a_precision(pairs):
  cosines = np.array([pair.cosine for pair in pairs])
  labels = labels_of(pairs)
  lowest = calibration.threshold(cosines, labels, precision=0.9)
  assert lowest == pytest.approx(0.92603, abs=1e-5)
  assert labels[cosines >= 0.91].mean() == pytest.approx(0.8788, abs=1e-4)
  # What lies below was never labelled.
  lowest = calibration.threshold(cosines, labels, precision=0.8)
  assert lowest == cosines.min()


def test_the_index_finds_each_labelled_pair_that_scores_enough(pairs):
  queries = [pair.query for pair in pairs]
  variants = [pair.variant for pair in pairs]
  for detector in (
    near_duplicates.TokenSet(threshold=0.5),
    near_duplicates.Containment(),
  ):
    left, right, scores = detector.index(variants).match(queries)
    own = {i: s for i, j, s in zip(left, right, scores, strict=True) if i == j}
    expected = detector.scores(queries, variants)
    assert own == {
      i: score
      for i, score in enumerate(expected)
      if score >= detector.threshold
    }


def test_every_file_is_read_whole(folder):
  assert len(query_pairs.topics(folder / "trec_topics.jsonl")) == 350
  log = query_pairs.query_log(folder / "msmarco_queries.tsv")
  assert sum(1 for _ in log) == 20_856
