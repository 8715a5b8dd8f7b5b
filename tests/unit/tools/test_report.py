from __future__ import annotations

import html.parser
import io
import json
import math

import numpy as np
import pytest

from recipes.config import Config, WandbMode
from recipes.description import to_yaml
from recipes.validation import prepare
from tests.fake_runs import fake_run
from tests.ranks import forked, run_ranks
from tests.tiny import tiny_config, tiny_moe_config
from tools.report import figures
from tools.report.__main__ import main
from tools.report.compare import evaluated, row, seconds_to_loss
from tools.report.domains import DomainUse
from tools.report.page import pictures
from tools.report.runs import read_run, read_runs

HOSTILE = "<b>$x_1$ \"'&猫"
ALWAYS = {"loss_steps.png", "loss_seconds.png", "optimizer.png", "domain_losses.png"}


@pytest.fixture
def make(tmp_path):
    """A finished run of 40 steps of 128 tokens, 0.128 s each, evaluated four times."""

    def make(folder, moe=False, evaluations=None, rate=1000.0, **changes):
        config = (tiny_moe_config if moe else tiny_config)(train__steps=40, run__name=folder, **changes)
        return fake_run(tmp_path / folder, config, evaluations or {10: 4.0, 20: 3.5, 30: 3.2, 40: 3.1}, rate)

    return make


def contrast(png):
    """Standard deviation of the grey values of a picture, 0..1."""
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(png), format="png")
    assert pixels.shape[0] > 100 and pixels.shape[1] > 400
    return pixels[..., :3].mean(axis=2).std()


class Tags(html.parser.HTMLParser):
    """All start tags with attributes, and the text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_a_run_as_arrays(make):
    run = read_run(make("sparse", moe=True, rate=500.0))
    assert run.name == "sparse" and run.steps == 40 and len(run.lm_loss_T) == 40
    np.testing.assert_allclose(run.seconds_T, 128 / 500 * np.arange(1, 41))
    assert run.counts_TNE.shape == (40, 1, 4) and (run.counts_TNE.sum(axis=2) == 128).all()
    assert [(e.step, e.nll) for e in run.evaluations] == [(10, 4.0), (20, 3.5), (30, 3.2), (40, 3.1)]
    assert run.evaluations[1].seconds == pytest.approx(20 * 128 / 500)
    assert run.evaluations[1].by_domain == pytest.approx({"en": 3.0, "ja": 4.0})


def test_values_that_are_not_finite_are_gaps(make):
    folder = make("broken")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"lm_loss": None, "nonfinite": {"lm_loss": "inf"}}
    del first["grad_norm"]
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:], '{"step": 41, "lm_l']))
    run = read_run(folder)
    assert run.lm_loss_T[0] == math.inf and math.isnan(run.grad_norm_T[0]) and run.steps == 40
    assert all(contrast(picture.png) > 0.02 for picture in pictures([run], {}))


def test_numbers_of_a_run(make):
    dense = read_run(make("dense"))
    sparse = read_run(make("sparse", moe=True, rate=500.0, evaluations={10: 3.7, 20: 3.3, 30: 2.9, 40: 2.8}))
    values = row(sparse, dense)
    assert values["nll"] == 2.8 and values["nll_by_domain"] == pytest.approx({"en": 2.3, "ja": 3.3})
    assert values["steps"] == 40 and values["tokens_per_second"] == pytest.approx(500)
    assert values["seconds"] == pytest.approx(40 * 128 / 500) and values["wall_seconds"] == 99.0
    assert values["active_params"] < values["total_params"]
    # From 3.3 after 5.12 s to 2.9 after 7.68 s: 3.1 is half-way.
    assert values["seconds_to_dense_loss"] == pytest.approx(6.4)
    assert row(dense, dense)["seconds_to_dense_loss"] == pytest.approx(dense.seconds)
    assert "seconds_to_dense_loss" not in row(sparse)


@pytest.mark.parametrize(
    ("evaluations", "seconds"),
    [
        ({10: 3.0, 40: 2.0}, 1.28),  # before the first evaluation nothing is known
        ({10: 4.0, 20: 3.1, 30: 3.4, 40: 3.0}, 2.56),  # the first time counts
        ({10: 4.0, 40: 3.2}, None),
        ({10: math.nan, 20: 3.0, 40: 3.0}, 2.56),  # no line from a loss that is none
        ({10: math.inf, 20: 3.5, 40: 2.7}, 3.84),
    ],
)
def test_seconds_to_a_loss(make, evaluations, seconds):
    found = seconds_to_loss(read_run(make("run", evaluations=evaluations)), 3.1)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_run_that_was_not_evaluated_at_its_end_has_no_loss_to_compare(make):
    run = read_run(make("stopped", evaluations={10: 4.0}))
    assert row(run)["nll"] is None and row(run)["nll_by_domain"] == {}
    with pytest.raises(ValueError, match="not evaluated after its last step, 40"):
        evaluated(run)


def test_smoothing():
    values = np.array([1.0, 2.0, np.nan, 4.0, np.inf, 9.0])
    np.testing.assert_allclose(figures.smooth(values, 1), [1, 2, np.nan, 4, np.nan, 9])
    np.testing.assert_allclose(figures.smooth(values, 3), [1.5, 1.5, 3, 4, 6.5, 9])
    np.testing.assert_allclose(figures.smooth(np.arange(50.0), 5)[2:-2], np.arange(50.0)[2:-2])
    assert [figures.window(n) for n in (1, 99, 100, 1000)] == [1, 1, 3, 21]


@pytest.mark.parametrize("number", [1, 12])
def test_pictures_of_one_and_of_many_dense_runs(make, number):
    runs = [read_run(make(f"run {index}", run__seed=index)) for index in range(number)]
    shown = {picture.file: picture for picture in pictures(runs, {})}
    assert set(shown) == ALWAYS
    assert all(contrast(picture.png) > 0.02 for picture in shown.values())
    with pytest.raises(ValueError, match="at most 14"):
        next(pictures(runs * 15, {}))


def test_a_blank_picture_would_be_noticed():
    from matplotlib.figure import Figure

    assert contrast(figures.render(lambda: Figure((5, 3)))) < 0.02


@pytest.mark.parametrize(("layers", "experts"), [(1, 4), (5, 64)])
def test_pictures_of_experts(make, layers, experts):
    run = read_run(
        make("sparse", moe=True, moe__num_moe_experts=experts, moe__moe_layer_freq=1, model__num_layers=layers)
    )
    counts = np.random.default_rng(0).integers(0, 9, (3, layers, experts))
    counts[0] = 0  # text of which no token was counted
    shown = list(pictures([run], {0: DomainUse(["en", "ja", "code"], list(range(layers)), 40, counts)}))
    of_experts = {"experts_1_sparse.png", "gates_1_sparse.png", "domains_1_sparse.png", "stability.png"}
    assert {picture.file for picture in shown} == of_experts | ALWAYS
    assert all(contrast(picture.png) > 0.02 for picture in shown)


def test_layers_with_unlike_numbers_of_experts(make):
    """What a layer does not have is grey, white is an even share of its own, and numbers that do not fit are refused."""
    folder = make(
        "pyramid",
        moe=True,
        moe__num_moe_experts=None,
        moe__num_moe_experts_per_layer=[2, 5],
        moe__moe_layer_freq=1,
    )
    run = read_run(folder)
    assert run.counts_TNE.shape == run.gates_TNE.shape == (40, 2, 5)
    assert (run.counts_TNE.sum(axis=2) == 128).all() and not run.counts_TNE[:, 0, 2:].any()
    assert np.isnan(run.gates_TNE[:, 0, 2:]).all() and np.isfinite(run.gates_TNE[:, 0, 1]).all()
    experts = {0: 2, 1: 5}
    load = figures.expert_load(run, experts).axes[0].images[0]
    times_NE = load.get_array().filled(np.nan)
    np.testing.assert_allclose([times_NE[0, :2].mean(), times_NE[1].mean()], 1)
    assert np.isnan(times_NE[0, 2:]).all() and load.norm.vcenter == 1
    gates = figures.expert_gates(run, experts).axes[0].images[0].get_array().filled(np.nan)
    assert np.isnan(gates[0, 2:]).all()
    counts_DNE = np.random.default_rng(0).integers(1, 9, (2, 2, 5))
    counts_DNE[:, 0, 2:] = 0
    use = DomainUse(["en", "ja"], [0, 1], 40, counts_DNE)
    panels = figures.domain_experts(use, experts).axes
    assert [panel.images[0].get_array().shape for panel in panels[:2]] == [(2, 2), (2, 5)]
    assert all(contrast(picture.png) > 0.02 for picture in pictures([run], {0: use}))
    path = folder / "metrics.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    first["moe/tokens_per_expert"][0].append(0)
    path.write_text(json.dumps(first) + "\n")
    with pytest.raises(ValueError, match="layers x 2 or 5 experts"):
        read_run(folder)


def test_gates_and_change_of_experts(make):
    run = read_run(make("sparse", moe=True))
    assert run.gates_TNE.shape == run.counts_TNE.shape and np.isnan(run.gates_TNE[:, :, 0]).all()
    assert np.isfinite(run.gates_TNE[:, :, 1:]).all() and np.isfinite(run.z_loss_T).all()
    counts_TNE = np.array([[[4, 0], [1, 1]], [[2, 2], [1, 1]], [[0, 4], [3, 1]]])
    np.testing.assert_allclose(figures.routing_change(counts_TNE), [[0.5, 0], [0.5, 0.25]])


def test_a_run_of_one_step_and_runs_recorded_before_gates_were(make):
    folder = make("sparse", moe=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert all(contrast(picture.png) > 0.02 for picture in pictures([read_run(folder)], {}))
    del lines[0]["moe/gate_mean_per_expert"]
    (folder / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert not [picture for picture in pictures([read_run(folder)], {}) if picture.file.startswith("gates")]


def test_steps_that_were_not_applied_are_marked(make):
    folder = make("guarded")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "lm_loss" in line:
            line["skipped_steps"] = int(line["step"] >= 20) + int(line["step"] >= 30)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.skipped_T.tolist() == [0] * 19 + [1] * 10 + [2] * 11
    panel = figures.stability([run]).axes[0]
    (crosses,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert crosses.get_xdata().tolist() == [20, 30] and "stability.png" in {p.file for p in pictures([run], {})}


def test_the_scaling_picture():
    png = figures.render(lambda: figures.scaling({1: [4.6, 4.61], 4: [4.5, 4.52], 16: [4.4]}, "experts", "nll"))
    assert contrast(png) > 0.02


def test_the_page_holds_everything_and_escapes_names(make, tmp_path, call):
    folders = [str(make("dense")), str(make("sparse", moe=True, optimizer__lr=0.25))]
    out = tmp_path / "out"
    arguments = [*folders, "--out", str(out), "--names", HOSTILE, "_</title>", "--json", str(out / "new" / "runs.json")]
    code, _, err = call("tools.report.__main__", *arguments)
    assert code == 0, err
    page = (out / "index.html").read_text(encoding="utf-8")
    tags = Tags(page)
    names = {tag for tag, _ in tags.found}
    assert names <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "div",
        "table",
        "tr",
        "th",
        "td",
        "img",
    }
    images = [attributes for tag, attributes in tags.found if tag == "img"]
    files = sorted(path.name for path in out.glob("*.png"))
    assert files == sorted(ALWAYS | {"experts_2__title_.png", "gates_2__title_.png", "stability.png"})
    assert len(images) == len(files)
    assert all(attributes["src"].startswith("data:image/png;base64,") and attributes["alt"] for attributes in images)
    assert not [value for _, attributes in tags.found for key, value in attributes.items() if key in ("href", "srcset")]
    assert "//" not in "".join(tags.text.split()) and "url(" not in page and "@import" not in page
    assert HOSTILE in tags.text and "optimizer.lr0.10.25" in tags.text.replace("\n", "")
    assert "experts by domain are left out: " in tags.text and "no checkpoint here" in err
    rows = json.loads((out / "new" / "runs.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [HOSTILE, "_</title>"] and [row["nll"] for row in rows] == [3.1, 3.1]


def test_names_tell_runs_apart(make, tmp_path):
    folders = [make("a"), make("b")]
    assert [run.name for run in read_runs(folders)] == ["a", "b"]
    for folder in folders:
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("name: a", "name: same").replace("name: b", "name: same"))
    assert [run.name for run in read_runs(folders)] == ["a", "b"]  # the folders'
    with pytest.raises(ValueError, match="--names: 1 names for 2 run folders"):
        read_runs(folders, ["one"])
    with pytest.raises(ValueError, match="x: the name of more than one run"):
        read_runs(folders, ["x", "x"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", None, "config.yaml: no such file; name the folder of a run"),
        ("config.yaml", "run: [", "config.yaml: "),
        ("config.yaml", "!!python/object/apply:os.system ['touch owned']", "config.yaml: "),
        (
            "config.yaml",
            to_yaml(Config()).replace("steps: 1000", "steps: many"),
            "config.yaml: train.steps=many: must be an integer",
        ),
        ("metrics.jsonl", None, "metrics.jsonl: no such file"),
        ("metrics.jsonl", "", "metrics.jsonl: no step is recorded"),
        ("metrics.jsonl", "no JSON\n", "metrics.jsonl, line 1: "),
        (
            "metrics.jsonl",
            '{"step": 1, "lm_loss": "x", "tokens_per_second": 1}\n',
            "step 1: lm_loss='x' must be a number",
        ),
        ("metrics.jsonl", '{"step": 1, "lm_loss": 1}\n', "tokens_per_second must be above 0 in every step"),
        ("metrics.jsonl", '{"step": 1, "lm_loss": 1, "tokens_per_second": 1}\n', "in every step as layers x 4"),
        (
            "metrics.jsonl",
            '{"step": 1, "lm_loss": 1, "tokens_per_second": 1, "moe/tokens_per_expert": [[1, 2]]}\n',
            "layers x 4 experts",
        ),
        ("summary.json", "[]", "summary.json: must hold a JSON object"),
        ("summary.json", "{", "summary.json: damaged"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(make, tmp_path, monkeypatch, capsys, file, content, message):
    monkeypatch.chdir(tmp_path)
    folder = make("sparse", moe=True)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    assert main([str(folder), "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "owned").exists()


@pytest.fixture(scope="module")
def sparse_run(tiny_data, tmp_path_factory):
    """A run of two steps with experts in both layers, evaluated on six samples of each of two domains."""
    root = tmp_path_factory.mktemp("sparse")
    config = tiny_moe_config(train__steps=2, train__eval_samples=6, train__micro_batch_size=4, moe__moe_layer_freq=1)
    config.model.vocab_size, config.data.path, config.run.dir = None, str(tiny_data), str(root / "run")
    config.telemetry.wandb_mode = WandbMode.disabled
    run_ranks("run_job", 1, prepare(config, 1, launch_dir=root))
    return root / "run"


@forked
def test_experts_by_domain_of_a_trained_model(sparse_run):
    """Against a router of our own on the inputs of the layers, one sample at a time."""
    import torch

    from recipes.checkpoint.model import open_model
    from recipes.data.dataset import load_dataset
    from recipes.moe.layer import MoeLayer
    from tools.report.domains import domain_use

    use = domain_use(sparse_run)
    assert use.layers == [0, 1] and use.step == 2 and len(use.domains) == 2
    model, config, _ = open_model(sparse_run)
    layers = [module for module in model.modules() if isinstance(module, MoeLayer)]
    expected_DNE, domain = np.zeros_like(use.counts_DNE), 0

    def count(module, inputs):
        logits_TE = inputs[0].reshape(-1, inputs[0].shape[-1]) @ module.routed.router.t()
        ids = logits_TE.topk(2).indices.reshape(-1)
        expected_DNE[domain, layers.index(module)] += torch.bincount(ids, minlength=4).numpy()

    for layer in layers:
        layer.register_forward_pre_hook(count)
    dataset = load_dataset(config.data.path)
    for domain, name in enumerate(use.domains):  # noqa: B007 - the hook reads it
        source = dataset.open(name, "valid")  # owns the memory of its ids
        for sample in source.ids[: 6 * 16].astype(np.int64).reshape(6, 1, 16):
            with torch.no_grad():
                model.logits(torch.from_numpy(sample))
    assert (expected_DNE.sum(axis=2) == 6 * 16 * 2).all()  # samples x tokens x experts per token
    np.testing.assert_array_equal(use.counts_DNE, expected_DNE)
    np.testing.assert_allclose(use.share_DNE.sum(axis=2), 1)
    assert (use.counts_DNE[0] != use.counts_DNE[1]).any()


def test_the_report_shows_experts_by_domain(sparse_run, tmp_path, call):
    code, _, err = call("tools.report.__main__", sparse_run, "--out", tmp_path)
    assert code == 0 and "left out" not in err
    (file,) = tmp_path.glob("domains_1_*.png")
    assert contrast(file.read_bytes()) > 0.02
