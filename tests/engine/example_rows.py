"""One row of each kind, as tests of what a run writes and shows use them."""

from fedshard.engine.rows import EvalRow, RoundRow, StepRow, Summary

STEP = StepRow(
    step=7,
    tokens=28672,
    loss=2.25,
    group_losses=[2.0, 2.5],
    learning_rate=0.003,
    grad_norms=[0.5, 0.75],
    tokens_per_second=4096.0,
    seconds=1.0,
)
ROUND = RoundRow(
    round=2,
    step=7,
    tokens=28672,
    sent_bytes=2_477_824,
    seconds=0.25,
    exposed_seconds=0.25,
    delta_norm=None,
    group_delta_norms=None,
    agreement=None,
    spread=[0.5, 0.5],
    weights=[0.5, 0.5],
    excluded=[],
)
EVALUATION = EvalRow(step=7, tokens=28672, loss=2.0, perplexity=7.389, sequences=256)
SUMMARY = Summary(
    strategy="FL+FSDP",
    layout="2×1×2",
    tokens=802_816,
    steps=196,
    rounds=19,
    seconds=100.0,
    tokens_per_second=8028.16,
    steady_tokens_per_second=8500.0,
    train_loss=1.75,
    eval_loss=2.0,
    eval_perplexity=7.389,
    round_sent_bytes=2_477_824,
    peak_memory_bytes=79_200_000,
    rss_bytes=900_000_000,
)
