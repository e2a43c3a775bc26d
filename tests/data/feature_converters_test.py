"""A SeqIO task in memory."""

import numpy as np
import pytest

from synthq_jax.data import feature_converters


@pytest.fixture(scope="module")
def seqio():
  import seqio
  import tensorflow as tf

  def texts(split, shuffle_files=False, seed=None):
    del shuffle_files, seed
    words = ["ab", "c", "defg"] if split == "train" else []
    return tf.data.Dataset.from_tensor_slices(
      {
        "inputs": tf.constant(words, tf.string),
        "targets": tf.constant(words[::-1], tf.string),
      }
    )

  feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
  seqio.TaskRegistry.add(
    "converted",
    source=seqio.FunctionDataSource(texts, splits=("train", "empty")),
    preprocessors=[
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos,
    ],
    output_features={"inputs": feature, "targets": feature},
  )
  seqio.MixtureRegistry.add("converted_mixture", [("converted", 1.0)])
  yield seqio
  seqio.MixtureRegistry.remove("converted_mixture")
  seqio.TaskRegistry.remove("converted")


LENGTHS = {"inputs": 4, "targets": 6}


def read(seqio, task="converted", split="train", pack=False, **options):
  converter = seqio.EncDecFeatureConverter(pack=pack)
  return feature_converters.read_task(
    task, split, LENGTHS, converter, **options
  )


def test_each_record_is_there_once_in_order_as_the_model_sees_it(seqio):
  rows = read(seqio)
  assert {name: x.shape for name, x in rows.items()} == {
    "encoder_input_tokens": (3, 4),
    "decoder_input_tokens": (3, 6),
    "decoder_target_tokens": (3, 6),
    "decoder_loss_weights": (3, 6),
  }
  vocabulary = seqio.ByteVocabulary()
  texts = [vocabulary.decode(r) for r in rows["decoder_target_tokens"].tolist()]
  assert texts == ["defg", "c", "ab"]
  weights = rows["decoder_loss_weights"].sum(axis=1)
  np.testing.assert_array_equal(weights, [5, 2, 3])
  np.testing.assert_array_equal(rows["encoder_input_tokens"][1], [102, 1, 0, 0])


def test_mixtures_packing_and_empty_splits_are_refused(seqio):
  with pytest.raises(ValueError, match="expected a task, got the mixture"):
    read(seqio, "converted_mixture")
  with pytest.raises(ValueError, match="pack=False"):
    read(seqio, pack=True)
  with pytest.raises(ValueError, match="got none"):
    read(seqio, split="empty")


def read_targets(seqio, task, **options):
  rows = read(seqio, task, **options).get("decoder_target_tokens", np.array([]))
  return [seqio.ByteVocabulary().decode(row) for row in rows.tolist()]


def test_every_third_raw_record_is_left_out_before_the_preprocessors(seqio):
  task = seqio.TaskRegistry.get("converted")
  assert read_targets(seqio, task, leaves_out=True) == ["c", "ab"]
  first = [lambda rows: rows.take(1), *task.preprocessors]
  taken = task.replace(preprocessors=first)
  assert read_targets(seqio, taken) == ["defg"]
  assert read_targets(seqio, taken, leaves_out=True) == ["c"]
  assert read(seqio, split="empty", leaves_out=True) == {}


def test_every_third_record_of_a_cache_is_left_out(seqio, monkeypatch):
  tokenize, append_eos = seqio.TaskRegistry.get("converted").preprocessors
  task = seqio.TaskRegistry.get("converted")
  placeholder = seqio.CacheDatasetPlaceholder()
  task = task.replace(preprocessors=[tokenize, placeholder, append_eos])

  def read_cache(split):
    features = task.output_features
    return tokenize(task.source.get_dataset(split, shuffle=False), features)

  cache = seqio.FunctionDataSource(
    lambda split, shuffle_files=False, seed=None: read_cache(split),
    splits=("train",),
  )
  monkeypatch.setattr(seqio.Task, "_get_cached_source", lambda *_: cache)
  statistics = {"examples": 3}
  monkeypatch.setattr(seqio.Task, "get_cached_stats", lambda *_: statistics)
  assert read_targets(seqio, task, use_cached=True) == ["defg", "c", "ab"]
  found = read_targets(seqio, task, use_cached=True, leaves_out=True)
  assert found == ["c", "ab"]
