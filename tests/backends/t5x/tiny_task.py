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


@seqio.map_over_dataset(num_seeds=1)
def drop_at_random(example, seed):
  """SeqIO draws the seed by the example's place among the others."""
  tokens = example["inputs"]
  kept = tf.random.stateless_uniform(tf.shape(tokens), seed) < 0.7
  return {**example, "inputs": tf.boolean_mask(tokens, kept)}


RANDOM = "synthq_tiny_random"
"""The same texts; letters are left out at random."""
seqio.TaskRegistry.add(
  RANDOM,
  source=seqio.FunctionDataSource(texts, splits=("train", "test")),
  preprocessors=[
    seqio.preprocessors.tokenize,
    drop_at_random,
    seqio.preprocessors.append_eos,
  ],
  output_features=FEATURES,
)
seqio.MixtureRegistry.add("synthq_tiny_mixture", [("synthq_tiny", 1.0)])
