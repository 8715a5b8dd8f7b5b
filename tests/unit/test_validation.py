"""Cross-field checks: each problem found, named with its numbers and a way out; legal descriptions left alone."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.config import (
    Activation,
    AuxLossScope,
    Config,
    DecayStyle,
    MoeBackend,
    Recompute,
    Resume,
    TokenDropPolicy,
    TransformerImpl,
)
from recipes.rules import Length, Range, Text
from recipes.schema import bare, entries, show, without_null
from recipes.topology import Layout
from recipes.validation import prepare, problems
from recipes.validation.deepspeed import SETTINGS
from recipes.validation.limits import OWNED_KEYS
from tests.cli.fake_data import write_dataset
from tests.ranks import forked


@pytest.fixture
def launch_dir(tmp_path) -> Path:
    write_dataset(tmp_path / "data" / "laptop")
    return tmp_path


def _config(changes: dict[str, Any]) -> Config:
    config = Config()
    for key, value in changes.items():
        group, name = key.split(".")
        assert hasattr(getattr(config, group), name), key
        setattr(getattr(config, group), name, value)
    return config


def test_the_default_is_valid_on_one_and_two_ranks(launch_dir):
    assert problems(Config(), 1, launch_dir=launch_dir) == []
    assert problems(Config(), 2, launch_dir=launch_dir) == []


def _scalars(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each type without parts inside an annotation, with its rules; of mappings keys and values."""
    inner, rules = bare(without_null(hint)[0])
    if typing.get_origin(inner) in (list, dict):
        yield inner, rules
        for option in typing.get_args(inner):
            yield from _scalars(option)
    else:
        yield inner, rules


def test_every_number_text_and_collection_has_a_rule():
    needed = {int: Range, float: Range, str: Text, list: Length, dict: Length}
    free = ("deepspeed.extra",)  # which has limits of its own
    for key, entry in entries().items():
        for kind, rules in _scalars(entry.hint):
            rule = needed.get(typing.get_origin(kind) or kind)
            assert rule is None or key in free or any(isinstance(found, rule) for found in rules), (key, kind)


NUMBERS = {
    key: (kind, rule)
    for key, entry in entries().items()
    if typing.get_origin(bare(without_null(entry.hint)[0])[0]) is None
    for kind, rules in _scalars(entry.hint)
    for rule in rules
    if isinstance(rule, Range)
}


@pytest.mark.parametrize("key", NUMBERS)
def test_values_out_of_range_are_named(key, launch_dir):
    kind, rule = NUMBERS[key]
    for wrong in (
        kind(rule.low) if rule.above else rule.low - 1,
        kind(rule.high) if rule.below else rule.high * 2 + 1,
        float("nan"),
        2**63,
        10**400,
    ):
        found = problems(_config({key: wrong}), 1, launch_dir=launch_dir)
        assert len(found) == 1 and found[0].startswith(f"{key}={show(wrong)}") and str(rule) in found[0], found
    assert rule.low < 2**63 and (kind is float or rule.high < 2**63), "the largest product must be finite"


# Changes -> ranks -> what the one message must say.
CASES: list[tuple[dict[str, Any], int, list[str]]] = [
    (
        {"train.global_batch_size": 12, "train.micro_batch_size": 4},
        2,
        ["=12", "micro_batch_size=4 x data-parallel 2 = 8", "try 8 or 16, or train.micro_batch_size=6"],
    ),
    ({"train.global_batch_size": 4}, 1, ["train.global_batch_size=4", "try 8"]),
    ({"parallel.data_parallel_size": 4}, 1, ["data_parallel_size=4", "1 process was started", "start 4"]),
    ({"parallel.data_parallel_size": 1}, 2, ["data_parallel_size=1", "2 processes were started", "null"]),
    ({"train.eval_interval": 5, "train.eval_samples": 0}, 1, ["train.eval_interval=5", "eval_samples=64"]),
    ({"train.spike_factor": 0.5}, 1, ["train.spike_factor=0.5", "0 (off) or above 1", "try 10"]),
    ({"optimizer.min_lr": 1.0}, 1, ["optimizer.min_lr=1.0", "optimizer.lr=0.003", "try 0.0003"]),
    ({"model.num_query_groups": 3}, 1, ["num_query_groups=3", "num_attention_heads=4", "1, 2, 4"]),
    ({"model.hidden_size": 130}, 1, ["model.hidden_size=130", "num_attention_heads=4", "128 or 132"]),
    ({"model.kv_channels": 31}, 1, ["model.kv_channels=31", "31 channels", "even"]),
    ({"model.rotary_percent": 0.1}, 1, ["rotary_percent=0.1", "3 channels", "even"]),
    ({"model.rotary_percent": 1.5}, 1, ["rotary_percent=1.5", "at most 1"]),
    ({"model.transformer_impl": TransformerImpl.transformer_engine}, 1, ["transformer_engine", "auto"]),
    ({"zero.stage": 4}, 1, ["zero.stage=4", "at least 0 and at most 3"]),
    ({"zero.stage": 3, "moe.num_moe_experts": 8}, 1, ["zero.stage=3", "experts", "0, 1 or 2"]),
    (
        {"zero.stage": 0, "zero.offload_optimizer": True},
        1,
        ["zero.offload_optimizer=true", "zero.stage=0", "stage 1 or 2"],
    ),
    ({"zero.stage": 0, "zero.overlap_comm": True}, 1, ["zero.overlap_comm=true", "zero.stage=0"]),
    ({"schedule.lr_decay_steps": 40}, 1, ["lr_warmup_steps=50", "schedule.lr_decay_steps=40", "try 4"]),
    (
        {"schedule.lr_decay_style": DecayStyle.wsd},
        1,
        ["wsd_decay_steps=0", "at most train.steps=1000", "= 950", "try 100"],
    ),
    ({"telemetry.profile_steps": [5]}, 1, ["profile_steps=[5]", "[first,last]"]),
    ({"telemetry.profile_steps": [5, 2000]}, 1, ["profile_steps=[5,2000]", "train.steps=1000"]),
    ({"telemetry.profile_steps": [0, 2]}, 1, ["profile_steps=[0,2]", "1 <= first"]),
    ({"deepspeed.extra": {"zero_optimization": 2}}, 1, ["zero_optimization=2", "mapping"]),
    ({"run.name": "a/b"}, 1, ["run.name=a/b", "'/'"]),
    ({"run.dir": " "}, 1, ["run.dir=' '", "null"]),
    ({"run.resume": Resume.auto}, 1, ["run.resume=auto", "run.dir=FOLDER"]),
    ({"checkpoint.load_step": 3}, 1, ["checkpoint.load_step=3", "run.resume=auto"]),
    ({"run.dir": "data"}, 1, ["run.dir=data", "exists", "run.resume=auto"]),
    ({"data.path": None}, 1, ["data.path=null", "tools.index"]),
    ({"data.path": "data"}, 1, ["data.path=data", "dataset.json", "tools.index"]),
    ({"model.vocab_size": 50257}, 1, ["model.vocab_size=50257", "data.path=data/laptop has 4096", "null"]),
    ({"data.domain_weights": {"fr": 1.0}}, 1, ["data.domain_weights.fr", "en, ja"]),
    ({"data.domain_weights": {"en": -1.0}}, 1, ["data.domain_weights.en=-1.0", "at least 0"]),
    ({"data.domain_weights": {"en": 0.0}}, 1, ["all weights are 0"]),
    ({"data.wrap": False}, 1, ["data.wrap=false", "16000", "en has 781", "data.wrap=true"]),
]

E8 = {"moe.num_moe_experts": 8}
DEEPSPEED = E8 | {"moe.backend": MoeBackend.deepspeed}
CASES += [
    (E8 | {"moe.moe_router_topk": 9}, 1, ["moe_router_topk=9", "at most moe.num_moe_experts=8"]),
    (
        {"moe.num_moe_experts": 6, "parallel.expert_model_parallel_size": 4, "train.micro_batch_size": 4},
        4,
        ["moe.num_moe_experts=6 must be divisible by parallel.expert_model_parallel_size=4", "4 or 8"],
    ),
    (
        {"moe.num_moe_experts": 6, "parallel.expert_model_parallel_size": 3},
        2,
        ["expert_model_parallel_size=3", "data-parallel size 2", "1, 2", "start 3"],
    ),
    (E8 | {"parallel.expert_model_parallel_size": 4}, 2, ["model_parallel_size=4", "size 2", "data_parallel_size=4"]),
    (
        E8 | {"parallel.expert_model_parallel_size": 4, "train.global_batch_size": 48},
        6,
        ["size 6", "one of 1, 2, or start 4"],
    ),
    ({"parallel.expert_model_parallel_size": 2}, 2, ["expert_model_parallel_size=2", "dense model", "moe=switch"]),
    (
        {"moe.moe_router_topk": 2, "moe.backend": MoeBackend.deepspeed},
        1,
        ["moe.backend=deepspeed, moe.moe_router_topk=2 have no effect", "num_moe_experts=null", "=8"],
    ),
    ({"moe.aux_loss_scope": AuxLossScope.sequence}, 1, ["aux_loss_scope=sequence has no effect"]),
    (E8 | {"moe.moe_layer_freq": 5}, 1, ["moe_layer_freq=5", "model.num_layers=4", "1 or 2"]),
    (E8 | {"model.add_bias_linear": True}, 1, ["add_bias_linear=true", "num_moe_experts=8", "moe=dense"]),
    (E8 | {"moe.moe_router_pre_softmax": False}, 1, ["pre_softmax=false", "topk=1", "always 1", "topk=2"]),
    (E8 | {"moe.moe_min_capacity": 4}, 1, ["moe_min_capacity=4", "capacity_factor=1.25", "moe_min_capacity=0"]),
    (
        E8 | {"moe.moe_token_drop_policy": TokenDropPolicy.position},
        1,
        ["moe_token_drop_policy=position", "nothing is dropped", "moe_token_drop_policy=probs"],
    ),
    (DEEPSPEED | {"moe.moe_router_topk": 2}, 1, ["pre_softmax=true", "backend=deepspeed", "2 choices", "grouped"]),
    (DEEPSPEED | {"moe.moe_router_pre_softmax": False}, 1, ["pre_softmax=false", "topk=1"]),
    (DEEPSPEED | {"moe.moe_expert_capacity_factor": 1.5}, 1, ["capacity_factor=1.5", "arbitrary", "grouped"]),
    (DEEPSPEED | {"moe.moe_eval_capacity_factor": 2.0}, 1, ["eval_capacity_factor=2.0", "arbitrary", "null"]),
    *(
        (
            DEEPSPEED
            | {
                "moe.moe_router_topk": topk,
                "moe.moe_router_pre_softmax": False,
                "moe.moe_expert_capacity_factor": 1.5,
                "moe.moe_token_drop_policy": policy,
            },
            1,
            ["capacity_factor=1.5", f"topk={topk}", f"by {how}", "renormalises", "grouped"],
        )
        for topk, policy, how in ((2, TokenDropPolicy.position, "position"), (3, TokenDropPolicy.probs, "probability"))
    ),
]


SELECTIVE = {"model.recompute_granularity": Recompute.selective}
MOE_LAYERS = E8 | SELECTIVE
CASES += [
    (
        SELECTIVE | {"model.recompute_modules": ["attention", "mlp"]},
        1,
        ["recompute_modules=[attention,mlp]: unknown attention", "core_attn, layernorm, mlp, moe"],
    ),
    (
        SELECTIVE | {"model.recompute_modules": []},
        1,
        ["recompute_modules=[]", "core_attn, layernorm", "granularity=null"],
    ),
    (
        {"model.recompute_modules": ["mlp"]},
        1,
        ["recompute_modules=[mlp] has no effect with model.recompute_granularity=null", "selective", "=[core_attn]"],
    ),
    (
        {"model.recompute_modules": ["mlp"], "model.recompute_granularity": Recompute.full},
        1,
        ["recompute_modules=[mlp] has no effect", "granularity=full"],
    ),
    (SELECTIVE | {"model.recompute_modules": ["core_attn", "moe"]}, 1, ["[core_attn,moe]: moe has no effect", "dense"]),
    (MOE_LAYERS | {"model.recompute_modules": ["mlp"]}, 1, ["mlp has no effect where every layer has experts"]),
    (SELECTIVE | {"model.recompute_modules": ["moe_act"]}, 1, ["[moe_act]: moe_act has no effect in a dense model"]),
    (MOE_LAYERS | {"model.recompute_modules": ["moe", "moe_act"]}, 1, ["moe_act has no effect beside moe"]),
    (
        MOE_LAYERS | {"model.recompute_modules": ["moe_act"], "moe.moe_expert_dropout": 0.1},
        1,
        ["moe_act has no effect with moe.moe_expert_dropout=0.1"],
    ),
    (DEEPSPEED | SELECTIVE | {"model.recompute_modules": ["moe_act"]}, 1, ["moe_act has no effect with moe.backend="]),
]


@pytest.mark.parametrize(("changes", "world_size", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_each_problem_is_one_message_with_numbers_and_a_way_out(changes, world_size, expected, launch_dir):
    found = problems(_config(changes), world_size, launch_dir=launch_dir)
    assert len(found) == 1, found
    assert [part for part in expected if part not in found[0]] == [], found[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"train.steps": 20},  # a trial that ends within the warm-up
        {"schedule.lr_decay_style": DecayStyle.wsd, "schedule.wsd_decay_steps": 950},
        {"schedule.lr_decay_style": DecayStyle.constant, "optimizer.min_lr": 1.0},  # min_lr is not used
        {"model.num_query_groups": 1, "model.activation": Activation.gelu},
        {"model.num_attention_heads": 3, "model.kv_channels": 64},
        {"model.rotary_percent": 0.5},
        {"train.steps": 20, "data.wrap": False},
        {"zero.stage": 2, "zero.offload_optimizer": True, "zero.overlap_comm": True},
        {"telemetry.profile_steps": [1000, 1000]},
        {"model.vocab_size": 4096},
        {
            "deepspeed.extra": {
                "zero_optimization": {"ignore_unused_parameters": False},
                "comms_logger": {"enabled": True},
            }
        },
        {"run.dir": "new/er/folder"},
        {"run.dir": "new", "run.resume": Resume.auto},  # nothing there yet: starts at step 1
        {"run.dir": "data", "run.resume": Resume.auto},
        {"data.domain_weights": {"ja": 1.0}},
        E8 | {"moe.moe_layer_freq": 4, "moe.moe_router_topk": 8},
        E8 | {"moe.moe_expert_capacity_factor": 1.25, "moe.moe_min_capacity": 4},
        E8 | {"moe.moe_eval_capacity_factor": 2.0, "moe.moe_token_drop_policy": TokenDropPolicy.position},
        E8 | {"moe.moe_router_topk": 2},  # weights that do not add up to 1, as in OLMoE
        {"moe.num_moe_experts": 1},
        SELECTIVE,
        SELECTIVE | {"model.recompute_modules": ["layernorm", "mlp"]},
        MOE_LAYERS | {"model.recompute_modules": ["moe"]},
        MOE_LAYERS | {"model.recompute_modules": ["core_attn", "moe_act"]},
        MOE_LAYERS | {"model.recompute_modules": ["mlp", "moe"], "moe.moe_layer_freq": 2},
        {"model.recompute_granularity": Recompute.full},
        DEEPSPEED,
        DEEPSPEED | {"moe.moe_router_topk": 3, "moe.moe_router_pre_softmax": False},
    ],
)
def test_legal_descriptions_are_left_alone(changes, launch_dir):
    before = sorted(launch_dir.rglob("*"))
    assert problems(_config(changes), 1, launch_dir=launch_dir) == []
    assert sorted(launch_dir.rglob("*")) == before  # checking writes nothing


@pytest.mark.parametrize("key", OWNED_KEYS)
def test_deepspeed_keys_that_are_decided_here_are_refused(key, launch_dir):
    section, _, name = key.partition(".")
    for extra in ({section: {name: 1} if name else 1}, {section: {name: {"x": 1}} if name else {"x": 1}}):
        found = problems(_config({"deepspeed.extra": extra}), 1, launch_dir=launch_dir)
        assert len(found) == 1 and found[0].startswith(f"deepspeed.extra.{key}") and OWNED_KEYS[key] in found[0]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"comms_loger": {}}, "comms_loger: no setting of DeepSpeed that has a use here, did you mean comms_logger?"),
        ({"comms_logger": {"on": True}}, "comms_logger.on: no setting of DeepSpeed"),
        ({"comms_logger": True}, "comms_logger=true: must be a mapping like {enabled:...}"),
        ({"comms_logger": {"enabled": 1}}, "comms_logger.enabled=1: must be true or false"),
        ({"comms_logger": {"prof_ops": "all"}}, "comms_logger.prof_ops=all: must be a list"),
        ({"wall_clock_breakdown": {"a": 1}}, "wall_clock_breakdown={a:1}: must be true or false"),
        ({"zero_optimization": {"sub_group_size": -1}}, "sub_group_size=-1 must be at least 0"),
        ({"a": {"b": {"c": 1}}}, "deepspeed.extra.a: no setting of DeepSpeed"),
    ],
)
def test_settings_that_deepspeed_has_not_are_refused(extra, message, launch_dir):
    (found,) = problems(_config({"deepspeed.extra": extra}), 1, launch_dir=launch_dir)
    assert found.startswith("deepspeed.extra.") and message in found


def test_deepspeed_has_the_settings_that_may_be_made():
    """Names that the installed DeepSpeed does not read would be ignored, or end the run after its start."""
    pytest.importorskip("recipes.engine.settings")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    zero = DeepSpeedZeroConfig.model_fields
    theirs = {
        "activation_checkpointing": vars(DeepSpeedActivationCheckpointingConfig({})),
        "aio": get_aio_config({}),
        "comms_logger": CommsLoggerConfig.model_fields,
        "csv_monitor": CSVConfig.model_fields,
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        "pipeline": config.get_pipeline_config({}),
        "tensorboard": TensorBoardConfig.model_fields,
        "zero_optimization": {field.alias or name: name for name, field in zero.items()},
    }
    constant = {value for value in vars(constants).values() if isinstance(value, str)}
    for section, names in SETTINGS.items():
        if section == "timers":
            assert set(names["throughput"]) == set(DeepSpeedThroughputTimerConfig.model_fields)
        else:
            missing = set(names) - set(theirs[section]) if isinstance(names, dict) else {section} - constant
            assert not missing, (section, missing)


def test_all_keys_that_the_engine_sets_are_owned():
    settings = pytest.importorskip("recipes.engine.settings").deepspeed_settings(Config(), Layout(1))
    leaves = {f"{k}.{n}" for k, v in settings.items() if isinstance(v, dict) for n in v}
    leaves |= {key for key, value in settings.items() if not isinstance(value, dict)}
    assert {leaf for leaf in leaves if not {leaf, leaf.partition(".")[0]} & OWNED_KEYS.keys()} == set()


def test_problems_of_all_groups_come_together(launch_dir):
    changes = {"train.global_batch_size": 12, "model.num_query_groups": 3, "run.dir": "data", "data.path": "nowhere"}
    found = problems(_config(changes), 1, launch_dir=launch_dir)
    assert len(found) == 4
    assert all(any(key in message for message in found) for key in changes)


def test_load_step_must_be_there(launch_dir):
    (launch_dir / "run" / "checkpoints" / "step_00000010").mkdir(parents=True)
    changes = {"run.dir": "run", "run.resume": Resume.auto}
    assert problems(_config(changes | {"checkpoint.load_step": 10}), 1, launch_dir=launch_dir) == []
    (found,) = problems(_config(changes | {"checkpoint.load_step": 20}), 1, launch_dir=launch_dir)
    assert "checkpoint.load_step=20" in found and found.endswith("the steps there are: 10")


def test_a_run_folder_below_a_file_or_a_read_only_place_is_refused(launch_dir):
    for folder in ("data/laptop/dataset.json/run", "/proc/nowhere/run"):
        (found,) = problems(_config({"run.dir": folder}), 1, launch_dir=launch_dir)
        assert folder in found and "choose a folder" in found
    if os.geteuid() != 0:
        (launch_dir / "locked").mkdir(mode=0o500)
        (found,) = problems(_config({"run.dir": "locked/run"}), 1, launch_dir=launch_dir)
        assert "cannot write" in found


def test_damaged_data_is_named(launch_dir):
    file = launch_dir / "data" / "laptop" / "ja_train.bin"
    file.write_bytes(file.read_bytes()[:-2])
    (found,) = problems(Config(), 1, launch_dir=launch_dir)
    assert "data.path=data/laptop" in found and "ja_train.bin" in found


def test_a_dry_run_needs_no_data_when_the_vocabulary_is_given(launch_dir):
    config = _config({"data.path": None, "model.vocab_size": 50257})
    assert problems(config, 1, launch_dir=launch_dir, dry_run=True) == []
    (found,) = problems(_config({"data.path": None}), 1, launch_dir=launch_dir, dry_run=True)
    assert "model.vocab_size=null" in found


def test_prepare_fills_in_what_follows(launch_dir):
    config = Config()
    prepared = prepare(config, 2, launch_dir=launch_dir)
    model = prepared.model
    assert (model.vocab_size, model.ffn_hidden_size, model.num_query_groups, model.kv_channels) == (4096, 384, 4, 32)
    assert (prepared.parallel.data_parallel_size, prepared.schedule.lr_decay_steps) == (2, 1000)
    assert config == Config()  # the composed description is left as it was
    given = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, lr_decay_steps=500))
    assert prepare(given, 1, launch_dir=launch_dir).schedule.lr_decay_steps == 500


@pytest.mark.parametrize("size", [1, 2, 4])
def test_expert_parallelism_divides_ranks_and_experts(size, launch_dir):
    changes = E8 | {"parallel.expert_model_parallel_size": size, "train.micro_batch_size": 4}
    assert problems(_config(changes), 4, launch_dir=launch_dir) == []


def test_preparing_fills_in_the_width_of_experts(launch_dir):
    assert prepare(_config(E8), 1, launch_dir=launch_dir).moe.moe_ffn_hidden_size == 384
    assert prepare(Config(), 1, launch_dir=launch_dir).moe == Config().moe  # still nothing that a dense model ignores


@forked
def test_stock_gates_treat_dropped_choices_otherwise():
    """Why the stock layer takes no capacity factor: when this fails with a new DeepSpeed, the rule may go."""
    import torch
    from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

    agreements = []
    for seed in range(8):
        logits_TE = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed)) + torch.tensor([9.0, 0.0])
        *_, ids, _, _, _ = top1gating(logits_TE, 1 / 3, 0, use_rts=False, sparse_routes=True)
        (kept,) = torch.nonzero(ids[0] == 0).flatten().tolist()  # one of six takes the one place of expert 0
        agreements.append((kept == 0, kept == int(torch.softmax(logits_TE, dim=1)[:, 0].argmax())))
    by_position, by_probability = zip(*agreements, strict=True)
    assert not all(by_position) and not all(by_probability)

    logits_TE = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    two = top2gating(logits_TE.clone(), 0.8, 0, top2_2nd_expert_sampling=False, sparse_routes=True)
    three = topkgating(logits_TE.clone(), 3, 0.8, 0, sparse_routes=True)
    for *_, ids, _, gates, _ in (two, three):
        some = ((ids < 0).sum(0) > 0) & ((ids >= 0).sum(0) > 0)  # tokens that lost some of their choices
        assert some.any() and torch.allclose(gates.sum(0)[some], torch.ones(()))
