"""Starts a T5 from the parameters of another with a vocabulary of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from synthq_jax import typing
from synthq_jax.models import t5, t5_config

__all__ = ["pieces", "transfer"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
_PAD = 0  # in every vocabulary
_OUTPUTS = ("out", "wo")  # kernels that write into the residual stream


def transfer(
  params: typing.Params,
  pieces: list[list[int]],
  config: t5_config.T5Config,
  key: jax.Array,
) -> typing.Params:
  """Returns parameters of a new shape that compute what the given ones do.

  The embedding of a new piece is the mean direction of the pieces that spelled
  it before, at their mean length. Layers that were not there add nothing at
  first: the kernels that write their output are 0.

  Args:
    params: of a T5 of the same widths.
    pieces: for each id of the new vocabulary, the ids that it was before; an
      empty list for one that starts at random.
    config: the new shape; `vocab_size` and the numbers of layers may differ.
    key: draws what is new.

  Returns:
    A new tree; its leaves are float32 arrays.

  Raises:
    ValueError: if a width differs or a layer would be lost.
  """
  fresh = t5.init_params(config, key)
  old = params["token_embedder"]["embedding"]
  table = np.array(fresh["token_embedder"]["embedding"])
  for row, ids in enumerate(pieces):
    if ids:
      parts = np.asarray(old)[ids]
      mean = parts.mean(axis=0)
      length = np.linalg.norm(parts, axis=1).mean()
      scale = length / max(np.linalg.norm(mean), 1e-6)
      table[row] = mean * scale if len(ids) > 1 else mean
  result = {"token_embedder": {"embedding": jnp.asarray(table)}}
  for stack in ("encoder", "decoder"):
    lost = sorted(set(params[stack]) - set(fresh[stack]))
    if lost:
      raise ValueError(f"expected room for {stack}'s parts {lost}: add layers")
    result[stack] = {
      name: _checked(f"{stack}/{name}", params[stack][name], part)
      if name in params[stack]
      else jax.tree_util.tree_map_with_path(_silent, part)
      for name, part in fresh[stack].items()
    }
  return result


def pieces(old, new) -> list[list[int]]:
  """Returns for each id of a vocabulary the ids that spelled it in another.

  Args:
    old: a SentencePiece vocabulary as `data.vocabulary.load` gives it.
    new: another; sentinels go to the sentinels with the same place from the
      end, as far as there are any.
  """
  first = new.vocab_size - new.extra_ids
  ends = {_PAD: _PAD, new.eos_id: old.eos_id, new.unk_id: old.unk_id}
  special = {_PAD, old.eos_id, old.unk_id}
  found = []
  for index in range(first):
    if index in ends:
      found.append([ends[index]])
      continue
    text = new.tokenizer.id_to_piece(index)
    exact = old.tokenizer.piece_to_id(text)
    ids = (
      [exact]
      if exact not in special
      else old.tokenizer.encode(text.replace(_SPACE, " "))
    )
    if (
      exact in special and ids and not text.startswith(_SPACE)
    ):  # the old one adds a space before
      head = old.tokenizer.id_to_piece(ids[0]).removeprefix(_SPACE)
      alone = [old.tokenizer.piece_to_id(head)] if head else []
      ids = [*alone, *ids[1:]]
    found.append([i for i in ids if i not in special])
  sentinels = range(new.extra_ids, 0, -1)
  return found + [
    [old.vocab_size - i] if i <= old.extra_ids else [] for i in sentinels
  ]


def _checked(name, given, wanted):
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (given, wanted)]
  if shapes[0] != shapes[1]:
    raise ValueError(f"expected {name} of shapes {shapes[1]}, got {shapes[0]}")
  return jax.tree.map(jnp.asarray, given)


def _silent(path, leaf):
  return jnp.zeros_like(leaf) if path[-2].key in _OUTPUTS else leaf
