import dataclasses
import functools
import math
import re

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5

from synthq_jax.generation import decoding
from synthq_jax.models import device_rows, t5, t5_config, token_ids

# One layer compiles in half the time; t5_test steps through the tiny T5.
_CONFIG = dataclasses.replace(
  t5_config.get("tiny"), num_encoder_layers=1, num_decoder_layers=1
)
_EOS = _CONFIG.token_ids.eos
_KEY = jax.random.key(7)
_LENGTH = 8


def _params(config=_CONFIG):
  return random_t5.params(config)


def _documents(count, longest=16, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, _CONFIG.vocab_size, (count, longest))
  lengths = rng.integers(1, longest + 1, count)
  tokens[np.arange(longest) >= lengths[:, None]] = 0
  return tokens.astype(np.int32), [f"d{index}" for index in range(count)]


def _generate(tokens, ids, **options):
  options = {"key": _KEY, "max_length": _LENGTH, "batch_size": 8} | options
  return decoding.generate(_params(), _CONFIG, tokens, ids=ids, **options)


@functools.cache
def _teacher_forced():
  return jax.jit(t5.Transformer(_CONFIG).apply)


def _next_logits(document, written):
  """Logits of the next token by the full, uncached forward pass."""
  inputs = t5.shift_right(jnp.asarray(np.append(written, 0), jnp.int32)[None])
  logits = _teacher_forced()({"params": _params()}, document[None], inputs)
  logits = np.array(logits[0, -1])
  logits[decoding.PAD] = -np.inf
  return logits


def test_greedy_decoding_equals_teacher_forced_argmax_token_for_token():
  config = t5_config.get("tiny")
  params = _params(config)
  tokens, ids = _documents(12)
  queries = decoding.generate(
    params,
    config,
    tokens,
    ids=ids,
    key=_KEY,
    sampler=decoding.Greedy(),
    max_length=_LENGTH,
  )[:, 0]
  inputs = t5.shift_right(jnp.asarray(queries))
  model = t5.Transformer(config)
  logits = np.array(jax.jit(model.apply)({"params": params}, tokens, inputs))
  logits[..., decoding.PAD] = -np.inf
  written = queries != decoding.PAD
  assert (queries == logits.argmax(axis=-1))[written].all()
  assert written.sum() > 12  # more than the first tokens were compared


def test_a_query_is_zeros_after_its_eos_and_has_no_padding_before():
  tokens, ids = _documents(100)
  queries = _generate(tokens, ids, num_samples=3).reshape(-1, _LENGTH)
  ended = queries == _EOS
  lengths = np.where(ended.any(1), ended.argmax(1) + 1, _LENGTH)
  expected = np.arange(_LENGTH) < lengths[:, None]
  np.testing.assert_array_equal(queries != decoding.PAD, expected)
  assert ended.any() and not ended.any(axis=1).all()  # both cases occurred


def test_queries_depend_neither_on_batch_size_nor_on_order_nor_on_shard():
  tokens, ids = _documents(21)
  queries = _generate(tokens, ids)
  np.testing.assert_array_equal(_generate(tokens, ids, batch_size=3), queries)
  order = np.random.default_rng(3).permutation(21)
  permuted = _generate(tokens[order], [ids[index] for index in order])
  np.testing.assert_array_equal(permuted, queries[order])
  shard = _generate(tokens[5:9], ids[5:9])
  np.testing.assert_array_equal(shard, queries[5:9])


def test_keys_and_ids_choose_the_randomness():
  document = np.tile(_documents(1)[0], (6, 1))
  ids = list("abcdef")
  queries = _generate(document, ids)
  assert len(np.unique(queries, axis=0)) == 6
  other = _generate(document, ids, key=jax.random.key(8))
  assert (other != queries).any(axis=(1, 2)).all()


def test_keys_that_vmap_by_place_do_not_make_queries_depend_on_it():
  tokens, ids = _documents(5)
  key = jax.random.key(7, impl="rbg")
  queries = _generate(tokens, ids, key=key)
  backwards = _generate(tokens[::-1], ids[::-1], key=key)
  np.testing.assert_array_equal(backwards[::-1], queries)
  other = _generate(tokens, ids, key=jax.random.key(8, impl="rbg"))
  assert (other != queries).any()


def test_second_tokens_follow_the_nucleus_given_the_first():
  tokens, ids = _documents(1)
  queries = _generate(tokens, ids, num_samples=20_000, max_length=2)[0]
  first = np.bincount(queries[:, 0], minlength=2)[2:].argmax() + 2
  seconds = queries[queries[:, 0] == first, 1]
  assert len(seconds) > 500
  expected = draws.nucleus(_next_logits(tokens[0], [first]), 0.8)
  assert draws.p_value(seconds, expected) > 1e-3
  other = draws.nucleus(_next_logits(tokens[0], []), 0.8)
  assert draws.p_value(seconds, other) < 1e-9


_COPIES = ("copy", "transpose", "fusion", "dynamic-slice", "concatenate")


def test_no_step_copies_the_cache():
  """Nor what documents are read into, nor what is written."""
  config, num_samples = t5_config.get("tiny"), 2
  documents, slots, read, length = 11, 3, 48, 40
  compiled = decoding._write.lower(
    _params(config),
    np.zeros((1, config.vocab_size), bool),
    jax.ShapeDtypeStruct((documents, read), jnp.int32),
    jax.random.split(_KEY, documents),
    np.ones(documents, bool),
    config=config,
    sampler=decoding.Nucleus(0.8),
    max_length=length,
    num_samples=num_samples,
    slots=slots,
    mesh=device_rows.mesh(None),
  ).compile()
  width = config.num_heads * config.head_dim
  sizes = {
    "crossed": slots * width * read,
    "own": num_samples * slots * width * length,
    "written": num_samples * documents * length,
  }
  loops = {}
  for text in compiled.as_text().split("\n}\n"):
    made = {name: [] for name in sizes}
    for match in re.finditer(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(.*", text):
      elements = math.prod(map(int, match[1].split(",")))
      for name, size in sizes.items():
        if elements == size and match[2] in _COPIES:
          made[name].append(match[0])
    if made["own"] and "\nENTRY " not in text:
      loops[text.split(" ")[0]] = made
  [made] = loops.values()  # the body of the loop over steps
  assert not made["crossed"]
  inserts = [line for line in made["own"] if "dynamic_update_slice" in line]
  assert len(inserts) == 2 * config.num_decoder_layers  # in place
  assert made["own"] == inserts
  assert all("scatter" in line for line in made["written"])


@pytest.mark.parametrize("count", [1, 200])
def test_documents_that_wait_get_what_they_get_alone(count):
  """Short and long texts by turns: slots are filled again at every step."""
  tokens, ids = _documents(count)
  one, many = (
    _generate(tokens, ids, num_samples=2, batch_size=size, max_length=12)
    for size in (2 * count, 14)
  )
  np.testing.assert_array_equal(one, many)
  lengths = np.unique((one != 0).sum(axis=-1))
  assert count == 1 or len(lengths) > 3


@dataclasses.dataclass(frozen=True)
class _EndsByChance:
  """Ends a text with probability .2 at each token; counts the steps."""

  calls: list = dataclasses.field(default_factory=list, compare=False)

  def sample(self, logits, keys):
    jax.debug.callback(lambda _: self.calls.append(1), logits[0, 0])
    uniform = jax.vmap(jax.random.uniform)(keys)
    return jnp.where(uniform < 0.2, _EOS, 5)


def test_a_step_writes_for_nearly_all_slots():
  """Ten at a time: 75 steps at best, 170 where each ten wait for their longest."""
  tokens, ids = _documents(160, longest=16)
  sampler = _EndsByChance()
  written = _generate(
    tokens, ids, sampler=sampler, batch_size=10, max_length=12
  )
  jax.effects_barrier()
  total = int((written != 0).sum())
  assert total / 10 <= len(sampler.calls) < 1.5 * total / 10
  alone = _generate(
    tokens, ids, sampler=_EndsByChance(), batch_size=1, max_length=12
  )
  np.testing.assert_array_equal(written, alone)


def test_forbidden_tokens_are_never_written():
  tokens, ids = _documents(20)
  forbidden = (1, 2, *range(64, 128))
  queries = _generate(tokens, ids, forbidden=forbidden)
  assert not np.isin(queries, (0, *forbidden)).any()


def test_no_documents_and_empty_documents_are_fine():
  tokens, ids = _documents(2)
  assert _generate(tokens[:0], []).shape == (0, 1, _LENGTH)
  tokens[0] = 0
  assert (_generate(tokens, ids)[:, 0, 0] != 0).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"ids": ["a"]}, "2, 16"),
    ({"ids": ["a", "a"]}, "1 repeated"),
    ({"ids": [1, 2]}, "ids must be texts"),
    ({"key": 0}, r"key must be jax.random.key\(SEED\), got 0"),
    ({"max_length": 0}, "max_length=0"),
    ({"num_samples": 0}, "num_samples=0"),
    ({"batch_size": 0}, "batch_size"),
    ({"forbidden": (128,)}, "128"),
    ({"forbidden": range(128)}, "got all"),
  ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
  tokens, ids = _documents(2)
  options = {"ids": ids} | change
  with pytest.raises(ValueError, match=message):
    _generate(tokens, options.pop("ids"), **options)


@pytest.mark.parametrize("wrong", [128, -1])
def test_tokens_that_the_model_has_no_row_for_are_refused(wrong):
  """Their embeddings are NaN, and such a document's query was empty."""
  tokens, ids = _documents(2)
  tokens[1, 0] = wrong
  with pytest.raises(ValueError, match=r"tokens must lie in \[0, 128\)"):
    _generate(tokens, ids)


def test_eight_devices_write_what_one_writes():
  tokens, ids = _documents(21)
  options = dict(num_samples=2, batch_size=20)
  one = _generate(tokens, ids, **options)
  many = _generate(tokens, ids, devices=jax.devices(), **options)
  assert len(jax.devices()) == 8
  assert np.array_equal(one, many)


def test_documents_that_were_encoded_before_get_the_same_queries():
  """In every width, and on every device; others' outputs give other queries."""
  tokens, ids = _documents(21, longest=32)
  model = t5.Transformer(_CONFIG)
  encode = jax.jit(functools.partial(model.apply, method="encode"))
  encoded = np.asarray(encode({"params": _params()}, tokens))
  options = dict(num_samples=2, devices=jax.devices())
  expected = _generate(tokens, ids, **options)
  got = _generate(tokens, ids, encoded=encoded, **options)
  np.testing.assert_array_equal(got, expected)
  got = _generate(tokens, ids, encoded=encoded[::-1], **options)
  assert (got != expected).any(axis=(1, 2)).mean() > 0.5


def test_queries_end_with_the_end_of_text_of_their_model():
  """ruT5's is 2; writing goes on behind its 1."""
  ids = token_ids.TokenIds(eos=2, unk=3)
  config = dataclasses.replace(_CONFIG, token_ids=ids)
  tokens, names = _documents(24)
  options = {"key": _KEY, "max_length": 12, "num_samples": 4}
  sampler = decoding.Nucleus(1.0, temperature=3.0)
  queries = decoding.generate(
    _params(), config, tokens, ids=names, sampler=sampler, **options
  ).reshape(-1, 12)
  ended = queries == 2
  ends = np.where(ended.any(axis=1), ended.argmax(axis=1), 11)
  written = np.arange(12) <= ends[:, None]
  np.testing.assert_array_equal(queries != decoding.PAD, written)
  assert ended.any() and (queries[:, :-1] == 1).any()
  theirs = decoding.generate(
    _params(), _CONFIG, tokens, ids=names, sampler=sampler, **options
  )
  assert (theirs.reshape(-1, 12) != queries).any()
