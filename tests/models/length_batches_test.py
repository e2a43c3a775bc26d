import numpy as np
import pytest

from synthq_jax.models import length_batches


def _rows(lengths, width):
  tokens = np.zeros((len(lengths), width), np.int32)
  for row, length in enumerate(lengths):
    tokens[row, :length] = row + 2
  return tokens


def test_buckets_are_wide_enough_few_and_never_half_too_wide():
  buckets = [length_batches.bucket(length) for length in range(1, 1025)]
  lengths = np.arange(1, 1025)
  assert (np.array(buckets) >= lengths).all()
  wide = lengths > 64
  assert (np.array(buckets)[wide] / lengths[wide]).max() < 1.5
  assert sorted(set(buckets)) == (
    [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
  )


def test_every_row_appears_once_with_all_its_tokens():
  rng = np.random.default_rng(0)
  tokens = _rows(rng.integers(0, 101, 50).tolist(), 100)
  seen = []
  for batch in length_batches.split(tokens, 8):
    assert batch.tokens.shape[0] == 8
    count, width = len(batch.rows), batch.tokens.shape[1]
    np.testing.assert_array_equal(
      batch.tokens[:count], tokens[batch.rows, :width]
    )
    assert not tokens[batch.rows, width:].any()
    assert not batch.tokens[count:].any()
    seen.extend(batch.rows.tolist())
  assert sorted(seen) == list(range(50))


def test_a_function_says_how_many_rows_a_width_has():
  tokens = _rows([100, 100, 100, 20, 20, 20], 100)
  batches = list(length_batches.split(tokens, lambda width: 200 // width))
  assert [b.tokens.shape for b in batches] == [(2, 100), (2, 100), (6, 32)]


def test_the_longest_rows_come_first():
  tokens = _rows([3, 100, 20, 40], 100)
  widths = [batch.tokens.shape[1] for batch in length_batches.split(tokens, 2)]
  assert widths == [100, 48, 32, 16]


def test_the_width_of_a_row_does_not_depend_on_the_others():
  tokens = _rows([3, 60, 20], 64)
  alone = next(length_batches.split(tokens[2:], 4)).tokens.shape
  assert alone == (4, 32)
  together = [batch.tokens.shape for batch in length_batches.split(tokens, 4)]
  assert together == [(4, 64), (4, 32), (4, 16)]


def test_zeros_inside_a_row_do_not_cut_it():
  tokens = np.array([[5, 0, 0, 7]])
  batch = next(length_batches.split(tokens, 1))
  assert batch.tokens.tolist() == [[5, 0, 0, 7]]


def test_no_rows_give_no_batches_and_bad_arguments_are_refused():
  assert list(length_batches.split(np.zeros((0, 5), int), 2)) == []
  with pytest.raises(ValueError, match=r"\(3,\)"):
    list(length_batches.split(np.zeros(3, int), 2))
  with pytest.raises(ValueError, match="batch_size=0"):
    list(length_batches.split(np.zeros((1, 3), int), 0))
