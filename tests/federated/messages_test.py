"""Messages: what is read back, and how long they are."""

import numpy as np
import pytest

from synthq_jax.federated import messages, noised_vectors


def vectors():
  rng = np.random.default_rng(0)
  return noised_vectors.unit(rng.normal(size=(40, 128)))


def through(dtype):
  message = messages.pack(messages.pack_vectors(vectors(), dtype))
  (read,) = messages.unpack(message)
  return messages.unpack_vectors(read), len(message)


def test_float32_arrives_bit_for_bit():
  read, _ = through("float32")
  np.testing.assert_array_equal(read, vectors())


@pytest.mark.parametrize(
  ("dtype", "worst"), [("float16", 1e-6), ("int8", 5e-4)]
)
def test_smaller_types_keep_length_and_direction(dtype, worst):
  read, _ = through(dtype)
  assert read.dtype == np.float32
  np.testing.assert_allclose(np.linalg.norm(read, axis=1), 1.0, rtol=1e-6)
  cosines = np.sum(read * vectors(), axis=1)
  assert 1 - worst < np.min(cosines)
  assert not np.array_equal(read, vectors())


@pytest.mark.parametrize(
  ("dtype", "size"), [("float32", 4), ("float16", 2), ("int8", 1)]
)
def test_a_message_is_its_numbers_and_a_header(dtype, size):
  _, length = through(dtype)
  assert length == 40 * 128 * size + 128


def test_several_arrays_come_back_in_order():
  first, second = np.arange(3, dtype=np.int32), np.zeros((0, 4), np.float32)
  read = messages.unpack(messages.pack(first, second))
  assert len(read) == 2
  np.testing.assert_array_equal(read[0], first)
  assert read[1].shape == (0, 4)


def test_zeros_stay_zeros():
  zeros = np.zeros((2, 4), np.float32)
  for dtype in messages.DTYPES:
    read = messages.unpack_vectors(messages.pack_vectors(zeros, dtype))
    np.testing.assert_array_equal(read, zeros)


def test_an_unknown_type_is_refused():
  with pytest.raises(ValueError, match="int4"):
    messages.pack_vectors(vectors(), "int4")
