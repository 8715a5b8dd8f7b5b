import json
import math
import os

import pytest

from recipes.telemetry.jsonl import MetricsFile, read_metrics


def reject_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_each_step_appears_once_after_a_crash_and_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resume_step=None)
    for step in range(1, 58):
        first.write(step, {"lm_loss": 1.0})
    first.close()

    second = MetricsFile(path, resume_step=50)
    for step in range(51, 61):
        second.write(step, {"lm_loss": 2.0})
    second.close()

    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert [row["lm_loss"] for row in rows] == [1.0] * 50 + [2.0] * 10
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file stays behind"


def test_several_lines_of_one_step_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resume_step=None)
    first.write(5, {"lm_loss": 1.0})
    first.write(5, {"eval/lm_loss": 1.5})
    first.close()
    MetricsFile(path, resume_step=5).close()
    assert read_metrics(path) == [{"step": 5, "lm_loss": 1.0}, {"step": 5, "eval/lm_loss": 1.5}]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lm_lo', b'{"step": 3}', '{"step": 3, "text": "日'.encode()[:-1], b"\0\0\0"]
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]

    resumed = MetricsFile(path, resume_step=2)
    resumed.write(3, {"lm_loss": 0.5})
    resumed.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_lines_are_on_disk_before_the_file_is_closed(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", resume_step=None)
    metrics.write(1, {"lm_loss": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_non_finite_values_are_strict_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, resume_step=None)
    metrics.write(1, {"lm_loss": math.nan, "grad_norm": -math.inf, "lr": 0.1})
    metrics.close()

    assert json.loads(path.read_text(), parse_constant=reject_constant) == {
        "step": 1,
        "lm_loss": None,
        "grad_norm": None,
        "lr": 0.1,
        "nonfinite": {"lm_loss": "nan", "grad_norm": "-inf"},
    }
    (row,) = read_metrics(path)
    assert math.isnan(row.pop("lm_loss"))
    assert row == {"step": 1, "grad_norm": -math.inf, "lr": 0.1}


def test_a_new_run_refuses_an_existing_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl exists.*run\.resume=auto"):
        MetricsFile(path, resume_step=None)
    assert path.read_text() == '{"step": 1}\n'


def test_a_resumed_run_in_a_fresh_folder_starts_a_file(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl", resume_step=50).write(51, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [51]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"lm_loss": 1}', '{"step": "1"}'])
def test_a_broken_line_inside_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match="line 2"):
        MetricsFile(path, resume_step=3)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"step": 2, "x": ' + "[" * 500 + "]" * 500 + "}",
        '{"step": true}',
        '{"step": -1}',
        '{"step": 9223372036854775808}',
        '{"step": 2, "lm_loss": NaN}',
        '{"step": 2, "lm_loss": 1e999}',
        '{"step": 2, "nonfinite": 3}',
        '{"step": 2, "nonfinite": {"lm_loss": "a lot"}}',
        '{"step": 2, "nonfinite": {"lm_loss": [1]}}',
    ],
)
def test_a_line_that_was_not_written_here_is_refused_by_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    for use in (read_metrics, lambda path: MetricsFile(path, resume_step=3)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object with an integer 'step'"):
            use(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(path := tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="no regular file"):
        read_metrics(path)
    with pytest.raises(ValueError, match="no regular file"):
        MetricsFile(path, resume_step=1)
