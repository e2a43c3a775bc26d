"""Writes the README of an export: what it is, how to use it, what it promises.

Hugging Face shows these as model cards and dataset cards; the lines between
dashes are YAML that it reads. The claim stands there, too, as numbers.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import synthq_jax
from synthq_jax import text_tables
from synthq_jax.data import collection, query_sets
from synthq_jax.privacy import rounding, wording
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import results, system_results

__all__ = [
  "hub_name",
  "of_queries",
  "of_ranking",
  "of_retriever",
  "of_transformers",
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


_USE = """```bash
pip install "sentence-transformers>=6"  # 5 knows no length of queries
```

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")  # where this file is
documents = model.encode_document(["first document", "second document"])
scores = model.encode_query("a query") @ documents.T
```"""
"""Loads an exported folder with sentence-transformers."""


def of_retriever(
  made: results.Checkpoint | None,
  lengths: Mapping[str, int],
  *,
  stride: int = 0,
  kind: str = "t5",
) -> str:
  """Returns the card of a dual encoder for sentence-transformers.

  Args:
    made: the checkpoint; None: nothing is known of its training.
    lengths: "max_seq_length" and, where queries are cut at another place,
      "query_length": tokens, EOS included.
    stride: tokens from one passage of a document to the next, as
      `results.PreparedData.passage_stride`; 0: documents were cut.
    kind: "t5", its encoder; "static", a table of vectors without a transformer;
      "folder", the modules that the folder lists.
  """
  whole = (
    " Longer documents were read in passages: each the title (at most half of the"
    " tokens) and as much of the text as fits, a new one every"
    f" {stride} tokens of the text, and a document's score is that of its best"
    " passage. sentence-transformers divides nothing and reads the beginning of a"
    " longer document: give it such passages instead."
    if stride
    else ""
  )
  longest = lengths["max_seq_length"]
  query = lengths.get("query_length", longest)
  what = "A T5 encoder: the mean of its outputs"
  cut = f"Queries are cut at {query} tokens, documents at {longest}, as in training."
  if kind == "folder":
    what = "The encoder that its modules list, trained on from a public one,"
  if kind == "static":  # whose reader has one length
    what = "The mean of a text's token vectors"
    cut = f"Texts are cut at {longest} tokens; in training, queries were at {query}."
  return _page(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "sentence-similarity",
      "tags": ["sentence-transformers", "dense-retrieval"],
    },
    None if made is None else made.statement,
    f"Dual encoder {made.name if made else ''}".strip(),
    f"{what} for queries and documents alike, of length 1, so that dot products"
    f" are cosines. {cut}{whole} It was written by synthq_jax"
    f" {synthq_jax.__version__} and tried with sentence-transformers 6.2.",
    _USE,
  )


def of_adapter(made: system_results.Adapter) -> str:
  """Returns the card of an encoder with the maps of its vectors."""
  return _page(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "sentence-similarity",
      "tags": ["sentence-transformers", "dense-retrieval", "adapter"],
    },
    made.statement,
    f"Adapter {made.name}",
    "A public encoder as it is, with a linear map of queries alone, which private"
    " queries taught with differential privacy. Documents keep the vectors that the"
    " encoder gives them: an index of them stays as it is. Vectors have length 1, so"
    " that dot products are cosines. Call `encode_query` and `encode_document`: `encode` takes"
    " the way of documents, whatever prompt is named. It was written by"
    f" synthq_jax {synthq_jax.__version__} and tried with sentence-transformers 6.2.",
    _USE,
  )


def of_map(made: system_results.Adapter) -> str:
  """Returns the card of a map alone, with the program that applies it."""
  return _page(
    {"library_name": "safetensors", "tags": ["dense-retrieval", "adapter"]},
    made.statement,
    f"Map {made.name}",
    "A matrix for the vectors of queries, which private queries taught with"
    " differential privacy. It is for the vectors of the encoder"
    f" {made.base.name} of its run, wherever they come from; documents keep theirs.",
    """```python
import numpy as np
from safetensors.numpy import load_file

matrix = load_file("FOLDER/map.safetensors")["query"]

def apply(vectors):  # [query, dim] of the encoder
  moved = vectors @ matrix
  return moved / np.linalg.norm(moved, axis=1, keepdims=True)
```""",
  )


def of_transformers(made: results.Checkpoint, prefix: str) -> str:
  """Returns the card of a generator or an encoder for transformers alone.

  Args:
    made: the checkpoint.
    prefix: what stood before each document, where it is known.
  """
  if made.kind == "retriever":
    name, task = "Encoder", "feature-extraction"
    what = "The encoder of a T5; the mean of its outputs stands for a text."
    kind = "AutoModelForTextEncoding"
    use = f"model = {kind}.from_pretrained(folder)  # a T5EncoderModel"
  else:
    name, task, kind = (
      "Generator",
      "text2text-generation",
      "AutoModelForSeq2SeqLM",
    )
    what = f"A T5 that writes a query for {prefix!r} and a document."
    if made.prompt_tokens:
      what += (
        f" A prompt is part of it: the last {made.prompt_tokens} ids of the"
        " embedding, in order, stand before the ids of each input."
      )
    use = f"""model = AutoModelForSeq2SeqLM.from_pretrained(folder)
inputs = tokenizer({prefix!r} + "a document", return_tensors="pt")
written = model.generate(**inputs, do_sample=True, top_p=0.8, top_k=0)
print(tokenizer.batch_decode(written, skip_special_tokens=True))"""
  return _page(
    {"library_name": "transformers", "pipeline_tag": task, "tags": ["t5"]},
    made.statement,
    f"{name} {made.name}",
    what,
    f"""```python
from transformers import {kind}, AutoTokenizer

folder = "FOLDER"  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder)
{use}
```""",
  )


def of_ranking(made: system_results.Ranking) -> str:
  """Returns the card of weights, with their retriever and what applies them.

  Args:
    made: the weights.
  """
  named = zip(made.features, made.weights, strict=True)
  table = text_tables.Table(
    header=("Score", "Weight"),
    rows=tuple((name, f"{weight:.3g}") for name, weight in named),
    numeric=("Weight",),
  )
  return _page(
    {
      "library_name": "sentence-transformers",
      "pipeline_tag": "text-ranking",
      "tags": ["learning-to-rank", "hybrid-retrieval", "bm25"],
    },
    made.statement,
    f"Ranker {made.name}",
    f"What BM25 and the retriever in retriever/ find, {made.depth} documents each,"
    " ranked by a sum of scores whose weights private queries taught: each BM25's"
    " over the best of a query's candidates, the retriever's from their least, 0,"
    f" to their best, 1.\n\n{table.markdown()}",
    """```bash
pip install "sentence-transformers>=6" bm25s "PyStemmer>=3.1"
```

```python
from ranker import Ranker  # this folder's; it needs no synthq_jax

ids, texts = ["d1", "d2"], ["Title and text", "of each document"]
ranker = Ranker(ids, texts)
print(ranker.search("a query", k=10))
```

`ranker.rank(query, lexical, dense)` orders the documents that engines of yours
found. retriever/ alone is a SentenceTransformer.""",
  )


def of_queries(
  made: results.SyntheticQueries,
  data: collection.Collection,
  layout: query_sets.Layout,
) -> str:
  """Returns the card of synthetic queries and the documents they are for.

  Args:
    made: the queries.
    data: what is exported.
    layout: how.
  """
  header: dict[str, Any] = {
    "pretty_name": f"Synthetic queries {made.name}",
    "task_categories": ["text-retrieval"],
    "tags": ["synthetic", "information-retrieval"],
    "size_categories": [_size(len(data.queries))],
    "configs": layout.tables(data.qrels),
  }
  filters = f" {made.filters}" if made.filters else ""
  return _page(
    header,
    made.statement,
    f"Synthetic queries {made.name}",
    f"{len(data.queries):,} queries that a T5 wrote for {made.num_documents:,} of"
    f" {len(data.documents):,} documents, {made.queries_per_document} for each (or"
    " for each passage, where longer ones were read in passages):"
    f" {made.sampler}, after the prefix {made.prefix!r}.{filters} No person asked"
    " them. A query's document counts as relevant, and nobody judged that.",
    layout.use,
  )


def _page(
  header: dict[str, Any],
  claim: statement_lib.PrivacyStatement | None,
  title: str,
  what: str,
  use: str,
) -> str:
  """Puts a card together."""
  parts = [f"# {title}", what, "## Use", use, "## Privacy"]
  if claim is None:
    parts.append("Nothing is known here about the privacy of its training.")
  else:
    header = header | {"differential_privacy": _numbers(claim)}
    is_claimed = math.isfinite(claim.epsilon) and not claim.secret_is_fixed
    if is_claimed and not claim.is_public:
      header["tags"] = [*header["tags"], "differential-privacy"]
    parts += _promise(claim)
  parts += ["## Citation", _CITATION % synthq_jax.__version__]
  lines = (f"{name}: {_yaml(value)}" for name, value in header.items())
  return "\n".join(("---", *lines, "---", "", "\n\n".join(parts), ""))


def _promise(claim: statement_lib.PrivacyStatement) -> list[str]:
  """The claim in words, and what bounds it as lists."""
  parts = [f"**{wording.FIXED_SECRET}**"] if claim.secret_is_fixed else []
  parts.append(wording.summarize(claim))
  for name, section in (
    ("What is NOT protected", "not_protected"),
    ("What is assumed", "assumptions"),
    ("What is treated as public", "public"),
  ):
    if sentences := wording.sentences(claim, section):
      parts += [f"### {name}", "\n".join(f"- {one}" for one in sentences)]
  return [*parts, "Every step of the claim is in PRIVACY.txt."]


def _numbers(claim: statement_lib.PrivacyStatement) -> dict[str, Any]:
  """The claim as Hugging Face's YAML holds it, rounded up."""
  if claim.epsilon == math.inf:
    return {"epsilon": "inf", "claimed": False}
  return {
    "epsilon": _number(rounding.epsilon(claim.epsilon)),
    "delta": _number(rounding.delta(claim.delta)),
    "unit": str(claim.unit),
    "relation": claim.relation,
    "accountant": claim.accountant,
    "releases": [one.identifier for one in claim.ledger],
    **{
      section: list(wording.sentences(claim, section))
      for section in ("public", "assumptions", "not_protected")
    },
  }


def _yaml(value: Any) -> str:
  """Writes JSON, which is YAML, but for 1e-05: YAML 1.1 takes that for text."""
  if isinstance(value, dict):
    pairs = (f"{json.dumps(k)}: {_yaml(v)}" for k, v in value.items())
    return f"{{{', '.join(pairs)}}}"
  text = json.dumps(value, ensure_ascii=False)
  if isinstance(value, float) and "." not in text:
    text = text.replace("e", ".0e")
  return text


def _number(text: str) -> float | str:
  """A number of a claim; YAML's readers know no infinity in JSON's words."""
  return text if text == "inf" else float(text)


def _size(count: int) -> str:
  """The category of sizes that Hugging Face has for a number of rows.

  >>> _size(721), _size(8431), _size(2 * 10**9)
  ('n<1K', '1K<n<10K', '1B<n<10B')
  """
  place = sum(count >= size for size in _SIZES)
  if not place:
    return "n<1K"
  above = (*_SIZE_NAMES, "10B")[place]
  return f"{_SIZE_NAMES[place - 1]}<n<{above}"


def hub_name(text: str) -> str:
  """Returns a name that Hugging Face's hub takes for a repository.

  >>> hub_name("für_alle--queries..v2.git")
  'f-r_alle-queries.v2'
  """
  text = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:60]
  text = re.sub(r"([-.])[-.]+", r"\1", text)
  return re.sub(r"(\.git|[-.])+$", "", text).lstrip("-.") or "NAME"
