"""Loads labelled images and pairs them, for the study of contrastive losses.

`digits` comes with scikit-learn; CIFAR comes through TFDS, if it can be downloaded.
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
"""Names of the sources that `load` reads."""

COARSE = {
  "digits": ("even", "odd"),
  "cifar10": ("vehicle", "animal"),
  "cifar100": tuple(f"superclass {i}" for i in range(20)),
}
"""Names of the coarse classes of each source; CIFAR-100 has its own classes."""

# airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck
_CIFAR10_ANIMALS = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
  """Images, each with a class and a coarse class.

  Attributes:
    pixels: brightness in [0, 1].
    labels: class number of each image, from 0.
    coarse_labels: coarse class of each image, an index of the source's `COARSE`.
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
    """Returns the images at some positions."""
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
  """Loads the training images and the test images of a source.

  "digits" are scikit-learn's 1,797 handwritten digits [8, 8, 1], split by
  `split`; their coarse class is the parity. "cifar10" and "cifar100" [32, 32, 3]
  have a split of their own; CIFAR-10's coarse classes are vehicles and animals.

  Args:
    source: one of `SOURCES`.
    seed: as in `split`, for "digits".
    data_dir: TFDS's data folder; None: its default, or TFDS_DATA_DIR.

  Raises:
    ValueError: if the source is unknown, or is not on this machine and cannot
      be downloaded; the message names a remedy.
  """
  if source == "digits":
    return split(_load_digits(), test_share=0.2, seed=seed)
  if source in SOURCES:
    return _load_cifar(source, data_dir)
  raise ValueError(f"expected a source among {SOURCES}, got {source=}")


def split(
  images: Images, *, test_share: float, seed: int
) -> tuple[Images, Images]:
  """Splits images so that each class has the same share on both sides.

  Args:
    images: the images to split.
    test_share: share of each class for testing, in (0, 1); the number of images
      is rounded down.
    seed: seed of the order; public.

  Returns:
    The training images and the test images.

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

  A pair can thus be the unit of privacy. A class with an odd number of images
  leaves one image out.

  >>> pairs(np.array([0, 1, 0, 1, 1], np.int32), seed=0).shape
  (2, 2)

  Args:
    labels: the class of each image.
    seed: seed of the pairing.

  Returns:
    The positions of the two images of each pair, in random order.
  """
  rng = np.random.default_rng(seed)
  pairs_ = []
  for label in np.unique(labels):
    rows = rng.permutation(np.flatnonzero(labels == label))
    pairs_.append(rows[: len(rows) // 2 * 2].reshape(-1, 2))
  return rng.permutation(np.concatenate(pairs_)).astype(np.int32)


def _load_digits() -> Images:
  with extras.required("images"):
    from sklearn import datasets

  read = datasets.load_digits()
  labels = read.target.astype(np.int32)
  return Images(
    pixels=(read.images[..., None] / 16).astype(np.float32),
    labels=labels,
    coarse_labels=labels % 2,
  )


def _load_cifar(
  name: str, data_dir: str | os.PathLike | None
) -> tuple[Images, ...]:
  with extras.required("seqio"):
    import tensorflow_datasets as tfds

  data_folder = None if data_dir is None else os.fspath(data_dir)
  builder = tfds.builder(name, data_dir=data_folder)
  if not builder.is_prepared():
    try:
      builder.download_and_prepare()
    except (
      Exception
    ) as error:  # network, disk or mirror, each with its own class
      raise ValueError(
        f"{name} is not on this machine and could not be downloaded"
        f" ({type(error).__name__}): run {beir_sets.get_prepare_command(name, data_folder)}"
        " where there is a network, or take source 'digits'"
      ) from error
  parts = builder.as_dataset(split=["train", "test"], batch_size=-1)
  return tuple(_make_images(tfds.as_numpy(part)) for part in parts)


def _make_images(read: dict[str, Any]) -> Images:
  labels = read["label"].astype(np.int32)
  coarse = read.get("coarse_label")
  if coarse is None:
    coarse = _CIFAR10_ANIMALS[labels]
  return Images(
    pixels=read["image"].astype(np.float32) / 255,
    labels=labels,
    coarse_labels=coarse.astype(np.int32),
  )
