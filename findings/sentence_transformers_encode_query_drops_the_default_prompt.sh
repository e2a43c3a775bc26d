#!/bin/sh
# sentence-transformers==6.2.0
#
# A model with prompts={"web": "query: "} and default_prompt_name="web" puts
# the prompt before every text of encode, and before no text of encode_query
# and encode_document.
#
# Why it surprises: the log says that the default applies unless it is
# overridden, and the two methods are called without a prompt. Empty prompts
# of the names query and document were added when the model was made, and
# count as an override.
#
# Whom it hurts: code that moves from encode to encode_query on a model whose
# one prompt is the default: the index and the queries are encoded otherwise
# than the model was trained.
#
# Source: sentence_transformers/sentence_transformer/model.py, encode_query
# and encode_document; base/model.py, prompts.
#
# Seen: encode has the prompt True, encode_query False, encode_document False
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 sentence-transformers==6.2.0
cd "$work"
cat > program.py <<'END'
import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"[PAD]": 0, "[UNK]": 1, "red": 2, "query": 3, ":": 4}
tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
table = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
layer = StaticEmbedding(tokenizer, embedding_weights=table)
model = SentenceTransformer(
  modules=[layer], device="cpu", prompts={"web": "query: "},
  default_prompt_name="web",
)
prompted = model.encode("query: red", prompt="")
seen = [
  bool(np.allclose(encode("red"), prompted))
  for encode in (model.encode, model.encode_query, model.encode_document)
]
print("encode has the prompt", seen[0], "encode_query", seen[1], end=" ")
print("encode_document", seen[2])
if seen != [True, False, False]:
  raise SystemExit("changed: the default prompt is used otherwise")
END
"$work/env/bin/python" program.py
