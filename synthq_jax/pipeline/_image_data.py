"""The images of the study, as one encoder sees them."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from synthq_jax.data import images

__all__ = ["Data", "build", "sides"]


@dataclasses.dataclass(frozen=True)
class Data:
  """Images of one size.

  Attributes:
    train: private.
    test: public.
    head: what the linear head learns on and is tested on, public.
    num_coarse: coarse classes of `head`.
    pairs: rows of `train`.
    held_out: public pairs, "queries" and "documents".
    digest: of all of it, the private pairs too: not to be shared as it is.
  """

  train: images.Images
  test: images.Images
  head: tuple[images.Images, images.Images]
  num_coarse: int
  pairs: Int32[np.ndarray, "pair 2"]
  held_out: dict[str, np.ndarray]
  digest: str


def build(
  config: Any,
  size: int | None,
  train: images.Images,
  test: images.Images,
  head: tuple[images.Images, images.Images] | None,
) -> Data:
  """Resizes, pairs and digests.

  Args:
    config: an `image_study.Config`.
    size: height and width that images are resized to; None: as they are.
    train: private.
    test: public.
    head: images of the linear head; None: the two halves of `test`.
  """
  train, test = _resized(train, size), _resized(test, size)
  if head is None:
    head = images.split(test, test_share=0.5, seed=config.seed)
  learned, tested = (_resized(part, size) for part in head)
  public = images.pairs(test.labels, seed=config.seed)
  pairs = images.pairs(train.labels, seed=config.seed)
  return Data(
    train=train,
    test=test,
    head=(learned, tested),
    num_coarse=len(images.COARSE[config.head_source or config.source]),
    pairs=pairs,
    held_out=sides(test, public[: config.held_out_pairs]),
    digest=_digest(train, test, learned, tested, pairs),
  )


def sides(
  part: images.Images, pairs: Int32[np.ndarray, "pair 2"]
) -> dict[str, np.ndarray]:
  """Returns the first images of pairs as queries, the second as documents."""
  return {
    "queries": part.pixels[pairs[:, 0]],
    "documents": part.pixels[pairs[:, 1]],
  }


def _resized(part: images.Images, size: int | None) -> images.Images:
  if size is None or part.pixels.shape[1:3] == (size, size):
    return part
  shape = (len(part), size, size, part.pixels.shape[-1])
  pixels = jax.image.resize(jnp.asarray(part.pixels), shape, "bilinear")
  return dataclasses.replace(part, pixels=np.asarray(pixels))


def _digest(*parts: Any) -> str:
  found = hashlib.sha256()
  for part in parts:
    is_array = isinstance(part, np.ndarray)
    for values in [part] if is_array else dataclasses.astuple(part):
      found.update(f"{values.dtype} {values.shape}".encode())
      found.update(np.ascontiguousarray(values).data)
  return found.hexdigest()[:16]
