"""Views of a parameter against NumPy's own strides."""

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from synthq_jax.optim.bookkeeping import use_sites


def entries(view, shape):
  """The flat positions in the parameter that a view of `shape` shows."""
  flat = np.zeros(shape, int)
  for axis, atoms in enumerate(view.axes):
    index = np.zeros(1, int)
    for stride, size in atoms:
      index = (index[:, None] + stride * np.arange(size)[None, :]).reshape(-1)
    flat += index.reshape([-1 if a == axis else 1 for a in range(len(shape))])
  return flat


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.permutations(range(3)), st.booleans())
def test_a_transposed_and_split_view_shows_the_same_entries(order, split):
  numbers = np.arange(24).reshape(4, 2, 3)
  view = use_sites.make_view(0, (4, 2, 3)).transpose(tuple(order))
  numbers = numbers.transpose(order)
  if split and numbers.shape[0] == 4:
    view, numbers = (
      view.reshape((2, 2, *numbers.shape[1:])),
      numbers.reshape(2, 2, *numbers.shape[1:]),
    )
  np.testing.assert_array_equal(entries(view, numbers.shape), numbers)


def test_a_reshape_that_cuts_across_strides_is_refused():
  assert (
    use_sites.make_view(0, (2, 3)).transpose((1, 0)).reshape((2, 3)) is None
  )


def test_a_matrix_and_its_transpose_have_swapped_layouts():
  view = use_sites.make_view(0, (3, 5))
  straight = use_sites.Layout((), view.select((0,)), view.select((1,)))
  turned = view.transpose((1, 0))
  other = use_sites.Layout((), turned.select((0,)), turned.select((1,)))
  assert straight != other
  assert straight.swap() == other


def test_a_gradient_is_put_back_where_its_entries_came_from():
  numbers = np.arange(24).reshape(2, 3, 4)
  view = use_sites.make_view(0, (2, 3, 4))
  layout = use_sites.Layout(
    view.select((1,)), view.select((2,)), view.select((0,))
  )
  moved = jnp.asarray(numbers.transpose(1, 2, 0))
  np.testing.assert_array_equal(layout.restore(moved, (2, 3, 4)), numbers)
