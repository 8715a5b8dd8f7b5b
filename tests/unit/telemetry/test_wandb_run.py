import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from recipes.config import TelemetryConfig, WandbMode
from recipes.telemetry.wandb_run import NullLogger, choose_run_id, open_run


class FakeRun:
    """A run under the server's rule: a point whose step is below the last one is dropped."""

    def __init__(self, history):
        self.history = history  # (W&B's own step, values) of all processes of this run id
        self.step_metrics = {}
        self.exit_codes = []
        self.broken = False

    def define_metric(self, name, step_metric=None):
        self.step_metrics[name] = step_metric

    def log(self, data, step=None):
        if self.broken:
            raise ConnectionError("server is gone")
        last = self.history[-1][0] if self.history else -1
        step = last + 1 if step is None else step
        if step >= last:
            self.history.append((step, dict(data)))

    def finish(self, exit_code=None):
        self.exit_codes.append(exit_code)
        if self.broken:
            raise TimeoutError("still no server")


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(
            UsageError=type("UsageError", (Exception,), {}),
            AuthenticationError=type("AuthenticationError", (Exception,), {}),
        )
        self.Settings = dict
        self.server = {}  # run id -> history
        self.runs = []
        self.init_calls = []
        self.init_error = None

    def init(self, **kwargs):
        self.init_calls.append(kwargs)
        if self.init_error is not None:
            raise self.init_error
        assert kwargs["id"] not in self.server or kwargs["resume"] in ("allow", None), "would overwrite the run"
        self.runs.append(FakeRun(self.server.setdefault(kwargs["id"], [])))
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # set by an offline run; restored after the test
    return module


def start(folder, mode=WandbMode.online, is_rank_zero=True, run_id=None):
    return open_run(folder, TelemetryConfig(wandb_mode=mode), is_rank_zero, run_id, {"train": {"steps": 60}})


@pytest.mark.parametrize("mode", [WandbMode.online, WandbMode.offline])
def test_resume_from_an_older_checkpoint_loses_no_point(tmp_path, fake, mode):
    run = start(tmp_path, mode)
    for step in range(1, 58):
        run.log(step, {"lm_loss": 1.0})
    run_id_in_checkpoint = run.run_id
    run.finish(failed=True)
    before = len(fake.server[run_id_in_checkpoint])

    run = start(tmp_path, mode, run_id=run_id_in_checkpoint)
    for step in range(51, 61):
        run.log(step, {"lm_loss": 2.0})
    run.log(60, {"eval/lm_loss": 3.0})
    run.finish(failed=False)

    assert list(fake.server) == [run_id_in_checkpoint], "one run"
    resumed = [values for _, values in fake.server[run_id_in_checkpoint][before:]]
    assert [point["train/step"] for point in resumed if "lm_loss" in point] == list(range(51, 61))
    assert resumed[-1] == {"train/step": 60, "eval/lm_loss": 3.0}
    everything = {values["train/step"] for _, values in fake.server[run_id_in_checkpoint]}
    assert everything == set(range(1, 61))
    for session in fake.runs:
        assert session.step_metrics == {"train/step": None, "*": "train/step"}


def test_one_run_per_job(tmp_path, fake):
    ranks = [start(tmp_path, is_rank_zero=rank == 0, run_id="abc") for rank in range(4)]
    for run in ranks:
        run.log(1, {"lm_loss": 1.0})
        run.finish(failed=False)
    assert len(fake.init_calls) == 1
    assert fake.init_calls[0]["id"] == "abc"
    assert len(fake.server["abc"]) == 1
    assert fake.runs[0].exit_codes == [0]
    assert [run.run_id for run in ranks] == ["abc"] * 4


def test_a_failed_run_is_marked_once(tmp_path, fake):
    run = start(tmp_path)
    run.finish(failed=True)
    run.finish(failed=False)
    run.log(2, {})
    assert fake.runs[0].exit_codes == [1]
    assert fake.server[run.run_id] == []


def test_an_outage_does_not_stop_training_and_is_told_once(tmp_path, fake, capfd):
    run = start(tmp_path)
    run.log(1, {"lm_loss": 1.0})
    fake.runs[0].broken = True
    run.log(2, {"lm_loss": 1.0})
    run.log(3, {"lm_loss": 1.0})
    fake.runs[0].broken = False
    run.log(4, {"lm_loss": 1.0})
    fake.runs[0].broken = True
    run.finish(failed=False)
    assert [values["train/step"] for _, values in fake.server[run.run_id]] == [1, 4], "goes on after the outage"
    assert fake.runs[0].exit_codes == [0]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "W&B could not record a point (ConnectionError: server is gone); training goes on, "
        "every step is in metrics.jsonl"
    ]


def test_an_outage_at_the_start_does_not_stop_training(tmp_path, fake, capfd):
    fake.init_error = TimeoutError("no route")
    run = start(tmp_path, run_id="abc")
    run.log(1, {})
    run.finish(failed=False)
    assert run.run_id == "abc", "the checkpoint keeps the id for the next attempt"
    assert "W&B could not start the run (TimeoutError: no route)" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["UsageError", "AuthenticationError"])
def test_a_missing_key_is_an_error_of_the_configuration(tmp_path, fake, kind):
    fake.init_error = getattr(fake.errors, kind)("No API key configured")
    with pytest.raises(ValueError, match=r"telemetry\.wandb_mode=online: No API key.*wandb_mode=offline"):
        start(tmp_path)


def test_an_interrupt_is_not_swallowed(tmp_path, fake, monkeypatch):
    run = start(tmp_path)

    def interrupt(data):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake.runs[0], "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.log(1, {})


def test_disabled_imports_nothing_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    run = start(tmp_path, WandbMode.disabled, run_id="abc")
    run.log(1, {"lm_loss": 1.0})
    run.finish(failed=False)
    assert isinstance(run, NullLogger)
    assert run.run_id == "abc"
    assert list(tmp_path.iterdir()) == []


def test_the_id_is_that_of_the_variable_else_of_the_checkpoint_else_fresh(monkeypatch, capfd):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    assert choose_run_id(None) != choose_run_id(None)
    assert choose_run_id("stored") == "stored"
    monkeypatch.setenv("WANDB_RUN_ID", "sweep123")
    assert choose_run_id(None) == choose_run_id("sweep123") == "sweep123"
    assert capfd.readouterr().out == ""
    assert choose_run_id("stored") == "sweep123"
    assert "W&B run sweep123, as WANDB_RUN_ID; the checkpoint's is stored" in capfd.readouterr().out


def test_names_are_unique_and_variables_are_left_to_wandb(tmp_path, fake, monkeypatch):
    for name in ("WANDB_NAME", "WANDB_DIR", "WANDB_RESUME", "WANDB_QUIET", "WANDB_CONSOLE"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        start(tmp_path)
    first, second = fake.init_calls
    assert first["name"] == f"{tmp_path.name}-{first['id']}" != second["name"] == f"{tmp_path.name}-{second['id']}"
    assert (first["dir"], first["resume"], first["settings"]["console"]) == (tmp_path, "allow", "off")
    for name, value in {
        "NAME": "mine",
        "DIR": str(tmp_path),
        "RESUME": "must",
        "QUIET": "true",
        "CONSOLE": "wrap",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    fake.server["abc"] = []
    start(tmp_path, run_id="abc")
    third = fake.init_calls[-1]
    assert third["name"] is third["dir"] is third["resume"] is None, "so that wandb reads its variables"
    assert not third["settings"].keys() & {"quiet", "console"}


OFFLINE_SESSION = """
import socket, sys
from pathlib import Path

def refuse(*args, **kwargs):
    raise AssertionError("the network was used")

socket.getaddrinfo = refuse
connect = socket.socket.connect
socket.socket.connect = lambda self, to: connect(self, to) if self.family == socket.AF_UNIX else refuse()

from recipes.config import TelemetryConfig
from recipes.telemetry.wandb_run import open_run

assert sys.stdin is None
first, last, failed = map(int, sys.argv[2:])
run = open_run(Path(sys.argv[1]), TelemetryConfig(), True, "abc12345", {"train": {"steps": 4}})
for step in range(first, last + 1):
    run.log(step, {"lm_loss": 1.0 / step})
run.finish(failed=bool(failed))
"""


def history_and_exit(run_folder):
    """train/step of each recorded point, the run record and the exit code, as wandb's own reader finds them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_folder)]
    environment = os.environ | {"WANDB_MODE": "offline"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment).stdout
    records = [json.loads(line) for line in output.splitlines()]
    steps = [record["history"]["item"]["train/step"] for record in records if record["type"] == "history"]
    (run,) = (record["run"] for record in records if record["type"] == "run")
    (end,) = (record["exit"] for record in records if record["type"] == "exit")
    return steps, run, end.get("exit_code", 0)


def test_real_wandb_offline_without_network_key_or_stdin(tmp_path):
    run_folder, home = tmp_path / "run", tmp_path / "home"
    run_folder.mkdir()
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))} | {"HOME": str(home)}
    for first, last, failed in ((1, 3, 1), (2, 4, 0)):  # crash after step 3, checkpoint at step 1
        arguments = [str(run_folder), str(first), str(last), str(failed)]
        command = f'exec "$0" -c "$1" {" ".join(arguments)} <&-'
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, OFFLINE_SESSION],
            env=environment,
            capture_output=True,
            text=True,
            timeout=25,
        )
        assert done.returncode == 0, done.stderr
        assert "could not" not in done.stderr

    assert [file.name for file in run_folder.iterdir()] == ["wandb"]
    first, second = sorted((run_folder / "wandb").glob("offline-run-*-abc12345"))
    steps, run, exit_code = history_and_exit(first)
    assert (steps, run["run_id"], exit_code) == ([1, 2, 3], "abc12345", 1)
    steps, run, exit_code = history_and_exit(second)
    assert (steps, run["run_id"], run["resume"], exit_code) == ([2, 3, 4], "abc12345", True, 0)


def test_no_password_reaches_the_files_of_a_run(tmp_path):
    """With the real wandb, in a repository whose remote has a key, from a command line with a password."""
    git = ["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (
        ["init", "-q"],
        ["commit", "-qm", "first", "--allow-empty"],
        ["remote", "add", "origin", "https://hunter2:hunter2@example.org/x.git"],
    ):
        subprocess.run([*git, *words], check=True, timeout=30)
    code = """if True:
        import sys
        from pathlib import Path
        from recipes.config import TelemetryConfig
        from recipes.telemetry.wandb_run import open_run
        before = list(sys.argv)
        run = open_run(Path(), TelemetryConfig(), True, None, {})
        run.log(1, {"x": 1})
        run.finish(failed=False)
        sys.exit(sys.argv != before)
    """
    proxy = {"HTTPS_PROXY": "http://me:hunter2@127.0.0.1:1", "PIP_INDEX_URL": "https://me:hunter2@example.org/simple"}
    environ = os.environ | proxy | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code, "data.path=https://me:hunter2@example.org"]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=55, capture_output=True)
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
