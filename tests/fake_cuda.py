"""Our code on tensors that say they are on CUDA, on a machine without it.

    python -m tests.fake_cuda CASE ...    one line of JSON per case: {"case": ..., "problem": null or what went wrong}

Tensors are torch's FakeTensors (shapes, types and devices, no numbers) and process groups send nothing. So it shows what needs no
numbers: operations that devices refuse, and reads by the host of memory that a device is still writing. A process that has
pretended so is good for nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANKS = 2

# Autograd asks for the hooks of the accelerator, which torch looks for once, when it is imported, and for a device guard. A build
# without CUDA has none; one with CUDA has some, which find no device.
_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
namespace {
using namespace c10;
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device here() const { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here()); }
  Stream getNewStream(Device, int) const override { return getStream(here()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(here()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
const Guard guard;
}
extern "C" void set_guard() { impl::DeviceGuardImplRegistrar(DeviceType::CUDA, &guard); }
"""


def pretend() -> None:
    """Import torch, and give it what it asks of CUDA. Takes seconds, of a compiler."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "pretend.cpp"), Path(folder, "pretend.so")
        source.write_text(_SOURCE)
        flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run([os.environ.get("CXX", "c++"), str(source), "-o", str(library), *flags], check=True)
        ctypes.CDLL(str(home / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401 - its own guard, if it has one, is set by this

    loaded.set_guard()


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pretend()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


class Watch(TorchDispatchMode):
    """Makes up the numbers that the host asks for, and refuses it what a device is still writing."""

    written: dict[int, Any] = {}  # noqa: RUF012 - storages that a device writes to, by address; kept, lest another takes it

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(self.as_fake, (args, kwargs or {}))
        if func.namespace == "prim":
            return func(*args, **kwargs)
        source, target = _copied(func, args, kwargs)
        if target != "cuda" and not func.is_view:  # what is copied to the device waits its turn there
            for tensor in tree_leaves((args[1:] if source == "cuda" else args, kwargs)):
                if self.is_written(tensor):
                    raise AssertionError(
                        f"{func}: the host reads {tuple(tensor.shape)} while the device still writes it"
                    )
        if func is aten._local_scalar_dense.default:
            flag = args[0].dtype in (torch.bool, torch.uint8)  # no: nothing overflows, no norm is invalid
            return 1.0 if args[0].dtype.is_floating_point else int(not flag)
        if func is aten.index.Tensor:  # by a mask: as if everything counted
            args = (args[0], [x if x is None or x.dtype is not torch.bool else _all(x) for x in args[1]])
        out = func(*args, **kwargs)
        if (source, target) == ("cuda", "cpu") and (kwargs.get("non_blocking") or True in args[2:3]):
            storage = out.untyped_storage()
            self.written[storage._cdata] = storage
        return out

    def as_fake(self, x: Any) -> Any:
        real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        return self.mode.from_tensor(x) if real else x

    def is_written(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage()._cdata in self.written


def _copied(func, args, kwargs) -> tuple[str, str]:
    """From which kind of device to which; nothing where it is no copy."""
    if func is aten.copy_.default:
        return args[1].device.type, args[0].device.type
    if func is aten._to_copy.default:
        return args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
    return "", ""


def _all(mask: torch.Tensor) -> torch.Tensor:
    assert mask.dim() == 1, "masks of one dimension only"
    return torch.arange(len(mask), device=mask.device)


class Stream:
    """Nothing runs on it."""

    device, stream_id, device_index, device_type = CUDA, 0, 0, 1

    def __init__(self, *_, **__): ...
    def wait_stream(self, _): ...
    def wait_event(self, _): ...
    def record_event(self, _=None):
        return Event()

    def query(self):
        return False

    def synchronize(self, *_):
        Watch.written.clear()


class Event(Stream):
    """As little."""

    def record(self, *_): ...
    def wait(self, *_): ...


class _Properties:
    total_memory, name, major, minor, multi_processor_count = 80 << 30, "pretended", 9, 0, 132


def patch_cuda() -> None:
    """Answers to what libraries ask of `torch.cuda`, before they are imported."""
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 8,
        "set_device": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "is_bf16_supported": True,
        "get_device_capability": (9, 0),
        "get_device_properties": _Properties,
        "get_device_name": "pretended",
        "current_stream": Stream(),
        "default_stream": Stream(),
        "manual_seed": None,
        "_lazy_init": None,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = Stream().synchronize
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.record_stream = lambda self, stream: None
    FakeTensor.pin_memory = lambda self, *_: self
    FakeTensor.is_pinned = lambda self, *_: self.device.type == "cpu"
    torch.autograd.set_multithreading_enabled(False)


def start() -> None:
    """A process group of ranks of which this one alone is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator

    from patches import registry

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None  # there are none

    accelerator = get_accelerator()
    assert accelerator.device_name() == "cuda"
    accelerator.pin_memory = lambda tensor, *_, **__: tensor
    accelerator.is_pinned = lambda tensor: tensor.device.type == "cpu"
    torch.nn.Module.to = torch.nn.Module.bfloat16 = torch.nn.Module.float = lambda self, *_, **__: move(self)
    registry.apply_all(say=lambda line: None)


def move(model: torch.nn.Module) -> torch.nn.Module:
    """`model.to(CUDA)`, which torch cannot do with fake parameters."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.device != CUDA:
                moved = torch.nn.Parameter(parameter.detach().to(CUDA))
                moved.__dict__.update(parameter.__dict__ | moved.__dict__)  # marks; what makes it fake is its own
                module._parameters[name] = moved
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else buffer.to(CUDA)
    return model


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Inside, new tensors are fake ones."""
    from megatron.core.tensor_parallel import random

    random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    Watch.written.clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Watch(mode):
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # as the mode does where CUDA is not there: constants start on the host
        yield


def build(config):
    """Model and registry, on the device."""
    from recipes.groups import enter, leave
    from recipes.model.gpt import GPT, registry
    from recipes.topology import layout_of

    leave()
    layout = layout_of(config, RANKS)
    enter(layout)
    model = move(GPT(config, layout))
    assert {parameter.device for parameter in model.parameters()} == {CUDA}
    return model, registry(model, config)


def ids(config):
    import numpy as np

    return np.ones((config.train.micro_batch_size, config.model.seq_length + 1), dtype=np.int64)


def trained(**changes):
    """An engine after two clipped steps of two micro-batches."""
    from recipes.engine import make_engine
    from recipes.train.batch import model_inputs
    from recipes.train.guard import SpikeGuard
    from recipes.train.step import train_step
    from tests.tiny import tiny_config

    config = tiny_config(optimizer__clip_grad=1.0, train__micro_batch_size=2, **changes)
    config.optimizer.name = type(config.optimizer.name).adamw
    model, parameters = build(config)
    engine = make_engine(model, parameters, config)
    applied = []
    engine.optimizer.register_step_post_hook(lambda *_: applied.append(1))
    for _ in range(2):
        batches = [model_inputs(ids(config), 0, config.data, CUDA) for _ in range(engine.accumulation_steps)]
        train_step(engine, batches, 1e-3, SpikeGuard(config.train), False)
    assert len(applied) >= 2, "no update was made"
    return engine


def step(stage: int, offload: bool, bf16: bool = True) -> Callable[[], None]:
    """A case: training, and what a checkpoint would hold of it."""

    def case() -> None:
        from recipes.checkpoint.save import _owned_boxes
        from recipes.config import Precision
        from recipes.placement import owners

        precision = Precision.bf16 if bf16 else Precision.fp32
        engine = trained(zero__stage=stage, zero__offload_optimizer=offload, train__precision=precision)
        assert engine.wrapper is not None and engine.offloaded == offload
        owner = owners(engine.model.config, engine.layout)
        boxes = [box for kind in _owned_boxes(engine, owner).values() for box in kind]
        assert boxes and {box.tensor.device.type for box in boxes} == {"cpu"}, "boxes stay on the device"

    return case


def ridge() -> None:
    """Routers of a mix are fitted on ids and labels in host memory."""
    from recipes.btm.mix import fit_routers
    from recipes.moe.layer import MoeLayer
    from tests.tiny import tiny_moe_config

    MoeLayer.forward = lambda self, x, *_, **__: (x, None)  # where tokens go depends on numbers
    model, _ = build(tiny_moe_config(train__micro_batch_size=2))
    batches = [torch.ones(2, 16, dtype=torch.int64) for _ in range(3)]
    fit_routers(model, batches, [torch.zeros(2, dtype=torch.int64)] * 3, sharpness=8.0)


def held_out() -> None:
    """Losses of a model and of an ensemble, and the distribution of the next token."""
    import numpy as np

    from recipes.btm.model import Ensemble, Weighing
    from recipes.btm.score import token_log_probs
    from recipes.config import PosteriorForm
    from recipes.data.loader import EvalBatch
    from recipes.train.evaluate import evaluate
    from tests.tiny import tiny_config
    from tools.generate import _next_logits

    config = tiny_config(train__micro_batch_size=2, train__global_batch_size=4, data__reset_attention_mask=True)
    model, _ = build(config)
    batch = EvalBatch(ids(config), np.ones(2))
    evaluate(model, {"all": [batch]}, 0, config.data)
    both = Ensemble([model, model], Weighing(next(iter(PosteriorForm)), (0.5, 0.5), None, None)).eval()
    found = token_log_probs(both, ids(config), 0, config.data, 1)
    assert found.device.type == "cpu"
    assert _next_logits(model, [1, 2, 3], 0).device == CUDA


CASES: dict[str, Callable[[], None]] = {
    "bf16 ZeRO-0": step(0, False),
    "bf16 ZeRO-1": step(1, False),
    "bf16 ZeRO-2": step(2, False),
    "bf16 ZeRO-3": step(3, False),
    "offloaded bf16 ZeRO-3": step(3, True),
    "fp32 ZeRO-1": step(1, False, bf16=False),
    "offloaded bf16 ZeRO-1": step(1, True),
    "offloaded bf16 ZeRO-2": step(2, True),
    "offloaded fp32 ZeRO-1": step(1, True, bf16=False),
    "routers of a mix": ridge,
    "held-out text": held_out,
}


def main(names: list[str]) -> None:
    patch_cuda()
    start()
    for name in names:
        problem = None
        try:
            with fake():
                CASES[name]()
        except Exception:  # noqa: BLE001 - told to the test
            problem = traceback.format_exc()
        print(json.dumps({"case": name, "problem": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
