"""The measures of generated replies by what they need."""

OVERLAP_METRICS = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider")
"""Need no file."""
VECTOR_METRICS = ("embedding_average", "vector_extrema", "greedy_matching")
"""Need word vectors."""
SENTENCE_METRIC = "sentence_cosine"
"""Needs a sentence encoder."""
DIALOGUE_METRICS = (*OVERLAP_METRICS, SENTENCE_METRIC, *VECTOR_METRICS)
