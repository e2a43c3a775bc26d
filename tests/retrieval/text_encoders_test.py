"""Encoders of texts against the libraries that they read models with."""

import importlib.util
import json

import numpy as np
import pytest

from synthq_jax.data import shipped, vocabulary
from synthq_jax.models import t5_checkpoints
from synthq_jax.retrieval import encode, text_encoders

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


@pytest.mark.parametrize("batch_size, length", [(3, 32), (4, 8)])
def test_gpt2_gives_the_last_state_of_each_text(gpt2, batch_size, length):
  made = text_encoders.Gpt2(
    folder=gpt2, batch_size=batch_size, max_length=length
  )
  vectors = made.encode(_TEXTS)
  assert vectors.dtype == np.float32
  np.testing.assert_allclose(
    vectors, _last_states(gpt2, _TEXTS, length), rtol=1e-4, atol=1e-4
  )
  assert made.description == "last hidden state of tiny-gpt2"


def test_our_own_encoder_is_the_dual_encoder_of_a_checkpoint():
  made = text_encoders.load_own(length=12)
  params, config = t5_checkpoints.load(shipped.DIRECTORY)
  tokens = vocabulary.tokenize(
    vocabulary.load(shipped.VOCABULARY), _TEXTS, length=12
  )
  np.testing.assert_array_equal(
    made.encode(_TEXTS), encode.encode(params, config, tokens)
  )
  assert made.description == "dual encoder of demo_t5"


def test_a_vocabulary_too_large_for_the_checkpoint_is_refused(tmp_path):
  with pytest.raises(
    ValueError, match="at most vocab_size=64 .* own vocabulary"
  ):
    text_encoders.load_own(_tiny_checkpoint(tmp_path / "t5"))


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


def test_a_missing_folder_is_never_downloaded(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  made = text_encoders.Gpt2(folder=tmp_path / "gpt2-large")
  with pytest.raises(ValueError, match="no such folder; nothing is downloaded"):
    made.encode(["a"])


PIECES = [
  "[PAD]",
  "[UNK]",
  "[CLS]",
  "[SEP]",
  "[MASK]",
  "measles",
  "out",
  "##break",
]


def bert_folder(place):
  """Saves a small BERT of random numbers, and returns transformers' own."""
  from hugging_face import torch, transformers

  torch.manual_seed(0)
  shape = transformers.BertConfig(
    vocab_size=len(PIECES),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
  )
  model = transformers.BertModel(shape).eval()
  model.save_pretrained(place)
  (place / "vocab.txt").write_text("\n".join(PIECES) + "\n")
  return torch, model


def test_a_bert_of_hugging_face_gives_the_mean_of_its_outputs(tmp_path):
  torch, model = bert_folder(tmp_path)
  texts = ["Measles outbreak", "out", "measles measles out unknown"]
  rows = [[2, 5, 6, 7, 3], [2, 6, 3], [2, 5, 5, 6, 1, 3]]
  with torch.no_grad():
    means = [
      model(torch.tensor([row])).last_hidden_state[0].mean(dim=0).numpy()
      for row in rows
    ]
  expected = np.stack([mean / np.linalg.norm(mean) for mean in means])
  made = text_encoders.load_folder(tmp_path, length=24)
  np.testing.assert_allclose(made.encode(texts), expected, atol=1e-5)
  same = made.encode(["MEASLES outbreak", "MEASLES outbreak!"]) @ expected[0]
  assert same[0] > 0.9999 > same[1]
  assert made.encode([]).shape == (0, 16)


def test_a_bert_that_does_not_fit_its_vocabulary_or_length_is_refused(tmp_path):
  bert_folder(tmp_path)
  with pytest.raises(ValueError, match="more than 2 tokens, .* got length=2"):
    text_encoders.load_folder(tmp_path, length=2)
  (tmp_path / "vocab.txt").write_text("\n".join([*PIECES, "more"]) + "\n")
  with pytest.raises(ValueError, match="at most vocab_size=8 pieces, .* got 9"):
    text_encoders.load_folder(tmp_path, length=24)
  (tmp_path / "vocab.txt").unlink()
  (tmp_path / "tokenizer.json").unlink(missing_ok=True)
  with pytest.raises(ValueError, match="vocab.txt, got neither"):
    text_encoders.load_folder(tmp_path, length=24)


SENTENCES = [
  "Berlin Wall",
  "berlin",
  "The Wall: a query of Berlin",
  "wall " * 9,
]


def sentence_folder(place, *, texts=None, prompts=None, pooling=None):
  """Saves a small BERT of random numbers as sentence-transformers would."""
  from hugging_face import torch, transformers

  torch.manual_seed(0)
  letters = "abcdefghijklmnopqrstuvwxyzBTW:"
  words = ["query", "berlin", "Berlin", "wall", "Wall"]
  names = [*PIECES[:5], *letters, *(f"##{one}" for one in letters), *words]
  shape = transformers.BertConfig(
    vocab_size=len(names),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    initializer_range=0.5,
  )
  transformers.BertModel(shape).save_pretrained(place)
  (place / "1_Pooling").mkdir()
  kind = "sentence_transformers.models."
  modules = [
    {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{kind}Normalize"},
  ]
  mean = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
  files = {
    "modules.json": modules,
    "tokenizer_config.json": {"do_lower_case": False},
    "sentence_bert_config.json": {"max_seq_length": 32, **(texts or {})},
    "config_sentence_transformers.json": prompts or {},
    "1_Pooling/config.json": {**mean, **(pooling or {})},
  }
  for name, content in files.items():
    (place / name).write_text(json.dumps(content))
  (place / "vocab.txt").write_text("\n".join(names) + "\n")
  return place


QUERY = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}


@pytest.mark.filterwarnings("ignore")  # those of torch
@pytest.mark.parametrize(
  "files",
  [
    {"texts": {"do_lower_case": True, "max_seq_length": 5}},
    {"prompts": QUERY},
    {"prompts": QUERY, "pooling": {"include_prompt": True}},
  ],
)
def test_a_folder_gives_the_vectors_of_sentence_transformers(tmp_path, files):
  library = pytest.importorskip("sentence_transformers")
  place = sentence_folder(tmp_path, **files)
  ours = text_encoders.load_folder(place, length=32).encode(SENTENCES)
  theirs = library.SentenceTransformer(str(place), device="cpu")
  np.testing.assert_allclose(ours, theirs.encode(SENTENCES), atol=1e-5)


@pytest.mark.parametrize(
  "files, words",
  [
    (
      {"prompts": QUERY, "pooling": {"include_prompt": False}},
      "include_prompt=false and a prompt",
    ),
    (
      {"prompts": {"prompts": {}, "default_prompt_name": "query"}},
      "a prompt named 'query', as default_prompt_name says, got none",
    ),
  ],
)
def test_settings_of_texts_that_are_not_read_are_refused(
  tmp_path, files, words
):
  place = sentence_folder(tmp_path, **files)
  with pytest.raises(ValueError, match=words):
    text_encoders.load_folder(place, length=32)
