#!/bin/sh
# sentence-transformers==6.2.0
#
# In a model whose Router has an encoder for queries and one for documents,
# encode(text, prompt_name="query") runs the encoder of documents, without a
# warning. encode(text) does the same; only encode_query or task="query" runs
# the other.
#
# Why it surprises: "query" is the name of a route, and in a model without a
# Router that call is how a query is encoded. An unknown task raises.
#
# Whom it hurts: evaluation scripts written before encode_query: queries go
# through the document encoder, and scores are merely lower.
#
# Source: sentence_transformers/base/modules/router.py, Router.forward and
# for_query_document.
#
# Seen: plain document, prompt_name document, task query, encode_query query
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 sentence-transformers==6.2.0
cd "$work"
cat > program.py <<'END'
import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Router, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"[PAD]": 0, "[UNK]": 1, "red": 2}
tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
layers = [
  StaticEmbedding(
    tokenizer, embedding_weights=np.full((3, 4), value, np.float32)
  )
  for value in (1.0, 2.0)
]
router = Router.for_query_document([layers[0]], [layers[1]])
model = SentenceTransformer(
  modules=[router], device="cpu", prompts={"query": "", "document": ""}
)
routes = {1.0: "query", 2.0: "document"}
seen = {
  "plain": model.encode("red"),
  "prompt_name": model.encode("red", prompt_name="query"),
  "task": model.encode("red", task="query"),
  "encode_query": model.encode_query("red"),
}
seen = {name: routes[float(vector[0])] for name, vector in seen.items()}
print(*(f"{name} {route}," for name, route in seen.items()))
if [*seen.values()] != ["document", "document", "query", "query"]:
  raise SystemExit("changed: calls take other routes")
END
"$work/env/bin/python" program.py
