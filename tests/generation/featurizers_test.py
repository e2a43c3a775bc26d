"""Featurizers against the libraries that they read models with."""

import importlib.util

import numpy as np
import pytest

from synthq_jax.data import shipped, vocabulary
from synthq_jax.generation import featurizers
from synthq_jax.models import t5_checkpoints
from synthq_jax.retrieval import encode

_TEXTS = ["a red fox", "red", "", "the quick red fox and a lazy dog " * 5]


def _needs(*modules):
  for name in modules:
    if importlib.util.find_spec(name) is None:
      pytest.skip(f"needs {name}: pip install {name.replace('_', '-')}")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
  """A folder with a tiny random GPT-2 and a tokenizer of words."""
  _needs("torch", "transformers", "tokenizers")
  import tokenizers
  import torch
  import transformers

  folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
  names = ["<|endoftext|>", *sorted(set(" ".join(_TEXTS).split()))]
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {name: i for i, name in enumerate(names)}, unk_token=names[0]
    )
  )
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, eos_token=names[0], unk_token=names[0]
  ).save_pretrained(folder)
  torch.manual_seed(0)
  config = transformers.GPT2Config(
    vocab_size=len(names),
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=0,
  )
  model = transformers.GPT2LMHeadModel(config)
  for parameter in model.parameters():  # far from the small initialisers
    parameter.data = torch.randn_like(parameter)
  model.save_pretrained(folder)
  return folder


def _last_states(folder, texts, length):
  """One text at a time, without padding: the whole model's last layer."""
  import torch
  import transformers

  model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  found = []
  for text in texts:
    ids = tokenizer(text)["input_ids"][:length] or [tokenizer.eos_token_id]
    with torch.no_grad():
      out = model(torch.tensor([ids]), output_hidden_states=True)
    found.append(out.hidden_states[-1][0, -1].numpy())
  return np.array(found)


@pytest.mark.parametrize("batch_size, length", [(1, 32), (3, 32), (4, 8)])
def test_gpt2_gives_the_last_state_of_each_text(gpt2, batch_size, length):
  made = featurizers.Gpt2(folder=gpt2, batch_size=batch_size, max_length=length)
  vectors = made.featurize(_TEXTS)
  assert vectors.dtype == np.float32
  np.testing.assert_allclose(
    vectors, _last_states(gpt2, _TEXTS, length), rtol=1e-4, atol=1e-4
  )
  assert made.description == "last hidden state of tiny-gpt2"


def test_our_own_encoder_is_the_dual_encoder_of_a_checkpoint():
  made = featurizers.OwnEncoder(length=12)
  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  tokens = vocabulary.tokenize(
    vocabulary.load(shipped.VOCABULARY), _TEXTS, length=12
  )
  np.testing.assert_array_equal(
    made.featurize(_TEXTS), encode.encode(params, config, tokens)
  )
  assert made.description == "dual encoder of demo_t5"


def test_a_vocabulary_too_large_for_the_checkpoint_is_refused(tmp_path):
  made = featurizers.OwnEncoder(checkpoint=_tiny_checkpoint(tmp_path / "t5"))
  with pytest.raises(ValueError, match="below vocab_size=64 .* own vocabulary"):
    made.featurize(["the quick brown fox"])


def _tiny_checkpoint(folder):
  import dataclasses

  import jax

  from synthq_jax.models import t5, t5_config

  config = dataclasses.replace(t5_config.get("tiny"), vocab_size=64)
  shapes = jax.eval_shape(
    lambda k: t5.init_params(config, k), jax.random.key(0)
  )
  zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
  t5_checkpoints.save(folder, zeros, config)
  return folder


def test_sentence_transformers_pool_as_their_folder_says(gpt2, tmp_path):
  _needs("sentence_transformers", "torch")
  from sentence_transformers import SentenceTransformer, models

  part = models.Transformer(str(gpt2))
  part.tokenizer.pad_token = part.tokenizer.eos_token
  pooling = models.Pooling(16, "mean")
  SentenceTransformer(modules=[part, pooling], device="cpu").save(
    str(tmp_path / "pooled")
  )
  made = featurizers.SentenceTransformer(folder=tmp_path / "pooled")
  texts = [text for text in _TEXTS if text]
  expected = _mean_states(gpt2, texts)
  np.testing.assert_allclose(
    made.featurize(texts), expected, rtol=1e-4, atol=1e-4
  )
  assert made.description == "sentence-transformer pooled"


def _mean_states(folder, texts):
  import torch
  import transformers

  model = transformers.GPT2Model.from_pretrained(folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  with torch.no_grad():
    states = [
      model(torch.tensor([tokenizer(t)["input_ids"][:32]])).last_hidden_state
      for t in texts
    ]
  return np.array([one[0].mean(axis=0).numpy() for one in states])


@pytest.mark.parametrize(
  "kind", [featurizers.Gpt2, featurizers.SentenceTransformer]
)
def test_a_missing_folder_is_never_downloaded(kind, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  made = kind(folder=tmp_path / "gpt2-large")
  with pytest.raises(ValueError, match="no such folder; nothing is downloaded"):
    made.featurize(["a"])


@pytest.mark.parametrize(
  "kind, words",
  [
    (featurizers.Gpt2, "got no torch: pip install torch transformers"),
    (featurizers.SentenceTransformer, "pip install sentence-transformers"),
  ],
)
def test_a_missing_library_is_named_with_its_command(
  kind, words, tmp_path, monkeypatch
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=words):
    kind(folder=tmp_path).featurize(["a"])
