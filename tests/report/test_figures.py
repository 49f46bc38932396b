"""Figures draw the bins that gave the number, where they are told to, and leave nothing open."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from metacal.calibration import ece, reliability_bins
from metacal.errors import InputError
from metacal.predictions import Predictions
from metacal.report.figures import (
    confidence_histogram,
    gamma_scatter,
    reliability_curves,
    reliability_diagram,
    wilson_interval,
)


def predictions(n: int = 500, scale: float = 2.0) -> Predictions:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(n, 4, generator=g)
    return Predictions.from_logits(scale * z, torch.multinomial(z.softmax(1), 1, generator=g).squeeze(1))


def test_the_diagram_is_drawn_from_the_bins_of_the_number(tmp_path):
    p = predictions()
    figure = reliability_diagram(p, n_bins=10, interval=(0.1, 0.2), title="a title")
    above, below = figure.axes
    bins = reliability_bins(p, 10)
    full = bins.count > 0
    bars, gaps = above.containers[0], [c for c in above.containers[1:] if "gap" in str(c.get_label())]
    assert [b.get_height() for b in bars] == pytest.approx(bins.accuracy[full].tolist())
    assert [b.get_x() for b in bars] == pytest.approx(bins.lower[full].tolist())
    assert [b.get_height() for b in below.patches] == bins.count.tolist()
    # the gaps as drawn, weighted by the counts as drawn, are the ECE as written
    count = {round(b.get_x(), 6): b.get_height() for b in below.patches}
    drawn = sum(abs(b.get_height()) * count[round(b.get_x(), 6)] for c in gaps for b in c) / len(p)
    assert drawn == pytest.approx(ece(p, n_bins=10))
    assert f"ECE {100 * drawn:.2f} [10.00, 20.00] %" in above.texts[0].get_text()
    assert above.get_title() == "a title"
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_gaps_are_named_by_their_side():
    labels = lambda f: [t.get_text() for t in f.axes[0].get_legend().get_texts()]  # noqa: E731
    assert "gap, overconfident" in labels(reliability_diagram(predictions(scale=6.0)))
    assert "gap, underconfident" in labels(reliability_diagram(predictions(scale=0.2)))


@pytest.mark.parametrize(
    "draw", [reliability_diagram, confidence_histogram, lambda p, **k: reliability_curves({"a": p}, **k)]
)
def test_an_axes_given_is_used_and_its_figure_returned(draw):
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert draw(predictions(), ax=right) is figure
    assert len(figure.axes) == 2 and right.has_data() and not left.has_data()


def test_nothing_stays_open():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    for figure in (reliability_diagram(predictions()), confidence_histogram(predictions())):
        assert isinstance(figure, Figure)
    assert plt.get_fignums() == before


@pytest.mark.parametrize("n", [1, 3])
def test_few_and_extreme_predictions_can_be_drawn(n, tmp_path):
    for probs in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])):
        p = Predictions.from_probabilities(probs.repeat(n, 1), torch.ones(n, dtype=torch.long))
        reliability_diagram(p).savefig(tmp_path / "a.png")
        confidence_histogram(p).savefig(tmp_path / "b.png")
        reliability_curves({"a": p}).savefig(tmp_path / "c.png")


def test_the_histogram_counts_every_sample():
    p = predictions()
    ax = confidence_histogram(p, n_bins=12).axes[0]
    right, wrong = ([b.get_height() for b in c] for c in ax.containers)
    assert sum(right) == p.correct.sum() and sum(right) + sum(wrong) == len(p)


def test_curves_carry_each_methods_ece():
    p, q = predictions(scale=1.0), predictions(scale=4.0)
    ax = reliability_curves({"mild": p, "bold": q}, min_count=1).axes[0]
    texts = [t.get_text() for t in ax.get_legend().get_texts()]
    assert texts == [f"mild (ECE {100 * ece(p):.2f} %)", f"bold (ECE {100 * ece(q):.2f} %)"]
    bins = reliability_bins(q)
    assert ax.lines[2].get_xdata() == pytest.approx(bins.confidence[bins.count > 0].tolist())
    with pytest.raises(InputError, match="at least one"):
        reliability_curves({})


def test_wilson_interval():
    low, high = wilson_interval(torch.tensor([0, 3, 10]), torch.tensor([10, 10, 10]))
    for i, k in enumerate((0, 3, 10)):
        expected = stats.binomtest(k, 10).proportion_ci(0.95, method="wilson")
        assert (low[i].item(), high[i].item()) == pytest.approx((expected.low, expected.high))
    assert wilson_interval(torch.tensor([0]), torch.tensor([0]))[0].isnan()
    with pytest.raises(InputError, match="level must lie"):
        wilson_interval(torch.tensor([1]), torch.tensor([2]), level=95)


def test_gammas_are_drawn_where_they_are():
    g = torch.Generator().manual_seed(1)
    confidence = torch.rand(60, generator=g, dtype=torch.float64)
    gamma = (5 * confidence + torch.rand(60, generator=g, dtype=torch.float64)).round(decimals=1)  # with ties
    correct = torch.rand(60, generator=g) < 0.7
    ax = gamma_scatter(gamma, confidence, correct, n_bins=5, title="a title").axes[0]
    for drawn, chosen in zip(ax.collections, (correct, ~correct)):
        assert torch.equal(torch.as_tensor(drawn.get_offsets().data), torch.stack([confidence, gamma], 1)[chosen])
    order = confidence.argsort().reshape(5, 12)
    for drawn, values in zip(ax.lines[0].get_data(), (confidence, gamma)):
        assert list(drawn) == pytest.approx(values[order].quantile(0.5, dim=1).tolist())
    rank = stats.spearmanr(gamma, confidence).statistic
    assert ax.get_legend().get_title().get_text() == f"rank correlation {rank:.2f}"
    assert f"right ({int(correct.sum())})" in {text.get_text() for text in ax.get_legend().get_texts()}


def test_one_gamma_for_all_and_one_sample_can_be_drawn(tmp_path):
    for n in (1, 7):
        figure = gamma_scatter(torch.full((n,), 3.0), torch.rand(n), torch.ones(n, dtype=torch.bool))
        figure.savefig(tmp_path / "gamma.png")
        assert figure.axes[0].get_legend().get_title().get_text() == "rank correlation nan"
    with pytest.raises(InputError, match="one shape"):
        gamma_scatter(torch.rand(3), torch.rand(4), torch.rand(4) > 0)


def test_type_is_at_least_11_pixels_where_figures_have_100_dots_an_inch():
    from matplotlib.text import Text

    p = predictions()
    gamma = gamma_scatter(torch.rand(50), torch.rand(50), torch.rand(50) > 0.5)
    for figure in (reliability_diagram(p), confidence_histogram(p), reliability_curves({"a": p}), gamma):
        figure.draw_without_rendering()
        sizes = [text.get_fontsize() * 100 / 72 for text in figure.findobj(Text) if text.get_text()]
        assert min(sizes) >= 11
