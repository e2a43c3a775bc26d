"""What a weighted sum of scores ranks, and how it does on inputs that break."""

import numpy as np
import pytest

from synthq_jax.retrieval import bm25, ranking, trec

TEXTS = [
  "Red apples are eaten in autumn by those who pick them",
  "Green apples and pears",
  "plums",
  "",
  "a pear tree, red in autumn",
]
IDS = ["a", "b b", "c", "d", "e"]
FEATURES = ranking.Features.build(IDS, TEXTS)


def of(features, query, lexical, dense):
  """The features of one query."""
  [one] = features.of([query], [lexical], [dense])
  return one


COLUMN = {name: place for place, name in enumerate(ranking.FEATURES)}


def found(query="red apples in autumn", k=5):
  index = bm25.BM25().build(IDS, TEXTS)
  return index.search_run(["q"], [query], k)["q"]


def test_features_are_the_scores_of_each_field_over_the_best():
  query, lexical = "red apples in autumn", found()
  dense = {"c": 0.2, "a": 0.9, "d": 0.55}
  one = of(FEATURES, query, lexical, dense)
  assert one.ids == (*trec.ranking(lexical), "d", "c")
  assert [IDS[position] for position in one.positions] == list(one.ids)
  assert one.values.min() >= 0 and one.values.max() == 1.0
  for field in ranking.FIELDS:
    texts = [*map(ranking._space_words, TEXTS)]
    if field.words is not None:
      texts = [" ".join(text.split()[: field.words]) for text in texts]
    index = field.reads.build(IDS, texts)
    [asked] = index.search_run(["q"], [query], 5).values()
    scores = np.array([asked.get(id_, 0.0) for id_ in one.ids])
    np.testing.assert_allclose(
      one.values[:, COLUMN[field.name]],
      scores / max(scores.max(), 1e-9),
      rtol=1e-6,
    )
  retriever = dict(
    zip(one.ids, one.values[:, COLUMN["retriever"]], strict=True)
  )
  assert retriever["a"] == 1.0 and retriever["c"] == 0.0
  assert retriever["d"] == pytest.approx(0.5)
  assert not any(retriever[id_] for id_ in lexical if id_ not in dense)
  lengths = np.log1p(
    [len(TEXTS[position].split()) for position in one.positions]
  )
  np.testing.assert_allclose(
    one.values[:, COLUMN["length"]], lengths / np.log1p(11), rtol=1e-6
  )


def test_words_pairs_and_parts_of_words_are_told_apart():
  texts = ["tree pear house", "pear tree house", "peartrees"]
  features = ranking.Features.build(["1", "2", "3"], texts)
  one = of(features, "pear tree", {"1": 2.0, "2": 1.0}, {"3": 1.0})
  assert one.values[:, COLUMN["pairs of words"]].tolist() == [0, 1, 0]
  assert one.values[2, COLUMN["four letters"]] > 0
  assert one.values[2, COLUMN["words"]] == 0


def test_the_start_ranks_as_bm25_does():
  lexical = found()
  one = of(FEATURES, "red apples in autumn", lexical, {"c": 1.0, "d": 0.5})
  run = ranking.rank({"q": one}, ranking.start(8.0), 5)["q"]
  assert [*run][: len(lexical)] == trec.ranking(lexical)


@pytest.mark.parametrize("query", ["", "red"])
@pytest.mark.parametrize("dense", [{}, {"a": 0.5, "c": 0.5}])
@pytest.mark.parametrize("lexical", [{}, {"d": 0.0}])
def test_what_is_not_found_gives_a_defined_answer(query, dense, lexical):
  one = of(FEATURES, query, lexical, dense)
  assert set(one.ids) == {*lexical, *dense}
  assert np.isfinite(one.values).all()
  run = ranking.rank({"q": one}, ranking.start(8.0), 3)
  assert set(run["q"]) <= set(one.ids)


def test_a_field_without_words_is_left_out():
  features = ranking.Features.build(["1", "2"], ["pear", "fig"])
  assert features.indexes[COLUMN["pairs of words"]] is None
  one = of(features, "pear", {"1": 1.0}, {"2": 1.0})
  assert not one.values[:, COLUMN["pairs of words"]].any()


@pytest.mark.parametrize("weights", [[1.0], [np.nan] * 10, [1.0] * 11])
def test_other_weights_are_refused(weights):
  one = of(FEATURES, "red", {"a": 1.0}, {})
  with pytest.raises(ValueError, match="expected 10 finite weights"):
    ranking.rank({"q": one}, weights, 3)
