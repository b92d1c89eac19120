"""A demonstration that needs no download: a corpus, two small Llama models trained on it, and nothing else."""
