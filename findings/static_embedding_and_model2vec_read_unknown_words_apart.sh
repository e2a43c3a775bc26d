#!/bin/sh
# sentence-transformers==6.2.0, model2vec==0.10.0
#
# StaticEmbedding.from_model2vec gives another vector than the model2vec model
# it was read from wherever a text has an unknown word: model2vec leaves the
# word out, sentence-transformers averages in the row of [UNK]. It does not
# normalise either.
#
# Why it surprises: weights and token mapping are carried over, and texts of
# known words have the same direction. With the unknown word, the cosine of
# the two is far from 1.
#
# Whom it hurts: an index encoded with one library and queried with the other.
#
# Source: model2vec/model.py, StaticModel.tokenize;
# sentence_transformers/sentence_transformer/modules/static_embedding.py,
# from_model2vec.
#
# Seen: cosine 1.00 for known words, 0.75 with an unknown one; norms 1.00 and
# 2.83
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 sentence-transformers==6.2.0 model2vec==0.10.0
cd "$work"
cat > program.py <<'END'
import numpy as np
from model2vec import StaticModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"[PAD]": 0, "[UNK]": 1, "red": 2, "apple": 3}
tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
table = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
StaticModel(table, tokenizer, normalize=True).save_pretrained("model")
first = StaticModel.from_pretrained("model")
layer = StaticEmbedding.from_model2vec("model")
second = SentenceTransformer(modules=[layer], device="cpu")


def cosine(text):
  one, other = first.encode(text), second.encode(text)
  size = np.linalg.norm(other)
  return float(one @ other / np.linalg.norm(one) / size), float(size)


known, unknown = cosine("red apple"), cosine("red zzz")
print(f"cosine {known[0]:.2f} for known words, {unknown[0]:.2f} with an unknown")
print(f"norms 1.00 and {known[1]:.2f}")
if known[0] < 0.999 or unknown[0] > 0.99:
  raise SystemExit("changed: unknown words are read alike")
END
"$work/env/bin/python" program.py
