import numpy as np
import pytest

from synthq_jax.federated import federation, passages


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
  built = federation.build(data, **options)
  return built, {client.name: client for client in built.clients}


def test_a_client_holds_its_passages_in_order_with_their_sentences():
  _, clients = by_name(judged(HOLDERS, [("q", "", "test", {"s": (1, 0)})]))
  assert clients["a"].passage_ids == ("p", "s")
  assert clients["a"].sentences == ("p 0", "p 1", "s 0", "s 1")
  np.testing.assert_array_equal(clients["a"].passages, [0, 0, 1, 1])
  assert clients["a"].splits["test"].answers == ((3, 2),)
  assert clients["a"].splits["test"].texts == ("text q",)


def test_a_question_belongs_to_who_asks_else_to_who_holds_the_first_answer():
  _, clients = by_name(
    judged(
      HOLDERS,
      [
        ("q1", "b", "test", {"p": (0,), "r": (0,)}),
        ("q2", "", "test", {"r": (1,), "p": (0,)}),
        ("q3", "", "test", {"shared": (0,), "p": (0,)}),
      ],
    )
  )
  assert clients["b"].splits["test"].ids == ("q1", "q2")
  assert clients["a"].splits["test"].ids == ("q3",)


def test_another_clients_passage_is_no_answer_unless_it_is_copied():
  data = judged(
    HOLDERS,
    [
      ("q1", "a", "test", {"r": (1,), "p": (0,)}),
      ("q2", "a", "test", {"r": (0,)}),
    ],
  )
  alone, clients = by_name(data)
  assert clients["a"].passage_ids == ("p", "s")
  assert clients["a"].splits["test"].ids == ("q1",)
  assert clients["a"].splits["test"].answers == ((0,),)
  assert (alone.num_foreign_judgements, alone.num_copies) == (2, 0)
  assert alone.num_lost_questions == 1
  copied, clients = by_name(data, copy_passages=True)
  assert clients["a"].passage_ids == ("p", "r", "s")
  assert clients["a"].splits["test"].answers == ((3, 0), (2,))
  assert clients["b"].passage_ids == ("r",)
  assert (copied.num_copies, copied.num_lost_questions) == (1, 0)


def test_a_passage_of_nobody_goes_to_all_who_ask_what_it_answers():
  data = judged(
    HOLDERS,
    [
      ("q1", "a", "test", {"shared": (0,)}),
      ("q2", "b", "train", {"shared": (1,)}),
    ],
  )
  built, clients = by_name(data)
  assert clients["a"].passage_ids == ("p", "s", "shared")
  assert clients["b"].passage_ids == ("r", "shared")
  assert clients["b"].splits["train"].answers == ((3,),)
  assert (built.num_copies, built.num_lost_passages) == (2, 1)
  assert built.num_foreign_judgements == 0


def test_a_question_that_nobody_asks_about_nobodys_passage_is_lost():
  built, clients = by_name(
    judged(HOLDERS, [("q", "", "test", {"shared": (0,)})])
  )
  assert built.num_lost_questions == 1
  assert all(not len(client.splits["test"]) for client in clients.values())


def test_all_clients_have_all_splits_even_without_a_question():
  _, clients = by_name(
    judged(
      HOLDERS,
      [("q1", "a", "train", {"p": (0,)}), ("q2", "b", "test", {"r": (0,)})],
    )
  )
  for client in clients.values():
    assert set(client.splits) == {"train", "test"}
  assert len(clients["b"].splits["train"]) == 0


def test_who_asks_and_holds_nothing_is_no_client():
  built, clients = by_name(judged(HOLDERS, [("q", "c", "t", {"p": (0,)})]))
  assert set(clients) == {"a", "b"}
  assert built.num_lost_questions == 1


def test_equal_questions_and_equal_sentences_of_several_passages_stay():
  data = passages.JudgedPassages(
    passages=tuple(
      passages.Passage(id=id_, sentences=("Same.",), client="a") for id_ in "pr"
    ),
    questions=tuple(
      passages.Question(id=id_, text="same?", split="t", answers={"r": (0,)})
      for id_ in "xy"
    ),
  )
  (client,) = federation.build(data).clients
  assert client.sentences == ("Same.", "Same.")
  assert client.splits["t"].answers == ((1,), (1,))


def test_passages_that_all_name_nobody_are_refused():
  with pytest.raises(ValueError, match="passages with clients, got none"):
    federation.build(judged({"p": ""}, []))
