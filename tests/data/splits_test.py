import collections
import dataclasses
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import small_data

from synthq_jax.data import collection, sources, splits


def make_pairs(count, seed=0):
  """Pairs over few words and few documents, so that groups form."""
  rng = random.Random(seed)
  words = [f"w{i}" for i in range(400)]
  return [
    (" ".join(rng.sample(words, 3)), f"document {rng.randrange(count)}")
    for _ in range(count)
  ]


def test_queries_of_equal_words_stand_on_one_side():
  pairs = [
    (text, f"{copy} of {number}")
    for number in range(300)
    for copy, text in enumerate(
      (f"Red, apple {number}?", f"{number} apple RED")
    )
  ]
  assigned = splits.split_by_document(pairs)
  assert assigned[::2] == assigned[1::2]
  assert set(assigned) == {"train", "dev", "test"}
  alone = [
    (f"{text} {i}", document) for i, (text, document) in enumerate(pairs)
  ]
  assigned = splits.split_by_document(alone)
  assert assigned[::2] != assigned[1::2]


def test_a_chain_of_shared_documents_and_queries_is_one_group():
  chain = []
  for i in range(200):
    chain += [
      (f"query {i}", f"document {i}"),
      (f"query {i}", f"document {i + 1}"),
    ]
  for seed in range(5):
    assert len(set(splits.split_by_document(chain, seed=seed))) == 1


def test_shares_are_as_asked_within_five_standard_deviations():
  count = 20_000
  pairs = [(f"query {i}", f"document {i}") for i in range(count)]
  got = collections.Counter(splits.split_by_document(pairs))
  for split, share in splits.FRACTIONS.items():
    deviation = (count * share * (1 - share)) ** 0.5
    assert abs(got[split] - count * share) < 5 * deviation


def test_a_group_keeps_the_share_whatever_its_size():
  # The hash of the least of ten documents: were it the least of ten hashes,
  # nearly all groups would fall into the first split.
  pairs = [(f"q {i}", f"d {i} {j}") for i in range(1000) for j in range(10)]
  got = collections.Counter(
    splits.split_by_document(pairs, {"a": 0.5, "b": 0.5})
  )
  assert abs(got["a"] / 10 - 500) < 5 * 250**0.5


def test_neither_order_nor_other_pairs_move_a_group():
  pairs = [(f"query {i}", f"document {i}") for i in range(500)]
  sides = dict(zip(pairs, splits.split_by_document(pairs), strict=True))
  fewer = pairs[::-3]
  assert splits.split_by_document(fewer) == [sides[pair] for pair in fewer]


def moved(split, pairs) -> int:
  """Counts the pairs that another pair moves into the first split or out."""
  sides = split(pairs)
  others = [(pairs[i][0], pairs[i - 1][1]) for i in range(0, len(pairs), 7)]
  return sum(
    (one == "train") != (before == "train")
    for other in others
    for one, before in zip(split([other, *pairs])[1:], sides, strict=True)
  )


def test_by_its_own_document_no_pair_is_moved_by_another():
  pairs = make_pairs(150)
  pairs += [(f"query {i}", f"single {i}") for i in range(150)]
  assert moved(splits.split_by_own_document, pairs) == 0
  assert moved(splits.split_by_document, pairs) > 5  # groups are


def test_by_its_own_document_the_words_of_an_earlier_side_are_left_out():
  pairs = [(f"{i % 90} apple", f"document {i}") for i in range(600)]
  sides = splits.split_by_own_document(pairs)
  place = {"train": 0, "dev": 1, "test": 2}
  alone = [splits.split_by_own_document([pair])[0] for pair in pairs]
  first = {}
  for (query, _), side in zip(pairs, alone, strict=True):
    first[query] = min(first.get(query, side), side, key=place.get)
  assert sides == [
    side if side == first[query] else None
    for (query, _), side in zip(pairs, alone, strict=True)
  ]
  assert 50 < sides.count(None) < 200


def test_splits_do_not_depend_on_pythons_hash_seed():
  code = (
    "from synthq_jax.data import splits; print(splits.split_by_document("
    "[(f'a b {i}', f'd {i // 2}') for i in range(60)]))"
  )
  results = {
    subprocess.run(
      [sys.executable, "-c", code],
      env={"PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ("1", "2")
  }
  assert len(results) == 1 and "train" in results.pop()


def test_texts_without_words_are_words_of_their_own():
  assert splits.token_set("?!") != splits.token_set("...")
  assert splits.token_set("Ärger, ÄRGER!") == {"ärger"}


@pytest.mark.parametrize(
  "fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}]
)
def test_shares_that_do_not_add_to_one_are_refused(fractions):
  for split in (splits.split_by_document, splits.split_by_own_document):
    with pytest.raises(ValueError, match="positive shares that add to 1"):
      split([("q", "d")], fractions)


def test_nothing_splits_into_nothing():
  assert splits.split_by_document([]) == splits.split_by_own_document([]) == []


def one_split(texts):
  """A collection that declares one split for all of its queries."""
  return collection.Collection(
    documents=(collection.Document("d", "x"),),
    queries=tuple(collection.Query(f"q-{i}", t) for i, t in texts.items()),
    qrels={"test": {f"q-{i}": {"d": 1} for i in texts}},
  )


def sides_of(data):
  return {
    query: side for side, judged in data.qrels.items() for query in judged
  }


def test_a_division_with_a_name_is_one_that_no_other_query_moves(monkeypatch):
  """What `Release.part` and parallel composition rest on."""
  texts = dict(enumerate(text for text, _ in make_pairs(300)))
  data = splits.where_none(one_split(texts))
  assert data.division and ":" not in data.division
  for number, new in enumerate((texts[5], "w1 w2 w3", "?")):
    more = splits.where_none(one_split({**texts, 1000 + number: new}))
    sides = sides_of(more)
    sides.pop(f"q-{1000 + number}")
    assert (sides, more.division) == (sides_of(data), data.division)
  other = splits.where_none(one_split(texts), seed=1)
  assert other.division != data.division
  monkeypatch.setattr(splits, "FRACTIONS", {"train": 0.5, "test": 0.5})
  halves = splits.where_none(one_split(texts))
  assert halves.division != data.division


@pytest.mark.parametrize("secret", ["", "[3, 1, 4]"])
def test_records_that_name_their_split_do_not_decide_whether_all_are_divided(
  secret,
):
  """One record with another name would move every other query."""
  data = one_split({i: f"w{i}" for i in range(40)})
  named = dataclasses.replace(data, split_by_record=True)
  assert splits.where_none(named, secret=secret) == named
  judged, new = data.qrels["test"], {"q-new": {"d": 1}}
  with_another = dataclasses.replace(
    named,
    queries=(*data.queries, collection.Query("q-new", "w")),
    qrels={"test": judged, "train": new},
  )
  found = sides_of(splits.where_none(with_another, secret=secret))
  assert {found[query] for query in judged} == {"test"}
  # By files, whose names say the same whatever is in them, all are divided.
  assert len(splits.where_none(data, secret=secret).qrels) > 1


def test_a_split_that_others_move_or_that_is_declared_is_no_division(tmp_path):
  path = tmp_path / "log.jsonl"
  lines = [{"query": f"ask {i}", "document": f"text {i}"} for i in range(40)]
  small_data.write_lines(path, map(json.dumps, lines))
  folder = small_data.write_beir(
    tmp_path / "beir",
    {"d": "x"},
    {"a": "b c", "e": "f g"},
    {"train": [("a", "d", 1)], "test": [("e", "d", 1)]},
  )
  for source in (f"jsonl:{path}", folder):
    data = splits.where_none(sources.open(source).read())
    assert len(data.qrels) > 1 and data.division == ""


def test_with_a_secret_sides_are_drawn_by_one_law_for_every_text():
  """Ids may be digests of texts, as a log's: an unkeyed hash would tell them."""
  secrets = [f"[{i}, 1]" for i in range(400)]
  share = {"q-0": 0, "q-1": 0, "both": 0}
  for secret in secrets:
    data = splits.where_none(one_split({0: "a b", 1: "b a"}), secret=secret)
    again = splits.where_none(one_split({0: "c", 1: "d"}), secret=secret)
    assert data.qrels == again.qrels and data.division == again.division
    sides = sides_of(data)
    hits = {name: sides[name] == "train" for name in ("q-0", "q-1")}
    for name, hit in hits.items():
      share[name] += hit
    share["both"] += all(hits.values())
  # Five standard deviations; by their words both would be on one side: .8.
  assert abs(share["q-0"] / 400 - 0.8) < 0.1
  assert abs(share["q-1"] / 400 - 0.8) < 0.1
  assert abs(share["both"] / 400 - 0.64) < 0.12
  divisions = {
    splits.where_none(one_split({0: "a"}), secret=one).division
    for one in secrets[:5]
  }
  assert len(divisions) == 5 and not any(":" in one for one in divisions)
  assert not any(one in division for one in secrets for division in divisions)


# Splits of users.

SECRET = "[3, 1, 4]"


def asked(counts, *, split_of=lambda number: "train", texts="ask"):
  """A collection in which user u has asked counts[u] queries."""
  queries, qrels = [], collections.defaultdict(dict)
  for user, count in counts.items():
    for number in range(count):
      name = f"{user}-{number}"
      queries.append(collection.Query(name, f"{texts} {name}", user))
      qrels[split_of(number)][name] = {"d": 1}
  document = collection.Document("d", "text")
  return collection.Collection((document,), tuple(queries), dict(qrels))


def kept(data):
  """Returns the queries of each user, and the sides where they are."""
  found = collections.defaultdict(lambda: (set(), set()))
  user_of = {query.id: query.client for query in data.queries}
  assert set(user_of) == {q for judged in data.qrels.values() for q in judged}
  for side, judged in data.qrels.items():
    for query in judged:
      found[user_of[query]][0].add(query)
      found[user_of[query]][1].add(side)
  return dict(found)


def test_a_user_with_a_hundred_queries_has_as_many_as_are_kept_on_one_side():
  counts = {f"u{i}": 1 + i % 4 for i in range(300)} | {"heavy": 100}
  found = kept(splits.by_user(asked(counts), most=3, secret=SECRET))
  assert {u: len(queries) for u, (queries, _) in found.items()} == {
    u: min(count, 3) for u, count in counts.items()
  }
  sides = collections.Counter(side for _, (side,) in found.values())
  assert 200 < sides["train"] < 270 and sides["dev"] and sides["test"]


def test_a_user_of_two_splits_is_in_one():
  """Else one person would pay for both, and the claims would not say so."""
  data = asked(
    {f"u{i}": 4 for i in range(50)},
    split_of=lambda number: "test" if number % 2 else "train",
  )
  found = kept(splits.by_user(data, most=9, secret=SECRET))
  assert {(len(q), len(s)) for q, s in found.values()} == {(4, 1)}


def test_one_user_more_or_less_leaves_all_others_where_they_are():
  counts = {f"u{i}": 1 + i % 7 for i in range(80)}
  before = kept(splits.by_user(asked(counts), most=3, secret=SECRET))
  for gone in ("u0", "u6", "u79"):
    fewer = {u: count for u, count in counts.items() if u != gone}
    after = kept(splits.by_user(asked(fewer), most=3, secret=SECRET))
    assert after == {u: v for u, v in before.items() if u != gone}
  more = kept(
    splits.by_user(asked(counts | {"new": 50}), most=3, secret=SECRET)
  )
  assert {u: v for u, v in more.items() if u != "new"} == before


def test_what_is_kept_depends_on_the_secret_and_the_division_says_which():
  data = asked({f"u{i}": 9 for i in range(60)})
  ours, again, theirs = (
    splits.by_user(data, most=2, secret=secret)
    for secret in (SECRET, SECRET, "[3, 1, 5]")
  )
  assert ours == again
  assert kept(ours) != kept(theirs)
  # Two secrets divide otherwise: parts of the two are no parts of one division.
  assert ours.division != theirs.division
  assert ":" not in ours.division and SECRET not in ours.division


def test_sides_of_users_and_the_queries_kept_are_keyed_each():
  """By a hash without a key anybody could say who was trained on, by ids alone."""
  counts = {f"u{i}": 12 for i in range(40)}
  ours, theirs = (
    kept(splits.by_user(asked(counts), most=3, secret=secret))
    for secret in (SECRET, "[3, 1, 5]")
  )
  sides = [found[user][1] for user in counts for found in (ours, theirs)]
  assert any(a != b for a, b in zip(sides[::2], sides[1::2], strict=True))
  others = [ours[user][0] != theirs[user][0] for user in counts]
  assert np.mean(others) > 0.9  # one of 220 choices is the same by chance


def test_a_query_of_nobody_is_refused_in_a_line_that_names_no_query():
  data = asked({"u1": 2, "": 1})
  with pytest.raises(ValueError, match="user id with every query") as error:
    splits.by_user(data, most=2, secret=SECRET)
  assert "\n" not in str(error.value) and "-0" not in str(error.value)


def test_queries_without_a_relevant_document_are_no_users_queries():
  data = asked({"u1": 3})
  data.qrels["train"]["u1-0"] = {"d": 0}
  found = kept(splits.by_user(data, most=3, secret=SECRET))
  assert found["u1"][0] == {"u1-1", "u1-2"}
