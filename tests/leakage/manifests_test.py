"""Manifests of training sets: counts, and digests that follow the content."""

import dataclasses

import pytest

from synthq_jax.leakage import manifests, splits


def instance(query: str, relevant: str, target: str = "") -> splits.Instance:
  return splits.Instance(
    query_id=query,
    query=f"words of {query}",
    relevant_id=relevant,
    non_relevant_id="n",
    target=target,
  )


SPLIT = splits.Split(
  name="near leakage",
  size=5,
  seed=3,
  instances=(
    instance("a", "d1"),
    instance("b", "d2"),
    instance("x", "d3", "t1"),
    instance("y", "d3", "t1"),
    instance("y", "d4", "t2"),
  ),
  num_leaked=3,
)
TEXTS = {"n": "no", "d1": "one", "d2": "two", "d3": "three", "d4": "four"}


def test_a_manifest_counts_queries_and_targets():
  made = manifests.of(SPLIT, TEXTS)
  assert (made.name, made.size, made.seed) == ("near leakage", 5, 3)
  assert (made.num_leaked, made.num_queries) == (3, 4)
  assert (made.num_leaked_queries, made.num_targets) == (2, 2)
  assert manifests.of(SPLIT, TEXTS) == made


@pytest.mark.parametrize(
  "document, filler, leaked", [("d1", True, False), ("d4", False, True)]
)
def test_digests_follow_the_texts_of_the_documents(document, filler, leaked):
  made = manifests.of(SPLIT, TEXTS)
  other = manifests.of(SPLIT, TEXTS | {document: "something else"})
  assert other.digest != made.digest
  assert (other.filler_digest != made.filler_digest) == filler
  assert (other.leaked_digest != made.leaked_digest) == leaked


def test_digests_follow_queries_targets_and_order():
  made = manifests.of(SPLIT, TEXTS)
  first, *rest = SPLIT.instances
  for changed in (
    (dataclasses.replace(first, query="other words"), *rest),
    (dataclasses.replace(first, query_id="c"), *rest),
    (first, *rest[:3], dataclasses.replace(rest[3], target="t1")),
    SPLIT.instances[::-1],
  ):
    split = dataclasses.replace(SPLIT, instances=changed)
    assert manifests.of(split, TEXTS).digest != made.digest
