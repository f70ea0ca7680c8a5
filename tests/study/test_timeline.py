"""What is drawn of a simulation, and where."""

from fedshard.study.ranks import Interval
from fedshard.study.timeline import bars_of, draw_timeline

INTERVALS = [
    Interval(3, "group", "round 0", 1.5, 9.0),
    Interval(3, "compute", "forward a", 0.0, 1.25),
    Interval(3, "compute", "backward a", 1.25, 1.5),
    Interval(0, "compute", "forward a", 0.0, 1.0),
    Interval(0, "shard", "gather b", 1.0, 1.75),
]


def test_bars_end_at_the_figure_s_edges():
    """From 1 s to 2 s, in milliseconds; rank by rank, and each stream in its place."""
    bars = bars_of(INTERVALS, 1.0, 2.0)
    assert list(bars.items()) == [
        ((0, "shard"), {"gather": [(0.0, 750.0)]}),
        ((3, "compute"), {"forward": [(0.0, 250.0)], "backward": [(250.0, 250.0)]}),
        ((3, "group"), {"round": [(500.0, 500.0)]}),
    ]


def test_the_same_events_are_the_same_file(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw_timeline(INTERVALS, tmp_path / name, 0.0, 2.0)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
