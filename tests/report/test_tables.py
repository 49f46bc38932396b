"""One table in five formats, and the comparison of methods."""

from __future__ import annotations

import csv
import io
import math

import pytest
from rich.console import Console

from metacal.errors import InputError
from metacal.report.tables import Column, Range, Spread, Table, budgets, column_of, methods_table, summarise

TABLE = Table(
    [column_of("accuracy"), column_of("ece"), Column("note", "A & B")],
    [
        ("focal_1", [0.9123456, Range(0.05, 0.04, 0.06), "x|y"]),
        ("gamma-net", [0.905, Range(0.0123, 0.01, 0.02), None]),
        ("ce", [Spread(0.9123, 0.002), math.nan, "[red]"]),
    ],
    corner="method",
    title="Test split",
    notes=["three methods"],
)


def test_text():
    assert TABLE.render("text").splitlines() == [
        "Test split",
        "method       Accuracy %               ECE %   A & B",
        "─────────  ─────────────  ──────────────────  ─────",
        "focal_1           91.23*  5.00 [4.00, 6.00]     x|y",
        "gamma-net         90.50   1.23 [1.00, 2.00]*      –",
        "ce         91.23 ± 0.20*                  –   [red]",
        "three methods",
        "* best of its column",
    ]
    assert str(TABLE) == TABLE.render("text")


def test_markdown():
    assert TABLE.render("markdown").splitlines() == [
        "**Test split**",
        "",
        "| method | Accuracy % | ECE % | A & B |",
        "| --- | ---: | ---: | ---: |",
        r"| focal_1 | **91.23** | 5.00 [4.00, 6.00] | x\|y |",
        "| gamma-net | 90.50 | **1.23 [1.00, 2.00]** | – |",
        "| ce | **91.23 ± 0.20** | – | [red] |",
        "",
        "three methods",
    ]


def test_csv_holds_fractions_in_full_precision():
    rows = list(csv.DictReader(io.StringIO(TABLE.render("csv"))))
    assert rows[0] == {
        "method": "focal_1",
        "accuracy": "0.9123456",
        "accuracy_std": "",
        "ece": "0.05",
        "ece_low": "0.04",
        "ece_high": "0.06",
        "note": "x|y",
    }
    assert rows[2]["accuracy_std"] == "0.002" and rows[1]["note"] == ""


def test_latex_escapes():
    text = TABLE.render("latex")
    assert r"method & Accuracy \% & ECE \% & A \& B \\" in text
    assert r"focal\_1 & \textbf{91.23} & 5.00 [4.00, 6.00] & x|y \\" in text
    assert r"\textbf{91.23 $\pm$ 0.20}" in text and r"\caption{Test split}" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("width", [31, 45, 60, 200])
def test_rich_cuts_nothing_off(width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(TABLE)
    text = out.getvalue()
    for cell in ("91.23 ± 0.20", "5.00 [4.00, 6.00]", "1.23 [1.00, 2.00]", "x|y", "[red]", "three methods"):
        assert cell in text
    assert text.count("gamma-net") == {31: 3, 45: 2, 60: 1, 200: 1}[width]


def test_the_best_is_marked_as_shown_and_only_among_several():
    tie = Table([column_of("nll")], [("a", [0.12341]), ("b", [0.12339]), ("c", [0.2])])
    assert tie.render("text").count("0.1234*") == 2
    assert "*" not in Table([column_of("nll")], [("a", [0.1])]).render("text")
    assert "**" not in Table([column_of("temperature")], [("a", [1.0]), ("b", [2.0])]).render("markdown")


def test_a_table_without_rows_has_its_header():
    empty = Table([column_of("nll")], [], corner="method")
    assert "NLL" in empty.render("text") and empty.render("csv") == "method,nll\n"
    Console(file=io.StringIO()).print(empty)


def test_bad_tables_are_named():
    with pytest.raises(InputError, match="row 'a' must have 1 cells"):
        Table([column_of("nll")], [("a", [1.0, 2.0])])
    with pytest.raises(InputError, match="format must be one of text, markdown, csv, latex, got 'html'"):
        TABLE.render("html")


# --------------------------------------------------------------------------------------------- comparison

RUN = {"test/accuracy": 0.9, "test/nll": 0.4, "test/nll_scaled": 0.3, "test/ece": 0.08, "test/ece_scaled": 0.02}


def test_comparison_has_a_row_before_and_a_row_after_scaling():
    table = methods_table({"focal": RUN, "ours": {k.removeprefix("test/"): v / 2 for k, v in RUN.items()}})
    assert [c.header for c in table.columns] == ["Scaling", "Accuracy %", "NLL", "ECE %"]
    assert table.rows == [
        ("focal", ["none", 0.9, 0.4, 0.08]),
        ("ours", ["none", 0.45, 0.2, 0.04]),
        ("focal", ["temperature", 0.9, 0.3, 0.02]),
        ("ours", ["temperature", 0.45, 0.15, 0.01]),
    ]
    assert "temperature, fitted on validation" in " ".join(table.notes)
    text = table.render("text").splitlines()
    assert [line.count("*") for line in text[2:6]] == [1, 2, 1, 2]  # the best before and the best after


def test_comparison_without_scaling_and_with_a_missing_value():
    table = methods_table({"a": RUN, "b": {"accuracy": 0.5}}, measures=("accuracy", "ece"), scaled=False)
    assert [c.name for c in table.columns] == ["accuracy", "ece"]
    assert table.rows[1] == ("b", [0.5, None]) and len(table.notes) == 1


def test_comparison_of_several_seeds():
    table = methods_table({"a": [{"nll": 1.0, "ece": 0.1}, {"nll": 2.0}]}, measures=("nll", "ece"))
    assert table.rows[0][1] == [Spread(1.5, pytest.approx(math.sqrt(0.5)))]  # no ECE for a mean of half of the seeds
    assert "over 2 runs" in table.notes[-1]


def test_images_and_steps_of_each_method_are_said_below_the_table():
    def run(steps, **data):
        return RUN | {"steps": steps, "data": data}

    plain = [run(27, train=300, meta=0), run(18, train=300, meta=0)]
    runs = {"focal": plain, "brier": plain, "ours": run(27, train=1270, meta=30, meta_from="train")}
    plain_text = "300 images, in 18 to 27 steps (focal, brier)"
    ours = "1,270 images beside 30 meta images, in 27 steps (ours)"
    assert methods_table(runs).notes[-1] == f"Trained on {plain_text}; {ours}."
    folds = run(27, train=300, meta=0, meta_from="folds")
    (line,) = budgets({"ours": [folds]})
    assert line == "Trained on 300 images, a fold of which is meta at each epoch, in 27 steps."
    assert budgets({"ours": [folds], "older": [RUN]}) == []


def test_summarise():
    assert summarise([]) is None and summarise([1.0, None]) is None
    assert summarise([0.5]) == 0.5 and summarise([1, 3]) == Spread(2.0, pytest.approx(math.sqrt(2)))


def test_bad_comparisons_are_named():
    with pytest.raises(InputError, match="at least one method"):
        methods_table({})
    with pytest.raises(InputError, match="got 'eze'"):
        methods_table({"a": RUN}, measures=("eze",))
