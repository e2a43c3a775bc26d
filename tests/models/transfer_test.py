import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_vocabularies

from synthq_jax.data import vocabulary
from synthq_jax.models import t5, t5_config, transfer

SMALL = t5_config.T5Config(
  vocab_size=32,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=24,
  num_encoder_layers=1,
  num_decoder_layers=1,
  logits_via_embedding=True,
)
KEY = jax.random.key(0)


def logits(params, config, inputs, targets):
  model = t5.Transformer(config)
  return model.apply({"params": params}, inputs, t5.shift_right(targets))


def test_the_table_follows_the_pieces():
  params = t5.init_params(SMALL, KEY)
  order = np.random.default_rng(0).permutation(32)
  larger = dataclasses.replace(SMALL, vocab_size=40)
  pieces = [[int(i)] for i in order] + [[]] * 8
  grown = transfer.transfer(params, pieces, larger, jax.random.key(1))
  tables = [tree["token_embedder"]["embedding"] for tree in (params, grown)]
  np.testing.assert_allclose(tables[1][:32], tables[0][order], rtol=1e-6)
  assert np.all(np.linalg.norm(tables[1][32:], axis=1) > 0)


def test_layers_that_were_not_there_add_nothing():
  params = t5.init_params(SMALL, KEY)
  larger = dataclasses.replace(
    SMALL, num_encoder_layers=3, num_decoder_layers=2
  )
  same = [[i] for i in range(32)]
  grown = transfer.transfer(params, same, larger, jax.random.key(1))
  tokens = jnp.array([[5, 6, 7, 1, 0], [9, 8, 1, 0, 0]])
  np.testing.assert_allclose(
    logits(grown, larger, tokens, tokens),
    logits(params, SMALL, tokens, tokens),
    rtol=1e-5,
    atol=1e-5,
  )
  new = grown["encoder"]["layers_2"]
  assert not np.any(new["mlp"]["wo"]["kernel"])
  assert np.any(new["mlp"]["wi_0"]["kernel"])


def test_a_piece_lies_between_those_that_spelled_it():
  params = t5.init_params(SMALL, KEY)
  pieces = [[i] for i in range(31)] + [[4, 5]]
  grown = transfer.transfer(params, pieces, SMALL, KEY)
  old = np.asarray(params["token_embedder"]["embedding"])
  new = np.asarray(grown["token_embedder"]["embedding"])
  mean = old[[4, 5]].mean(axis=0)
  length = np.linalg.norm(old[[4, 5]], axis=1).mean()
  np.testing.assert_allclose(np.linalg.norm(new[31]), length, rtol=1e-5)
  cosine = new[31] @ mean / (length * np.linalg.norm(mean))
  assert cosine == pytest.approx(1.0, abs=1e-5)


def test_another_width_or_a_lost_layer_is_refused():
  params = t5.init_params(SMALL, KEY)
  same = [[i] for i in range(32)]
  wider = dataclasses.replace(SMALL, mlp_dim=32)
  with pytest.raises(ValueError, match="expected encoder/layers_0 of shapes"):
    transfer.transfer(params, same, wider, KEY)
  two = dataclasses.replace(SMALL, num_encoder_layers=2)
  grown = transfer.transfer(params, same, two, KEY)
  with pytest.raises(ValueError, match="room for encoder's parts"):
    transfer.transfer(grown, same, SMALL, KEY)


def test_pieces_are_spelled_by_those_of_the_old_vocabulary(tmp_path):
  texts = ["the red apple", "a red apple tree", "an apple is red"] * 20
  for name, size in (("old", 18), ("new", 20)):
    vocabulary.train(texts, tmp_path / name, vocab_size=size)
  old = vocabulary.load(tmp_path / "old", extra_ids=4)
  new = vocabulary.load(tmp_path / "new", extra_ids=6)
  found = transfer.pieces(old, new)
  assert len(found) == new.vocab_size == 26
  assert found[:3] == [[0], [1], [2]]
  assert found[-6:] == [[], [], [18], [19], [20], [21]]
  for index in range(3, 20):
    piece = new.tokenizer.id_to_piece(index)
    spelled = "".join(old.tokenizer.id_to_piece(i) for i in found[index])
    assert spelled == piece


def test_special_ids_go_to_special_ids(tmp_path):
  """T5's </s> and <unk> are 1 and 2, ruT5's 2 and 3."""
  old, new = (
    vocabulary.load(small_vocabularies.write(tmp_path / name, ids))
    for name, ids in (
      ("old", small_vocabularies.T5),
      ("new", small_vocabularies.RUT5),
    )
  )
  found = transfer.pieces(old, new)
  assert found[0] == [0] and found[2:4] == [[1], [2]]
  for index in range(4, new.vocab_size):
    piece = new.tokenizer.id_to_piece(index)
    assert found[index] == [old.tokenizer.piece_to_id(piece)]
