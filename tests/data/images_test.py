"""Images: what they hold, how they are split and paired, what is refused."""

import sys

import numpy as np
import pytest

from synthq_jax.data import images


@pytest.fixture(scope="module")
def digits():
  pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
  return images.load("digits", seed=3)


def test_digits_are_scikit_learns_in_the_unit_interval(digits):
  train, test = digits
  assert len(train) + len(test) == 1797
  assert train.pixels.shape[1:] == (8, 8, 1)
  assert train.pixels.dtype == np.float32
  assert (train.pixels.min(), train.pixels.max()) == (0, 1)
  np.testing.assert_array_equal(test.coarse_labels, test.labels % 2)


def test_the_split_is_stratified_repeatable_and_loses_no_image(digits):
  train, test = digits
  for label in range(10):
    inside, outside = (np.sum(part.labels == label) for part in digits)
    assert outside == int(0.2 * (inside + outside))
  again = images.load("digits", seed=3)
  np.testing.assert_array_equal(again[1].pixels, test.pixels)
  other = images.load("digits", seed=4)
  assert not np.array_equal(other[1].pixels, test.pixels)
  from sklearn import datasets

  flat = np.concatenate([train.pixels, test.pixels]).reshape(1797, -1)
  want = datasets.load_digits().data / 16
  order = [np.lexsort(rows.T) for rows in (flat, want)]
  np.testing.assert_array_equal(flat[order[0]], want[order[1]])


def test_a_pair_is_two_images_of_one_class_that_no_other_pair_has():
  labels = np.repeat(np.arange(3, dtype=np.int32), (7, 2, 5))
  pairs = images.pairs(labels, seed=0)
  assert len(pairs) == 3 + 1 + 2
  assert len(set(pairs.reshape(-1))) == pairs.size
  np.testing.assert_array_equal(labels[pairs[:, 0]], labels[pairs[:, 1]])
  np.testing.assert_array_equal(pairs, images.pairs(labels, seed=0))
  assert not np.array_equal(pairs, images.pairs(labels, seed=1))
  assert (np.diff(labels[pairs[:, 0]]) < 0).any()  # not class by class


class Builder:
  """Stands in for TFDS' builder of CIFAR."""

  def __init__(self, name, downloads):
    self.name, self.prepared, self.downloads = name, False, downloads

  def is_prepared(self):
    return self.prepared

  def download_and_prepare(self):
    if not self.downloads:
      raise OSError("no network\nat all")
    self.prepared = True

  def as_dataset(self, split, batch_size):
    assert self.prepared and batch_size == -1
    read = {
      "image": np.full((2, 32, 32, 3), 255, np.uint8),
      "label": np.array([0, 7]),
    }
    if self.name == "cifar100":
      read["coarse_label"] = np.array([4, 19])
    return [read for _ in split]


class Tfds:
  """Stands in for tensorflow_datasets."""

  downloads = True

  @classmethod
  def builder(cls, name, data_dir):
    del data_dir
    return Builder(name, cls.downloads)

  @staticmethod
  def as_numpy(read):
    return read


@pytest.mark.parametrize(
  "name, coarse", [("cifar10", [0, 1]), ("cifar100", [4, 19])]
)
def test_cifar_has_fine_and_coarse_labels(monkeypatch, name, coarse):
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", Tfds)
  for part in images.load(name):
    assert part.pixels.shape == (2, 32, 32, 3) and (part.pixels == 1).all()
    assert part.labels.tolist() == [0, 7]
    assert part.coarse_labels.tolist() == coarse
    assert max(coarse) < len(images.COARSE[name])


def test_what_is_not_on_the_machine_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", Tfds)
  monkeypatch.setattr(Tfds, "downloads", False)
  with pytest.raises(ValueError, match="could not be downloaded") as caught:
    images.load("cifar10")
  assert "\n" not in str(caught.value)
  assert "download_and_prepare" in str(caught.value)
  monkeypatch.setitem(sys.modules, "sklearn", None)
  with pytest.raises(ImportError, match=r"pip install 'synthq_jax\[images\]'"):
    images.load("digits")


def test_unknown_sources_and_shares_are_refused(digits):
  with pytest.raises(ValueError, match="got source='mnist'"):
    images.load("mnist")
  with pytest.raises(ValueError, match="test_share=1.0"):
    images.split(digits[0], test_share=1.0, seed=0)


def test_an_image_without_a_label_is_refused():
  with pytest.raises(ValueError, match=r"lengths=\[2, 2, 1\]"):
    images.Images(
      pixels=np.zeros((2, 4, 4, 1), np.float32),
      labels=np.zeros(2, np.int32),
      coarse_labels=np.zeros(1, np.int32),
    )
