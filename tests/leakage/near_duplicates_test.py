"""What detectors find is what a look at every pair finds."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import near_duplicates, set_search, words

# Few letters, so that words, n-grams and whole texts meet often.
WORD = st.text(alphabet="abcÄß-é’", max_size=4)
TEXT = st.lists(WORD, max_size=5).map(" ".join)
TEXTS = st.lists(TEXT, max_size=8)
THRESHOLD = st.sampled_from([1e-9, 0.1, 1 / 3, 0.5, 0.6, 2 / 3, 0.75, 0.8, 1.0])


def detectors(threshold: float) -> list[near_duplicates.Detector]:
  return [
    near_duplicates.Exact(),
    near_duplicates.TokenSet(threshold=threshold),
    near_duplicates.TokenSet(threshold=threshold, ignored=("a",)),
    near_duplicates.Containment(threshold=threshold),
    near_duplicates.Trigrams(threshold=threshold),
  ]


MEASURES = (set_search.jaccard, set_search.containment)
SETS = st.lists(st.frozensets(st.integers(0, 12)), max_size=12)


def bags(sets) -> set_search.Bags:
  """The sets, in which an element may stand twice."""
  return set_search.Bags.of([(*one, *sorted(one)[:2]) for one in sets])


@hypothesis.given(SETS, SETS, THRESHOLD, st.sampled_from(MEASURES))
def test_an_index_of_sets_finds_what_a_look_at_every_pair_finds(
  left, right, threshold, measure
):
  expected = []
  for i, one in enumerate(left):
    for j, other in enumerate(right):
      counts = np.array([len(one & other)]), len(one), len(other)
      if (score := measure(*counts)[0]) >= threshold:
        expected.append((i, j, score))
  assert bags(left).sets() == left
  found = set_search.build(bags(right), measure, threshold).match(bags(left))
  assert [*zip(*map(np.ndarray.tolist, found), strict=True)] == expected


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


@hypothesis.settings(deadline=None)
@hypothesis.given(TEXTS, TEXTS, THRESHOLD)
def test_an_index_finds_every_pair_above_the_threshold_and_no_other(
  queries, targets, threshold
):
  for detector in detectors(threshold):
    found = detector.index(targets)(queries)
    assert list(zip(*found, strict=True)) == by_hand(detector, queries, targets)


def words_by_hand(text: str) -> set[str]:
  """Of lower-case words between spaces, whose stems they are."""
  return set(text.replace("’", "").lower().replace("-", " ").split())


def test_words_and_their_shares_are_those_counted_by_hand():
  left = ["Ä b b", "a-b c", "don’t", "a"]
  right = ["b ä", "c b a d", "dont", "b"]
  token_set = near_duplicates.TokenSet()
  expected = [
    len(words_by_hand(a) & words_by_hand(b))
    / len(words_by_hand(a) | words_by_hand(b))
    for a, b in zip(left, right, strict=True)
  ]
  assert token_set.scores(left, right).tolist() == expected == [1, 0.75, 1, 0]


@pytest.mark.parametrize(
  ("one", "other"),
  [
    ("ﬁsh", "FISH"),  # a ligature
    ("cafe\u0301", "café"),  # an accent of its own
    ("ＪＡＸ", "jax"),  # full width
    ("straße", "STRASSE"),
    ("what's", "whats"),
    ("don’t  stop", "dont\u00a0stop."),
    ("हिन्दी!", "हिन्दी"),  # marks that belong to letters
    ("ΣΊΣΥΦΟΣ", "σίσυφος"),
  ],
)
def test_forms_of_unicode_are_the_same(one, other):
  assert near_duplicates.Exact().scores([one], [other]).tolist() == [1]


def test_marks_and_letters_of_other_scripts_are_no_separators():
  exact = near_duplicates.Exact()
  assert exact.scores(["हिन्दी"], ["ह न द"]).tolist() == [0]
  assert exact.scores(["日本"], ["日 本"]).tolist() == [0]


def test_words_that_do_not_count_do_where_there_are_no_others():
  detector = near_duplicates.TokenSet(ignored=near_duplicates.FUNCTION_WORDS)
  left, right = ["What is IT?", "what is it"], ["it is what", "measles"]
  assert detector.scores(left, right).tolist() == [1, 0]


def test_a_word_that_all_targets_share_needs_no_look_at_all_pairs(monkeypatch):
  looked = []
  verify = set_search.Index._verify

  def counted(self, rows, left, *others):
    looked.append(len(left))
    return verify(self, rows, left, *others)

  monkeypatch.setattr(set_search.Index, "_verify", counted)
  targets = [f"what is word{number}" for number in range(500)]
  found = near_duplicates.TokenSet(threshold=0.7).index(targets)(targets)
  assert len(found[0]) == 500
  assert sum(looked) == 500  # of 250,000


def test_pieces_of_a_search_change_nothing(monkeypatch):
  targets = [f"{i % 7} {i % 5} {i % 3} text" for i in range(60)]
  for detector in detectors(0.5):
    whole = detector.index(targets)(targets)
    with monkeypatch.context() as patch:
      patch.setattr(set_search, "_POSTINGS", 5)
      parts = detector.index(targets)(targets)
    for one, other in zip(whole, parts, strict=True):
      np.testing.assert_array_equal(one, other)


@hypothesis.settings(deadline=None)
@hypothesis.given(TEXTS, TEXTS, st.integers(1, 4))
def test_chunks_change_nothing(queries, targets, chunk):
  detector = near_duplicates.TokenSet(threshold=0.5)
  whole = list(near_duplicates.find(texts(queries), texts(targets), detector))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(near_duplicates, "_CHUNK", chunk)
    parts = near_duplicates.search(
      iter(texts(queries)), texts(targets), [detector]
    )
    assert [match for _, found in parts for match in found] == whole
    left, _ = near_duplicates.pairs(queries, detector.index(targets))
  marks = near_duplicates.share_with_match(queries, targets, detector)
  for marked in (np.flatnonzero(marks).tolist(), left.tolist()):
    assert set(marked) == {int(m.query_id[1:]) for m in whole}


def test_no_more_than_a_chunk_is_read_before_the_first_match_is_out(
  monkeypatch,
):
  monkeypatch.setattr(near_duplicates, "_CHUNK", 3)
  read = []

  def log():
    for each in texts(["measles"] * 10):
      read.append(each)
      yield each

  found = near_duplicates.search(
    log(), texts(["Measles"]), [near_duplicates.Exact()]
  )
  assert read == []
  next(found)
  assert len(read) == 3


@pytest.mark.parametrize(
  "signs", ["?!", "’", "=>", "$$$", "\U0001f602\U0001f602"]
)
def test_signs_alone_are_an_exact_copy_of_themselves(signs):
  """They matched nothing, so that a copied test query was called clean."""
  exact = near_duplicates.Exact()
  queries, targets, _ = exact.index([signs, "measles", ""])(
    [signs, "?", "", f" {signs} ", "measles"]
  )
  assert sorted(zip(queries.tolist(), targets.tolist(), strict=True)) == [
    (0, 0), (3, 0), (4, 1),
  ]  # fmt: skip


@pytest.mark.parametrize("blank", ["", " ", "?!", "’"])
def test_what_has_no_words_is_no_duplicate_of_anything(blank):
  for detector in detectors(0.1):
    if isinstance(detector, near_duplicates.Exact) and blank.strip():
      continue
    index = detector.index([blank, "measles"])
    assert index([blank, "?"])[0].size == 0
    assert detector.scores([blank], [blank]).tolist() == [0]


def test_nothing_is_found_in_nothing():
  for detector in detectors(0.5):
    assert detector.index([])(["measles"])[2].size == 0
    assert detector.index(["measles"])([])[2].size == 0


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.01, float("nan")])
def test_a_threshold_that_means_nothing_is_refused(threshold):
  for kind in (near_duplicates.TokenSet, near_duplicates.Containment):
    with pytest.raises(ValueError, match="expected threshold in"):
      kind(threshold=threshold)


def ngrams(text: str, n: int) -> set[str]:
  """By hand, of lower-case letters and single spaces."""
  text = f" {' '.join(text.split())} "
  if not text.strip():
    return set()
  return {text[i : i + n] for i in range(max(1, len(text) - n + 1))}


@hypothesis.given(
  st.lists(st.text(alphabet="ab é\u4e2d\U00020000'-", max_size=9), max_size=9),
  st.integers(1, 70),
)
def test_ngrams_of_any_length_are_those_cut_by_hand(values, n):
  found = words.extract_character_ngrams(values, n=n)
  assert found.sets() == [ngrams(words.normalize(text), n) for text in values]
  assert len(set(found.values)) == len(found.values)


def test_long_ngrams_of_many_letters_do_not_run_over():
  letters = "".join(map(chr, range(0x4E00, 0x5E00)))
  values = [letters, letters[::-1], letters[7:]]
  found = words.extract_character_ngrams(values, n=9)
  assert found.sets() == [ngrams(text, 9) for text in values]


def test_texts_are_normalised_once_for_all_detectors(monkeypatch):
  seen = []
  normalize = words.normalize
  monkeypatch.setattr(
    words, "normalize", lambda text: seen.append(text) or normalize(text)
  )
  used = [near_duplicates.Exact(), near_duplicates.TokenSet()]
  used.append(near_duplicates.Trigrams())
  read = near_duplicates.search(texts(["jax", "grad"]), texts(["topic"]), used)
  assert [len(found) for _, found in read] == [0]
  assert sorted(seen) == ["grad", "jax", "topic", "topic", "topic"]
