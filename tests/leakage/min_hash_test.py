"""MinHash beside the exact coefficient of Jaccard."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import _min_hash, near_duplicates

TEXTS = st.lists(st.text(alphabet="ab é", max_size=6), max_size=6)


def ngrams(text: str, n: int) -> set[str]:
  """By hand, of lower-case letters and single spaces."""
  text = f" {' '.join(text.split())} "
  if not text.strip():
    return set()
  return {text[i : i + n] for i in range(max(1, len(text) - n + 1))}


def jaccard(left: str, right: str, n: int) -> float:
  a, b = ngrams(left, n), ngrams(right, n)
  return len(a & b) / len(a | b) if a and b else 0.0


@hypothesis.given(TEXTS, TEXTS, st.sampled_from([0.3, 0.6, 1.0]))
def test_what_it_finds_has_the_exact_coefficient(queries, targets, threshold):
  detector = near_duplicates.MinHash(threshold=threshold, num_hashes=32)
  for i, j, score in zip(*detector.index(targets).match(queries), strict=True):
    assert score == jaccard(queries[i], targets[j], 3) >= threshold


@hypothesis.given(TEXTS)
def test_a_text_always_finds_itself(texts):
  found = near_duplicates.MinHash(threshold=1.0).index(texts).match(texts)
  pairs = set(zip(found[0].tolist(), found[1].tolist(), strict=True))
  assert pairs >= {(i, i) for i, text in enumerate(texts) if text.strip()}


def pairs_at(threshold: float) -> tuple[list[str], list[str]]:
  """Texts and their counterparts with just that coefficient, at n = 1."""
  letters = "".join(map(chr, range(ord("\u4e00"), ord("\u4e00") + 4000)))
  size, common = 16, round(32 * threshold / (1 + threshold))
  left, right = [], []
  for start in range(0, 3000, 10):
    one = letters[start : start + size]
    other = one[:common] + letters[-(size - common) :]
    left.append(one)
    right.append(other)
  return left, right


@pytest.mark.parametrize("most_missed", [0.1, 0.5])
def test_as_many_pairs_at_the_threshold_are_missed_as_was_said(most_missed):
  left, right = pairs_at(0.5)
  settings = {"n": 1, "num_hashes": 64, "most_missed": most_missed}
  exact = near_duplicates.MinHash(threshold=0.3, **settings)
  (level,) = set(exact.scores(left, right).tolist())
  misses = []
  for seed in range(5):
    detector = near_duplicates.MinHash(threshold=level, seed=seed, **settings)
    found = detector.index(right).match(left)
    pairs = set(zip(found[0].tolist(), found[1].tolist(), strict=True))
    misses += [(i, i) not in pairs for i in range(len(left))]
  number, length = detector.bands
  expected = (1 - level**length) ** number
  assert expected <= most_missed
  assert expected > 0.2 or most_missed < 0.5
  assert np.mean(misses) == pytest.approx(expected, abs=0.05)


def test_forgotten_hashes_come_back_equal(monkeypatch):
  texts = [f"{number} measles outbreaks" for number in range(20)]
  whole = near_duplicates.MinHash().index(texts).match(texts)
  monkeypatch.setattr(_min_hash, "_CACHED", 10)
  monkeypatch.setattr(_min_hash, "_ELEMENTS", 30)
  again = near_duplicates.MinHash().index(texts).match(texts)
  for one, other in zip(whole, again, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
  "wrong",
  [
    {"threshold": 0.0},
    {"n": 0},
    {"num_hashes": 1},
    {"seed": -1},
    {"most_missed": 0.0},
    {"num_hashes": 8, "threshold": 0.1},
  ],
)
def test_wrong_settings_are_refused(wrong):
  with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
    near_duplicates.MinHash(**wrong)
