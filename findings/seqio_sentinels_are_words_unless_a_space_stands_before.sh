#!/bin/sh
# seqio==0.0.20, sentencepiece==0.2.3
#
# seqio's SentencePieceVocabulary reads "red <extra_id_0>" as red and the
# sentinel, and "red<extra_id_0>" as a dozen pieces of text. transformers
# reads a sentinel in both.
#
# Why it surprises: a sentinel is a user-defined symbol of the model, which
# SentencePiece finds anywhere in a text. seqio adds it with the mark of a
# word's beginning as its first character.
#
# Whom it hurts: prompts and tests that are written as text, such as "a
# <extra_id_0>." or a sentinel after a bracket.
#
# Source: seqio/vocabularies.py, SentencePieceVocabulary._load_model.
#
# Seen: with a space 1 id more than "red", without a space 9
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet seqio==0.0.20 tensorflow==2.21.0 tensorflow-text==2.21.1 sentencepiece==0.2.3
cd "$work"
cat > program.py <<'END'
import sentencepiece
import seqio

with open("text.txt", "w") as file:
  file.write("the red apple fell by the green tree\na blue sea, a red car\n" * 50)
sentencepiece.SentencePieceTrainer.train(
  input="text.txt", model_prefix="model", vocab_size=60, hard_vocab_limit=False,
  pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
)
vocabulary = seqio.SentencePieceVocabulary("model.model", extra_ids=10)
word, sentinel = vocabulary.encode("red"), vocabulary.vocab_size - 1
apart = vocabulary.encode("red <extra_id_0>")
joined = vocabulary.encode("red<extra_id_0>")
print("with a space", len(apart) - len(word), "without", len(joined) - len(word))
if apart != [*word, sentinel] or sentinel in joined:
  raise SystemExit("changed: sentinels are read without a space, too")
END
"$work/env/bin/python" program.py
