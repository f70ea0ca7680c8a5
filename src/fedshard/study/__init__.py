"""Formal costs: sizes, memory, collectives, predictions. Never imports torch."""
