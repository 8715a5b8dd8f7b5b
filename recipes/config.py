"""The description of a run: one dataclass per configuration group, the unit of every field beside it.

The type of a field also says what another value means on resume (`recipes/fields.py`).

Hydra composes YAML groups and command-line overrides into these schemas (`recipes/pretrain.py`); `recipes/validation`
then checks the fields against each other. Nothing here imports torch, so that a mistake is answered at once.
Where the configurations of megatron-core and DeepSpeed have a field for something, it has its name; tests/unit/test_names.py lists
the others.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

from recipes.choices import RECOMPUTE_MODULES as RECOMPUTE_MODULES
from recipes.choices import (
    Activation,
    AuxLossScope,
    BtmStage,
    CheckpointLoad,
    DecayStyle,
    ExpertPrior,
    MoeBackend,
    Normalization,
    OptimizerName,
    PosteriorForm,
    Precision,
    Recompute,
    Resume,
    RouterType,
    ScoreFunction,
    SecondExpert,
    SplitBy,
    TokenDropPolicy,
    TransformerImpl,
    WandbMode,
)
from recipes.fields import Free, Identity, Said
from recipes.rules import (
    BatchSize,
    BucketSize,
    ByName,
    Count,
    CountOrNone,
    Experts,
    Factor,
    Folder,
    FolderPart,
    GroupSize,
    Heads,
    Label,
    Layers,
    Length,
    Names,
    PerLayer,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Text,
    Width,
)


@dataclass
class RunConfig:
    """Where the run lives and what it starts from."""

    name: Said[FolderPart] = "pretrain"  # shown in logs; part of the default run folder
    dir: Free[Folder | None] = None  # run folder, relative to the launch directory; null: outputs/<name>-<date>-<time>
    seed: Identity[Annotated[int, Range(0, 2**62)]] = 1234  # of initial weights, data order and dropout
    resume: Free[Resume] = Resume.never
    resume_with: Free[Names] = field(default_factory=list)  # keys whose change makes it another run, and is accepted


@dataclass
class TrainConfig:
    """The amount of training, the batch, evaluation, and what counts as a bad step."""

    steps: Said[Count] = 1000  # optimizer steps
    micro_batch_size: Said[BatchSize] = 8  # sequences per forward pass and data-parallel rank
    global_batch_size: Identity[BatchSize] = 16  # sequences per optimizer step over all data-parallel ranks
    precision: Identity[Precision] = Precision.fp32
    eval_interval: Said[CountOrNone] = 0  # steps between evaluations; 0: only after the last step
    eval_samples: Said[CountOrNone] = 64  # validation sequences per domain; 0: no evaluation
    spike_factor: Said[Factor] = (
        0.0  # skip a step whose gradient norm exceeds this multiple of the recent median; 0: never
    )
    spike_window: Said[Annotated[int, Range(2, 10**6)]] = (
        64  # accepted steps in that median; the test starts when half of them are known
    )
    max_skipped_steps: Said[Count] = 20  # consecutive skipped steps (non-finite or spikes) that end the run


@dataclass
class ModelConfig:
    """A decoder-only Transformer. Names are those of megatron-core's TransformerConfig, for what it has (17 of 24)."""

    num_layers: Identity[Layers] = 4  # Transformer blocks
    hidden_size: Identity[Width] = 128  # width of the residual stream
    ffn_hidden_size: Identity[Width | None] = (
        None  # feed-forward width; null: 4 x hidden (gelu) or 8/3 x hidden up to a multiple of 64
    )
    num_attention_heads: Identity[Heads] = 4
    num_query_groups: Identity[Heads | None] = None  # key/value heads; null: as many as attention heads
    kv_channels: Identity[Annotated[int, Range(2, 2**16)] | None] = (
        None  # width of one head; null: hidden_size / num_attention_heads
    )
    seq_length: Identity[Annotated[int, Range(1, 2**26)]] = 128  # tokens per sequence
    vocab_size: Identity[Annotated[int, Range(2, 2**26)] | None] = None  # token ids, unpadded; null: the tokenizer's
    make_vocab_size_divisible_by: Identity[Annotated[int, Range(1, 2**20)]] = (
        128  # rows of the embedding are padded up to a multiple of this
    )
    share_embeddings_and_output_weights: Identity[bool] = True
    normalization: Identity[Normalization] = Normalization.RMSNorm
    layernorm_epsilon: Identity[Positive] = 1e-5
    activation: Identity[Activation] = Activation.swiglu
    add_bias_linear: Identity[bool] = False  # biases in all linear layers of the blocks
    add_qkv_bias: Identity[bool] = False  # biases in the query, key and value projections only
    qk_layernorm: Identity[bool] = False  # normalise queries and keys per head
    rotary_base: Identity[Annotated[float, Range(0.0, 1000000000000.0, above=True)]] = 10000.0
    rotary_percent: Identity[ShareAboveZero] = 1.0  # share of each head's width that rotates
    hidden_dropout: Identity[Share] = 0.0  # probability
    attention_dropout: Identity[Share] = 0.0  # probability
    init_method_std: Identity[Factor] = (
        0.02  # of initial weights; matrices that write to the residual stream: / sqrt(2 num_layers)
    )
    transformer_impl: Said[TransformerImpl] = TransformerImpl.auto
    recompute_granularity: Said[Recompute | None] = None  # null: everything is kept
    recompute_modules: Said[Annotated[list[Annotated[str, Text()]], Length(16)]] = field(
        default_factory=lambda: ["core_attn"]
    )  # of selective: core_attn, layernorm, mlp, moe, moe_act (the activation inside the experts alone)


@dataclass
class MoeConfig:
    """Experts in place of feed-forward blocks. Names are megatron-core's for what it has (18 of 37), and ours in its style."""

    num_moe_experts: Identity[Experts | None] = (
        None  # of each MoE layer, over all ranks; this and the next null: a dense model
    )
    num_moe_experts_per_layer: Identity[PerLayer[Experts] | None] = (
        None  # in its place: one number per MoE layer, in order
    )
    backend: Said[MoeBackend] = MoeBackend.grouped
    moe_layer_freq: Identity[Layers] = 1  # every so many layers have experts
    moe_layer_offset: Identity[Annotated[int, Range(0, 10000)]] = 0  # number of the first one, from 0
    moe_layer_pattern: Identity[PerLayer[Annotated[int, Range(0, 1)]] | None] = (
        None  # 1 for each layer with experts, else 0; null: by the two above
    )
    moe_ffn_hidden_size: Identity[Width | None] = (
        None  # width of one expert; null: that of the dense feed-forward block
    )
    moe_shared_expert_intermediate_size: Identity[Width | None] = (
        None  # width of an expert that every token passes; null: none
    )
    moe_shared_expert_gate: Identity[bool] = False  # multiply its output by a learned sigmoid of the token
    moe_use_residual: Identity[bool] = (
        False  # mix its output and that of the chosen ones by a learned softmax of the token
    )
    moe_expert_dropout: Identity[ShareBelowOne] = 0.0  # probability, of hidden activations of the chosen experts
    moe_init_scale: Identity[Positive] = (
        1.0  # variance of initial weights of routers and experts, as a multiple of the others'
    )
    moe_router_type: Identity[RouterType] = RouterType.topk
    moe_router_topk: Identity[Experts] = 1  # experts per token; of expert_choice on average
    moe_second_expert: Identity[SecondExpert] = SecondExpert.best
    moe_router_pre_softmax: Identity[bool] = (
        True  # gates from the softmax over all experts; false: over the chosen ones
    )
    moe_router_score_function: Identity[ScoreFunction] = ScoreFunction.softmax
    moe_router_norm_topk_prob: Identity[bool | None] = (
        None  # gates of a token add up to 1; null: those of several sigmoids do
    )
    moe_router_topk_scaling_factor: Identity[Positive | None] = None  # by which gates are multiplied at last; null: 1
    moe_router_num_groups: Identity[Experts | None] = (
        None  # equal parts of the experts, such as those of a node; null: no groups
    )
    moe_router_group_topk: Identity[Experts | None] = None  # groups in which a token's experts may be; null: no groups
    moe_router_enable_expert_bias: Identity[bool] = False  # balance by biases that count in the choice only
    moe_router_bias_update_rate: Identity[Positive] = 1e-3  # by which each step moves the biases
    moe_input_jitter_eps: Identity[ShareBelowOne | None] = (
        None  # training: routers see tokens times 1 +- this at random; null: as they are
    )
    moe_router_gumbel_scale: Identity[Factor] = (
        0.0  # training: Gumbel noise added to logits for the choice, as a multiple
    )
    moe_router_lr_scale: Identity[Factor] = 1.0  # learning rate of routers, as a multiple of the dense weights'
    moe_expert_lr_scale: Identity[Factor | None] = 1.0  # that of experts; null: sqrt(topk / experts of their layer)
    moe_aux_loss_coeff: Identity[Factor] = (
        1e-2  # weight of each layer's E sum f P, f of sum 1; Hugging Face's x topk / number of such layers
    )
    aux_loss_scope: Identity[AuxLossScope] = AuxLossScope.micro_batch
    moe_z_loss_coeff: Identity[Factor] = 0.0  # weight of each layer's router z-loss, a mean over tokens; layers add up
    moe_loss_coeff_ramp: Identity[Annotated[list[CountOrNone], Length(2)] | None] = (
        None  # [first, last] step between which these weights move; null: they stay
    )
    moe_aux_loss_coeff_end: Identity[Factor | None] = (
        None  # moe_aux_loss_coeff from the last of these steps on; null: unchanged
    )
    moe_z_loss_coeff_end: Identity[Factor | None] = (
        None  # moe_z_loss_coeff from the last of these steps on; null: unchanged
    )
    moe_expert_capacity_factor: Identity[Positive | None] = (
        None  # of the even share of a rank's tokens; null: nothing is dropped
    )
    moe_eval_capacity_factor: Identity[Positive | None] = None  # the same in evaluation
    moe_min_capacity: Identity[CountOrNone] = 0  # tokens that an expert takes at least, with a capacity factor
    moe_token_drop_policy: Identity[TokenDropPolicy] = TokenDropPolicy.probs

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return self.num_moe_experts is not None or self.num_moe_experts_per_layer is not None


@dataclass
class ParallelConfig:
    """How the ranks share the work."""

    data_parallel_size: Said[Annotated[int, Range(1, 2**20)] | None] = (
        None  # ranks that share a batch; null: all ranks / (tensor x pipeline size)
    )
    tensor_model_parallel_size: Said[GroupSize] = 1  # ranks that share each layer's matrices
    sequence_parallel: Said[bool] = False  # tensor-parallel ranks also share the tokens between the matrices
    pipeline_model_parallel_size: Said[GroupSize] = 1  # stages, each with some of the layers; divides the ranks
    num_layers_in_first_pipeline_stage: Said[Layers | None] = None  # null: as many as the others, or one more
    num_layers_in_last_pipeline_stage: Said[Layers | None] = None  # null: as many as the others, or one fewer
    expert_model_parallel_size: Said[Experts] = 1  # ranks that share the experts of a layer out
    expert_tensor_parallel_size: Said[GroupSize | None] = (
        None  # ranks that share each expert's matrices; null: as the layer's, or 1
    )


@dataclass
class ZeroConfig:
    """DeepSpeed ZeRO: what is divided over the data-parallel ranks."""

    stage: Said[Annotated[int, Range(0, 3)]] = (
        1  # 0: nothing, 1: optimizer states, 2: also gradients, 3: also weights (dense models)
    )
    reduce_bucket_size: Said[BucketSize] = 50_000_000  # elements reduced at once
    allgather_bucket_size: Said[BucketSize] = 50_000_000  # elements gathered at once
    overlap_comm: Said[bool] = False  # reduce gradients during the backward pass (CUDA)
    offload_optimizer: Said[bool] = False  # keep optimizer states in host memory and update there


@dataclass
class DeepSpeedConfig:
    """Anything else for DeepSpeed."""

    extra: Identity[dict[str, Any]] = field(default_factory=dict)  # merged into DeepSpeed's configuration


@dataclass
class DataConfig:
    """Indexed text and how it becomes samples."""

    path: Said[Folder | None] = (
        "data/laptop"  # folder written by tools.index, relative to the launch directory; null: none
    )
    domain_weights: Identity[ByName[Factor]] = field(
        default_factory=dict
    )  # share of samples; {}: in proportion to tokens
    wrap: Said[bool] = True  # start again when a domain is used up; false: refuse to start with too few samples
    reset_position_ids: Identity[bool] = False  # positions start at 0 after each end-of-document token
    reset_attention_mask: Identity[bool] = False  # tokens attend, and are routed by chance, within their document only
    eod_mask_loss: Identity[bool] = (
        False  # the prediction made at an end-of-document token does not count; routers count it
    )


@dataclass
class OptimizerConfig:
    """Update rule."""

    name: Identity[OptimizerName] = OptimizerName.adamw
    lr: Identity[Positive] = 3e-3  # peak learning rate
    min_lr: Identity[Factor] = 3e-4  # learning rate at the end of the decay
    weight_decay: Identity[Factor] = 0.1  # of matrices; norms and biases have none
    adam_beta1: Identity[ShareBelowOne] = 0.9
    adam_beta2: Identity[ShareBelowOne] = 0.95
    adam_eps: Identity[Positive] = 1e-8
    clip_grad: Identity[Factor] = 1.0  # bound on the global gradient norm; 0: no clipping


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step alone."""

    lr_decay_style: Identity[DecayStyle] = DecayStyle.cosine
    lr_warmup_steps: Identity[CountOrNone] = 50  # linear from 0
    lr_decay_steps: Identity[Count | None] = None  # step at which min_lr is reached; null: train.steps
    wsd_decay_steps: Identity[CountOrNone] = 0  # length of the final decay of wsd; ignored by the others


@dataclass
class CheckpointConfig:
    """When training state is written, and which is read."""

    load_from: Free[Folder | None] = None  # checkpoint of another run, from which a new run starts
    load: Free[CheckpointLoad] = (
        CheckpointLoad.all
    )  # of load_from: weights, moments and step; or weights alone, at step 0
    save_interval: Said[CountOrNone] = 0  # steps between checkpoints; 0: by time alone
    save_interval_minutes: Said[Factor] = 30.0  # minutes between checkpoints, on rank 0's clock; 0: by steps alone
    save_final: Said[bool] = True  # write one after the last step
    keep: Said[Count] = 2  # newest checkpoints kept
    load_step: Free[Count | None] = None  # with run.resume=auto: exactly this one; null: the newest complete one


@dataclass
class TelemetryConfig:
    """What is recorded."""

    log_interval: Said[Count] = 10  # steps between progress lines when the output is not a terminal
    profile_steps: Said[Annotated[list[CountOrNone], Length(2)] | None] = (
        None  # [first, last] step of a torch profiler trace
    )
    wandb_mode: Said[WandbMode] = WandbMode.offline
    wandb_project: Said[Label] = "sparse-pretraining"
    wandb_entity: Said[Label | None] = None
    wandb_group: Said[Label | None] = None


@dataclass
class BtmConfig:
    """Branch-Train-Merge (`python -m recipes.btm`): how the run that the rest describes is divided into branches.

    Li et al. 2022 (arXiv 2208.03306), c-BTM (2303.14177), BTX (2403.07816). `recipes.pretrain` trains the undivided run.
    """

    stages: Free[Annotated[list[BtmStage], Length(16)]] = field(
        default_factory=lambda: list(BtmStage)
    )  # those to run; skipped when nothing changed
    split_by: Free[SplitBy] = SplitBy.domain
    num_branches: Free[Annotated[int, Range(2, 4096)] | None] = (
        None  # parts of the data; null: as many as there are domains
    )
    random_control: Free[bool] = True  # also train as many branches on random parts, for comparison
    seed_share: Free[ShareAboveZero] = 0.5  # of the compute, before branching
    mix_share: Free[Share] = 0.0  # of the compute, after mixing the branches into experts; 0: no mix
    workers: Free[Annotated[int, Range(1, 4096)]] = 2  # branches trained at once
    threads: Free[Annotated[int, Range(1, 1024)] | None] = (
        None  # CPU threads per rank of a branch; null: usable cores / (workers x ranks_per_branch)
    )
    ranks_per_branch: Free[Annotated[int, Range(1, 2**20)]] = (
        1  # ranks of each branch, in any layout that parallel.* describes
    )
    retries: Free[Annotated[int, Range(0, 100)]] = 2  # times that a branch which died is started again
    only: Free[Names] = field(default_factory=list)  # names of the branches that this call trains; []: all
    add_domains: Free[Names] = field(default_factory=list)  # trained beside the others, from an average of them
    remove_domains: Free[Names] = field(default_factory=list)  # left out of ensembles, averages and mix
    form: Free[PosteriorForm] = PosteriorForm.cumulative
    prior: Free[ExpertPrior] = ExpertPrior.cached
    prior_decay: Free[ShareAboveZero] = (
        0.3  # weight of the newest posterior in the moving averages of updating and cached
    )
    top_k: Free[Annotated[int, Range(1, 4096)] | None] = None  # experts that speak at each token; null: all
    development_samples: Free[Annotated[int, Range(0, 10**6)]] = (
        100  # sequences per domain for cached priors, behind those of the evaluation
    )
    average_weights: Free[ByName[Factor]] = field(default_factory=dict)  # of an average of branches by name; {}: none
    cluster_features: Free[Annotated[int, Range(2, 10**4)]] = (
        100  # dimensions after the singular value decomposition of tf-idf
    )
    cluster_tokens: Free[Annotated[int, Range(16, 10**8)]] = (
        512  # longest piece of a document that is clustered as a whole
    )
    cluster_sample: Free[Annotated[int, Range(4, 10**5)]] = 2000  # pieces from which centres are found
    cluster_temperature: Free[Positive] = 0.1  # T of the routing softmax(-distance^2 / T)
    cluster_route_every: Free[Count] = 32  # tokens between routing decisions
    mix_topk: Free[Annotated[int, Range(1, 4096)]] = 2  # experts per token of the mix
    mix_seed_expert: Free[bool] = False  # the seed's feed-forward weights are one more expert
    mix_aux_loss_coeff: Free[Factor] = 1e-2  # as moe.moe_aux_loss_coeff, of it
    mix_router_lr_scale: Free[Factor] = 1.0  # learning rate of its routers, as a multiple of all others'
    mix_expert_lr_scale: Free[Factor | None] = 1.0  # that of its experts; null: sqrt(topk / experts)
    mix_layer_freq: Free[Layers] = 1  # experts in the last of every so many layers; all else is averaged


@dataclass
class Config:
    """The whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    btm: BtmConfig = field(default_factory=BtmConfig)


def to_plain(config: Any) -> Any:
    """The config as plain dicts, lists, numbers and strings (enums by name): what YAML and JSON hold.

    `recipes.description.check_description` is the inverse.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, dict):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(value) for value in config]
    return config


def config_hash(config: Config) -> str:
    """Hex digest by which ranks make sure that they run the same description."""
    plain = to_plain(config)
    # Rank 0 alone has a W&B run, and its node's variables.
    plain["telemetry"] = {key: value for key, value in plain["telemetry"].items() if not key.startswith("wandb_")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
