"""Who exchanges with whom."""

import numpy as np
import pytest

from synthq_jax.federated import partners

NAMES = ("a", "b", "c", "d")


def test_everyone_is_all_others():
  assert partners.Everyone().choose("b", NAMES, 0) == ("a", "c", "d")


def test_random_partners_change_with_the_round_and_not_with_time():
  choice = partners.Random(count=2, seed=3)
  rounds = [choice.choose("a", NAMES, i) for i in range(20)]
  assert rounds == [choice.choose("a", NAMES, i) for i in range(20)]
  assert set(rounds) == {("b", "c"), ("b", "d"), ("c", "d")}
  assert choice.choose("a", ("a", "b"), 0) == ("b",)


def test_the_nearest_are_those_of_similar_descriptions():
  described = {"a": [1, 0], "b": [0, 1], "c": [0.9, 0.1], "d": [0.8, 0.2]}
  choice = partners.Nearest(
    count=2, descriptions={k: np.array(v) for k, v in described.items()}
  )
  assert choice.choose("a", NAMES, 0) == ("c", "d")
  assert choice.choose("b", NAMES, 9) == ("c", "d")
  with pytest.raises(ValueError, match=r"\['e'\]"):
    choice.choose("a", (*NAMES, "e"), 0)


def test_a_fixed_list_keeps_to_the_order_of_the_clients():
  choice = partners.Fixed(lists={"a": ["d", "b", "a"]})
  assert choice.choose("a", NAMES, 0) == ("b", "d")
  assert choice.choose("b", NAMES, 0) == ()
  with pytest.raises(ValueError, match="nobody"):
    partners.Fixed(lists={"a": ["nobody"]}).choose("a", NAMES, 0)


def test_a_negative_count_is_refused():
  with pytest.raises(ValueError, match="Random.count"):
    partners.Random(count=-1, seed=0)
