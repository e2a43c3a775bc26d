"""A SeqIO task of 40 short texts, for MIXTURE_OR_TASK_MODULE."""

import seqio
import tensorflow as tf

NUM_EXAMPLES = 40


def texts(split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  numbers = [i for i in range(NUM_EXAMPLES)]
  if split != "train":
    numbers = [100, 101, 102, 103]
  return tf.data.Dataset.from_tensor_slices(
    {
      "inputs": [f"{n} squared" + "?" * (n % 3) for n in numbers],
      "targets": [str(n * n) for n in numbers],
    }
  )


FEATURES = {
  name: seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
  for name in ("inputs", "targets")
}

seqio.TaskRegistry.add(
  "synthq_tiny",
  source=seqio.FunctionDataSource(texts, splits=("train", "test")),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  output_features=FEATURES,
)


def drop_letters(example, seed):
  tokens = example["inputs"]
  kept = tf.random.stateless_uniform(tf.shape(tokens), seed) < 0.7
  return {**example, "inputs": tf.boolean_mask(tokens, kept)}


drop_at_random = seqio.map_over_dataset(drop_letters, num_seeds=1)
"""SeqIO draws the seed by the example's place among the others."""


def drop_by_number(rows):
  """Draws with a seed of its own by the example's place among the others."""

  def drop(number, example):
    seed = tf.stack([7, tf.cast(number, tf.int32)])
    return drop_letters(example, seed)

  return rows.enumerate().map(drop)


def show_another(rows):
  """Puts the example before it into each, as in a prompt with examples."""

  def join(before, example):
    tokens = tf.concat([before["targets"], example["inputs"]], 0)
    return {**example, "inputs": tokens}

  return tf.data.Dataset.zip(rows.take(1).concatenate(rows), rows).map(join)


def keep_first(rows):
  """An example that leaves lets another one in."""
  return rows.concatenate(rows.map(reverse)).take(NUM_EXAMPLES)


def reverse(example):
  return {**example, "inputs": example["inputs"][::-1]}


RANDOM, NUMBERED, PROMPTED, FIRST = COUPLED = (
  "synthq_tiny_random",
  "synthq_tiny_numbered",
  "synthq_tiny_prompted",
  "synthq_tiny_first",
)
"""The same texts, with preprocessors that look at more than one record."""
for name, preprocessor in zip(
  COUPLED,
  (drop_at_random, drop_by_number, show_another, keep_first),
  strict=True,
):
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(texts, splits=("train", "test")),
    preprocessors=[
      seqio.preprocessors.tokenize,
      preprocessor,
      seqio.preprocessors.append_eos,
    ],
    output_features=FEATURES,
  )
seqio.MixtureRegistry.add("synthq_tiny_mixture", [("synthq_tiny", 1.0)])
