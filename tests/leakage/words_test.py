"""The plain rules on words: stems, relations and reformulations."""

import pytest

from synthq_jax.leakage import words


@pytest.mark.parametrize("apostrophe", words._APOSTROPHES)
@pytest.mark.parametrize("rest", ["", "é"])
def test_every_apostrophe_vanishes(apostrophe, rest):
  """NFKC alone makes a space and a mark of an acute accent."""
  assert words.normalize(f"what{apostrophe}s {rest}") == f"whats {rest}".strip()


@pytest.mark.parametrize(
  ("written", "meant"),
  [
    ("what&#39;s up", "what's up"),
    ("what&#x27;s up", "what's up"),
    ("caf&eacute; &amp; bar", "café & bar"),
    ("R&D; AT&T", "R D AT T"),
    ("İSTANBUL hava", "istanbul HAVA"),
  ],
)
def test_entities_and_a_dotted_capital_are_what_people_typed(written, meant):
  """No detector found the first one in "what's up": 0 leaks of 1."""
  assert words.normalize(written) == words.normalize(meant)


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
  assert words.relation(query, target) == expected


def test_the_rules_come_in_their_order():
  made = words.make_reformulations(
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
  assert words.make_reformulations("Cats", 4) == ["cat"]
  assert words.make_reformulations("is it", 4) == [
    "it is",
    "is its",
    "its is",
  ]
  assert words.make_reformulations("?!", 4) == []


UNSEEN = (
  "\u00ad\u034f\u200b\u200c\u200d\u2060\u3164\ufe0f\ufeff\U000e0041\U000e0100"
)


@pytest.mark.parametrize("unseen", UNSEEN)
def test_what_nobody_sees_hides_no_copy(unseen):
  """A soft hyphen or a joiner from a page made two words of one."""
  hidden = unseen.join("measles outbreak")
  assert words.normalize(hidden) == "measles outbreak"
  copy, own = words.extract_whole_text([hidden, "Measles outbreak"]).sets()
  assert copy == own
