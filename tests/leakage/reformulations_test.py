"""Near-duplicates by rule: what they keep, and that they are no copies."""

import pytest

from synthq_jax.leakage import reformulations


def test_the_rules_come_in_their_order():
  made = reformulations.reformulations(
    "Does the Golden Eagle build its nests in trees?", 9
  )
  assert made == [
    "golden eagle build nests trees",
    "build nests trees golden eagle",
    "goldens eagle build nests trees",
    "trees nests build eagle goldens",
    "does the goldens eagle build its nests in trees",
  ]


def test_a_query_of_one_word_has_few_and_one_of_none_has_none():
  assert reformulations.reformulations("Cats", 4) == ["cat"]
  assert reformulations.reformulations("is it", 4) == [
    "it is",
    "is its",
    "its is",
  ]
  assert reformulations.reformulations("?!", 4) == []


@pytest.mark.parametrize(
  "query", ["deep red green seas", "who is the king of Rome?"]
)
def test_none_is_the_query_and_none_comes_twice(query):
  made = reformulations.reformulations(query, 9)
  assert len(set(made)) == len(made) >= 3
  assert query.lower().strip("?") not in made
  assert made == reformulations.reformulations(query, 9)
  assert reformulations.reformulations(query, 2) == made[:2]
