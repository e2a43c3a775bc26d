import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthq_jax.data import collection, newsqa
from synthq_jax.federated import passages


def make(documents, qrels, queries=("q1", "q2")):
  return collection.Collection(
    tuple(documents),
    tuple(collection.Query(id_, f"text of {id_}", "asker") for id_ in queries),
    qrels,
  )


def document(id_, text, **others):
  return collection.Document(id_, text, **others)


def test_all_sentences_answer_and_the_first_long_enough_is_trained_on(
  monkeypatch,
):
  monkeypatch.setattr(passages, "MIN_WORDS", 5)
  data = make(
    [
      document("d", "Too short. This one has five words. So has this one here.")
    ],
    {"train": {"q1": {"d": 1}}, "dev": {"q2": {"d": 2}}},
  )
  judged = passages.from_documents(data)
  assert [q.answers for q in judged.questions] == [{"d": (1, 0, 2)}] * 2
  assert [q.split for q in judged.questions] == ["train", "dev"]
  assert {q.client for q in judged.questions} == {"asker"}


def test_the_longest_is_trained_on_where_all_are_short(
  monkeypatch,
):
  monkeypatch.setattr(passages, "MIN_WORDS", 9)
  data = make(
    [document("d", "As be. Cs do ed. Fs go hi.")], {"t": {"q1": {"d": 1}}}
  )
  judged = passages.from_documents(data)
  assert judged.questions[0].answers == {"d": (1, 0, 2)}


def test_which_sentence_is_trained_on_does_not_depend_on_the_question(
  monkeypatch,
):
  monkeypatch.setattr(passages, "MIN_WORDS", 3)
  text = "Apples are grown in orchards. Pears are green and sweet fruits."
  data = make([document("d", text)], {"t": {"q1": {"d": 1}, "q2": {"d": 1}}})
  queries = (
    collection.Query("q1", "Pears are green and sweet fruits."),
    collection.Query("q2", "orchards"),
  )
  data = collection.Collection(data.documents, queries, data.qrels)
  judged = passages.from_documents(data)
  assert [q.answers["d"][0] for q in judged.questions] == [0, 0]


def test_sentences_that_ask_are_left_out_unless_there_are_no_others():
  data = make(
    [
      document("d", 'What is it? It is red. "Why red?" Nobody knows.'),
      document("e", "What is it? Who knows?"),
    ],
    {"t": {"q1": {"d": 1, "e": 1}}},
  )
  judged = passages.from_documents(data)
  told = ("It is red.", "Nobody knows.")
  assert [p.sentences for p in judged.passages] == [
    told,
    ("What is it?", "Who knows?"),
  ]


def test_repeated_sentences_and_those_behind_the_limit_are_left_out():
  data = make(
    [document("d", "Red. Red. Round. Sweet.", title="Apple")],
    {"t": {"q1": {"d": 1}}},
  )
  whole = passages.from_documents(data).passages[0]
  assert whole.sentences == ("Apple", "Red.", "Round.", "Sweet.")
  cut = passages.from_documents(data, max_sentences=2).passages[0]
  assert cut.sentences == ("Apple", "Red.")
  with pytest.raises(ValueError, match="max_sentences >= 1 or None, got 0"):
    passages.from_documents(data, max_sentences=0)


def test_documents_without_words_and_judgements_of_grade_zero_do_not_count():
  data = make(
    [document("d", "..."), document("e", "Words.")],
    {"t": {"q1": {"d": 1}, "q2": {"d": 1, "e": 0}}},
  )
  judged = passages.from_documents(data)
  assert [p.id for p in judged.passages] == ["e"]
  assert judged.questions == ()


def test_judged_sentences_are_the_answers_in_their_passages():
  data = make(
    [
      document("s1", "One.", client="a"),
      document("s2", "Two.", client="a"),
      document("s3", "Three.", client="b"),
      document("s4", "One.", client="a"),
      document("s5", "Five."),
    ],
    {"test": {"q1": {"s4": 1, "s2": 1, "s3": 1, "s1": 1, "s5": 0}}},
  )
  of = {"s1": "p", "s2": "p", "s3": "r", "s4": "p", "s5": "r"}
  judged = passages.from_sentences(data, of)
  assert [(p.id, p.sentences, p.client) for p in judged.passages] == [
    ("p", ("One.", "Two."), "a"),
    ("r", ("Three.", "Five."), ""),  # its sentences do not agree
  ]
  # "One." stands twice in its passage, and is judged twice: it counts once.
  assert judged.questions[0].answers == {"p": (0, 1), "r": (0,)}
  with pytest.raises(ValueError, match="a passage for each document, got none"):
    passages.from_sentences(data, {"s1": "p"})


def story(text, *spans):
  questions = tuple(
    newsqa.Question(id=f"s-{i}", text="who", start=a, end=b)
    for i, (a, b) in enumerate(spans)
  )
  return newsqa.Story(id="s", text=text, split="dev", questions=questions)


def test_the_sentences_that_a_span_lies_in_answer_the_largest_part_first():
  text = "Ada came home. Then Bob left the house."
  inside = text.index("Bob"), text.index("Bob") + 3
  across = text.index("home"), len(text)
  judged = passages.from_stories([story(text, inside, across)])
  assert [q.answers for q in judged.questions] == [{"s": (1,)}, {"s": (1, 0)}]
  assert [q.split for q in judged.questions] == ["dev", "dev"]


def test_spans_outside_of_all_sentences_and_empty_stories_are_left_out():
  text = "Ada came.    Bob left."
  judged = passages.from_stories([story(text, (10, 12)), story("...")])
  assert len(judged.passages) == 1 and judged.questions == ()


def test_a_span_in_a_repeated_sentence_is_its_first_place():
  text = "He ran. She fell. He ran."
  judged = passages.from_stories([story(text, (18, 20))])
  assert judged.passages[0].sentences == ("He ran.", "She fell.")
  assert judged.questions[0].answers == {"s": (0,)}


@pytest.mark.parametrize(
  "ids, answers, message",
  [
    (("p", "p"), {"p": (0,)}, "some twice among 2 passages"),
    (("p",), {}, "an answer to each question, got none to 'q'"),
    (("p",), {"p": ()}, "an answer to each question, got none to 'q'"),
    (("p", "r"), {"p": (1,)}, "positions .* got others in an answer to 'q'"),
    (("p", "r"), {"r": (-1,)}, "positions .* got others in an answer to 'q'"),
    (("p",), {"x": (0,)}, "positions .* got others in an answer to 'q'"),
  ],
)
def test_ids_twice_and_questions_without_an_answer_are_refused(
  ids, answers, message
):
  with pytest.raises(ValueError, match=message):
    passages.JudgedPassages(
      passages=tuple(passages.Passage(id=i, sentences=("A.",)) for i in ids),
      questions=(
        passages.Question(id="q", text="?", split="test", answers=answers),
      ),
    )


@pytest.mark.parametrize(
  "text, expected",
  [
    ("One is here. Two is not.", ["One is here.", "Two is not."]),
    ("Really?! Yes. (It is.) So.", ["Really?!", "Yes.", "(It is.)", "So."]),
    ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
    ("See Dr. Doe, e.g. at 5 p.m. on Monday.", None),
    ("It weighs 2.5 kg. 3 of 4 do.", ["It weighs 2.5 kg.", "3 of 4 do."]),
    ("Take no. 5 of them. She said no. He ran.", None),
    ("Ask Rep. Doe or a rep. Then go.", ["Ask Rep. Doe or a rep.", "Then go."]),
    ("J. R. R. Doe wrote of E. coli, cf. p. 3.", None),
    ("The U.S. Army is large.", None),
    ("It is in the U.S. It grows.", ["It is in the U.S.", "It grows."]),
    ("1. Wash. 2. Rinse well.", ["1. Wash.", "2. Rinse well."]),
    ("Signs: - Fever. - A rash.", ["Signs: - Fever.", "A rash."]),
    ("Signs include - fever - a rash", ["Signs include - fever - a rash"]),
    ("- well-known\n\n* item", ["well-known", "item"]),
    ("a wrapped\nline. Next", ["a wrapped\nline.", "Next"]),
    ("Wait... what? ... Fine.", ["Wait... what?", "Fine."]),
    ("", []),
    (" - ... !", []),
  ],
)
def test_a_sentence_ends_where_a_reader_would_end_it(text, expected):
  if text.startswith("Take no."):  # one word, an abbreviation and a word
    expected = ["Take no. 5 of them.", "She said no.", "He ran."]
  assert passages.split_sentences(text) == (
    [text] if expected is None else expected
  )


@pytest.mark.parametrize(
  "text, pieces",
  [
    ("w1 w2 - w3 w4; w5 w6, w7", ["w1 w2 - w3", "w4; w5 w6, w7"]),
    ("a b c - d e f", ["a b c", "d e f"]),
    ("a b c; d, e f", ["a b c;", "d, e f"]),
    ("a b c, d e f", ["a b c,", "d e f"]),
    ("a b c d e f", ["a b c d", "e f"]),
  ],
)
def test_a_long_sentence_is_cut_before_an_item_then_behind_marks(
  monkeypatch, text, pieces
):
  monkeypatch.setattr(passages, "MAX_WORDS", 4)
  assert passages.split_sentences(text) == pieces


@given(
  st.text(alphabet="aB1.?!-*,;() \n\u201d", max_size=200), st.integers(1, 7)
)
def test_sentences_cover_each_letter_once_in_order(text, max_words):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(passages, "MAX_WORDS", max_words)
    places = passages.sentence_spans(text)
  flat = [place for pair in places for place in pair]
  assert flat == sorted(flat)
  covered = "".join(text[start:end] for start, end in places)
  letters = [c for c in text if c.isalnum()]
  assert [c for c in covered if c.isalnum()] == letters
  for start, end in places:
    assert text[start:end] == text[start:end].strip()
    assert len(text[start:end].split()) <= max_words
