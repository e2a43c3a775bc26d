"""Writes the README of an export: its content, its use and its privacy claim.

Hugging Face shows it as a model card or a dataset card. The lines between the
dashes are YAML for the hub; they hold the numbers of the claim, too.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import synthq_jax
from synthq_jax import text_tables
from synthq_jax.data import collection, query_sets
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.privacy import rounding, wording
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import results, rows, system_results

__all__ = [
  "render_adapter",
  "render_map",
  "render_queries",
  "render_ranking",
  "render_retriever",
  "render_transformers",
]

_CITATION = """\
```bibtex
@software{synthq_jax,
  author = {{The synthq\\_jax maintainers}},
  title = {synthq\\_jax: private query logs into retrieval systems that can be shared},
  year = {2026},
  version = {%s},
  url = {https://synthq-jax.example/synthq_jax},
  license = {Apache-2.0}
}
```"""
_SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
_SIZE_NAMES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B")


_USAGE = """```bash
pip install "sentence-transformers>=6"  # 5 knows no length of queries
```

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")  # where this file is
documents = model.encode_document(["first document", "second document"])
scores = model.encode_query("a query") @ documents.T
```"""
"""Markdown that loads an exported folder with sentence-transformers."""


def render_retriever(
  checkpoint: results.Checkpoint | None,
  lengths: Mapping[str, int],
  *,
  stride: int = 0,
  kind: str = "t5",
) -> str:
  """Returns the card of a dual encoder for sentence-transformers.

  Args:
    checkpoint: the exported checkpoint; None if nothing is known of its training.
    lengths: "max_seq_length" in tokens, EOS included. Queries that are cut
      elsewhere have a "query_length", too.
    stride: tokens between the starts of two passages of a document, as
      `results.PreparedData.passage_stride`; 0 if documents were cut.
    kind: "t5" for the encoder of a T5; "static" for a table of vectors without a
      transformer; "folder" for the modules that the folder lists.
  """
  passages = (
    " Longer documents were read in passages. A passage has the title (at most half"
    " of the tokens) and as much of the text as fits; one begins every"
    f" {stride} tokens of the text. A document scores as its best passage does."
    " sentence-transformers reads only the beginning of a longer document: divide"
    " yours into such passages before you encode them."
    if stride
    else ""
  )
  text_length = lengths["max_seq_length"]
  query_length = lengths.get("query_length", text_length)
  model = "A T5 encoder: the mean of its outputs"
  limits = (
    f"Queries are cut at {query_length} tokens, documents at {text_length}, as in"
    " training."
  )
  if kind == "folder":
    model = "The encoder that modules.json lists, trained from a public one,"
  if kind == "static":  # its reader has one length for all texts
    model = "The mean of a text's token vectors"
    limits = (
      f"Texts are cut at {text_length} tokens; in training, queries were cut at"
      f" {query_length}."
    )
  return _render_card(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "sentence-similarity",
      "tags": ["sentence-transformers", "dense-retrieval"],
    },
    None if checkpoint is None else checkpoint.statement,
    f"Dual encoder {checkpoint.name if checkpoint else ''}".strip(),
    f"{model} for queries and documents alike. Vectors have length 1, so that dot"
    f" products are cosines. {limits}{passages} It was written by synthq_jax"
    f" {synthq_jax.__version__} and tried with sentence-transformers 6.2.",
    _USAGE,
  )


def render_adapter(
  adapter: system_results.Adapter, texts: sentence_folders.TextSettings
) -> str:
  """Returns the card of an encoder with the linear map of its query vectors.

  Args:
    adapter: the exported adapter.
    texts: the lengths and prompts of the texts that its encoder reads.
  """
  return _render_card(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "sentence-similarity",
      "tags": ["sentence-transformers", "dense-retrieval", "adapter"],
    },
    adapter.statement,
    f"Adapter {adapter.name}",
    "An unchanged public encoder and a linear map of its query vectors, learned"
    f" from {_describe_queries(adapter.row)}. Document vectors are those of"
    " the encoder, so an index of them stays valid if it was made of the same"
    f" input. {_describe_texts(texts)}Vectors have length 1, so that"
    " dot products are cosines. Call `encode_query` and `encode_document`: `encode`"
    " encodes every text as a document, whatever prompt you name. It was written by"
    f" synthq_jax {synthq_jax.__version__} and tried with sentence-transformers 6.2.",
    _USAGE,
  )


def render_map(
  adapter: system_results.Adapter, texts: sentence_folders.TextSettings
) -> str:
  """Returns the card of a map without its encoder, with code that applies it.

  Args:
    adapter: the exported adapter.
    texts: the lengths and prompts of the texts that its encoder reads.
  """
  return _render_card(
    {"library_name": "safetensors", "tags": ["dense-retrieval", "adapter"]},
    adapter.statement,
    f"Map {adapter.name}",
    f"A matrix for query vectors, learned from {_describe_queries(adapter.row)}. It"
    f" fits the vectors of its run's encoder {adapter.base.name}, whichever program"
    f" computes them. {_describe_texts(texts)}Document vectors stay as they are. Scores"
    " are cosines: for dot products, document vectors need length 1.",
    """```python
import numpy as np
from safetensors.numpy import load_file

matrix = load_file("FOLDER/map.safetensors")["query"]

def apply(vectors):  # [query, dim] of the encoder
  moved = vectors @ matrix
  lengths = np.linalg.norm(moved, axis=-1, keepdims=True)
  return moved / np.maximum(lengths, 1e-12)  # a zero vector stays zero
```""",
  )


def _describe_texts(texts: sentence_folders.TextSettings) -> str:
  """Describes the input of an encoder: other input gives other vectors."""
  parts = []
  if length := texts.max_length:
    query_length = min(texts.query_length or length, length)
    parts.append(
      f"at most {length} tokens of a document and {query_length} of a query"
    )
  if texts.query_prompt or texts.document_prompt:
    parts.append(
      f"{texts.query_prompt!r} before queries and {texts.document_prompt!r} before"
      " documents"
    )
  return f"In training the encoder read {', '.join(parts)}. " if parts else ""


def _describe_queries(row: rows.Row) -> str:
  """Describes the queries that a map was learned from."""
  if row.is_without_privacy:
    return "queries that carry no guarantee of privacy"
  return {
    rows.ADAPTER: "private queries with differential privacy",
    rows.SYNTHETIC: (
      "synthetic queries, written by a T5 that was fine-tuned on private ones with"
      " differential privacy"
    ),
    rows.PUBLIC_ONLY.pairs: "queries of a public T5, none of them private",
  }[row.pairs]


def render_transformers(checkpoint: results.Checkpoint, prefix: str) -> str:
  """Returns the card of a generator or an encoder for transformers.

  Args:
    checkpoint: the exported checkpoint.
    prefix: text before each document in a generator's input; "" if unknown.
  """
  if checkpoint.kind == "retriever":
    name, task = "Encoder", "feature-extraction"
    description = (
      "The encoder of a T5. A text's vector is the mean of its outputs."
    )
    loader = "AutoModelForTextEncoding"
    usage = f"model = {loader}.from_pretrained(folder)  # a T5EncoderModel"
  else:
    name, task, loader = (
      "Generator",
      "text2text-generation",
      "AutoModelForSeq2SeqLM",
    )
    description = (
      f"A T5 that writes a query for {prefix!r} and a document. Longer documents"
      " are cut. generation_config.json has what is known of decoding."
    )
    usage = f"""model = AutoModelForSeq2SeqLM.from_pretrained(folder)
text = {prefix!r} + "a document"
inputs = tokenizer(text, truncation=True, return_tensors="pt")
written = model.generate(**inputs)
print(tokenizer.batch_decode(written, skip_special_tokens=True))"""
  return _render_card(
    {"library_name": "transformers", "pipeline_tag": task, "tags": ["t5"]},
    checkpoint.statement,
    f"{name} {checkpoint.name}",
    description,
    f"""```python
from transformers import {loader}, AutoTokenizer

folder = "FOLDER"  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder)
{usage}
```""",
  )


def render_ranking(ranking: system_results.Ranking) -> str:
  """Returns the card of learned weights, exported with their retriever."""
  named = zip(ranking.features, ranking.weights, strict=True)
  table = text_tables.Table(
    header=("Score", "Weight"),
    rows=tuple((name, f"{weight:.3g}") for name, weight in named),
    numeric=("Weight",),
  )
  return _render_card(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "text-ranking",
      "tags": ["learning-to-rank", "hybrid-retrieval", "bm25"],
    },
    ranking.statement,
    f"Ranker {ranking.name}",
    "BM25 and the retriever in retriever/ find"
    f" {ranking.depth} documents each, and a weighted sum of scores ranks them. The"
    " weights were learned from private queries. For each query, a BM25 score is"
    " divided by the best one among the candidates; the retriever's scores are"
    f" scaled from 0, the least, to 1, the best.\n\n{table.markdown()}",
    """```bash
pip install "sentence-transformers>=6" bm25s "PyStemmer>=3.1"
```

```python
from ranker import Ranker  # ranker.py of this folder; it needs no synthq_jax

ids, texts = ["d1", "d2"], ["Title and text", "of each document"]
ranker = Ranker(ids, texts)
print(ranker.search("a query", k=10))
```

`ranker.rank(query, lexical, dense)` ranks the documents that your own search
engines found. The folder retriever/ is a SentenceTransformer of its own.""",
  )


def render_queries(
  queries: results.SyntheticQueries,
  data: collection.Collection,
  layout: query_sets.Layout,
) -> str:
  """Returns the card of synthetic queries and their documents.

  Args:
    queries: the record of the queries.
    data: the exported queries, documents and judgements.
    layout: the format of the export.
  """
  header: dict[str, Any] = {
    "pretty_name": f"Synthetic queries {queries.name}",
    "task_categories": ["text-retrieval"],
    "tags": ["synthetic", "information-retrieval"],
    "size_categories": [_choose_size(len(data.queries))],
    "configs": layout.tables(data.qrels),
  }
  filters = f" {queries.filters}" if queries.filters else ""
  return _render_card(
    header,
    queries.statement,
    f"Synthetic queries {queries.name}",
    f"{len(data.queries):,} queries that a T5 wrote for {queries.num_documents:,} of"
    f" {len(data.documents):,} documents: {queries.queries_per_document} for each"
    " document, or for each passage if longer documents were read in passages."
    f" Decoding: {queries.sampler}, after the prefix {queries.prefix!r}.{filters} No"
    " person asked these queries. The document that a query was written for counts"
    " as relevant to it; nobody judged that.",
    layout.use,
  )


def _render_card(
  header: dict[str, Any],
  claim: statement_lib.PrivacyStatement | None,
  title: str,
  description: str,
  usage: str,
) -> str:
  """Joins the YAML header and the sections of a card.

  Args:
    header: fields of the YAML block; a claim adds its numbers and its tag.
    claim: the privacy statement; None if nothing is known of the training.
    title: the heading.
    description: the first paragraph.
    usage: the code of the section "Use".
  """
  parts = [f"# {title}", description, "## Use", usage, "## Privacy"]
  if claim is None:
    parts.append("Nothing is known here about the privacy of its training.")
  else:
    header = header | {"differential_privacy": _round_claim(claim)}
    is_claimed = math.isfinite(claim.epsilon) and not claim.secret_is_fixed
    if is_claimed and not claim.is_public:
      header["tags"] = [*header["tags"], "differential-privacy"]
    parts += _write_statement(claim)
  parts += ["## Citation", _CITATION % synthq_jax.__version__]
  lines = (f"{name}: {_write_yaml(value)}" for name, value in header.items())
  return "\n".join(("---", *lines, "---", "", "\n\n".join(parts), ""))


def _write_statement(claim: statement_lib.PrivacyStatement) -> list[str]:
  """Returns the paragraphs of the privacy section, with the limits as lists."""
  parts = [f"**{wording.FIXED_SECRET}**"] if claim.secret_is_fixed else []
  parts.append(wording.summarize(claim))
  for name, section in (
    ("What is NOT protected", "not_protected"),
    ("What is assumed", "assumptions"),
    ("What is treated as public", "public"),
  ):
    if sentences := wording.sentences(claim, section):
      parts += [
        f"### {name}",
        "\n".join(f"- {sentence}" for sentence in sentences),
      ]
  return [*parts, "Every step of the claim is in PRIVACY.txt."]


def _round_claim(claim: statement_lib.PrivacyStatement) -> dict[str, Any]:
  """Returns the claim for the YAML header, its epsilon and delta rounded up."""
  if claim.epsilon == math.inf:
    return {"epsilon": "inf", "claimed": False}
  return {
    "epsilon": _parse_number(rounding.epsilon(claim.epsilon)),
    "delta": _parse_number(rounding.delta(claim.delta)),
    "unit": str(claim.unit),
    "relation": claim.relation,
    "accountant": claim.accountant,
    "releases": [release.identifier for release in claim.ledger],
    **{
      section: list(wording.sentences(claim, section))
      for section in ("public", "assumptions", "not_protected")
    },
  }


def _write_yaml(value: Any) -> str:
  """Writes a value as JSON that YAML 1.1 reads alike: 1e-05 becomes 1.0e-05."""
  if isinstance(value, dict):
    pairs = (f"{json.dumps(k)}: {_write_yaml(v)}" for k, v in value.items())
    return f"{{{', '.join(pairs)}}}"
  text = json.dumps(value, ensure_ascii=False)
  if isinstance(value, float) and "." not in text:
    text = text.replace("e", ".0e")
  return text


def _parse_number(text: str) -> float | str:
  """Parses a rounded number; "inf" stays text, as JSON's Infinity is no YAML."""
  return text if text == "inf" else float(text)


def _choose_size(count: int) -> str:
  """Returns Hugging Face's size category for a number of rows.

  >>> _choose_size(721), _choose_size(8431), _choose_size(2 * 10**9)
  ('n<1K', '1K<n<10K', '1B<n<10B')
  """
  category = sum(count >= size for size in _SIZES)
  if not category:
    return "n<1K"
  above = (*_SIZE_NAMES, "10B")[category]
  return f"{_SIZE_NAMES[category - 1]}<n<{above}"
