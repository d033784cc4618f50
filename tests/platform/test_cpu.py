"""megatron-core runs on a CPU without a change to torch, and the stand-in for CUDA lacks no name."""

import subprocess
import sys

from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model


def _missed_after_training(directory):
    from megarl.models.layout import Layout
    from megarl.platform import cuda_stub
    from tests.engine_cases import train

    train(directory, {"actor": Layout(1, 2, 1)}, 1, 64, "bf16")
    return sorted(cuda_stub.missed)


def test_a_training_step_reads_no_name_that_the_stub_lacks(tmp_path):
    assert run_ranks(_missed_after_training, 2, str(save_tiny_model(tmp_path))) == [[], []]


def test_torch_stays_unchanged_and_a_rank_alone_gathers_without_a_thread_of_gloo():
    """gloo's thread would start a second OpenMP team and slow down all other threads. The last number shows that torch still
    starts this thread; if it no longer does, the replacement may go."""
    script = """
import os, torch, torch.distributed as dist
before = {name: getattr(torch.cuda, name) for name in ("current_device", "is_available", "Stream", "synchronize")}
tensor_cuda, compile = torch.Tensor.cuda, torch.compile
import megarl.platform
import megatron.core.optimizer, megatron.core.tensor_parallel.random
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.jit import jit_fuser
assert all(getattr(torch.cuda, name) is value for name, value in before.items())
assert torch.Tensor.cuda is tensor_cuda and torch.compile is compile and jit_fuser(len) is len
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
own, whole = torch.arange(1 << 21).float(), torch.zeros(1 << 21)
own.clone()
counts = [threads()]
for function in (buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func):
    function(own, own[:], group=dist.group.WORLD, async_op=False)
    assert function(whole.zero_(), own, group=dist.group.WORLD, async_op=True) is None and torch.equal(own, whole)
counts.append(threads())
dist.all_gather_into_tensor(whole, own)
print(*[count - counts[0] for count in counts + [threads()]])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "0", "1"], done
