"""The values of the keys that have a few named ones, a class for each such key of `recipes/config.py`."""

from __future__ import annotations

import enum


class Resume(enum.Enum):
    """What to do with a run folder that exists: refuse it, or go on from its newest complete checkpoint."""

    never = "never"
    auto = "auto"


class CheckpointLoad(enum.Enum):
    """What a new run takes from the checkpoint of another: everything, so that it goes on there; or the weights, at step 0."""

    all = "all"
    weights = "weights"


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
