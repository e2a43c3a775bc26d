"""The search against a plain one, and its statistics against their definition."""

import tracemalloc
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.audit import corpus_overlap
from synthq_jax.generation import text_measures

_LINE = "the quick brown fox jumps over the lazy dog near the old river bank"


def _measure(items, corpus, **changes):
  config = corpus_overlap.Config(**{"runs": 2, **changes})
  return _search(config, {"queries": items}, corpus)["queries"]


def _search(config, items, corpus):
  return corpus_overlap.measure(config, items, corpus).kinds


def _holds(words, wanted):
  """Whether a sequence of words stands in another."""
  size = len(wanted)
  return any(
    words[i : i + size] == wanted for i in range(len(words) - size + 1)
  )


def _plain(item, corpus):
  """Whether a text holds an item, word by word."""
  own = text_measures.words(item)
  texts = [text_measures.words(text) for text in corpus]
  return float(bool(own) and any(_holds(text, own) for text in texts))


_TEXT = st.lists(st.sampled_from("a b c A. d".split()), max_size=8).map(
  " ".join
)


@hypothesis.given(
  items=st.lists(_TEXT, min_size=1, max_size=6),
  corpus=st.lists(_TEXT, max_size=5),
  few=st.integers(1, 4),
)
@hypothesis.settings(deadline=None, max_examples=150)
def test_what_is_found_is_what_a_plain_search_finds(items, corpus, few):
  config = corpus_overlap.Config(runs=1)
  plain = [_plain(item, corpus) for item in items]
  with mock.patch.object(corpus_overlap, "_FEW", few):
    for item, expected in zip(items, plain, strict=True):
      found = corpus_overlap.measure(config, {"q": [item]}, iter(corpus))
      assert found.kinds["q"].exact.mean == expected
    together = corpus_overlap.measure(config, {"q": items}, iter(corpus))
  np.testing.assert_allclose(together.kinds["q"].exact.mean, np.mean(plain))
  assert together.num_texts == len(corpus)
  assert together.num_words == sum(len(text_measures.words(t)) for t in corpus)


def test_short_and_empty_items_are_counted():
  items = ["fox", "quick brown", "zebra", "!?", "the quick brown fox"]
  found = _measure([*items, _LINE], [_LINE])
  assert found.short.mean == 5 / 6
  assert found.exact.mean == 4 / 6


def test_runs_are_samples_and_their_spread_is_recomputed():
  kinds = {
    name: [f"{name} number {i}" for i in range(50)]
    for name in ("query", "document")
  }
  corpus = kinds["query"][:20] + kinds["document"][:40]
  config = corpus_overlap.Config(sample_size=10, runs=4, seed=3)
  found = corpus_overlap.measure(config, kinds, corpus)
  places = []
  for kind, items in kinds.items():
    sample = corpus_overlap._draw_positions(config, kind, len(items))
    assert sample.shape == (4, 10)
    drawn = [[items[i] for i in run] for run in sample]
    assert all(len(set(run)) == 10 for run in drawn)
    rates = [np.mean([text in corpus for text in run]) for run in drawn]
    exact = found.kinds[kind].exact
    assert exact.mean == pytest.approx(np.mean(rates))
    assert exact.deviation == pytest.approx(np.std(rates, ddof=1))
    assert exact.deviation > 0
    places += sample.tolist()
  assert len({tuple(run) for run in places}) == 8  # runs and kinds differ


def test_only_drawn_items_are_read():
  class Items(list):
    read = set()

    def __getitem__(self, index):
      self.read.add(index)
      return super().__getitem__(index)

  items = Items(f"item {i}" for i in range(1000))
  config = corpus_overlap.Config(sample_size=7, runs=2)
  corpus_overlap.measure(config, {"queries": items}, [])
  assert 7 <= len(Items.read) <= 14


def test_memory_does_not_grow_with_the_corpus():
  """8 and 64 pieces of a made-up corpus that exists only while it is read."""

  def corpus(pieces):
    rng = np.random.default_rng(0)
    for _ in range(pieces * 8):
      yield " ".join(map(str, rng.integers(0, 1000, 500)))

  peaks = []
  config = corpus_overlap.Config(runs=1)
  for pieces in (8, 64):
    tracemalloc.start()
    found = corpus_overlap.measure(config, {"q": [_LINE]}, corpus(pieces))
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert found.num_words == pieces * 4000
  assert peaks[1] < 1.1 * peaks[0] < 2e6


@pytest.mark.parametrize("name", ["sample_size", "runs"])
def test_settings_that_look_for_nothing_are_refused(name):
  with pytest.raises(ValueError, match=f"{name} >= 1, got {name}=0"):
    corpus_overlap.Config(**{name: 0})


@pytest.mark.parametrize(
  "items, words", [({}, "got no kind"), ({"a": ["x"], "b": []}, "'b': 0")]
)
def test_kinds_without_items_are_refused(items, words):
  with pytest.raises(ValueError, match=words):
    corpus_overlap.measure(corpus_overlap.Config(), items, [])
