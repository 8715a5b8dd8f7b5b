import gzip
import json

import pytest
import torch

from recipes.telemetry.profiler import NoProfile, ProfileWindow


def train(window, steps):
    for step in steps:
        with window.step(step):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    window.close()


def step_names(path):
    """The steps in a trace, each with its one matrix product."""
    with gzip.open(path) as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    steps = {name for name in names if name.startswith("step ")}
    assert names.count("aten::mm") == len(steps)
    return steps


def test_a_loadable_trace_of_exactly_the_window(tmp_path):
    train(ProfileWindow(2, 3, tmp_path / "profile", rank=1), range(1, 6))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "trace_rank1_steps2-3.json.gz"
    assert step_names(trace) == {"step 2", "step 3"}


def test_a_run_that_ends_inside_the_window_still_writes(tmp_path):
    train(ProfileWindow(2, 9, tmp_path, rank=0), range(1, 4))
    assert step_names(tmp_path / "trace_rank0_steps2-3.json.gz") == {"step 2", "step 3"}


def test_a_run_resumed_inside_the_window_records_the_rest(tmp_path):
    train(ProfileWindow(2, 4, tmp_path, rank=0), range(4, 6))
    assert step_names(tmp_path / "trace_rank0_steps4-4.json.gz") == {"step 4"}


def test_a_run_that_never_meets_the_window_writes_nothing(tmp_path):
    train(ProfileWindow(8, 9, tmp_path / "profile", rank=0), range(1, 4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (5, 4), (-1, -1)])
def test_an_impossible_window_is_refused(tmp_path, start, stop):
    with pytest.raises(ValueError, match=rf"telemetry\.profile_steps=\[{start},{stop}\].*\[10,12\]"):
        ProfileWindow(start, stop, tmp_path, rank=0)


def test_the_null_object_runs_the_body():
    ran = []
    with NoProfile().step(1):
        ran.append(1)
    NoProfile().close()
    assert ran == [1]
