"""Writes the cache of a SeqIO task as `seqio_cache_tasks` does, without Beam."""

import json
import os
import pathlib
from typing import Any

import numpy as np


def write(
  name: str, root: pathlib.Path, *, shards: int = 3, seed: int = 0
) -> pathlib.Path:
  """Caches a registered task, its records in a random order as Beam leaves them.

  Args:
    name: of the task.
    root: the cache directory; the task's folder is made below it.
    shards: files of each split.
    seed: of the order.

  Returns:
    The folder.
  """
  import seqio
  import tensorflow as tf

  task = seqio.get_mixture_or_task(name)
  folder = root / name
  folder.mkdir(parents=True)
  for split in task.splits:
    parts = min(2, len(task.source.list_shards(split)))  # Beam takes all
    records = []
    for part in range(parts):
      info = seqio.ShardInfo(index=part, num_shards=parts)
      dataset = task.source.get_dataset(split, shuffle=False, shard_info=info)
      records += task.preprocess_precache(
        dataset, seed=part
      ).as_numpy_iterator()
    order = np.random.default_rng(seed).permutation(len(records))
    for shard in range(shards):
      path = folder / f"{split}.tfrecord-{shard:05}-of-{shards:05}"
      with tf.io.TFRecordWriter(os.fspath(path)) as writer:
        for index in order[shard::shards]:
          example = seqio.dict_to_tfexample(records[index])
          writer.write(example.SerializeToString())
    facts = {"num_shards": shards, "seqio_version": seqio.__version__}
    features = {n: describe(x) for n, x in records[0].items()}
    write_json(folder / f"info.{split}.json", {**facts, "features": features})
    write_json(folder / f"stats.{split}.json", {"examples": len(records)})
  (folder / "COMPLETED").write_text("")
  return folder


def describe(value: Any) -> dict[str, Any]:
  """The shape and dtype of a feature, as info.SPLIT.json has them."""
  import tensorflow as tf

  tensor = tf.constant(value)
  shape = tensor.shape.as_list()
  return {
    "shape": [None, *shape[1:]] if shape else [],
    "dtype": tensor.dtype.name,
  }


def write_json(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2, sort_keys=True))
