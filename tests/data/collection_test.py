import pytest

from synthq_jax.data import collection

DOCUMENTS = (
  collection.Document("d1", "one"),
  collection.Document("d2", "two", title="Two"),
)
QUERIES = (collection.Query("q1", "uno"), collection.Query("q2", "due"))


def make(qrels, documents=DOCUMENTS, queries=QUERIES):
  return collection.Collection(documents, queries, qrels)


def test_pairs_leave_out_grade_zero_and_keep_the_order():
  tiny = make({"test": {"q2": {"d2": 2, "d1": 0}, "q1": {"d1": 1}}})
  assert tiny.pairs("test") == [("q2", "d2"), ("q1", "d1")]


def test_a_missing_split_is_named_beside_those_there():
  with pytest.raises(ValueError, match=r"\['test'\], got split='dev'"):
    make({"test": {}}).pairs("dev")


def test_an_id_that_stands_twice_is_refused():
  with pytest.raises(ValueError, match="document ids, got 'd1' twice"):
    make({}, documents=(DOCUMENTS[0], DOCUMENTS[0]))


@pytest.mark.parametrize("bad", ["", "\u00a0q"])
def test_an_id_with_white_space_is_refused(bad):
  with pytest.raises(ValueError, match="query id without white space"):
    make({}, queries=(collection.Query(bad, "text"),))


@pytest.mark.parametrize("bad", ["q1\0", "q\x7f"])
def test_an_id_with_a_control_character_is_refused(bad):
  """NumPy drops a NUL at the end, and pytrec_eval what follows one."""
  with pytest.raises(ValueError, match="control characters, got one;"):
    make({}, queries=(collection.Query(bad, "text"),))
  documents = (collection.Document(bad, "text"),)
  with pytest.raises(ValueError) as caught:  # noqa: PT011
    make({}, documents=documents)
  message = "expected a document id without control characters, got"
  assert str(caught.value) == f"{message} {bad!r}; give it another"
  assert collection.check_id("query", "q\u00e9\u0915\u094d")


def test_judgements_of_unknown_ids_are_refused():
  with pytest.raises(ValueError, match="got unknown query ids;"):
    make({"test": {"q9": {"d1": 1}}})
  with pytest.raises(ValueError, match="got unknown document ids;"):
    make({"test": {"q1": {"d9": 1}}})


def streamed(*documents):
  return collection.StreamedDocuments(
    ("d1", "d2"), lambda: iter(documents or DOCUMENTS)
  )


def test_streamed_documents_are_read_as_often_as_they_are_looped_over():
  tiny = make({"test": {"q1": {"d2": 1}}}, documents=streamed())
  assert list(tiny.documents) == list(tiny.documents) == list(DOCUMENTS)


@pytest.mark.parametrize(
  "now, message",
  [
    (DOCUMENTS[::-1], "got 'd2' at another position"),
    (DOCUMENTS[:1], "got no 'd2'"),
    ((*DOCUMENTS, collection.Document("d3", "three")), "got 'd3' at another"),
  ],
)
def test_a_file_that_changes_between_two_readings_is_refused(now, message):
  with pytest.raises(ValueError, match=message):
    list(streamed(*now))


def test_joined_splits_hold_all_judgements_and_replace_their_parts():
  three = make(
    {
      "train": {"q2": {"d1": 1}},
      "dev": {"q1": {"d1": 1}},
      "test": {"q1": {"d2": 2}, "q2": {"d2": 1}},
    }
  )
  joined = collection.join_splits(three, "dev+test")
  assert set(joined.qrels) == {"train", "dev+test"}
  assert joined.qrels["dev+test"] == {
    "q1": {"d1": 1, "d2": 2},
    "q2": {"d2": 1},
  }
  assert three.qrels["dev"] == {"q1": {"d1": 1}}
  assert collection.join_splits(three, "test") is three


def test_a_joined_split_without_one_of_its_parts_is_refused():
  with pytest.raises(ValueError, match="split='dev'"):
    collection.join_splits(make({"test": {"q1": {"d1": 1}}}), "dev+test")


def test_spellings_of_one_user_are_one_user():
  """A CSV with spaces behind its commas made three of one, each with K queries."""
  names = ["Ann", " Ann", "Ann "], ["caf\u00e9", "cafe\u0301 "]
  for group in names:
    assert len({collection.get_owner("log:1", [name]) for name in group}) == 1
  assert collection.get_owner("log:1", [" ", "\u3000"]) == ""
  assert collection.get_owner("log:1", ["ann"]) != "Ann"
