"""Clients of a federation: their texts, tokens and numbers."""

import numpy as np
import pytest

from synthq_jax.data import shipped, vocabulary
from synthq_jax.federated import clients, passages


def client():
  return clients.Client(
    name="site",
    sentences=("Apples are red.", "Pears are not.", "Plums are blue."),
    passages=np.array([0, 0, 1], np.int32),
    passage_ids=("p", "r"),
    splits={
      "train": clients.Questions(
        ids=("q",), texts=("what is red",), answers=((0, 1),)
      ),
      "test": clients.Questions(),
    },
  )


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


def test_texts_do_not_stand_in_what_errors_print():
  shown = repr(client()) + repr(client().splits["train"])
  assert "red" not in shown and "Pears" not in shown


def judged(holders, asked):
  """Passages of two sentences each; questions as (id, asker, answers)."""
  return passages.JudgedPassages(
    passages=tuple(
      passages.Passage(
        id=id_, sentences=(f"{id_} 0", f"{id_} 1"), client=client
      )
      for id_, client in holders.items()
    ),
    questions=tuple(
      passages.Question(
        id=id_, text=f"text {id_}", split=split, answers=answers, client=client
      )
      for id_, client, split, answers in asked
    ),
  )


HOLDERS = {"p": "a", "r": "b", "s": "a", "shared": "", "nobody": ""}


def by_name(data, **options):
  built, found = clients.build(data, **options)
  return found, {client.name: client for client in built}


def test_a_client_holds_its_passages_in_order_with_their_sentences():
  _, named = by_name(judged(HOLDERS, [("q", "", "test", {"s": (1, 0)})]))
  assert named["a"].passage_ids == ("p", "s")
  assert named["a"].sentences == ("p 0", "p 1", "s 0", "s 1")
  np.testing.assert_array_equal(named["a"].passages, [0, 0, 1, 1])
  assert named["a"].splits["test"].answers == ((3, 2),)
  assert named["a"].splits["test"].texts == ("text q",)


def test_a_question_belongs_to_who_asks_else_to_who_holds_the_first_answer():
  _, named = by_name(
    judged(
      HOLDERS,
      [
        ("q1", "b", "test", {"p": (0,), "r": (0,)}),
        ("q2", "", "test", {"r": (1,), "p": (0,)}),
        ("q3", "", "test", {"shared": (0,), "p": (0,)}),
      ],
    )
  )
  assert named["b"].splits["test"].ids == ("q1", "q2")
  assert named["a"].splits["test"].ids == ("q3",)


def test_another_clients_passage_is_no_answer():
  data = judged(
    HOLDERS,
    [
      ("q1", "a", "test", {"r": (1,), "p": (0,)}),
      ("q2", "a", "test", {"r": (0,)}),
    ],
  )
  alone, named = by_name(data)
  assert named["a"].passage_ids == ("p", "s")
  assert named["a"].splits["test"].ids == ("q1",)
  assert named["a"].splits["test"].answers == ((0,),)
  assert (alone["num_foreign_judgements"], alone["num_lost_questions"]) == (
    2,
    1,
  )


def test_a_passage_of_nobody_goes_to_all_who_ask_what_it_answers():
  data = judged(
    HOLDERS,
    [
      ("q1", "a", "test", {"shared": (0,)}),
      ("q2", "b", "train", {"shared": (1,)}),
    ],
  )
  found, named = by_name(data)
  assert named["a"].passage_ids == ("p", "s", "shared")
  assert named["b"].passage_ids == ("r", "shared")
  assert named["b"].splits["train"].answers == ((3,),)
  assert found["num_foreign_judgements"] == 0
  assert (found["num_shared_passages"], found["num_unheld_passages"]) == (1, 1)


def test_a_question_that_nobody_asks_about_nobodys_passage_is_lost():
  found, named = by_name(judged(HOLDERS, [("q", "", "test", {"shared": (0,)})]))
  assert found["num_lost_questions"] == 1
  assert (found["num_shared_passages"], found["num_unheld_passages"]) == (0, 2)
  assert all(not len(client.splits["test"]) for client in named.values())


def test_who_asks_and_holds_nothing_is_no_client():
  found, named = by_name(judged(HOLDERS, [("q", "c", "t", {"p": (0,)})]))
  assert set(named) == {"a", "b"}
  assert found["num_lost_questions"] == 1


def test_passages_that_all_name_nobody_are_refused():
  with pytest.raises(ValueError, match="passages with clients, got none"):
    clients.build(judged({"p": ""}, []))
