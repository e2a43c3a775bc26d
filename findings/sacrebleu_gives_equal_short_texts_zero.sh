#!/bin/sh
# sacrebleu==2.6.0
#
# corpus_bleu of texts that equal their references is 0, without a warning, if
# none of them has four words. With one longer text among them it is 100.
# sentence_bleu of the same texts is 100 each.
#
# Why it surprises: a corpus without 4-grams has no 4-gram precision, neither 0
# nor 1. Smoothing, on by default, is known to help short texts, but not here;
# use_effective_order, which would, is on for sentences and off for corpora.
#
# Whom it hurts: who measures generated search queries or keywords, most of
# which are shorter than four words: 0 reads as "nothing in common", and a
# single longer query decides the score.
#
# Source: sacrebleu/metrics/bleu.py, compute_bleu.
#
# Seen: equal texts of three words: corpus 0, each alone 100; and one of five:
#   corpus 100; with use_effective_order: 100
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet sacrebleu==2.6.0
cd "$work"
cat > program.py <<'END'
import sacrebleu

short = ["boat to island", "weather in rome", "cheap red shoes"]
longer = [*short, "how to tie a tie"]


def measure(texts, **options):
  return sacrebleu.corpus_bleu(texts, [texts], **options).score


alone = min(sacrebleu.sentence_bleu(text, [text]).score for text in short)
found = measure(short), measure(longer)
effective = measure(short, use_effective_order=True)
print(
  f"equal texts of three words: corpus {found[0]:.0f}, each alone {alone:.0f};"
  f" and one of five: corpus {found[1]:.0f};"
  f" with use_effective_order: {effective:.0f}"
)
if found[0] != 0 or round(found[1]) != 100:
  raise SystemExit("changed: short corpora have another score")
END
"$work/env/bin/python" program.py
