"""Exports a model, queries or weights in a format that other programs read.

An export has its claim (PRIVACY.txt) and a card that says what is protected and
what is not. The command that would publish it is printed, and never run here.
Results of private queries without differential privacy lie under `private/`;
`run` refuses to export them unless it is told to.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

import synthq_jax
from synthq_jax.data import (
  beir,
  query_sets,
  shipped,
  tokenizer_json,
  word_patterns,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.generation import decoding
from synthq_jax.models import (
  dual_encoder,
  sentence_encoder,
  static_vectors,
  t5_checkpoints,
)
from synthq_jax.models.checkpoints import sentence_folders, t5x, tensors
from synthq_jax.privacy import rounding, wording
from synthq_jax.retrieval import ranking
from synthq_jax.runtime import model_files, results, system_results
from synthq_jax.storage import array_files, artifacts, object_store, stores
from synthq_jax.tools import cards, export_source

__all__ = ["CLAIM", "FORMATS", "Format", "local", "run"]

CLAIM = t5_checkpoints.CLAIM
"""File of the exported folder with its privacy claim in words."""

_README = "README.md"
_LENGTH = 512
"""Length of a text in tokens, if no run around the checkpoint sets it."""
_RANKER = pathlib.Path(synthq_jax.__file__).parent / "assets" / "ranker.py"
"""The program that applies exported weights."""
_UNREAD = re.compile(r"(private/)?encode_documents/.*\.npy|.*\.trec")
"""Files of a run that no export reads: document vectors and rankings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """A format of exported results."""

  result_type: type
  """Class of the results that can have this format."""
  write: Callable[[export_source.Source, pathlib.Path], object]
  """Writes the format's files into a new folder; `run` adds PRIVACY.txt."""
  hub: str = ""
  """Type of a repository on Hugging Face's hub; "": no command is printed."""
  is_dated: bool = False
  """True if the files go into a subfolder named after a step, as T5X's do."""
  takes_adapters: bool = False
  """True if an adapter can have this format."""

  def takes(self, kind: type) -> bool:
    """Tests whether results of a class can have this format."""
    if kind is system_results.Adapter:
      return self.takes_adapters
    return kind is self.result_type


def local(location: str) -> str:
  """Downloads a result from a store with its run; returns a path unchanged.

  An export reads parts of the run around the result: the vocabulary, the lengths,
  and whether the documents themselves disclose queries.

  Args:
    location: a path or a URL of a result that `run` can export.

  Raises:
    OSError: if a store cannot be reached, or nothing lies there.
  """
  if not object_store.is_url(location):
    return location
  url = object_store.Store(location).url  # refuses a malformed URL
  try:
    record = artifacts.read_json(stores.local(f"{url}/{artifacts.RESULT_NAME}"))
  except FileNotFoundError:  # no run made it
    return str(shipped.checkpoint(url))
  path_in_run = f"/{record['result'].get('directory')}"
  if not url.endswith(path_in_run):
    return stores.local(location)
  return (
    stores.local(url.removesuffix(path_in_run), without=_UNREAD) + path_in_run
  )


def run(
  source: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  step: int | None = None,
  allow_private: bool = False,
) -> str:
  """Exports a result with its privacy claim, and its card where there is one.

  Formal guarantee: post-processing. The export is as private as the result, for
  the same unit and relation. It depends on the result's own folder, on the
  documents, which are treated as public, and on settings; no private record is
  read. If the documents themselves disclose queries (`sources.Kind`), the printed
  summary says so.

  Args:
    source: a checkpoint's folder in any format that `t5_checkpoints.load` reads,
      or a folder of a run with synthetic queries or learned weights.
    to: the new folder, which must be missing or empty. For T5X: its parent.
    format: one of `FORMATS`.
    step: step of an exported T5X checkpoint. None: the step of the source if that
      is a T5X checkpoint, else 0.
    allow_private: whether to export results that must not be shared.

  Returns:
    The path, the claim, and the command that would publish the export.

  Raises:
    ValueError: if the result must not be shared and `allow_private` is False, if
      its class has no such format, or if it cannot be read.
  """
  if format not in FORMATS:
    raise ValueError(
      f"--format must be one of {', '.join(FORMATS)}, got format={format}"
    )
  if step is not None and not FORMATS[format].is_dated:
    dated = " or ".join(k for k, form in FORMATS.items() if form.is_dated)
    raise ValueError(
      f"--step goes with --format={dated}, got --format={format}: leave it out"
    )
  if step is None:
    step = t5x.step(pathlib.Path(source))
  if step < 0:
    raise ValueError(f"step must be at least 0, got step={step}")
  chosen, loaded = FORMATS[format], export_source.read(pathlib.Path(source))
  if loaded.is_private and not allow_private:
    raise ValueError(
      f"{source}: expected a result that may be shared, got one under"
      f" {results.PRIVATE}/, made of private queries without differential"
      " privacy or only to be compared (plan.Rows.compared): --allow_private"
      " exports it all the same"
    )
  kind = results.Checkpoint if loaded.result is None else type(loaded.result)
  if not chosen.takes(kind):
    fitting = ", ".join(k for k, form in FORMATS.items() if form.takes(kind))
    got = kind.__name__ if loaded.result else "a folder that no run made"
    raise ValueError(
      f"{source}: expected {chosen.result_type.__name__} for --format={format}, got"
      f" {got}: give a result of a run, or one of {fitting}"
    )
  target = pathlib.Path(to) / (f"checkpoint_{step}" if chosen.is_dated else "")
  export_source.check_target(target)
  with artifacts.new_folder(target, "export") as folder:
    if loaded.is_private:
      folder.chmod(0o700)
    chosen.write(loaded, folder)
    if loaded.claim is not None:
      t5_checkpoints.save_claim(folder, loaded.claim)
  return _summarize(target, loaded, chosen)


def _summarize(
  folder: pathlib.Path, source: export_source.Source, chosen: Format
) -> str:
  """Returns the lines for the screen: path, claim and command to publish."""
  lines = [f"written: {folder}"]
  if chosen.result_type is results.Checkpoint and source.vocabulary is None:
    lines.append("no vocabulary lies beside the checkpoint: add its own")
  if source.is_private:
    lines.append("PRIVATE: no claim of its run counts it; do not share it")
    return "\n".join(lines)
  claim = source.claim
  if claim is None:
    lines.append("nothing is known here about the privacy of its training")
  else:
    lines.append(
      f"epsilon = {rounding.epsilon(claim.epsilon)},"
      f" delta = {rounding.delta(claim.delta)} for one {claim.unit}: see {CLAIM}"
    )
    if claim.secret_is_fixed:
      lines.append(f"WARNING: nothing is protected: {wording.FIXED_SECRET}")
    if source.prepared is not None:
      names = source.prepared.not_protected
      told = [wording.write(sentence, claim.unit) for sentence in names]
      lines += [f"not protected: {sentence}" for sentence in told]
  if chosen.hub:
    lines.append(
      f"to publish it: hf upload YOUR_NAME/{shlex.quote(folder.name)}"
      f" {shlex.quote(f'{folder}')} --repo-type={chosen.hub}"
    )
  return "\n".join(lines)


def _convert(
  source: export_source.Source, folder: pathlib.Path, name: str
) -> None:
  """Converts a T5 checkpoint, with the special ids of its vocabulary."""
  converted = t5_checkpoints.convert(
    source.folder, folder / "converted", format=name, token_ids=source.token_ids
  )
  _move_up(converted, folder)


def _write_t5(
  source: export_source.Source, folder: pathlib.Path, name: str
) -> None:
  """Converts a T5 checkpoint and copies its vocabulary next to it."""
  _convert(source, folder, name)
  if source.vocabulary is not None:
    content = source.vocabulary.read_bytes()
    (folder / model_files.VOCABULARY_NAME).write_bytes(content)


def _write_huggingface(
  source: export_source.Source, folder: pathlib.Path
) -> None:
  """Writes a folder that transformers loads, with tokenizer and card."""
  _convert(source, folder, "huggingface")
  _write_tokenizer(source, folder, t5_checkpoints.load_config(folder))
  generation = folder / "generation_config.json"
  if source.vocabulary is not None and generation.is_file():
    fields = json.loads(generation.read_text())
    rows = t5_checkpoints.load_config(folder).vocab_size
    unwritten = tokenizer_json.not_text(source.vocabulary, rows)
    fields["suppress_tokens"] = [*unwritten, decoding.PAD]
    _write_json(generation, fields | _describe_decoding(source))
  checkpoint = _get_checkpoint(source)
  if checkpoint is not None:
    text = cards.render_transformers(checkpoint, _find_prefix(source))
    (folder / _README).write_text(text, encoding="utf-8")


def _describe_decoding(source: export_source.Source) -> dict[str, Any]:
  """Returns the fields with which transformers samples as the run does."""
  written = _find_written(source)
  if written is None or not written.decoding:  # of a version that kept none
    length = source.prepared and source.prepared.query_length
    return {"max_new_tokens": length} if length else {}
  settings = written.decoding
  return {
    "do_sample": True,
    "top_k": 0,
    "top_p": settings["p"],
    "temperature": settings["temperature"],
    "max_new_tokens": int(settings["max_length"]),  # transformers' own is 20
  }


def _get_checkpoint(source: export_source.Source) -> results.Checkpoint | None:
  """Returns a checkpoint's record, or None if no run wrote the folder."""
  assert source.result is None or isinstance(source.result, results.Checkpoint)
  return source.result


def _find_prefix(source: export_source.Source) -> str:
  """Finds the text before each document in a generator's input, or ""."""
  checkpoint, written = _get_checkpoint(source), _find_written(source)
  if checkpoint is not None and checkpoint.prefix:
    return checkpoint.prefix
  return "" if written is None else written.prefix


def _find_written(
  source: export_source.Source,
) -> results.SyntheticQueries | None:
  """Finds the queries that a generator wrote in its run."""
  checkpoint = _get_checkpoint(source)
  if checkpoint is None or checkpoint.kind != "generator":
    return None
  roots = [source.root, source.root / results.PRIVATE] if source.root else []
  for root in roots:
    folder = root / "generate" / checkpoint.name
    if artifacts.read_fingerprint(folder) is not None:
      return artifacts.load(folder, results.SyntheticQueries)
  return None


def _write_sentence_transformers(
  source: export_source.Source, folder: pathlib.Path
) -> None:
  """Writes a dual encoder with its pooling, projection and lengths."""
  checkpoint = _get_checkpoint(source)
  if checkpoint is not None and checkpoint.kind != "retriever":
    got = f"{source.folder}: expected a retriever, got a {checkpoint.kind}"
    raise ValueError(f"{got}: export it with --format=huggingface")
  if isinstance(checkpoint, system_results.Adapter):
    _write_adapted(source, checkpoint, folder)
    return
  if sentence_encoder.is_folder(source.folder):
    _copy_sentence_folder(source, folder)
    return
  if source.vocabulary is None:
    expected = (
      f"{source.folder}: expected the vocabulary of the checkpoint beside it"
    )
    raise ValueError(
      f"{expected}, got none: put it there as {model_files.VOCABULARY_NAME}"
    )
  if source.result is not None:
    _require_prepared(source)  # it has the lengths of its texts
  params, shape = t5_checkpoints.load(
    source.folder, dtype=None, token_ids=source.token_ids
  )
  lengths = {"max_seq_length": _get_length(source)}
  if source.prepared and source.prepared.query_length != _get_length(source):
    lengths["query_length"] = source.prepared.query_length
  is_static = isinstance(shape, static_vectors.StaticConfig)
  write = _write_static if is_static else _write_encoder
  parts = write(source, folder, params, shape, lengths)
  modules = []
  for number, (name, config) in enumerate((parts | {"Normalize": {}}).items()):
    path = f"{number}_{name}" if number else ""
    kind = f"sentence_transformers.models.{name}"
    modules.append(
      {"idx": number, "name": str(number), "path": path, "type": kind}
    )
    (folder / path).mkdir(exist_ok=True)
    file = "config.json" if number else "sentence_bert_config.json"
    if config is not None:
      _write_json(folder / path / file, config)
  _write_json(folder / "modules.json", modules)
  settings = {"prompts": {}, "similarity_fn_name": "dot"}
  _write_json(folder / "config_sentence_transformers.json", settings)
  stride = source.prepared.passage_stride if source.prepared else 0
  text = cards.render_retriever(
    checkpoint, lengths, stride=stride, kind="static" if is_static else "t5"
  )
  (folder / _README).write_text(text, encoding="utf-8")


def _copy_sentence_folder(
  source: export_source.Source, folder: pathlib.Path
) -> None:
  """Copies a retriever that sentence-transformers can load as it is."""
  sentence_encoder.copy_files(source.folder, folder)
  sentence_encoder.add_normalize(folder)
  for module in json.loads((folder / sentence_folders.MODULES).read_text()):
    (folder / module["path"]).mkdir(exist_ok=True)
  is_static = sentence_folders.modules(folder).is_static
  kind = "static" if is_static else "folder"
  texts = sentence_folders.text_settings(folder)
  lengths = {"max_seq_length": texts.max_length or _LENGTH}
  if texts.query_length:
    lengths["query_length"] = texts.query_length
  text = cards.render_retriever(_get_checkpoint(source), lengths, kind=kind)
  (folder / _README).write_text(text, encoding="utf-8")


def _write_adapted(
  source: export_source.Source,
  adapter: system_results.Adapter,
  folder: pathlib.Path,
) -> None:
  """Writes an adapter's base encoder, and its query map as the last module."""
  assert source.root is not None  # the base encoder lies in the same run
  base = adapter.find_base(source.root)
  _write_sentence_transformers(export_source.read(base), folder)
  sentence_encoder.add_query_map(folder, _read_matrix(source))
  text = cards.render_adapter(adapter, sentence_folders.text_settings(folder))
  (folder / _README).write_text(text, encoding="utf-8")


def _read_matrix(source: export_source.Source) -> np.ndarray:
  """Reads the map of an adapter, [dim, dim]."""
  return array_files.read(source.folder / system_results.Adapter.FILE)


def _write_map(source: export_source.Source, folder: pathlib.Path) -> None:
  """Writes an adapter's map without its encoder, for vectors of other programs."""
  adapter = source.result
  assert isinstance(adapter, system_results.Adapter)
  tensors.write_safetensors(
    folder / "map.safetensors", tensors.of_tree({"query": _read_matrix(source)})
  )
  assert source.root is not None  # the base encoder lies in the same run
  texts = sentence_folders.text_settings(adapter.find_base(source.root))
  text = cards.render_map(adapter, texts)
  (folder / _README).write_text(text, encoding="utf-8")


def _write_encoder(source, folder, params, shape, lengths) -> dict[str, Any]:
  """Writes a T5's encoder; returns the settings of each module by class name."""
  params = dict(dual_encoder.encoder_params(params))
  projection = params.pop(dual_encoder.PROJECTION, None)
  t5_checkpoints.save_huggingface(folder / "encoder", params, shape)
  _move_up(folder / "encoder", folder)
  _write_tokenizer(source, folder, shape)
  width = shape.emb_dim
  pooling = {"word_embedding_dimension": width}
  pooling |= {"pooling_mode_mean_tokens": True}
  parts: dict[str, Any] = {"Transformer": lengths, "Pooling": pooling}
  if projection is not None:
    parts["Dense"] = None  # `write_dense` writes its settings, too
    sentence_encoder.write_dense(folder / "2_Dense", projection["kernel"])
  return parts


def _write_static(source, folder, params, shape, lengths) -> dict[str, Any]:
  """Writes a table of token vectors, projected if the encoder has a projection.

  Returns:
    The settings of each module by class name.
  """
  table = params["token_embedder"]["embedding"]
  # The projection of a mean is the mean of the projections.
  if dual_encoder.PROJECTION in params:
    table = table @ params[dual_encoder.PROJECTION]["kernel"]
  tree = {"embedding.weight": np.ascontiguousarray(table)}
  file = folder / "model.safetensors"
  tensors.write_safetensors(file, tensors.of_tree(tree))
  # StaticEmbedding adds no EOS and cuts no text.
  cut_at = lengths["max_seq_length"] - 1
  _write_tokenizer(source, folder, shape, cut_at=cut_at)
  return {"StaticEmbedding": None}


def _require_prepared(source: export_source.Source) -> results.PreparedData:
  """Returns the prepared data of the run; refuses a result without its run."""
  if source.prepared is None:
    raise ValueError(
      f"{source.folder}: expected the run around it, whose"
      f" {results.PRIVATE}/prepare_data says at which length it was trained, got"
      " none: export it there"
    )
  return source.prepared


def _get_length(source: export_source.Source) -> int:
  if source.prepared is None:
    return _LENGTH
  if getattr(source.result, "kind", "") == "generator":
    head = _read_head(source)  # stands before the tokens of a document
    return source.prepared.document_length + len(head)
  return source.prepared.read_length


def _read_head(source: export_source.Source) -> list[int]:
  """Returns the ids of the text before each document."""
  assert source.vocabulary is not None  # prepared data has one
  pieces = vocabulary_lib.load(source.vocabulary)
  return pieces.encode(_find_prefix(source))


def _write_tokenizer(
  source: export_source.Source,
  folder: pathlib.Path,
  shape: Any,
  cut_at: int | None = None,
) -> None:
  """Writes the SentencePiece model and the tokenizer files of transformers."""
  if source.vocabulary is not None:
    tokenizer_json.write(
      folder,
      source.vocabulary,
      rows=shape.vocab_size,
      max_length=_get_length(source),
      cut_at=cut_at,
    )


def _move_up(written: pathlib.Path, folder: pathlib.Path) -> None:
  """Moves files from a subfolder up into the export's folder."""
  for path in written.iterdir():
    path.rename(folder / path.name)
  while written != folder:
    written.rmdir()
    written = written.parent


def _write_json(path: pathlib.Path, content: object) -> None:
  path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# Queries.


def _make_queries_format(layout: query_sets.Layout) -> Format:
  """Returns the export format of synthetic queries and their documents."""

  def write(source: export_source.Source, folder: pathlib.Path) -> None:
    queries, root = source.result, source.root
    # `export_source.read` refuses queries outside their run.
    assert isinstance(queries, results.SyntheticQueries) and root is not None
    claim = queries.statement
    data = beir.read_written(
      source.folder / "queries.jsonl",
      root / "prepare_data" / "corpus.jsonl",
    )
    origin = {
      "generator": queries.name,
      "epsilon": claim.epsilon,  # inf if nothing is claimed
      "delta": claim.delta,
    }
    layout.write(folder, data, origin)
    text = cards.render_queries(queries, data, layout)
    (folder / _README).write_text(text, encoding="utf-8")

  return Format(
    result_type=results.SyntheticQueries, write=write, hub="dataset"
  )


def _write_ranker(source: export_source.Source, folder: pathlib.Path) -> None:
  """Writes weights with their retriever and the program that applies them."""
  weights, prepared = source.result, _require_prepared(source)
  assert isinstance(weights, system_results.Ranking)
  if prepared.passage_stride:
    raise ValueError(
      f"{source.folder}: expected weights of whole documents, got those of"
      f" passages, which {_RANKER.name} does not divide: run with"
      " --gin.PASSAGE_STRIDE=0, or search with `synthq search`"
    )
  retriever = folder / "retriever"
  retriever.mkdir()
  trained = _read_retriever(source, weights)
  _write_sentence_transformers(trained, retriever)
  if trained.claim is not None:  # for those who take the retriever alone
    t5_checkpoints.save_claim(retriever, trained.claim)
  (folder / _RANKER.name).write_bytes(_RANKER.read_bytes())
  settings = {
    "features": ranking.described(weights.weights),
    "word": word_patterns.WORD,
    "joiners": word_patterns.JOINERS,
    "depth": weights.depth,
    "query_length": sentence_folders.text_settings(retriever).query_length
    or prepared.query_length - 1,  # without EOS
  }
  _write_json(folder / "ranking.json", settings)
  (folder / _README).write_text(cards.render_ranking(weights), encoding="utf-8")


def _read_retriever(
  source: export_source.Source, weights: system_results.Ranking
) -> export_source.Source:
  """Reads the retriever whose scores the weights combine with BM25's."""
  assert source.root is not None  # `read` refuses weights outside their run
  advice = "run `synthq run` again, which makes "
  folder = system_results.find_retriever(source.root, weights.retriever)
  if folder is None:
    raise ValueError(
      f"{source.folder}: expected its retriever, {weights.retriever}, in its run,"
      f" got none: {advice}what is missing"
    )
  retriever = export_source.read(folder)
  checkpoint = _get_checkpoint(retriever)
  if checkpoint is None or not system_results.stands_on(
    weights, checkpoint, source.root
  ):
    raise ValueError(
      f"{source.folder}: expected weights of the retriever in {folder}, got those of"
      f" an earlier training of it: {advice}them anew"
    )
  return retriever


def _make_model_format(write: Callable, **fields) -> Format:
  return Format(result_type=results.Checkpoint, write=write, **fields)


FORMATS: dict[str, Format] = {
  "t5x": _make_model_format(
    functools.partial(_write_t5, name="t5x"), is_dated=True
  ),
  "safetensors": _make_model_format(
    functools.partial(_write_t5, name="safetensors")
  ),
  "huggingface": _make_model_format(_write_huggingface, hub="model"),
  "sentence-transformers": _make_model_format(
    _write_sentence_transformers, hub="model", takes_adapters=True
  ),
  "map": Format(
    result_type=system_results.Adapter, write=_write_map, takes_adapters=True
  ),
  **{
    name: _make_queries_format(layout)
    for name, layout in query_sets.LAYOUTS.items()
  },
  "ranker": Format(
    result_type=system_results.Ranking, write=_write_ranker, hub="model"
  ),
}
"""Formats by the name that `synthq export --format` takes."""
