import hashlib
import os
import re

import numpy as np
import pytest

from synthq_jax import artifacts
from synthq_jax.data import (
  docstrings,
  environment_docs,
  public_text,
  shipped,
)
from synthq_jax.stages import pretrain_recipe

LONG = "returns the sum of all array elements over a given axis"  # 11 words
SHORT = "joins many arrays"
NOTHING = public_text.HeldOut([])


def words(count, start=0):
  return " ".join(f"word{i}" for i in range(start, start + count))


def read(held_out, *packages, **options):
  return public_text.read(packages or ("fake_docs",), held_out, **options)


def test_grams_are_eight_words_or_the_whole_of_less():
  assert public_text.grams("Two words!") == []
  assert public_text.grams("Not two words") == [("not", "two", "words")]
  assert public_text.grams(words(8)) == [tuple(words(8).split())]
  assert public_text.grams(words(10)) == [
    tuple(words(8, start).split()) for start in range(3)
  ]


def test_a_short_held_out_query_repeats_where_all_of_it_stands():
  held_out = public_text.HeldOut([SHORT])
  assert held_out.repeats("It joins MANY arrays.")
  assert not held_out.repeats("It joins many long arrays.")
  assert not held_out.repeats("It joins many.")
  assert not held_out.repeats("It rejoins many arrays.")


def test_a_long_held_out_query_repeats_where_eight_words_of_it_stand():
  held_out = public_text.HeldOut([LONG])
  for start in range(4):
    part = LONG.split()[start : start + 8]
    assert held_out.repeats(f"Well: {' '.join(part)}, it says.")
    assert not held_out.repeats(" ".join(part[:7]))
    assert not held_out.repeats(" ".join(part[:4] + ["x"] + part[4:]))


def test_one_or_two_words_are_not_held_out():
  held_out = public_text.HeldOut(["Joins arrays.", "Sum", ""])
  assert not held_out.repeats("Joins arrays. Sum of joins arrays.")


def test_passages_close_before_they_grow_too_long():
  sentences = [words(n, 100 * n) for n in (6, 5, 4, 12, 7)]
  made = public_text.passages(sentences, max_words=12)
  assert made == [
    (sentences[0], sentences[1]),
    # 4 words alone are too few to learn from
    (sentences[3],),
  ]


def test_overlong_sentences_are_cut_to_a_passage():
  assert public_text.passages([words(50)], max_words=9) == [(words(9),)]


def test_no_word_is_lost_between_passages():
  rng = np.random.default_rng(0)
  sentences = [words(n, 100 * i) for i, n in enumerate(rng.integers(8, 40, 60))]
  made = public_text.passages(sentences, max_words=40)
  assert [s for passage in made for s in passage] == sentences
  lengths = [len(" ".join(passage).split()) for passage in made]
  assert max(lengths) <= 40
  joined = [a + b for a, b in zip(lengths, lengths[1:], strict=False)]
  assert min(joined) > 20


def test_sentences_end_behind_a_stop_that_a_capital_follows():
  parts = ["See e.g. this one.", "Then 3.5 of it!", '"Well":', "Is it?", "No"]
  assert public_text.split_sentences(" ".join(parts)) == parts


def test_first_paragraphs_never_enter(install):
  install("fake_docs", [(f"Secret {LONG}.", f"Body {words(10)}.")])
  text = read(NOTHING)
  assert text.passages == ((f"Body {words(10)}.",),)
  assert text.packages == ("fake_docs==1.0",)
  assert text.dropped == 0


def test_planted_repeats_of_a_query_are_dropped_and_counted(install):
  bodies = [
    f"Clean {words(9, 0)}. It {LONG}. Also {words(9, 20)}.",
    f"Clean {words(9, 40)}. What {SHORT} is this. More {words(9, 60)}.",
  ]
  install("fake_docs", [("First one.", body) for body in bodies])
  text = read(public_text.HeldOut([LONG, SHORT]))
  assert text.dropped == 2
  assert text.passages == (
    (f"Clean {words(9, 0)}.", f"Also {words(9, 20)}."),
    (f"Clean {words(9, 40)}.", f"More {words(9, 60)}."),
  )
  assert public_text.containment([LONG, SHORT], text) == [0.0, 0.0]
  planted = read(NOTHING)
  assert planted.dropped == 0
  assert public_text.containment([LONG, SHORT], planted) == [1.0, 1.0]


def test_a_query_across_two_sentences_takes_the_passage_with_it(install):
  half, other = LONG.split()[:5], LONG.split()[5:]
  body = f"So {words(8)} {' '.join(half)}. {' '.join(other).capitalize()} it."
  install("fake_docs", [("First one.", body)])
  assert read(NOTHING).passages != ()
  text = read(public_text.HeldOut([LONG]))
  assert text.passages == () and text.dropped == 2


def test_a_sentence_enters_once_and_absent_packages_not_at_all(install):
  same = f"Same {words(9)}."
  install("fake_one", [("First one.", f"{same} Other {words(9, 20)}.")])
  install("fake_two", [("First two.", f"{same} Third {words(9, 40)}.")])
  text = read(NOTHING, "fake_one", "not_there_at_all", "fake_two")
  assert text.passages == (
    (same, f"Other {words(9, 20)}."),
    (f"Third {words(9, 40)}.",),
  )
  assert text.packages == ("fake_one==1.0", "fake_two==1.0")


def test_containment_is_the_share_of_grams_in_the_whole_text():
  rng = np.random.default_rng(0)
  draw = lambda count: " ".join(rng.choice(["a", "b"], count))  # noqa: E731
  passages = tuple((draw(9), draw(15)) for _ in range(12))
  text = public_text.PublicText(passages, 0, ())
  queries = [draw(n) for n in rng.integers(1, 20, 200)]
  whole = [f" {' '.join(passage)} " for passage in passages]
  shares = []
  for query in queries:
    own = query.split()
    size = min(8, len(own))
    grams = [own[i : i + size] for i in range(len(own) - size + 1)]
    found = [any(f" {' '.join(g)} " in p for p in whole) for g in grams]
    shares.append(np.mean(found) if size > 2 else 0.0)
  np.testing.assert_allclose(public_text.containment(queries, text), shares)
  assert len(set(shares)) > 5


def test_the_digest_is_of_all_passages_in_order():
  def digest(*passages):
    return public_text.digest(public_text.PublicText(passages, 0, ()))

  wanted = hashlib.sha256(b"One.\nTwo.\n\nThree.\n\n").hexdigest()
  assert digest(("One.", "Two."), ("Three.",)) == wanted
  others = [
    digest(("Three.",), ("One.", "Two.")),
    digest(("One.",), ("Two.", "Three.")),
    digest(("One.", "Two.")),
  ]
  assert len({wanted, *others}) == 4


HANDFUL = ("numpy", "scipy", "optax", "flax", "jax")
"""Some of the packages whose text the shipped checkpoint was trained on."""


@pytest.fixture
def private(read_once):
  """Every query the demo set may hold on this machine."""
  config = environment_docs.EnvironmentDocs()
  return environment_docs.private_queries(config)


@pytest.mark.slow
def test_no_private_query_is_in_the_text_of_the_shipped_checkpoint(private):
  assert set(HANDFUL) <= set(pretrain_recipe.PACKAGES)
  assert len(private) > 5_000
  text = read(public_text.HeldOut(private), *HANDFUL)
  assert max(public_text.containment(private, text)) < 0.5
  assert text.dropped > 100
  assert len(text.passages) > 1_000


@pytest.mark.slow
def test_text_without_holding_out_would_break_that_promise(private):
  text = read(NOTHING, *HANDFUL)
  assert max(public_text.containment(private, text)) >= 0.5


@pytest.fixture
def recorded():
  if not (shipped.DIRECTORY / artifacts.RESULT_NAME).exists():
    pytest.skip("no result.json beside the shipped checkpoint")
  return artifacts.load(shipped.DIRECTORY, pretrain_recipe.Pretrained)


def test_the_shipped_checkpoint_records_that_no_query_was_left(recorded):
  assert recorded.largest_containment < 0.5
  assert recorded.dropped_sentences > 0
  assert recorded.num_held_out >= 5_000
  assert re.fullmatch("[0-9a-f]{64}", recorded.text_digest)


def test_the_text_of_the_shipped_checkpoint_can_be_made_again(recorded):
  if os.environ.get("SYNTHQ_SLOW_TESTS") != "1":
    pytest.skip("slow: set SYNTHQ_SLOW_TESTS=1")
  for entry in recorded.packages:
    package, version = entry.split("==")
    try:
      found = docstrings.version(package)
    except Exception:
      found = "none"
    if found != version:
      pytest.skip(f"made with {entry}, got version {found}")
  config = environment_docs.EnvironmentDocs()
  queries = environment_docs.private_queries(config)
  if len(queries) != recorded.num_held_out:
    pytest.skip("made with other versions of the demo set's packages")
  packages = [entry.split("==")[0] for entry in recorded.packages]
  text = read(public_text.HeldOut(queries), *packages)
  assert public_text.digest(text) == recorded.text_digest
