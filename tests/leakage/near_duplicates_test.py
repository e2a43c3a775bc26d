"""What detectors find is what a look at every pair finds."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import near_duplicates

# Few letters, so that words, n-grams and whole texts meet often.
WORD = st.text(alphabet="abcÄß-é’", max_size=4)
TEXT = st.lists(WORD, max_size=5).map(" ".join)
TEXTS = st.lists(TEXT, max_size=8)
THRESHOLD = st.sampled_from([0.1, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 1.0])


def detectors(threshold: float) -> list[near_duplicates.Detector]:
  return [
    near_duplicates.Exact(),
    near_duplicates.TokenSet(threshold=threshold),
    near_duplicates.TokenSet(threshold=threshold, ignored=frozenset("a")),
    near_duplicates.TokenSet(threshold=threshold, stemmer=""),
    near_duplicates.Containment(threshold=threshold, n=1),
    near_duplicates.Containment(threshold=threshold, n=3),
  ]


def texts(values: list[str]) -> list[near_duplicates.Text]:
  return [
    near_duplicates.Text(id=f"t{number}", text=value)
    for number, value in enumerate(values)
  ]


def by_hand(detector, queries, targets) -> list[tuple[int, int, float]]:
  """Every pair, one at a time."""
  return [
    (i, j, score)
    for i, query in enumerate(queries)
    for j, target in enumerate(targets)
    if (score := detector.scores([query], [target])[0]) >= detector.threshold
  ]


@hypothesis.given(TEXTS, TEXTS, THRESHOLD)
def test_an_index_finds_every_pair_above_the_threshold_and_no_other(
  queries, targets, threshold
):
  for detector in detectors(threshold):
    found = detector.index(targets).match(queries)
    assert list(zip(*found, strict=True)) == by_hand(detector, queries, targets)


@hypothesis.given(TEXTS, TEXTS, THRESHOLD)
def test_scores_are_symmetric_and_lie_between_zero_and_one(
  left, right, threshold
):
  left, right = (side[: min(len(left), len(right))] for side in (left, right))
  for detector in detectors(threshold):
    scores = detector.scores(left, right)
    assert ((scores >= 0) & (scores <= 1)).all()
    np.testing.assert_array_equal(scores, detector.scores(right, left))


@hypothesis.given(TEXTS, TEXTS, st.integers(1, 4))
def test_chunks_change_nothing(queries, targets, chunk):
  detector = near_duplicates.TokenSet(threshold=0.5)
  whole = list(near_duplicates.find(texts(queries), texts(targets), detector))
  parts = near_duplicates.find(
    iter(texts(queries)), texts(targets), detector, chunk=chunk
  )
  assert list(parts) == whole
  marks = near_duplicates.share_with_match(
    queries, targets, detector, chunk=chunk
  )
  assert set(np.flatnonzero(marks)) == {int(m.query_id[1:]) for m in whole}


def test_no_more_than_a_chunk_is_read_before_the_first_match_is_out():
  read = []

  def log():
    for each in texts(["polio"] * 10):
      read.append(each)
      yield each

  found = near_duplicates.find(
    log(), texts(["Polio"]), near_duplicates.Exact(), chunk=3
  )
  assert read == []
  next(found)
  assert len(read) == 3


@pytest.mark.parametrize("blank", ["", " ", "?!", "’"])
def test_what_has_no_words_is_no_duplicate_of_anything(blank):
  for detector in detectors(0.1):
    index = detector.index([blank, "polio"])
    assert index.match([blank, "?"])[0].size == 0
    assert detector.scores([blank], [blank]).tolist() == [0]


def test_nothing_is_found_in_nothing():
  for detector in detectors(0.5):
    assert detector.index([]).match(["polio"])[2].size == 0
    assert detector.index(["polio"]).match([])[2].size == 0


def test_planted_near_duplicates_are_found():
  topics = ["International organized crime", "Polio outbreaks", "piracy"]
  log = ["organised", "POLIO outbreak!", "crime, international organized"]
  exact = near_duplicates.Exact()
  assert not near_duplicates.share_with_match(log, topics, exact).any()
  tokens = near_duplicates.TokenSet()
  found = near_duplicates.find(texts(log), texts(topics), tokens)
  assert [(m.query_id, m.target_id, m.relation) for m in found] == [
    ("t1", "t1", "identical"),
    ("t2", "t0", "identical"),
  ]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.01, float("nan")])
def test_a_threshold_that_means_nothing_is_refused(threshold):
  for kind in (near_duplicates.TokenSet, near_duplicates.Containment):
    with pytest.raises(ValueError, match="expected a threshold in"):
      kind(threshold=threshold)


def test_wrong_settings_are_refused():
  with pytest.raises(ValueError, match="n=0"):
    near_duplicates.Containment(n=0)
  with pytest.raises(ValueError, match="stemmer='klingon'"):
    near_duplicates.TokenSet(stemmer="klingon")
  with pytest.raises(ValueError, match="chunk=0"):
    list(near_duplicates.find([], [], near_duplicates.Exact(), chunk=0))
