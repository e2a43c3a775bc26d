"""Starts whose special ids are not T5's, from the first file to the export."""

import dataclasses
import functools
import json

import jax
import made_up
import numpy as np
import pytest
import random_t5
import small_data
import small_vocabularies
import tiny_runs

from synthq_jax.cli import main
from synthq_jax.data import tokenizer_json, vocabulary
from synthq_jax.generation import decoding
from synthq_jax.models import t5_checkpoints, token_ids
from synthq_jax.runtime import prepared_files, queries, results
from synthq_jax.stages import finetune_dp, plan
from synthq_jax.storage import artifacts
from synthq_jax.tools import cards, export

RUT5 = token_ids.TokenIds(eos=2, unk=3)
TEXTS = [
  "the array holds numbers",
  "  white \t space \n",
  "it ends</s> here </s> and <pad> there <s> <unk>",
  "\N{SNOWMAN} of the north",
  "",
]


def write_start(folder, ids=small_vocabularies.RUT5, eos=2, **options):
  """Writes a Hugging Face folder with its vocabulary."""
  config = random_t5.config(
    vocab_size=160, token_ids=token_ids.TokenIds(eos=eos)
  )
  t5_checkpoints.save_huggingface(folder, random_t5.params(config), config)
  small_vocabularies.write(folder / "spiece.model", ids, **options)
  return str(folder)


def settings(tmp_path, start):
  source = small_data.write_pairs(tmp_path / "log.jsonl", 64)
  config = tiny_runs.config(source, checkpoint=start)
  prepare = dataclasses.replace(config.prepare_data, extra_ids=4)
  return dataclasses.replace(config, prepare_data=prepare)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A run from a start with ruT5's ids, up to its queries."""
  folder = tmp_path_factory.mktemp("rut5")
  config = settings(folder, write_start(folder / "start"))
  config = dataclasses.replace(config, rows=plan.Rows(synthetic=(8.0,)))
  plan.run(config, folder / "run", stages=["generate"])
  return folder / "run"


def test_a_run_reads_and_writes_with_the_ids_of_its_start(made):
  prepared = artifacts.load(made / "private/prepare_data", results.PreparedData)
  assert prepared.token_ids == RUT5
  train = np.load(made / "private/prepare_data/train.npz")["tokens"]
  lasts = np.count_nonzero(train, axis=1) - 1
  assert (train[np.arange(len(train)), lasts] == 2).all()
  assert (train != 1).all()
  own = made / "finetune_dp/eps8"
  assert t5_checkpoints.load_config(own).token_ids == RUT5


@pytest.mark.parametrize("source", ["finetune_dp/eps8"])
def test_an_export_says_the_ids_and_ends_texts_with_them(
  made, source, tmp_path
):
  export.run(made / source, tmp_path / "to", format="huggingface")
  for name in ("config.json", "generation_config.json"):
    fields = json.loads((tmp_path / "to" / name).read_text())
    assert (fields["eos_token_id"], fields["pad_token_id"]) == (2, 0)
  assert fields["suppress_tokens"][0] == 3
  words = vocabulary.load(made / "prepare_data/vocabulary.model")
  assert t5_checkpoints.load(tmp_path / "to")[1].token_ids.eos == 2
  tokenizers = pytest.importorskip("tokenizers")
  reader = tokenizers.Tokenizer.from_file(str(tmp_path / "to/tokenizer.json"))
  for text in TEXTS:
    assert reader.encode(text).ids == [*words.encode(text), 2], text


def test_transformers_reads_the_ids_of_an_export(made, tmp_path):
  transformers = pytest.importorskip("transformers")
  export.run(made / "finetune_dp/eps8", tmp_path / "to", format="huggingface")
  reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
  assert (reader.pad_token_id, reader.eos_token_id, reader.unk_token_id) == (
    0, 2, 3,
  )  # fmt: skip


def test_transformers_writes_from_an_export_as_the_run_does(made, tmp_path):
  """With its settings and lengths, and never padding within a query."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  to = tmp_path / "to"
  export.run(made / "finetune_dp/eps8", to, format="huggingface")
  model = transformers.AutoModelForSeq2SeqLM.from_pretrained(to).eval()
  settings = model.generation_config
  run = artifacts.load(made / "generate/eps8", results.SyntheticQueries)
  assert settings.do_sample and settings.top_k == 0
  assert settings.top_p == run.decoding["p"]
  assert settings.temperature == run.decoding["temperature"]
  assert settings.max_new_tokens == run.decoding["max_length"]
  prepared = artifacts.load(made / "private/prepare_data", results.PreparedData)
  words = vocabulary.load(made / "prepare_data/vocabulary.model", extra_ids=4)
  documents = [
    f"the array of {i} numbers returned, {'x' * i}" for i in range(9)
  ]
  reader = transformers.AutoTokenizer.from_pretrained(to)
  texts = [run.prefix + text for text in documents]
  read = reader(texts, truncation=True, padding=True, return_tensors="pt")
  rows = vocabulary.tokenize(words, documents, length=prepared.document_length)
  rows = prepared_files.add_prefix(rows, words, run.prefix)
  width = read.input_ids.shape[1]
  np.testing.assert_array_equal(rows[:, :width], read.input_ids.numpy())
  assert not rows[:, width:].any()
  params, config = t5_checkpoints.load(to)
  params["token_embedder"]["embedding"][decoding.PAD] *= 50  # logits are tied
  model.shared.weight.data[decoding.PAD] *= 50
  with torch.no_grad():
    greedy = functools.partial(model.generate, **read, do_sample=False)
    theirs, padded = (
      greedy(),
      greedy(suppress_tokens=settings.suppress_tokens[:-1]),
    )
    theirs, padded = theirs.numpy()[:, 1:], padded.numpy()[:, 1:]
  assert not padded.all() and theirs.any(axis=1).all()
  ours = decoding.generate(
    params,
    config,
    rows,
    ids=documents,
    key=jax.random.key(0),
    sampler=decoding.Greedy(),
    max_length=settings.max_new_tokens,
    forbidden=queries.get_forbidden_ids(words, config.vocab_size),
  )[:, 0]
  np.testing.assert_array_equal(ours[:, : theirs.shape[1]], theirs)
  assert not np.array_equal(padded, theirs)


def test_the_card_of_a_generator_begins_inputs_with_its_prefix():
  """Its code is what people copy."""
  card = cards.render_transformers(made_up.checkpoint(), "ask: ")
  code = card.partition("```python\n")[2].partition("```")[0]
  assert "text = 'ask: ' + " in code
  compile(code, "card", "exec")


def test_a_generator_keeps_the_prefix_that_it_was_trained_with(made):
  """Also where it has written nothing yet."""
  own = artifacts.load(made / "finetune_dp/eps8", results.Checkpoint)
  assert own.prefix == "generate_query: "
  with pytest.raises(ValueError, match="is trained to read.*: set PREFIX"):
    plan.RunConfig(finetune_dp=finetune_dp.Config(prefix="ask: "))


def test_a_prefix_is_not_put_before_documents_that_have_it(tmp_path):
  """The inputs of T5X's tasks begin with it, and retrievers would read it."""
  lines = [
    {
      "query": f"number {i}",
      "document": f"generate_query: a list of {i} and {i}",
    }
    for i in range(64)
  ]
  (tmp_path / "prefixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
  config = settings(tmp_path, write_start(tmp_path / "start"))
  prepare = dataclasses.replace(
    config.prepare_data, source=f"jsonl:{tmp_path / 'prefixed.jsonl'}"
  )
  config = dataclasses.replace(config, prepare_data=prepare)
  with pytest.raises(ValueError, match="got documents that begin with it"):
    plan.run(config, tmp_path / "run", stages=["finetune_dp"])


def refuse(tmp_path, start, flags, capsys):
  """Runs from a checkpoint that is refused; returns the one line that says so."""
  source = small_data.write_pairs(tmp_path / "log.jsonl", 64)
  argv = ["run", "--gin_file=demo_tiny.gin", "--quiet", *flags]
  argv += [f"--workdir={tmp_path / 'run'}", f"--gin.CHECKPOINT={start}"]
  argv += [f"--gin.SOURCE={source}", "--gin.NUM_DOCUMENTS=None"]
  assert main.main(argv) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert not (tmp_path / "run").exists()
  return line


@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_a_vocabulary_that_does_not_fit_is_refused_before_any_work(
  tmp_path, capsys, flags
):
  start = write_start(tmp_path / "start", eos=1)
  line = refuse(tmp_path, start, flags, capsys)
  assert "id 2, got eos_token_id=1" in line
  start = write_start(tmp_path / "other", small_vocabularies.DEFAULT)
  line = refuse(tmp_path, start, flags, capsys)
  assert "padding (<pad>) as id 0, got '<unk>' there" in line


def test_what_no_export_will_take_is_said_before_training(tmp_path, capsys):
  """In the words of the export."""
  start = write_start(
    tmp_path / "start", eos=2, user_defined_symbols=["[NAME]"]
  )
  config = settings(tmp_path, start)
  with pytest.raises(ValueError) as refused:
    tokenizer_json.check(tmp_path / "start/spiece.model")
  words = f"--format=huggingface and sentence-transformers would be refused: {refused.value}"
  [note] = plan.list_notes(config, ["finetune_dp"])
  assert note.endswith(words)
  assert not plan.list_notes(config, ["prepare_data"])
  plan.run(config, tmp_path / "run", stages=["finetune_dp"])
  said = capsys.readouterr().out
  assert said.index(words) < said.index("[prepare_data] running")
  with pytest.raises(ValueError, match="no user-defined pieces"):
    export.run(
      tmp_path / "run/finetune_dp/eps8", tmp_path / "to", format="huggingface"
    )
  assert not plan.list_notes(
    settings(tmp_path, write_start(tmp_path / "fine")), ["finetune_dp"]
  )


def test_a_dry_run_says_what_no_export_will_take(tmp_path, capsys):
  start = write_start(
    tmp_path / "start", eos=2, user_defined_symbols=["[NAME]"]
  )
  source = small_data.write_pairs(tmp_path / "log.jsonl", 64)
  argv = ["run", "--gin_file=demo_tiny.gin", "--dry_run"]
  argv += [f"--workdir={tmp_path / 'run'}", f"--gin.CHECKPOINT={start}"]
  argv += [f"--gin.SOURCE={source}", "--gin.NUM_DOCUMENTS=None"]
  argv += ["--gin.BATCH_SIZE=8", "--gin.DIRECT_BATCH_SIZE=8"]
  assert main.main(argv) == 0
  assert "no user-defined pieces" in capsys.readouterr().out


def test_sentinels_of_mt5_are_read_as_sentencepiece_reads_them(tmp_path):
  """They are pieces of its model, and no query may hold one."""
  tokenizers = pytest.importorskip("tokenizers")
  names = [f"\u2581<extra_id_{i}>" for i in reversed(range(5))]
  path = small_vocabularies.write(
    tmp_path / "v.model", small_vocabularies.T5, user_defined_symbols=names
  )
  words = vocabulary.load(path)
  tokenizer_json.write(tmp_path, path, rows=100, max_length=64)
  reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  for text in [*TEXTS, "<extra_id_0>", "the <extra_id_3> of<extra_id_4> it"]:
    assert reader.encode(text).ids == [*words.encode(text), 1], text
  size = words.vocab_size
  unwritten = tokenizer_json.not_text(path, 100)
  assert sorted(unwritten) == sorted([2, *words.sentinels, *range(size, 100)])
  assert len(words.sentinels) == 5


def test_a_vocabulary_of_more_pieces_than_rows_is_not_exported(tmp_path):
  path = small_vocabularies.write(tmp_path / "v.model", small_vocabularies.T5)
  with pytest.raises(ValueError, match="at most 10 pieces, .* got "):
    tokenizer_json.write(tmp_path, path, rows=10, max_length=64)


def write_tokenizer(start, change):
  """Writes a tokenizer.json of the start's pieces, as transformers does."""
  pieces = vocabulary.load(f"{start}/spiece.model").tokenizer
  names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
  names += [f"<extra_id_{i}>" for i in reversed(range(4))]
  added = [{"id": i, "content": names[i]} for i in (0, 1, 2)]
  change(names, added)
  model = {"type": "Unigram", "vocab": [[name, 0.0] for name in names]}
  content = json.dumps({"model": model, "added_tokens": added})
  with open(f"{start}/tokenizer.json", "w") as file:
    file.write(content)


def test_a_tokenizer_that_was_trained_anew_is_not_read_by_the_old_model(
  tmp_path,
):
  """transformers copies the old spiece.model beside the new tokenizer.json."""

  def swap(names, added):
    del added
    names[10], names[11] = names[11], names[10]

  start = write_start(tmp_path / "start")
  write_tokenizer(start, lambda names, added: None)
  config = settings(tmp_path, start)
  assert not plan.list_notes(config, ["finetune_dp"])
  write_tokenizer(start, swap)
  with pytest.raises(
    ValueError, match="tokenizer.json: expected the pieces of"
  ):
    plan.list_notes(config, ["finetune_dp"])


def test_no_t5_is_trained_with_a_vocabulary_that_its_tokenizer_contradicts(
  tmp_path,
):
  """A folder of transformers 5 has no spiece.model, and VOCABULARY='train'
  would give it other pieces."""
  start = write_start(tmp_path / "start")
  write_tokenizer(start, lambda names, added: None)
  (tmp_path / "start/spiece.model").unlink()
  config = settings(tmp_path, start)
  with pytest.raises(ValueError, match="copy spiece.model from the model"):
    plan.list_notes(config, ["finetune_dp"])
  prepare = dataclasses.replace(
    config.prepare_data, vocabulary="train", vocab_size=60
  )
  config = dataclasses.replace(config, prepare_data=prepare)
  with pytest.raises(
    ValueError, match="tokenizer.json: expected the pieces of"
  ):
    plan.run(config, tmp_path / "run", stages=["finetune_dp"])


@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json"])
def test_tokens_that_were_added_to_a_tokenizer_are_told(tmp_path, file):
  """As highlights of question generators are: the vocabulary has no such piece."""
  start = write_start(tmp_path / "start")
  if file == "tokenizer.json":
    token = {"id": 150, "content": "<hl>"}
    write_tokenizer(start, lambda names, added: added.append(token))
  else:
    with open(f"{start}/{file}", "w") as stream:
      json.dump({"<hl>": 150, "<extra_id_0>": 149}, stream)
  [note] = plan.list_notes(settings(tmp_path, start), ["finetune_dp"])
  assert "read as text: <hl>; use none of them in a prefix" in note
