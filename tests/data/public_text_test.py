import collections
import re

import numpy as np
import pytest

from synthq_jax import artifacts
from synthq_jax.data import open_text, public_text, shipped, text_sources
from synthq_jax.stages import pretrain_recipe

LONG = "returns the sum of all array elements over a given axis"  # 11 words
SHORT = "joins many arrays"
NOTHING = public_text.HeldOut([])


def words(count, start=0):
  letters = str.maketrans("0123456789", "abcdefghij")
  return " ".join(
    f"word{i}".translate(letters) for i in range(start, start + count)
  )


def entry(text, title="Some heading", kind="heading"):
  return open_text.Entry(kind, title, text)


def records(entries, held_out=NOTHING, seen=None, **options):
  """Returns the records and what was dropped."""
  dropped = collections.Counter()
  seen = set() if seen is None else seen
  made = public_text.records(entries, held_out, seen, dropped, **options)
  return list(made), dropped


def repeats(held_out, text):
  return held_out.flags([[text]]) == [[True]]


def test_grams_are_eight_words_or_the_whole_of_less():
  assert public_text.grams("Two words!") == []
  assert public_text.grams("Not two words") == [("not", "two", "words")]
  assert public_text.grams(words(8)) == [tuple(words(8).split())]
  assert public_text.grams(words(10)) == [
    tuple(words(8, start).split()) for start in range(3)
  ]


def test_a_short_held_out_query_repeats_where_all_of_it_stands():
  held_out = public_text.HeldOut([SHORT])
  assert repeats(held_out, "It joins MANY arrays.")
  assert not repeats(held_out, "It joins many long arrays.")
  assert not repeats(held_out, "It joins many.")
  assert not repeats(held_out, "It rejoins many arrays.")


def test_a_long_held_out_query_repeats_where_eight_words_of_it_stand():
  held_out = public_text.HeldOut([LONG])
  for start in range(4):
    part = LONG.split()[start : start + 8]
    assert repeats(held_out, f"Well: {' '.join(part)}, it says.")
    assert not repeats(held_out, " ".join(part[:7]))
    assert not repeats(held_out, " ".join(part[:4] + ["x"] + part[4:]))


def test_one_or_two_words_are_not_held_out():
  held_out = public_text.HeldOut(["Joins arrays.", "Sum", ""])
  assert not repeats(held_out, "Joins arrays. Sum of joins arrays.")


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


def test_what_is_flagged_are_the_sentences_that_repeat():
  held_out = public_text.HeldOut([LONG, SHORT])
  half, other = " ".join(LONG.split()[:5]), " ".join(LONG.split()[5:])
  texts = [
    [f"It {LONG}.", "No.", f"So {SHORT}"],
    [f"Well, {half}.", f"{other}."],  # over the end of a sentence
    [f"Well, {half}."],
    [f"{other}."],  # not over the end of a text
    [],
  ]
  assert held_out.flags(texts) == [
    [True, False, True], [True, True], [False], [False], [],
  ]  # fmt: skip


def test_flags_are_those_of_a_search_word_by_word():
  rng = np.random.default_rng(0)
  draw = lambda count: " ".join(rng.choice(["a", "b"], count))  # noqa: E731
  texts = [[draw(n)] for n in rng.integers(1, 40, 300)]
  queries = [draw(n) for n in rng.integers(1, 20, 30)]
  grams = [" ".join(g) for q in queries for g in public_text.grams(q)]
  wanted = [any(f" {g} " in f" {t} " for g in grams) for [t] in texts]
  flags = public_text.HeldOut(queries).flags(texts)
  assert [f for [f] in flags] == wanted
  assert len(set(wanted)) == 2


def test_a_title_stands_over_the_first_passage_of_its_text():
  parts = [f"Part {words(12, 20 * i)}." for i in range(3)]
  made, dropped = records([entry(" ".join(parts))], max_words=13)
  assert [(r.kind, r.query, r.passage) for r in made] == [
    ("heading", "Some heading", parts[0])
  ]  # the others are too short to be read without a title
  assert not sum(dropped.values())
  long = [f"Part {words(40, 50 * i)}." for i in range(2)]
  made, _ = records([entry(" ".join(long))], max_words=41)
  assert [(r.kind, r.passage) for r in made] == [
    ("heading", long[0]),
    ("", long[1]),
  ]


def test_planted_repeats_of_a_query_are_dropped_and_counted():
  bodies = [
    f"Clean {words(19, 0)}. It {LONG}. Also {words(19, 20)}.",
    f"Clean {words(19, 40)}. What {SHORT} is this. More {words(19, 60)}.",
  ]
  entries = [entry(bodies[0]), entry(bodies[1], f"On {SHORT}")]
  made, dropped = records(entries, public_text.HeldOut([LONG, SHORT]))
  assert +dropped == {"sentences": 2, "titles": 1}
  assert [(r.query, r.passage) for r in made] == [
    ("Some heading", f"Clean {words(19, 0)}. Also {words(19, 20)}."),
    ("", f"Clean {words(19, 40)}. More {words(19, 60)}."),
  ]
  assert public_text.repeated([LONG, SHORT], made) == 0
  planted, _ = records(entries)
  assert public_text.repeated([LONG, SHORT], planted) == 2


def test_what_a_dropped_sentence_brings_together_is_dropped_too():
  half, other = " ".join(LONG.split()[:5]), " ".join(LONG.split()[5:])
  text = f"So {words(8)} {half}. And {SHORT} it. {other.capitalize()} it."
  held_out = public_text.HeldOut([LONG, SHORT])
  made, dropped = records([entry(text)], held_out)
  assert made == [] and dropped["records"] == 1


def test_a_question_that_a_rule_makes_is_checked_as_well():
  text = f"A bolt is a pin with a thread. It {words(30)}."
  asked = "what is a bolt"
  made, _ = records([entry(text, "Bolts")])
  assert asked in {r.query for r in made if r.kind == "rule"}
  made, dropped = records([entry(text, "Bolts")], public_text.HeldOut([asked]))
  assert asked not in {r.query for r in made} and dropped["records"] == 1


def test_a_sentence_enters_once():
  same = f"The same sentence is {words(39)}."
  seen = set()
  assert len(records([entry(same)], seen=seen)[0]) == 1
  assert records([entry(same, "Another title")], seen=seen)[0] == []


@pytest.mark.parametrize(
  ("kind", "title"),
  [
    ("question", "Is it so"),
    ("summary", "stack(arrays) joins many arrays"),
    ("heading", words(13)),
    ("heading", "\u4e2d\u6587\u6807\u9898"),
    ("heading", "--- 1 2 3 ---"),
  ],
)
def test_what_is_no_title_leaves_the_passage_alone(kind, title):
  text = f"A passage of {words(40)}."
  [made], _ = records([entry(text, title, kind)])
  is_kept = title == "Is it so"
  assert (made.kind, made.query) == ((kind, title) if is_kept else ("", ""))


@pytest.fixture(scope="module")
def recorded():
  return artifacts.load(shipped.DIRECTORY, pretrain_recipe.Pretrained)


def test_the_shipped_checkpoint_records_that_no_query_was_left(recorded):
  assert recorded.num_repeated == 0
  assert recorded.dropped["sentences"] > 0
  assert recorded.num_held_out["demo"] >= 5_000
  assert re.fullmatch("[0-9a-f]{64}", recorded.text_digest)


def test_the_shipped_checkpoint_was_made_of_what_its_manifest_names(recorded):
  named = {
    f"{source.name} {source.version} ({source.licence})"
    for source in text_sources.manifest(shipped.DIRECTORY / "sources.json")
  }
  assert {line.partition("): ")[0] + ")" for line in recorded.sources} == named
