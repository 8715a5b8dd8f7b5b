"""Each value by itself: what the schema says of it, and the settings of DeepSpeed that are not the user's to make."""

from __future__ import annotations

from collections.abc import Iterator

from recipes import schema
from recipes.config import Config, MoeConfig, to_plain
from recipes.description import read_description

Problems = Iterator[str]

# What this library decides of DeepSpeed's configuration, and the key (or the reason) that decides it.
OWNED_KEYS = {
    "train_batch_size": "use train.global_batch_size",
    "train_micro_batch_size_per_gpu": "use train.micro_batch_size",
    "gradient_accumulation_steps": "it follows from train.global_batch_size and train.micro_batch_size",
    "gradient_clipping": "use optimizer.clip_grad",
    "optimizer": "use the group optimizer",
    "scheduler": "use the group schedule",
    "bf16": "use train.precision",
    "bfloat16": "use train.precision",
    "fp16": "use train.precision",
    "amp": "use train.precision",
    "data_types": "gradients accumulate in fp32",
    "communication_data_type": "gradients are reduced in fp32",
    "zero_optimization.stage": "use zero.stage",
    "zero_optimization.reduce_bucket_size": "use zero.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "use zero.allgather_bucket_size",
    "zero_optimization.overlap_comm": "use zero.overlap_comm",
    "zero_optimization.offload_optimizer": "use zero.offload_optimizer",
    "zero_optimization.cpu_offload": "use zero.offload_optimizer",
    "zero_optimization.offload_param": "weights stay on the device; zero.stage=3 divides them over the ranks",
    "zero_optimization.contiguous_gradients": "it stays true: without it ZeRO-1 gradients can be wrong",
    "zero_optimization.reduce_scatter": "it stays true: DeepSpeed reduces gradients of experts in no other way",
    "zero_optimization.round_robin_gradients": "it stays false: full gradients cannot be read otherwise",
    "zero_allow_untested_optimizer": "it stays true: the optimizer is torch's",
    "zero_force_ds_cpu_optimizer": "it stays false: the optimizer is torch's",
    "moe": "use the group moe",
    "expert_parallel": "use the group moe and parallel.expert_model_parallel_size",
    "tensor_parallel": "use parallel.tensor_model_parallel_size",
    "pipeline.pipe_partitioned": "it stays false: ranks pass on hidden states as they are, divided or not",
    "pipeline.grad_partitioned": "it stays false: ranks pass on gradients as they are, divided or not",
    "sequence_parallel_size": "it means another parallelism; there is parallel.sequence_parallel",
    "use_data_before_expert_parallelism": "it stays false: neighbouring ranks share the experts out",
    "steps_per_print": "progress is printed by telemetry",
}


def check_ranges(config: Config) -> Problems:
    """Single values against the rules of the schema."""
    _, found = read_description(to_plain(config))
    yield from found


def expert_counts_by_key(moe: MoeConfig) -> dict[str, int]:
    """The different numbers of experts that the description gives, each by its own key, or that of the first such layer."""
    counts = moe.num_moe_experts_per_layer
    if counts is None:
        return {} if moe.num_moe_experts is None else {"moe.num_moe_experts": moe.num_moe_experts}
    return {f"moe.num_moe_experts_per_layer[{counts.index(count)}]": count for count in dict.fromkeys(counts)}


def show_experts(moe: MoeConfig) -> str:
    """The setting that gives the model experts."""
    name = "num_moe_experts" if moe.num_moe_experts_per_layer is None else "num_moe_experts_per_layer"
    return f"moe.{name}={schema.show(getattr(moe, name))}"


def divisible(key: str, value: int, divisor_text: str, divisor: int, otherwise: str = "") -> Problems:
    """A value that must be a multiple of `divisor`, which is shown as `divisor_text`; proposes the nearest two."""
    if value % divisor:
        below = value // divisor * divisor
        tries = " or ".join(str(number) for number in (below, below + divisor) if number)
        product = f" = {divisor}" if " x " in divisor_text else ""
        yield f"{key}={value} must be divisible by {divisor_text}{product}; try {tries}{otherwise}"
