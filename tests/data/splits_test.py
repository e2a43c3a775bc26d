import collections
import random
import subprocess
import sys

import pytest

from synthq_jax.data import splits


def make_pairs(count, seed=0):
  """Pairs over few words and few documents, so that groups form."""
  rng = random.Random(seed)
  words = [f"w{i}" for i in range(400)]
  return [
    (" ".join(rng.sample(words, 3)), f"document {rng.randrange(count)}")
    for _ in range(count)
  ]


def test_pairs_of_one_document_stand_on_one_side():
  pairs = make_pairs(3000)
  sides = collections.defaultdict(set)
  assigned = splits.split_by_document(pairs)
  for (_, document), side in zip(pairs, assigned, strict=True):
    sides[document].add(side)
  assert max(map(len, sides.values())) == 1
  assert set(assigned) == {"train", "dev", "test"}


def test_queries_of_equal_words_stand_on_one_side():
  pairs = [
    (text, f"{copy} of {number}")
    for number in range(300)
    for copy, text in enumerate(
      (f"Red, apple {number}?", f"{number} apple RED")
    )
  ]
  assigned = splits.split_by_document(pairs)
  assert assigned[::2] == assigned[1::2]
  assert set(assigned) == {"train", "dev", "test"}
  alone = [
    (f"{text} {i}", document) for i, (text, document) in enumerate(pairs)
  ]
  assigned = splits.split_by_document(alone)
  assert assigned[::2] != assigned[1::2]


def test_a_chain_of_shared_documents_and_queries_is_one_group():
  chain = []
  for i in range(200):
    chain += [
      (f"query {i}", f"document {i}"),
      (f"query {i}", f"document {i + 1}"),
    ]
  for seed in range(5):
    assert len(set(splits.split_by_document(chain, seed=seed))) == 1


def test_shares_are_as_asked_within_five_standard_deviations():
  count = 20_000
  pairs = [(f"query {i}", f"document {i}") for i in range(count)]
  got = collections.Counter(splits.split_by_document(pairs))
  for split, share in splits.FRACTIONS.items():
    deviation = (count * share * (1 - share)) ** 0.5
    assert abs(got[split] - count * share) < 5 * deviation


def test_a_group_keeps_the_share_whatever_its_size():
  # The hash of the least of ten documents: were it the least of ten hashes,
  # nearly all groups would fall into the first split.
  pairs = [(f"q {i}", f"d {i} {j}") for i in range(1000) for j in range(10)]
  got = collections.Counter(
    splits.split_by_document(pairs, {"a": 0.5, "b": 0.5})
  )
  assert abs(got["a"] / 10 - 500) < 5 * 250**0.5


def test_neither_order_nor_other_pairs_move_a_group():
  pairs = [(f"query {i}", f"document {i}") for i in range(500)]
  sides = dict(zip(pairs, splits.split_by_document(pairs), strict=True))
  fewer = pairs[::-3]
  assert splits.split_by_document(fewer) == [sides[pair] for pair in fewer]


def moved(split, pairs) -> int:
  """Counts the pairs that another pair moves into the first split or out."""
  sides = split(pairs)
  others = [(pairs[i][0], pairs[i - 1][1]) for i in range(0, len(pairs), 7)]
  return sum(
    (one == "train") != (before == "train")
    for other in others
    for one, before in zip(split([other, *pairs])[1:], sides, strict=True)
  )


def test_by_its_own_document_no_pair_is_moved_by_another():
  pairs = make_pairs(150)
  pairs += [(f"query {i}", f"single {i}") for i in range(150)]
  assert moved(splits.split_by_own_document, pairs) == 0
  assert moved(splits.split_by_document, pairs) > 5  # groups are


def test_by_its_own_document_the_words_of_an_earlier_side_are_left_out():
  pairs = [(f"{i % 90} apple", f"document {i}") for i in range(600)]
  sides = splits.split_by_own_document(pairs)
  place = {"train": 0, "dev": 1, "test": 2}
  alone = [splits.split_by_own_document([pair])[0] for pair in pairs]
  first = {}
  for (query, _), side in zip(pairs, alone, strict=True):
    first[query] = min(first.get(query, side), side, key=place.get)
  assert sides == [
    side if side == first[query] else None
    for (query, _), side in zip(pairs, alone, strict=True)
  ]
  assert 50 < sides.count(None) < 200


def test_another_seed_gives_other_splits():
  pairs = [(f"query {i}", f"document {i}") for i in range(500)]
  assert splits.split_by_document(pairs) == splits.split_by_document(pairs)
  assert splits.split_by_document(pairs) != splits.split_by_document(
    pairs, seed=1
  )


def test_splits_do_not_depend_on_pythons_hash_seed():
  code = (
    "from synthq_jax.data import splits; print(splits.split_by_document("
    "[(f'a b {i}', f'd {i // 2}') for i in range(60)]))"
  )
  results = {
    subprocess.run(
      [sys.executable, "-c", code],
      env={"PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ("1", "2")
  }
  assert len(results) == 1 and "train" in results.pop()


def test_texts_without_words_are_words_of_their_own():
  assert splits.token_set("?!") != splits.token_set("...")
  assert splits.token_set("Ärger, ÄRGER!") == {"ärger"}


@pytest.mark.parametrize(
  "fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}]
)
def test_shares_that_do_not_add_to_one_are_refused(fractions):
  for split in (splits.split_by_document, splits.split_by_own_document):
    with pytest.raises(ValueError, match="positive shares that add to 1"):
      split([("q", "d")], fractions)


def test_nothing_splits_into_nothing():
  assert splits.split_by_document([]) == splits.split_by_own_document([]) == []
