"""Training sets with leakage: what is in them, and what must not be."""

import collections
import dataclasses

import pytest

from synthq_jax.leakage import splits

QUERIES = {f"q{i}": f"words of {i}" for i in range(30)}
QRELS = {query: {f"d{query}": 1, "zero": 0} for query in QUERIES}
FOUND = {
  query: {f"d{query}": 9.0}
  | {f"n{i}": 5.0 - i for i in range(4)}
  | {"zero": 0.5, "secret": 0.1}
  for query in QUERIES
}


def pool(**changes) -> splits.Pool:
  made = splits.Pool(
    queries=QUERIES,
    qrels=QRELS,
    search=lambda ids: {query: FOUND[query] for query in ids},
    forbidden=frozenset({"secret"}),
  )
  return dataclasses.replace(made, **changes)


def leak(target: str, query_id: str, query: str, **changes) -> splits.Leak:
  made = splits.Leak(
    target=target,
    query_id=query_id,
    query=query,
    relevant=(f"r{target}", f"s{target}"),
    non_relevant=tuple(f"{target}n{i}" for i in range(6)),
  )
  return dataclasses.replace(made, **changes)


TEST = [leak(t, t, f"test {t}") for t in ("t1", "t2", "t3")]
NEAR = [
  leak(t, f"{t}-{i}", f"near {t} {i}") for t in ("t1", "t2", "t3") for i in "ab"
]


def test_filler_is_a_query_with_a_relevant_and_a_non_relevant_document():
  drawn = splits.draw_filler(pool(), 100, seed=0)
  assert len(set(drawn)) == len(drawn) == 100
  for each in drawn:
    assert QRELS[each.query_id][each.relevant_id] > 0
    assert each.non_relevant_id in FOUND[each.query_id]
    assert QRELS[each.query_id].get(each.non_relevant_id, 0) <= 0
    assert each.non_relevant_id != "secret"
    assert each.query == QUERIES[each.query_id] and not each.target


def test_every_query_has_its_turn_before_any_comes_again():
  drawn = splits.draw_filler(pool(), 75, seed=0)
  counts = collections.Counter(each.query_id for each in drawn)
  assert set(counts.values()) == {2, 3}
  assert {each.query_id for each in drawn[:30]} == set(QUERIES)


def test_a_smaller_filler_begins_a_larger_one_and_seeds_differ():
  large = splits.draw_filler(pool(), 60, seed=1)
  assert splits.draw_filler(pool(), 20, seed=1) == large[:20]
  assert splits.draw_filler(pool(), 60, seed=1) == large
  assert splits.draw_filler(pool(), 60, seed=2) != large


def test_queries_are_searched_once_and_only_as_far_as_needed(monkeypatch):
  monkeypatch.setattr(splits, "_BLOCK", 8)
  asked = []

  def search(ids):
    asked.extend(ids)
    return {query: FOUND[query] for query in ids}

  splits.draw_filler(pool(search=search), 10, seed=0)
  assert len(asked) == len(set(asked)) == 16
  splits.draw_filler(pool(search=search), 90, seed=0)
  assert len(asked) == 16 + 30


def test_leaks_take_turns_and_never_repeat():
  drawn = splits.draw_leaked(NEAR, 18, seed=0)
  assert len(set(drawn)) == 18
  assert collections.Counter(each.target for each in drawn) == {
    "t1": 6, "t2": 6, "t3": 6,
  }  # fmt: skip
  assert collections.Counter(each.query_id for each in drawn)["t1-a"] == 3
  assert {each.relevant_id for each in drawn if each.target == "t1"} == {
    "rt1", "st1",
  }  # fmt: skip


def test_different_leaked_queries_come_before_any_repeats():
  """Fröbe et al. draw 500 of 648 verified queries, not three of each topic."""
  many = [leak("t1", f"t1-{i}", f"near {i}") for i in range(5)]
  some = [*many, leak("t2", "t2-a", "near a"), leak("t3", "t1-0", "near 0")]
  drawn = splits.draw_leaked(some, 6, seed=0, different=True)
  assert len({each.query_id for each in drawn}) == 6
  # In turns, one query of t2 is drawn twice before all of t1's are.
  assert len({e.query_id for e in splits.draw_leaked(some, 6, seed=0)}) < 6
  orders = {
    tuple(
      e.query_id for e in splits.draw_leaked(some, 4, seed=s, different=True)
    )
    for s in range(8)
  }
  assert len(orders) > 1
  more = splits.draw_leaked(some, 12, seed=0, different=True)
  assert more[:6] == drawn and len(set(more)) == 12  # then others repeat


def test_two_sources_of_filler_take_turns():
  second = frozenset(sorted(QUERIES)[:8])
  drawn = splits.draw_filler(pool(second=second), 16, seed=0)
  of_second = [each.query_id in second for each in drawn]
  assert sum(of_second) == 8
  assert splits.draw_filler(pool(second=second), 6, seed=0) == drawn[:6]


def test_what_cannot_be_built_is_refused():
  with pytest.raises(ValueError, match="for 200 triples .* got 150 from 30"):
    splits.draw_filler(pool(), 200, seed=0)
  with pytest.raises(ValueError, match="for 19 triples, got 18 from 3 leak"):
    splits.draw_leaked(TEST, 19, seed=0)
  with pytest.raises(ValueError, match="got 0 from 0 leaked queries"):
    splits.draw_leaked([], 1, seed=0)
  without = [leak("t1", "t1", "x", relevant=())]
  with pytest.raises(ValueError, match="got 0 from 1 leaked"):
    splits.draw_leaked(without, 1, seed=0)


def triple(query: str, relevant: str, target: str = "") -> splits.Triple:
  return splits.Triple(
    query_id=query,
    query=f"words of {query}",
    relevant_id=relevant,
    non_relevant_id="n",
    target=target,
  )


TRIPLES = (
  triple("a", "d1"),
  triple("b", "d2"),
  triple("x", "d3", "t1"),
  triple("y", "d3", "t1"),
  triple("y", "d4", "t2"),
)
TEXTS = {"n": "no", "d1": "one", "d2": "two", "d3": "three", "d4": "four"}


def manifest(triples=TRIPLES, texts=TEXTS):
  return splits.make_manifest("near leakage", triples, texts, seed=3)


def test_a_manifest_counts_queries_and_targets():
  made = manifest()
  assert (made.name, made.size, made.seed) == ("near leakage", 10, 3)
  assert (made.num_leaked, made.num_queries) == (6, 4)  # instances; queries
  assert (made.num_leaked_queries, made.num_targets) == (2, 2)
  assert manifest() == made


@pytest.mark.parametrize("document", ["d1", "d4"])  # of filler, and leaked
def test_digests_follow_the_texts_of_the_documents(document):
  other = manifest(texts=TEXTS | {document: "something else"})
  assert other.digest != manifest().digest


def test_digests_follow_queries_targets_and_order():
  made = manifest()
  first, *rest = TRIPLES
  for changed in (
    (dataclasses.replace(first, query="other words"), *rest),
    (dataclasses.replace(first, query_id="c"), *rest),
    (first, *rest[:3], dataclasses.replace(rest[3], target="t1")),
    TRIPLES[::-1],
  ):
    assert manifest(changed).digest != made.digest
