"""Hands a result on: a model or queries, in a format that others read.

With it go its claim (PRIVACY.txt), a card that says what is and what is not
protected, and the command that would publish it, which nobody runs but its
owner. What was made of private queries without differential privacy lies under
`private/`, and does not leave it by accident.
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
from synthq_jax.models import (
  dual_encoder,
  sentence_encoder,
  static_vectors,
  t5_checkpoints,
)
from synthq_jax.models.checkpoints import sentence_folders, t5x, tensors
from synthq_jax.privacy import rounding, wording
from synthq_jax.retrieval import ranking
from synthq_jax.runtime import inputs, results, system_results
from synthq_jax.storage import array_files, artifacts, object_store, stores
from synthq_jax.tools import cards, export_source

__all__ = ["CLAIM", "FORMATS", "Format", "local", "run"]

CLAIM = t5_checkpoints.CLAIM
"""In the exported folder: what may be claimed about it, in words."""

_README = "README.md"
_LENGTH = 512
"""Tokens of a text where no run says how many."""
_RANKER = pathlib.Path(synthq_jax.__file__).parent / "assets" / "ranker.py"
"""The program that goes with weights."""
_UNREAD = re.compile(r"(private/)?encode_documents/.*\.npy|.*\.trec")
"""Parts of a run that no export reads: vectors of documents, and rankings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """A form in which a result leaves its run."""

  of: type
  """The kind of result, of `results`."""
  write: Callable[[export_source.Source, pathlib.Path], object]
  """Writes the files into a new folder; the rest is done for it."""
  hub: str = ""
  """The kind of repository on Hugging Face's hub; "": it goes nowhere."""
  is_dated: bool = False
  """Whether the folder's name ends in a step, as T5X's does."""
  takes_adapters: bool = False
  """Whether an adapter is written with the encoder that it stands on."""

  def takes(self, kind: type) -> bool:
    """Tests whether results of a kind have this form."""
    if kind is system_results.Adapter:
      return self.takes_adapters
    return kind is self.of


def local(place: str) -> str:
  """Returns the folder of a result; out of a store, with its run around it.

  A run's data and settings belong to an export: the vocabulary, lengths, and what
  the documents tell of queries.

  Args:
    place: a path, or a URL, of what `run` takes.

  Raises:
    OSError: if a store cannot be reached, or nothing lies there.
  """
  if not object_store.is_url(place):
    return place
  url = object_store.Store(place).url  # says whether it can be one
  try:
    made = artifacts.read_json(stores.local(f"{url}/{artifacts.RESULT_NAME}"))
  except FileNotFoundError:  # no run made it
    return str(shipped.checkpoint(url))
  below = f"/{made['result'].get('directory')}"
  if not url.endswith(below):
    return stores.local(place)
  return stores.local(url.removesuffix(below), without=_UNREAD) + below


def run(
  source: str | os.PathLike,
  to: str | os.PathLike,
  *,
  format: str,  # noqa: A002
  step: int | None = None,
  allow_private: bool = False,
) -> str:
  """Writes a model or queries in a format, with what belongs to them.

  Formal guarantee: post-processing. The export is as private as the result, for
  the same unit and relation. It is made of the result's own folder, of the
  documents, which are treated as public, and of settings; it reads no private
  record. What the documents themselves tell of queries (`sources.Kind`), it says.

  Args:
    source: a checkpoint's folder, of any format that `t5_checkpoints.load`
      reads, or a folder that a run wrote: of synthetic queries, or of weights
      that private queries taught.
    to: the new folder, not there yet or empty (T5X: the parent of the step).
    format: one of `FORMATS`.
    step: the step that a T5X checkpoint gets; None: that of the T5X checkpoint
      that it is made of, else 0.
    allow_private: exports also what must not be shared.

  Returns:
    What was written, what holds for it, and the command that would publish it.

  Raises:
    ValueError: if the result must not be shared and `allow_private` does not
      say otherwise, is of another kind, or cannot be read.
  """
  if format not in FORMATS:
    raise ValueError(
      f"--format must be one of {', '.join(FORMATS)}, got format={format}"
    )
  if step is not None and not FORMATS[format].is_dated:
    dated = " or ".join(k for k, one in FORMATS.items() if one.is_dated)
    raise ValueError(
      f"--step goes with --format={dated}, got --format={format}: leave it out"
    )
  if step is None:
    step = t5x.step(pathlib.Path(source))
  if step < 0:
    raise ValueError(f"step must be at least 0, got step={step}")
  chosen, given = FORMATS[format], export_source.read(pathlib.Path(source))
  if given.is_private and not allow_private:
    raise ValueError(
      f"{source}: expected a result that may be shared, got one under"
      f" {results.PRIVATE}/, made of private queries without differential"
      " privacy or only to be compared (plan.Rows.compared): --allow_private"
      " exports it all the same"
    )
  kind = results.Checkpoint if given.result is None else type(given.result)
  if not chosen.takes(kind):
    fitting = ", ".join(k for k, one in FORMATS.items() if one.takes(kind))
    got = kind.__name__ if given.result else "a folder that no run made"
    raise ValueError(
      f"{source}: expected {chosen.of.__name__} for --format={format}, got"
      f" {got}: give a result of a run, or one of {fitting}"
    )
  place = pathlib.Path(to)
  if chosen.is_dated:
    place /= f"checkpoint_{step}"
  with artifacts.new_folder(place, "export") as folder:
    if given.is_private:
      folder.chmod(0o700)
    chosen.write(given, folder)
    if given.claim is not None:
      t5_checkpoints.save_claim(folder, given.claim)
  return _summary(place, given, chosen)


def _summary(
  place: pathlib.Path, given: export_source.Source, chosen: Format
) -> str:
  """Describes the written folder, and its permitted uses."""
  lines = [f"written: {place}"]
  if chosen.of is results.Checkpoint and given.vocabulary is None:
    lines.append("no vocabulary lies beside the checkpoint: add its own")
  if given.is_private:
    lines.append("PRIVATE: no claim of its run counts it; do not share it")
    return "\n".join(lines)
  claim = given.claim
  if claim is None:
    lines.append("nothing is known here about the privacy of its training")
  else:
    lines.append(
      f"epsilon = {rounding.epsilon(claim.epsilon)},"
      f" delta = {rounding.delta(claim.delta)} for one {claim.unit}: see {CLAIM}"
    )
    if claim.secret_is_fixed:
      lines.append(f"WARNING: nothing is protected: {wording.FIXED_SECRET}")
    if given.prepared is not None:
      names = given.prepared.not_protected
      told = [wording.write(one, claim.unit) for one in names]
      lines += [f"not protected: {one}" for one in told]
  if chosen.hub:
    lines.append(
      f"to publish it: hf upload YOUR_NAME/{cards.hub_name(place.name)}"
      f" {shlex.quote(f'{place}')} --repo-type={chosen.hub}"
    )
  return "\n".join(lines)


def _convert(
  given: export_source.Source, folder: pathlib.Path, name: str
) -> None:
  """Writes a checkpoint of a T5, with the special ids of its vocabulary."""
  made = t5_checkpoints.convert(
    given.folder, folder / "made", format=name, token_ids=given.token_ids
  )
  _move_up(made, folder)


def _t5(given: export_source.Source, folder: pathlib.Path, name: str) -> None:
  """Writes a checkpoint of a T5, its vocabulary beside it."""
  _convert(given, folder, name)
  if given.vocabulary is not None:
    content = given.vocabulary.read_bytes()
    (folder / inputs.VOCABULARY_NAME).write_bytes(content)


def _huggingface(given: export_source.Source, folder: pathlib.Path) -> None:
  """Writes what transformers loads, its tokenizer included."""
  _convert(given, folder, "huggingface")
  _write_tokenizer(given, folder, t5_checkpoints.load_config(folder))
  generation = folder / "generation_config.json"
  if given.vocabulary is not None and generation.is_file():
    fields = json.loads(generation.read_text())
    rows = t5_checkpoints.load_config(folder).vocab_size
    fields["suppress_tokens"] = tokenizer_json.not_text(given.vocabulary, rows)
    _write_json(generation, fields)
  made = _checkpoint(given)
  if made is not None:
    text = cards.of_transformers(made, _prefix(given))
    (folder / _README).write_text(text, encoding="utf-8")


def _checkpoint(given: export_source.Source) -> results.Checkpoint | None:
  """Returns the result of a format for checkpoints; None where no run made it."""
  assert given.result is None or isinstance(given.result, results.Checkpoint)
  return given.result


def _prefix(given: export_source.Source) -> str:
  """Returns the prefix of a generator's documents."""
  made = _checkpoint(given)
  assert made is not None  # only results have cards
  roots = [given.root, given.root / results.PRIVATE] if given.root else []
  for root in roots:
    written = root / "generate" / made.name
    if artifacts.read_fingerprint(written) is not None:
      return artifacts.load(written, results.SyntheticQueries).prefix
  return ""


def _sentence_transformers(
  given: export_source.Source, folder: pathlib.Path
) -> None:
  """Writes a dual encoder with its pooling, projection and lengths."""
  made = _checkpoint(given)
  if made is not None and made.kind != "retriever":
    got = f"{given.folder}: expected a retriever, got a {made.kind}"
    raise ValueError(f"{got}: export it with --format=huggingface")
  if isinstance(made, system_results.Adapter):
    _adapted(given, made, folder)
    return
  if sentence_encoder.is_folder(given.folder):
    _sentence_folder(given, folder)
    return
  if given.vocabulary is None:
    wanted = (
      f"{given.folder}: expected the vocabulary of the checkpoint beside it"
    )
    raise ValueError(
      f"{wanted}, got none: put it there as {inputs.VOCABULARY_NAME}"
    )
  if given.result is not None:
    _prepared(given)  # says how long its texts were
  params, shape = t5_checkpoints.load(
    given.folder, dtype=None, token_ids=given.token_ids
  )
  lengths = {"max_seq_length": _length(given)}
  if given.prepared and given.prepared.query_length != _length(given):
    lengths["query_length"] = given.prepared.query_length
  is_static = isinstance(shape, static_vectors.StaticConfig)
  write = _write_static if is_static else _write_encoder
  parts = write(given, folder, params, shape, lengths)
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
  stride = given.prepared.passage_stride if given.prepared else 0
  text = cards.of_retriever(
    made, lengths, stride=stride, kind="static" if is_static else "t5"
  )
  (folder / _README).write_text(text, encoding="utf-8")


def _sentence_folder(given: export_source.Source, folder: pathlib.Path) -> None:
  """Copies a retriever that is a folder of sentence-transformers already."""
  sentence_encoder.copy_files(given.folder, folder)
  for one in json.loads((folder / sentence_folders.MODULES).read_text()):
    (folder / one["path"]).mkdir(exist_ok=True)
  texts = sentence_folders.text_settings(folder)
  lengths = {"max_seq_length": texts.max_length or _LENGTH}
  if texts.query_length is not None:
    lengths["query_length"] = texts.query_length
  text = cards.of_retriever(_checkpoint(given), lengths, kind="folder")
  (folder / _README).write_text(text, encoding="utf-8")


def _adapted(
  given: export_source.Source,
  made: system_results.Adapter,
  folder: pathlib.Path,
) -> None:
  """Writes the encoder that an adapter stands on, with its map behind it."""
  assert given.root is not None  # its base lies in its run
  base = made.find_base(given.root)
  _sentence_transformers(export_source.read(base), folder)
  sentence_encoder.add_query_map(folder, _matrix(given))
  text = cards.of_adapter(made)
  (folder / _README).write_text(text, encoding="utf-8")


def _matrix(given: export_source.Source) -> np.ndarray:
  """Reads the map of an adapter."""
  return array_files.read(given.folder / system_results.Adapter.FILE)


def _map(given: export_source.Source, folder: pathlib.Path) -> None:
  """Writes the map of an adapter alone, for vectors from anywhere."""
  made = given.result
  assert isinstance(made, system_results.Adapter)
  tensors.write_safetensors(
    folder / "map.safetensors", tensors.of_tree({"query": _matrix(given)})
  )
  (folder / _README).write_text(cards.of_map(made), encoding="utf-8")


def _write_encoder(given, folder, params, shape, lengths) -> dict[str, Any]:
  """Writes a T5's encoder; returns its modules with their settings."""
  params = dict(dual_encoder.encoder_params(params))
  projection = params.pop(dual_encoder.PROJECTION, None)
  t5_checkpoints.save_huggingface(folder / "made", params, shape)
  _move_up(folder / "made", folder)
  _write_tokenizer(given, folder, shape)
  width = shape.emb_dim
  pooling = {"word_embedding_dimension": width}
  pooling |= {"pooling_mode_mean_tokens": True}
  parts: dict[str, Any] = {"Transformer": lengths, "Pooling": pooling}
  if projection is not None:
    parts["Dense"] = None  # which is written here
    sentence_encoder.write_dense(folder / "2_Dense", projection["kernel"])
  return parts


def _write_static(given, folder, params, shape, lengths) -> dict[str, Any]:
  """Writes a table of vectors, any projection in it; returns its modules."""
  table = params["token_embedder"]["embedding"]
  if dual_encoder.PROJECTION in params:  # of a mean: the mean of projections
    table = table @ params[dual_encoder.PROJECTION]["kernel"]
  tree = {"embedding.weight": np.ascontiguousarray(table)}
  file = folder / "model.safetensors"
  tensors.write_safetensors(file, tensors.of_tree(tree))
  # Its reader adds no EOS, and cuts nothing.
  cut_at = lengths["max_seq_length"] - 1
  _write_tokenizer(given, folder, shape, cut_at=cut_at)
  return {"StaticEmbedding": None}


def _prepared(given: export_source.Source) -> results.PreparedData:
  """Returns the data of its run, or says that none lies around it."""
  if given.prepared is None:
    raise ValueError(
      f"{given.folder}: expected the run around it, whose"
      f" {results.PRIVATE}/prepare_data says at which length it was trained, got"
      " none: export it there"
    )
  return given.prepared


def _length(given: export_source.Source) -> int:
  if given.prepared is None:
    return _LENGTH
  if getattr(given.result, "kind", "") == "generator":
    return given.prepared.document_length
  return given.prepared.read_length


def _write_tokenizer(
  given: export_source.Source,
  folder: pathlib.Path,
  shape: Any,
  cut_at: int | None = None,
) -> None:
  """Writes SentencePiece's model and what transformers reads in its place."""
  if given.vocabulary is not None:
    tokenizer_json.write(
      folder,
      given.vocabulary,
      rows=shape.vocab_size,
      max_length=_length(given),
      cut_at=cut_at,
    )


def _move_up(made: pathlib.Path, folder: pathlib.Path) -> None:
  """Moves what a writer of whole folders made into an export."""
  for path in made.iterdir():
    path.rename(folder / path.name)
  while made != folder:
    made.rmdir()
    made = made.parent


def _write_json(path: pathlib.Path, content: object) -> None:
  path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# Queries.


def _layout(layout: query_sets.Layout) -> Format:
  """Returns the format of synthetic queries and the documents they are for."""

  def write(given: export_source.Source, folder: pathlib.Path) -> None:
    made, root = given.result, given.root
    # Queries are exported from their run alone.
    assert isinstance(made, results.SyntheticQueries) and root is not None
    claim = made.statement
    data = beir.read_written(
      given.folder / "queries.jsonl",
      root / "prepare_data" / "corpus.jsonl",
    )
    origin = {
      "generator": made.name,
      "epsilon": claim.epsilon,  # inf: nothing is claimed
      "delta": claim.delta,
    }
    layout.write(folder, data, origin)
    text = cards.of_queries(made, data, layout)
    (folder / _README).write_text(text, encoding="utf-8")

  return Format(of=results.SyntheticQueries, write=write, hub="dataset")


def _ranker(given: export_source.Source, folder: pathlib.Path) -> None:
  """Writes weights with their retriever, and the program that applies them."""
  made, prepared = given.result, _prepared(given)
  assert isinstance(made, system_results.Ranking)
  if prepared.passage_stride:
    raise ValueError(
      f"{given.folder}: expected weights of whole documents, got those of"
      f" passages, which {_RANKER.name} does not divide: run with"
      " --gin.PASSAGE_STRIDE=0, or search with `synthq search`"
    )
  retriever = folder / "retriever"
  retriever.mkdir()
  trained = _retriever(given, made)
  _sentence_transformers(trained, retriever)
  if trained.claim is not None:  # whoever starts from it alone has to know
    t5_checkpoints.save_claim(retriever, trained.claim)
  (folder / _RANKER.name).write_bytes(_RANKER.read_bytes())
  settings = {
    "features": ranking.described(made.weights),
    "word": word_patterns.WORD,
    "joiners": word_patterns.JOINERS,
    "depth": made.depth,
    "query_length": prepared.query_length - 1,  # without EOS
  }
  _write_json(folder / "ranking.json", settings)
  (folder / _README).write_text(cards.of_ranking(made), encoding="utf-8")


def _retriever(
  given: export_source.Source, made: system_results.Ranking
) -> export_source.Source:
  """Returns the checkpoint whose scores are weighed."""
  assert given.root is not None  # weights are exported from their run alone
  name = str(made.retriever)
  again = "run `synthq run` again, which makes "
  stages = ("train_retriever", "learn_adapter")
  roots = (given.root, given.root / results.PRIVATE)
  for place in (root / one / name for root in roots for one in stages):
    if artifacts.read_fingerprint(place) is not None:
      found = export_source.read(place)
      part = _checkpoint(found)
      if part is None or not system_results.stands_on(made, part):
        raise ValueError(
          f"{given.folder}: expected weights of the retriever in {place}, got"
          f" those of an earlier training of it: {again}them anew"
        )
      return found
  raise ValueError(
    f"{given.folder}: expected its retriever, train_retriever/{name}, in its run,"
    f" got none: {again}what is missing"
  )


def _model(write: Callable, **fields) -> Format:
  return Format(of=results.Checkpoint, write=write, **fields)


FORMATS: dict[str, Format] = {
  "t5x": _model(functools.partial(_t5, name="t5x"), is_dated=True),
  "safetensors": _model(functools.partial(_t5, name="safetensors")),
  "huggingface": _model(_huggingface, hub="model"),
  "sentence-transformers": _model(
    _sentence_transformers, hub="model", takes_adapters=True
  ),
  "map": Format(of=system_results.Adapter, write=_map, takes_adapters=True),
  **{name: _layout(one) for name, one in query_sets.LAYOUTS.items()},
  "ranker": Format(of=system_results.Ranking, write=_ranker, hub="model"),
}
"""Formats by their names in `synthq export --format`."""
