"""The detector by cosine, with made vectors and with the shipped encoder."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from synthq_jax.leakage import encoders, near_duplicates


def letters(texts):
  """Counts of letters, of length 1: anagrams are the same."""
  rows = np.array([[text.count(c) for c in "abc"] for text in texts], float)
  rows = rows.reshape(len(texts), 3)
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


TEXTS = st.lists(st.text(alphabet="abc", max_size=4), max_size=8)


@hypothesis.given(TEXTS, TEXTS)
def test_an_index_finds_every_pair_that_points_the_same_way(queries, targets):
  detector = near_duplicates.Embedding(encode=letters, threshold=0.99)
  found = detector.index(targets).match(queries)
  pairs = list(zip(found[0].tolist(), found[1].tolist(), strict=True))
  expected = [
    (i, j)
    for i, query in enumerate(queries)
    for j, target in enumerate(targets)
    if detector.scores([query], [target])[0] >= 0.99
  ]
  assert pairs == expected


def test_only_the_nearest_targets_are_looked_at():
  targets = ["aab", "ab", "aaab", "c"]
  wide = near_duplicates.Embedding(encode=letters, threshold=0.5)
  assert wide.index(targets).match(["aab"])[1].tolist() == [0, 1, 2]
  narrow = near_duplicates.Embedding(encode=letters, threshold=0.5, top_k=1)
  assert narrow.index(targets).match(["aab"])[1].tolist() == [0]


def test_vectors_of_another_length_are_refused():
  detector = near_duplicates.Embedding(encode=lambda texts: 2 * letters(texts))
  with pytest.raises(ValueError, match="length 1.*lengths up to 2"):
    detector.index(["ab"])


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"top_k": 0}])
def test_wrong_settings_are_refused(wrong):
  with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
    near_duplicates.Embedding(encode=letters, **wrong)


def test_the_shipped_encoder_knows_equal_texts_in_whatever_batches():
  encode = encoders.own()
  texts = ["sort an array", "the inverse of a matrix", "", "sort an array"]
  vectors = encode(texts)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
  alone = np.concatenate([encode([text]) for text in texts])
  np.testing.assert_allclose(alone, vectors, atol=1e-5)
  detector = near_duplicates.Embedding(encode=encode, threshold=0.999)
  found = detector.index(texts[:2]).match(texts)
  pairs = list(zip(found[0].tolist(), found[1].tolist(), strict=True))
  assert pairs == [(0, 0), (1, 1), (3, 0)]


def test_another_checkpoints_vocabulary_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no file"):
    encoders.own(vocabulary=tmp_path / "vocabulary.model")


PIECES = [
  "[PAD]",
  "[UNK]",
  "[CLS]",
  "[SEP]",
  "[MASK]",
  "measles",
  "out",
  "##break",
]


def bert_folder(place):
  """Saves a small BERT of random numbers, and returns transformers' own."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  shape = transformers.BertConfig(
    vocab_size=len(PIECES),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
  )
  model = transformers.BertModel(shape).eval()
  model.save_pretrained(place)
  (place / "vocab.txt").write_text("\n".join(PIECES) + "\n")
  return torch, model


def test_a_bert_of_hugging_face_gives_the_mean_of_its_outputs(tmp_path):
  torch, model = bert_folder(tmp_path)
  texts = ["Measles outbreak", "out", "measles measles out unknown"]
  rows = [[2, 5, 6, 7, 3], [2, 6, 3], [2, 5, 5, 6, 1, 3]]
  with torch.no_grad():
    means = [
      model(torch.tensor([row])).last_hidden_state[0].mean(dim=0).numpy()
      for row in rows
    ]
  expected = np.stack([mean / np.linalg.norm(mean) for mean in means])
  encode = encoders.from_bert(tmp_path, length=24, batch_size=2)
  np.testing.assert_allclose(encode(texts), expected, atol=1e-5)
  detector = near_duplicates.Embedding(encode=encode, threshold=0.9999)
  assert detector.index(["MEASLES outbreak!"]).match(texts)[0].size == 0
  assert detector.index(["MEASLES outbreak"]).match(texts)[0].tolist() == [0]
  assert encode([]).shape == (0, 16)


def test_a_bert_that_does_not_fit_its_vocabulary_or_length_is_refused(tmp_path):
  bert_folder(tmp_path)
  for length in (2, 25):
    with pytest.raises(ValueError, match=f"got length={length}"):
      encoders.from_bert(tmp_path, length=length)
  (tmp_path / "vocab.txt").write_text("\n".join([*PIECES, "more"]) + "\n")
  with pytest.raises(ValueError, match="at most vocab_size=8 pieces, got 9"):
    encoders.from_bert(tmp_path, length=24)
  (tmp_path / "vocab.txt").unlink()
  (tmp_path / "tokenizer.json").unlink(missing_ok=True)
  with pytest.raises(ValueError, match="the vocabulary of a BERT, got neither"):
    encoders.from_bert(tmp_path, length=24)
