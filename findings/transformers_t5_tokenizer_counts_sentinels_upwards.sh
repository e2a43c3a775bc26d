#!/bin/sh
# transformers==5.24.0
#
# T5Tokenizer(vocab=pieces, extra_ids=100) gives <extra_id_0> the id right
# after the pieces and <extra_id_99> the last one. T5's checkpoints, seqio and
# transformers 4 have it the other way: <extra_id_0> is the last id, 32099.
#
# Why it surprises: the number of ids, the names and a round trip through the
# tokenizer are all right, and the code's own comment says "extra_ids in
# reverse".
#
# Whom it hurts: whoever builds a T5 tokenizer from a vocabulary of pieces for
# a model trained by T5X: span corruption asks for the wrong sentinels.
#
# Source: transformers/models/t5/tokenization_t5.py, T5Tokenizer.__init__.
#
# Seen: <extra_id_0> 5, <extra_id_99> 104
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet transformers==5.24.0
cd "$work"
cat > program.py <<'END'
from transformers import T5Tokenizer

pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581red", -1.0)]
pieces.append(("\u2581sea", -1.5))
tokenizer = T5Tokenizer(vocab=pieces, extra_ids=100)
first, last = tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_99>"])
ids = tokenizer("red <extra_id_0> sea").input_ids
print("<extra_id_0>", first, "<extra_id_99>", last, ids)
if (first, last, ids) != (5, 104, [3, 5, 4, 1]):
  raise SystemExit("changed: sentinels have other ids")
END
"$work/env/bin/python" program.py
