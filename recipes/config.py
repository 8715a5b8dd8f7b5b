"""The description of a run: one dataclass per configuration group, the unit of every field beside it.

Hydra composes YAML groups and command-line overrides into these schemas (`recipes/pretrain.py`); `recipes/validation`
then checks the fields against each other. Nothing here imports torch, so that a mistake is answered at once.
Where megatron-core or DeepSpeed have a name for something, it is used.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

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


class Resume(enum.Enum):
    """What to do with a run folder that exists: refuse it, or go on from its newest complete checkpoint."""

    never = "never"
    auto = "auto"


class Precision(enum.Enum):
    """Type of weights and activations; masters, moments, norms and losses are fp32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


class Normalization(enum.Enum):
    """Normalisation before attention, before the feed-forward part and before the head."""

    RMSNorm = "RMSNorm"
    LayerNorm = "LayerNorm"


class Activation(enum.Enum):
    """Feed-forward form: gated SiLU (three matrices) or GELU (two matrices)."""

    swiglu = "swiglu"
    gelu = "gelu"


class Recompute(enum.Enum):
    """Which activations the backward pass computes again instead of keeping them: those of whole blocks, or of some modules."""

    selective = "selective"
    full = "full"


RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act")  # what `selective` can name


class TransformerImpl(enum.Enum):
    """Layer specification: plain torch, Transformer Engine, or the latter wherever it can run."""

    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


class MoeBackend(enum.Enum):
    """Our layer (stacked experts, uneven all-to-all), or DeepSpeed's stock layer."""

    grouped = "grouped"
    deepspeed = "deepspeed"


class AuxLossScope(enum.Enum):
    """Over which tokens the shares and mean probabilities of the load-balancing loss are taken.

    Each sequence; all ranks' tokens of one micro-batch; or the whole step, with the shares of the step before.
    """

    sequence = "sequence"
    micro_batch = "micro_batch"
    global_batch = "global_batch"


class RouterType(enum.Enum):
    """Who chooses: tokens their best experts, in training perhaps at prices that even out the load of a micro-batch (sinkhorn);
    experts their best tokens of a micro-batch, later ones of a sequence among them; or, as controls, nobody: a fixed table from
    token ids, or chance (from the seed and the sequence so far)."""

    topk = "topk"
    sinkhorn = "sinkhorn"
    expert_choice = "expert_choice"
    hash = "hash"
    random = "random"


class SecondExpert(enum.Enum):
    """The second of two experts in training: the second best; one drawn in proportion to its probability; or the second best,
    used only when twice its gate exceeds a random number. Always the second best in evaluation."""

    best = "best"
    sampled = "sampled"
    threshold = "threshold"


class ScoreFunction(enum.Enum):
    """From a token's logits to its scores: a softmax over the experts, or each expert's sigmoid by itself."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class TokenDropPolicy(enum.Enum):
    """Whom a full expert turns away: the smallest gates, or the last tokens."""

    probs = "probs"
    position = "position"


class OptimizerName(enum.Enum):
    """AdamW for training; SGD makes an update proportional to the gradient, for comparing layouts."""

    adamw = "adamw"
    sgd = "sgd"


class DecayStyle(enum.Enum):
    """How the learning rate falls after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


class BtmStage(enum.Enum):
    """Stages of Branch-Train-Merge, in order; each leaves its artefacts in the run folder."""

    split = "split"
    seed = "seed"
    branch = "branch"
    train = "train"
    merge = "merge"
    mix = "mix"
    evaluate = "evaluate"


class SplitBy(enum.Enum):
    """What a branch is trained on: a domain, a random part of every domain (the control), or a cluster of unlabelled text."""

    domain = "domain"
    random = "random"
    cluster = "cluster"


class PosteriorForm(enum.Enum):
    """What an expert's weight in an ensemble follows from: all tokens before the next one, or only the last of them."""

    cumulative = "cumulative"
    last_token = "last_token"


class ExpertPrior(enum.Enum):
    """Weight of an expert before any token: equal, following the posteriors so far, or measured on development text."""

    uniform = "uniform"
    updating = "updating"
    cached = "cached"


class WandbMode(enum.Enum):
    """Weights & Biases: files in the run folder only, live upload, or not at all."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass
class RunConfig:
    """Where the run lives and what it starts from."""

    name: FolderPart = "pretrain"  # shown in logs; part of the default run folder
    dir: Folder | None = None  # run folder, relative to the launch directory; null: outputs/<name>-<date>-<time>
    seed: Annotated[int, Range(0, 2**62)] = 1234  # of initial weights, data order and dropout
    resume: Resume = Resume.never


@dataclass
class TrainConfig:
    """The amount of training, the batch, evaluation, and what counts as a bad step."""

    steps: Count = 1000  # optimizer steps
    micro_batch_size: BatchSize = 8  # sequences per forward pass and data-parallel rank
    global_batch_size: BatchSize = 16  # sequences per optimizer step over all data-parallel ranks
    precision: Precision = Precision.fp32
    eval_interval: CountOrNone = 0  # steps between evaluations; 0: only after the last step
    eval_samples: CountOrNone = 64  # validation sequences per domain; 0: no evaluation
    spike_factor: Factor = 0.0  # skip a step whose gradient norm exceeds this multiple of the recent median; 0: never
    spike_window: Annotated[int, Range(2, 10**6)] = (
        64  # accepted steps in that median; the test starts when half of them are known
    )
    max_skipped_steps: Count = 20  # consecutive skipped steps (non-finite or spikes) that end the run


@dataclass
class ModelConfig:
    """A decoder-only Transformer, in megatron-core's field names."""

    num_layers: Layers = 4  # Transformer blocks
    hidden_size: Width = 128  # width of the residual stream
    ffn_hidden_size: Width | None = (
        None  # feed-forward width; null: 4 x hidden (gelu) or 8/3 x hidden up to a multiple of 64
    )
    num_attention_heads: Heads = 4
    num_query_groups: Heads | None = None  # key/value heads; null: as many as attention heads
    kv_channels: Annotated[int, Range(2, 2**16)] | None = (
        None  # width of one head; null: hidden_size / num_attention_heads
    )
    seq_length: Annotated[int, Range(1, 2**26)] = 128  # tokens per sequence
    vocab_size: Annotated[int, Range(2, 2**26)] | None = None  # token ids, unpadded; null: the tokenizer's
    make_vocab_size_divisible_by: Annotated[int, Range(1, 2**20)] = (
        128  # rows of the embedding are padded up to a multiple of this
    )
    share_embeddings_and_output_weights: bool = True
    normalization: Normalization = Normalization.RMSNorm
    layernorm_epsilon: Positive = 1e-5
    activation: Activation = Activation.swiglu
    add_bias_linear: bool = False  # biases in all linear layers of the blocks
    add_qkv_bias: bool = False  # biases in the query, key and value projections only
    qk_layernorm: bool = False  # normalise queries and keys per head
    rotary_base: Annotated[float, Range(0.0, 1e12, above=True)] = 10000.0
    rotary_percent: ShareAboveZero = 1.0  # share of each head's width that rotates
    hidden_dropout: Share = 0.0  # probability
    attention_dropout: Share = 0.0  # probability
    init_method_std: Factor = (
        0.02  # of initial weights; matrices that write to the residual stream: / sqrt(2 num_layers)
    )
    transformer_impl: TransformerImpl = TransformerImpl.auto
    recompute_granularity: Recompute | None = None  # null: everything is kept
    recompute_modules: Annotated[list[Annotated[str, Text()]], Length(16)] = field(
        default_factory=lambda: ["core_attn"]
    )  # of selective: core_attn, layernorm, mlp, moe, moe_act (the activation inside the experts alone)


@dataclass
class MoeConfig:
    """Experts in place of feed-forward blocks, in megatron-core's field names."""

    num_moe_experts: Experts | None = None  # of each MoE layer, over all ranks; this and the next null: a dense model
    num_moe_experts_per_layer: PerLayer[Experts] | None = None  # in its place: one number per MoE layer, in order
    backend: MoeBackend = MoeBackend.grouped
    moe_layer_freq: Layers = 1  # every so many layers have experts
    moe_layer_offset: Annotated[int, Range(0, 10_000)] = 0  # number of the first one, from 0
    moe_layer_pattern: PerLayer[Annotated[int, Range(0, 1)]] | None = (
        None  # 1 for each layer with experts, else 0; null: by the two above
    )
    moe_ffn_hidden_size: Width | None = None  # width of one expert; null: that of the dense feed-forward block
    moe_shared_expert_intermediate_size: Width | None = None  # width of an expert that every token passes; null: none
    moe_shared_expert_gate: bool = False  # multiply its output by a learned sigmoid of the token
    moe_use_residual: bool = False  # mix its output and that of the chosen ones by a learned softmax of the token
    moe_expert_dropout: ShareBelowOne = 0.0  # probability, of hidden activations of the chosen experts
    moe_init_scale: Positive = 1.0  # variance of initial weights of routers and experts, as a multiple of the others'
    moe_router_type: RouterType = RouterType.topk
    moe_router_topk: Experts = 1  # experts per token; of expert_choice on average
    moe_second_expert: SecondExpert = SecondExpert.best
    moe_router_pre_softmax: bool = True  # gates from the softmax over all experts; false: over the chosen ones
    moe_router_score_function: ScoreFunction = ScoreFunction.softmax
    moe_router_norm_topk_prob: bool | None = None  # gates of a token add up to 1; null: those of several sigmoids do
    moe_router_topk_scaling_factor: Positive | None = None  # by which gates are multiplied at last; null: 1
    moe_router_num_groups: Experts | None = None  # equal parts of the experts, such as those of a node; null: no groups
    moe_router_group_topk: Experts | None = None  # groups in which a token's experts may be; null: no groups
    moe_router_enable_expert_bias: bool = False  # balance by biases that count in the choice only
    moe_router_bias_update_rate: Positive = 1e-3  # by which each step moves the biases
    moe_input_jitter_eps: ShareBelowOne | None = (
        None  # training: routers see tokens times 1 +- this at random; null: as they are
    )
    moe_router_gumbel_scale: Factor = 0.0  # training: Gumbel noise added to logits for the choice, as a multiple
    moe_router_lr_scale: Factor = 1.0  # learning rate of routers, as a multiple of the dense weights'
    moe_expert_lr_scale: Factor | None = 1.0  # that of experts; null: sqrt(topk / experts of their layer)
    moe_aux_loss_coeff: Factor = (
        1e-2  # weight of each layer's E sum f P, f of sum 1; Hugging Face's x topk / number of such layers
    )
    aux_loss_scope: AuxLossScope = AuxLossScope.micro_batch
    moe_z_loss_coeff: Factor = 0.0  # weight of each layer's router z-loss, a mean over tokens; layers add up
    moe_loss_coeff_ramp: Annotated[list[CountOrNone], Length(2)] | None = (
        None  # [first, last] step between which these weights move; null: they stay
    )
    moe_aux_loss_coeff_end: Factor | None = None  # moe_aux_loss_coeff from the last of these steps on; null: unchanged
    moe_z_loss_coeff_end: Factor | None = None  # moe_z_loss_coeff from the last of these steps on; null: unchanged
    moe_expert_capacity_factor: Positive | None = None  # of the even share of a rank's tokens; null: nothing is dropped
    moe_eval_capacity_factor: Positive | None = None  # the same in evaluation
    moe_min_capacity: CountOrNone = 0  # tokens that an expert takes at least, with a capacity factor
    moe_token_drop_policy: TokenDropPolicy = TokenDropPolicy.probs

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return self.num_moe_experts is not None or self.num_moe_experts_per_layer is not None


@dataclass
class ParallelConfig:
    """How the ranks share the work."""

    data_parallel_size: Annotated[int, Range(1, 2**20)] | None = (
        None  # ranks that share a batch; null: all ranks / (tensor x pipeline size)
    )
    tensor_model_parallel_size: GroupSize = 1  # ranks that share each layer's matrices
    sequence_parallel: bool = False  # tensor-parallel ranks also share the tokens between the matrices
    pipeline_model_parallel_size: GroupSize = 1  # stages, each with some of the layers; divides the ranks
    num_layers_in_first_pipeline_stage: Layers | None = None  # null: as many as the others, or one more
    num_layers_in_last_pipeline_stage: Layers | None = None  # null: as many as the others, or one fewer
    expert_model_parallel_size: Experts = 1  # ranks that share the experts of a layer out
    expert_tensor_parallel_size: GroupSize | None = (
        None  # ranks that share each expert's matrices; null: as the layer's, or 1
    )


@dataclass
class ZeroConfig:
    """DeepSpeed ZeRO: what is divided over the data-parallel ranks."""

    stage: Annotated[int, Range(0, 3)] = (
        1  # 0: nothing, 1: optimizer states, 2: also gradients, 3: also weights (dense models)
    )
    reduce_bucket_size: BucketSize = 50_000_000  # elements reduced at once
    allgather_bucket_size: BucketSize = 50_000_000  # elements gathered at once
    overlap_comm: bool = False  # reduce gradients during the backward pass (CUDA)
    offload_optimizer: bool = False  # keep optimizer states in host memory and update there


@dataclass
class DeepSpeedConfig:
    """Anything else for DeepSpeed."""

    extra: dict[str, Any] = field(default_factory=dict)  # merged into DeepSpeed's configuration


@dataclass
class DataConfig:
    """Indexed text and how it becomes samples."""

    path: Folder | None = "data/laptop"  # folder written by tools.index, relative to the launch directory; null: none
    domain_weights: ByName[Factor] = field(default_factory=dict)  # share of samples; {}: in proportion to tokens
    wrap: bool = True  # start again when a domain is used up; false: refuse to start with too few samples
    reset_position_ids: bool = False  # positions start at 0 after each end-of-document token
    reset_attention_mask: bool = False  # tokens attend, and are routed by chance, within their document only
    eod_mask_loss: bool = False  # the prediction made at an end-of-document token does not count; routers count it


@dataclass
class OptimizerConfig:
    """Update rule."""

    name: OptimizerName = OptimizerName.adamw
    lr: Positive = 3e-3  # peak learning rate
    min_lr: Factor = 3e-4  # learning rate at the end of the decay
    weight_decay: Factor = 0.1  # of matrices; norms and biases have none
    adam_beta1: ShareBelowOne = 0.9
    adam_beta2: ShareBelowOne = 0.95
    adam_eps: Positive = 1e-8
    clip_grad: Factor = 1.0  # bound on the global gradient norm; 0: no clipping


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step alone."""

    lr_decay_style: DecayStyle = DecayStyle.cosine
    lr_warmup_steps: CountOrNone = 50  # linear from 0
    lr_decay_steps: Count | None = None  # step at which min_lr is reached; null: train.steps
    wsd_decay_steps: CountOrNone = 0  # length of the final decay of wsd; ignored by the others


@dataclass
class CheckpointConfig:
    """When training state is written, and which is read."""

    load_from: Folder | None = None  # checkpoint of another run, whose weights, moments and step a new run starts with
    save_interval: CountOrNone = 0  # steps between checkpoints; 0: by time alone
    save_interval_minutes: Factor = 30.0  # minutes between checkpoints, on rank 0's clock; 0: by steps alone
    save_final: bool = True  # write one after the last step
    keep: Count = 2  # newest checkpoints kept
    load_step: Count | None = None  # with run.resume=auto: exactly this one; null: the newest complete one
    override_schedule: bool = False  # resume although the steps or the schedule differ from the checkpoint's


@dataclass
class TelemetryConfig:
    """What is recorded."""

    log_interval: Count = 10  # steps between progress lines when the output is not a terminal
    profile_steps: Annotated[list[CountOrNone], Length(2)] | None = None  # [first, last] step of a torch profiler trace
    wandb_mode: WandbMode = WandbMode.offline
    wandb_project: Label = "sparse-pretraining"
    wandb_entity: Label | None = None
    wandb_group: Label | None = None


@dataclass
class BtmConfig:
    """Branch-Train-Merge (`python -m recipes.btm`): how the run that the rest describes is divided into branches.

    Li et al. 2022 (arXiv 2208.03306), c-BTM (2303.14177), BTX (2403.07816). `recipes.pretrain` trains the undivided run.
    """

    stages: Annotated[list[BtmStage], Length(16)] = field(
        default_factory=lambda: list(BtmStage)
    )  # those to run; skipped when nothing changed
    split_by: SplitBy = SplitBy.domain
    num_branches: Annotated[int, Range(2, 4096)] | None = None  # parts of the data; null: as many as there are domains
    random_control: bool = True  # also train as many branches on random parts, for comparison
    seed_share: ShareAboveZero = 0.5  # of the compute, before branching
    mix_share: Share = 0.0  # of the compute, after mixing the branches into experts; 0: no mix
    workers: Annotated[int, Range(1, 4096)] = 2  # branches trained at once
    threads: Annotated[int, Range(1, 1024)] | None = (
        None  # CPU threads per rank of a branch; null: usable cores / (workers x ranks_per_branch)
    )
    ranks_per_branch: Annotated[int, Range(1, 2**20)] = (
        1  # ranks of each branch, in any layout that parallel.* describes
    )
    retries: Annotated[int, Range(0, 100)] = 2  # times that a branch which died is started again
    only: Names = field(default_factory=list)  # names of the branches that this call trains; []: all
    add_domains: Names = field(default_factory=list)  # trained beside the others, from an average of them
    remove_domains: Names = field(default_factory=list)  # left out of ensembles, averages and mix
    form: PosteriorForm = PosteriorForm.cumulative
    prior: ExpertPrior = ExpertPrior.cached
    prior_decay: ShareAboveZero = 0.3  # weight of the newest posterior in the moving averages of updating and cached
    top_k: Annotated[int, Range(1, 4096)] | None = None  # experts that speak at each token; null: all
    development_samples: Annotated[int, Range(0, 10**6)] = (
        100  # sequences per domain for cached priors, behind those of the evaluation
    )
    average_weights: ByName[Factor] = field(default_factory=dict)  # of an average of branches by name; {}: none
    cluster_features: Annotated[int, Range(2, 10**4)] = (
        100  # dimensions after the singular value decomposition of tf-idf
    )
    cluster_tokens: Annotated[int, Range(16, 10**8)] = 512  # longest piece of a document that is clustered as a whole
    cluster_sample: Annotated[int, Range(4, 10**5)] = 2000  # pieces from which centres are found
    cluster_temperature: Positive = 0.1  # T of the routing softmax(-distance^2 / T)
    cluster_route_every: Count = 32  # tokens between routing decisions
    mix_topk: Annotated[int, Range(1, 4096)] = 2  # experts per token of the mix
    mix_seed_expert: bool = False  # the seed's feed-forward weights are one more expert
    mix_aux_loss_coeff: Factor = 1e-2  # as moe.moe_aux_loss_coeff, of it
    mix_router_lr_scale: Factor = 1.0  # learning rate of its routers, as a multiple of all others'
    mix_expert_lr_scale: Factor | None = 1.0  # that of its experts; null: sqrt(topk / experts)
    mix_layer_freq: Layers = 1  # experts in the last of every so many layers; all else is averaged


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
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()
