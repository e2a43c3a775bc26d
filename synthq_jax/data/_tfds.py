"""How a dataset of TensorFlow Datasets is prepared, in words."""

import os

__all__ = ["how_to_prepare"]


def how_to_prepare(name: str, data_dir: str | os.PathLike | None = None) -> str:
  """Returns the commands that prepare a dataset.

  The command `tfds build` imports more packages than TFDS brings.

  >>> print(how_to_prepare("beir/fiqa"))
  pip install 'synthq_jax[tfds]' && python -c "import tensorflow_datasets as tfds; tfds.builder('beir/fiqa').download_and_prepare()"
  """
  where = f", data_dir='{os.fspath(data_dir)}'" if data_dir else ""
  return (
    "pip install 'synthq_jax[tfds]' && python -c \"import tensorflow_datasets as"
    f" tfds; tfds.builder('{name}'{where}).download_and_prepare()\""
  )
