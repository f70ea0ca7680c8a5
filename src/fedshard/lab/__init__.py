"""Experiments: emulated clusters and comparisons; starts processes and reads run folders."""
