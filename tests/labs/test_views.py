"""What people read about labs and findings: places, the number that decides, formulas in HTML, and recorded results."""

from __future__ import annotations

import json

import pytest

from manyheads.errors import UsageError
from manyheads.labs import results
from manyheads.labs.claims import read_claims
from manyheads.labs.finding import Check, Finding, at_most, equals, is_true, judging, reported
from manyheads.labs.lab import all_labs, run_lab
from manyheads.labs.results import LabError, claim_tree, outcome_tree, read_runs
from manyheads.labs.views.explain import citation, code_of, deciding_check, evidence
from manyheads.labs.views.page_html import inline


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("S3", "Lecture 6: attention and transformers"),
        ("S0 (a, b), S3", "Exam problem: transformers and pretraining, (a, b); Lecture 6: attention and transformers"),
        ("S0, S1, S2, S3, S4", "all documents"),
    ],
)
def test_a_source_becomes_the_place_in_its_document(source, text):
    assert citation(source) == text


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("v_a and μ_b", "v<sub>a</sub> and μ<sub>b</sub>"),
        ("u_bᵀ", "u<sub>b</sub>ᵀ"),
        ("`q_i` < k_max", "<code>q_i</code> &lt; k<sub>max</sub>"),
        ("a_long_name, test_a", "a_long_name, test_a"),
    ],
)
def test_formulas_have_subscripts_and_code_is_left_alone(text, html):
    assert inline(text) == html


def test_the_check_that_decides_is_the_one_that_fails_then_the_one_that_is_open_then_a_number():
    number, word, wrong = at_most("a", 1.0, 2.0), is_true("b", True), equals("c", 1, 2)
    undecided = Check("d", "not measured", "≤ 2")
    assert deciding_check(Finding((reported("x", 1), word, number))) is number
    assert deciding_check(Finding((number, undecided))) is undecided
    assert deciding_check(Finding((number, undecided, wrong))) is wrong


def test_the_evidence_of_an_erratum_is_its_correction_or_else_a_number():
    run = run_lab("copying")
    assert evidence(run).startswith("distance to the value: ")
    assert evidence(LabError(run.lab, "no luck")) == "no luck"


def test_a_run_comes_back_from_json():
    run = run_lab("copying", strength=5, seed=3)
    tree = json.loads(json.dumps(outcome_tree(run)))
    (again,) = read_runs([tree])
    assert outcome_tree(again) == tree
    assert again.command == "manyheads lab run copying --seed 3 --strength 5"
    assert read_runs([tree | {"lab": "gone"}, tree | {"error": "no luck"}]) == []


def test_a_value_that_json_lacks_is_text():
    finding = Finding((Check("x", float("nan"), "≤ 1", False),))
    tree = outcome_tree(run_lab("copying").__class__(all_labs()["copying"], "quick", 0, {}, finding, 0.0))
    assert json.loads(json.dumps(tree, allow_nan=False))["checks"][0]["measured"] == "nan"


def test_the_verdict_of_a_claim_is_the_worst_of_its_labs():
    lab = all_labs()["copying"]
    row = read_claims().rows[lab.rows[0]]
    good, bad = run_lab(lab), run_lab(lab, **lab.counterexample)
    assert claim_tree(row)["verdict"] is None
    assert claim_tree(row, [good])["verdict"] == "holds"
    assert claim_tree(row, [good, bad])["verdict"] == "fails"
    assert claim_tree(row, [good, LabError(lab, "no luck")])["verdict"] == "error"


def test_a_check_of_one_row_decides_no_other():
    finding = Finding(
        (*judging("F2", Check("x", 1.0, "≤ 1", True)), *judging("F3", Check("y", 2.0, "≤ 1", False))),
        correction="y is 2",
        corrected=("F3",),
    )
    assert finding.verdict == finding.row_verdict("F3") == "fails"
    assert finding.row_verdict("F2") == "holds"
    corrected = Finding((Check("x", 1.0, "≤ 1", True),), correction="y is 2", corrected=("F3",))
    assert [corrected.row_verdict(row) for row in ("F2", "F3")] == ["holds", "holds with a correction"]
    of_an_erratum = Finding((Check("x", 1.0, "≤ 1", True),), correction="y is 2")
    assert (of_an_erratum.verdict, of_an_erratum.row_verdict("F2")) == ("holds with a correction", "holds")


def test_a_row_that_no_check_judges_does_not_hold():
    finding = Finding((*judging("F2", Check("x", 1.0, "≤ 1", True)), Check("y", 2.0)))
    assert [finding.row_verdict(row) for row in ("F2", "F3")] == ["holds", "undecided at this size"]


def test_a_correction_of_an_erratum_leaves_its_rows_as_they_are():
    finding = run_lab("bias-as-factor").finding
    assert finding.correction
    assert finding.row_verdict("A21") == "holds"
    assert run_lab("residual-connection").finding.row_verdict("F3") == "holds with a correction"


@pytest.mark.parametrize(("cores", "text"), [(1, "1 core,"), (2, "2 cores,")])
def test_the_machine_is_named_with_its_cores(cores, text, monkeypatch):
    monkeypatch.setattr(results, "available_cores", lambda: cores)
    assert results.machine().startswith(text)


def test_the_code_of_every_lab_can_be_shown():
    for lab in all_labs().values():
        code, path, line = code_of(lab)
        assert code.startswith(("def ", "class ")), lab.id
        assert path.startswith("manyheads/labs/")
        assert line > 0


def test_parameters_are_checked_by_name_and_type():
    for wrong in ({"strengh": 1.0}, {"keys": "7"}, {"keys": 1.5}, {"strength": True}):
        with pytest.raises(UsageError):
            run_lab("copying", **wrong)
    with pytest.raises(UsageError, match="copying"):
        run_lab("copyin")
