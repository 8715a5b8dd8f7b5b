from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from recipes.config import RECOMPUTE_MODULES, MoeBackend, Recompute
from recipes.logical import logical_tensors, moe_layers, num_kv_heads, padded_vocab_size
from recipes.pretrain import ROOT, compose
from recipes.topology import Layout
from recipes.validation import problems
from recipes.validation.layouts import legal_layouts
from tools.conformance import compare, sampling, shrink, sweep
from tools.conformance.__main__ import main
from tools.conformance.compare import Errors

EXPERIMENTS = sorted(path.stem for path in (ROOT / "hydra_conf" / "experiment").glob("*.yaml"))


def recipe(name, *overrides):
    return shrink.checked(compose([f"experiment={name}", *overrides]))


def cases_of(name, world_size, *overrides):
    return sampling.legal_cases(shrink.shrink(recipe(name, *overrides), world_size), world_size)


class TestShrink:
    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_every_recipe_becomes_small_and_keeps_its_parts(self, name):
        config = recipe(name)
        small = shrink.shrink(config, 4)
        assert not problems(small, 1, launch_dir=Path.cwd(), dry_run=True)
        assert sum(tensor.numel for tensor in logical_tensors(small).values()) < 150_000

        def heads_per_group(config):
            return config.model.num_attention_heads // num_kv_heads(config.model)

        def parts(config):
            """Kinds of tensors: names without numbers."""
            return {tuple(word for word in name.split(".") if not word.isdecimal()) for name in logical_tensors(config)}

        assert heads_per_group(small) == heads_per_group(config) and parts(small) == parts(config)
        for group, key in (("moe", "moe_router_topk"), ("moe", "moe_layer_freq"), ("moe", "aux_loss_scope")):
            assert getattr(getattr(small, group), key) == getattr(getattr(config, group), key)
        of_all, of_small = moe_layers(config), moe_layers(small)
        assert of_small == [layer for layer in of_all if layer < small.model.num_layers] and bool(of_small) == bool(
            of_all
        )
        assert len(of_small) == len(of_all) or len(of_small) > 1

    @pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
    @pytest.mark.parametrize(
        "changes",
        [
            [],
            ["model.num_attention_heads=6", "model.num_query_groups=3", "model.hidden_size=96"],
            ["model.ffn_hidden_size=342", "moe.moe_ffn_hidden_size=100", "moe.num_moe_experts=12"],
            ["model.num_query_groups=1", "model.seq_length=130", "moe.moe_router_topk=8"],
        ],
    )
    def test_the_small_recipe_has_the_layouts_of_the_large_one(self, world_size, changes):
        config = recipe("top2_8e", *changes)
        small = shrink.shrink(config, world_size)
        config.train.global_batch_size = small.train.global_batch_size
        assert legal_layouts(small, world_size) == legal_layouts(config, world_size)

    @pytest.mark.parametrize(
        ("overrides", "small"),
        [
            (["moe.num_moe_experts_per_layer=[4,64]"], [4, 8]),
            (["moe.num_moe_experts_per_layer=[64,128]"], [8, 12]),  # unlike ones stay so
            (["moe.num_moe_experts_per_layer=[64,64]"], [8, 8]),
            (["moe.num_moe_experts_per_layer=[16,16,16,32,64]", "model.num_layers=10"], [8, 12, 16]),
            (["moe.num_moe_experts_per_layer=[32,8]", "moe.moe_layer_pattern=[1,0,0,1]", "moe.moe_layer_freq=1",
              "moe.moe_layer_offset=0"], [12, 8]),
        ],
    )  # fmt: skip
    def test_layers_with_unlike_numbers_of_experts_are_kept(self, overrides, small):
        config = recipe("pr_moe_4e_8e", *overrides)
        scaled = shrink.shrink(config, 4)
        assert not problems(scaled, 1, launch_dir=Path.cwd(), dry_run=True)
        assert scaled.moe.num_moe_experts_per_layer == small
        config.train.global_batch_size = scaled.train.global_batch_size
        assert [layout for layout in legal_layouts(scaled, 4) if layout.pipeline_parallel_size == 1] == [
            layout for layout in legal_layouts(config, 4) if layout.pipeline_parallel_size == 1
        ]

    @pytest.mark.parametrize("vocab", [60, 501, 4096, 5000, 8192])
    @pytest.mark.parametrize("tied", ["true", "false"])
    def test_a_vocabulary_of_moderate_size_stays_as_it_is(self, vocab, tied):
        words = [f"model.vocab_size={vocab}", f"model.share_embeddings_and_output_weights={tied}"]
        config = recipe("switch_8e", *words, "model.make_vocab_size_divisible_by=32")
        small = shrink.shrink(config, 4).model
        assert (small.vocab_size, small.make_vocab_size_divisible_by) == (vocab, 32)
        assert small.share_embeddings_and_output_weights == (tied == "true")
        assert not [line for line in shrink.changes(config, shrink.shrink(config, 4)) if "vocab" in line]

    def test_a_large_or_unknown_vocabulary_becomes_small_and_padded(self):
        for changes in (["model.vocab_size=8193"], ["model.vocab_size=151936"], []):
            planned = sweep.plan(compose(["experiment=dense", *changes]), 2, "1")
            model = planned.small.model
            assert model.vocab_size == 61 and padded_vocab_size(model, 2) == padded_vocab_size(model, 4) == 64
            assert any(line.startswith("model.vocab_size  ") and line.endswith(" -> 61") for line in planned.notes)

    def test_what_was_scaled_is_told(self):
        config = recipe("qwen3_30b_a3b_64gpu_h100_bf16")
        lines = list(shrink.changes(config, shrink.shrink(config, 4)))
        assert "moe.num_moe_experts  128 -> 16" in lines and "model.num_layers  48 -> 4" in lines
        assert "train.precision  bf16 -> fp32" in lines
        assert not [line for line in lines if "num_query_groups" in line or "moe_router_topk" in line]

    def test_a_wrong_recipe_is_refused_with_all_its_mistakes(self):
        with pytest.raises(
            ValueError, match=r"2 problems\n(.|\n)*num_query_groups=3 must divide(.|\n)*moe_router_topk=9"
        ):
            recipe("top2_8e", "model.num_query_groups=3", "moe.moe_router_topk=9")

    def test_layout_and_folders_of_the_recipe_do_not_matter(self):
        config = recipe("moe_8x7b_64gpu_h100_bf16", "run.dir=/", "parallel.tensor_model_parallel_size=7")
        assert config.parallel.tensor_model_parallel_size == 1 and config.run.dir is None


class TestSampling:
    @pytest.mark.parametrize("name", ["dense", "top2_8e", "fine_grained_32e_top4_shared"])
    @pytest.mark.parametrize(("world_size", "at_least"), [(1, 30), (2, 12), (4, 40), (8, 30)])
    def test_a_sample_has_every_pair_of_options_and_enough_layouts(self, name, world_size, at_least):
        cases, _ = cases_of(name, world_size)
        chosen = sweep.plan(recipe(name), world_size).cases
        assert len(chosen) == len(set(chosen)) >= min(at_least, len(cases)) and set(chosen) <= set(cases)

        def together(cases):
            return {frozenset(pair) for case in cases for pair in itertools.combinations(dict(case.options).items(), 2)}

        assert together(chosen) == together(cases)

    def test_pairs_alone_need_few_layouts_and_the_seed_chooses_them(self):
        cases, _ = cases_of("top2_8e", 4)
        assert len(cases) > 200
        first, second = sampling.sample(cases, 1, 0), sampling.sample(cases, 2, 0)
        assert len(first) < 20 and first != second and first == sampling.sample(cases, 1, 0)

    def test_options(self):
        case = sampling.Case(Layout(4, 2, expert_parallel_size=2, sequence_parallel=True), 2, MoeBackend.grouped)
        assert str(case) == "tp2 sp ep2 etp1 dp2"
        assert dict(case.options) == {
            "pp": 1, "tp": 2, "sp": True, "zero": 1, "accumulation": 2, "ep": 2, "etp": 1, "backend": "grouped",
            "recompute": None, "offload": False,
        }  # fmt: skip
        assert str(dataclasses.replace(case, backend=None)) == "tp2 sp dp2"
        assert not {"ep", "etp", "backend"} & dict(dataclasses.replace(case, backend=None).options).keys()
        other = dataclasses.replace(case, recompute=Recompute.selective, offload=True)
        assert str(other) == "tp2 sp ep2 etp1 dp2 recompute-selective offload" and case.plain and not other.plain
        config = other.config(shrink.shrink(recipe("top2_8e"), 4))
        assert config.zero.offload_optimizer and config.model.recompute_granularity is Recompute.selective
        assert config.model.recompute_modules == ["core_attn", "layernorm", "mlp", "moe"]
        for name, absent in (("dense", "moe"), ("olmoe_1b_7b_64gpu_h100_bf16", "mlp")):
            config = other.config(shrink.shrink(recipe(name), 4))
            assert config.model.recompute_modules == [
                part for part in RECOMPUTE_MODULES if part not in (absent, "moe_act")
            ]

    def test_dense_models_are_tried_with_every_zero_stage(self):
        cases, _ = cases_of("dense", 2)
        assert {case.layout.zero_stage for case in cases} == {0, 1, 2, 3}
        assert {case.layout.zero_stage for case in cases_of("top2_8e", 2)[0]} == {0, 1, 2}
        assert all(case.layout.zero_stage for case in cases if case.offload)

    def test_the_batch_is_the_same_in_every_case(self):
        small = shrink.shrink(recipe("top2_8e"), 8)
        for case in sampling.legal_cases(small, 8)[0]:
            train = case.config(small).train
            ranks = case.layout.data_parallel_size
            assert train.micro_batch_size * ranks * case.accumulation == train.global_batch_size

    def test_a_backend_that_cannot_run_the_recipe_is_left_out_with_its_reason(self):
        cases, notes = cases_of("fine_grained_32e_top4_shared", 2)
        assert {case.backend for case in cases} == {MoeBackend.grouped}
        assert len(notes) == 1 and "moe.backend=deepspeed is left out" in notes[0] and "renormalises" in notes[0]
        assert cases_of("top2_8e", 2)[1] == []


ERRORS = Errors(1e-8, 0.0, 1e-6, 1e-8, 1e-6, 1e-5, 0.0, 0, 1e-7, "embedding.weight")


class TestCommand:
    @pytest.fixture
    def command(self, monkeypatch, tmp_path, capsys):
        """Runs the command with a sweep whose rows are given: (exit code, JSON or None, output)."""

        def command(*rows, words=("experiment=dense", "--world-size", "2")):
            def swept(plan):
                for case, (errors, problem) in zip(plan.cases, itertools.cycle(rows), strict=False):
                    yield sweep.Row(case, 1.5, compare.BOUNDS, errors, problem)

            with monkeypatch.context() as patched:
                for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
                    patched.setenv(name, "")  # undone afterwards
                patched.setattr(sweep, "sweep", swept)
                file = tmp_path / "new" / "rows.json"
                code = main([*words, "--json", str(file)])
            report = json.loads(file.read_text()) if file.exists() else None
            return code, report, capsys.readouterr()

        return command

    def test_rows_table_and_exit_code(self, command):
        code, report, output = command((ERRORS, None))
        legal = sum(case.plain for case in cases_of("dense", 2)[0])
        assert code == 0 and len(report["rows"]) == 12 and report["legal"] == legal
        row = report["rows"][0]
        assert row["bounds"]["loss_err"] == 1e-6
        assert set(row) == {
            "layout", "backend", "zero", "world_size", "accumulation", "loss_err", "aux_err", "grad_err", "norm_err", "sgd_err",
            "adamw_err", "replica_err", "route_flips", "worst_tensor", "ok", "seconds", "problem", "recompute", "offload",
            "grad_median", "bounds", "checkpoint_err",
        }  # fmt: skip
        assert row["ok"] is True and row["world_size"] == 2 and row["backend"] is None and row["problem"] is None
        assert (
            f"12 of 12 layouts equal one process ({legal} are legal on 2 ranks)" in output.out and "!" not in output.out
        )
        assert "model.num_layers  4 -> 2" in output.err and "12 of 12: " in output.err

    def test_bf16(self, command):
        code, report, output = command(
            (ERRORS, None), words=("experiment=dense", "--world-size", "2", "--precision", "bf16")
        )
        assert code == 0 and report["precision"] == "bf16"
        assert f"{len(report['rows'])} of {len(report['rows'])} layouts err as one process in bf16 does" in output.out
        assert (
            "<= 4 x alone" in output.out
            and "<= 2.5 x alone" in output.out
            and "train.precision  fp32 -> bf16" in output.err
        )

    @pytest.mark.parametrize(
        ("errors", "problem"),
        [
            (dataclasses.replace(ERRORS, grad_err=2.1e-5), None),
            (dataclasses.replace(ERRORS, replica_err=1e-30), None),
            (dataclasses.replace(ERRORS, checkpoint_err=1e-30), None),
            (dataclasses.replace(ERRORS, route_flips=1), None),
            (dataclasses.replace(ERRORS, norm_err=math.inf), None),
            (None, "rank 1: ZeroDivisionError: planted"),
        ],
    )
    def test_one_row_that_is_off(self, command, errors, problem):
        code, report, output = command(
            (ERRORS, None), (errors, problem), words=("experiment=dense", "--world-size", "4")
        )
        assert code == 1 and [row["ok"] for row in report["rows"][:4]] == [True, False, True, False]
        assert "20 of 40 layouts" in output.out and ("!" in output.out or "planted" in output.out)

    def test_a_number_of_layouts(self, command):
        words = ("experiment=switch_8e", "--world-size", "4", "--layouts")
        assert len(command((ERRORS, None), words=(*words, "3"))[1]["rows"]) == 3
        assert len(command((ERRORS, None), words=(*words, "all"))[1]["rows"]) == sum(
            case.plain for case in cases_of("switch_8e", 4)[0]
        )

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["experiment=nothing", "--world-size", "2"], "experiment=nothing: no such option"),
            (["model.hidden_size=0", "--world-size", "2"], "model.hidden_size=0 must be at least 1"),
            (["model.hiden_size=8", "--world-size", "2"], "model.hiden_size: unknown key"),
        ],
    )
    def test_a_bad_recipe_is_one_message(self, command, words, message):
        code, report, output = command((ERRORS, None), words=words)
        assert code == 2 and report is None
        assert output.err.startswith("error: ") and message in output.err and output.err.count("\n") == 1

    @pytest.mark.parametrize("words", [["--world-size", "0"], [], ["--world-size", "2", "--layouts", "0"]])
    def test_a_bad_flag(self, words, capsys):
        with pytest.raises(SystemExit) as end:
            main(["experiment=dense", *words])
        assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_a_plan_leaves_the_recipe_alone():
    config = recipe("top2_8e")
    before = copy.deepcopy(config)
    sweep.plan(config, 2, "3", seed=7)
    assert config == before
