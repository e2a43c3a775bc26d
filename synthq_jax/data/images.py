"""Labelled images, and pairs of them, for the study of contrastive losses.

`digits` is on every machine that has scikit-learn; CIFAR comes through TFDS,
where it can be downloaded.
"""

import dataclasses
import os
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from synthq_jax import checks, extras
from synthq_jax.data import beir_sets

__all__ = ["COARSE", "SOURCES", "Images", "load", "pairs", "split"]

SOURCES = ("digits", "cifar10", "cifar100")
"""The names that `load` knows."""

COARSE = {
  "digits": ("even", "odd"),
  "cifar10": ("vehicle", "animal"),
  "cifar100": tuple(f"superclass {i}" for i in range(20)),
}
"""The coarse classes of each source; those of CIFAR-100 are its own."""

# airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck
_CIFAR10_ANIMALS = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
  """Images with a class and a coarse class each.

  Attributes:
    pixels: in [0, 1].
    labels: from 0.
    coarse_labels: from 0, into `COARSE` of the source.
  """

  pixels: Float32[np.ndarray, "image height width channels"]
  labels: Int32[np.ndarray, " image"]
  coarse_labels: Int32[np.ndarray, " image"]

  def __post_init__(self):
    lengths = [len(values) for values in dataclasses.astuple(self)]
    if len(set(lengths)) > 1:
      raise ValueError(
        f"expected a label and a coarse label for each image, got {lengths=}"
      )

  def __len__(self) -> int:
    return len(self.labels)

  def take(self, rows: np.ndarray) -> "Images":
    """Returns the images of some rows."""
    return Images(
      pixels=self.pixels[rows],
      labels=self.labels[rows],
      coarse_labels=self.coarse_labels[rows],
    )


def load(
  source: str,
  *,
  seed: int = 0,
  data_dir: str | os.PathLike | None = None,
) -> tuple[Images, Images]:
  """Returns the images for training and those for testing.

  "digits" are scikit-learn's 1,797 handwritten digits [8, 8, 1], split by
  `split`; their coarse class is the parity. "cifar10" and "cifar100" [32, 32, 3]
  have a split of their own, which is taken; CIFAR-10's coarse classes are
  vehicles and animals.

  Args:
    source: one of `SOURCES`.
    seed: as in `split`, for "digits".
    data_dir: where TFDS keeps its data; None: its default, or TFDS_DATA_DIR.

  Raises:
    ValueError: if the source is unknown, or is not on this machine and cannot
      be downloaded; the message says what helps.
  """
  if source == "digits":
    return split(_digits(), test_share=0.2, seed=seed)
  if source in SOURCES:
    return _cifar(source, data_dir)
  raise ValueError(f"expected a source among {SOURCES}, got {source=}")


def split(
  images: Images, *, test_share: float, seed: int
) -> tuple[Images, Images]:
  """Splits images so that each class has the same share on both sides.

  Args:
    images: to split.
    test_share: of each class, rounded down, in (0, 1).
    seed: of the order; public.

  Returns:
    The images for training and those for testing.

  Raises:
    ValueError: if the share is out of its range.
  """
  checks.within("(0, 1)", test_share=test_share)
  rng = np.random.default_rng(seed)
  train, test = [], []
  for label in np.unique(images.labels):
    rows = rng.permutation(np.flatnonzero(images.labels == label))
    count = int(test_share * len(rows))
    test.append(rows[:count])
    train.append(rows[count:])
  return tuple(images.take(np.concatenate(rows)) for rows in (train, test))


def pairs(
  labels: Int32[np.ndarray, " image"], *, seed: int
) -> Int32[np.ndarray, "pair 2"]:
  """Pairs different images of one class; an image is in one pair at most.

  So a pair can be the unit of privacy. Of a class with an odd number of images
  one stays alone.

  >>> pairs(np.array([0, 1, 0, 1, 1], np.int32), seed=0).shape
  (2, 2)

  Args:
    labels: the class of each image.
    seed: of the pairing.

  Returns:
    Rows of the two images of each pair, in random order.
  """
  rng = np.random.default_rng(seed)
  found = []
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    found.append(rows[: len(rows) // 2 * 2].reshape(-1, 2))
  return rng.permutation(np.concatenate(found)).astype(np.int32)


def _digits() -> Images:
  with extras.required("images"):
    from sklearn import datasets

  read = datasets.load_digits()
  labels = read.target.astype(np.int32)
  return Images(
    pixels=(read.images[..., None] / 16).astype(np.float32),
    labels=labels,
    coarse_labels=labels % 2,
  )


def _cifar(name: str, data_dir: str | os.PathLike | None) -> tuple[Images, ...]:
  with extras.required("seqio"):
    import tensorflow_datasets as tfds

  place = None if data_dir is None else os.fspath(data_dir)
  builder = tfds.builder(name, data_dir=place)
  if not builder.is_prepared():
    try:
      builder.download_and_prepare()
    except Exception as error:  # of the network, of the disk, of a mirror
      raise ValueError(
        f"{name} is not on this machine and could not be downloaded"
        f" ({type(error).__name__}): run {beir_sets.how_to_prepare(name, place)}"
        " where there is a network, or take source 'digits'"
      ) from error
  parts = builder.as_dataset(split=["train", "test"], batch_size=-1)
  return tuple(_of_tfds(tfds.as_numpy(part)) for part in parts)


def _of_tfds(read: dict[str, Any]) -> Images:
  labels = read["label"].astype(np.int32)
  coarse = read.get("coarse_label")
  if coarse is None:
    coarse = _CIFAR10_ANIMALS[labels]
  return Images(
    pixels=read["image"].astype(np.float32) / 255,
    labels=labels,
    coarse_labels=coarse.astype(np.int32),
  )
