"""The report's plots: round axes, gaps where nothing was measured, lengths in proportion."""

import re

import pytest

from headtrain.eval.plots import Bar, Series, bar_plot, line_plot, share_plot, ticks


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.52, [0, 0.2, 0.4, 0.6]),
        (1, 1.74, [1, 1.2, 1.4, 1.6, 1.8]),
        (0, 1600, [0, 500, 1000, 1500, 2000]),
        (3, 3, [3, 4, 5, 6]),
    ],
)
def test_axis_marks_are_round_and_cover_the_values(low, high, marks):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert found == pytest.approx(marks)


def test_a_value_that_was_not_measured_leaves_a_gap():
    points = [(0, 1.0), (1, 2.0), (2, None), (3, float("nan")), (4, 1.0), (5, 2.0), (6, 3.0)]
    svg = line_plot([Series("a", "c", points)], "x", "y")
    assert [len(line.split()) for line in re.findall(r'points="([^"]+)"', svg)] == [2, 3]
    assert svg.count("<circle") == 5 and "nan" not in svg


def test_a_single_point_is_drawn_even_without_dots():
    assert line_plot([Series("a", "c", [(1, 1.0)])], "x", "y", dots=False).count("<circle") == 1


def test_higher_values_stand_higher_and_later_ones_further_right():
    svg = line_plot([Series("a", "c", [(0, 0.0), (1, 0.5), (2, 1.0)])], "x", "y")
    places = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert places[0][1] > places[2][1]


def test_values_below_the_wanted_start_of_the_axis_are_still_inside_the_plot():
    svg = line_plot([Series("a", "c", [(0, -0.5), (1, 1.0)])], "x", "y", y_low=0.0)
    assert max(float(p.split(",")[1]) for p in re.search(r'points="([^"]+)"', svg)[1].split()) <= 270


def test_a_doubling_takes_the_same_width_on_a_doubling_axis():
    svg = line_plot([Series("a", "c", [(1, 1.0), (2, 1.0), (8, 1.0)], dots=False)], "x", "y", x_log=True)
    at = [float(p.split(",")[0]) for p in re.search(r'points="([^"]+)"', svg)[1].split()]
    assert at[2] - at[1] == pytest.approx(2 * (at[1] - at[0]), abs=0.2) and "<circle" not in svg
    assert re.findall(r'text-anchor="middle">(\d+)<', svg) == ["1", "2", "8"]


def test_a_marked_value_lies_inside_the_plot_though_no_line_reaches_it():
    svg = line_plot([Series("a", "c", [(1, 0.2), (2, 0.4)])], "x", "y", mark=1.0)
    line = float(re.search(r'class="mark"[^>]* y1="([\d.]+)"', svg)[1])
    assert 0 < line < min(float(y) for y in re.findall(r'cy="([\d.]+)"', svg))


def test_bars_are_as_long_as_their_values_and_missing_ones_say_so():
    svg = bar_plot([Bar("a", "c", 1.0), Bar("b", "c", 2.0, [1.8, 2.4]), Bar("c", "c", None)])
    short, long = (float(w) for w in re.findall(r'<rect[^>]* width="([\d.]+)"', svg))
    assert long == pytest.approx(2 * short, abs=0.2)
    assert svg.count("whisker") == 1 and "not measured" in svg


def test_shares_fill_the_width_in_proportion():
    svg = share_plot([("a", [("x", "c", 0.25), ("y", "c", 0.75)])])
    first, second = (float(w) + 2 for w in re.findall(r'<rect[^>]* width="([\d.]+)"', svg))
    assert second == pytest.approx(3 * first, abs=0.2)


def test_nothing_to_plot_gives_nothing():
    assert line_plot([Series("a", "c", [(0, None)])], "x", "y") == ""
    assert bar_plot([Bar("a", "c", None)]) == "" and share_plot([]) == ""
