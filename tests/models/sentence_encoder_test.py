"""Folders of each family against sentence-transformers itself, in and out."""

import json
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face import sentence_models as models
from hugging_face import sentence_transformers as library
from hugging_face import tokenizers, torch, transformers

from synthq_jax.data import sentence_tokens
from synthq_jax.models import dual_encoder, encoders, sentence_encoder
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.retrieval import encode, text_encoders
from synthq_jax.runtime import encoder_start

TEXTS = ("red fox", "The quick Red fox and a lazy dog " * 6, "é?", "fox")
DIM = 16


def _pieces(special):
  letters = string.ascii_lowercase
  words = [
    "red",
    "fox",
    "the",
    "quick",
    "and",
    "lazy",
    "dog",
    "query",
    "?",
    ":",
  ]
  rest = [*words, *letters, *(f"##{letter}" for letter in letters)]
  return {name: i for i, name in enumerate([*special, *rest])}


def _tokenizer(folder, special, head, tail, *, kind=None):
  """Writes a tokenizer of words whose special pieces have the given ids."""
  unknown = "[UNK]" if "[UNK]" in special else "<unk>"
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(_pieces(special), unk_token=unknown)
  )
  inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single=" ".join([*head, "$A", *tail]),
    special_tokens=[(name, special.index(name)) for name in {*head, *tail}],
  )
  names = {"unk_token": unknown}
  names["pad_token"] = next(n for n in special if "pad" in n.lower())
  made = kind or transformers.PreTrainedTokenizerFast
  made(tokenizer_object=inner, **names).save_pretrained(folder)
  return inner


_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_T5 = ("<pad>", "</s>", "<unk>")
_SHAPE = {
  "hidden_size": DIM,
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "intermediate_size": 24,
}


def _model(kind):
  """Returns a random model of Hugging Face and its special pieces."""
  size = {"vocab_size": 100}
  if kind == "bert":
    config = transformers.BertConfig(**_SHAPE, **size)
    return transformers.BertModel(config), (_BERT, ["[CLS]"], ["[SEP]"])
  if kind == "multilingual-e5":  # 0 is padding in config.json alone
    config = transformers.BertConfig(**_SHAPE, **size)
    return transformers.BertModel(config), (_ROBERTA, ["<s>"], ["</s>"])
  if kind == "distilbert":
    config = transformers.DistilBertConfig(
      dim=DIM, n_heads=2, n_layers=2, hidden_dim=24, **size
    )
    return transformers.DistilBertModel(config), (_BERT, ["[CLS]"], ["[SEP]"])
  if kind == "roberta":
    config = transformers.RobertaConfig(
      **_SHAPE, **size, max_position_embeddings=514
    )
    return transformers.RobertaModel(config), (_ROBERTA, ["<s>"], ["</s>"])
  if kind == "xlm-roberta":
    config = transformers.XLMRobertaConfig(**_SHAPE, **size)
    return transformers.XLMRobertaModel(config), (_ROBERTA, ["<s>"], ["</s>"])
  if kind == "mpnet":
    config = transformers.MPNetConfig(**_SHAPE, **size)
    return transformers.MPNetModel(config), (_ROBERTA, ["<s>"], ["</s>"])
  config = transformers.T5Config(
    d_model=DIM, d_kv=8, d_ff=24, num_heads=2, num_layers=2, **size,
    feed_forward_proj="gated-gelu",
  )  # fmt: skip
  return transformers.T5EncoderModel(config), (_T5, [], ["</s>"])


KINDS = (
  *("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "t5"),
  "multilingual-e5",
)


def _randomise(model):
  torch.manual_seed(0)
  for parameter in model.parameters():  # far from the small initialisers
    parameter.data = torch.randn_like(parameter) * 0.3
  return model


def _folder(root, kind, pooling="mean", *, dense=(), length=24, prompts=None):
  """Writes a folder as sentence-transformers does; returns what it encodes."""
  inner = root / "inner"
  model, (special, head, tail) = _model(kind)
  _randomise(model).save_pretrained(inner)
  _tokenizer(inner, special, head, tail)
  first = models.Transformer(str(inner), max_seq_length=length)
  parts = [first, models.Pooling(DIM, pooling_mode=pooling)]
  for bias, activation, width in dense:
    before = parts[-1].get_embedding_dimension()
    parts.append(
      models.Dense(before, width, bias=bias, activation_function=activation)
    )
    _randomise(parts[-1])
  parts.append(models.Normalize())
  made = library.SentenceTransformer(modules=parts, device="cpu")
  made.prompts |= prompts or {}
  place = root / "folder"
  made.save(str(place))
  return place, library.SentenceTransformer(str(place), device="cpu")


@pytest.mark.parametrize(
  ("kind", "pooling"),
  [*((kind, "mean") for kind in KINDS), ("bert", "cls"), ("t5", "cls")],
)
def test_each_family_gives_the_library_s_vectors(tmp_path, kind, pooling):
  place, theirs = _folder(tmp_path, kind, pooling)
  ours = text_encoders.load_folder(place, length=24)
  np.testing.assert_allclose(
    ours.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5
  )


@pytest.mark.parametrize("kind", ["bert", "distilbert", "multilingual-e5"])
def test_a_text_that_holds_the_name_of_padding_is_read_whole(tmp_path, kind):
  place, theirs = _folder(tmp_path, kind)
  texts = [f"red {theirs.tokenizer.pad_token} fox", "red fox"]
  vectors = text_encoders.load_folder(place, length=24).encode(texts)
  np.testing.assert_allclose(vectors, theirs.encode(texts), atol=1e-5)


def test_layers_behind_the_mean_are_read(tmp_path):
  dense = [(True, torch.nn.Tanh(), 12), (False, torch.nn.Identity(), 8)]
  place, theirs = _folder(tmp_path, "t5", dense=dense)
  ours = text_encoders.load_folder(place, length=24)
  vectors = ours.encode(TEXTS)
  assert vectors.shape == (4, 8)
  np.testing.assert_allclose(vectors, theirs.encode(list(TEXTS)), atol=1e-5)


def test_a_row_of_padding_stays_zero_behind_a_bias(tmp_path):
  dense = [(True, torch.nn.Tanh(), 12)]
  place, _ = _folder(tmp_path, "bert", dense=dense)
  params, config = sentence_encoder.load(place)
  vectors = sentence_encoder.encode(params, config, jnp.zeros((2, 5), int))
  np.testing.assert_array_equal(vectors, 0)


def test_queries_and_documents_get_their_prompts(tmp_path):
  prompts = {"query": "query: ", "document": "the "}
  place, theirs = _folder(tmp_path, "bert", prompts=prompts)
  params, config = sentence_encoder.load(place)
  tokens = sentence_tokens.load(place)
  for role, oracle in (
    (sentence_folders.QUERY, theirs.encode_query),
    (sentence_folders.DOCUMENT, theirs.encode_document),
  ):
    found = encode.encode(params, config, tokens.rows(TEXTS, role))
    np.testing.assert_allclose(found, oracle(list(TEXTS)), atol=1e-5)


def test_a_passage_prompt_stands_before_documents(tmp_path):
  place, _ = _folder(tmp_path, "bert", prompts={"passage": "the "})
  texts = sentence_tokens.load(place).texts
  assert (texts.query_prompt, texts.document_prompt) == ("", "the ")
  own = sentence_tokens.load(place, document_prompt="dog ", query_prompt="a")
  assert own.texts.document_prompt == "dog " and own.texts.query_prompt == "a"


@pytest.mark.parametrize("prompt", ["", "dog "])
def test_a_document_prompt_of_the_settings_replaces_one_of_passages(
  tmp_path, prompt
):
  """With "" the saved encoder read "the " before documents again."""
  prompts = {"query": "query: ", "passage": "the "}
  place, _ = _folder(tmp_path, "bert", prompts=prompts)
  params, config = sentence_encoder.load(place)
  tokens = sentence_tokens.load(place, document_prompt=prompt)
  out = tmp_path / "out"
  sentence_encoder.save(out, params, config, start=place, texts=tokens.texts)
  read = sentence_tokens.load(out)
  assert read.texts.document_prompt == prompt
  assert read.texts.query_prompt == "query: "
  theirs = library.SentenceTransformer(str(out), device="cpu")
  found = encode.encode(
    params, config, read.rows(TEXTS, sentence_folders.DOCUMENT)
  )
  oracle = theirs.encode_document(list(TEXTS))
  np.testing.assert_allclose(found, oracle, atol=1e-5)


def test_files_that_lie_beside_a_model_are_not_copied(tmp_path):
  """A trainer's logs, results and lists of queries went into the export."""
  place, theirs = _folder(tmp_path, "bert")
  beside = (
    *("train_queries.txt", "trainer_state.json", "data/hard_negatives.json"),
    "checkpoint-500/trainer_state.json",
  )
  for name in beside:
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text('["a private query"]')
  for name, field in (
    ("config.json", "_name_or_path"),
    ("tokenizer_config.json", "tokenizer_file"),
  ):
    fields = json.loads((place / name).read_text())
    fields["text_config"] = {
      field: "output/ada/checkpoint-500"
    }  # none reads it
    (place / name).write_text(json.dumps(fields | {field: "/home/ada/acme"}))
  params, config = sentence_encoder.load(place)
  texts = sentence_tokens.load(place).texts
  run, out = tmp_path / "run", tmp_path / "out"
  sentence_encoder.save(run, params, config, start=place, texts=texts)
  (run / beside[0]).write_text("of a run that copied it")
  sentence_encoder.copy_files(run, out)
  names = {p.relative_to(out).as_posix() for p in out.rglob("*")}
  assert not names & {*beside} and "model.safetensors" in names
  assert not [p for p in out.rglob("*.json") if "ada" in p.read_text()]
  sentence_encoder.add_normalize(out)
  made = library.SentenceTransformer(str(out), device="cpu")
  expected = theirs.encode(list(TEXTS))
  np.testing.assert_allclose(made.encode(list(TEXTS)), expected, atol=1e-5)


def test_a_layer_behind_a_link_is_part_of_the_folder(tmp_path):
  """It was read, but was in no digest and no export."""
  place, _ = _folder(tmp_path, "bert")
  (place / "1_Pooling").rename(tmp_path / "disk")
  (place / "1_Pooling").symlink_to(tmp_path / "disk")
  assert place / "1_Pooling" / "config.json" in sentence_encoder.files(place)
  sentence_encoder.copy_files(place, tmp_path / "out")
  assert sentence_encoder.load(tmp_path / "out")[1].pooling == "mean"


def test_modules_are_added_beside_folders_that_are_not_listed(tmp_path):
  """An export of a folder whose Normalize was taken out of modules.json failed."""
  place, theirs = _folder(tmp_path, "bert")
  expected = theirs.encode(list(TEXTS))
  listed = json.loads((place / "modules.json").read_text())
  (place / "modules.json").write_text(json.dumps(listed[:2]))
  assert (place / "2_Normalize").is_dir()
  (place / "3_Router").mkdir()
  (place / "4_Normalize").mkdir()
  sentence_encoder.add_normalize(place)
  turned = np.eye(DIM, dtype=np.float32)[::-1]
  sentence_encoder.add_query_map(place, turned)
  made = library.SentenceTransformer(str(place), device="cpu")
  documents = made.encode_document(list(TEXTS))
  np.testing.assert_allclose(documents, expected, atol=1e-5)
  queries = made.encode_query(list(TEXTS))
  np.testing.assert_allclose(queries, expected @ turned, atol=1e-5)


@pytest.mark.parametrize("with_projection", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_a_folder_of_the_library(
  tmp_path, kind, with_projection
):
  place, _ = _folder(tmp_path, kind, prompts={"query": "query: "})
  params, config = sentence_encoder.load(place)
  moved = jax.tree.map(lambda leaf: leaf * 1.25 + 0.01, params)
  if with_projection:
    kernel = np.eye(DIM) + np.random.default_rng(0).normal(size=(DIM, DIM))
    moved[dual_encoder.PROJECTION] = {"kernel": np.float32(kernel)}
  tokens = sentence_tokens.load(place, length=9, document_prompt="the ")
  sentence_encoder.save(
    tmp_path / "out", moved, config, start=place, texts=tokens.texts
  )
  theirs = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
  again, found = sentence_encoder.load(tmp_path / "out")
  read = sentence_tokens.load(tmp_path / "out")
  assert read.length == 9
  for role, oracle in (
    (sentence_folders.QUERY, theirs.encode_query),
    (sentence_folders.DOCUMENT, theirs.encode_document),
  ):
    rows = tokens.rows(TEXTS, role)
    np.testing.assert_array_equal(rows, read.rows(TEXTS, role))
    ours = encoders.of(config).encode(moved, jnp.asarray(rows))
    np.testing.assert_allclose(ours, oracle(list(TEXTS)), atol=1e-5)
    loaded = encoders.of(found).encode(again, jnp.asarray(rows))
    np.testing.assert_allclose(ours, loaded, atol=1e-6)


def _static(root, *, truncation=None):
  inner = _tokenizer(root / "inner", _BERT, ["[CLS]"], ["[SEP]"])
  if truncation:
    inner.enable_truncation(truncation)
  table = np.random.default_rng(0).normal(size=(inner.get_vocab_size(), DIM))
  module = models.StaticEmbedding(
    inner, embedding_weights=table.astype(np.float32)
  )
  made = library.SentenceTransformer(
    modules=[module, models.Normalize()], device="cpu"
  )
  made.save(str(root / "static"))
  return root / "static", made


@pytest.mark.parametrize("truncation", [None, 7])
def test_static_vectors_are_means_of_their_tokens(tmp_path, truncation):
  place, theirs = _static(tmp_path, truncation=truncation)
  params, config = sentence_encoder.load(place)
  tokens = sentence_tokens.load(place)
  found = encode.encode(params, config, tokens.rows(TEXTS))
  np.testing.assert_allclose(found, theirs.encode(list(TEXTS)), atol=1e-5)
  sentence_encoder.save(
    tmp_path / "out", params, config, start=place, texts=tokens.texts
  )
  again = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
  np.testing.assert_allclose(found, again.encode(list(TEXTS)), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "static"])
def test_a_saved_folder_says_how_long_queries_are(tmp_path, kind):
  """A query of a run is read as its retriever was trained, at any length."""
  place, _ = _static(tmp_path) if kind == "static" else _folder(tmp_path, kind)
  start = encoder_start.EncoderStart(folder=str(place), query_length=80)
  params, config = sentence_encoder.load(place)
  start.save(tmp_path / "out", params, config)
  read = sentence_tokens.load(tmp_path / "out")
  assert read.texts.query_length == start.tokens().texts.query_length
  whole = start.tokens().rows(TEXTS, sentence_folders.QUERY)
  np.testing.assert_array_equal(read.rows(TEXTS, sentence_folders.QUERY), whole)
  if kind == "static":  # cut by nothing else
    assert whole.shape[1] == 80


def test_model2vec_s_mapping_and_weights_are_read(tmp_path):
  from safetensors import numpy as safetensors

  place, _ = _static(tmp_path)
  generator = np.random.default_rng(1)
  size = 71
  safetensors.save_file(
    {
      "embeddings": generator.normal(size=(5, DIM)).astype(np.float32),
      "mapping": generator.integers(5, size=size),
      "weights": generator.random(size).astype(np.float64),
    },
    next(place.rglob("model.safetensors")),
  )
  theirs = library.SentenceTransformer(str(place), device="cpu")
  ours = text_encoders.load_folder(place)
  np.testing.assert_allclose(
    ours.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5
  )


def test_each_route_of_a_router_is_read(tmp_path):
  place, _ = _folder(tmp_path, "bert")
  base = library.SentenceTransformer(str(place), device="cpu")
  query = _randomise(
    models.Dense(DIM, DIM, bias=False, activation_function=torch.nn.Identity())
  )
  router = models.Router.for_query_document([query], [models.Normalize()])
  theirs = library.SentenceTransformer(
    modules=[*base, router, models.Normalize()], device="cpu"
  )
  theirs.save(str(tmp_path / "routed"))
  tokens = sentence_tokens.load(tmp_path / "routed")
  for role, oracle in (
    (sentence_folders.QUERY, theirs.encode_query),
    (sentence_folders.DOCUMENT, theirs.encode_document),
  ):
    params, config = sentence_encoder.load(tmp_path / "routed", role)
    found = encode.encode(params, config, tokens.rows(TEXTS, role))
    np.testing.assert_allclose(found, oracle(list(TEXTS)), atol=1e-5)
  with pytest.raises(ValueError, match="got a Router: train another start"):
    sentence_encoder.save(
      tmp_path / "out", params, config,
      start=tmp_path / "routed", texts=tokens.texts,
    )  # fmt: skip


def _edit(path, **fields):
  content = json.loads(path.read_text())
  path.write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
  "file, fields, message",
  [
    ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "cls"),
    (
      "config_sentence_transformers.json",
      {"similarity_fn_name": "manhattan"},
      "similarity_fn_name='manhattan'",
    ),
    ("sentence_bert_config.json", {"query_expansion": {"a": 1}}, "expansion"),
    ("sentence_bert_config.json", {"document_length": 9}, "document_length"),
    ("sentence_bert_config.json", {"config_args": {"a": 1}}, "no config_args"),
    (
      "sentence_bert_config.json",
      {"modality_config": {"text": {"method_output_name": "pooler_output"}}},
      "got 'pooler_output'",
    ),
    ("adapter_config.json", {"peft_type": "LORA"}, "merge_and_unload"),
    (
      "config_sentence_transformers.json",
      {"truncate_dim": 8},
      "got truncate_dim=8",
    ),
    ("config.json", {"model_type": "deberta"}, "model_type='deberta'"),
    ("config.json", {"is_decoder": True}, "is_decoder"),
  ],
)
def test_what_is_not_computed_is_refused_by_name(
  tmp_path, file, fields, message
):
  place, _ = _folder(tmp_path, "bert")
  if not (place / file).exists():
    (place / file).write_text("{}")
  _edit(place / file, **fields)
  with pytest.raises(ValueError, match=message):
    text_encoders.load_folder(place)


def test_the_newer_field_of_a_pooling_counts(tmp_path):
  """Flags of older versions may stand beside it."""
  place, _ = _folder(tmp_path, "bert")
  file = place / "1_Pooling" / "config.json"
  _edit(file, pooling_mode="cls", pooling_mode_mean_tokens=True)
  theirs = library.SentenceTransformer(str(place), device="cpu")
  ours = text_encoders.load_folder(place, length=24)
  np.testing.assert_allclose(
    ours.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5
  )


def test_a_length_of_the_folder_replaces_its_tokenizer_s(tmp_path):
  """`model.max_seq_length = 20` leaves the tokenizer's own limit as it was."""
  place, _ = _folder(tmp_path, "bert")
  _edit(place / "sentence_bert_config.json", max_seq_length=20)
  _edit(place / "tokenizer_config.json", model_max_length=9)
  theirs = library.SentenceTransformer(str(place), device="cpu")
  ours = text_encoders.load_folder(place)
  np.testing.assert_allclose(
    ours.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5
  )
  assert sentence_tokens.load(place).length == 20


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_padding_of_a_tokenizer_changes_nothing(tmp_path, kind):
  """tokenizer.json of all-MiniLM-L6-v2 pads each text to 128 tokens."""
  place, theirs = _folder(tmp_path, kind)
  path = str(place / "tokenizer.json")
  inner = tokenizers.Tokenizer.from_file(path)
  inner.enable_padding(length=24, pad_id=0 if kind == "bert" else 1)
  inner.save(path)
  ours = text_encoders.load_folder(place, length=24)
  np.testing.assert_allclose(
    ours.encode(TEXTS), theirs.encode(list(TEXTS)), atol=1e-5
  )


def test_padding_that_each_text_has_is_refused(tmp_path):
  """A multilingual E5 lost its first token: .80 to .99 of its own vectors."""
  place, _ = _folder(tmp_path, "multilingual-e5")
  _edit(place / "tokenizer_config.json", pad_token=None)
  with pytest.raises(ValueError, match="got id 0, which every text has"):
    text_encoders.load_folder(place)
  _edit(place / "config.json", pad_token_id=1)
  text_encoders.load_folder(place)


@pytest.mark.parametrize(
  "kind, name", [("MPNetTokenizer", "do_lower_case"),
                 ("RobertaTokenizer", "add_prefix_space")],
)  # fmt: skip
def test_settings_that_contradict_tokenizer_json_are_refused(
  tmp_path, kind, name
):
  """In transformers tokenizer_config.json decides: "Red" had other tokens."""
  place, _ = _folder(tmp_path, "mpnet")
  path = str(place / "tokenizer.json")
  inner = tokenizers.Tokenizer.from_file(path)
  if kind == "RobertaTokenizer":
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(True)
  inner.save(path)
  file = place / "tokenizer_config.json"
  _edit(file, tokenizer_class=kind, **{name: True})
  assert sentence_tokens.load(place).length == 24
  _edit(file, **{name: False})
  with pytest.raises(ValueError, match=f"expected {name}=True.*{name}=False"):
    sentence_tokens.load(place)
  _edit(file, tokenizer_class="PreTrainedTokenizerFast")
  assert sentence_tokens.load(place).length == 24


def test_a_tokenizer_that_keeps_the_end_of_a_text_is_refused(tmp_path):
  place, _ = _folder(tmp_path, "bert")
  _edit(place / "tokenizer_config.json", truncation_side="left")
  with pytest.raises(ValueError, match="got truncation_side=left: save it"):
    sentence_tokens.load(place)


def test_a_static_tokenizer_that_keeps_the_end_is_refused(tmp_path):
  place, _ = _static(tmp_path)
  path = str(next(place.rglob("tokenizer.json")))
  inner = tokenizers.Tokenizer.from_file(path)
  inner.enable_truncation(7, direction="left")
  inner.save(path)
  with pytest.raises(ValueError, match="got truncation_side=left: save it"):
    sentence_tokens.load(place)


def test_a_router_of_several_models_is_refused(tmp_path):
  """Queries of one model would get the tokens of the other."""
  place, _ = _folder(tmp_path, "bert")
  static, _ = _static(tmp_path)
  base = library.SentenceTransformer(str(place), device="cpu")
  small = library.SentenceTransformer(str(static), device="cpu")
  router = models.Router.for_query_document([small[0]], [base[0], base[1]])
  library.SentenceTransformer(
    modules=[router, models.Normalize()], device="cpu"
  ).save(str(tmp_path / "routed"))
  with pytest.raises(ValueError, match="one model that reads all texts, got a"):
    sentence_tokens.load(tmp_path / "routed")


def test_advice_on_weights_keeps_the_pooling(tmp_path):
  """What transformers saves has no modules: a cls model was read as a mean."""
  place, _ = _folder(tmp_path, "bert", "cls")
  path = place / "model.safetensors"
  torch.save({}, path.with_name("pytorch_model.bin"))
  path.unlink()
  with pytest.raises(ValueError, match=r"SentenceTransformer\(A\)\.save_pretr"):
    sentence_encoder.load(place)


def test_a_layer_without_safetensors_is_named(tmp_path):
  """LaBSE and sentence-t5 had such layers for years."""
  place, _ = _folder(tmp_path, "bert", dense=[(True, torch.nn.Tanh(), 12)])
  path = place / "2_Dense" / "model.safetensors"
  path.rename(path.with_name("pytorch_model.bin"))
  with pytest.raises(
    ValueError, match="2_Dense/.*got pytorch_model.bin, which"
  ):
    sentence_encoder.load(place)
  path.with_name("pytorch_model.bin").unlink()
  with pytest.raises(ValueError, match="2_Dense/model.safetensors, got none"):
    sentence_encoder.load(place)


@pytest.mark.parametrize(
  "number, kind, name",
  [
    (2, "sentence_transformers.models.LSTM", "LSTM"),
    (0, "custom_st.Transformer", "custom_st.Transformer"),
  ],
)
def test_a_module_that_nobody_reads_is_refused(tmp_path, number, kind, name):
  """Code of a model's own was read as the library's class of the same name."""
  place, _ = _folder(tmp_path, "bert")
  listed = json.loads((place / "modules.json").read_text())
  listed[number]["type"] = kind
  (place / "modules.json").write_text(json.dumps(listed))
  with pytest.raises(ValueError, match=f"got another module '{name}'"):
    sentence_encoder.load(place)


def test_vectors_whose_lengths_count_are_refused(tmp_path):
  place, _ = _folder(tmp_path, "bert")
  listed = json.loads((place / "modules.json").read_text())
  (place / "modules.json").write_text(json.dumps(listed[:-1]))
  _edit(place / "config_sentence_transformers.json", similarity_fn_name="dot")
  with pytest.raises(ValueError, match="'dot' of vectors of any length"):
    sentence_encoder.load(place)


def test_rows_on_disk_are_tokenized_where_they_are_read(tmp_path):
  from synthq_jax.data import files

  place, _ = _folder(tmp_path, "roberta")
  path = tmp_path / "texts.txt"
  path.write_text("".join(f"{text}\n" for text in TEXTS))
  lines = files.Lines(path, lambda line: line.decode().strip())
  tokens = sentence_tokens.load(place)
  rows = sentence_tokens.TextRows(lines, tokens, sentence_folders.DOCUMENT)
  assert len(rows) == 4
  whole = tokens.rows(TEXTS, sentence_folders.DOCUMENT)
  np.testing.assert_array_equal(rows[:], whole)
  chosen = rows[np.array([3, 0])]
  np.testing.assert_array_equal(chosen, whole[[3, 0], : chosen.shape[1]])
  assert (whole[:, 0] == 1).all()  # <s>, whose 0 is padding's in arrays


def test_a_row_does_not_know_the_others(tmp_path):
  """Its width would tell how long the longest private query is."""
  place, _ = _folder(tmp_path, "bert")
  tokens = sentence_tokens.load(place, query_length=9)
  whole = tokens.rows(TEXTS, sentence_folders.QUERY)
  assert whole.shape == (4, 9)
  for text, row in zip(TEXTS, whole, strict=True):
    [alone] = tokens.rows([text], sentence_folders.QUERY)
    np.testing.assert_array_equal(alone, row)
