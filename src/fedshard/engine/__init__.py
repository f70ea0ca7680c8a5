"""Training: ranks, shards, rounds, data, evaluation."""
