import numpy as np
import pytest

from synthq_jax.data import shipped, vocabulary
from synthq_jax.federated import clients


def client(**changes):
  fields = {
    "name": "site",
    "sentences": ("Apples are red.", "Pears are not.", "Plums are blue."),
    "passages": np.array([0, 0, 1], np.int32),
    "passage_ids": ("p", "r"),
    "splits": {
      "train": clients.Questions(
        ids=("q",), texts=("what is red",), answers=((0, 1),)
      ),
      "test": clients.Questions(),
    },
  }
  return clients.Client(**fields | changes)


@pytest.fixture(scope="module")
def words():
  return vocabulary.load(shipped.VOCABULARY, extra_ids=shipped.EXTRA_IDS)


def test_tokens_are_the_vocabularys_and_keep_places_and_answers(words):
  tokens = clients.tokenize(client(), words, query_length=8, sentence_length=16)
  assert tokens.sentences.shape == (3, 16)
  assert tokens.sentences.dtype == np.int32
  for row, text in zip(tokens.sentences, client().sentences, strict=True):
    expected = [*words.encode(text), vocabulary.EOS_ID]
    assert row[: len(expected)].tolist() == expected
    assert not row[len(expected) :].any()
  assert tokens.questions["train"].shape == (1, 8)
  assert tokens.questions["test"].shape == (0, 8)
  assert tokens.answers == {"train": ((0, 1),), "test": ()}
  assert tokens.name == "site"


def test_longer_texts_are_cut_and_keep_their_end(words):
  tokens = clients.tokenize(client(), words, query_length=2, sentence_length=3)
  assert (tokens.sentences[:, -1] == vocabulary.EOS_ID).all()
  assert tokens.questions["train"][0, -1] == vocabulary.EOS_ID


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"passages": np.array([0, 1])}, "a passage for each of 3 sentences"),
    ({"passages": np.array([1, 1, 2])}, "numbered 0, 0, 1"),
    ({"passages": np.array([0, 2, 2])}, "numbered 0, 0, 1"),
    ({"passages": np.array([0, 1, 0])}, "numbered 0, 0, 1"),
    ({"passage_ids": ("p",)}, "an id for each of 2 passages, got 1"),
    ({"sentences": ()}, "a passage for each of 0 sentences"),
    (
      {
        "splits": {
          "dev": clients.Questions(ids=("q",), texts=("t",), answers=((3,),))
        }
      },
      r"answers among 3 sentences, got \(3,\) in split 'dev'",
    ),
  ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    client(**changes)


def test_questions_have_an_id_a_text_and_answers_each():
  with pytest.raises(ValueError, match="got 1, 0 and 1"):
    clients.Questions(ids=("q",), answers=((0,),))


def test_texts_do_not_stand_in_what_errors_print():
  shown = repr(client()) + repr(client().splits["train"])
  assert "red" not in shown and "Pears" not in shown


def test_tokens_refuse_answers_without_questions():
  with pytest.raises(ValueError, match="answers to each of 2 train questions"):
    clients.Tokens(
      name="site",
      sentences=np.ones((1, 4), np.int32),
      passages=np.zeros(1, np.int32),
      questions={"train": np.ones((2, 4), np.int32)},
      answers={"train": ((0,),)},
    )
