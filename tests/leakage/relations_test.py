"""The plain rule for how a query relates to a near-duplicate."""

import hypothesis
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import relations

TEXT = st.lists(st.sampled_from("measles bridge ship what the".split())).map(
  " ".join
)
MIRRORED = {"generalisation": "specialisation"}
MIRRORED |= {other: one for one, other in MIRRORED.items()}


@pytest.mark.parametrize(
  ("query", "target", "expected"),
  [
    ("Measles?", "measles", "identical"),
    ("outbreaks of measles", "measles outbreak", "identical"),
    ("what is measles", "Measles", "identical"),
    ("measles", "measles outbreaks", "generalisation"),
    ("measles outbreaks in 1950", "measles outbreaks", "specialisation"),
    ("measles vaccine", "measles outbreaks", "reformulation"),
    ("ship", "measles", "different topic"),
    ("who are you", "what is the", "different topic"),
    ("", "", "different topic"),
    ("to be", "to be", "identical"),
  ],
)
def test_the_rule_says_what_its_words_say(query, target, expected):
  assert relations.relation(query, target) == expected


@hypothesis.given(TEXT, TEXT)
def test_seen_from_the_other_side_a_relation_is_mirrored(query, target):
  one = relations.relation(query, target)
  assert one in relations.RELATIONS
  assert relations.relation(target, query) == MIRRORED.get(one, one)
