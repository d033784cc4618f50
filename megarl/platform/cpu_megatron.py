"""Run megatron-core on a machine without CUDA: rewrite its modules as they are imported.

megatron-core hard-codes CUDA in about two hundred places. A patch of torch would break vLLM in the same process, so the
import hook rewrites only the syntax trees of `megatron.core` modules:

- `torch.cuda` and everything imported from it becomes `megarl.platform.cuda_stub`;
- the literals "cuda" and "torch.cuda.<X>Tensor" become their CPU names;
- `x.cuda()` and `x.pin_memory()` become `x`, `pin_memory=True` becomes False, `x.is_cuda` (read: "on the device") True;
- `x.record_stream(stream)` becomes `x`: there is one stream, and torch accepts no stand-in for it;
- `torch.distributed.all_gather` and `reduce_scatter` become the functions below, which take parts of unequal size;
- the all-gather and reduce-scatter of the distributed optimizer only copy in a group of one rank;
- the router's `te_general_gemm`, which 0.16 reads and leaves undefined without Transformer Engine, becomes None;
- `jit_fuser` (torch.compile, which needs a C++ compiler) is disabled.

Checked with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

_PREFIX = "megatron.core"
_STUB = "megarl.platform.cuda_stub"
_ALIAS, _COLLECTIVES = "__megarl_cuda__", "__megarl_collectives__"


class _Rewriter(ast.NodeTransformer):
    """Applies the rules of the module docstring to one syntax tree."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace(".cuda", "")), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_ALIAS, node.ctx), node)
        if ast.unparse(node) in ("torch.distributed.all_gather", "torch.distributed.reduce_scatter"):
            node.value = ast.copy_location(ast.Name(_COLLECTIVES, ast.Load()), node.value)
            return node
        self.generic_visit(node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(True), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "pin_memory", "record_stream"):
            return node.func.value
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level == 0 and node.module and (node.module == "torch.cuda" or node.module.startswith("torch.cuda.")):
            node.module = _STUB
        return node


class _StubbedLoader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source without a `.pyc`, which a CUDA process would share."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        body = tree.body
        # The docstring and the __future__ imports must stay first.
        position = 0
        while position < len(body) and (
            (isinstance(node := body[position], ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        ):
            position += 1
        tree = _Rewriter().visit(tree)
        tree.body[position:position] = ast.parse(f"import {_STUB} as {_ALIAS}, {__name__} as {_COLLECTIVES}").body
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()
        elif module.__name__ == "megatron.core.distributed.param_and_grad_buffer":
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                setattr(module, name, _unless_alone(getattr(module, name)))
        elif module.__name__ == "megatron.core.transformer.moe.moe_utils":
            vars(module).setdefault("te_general_gemm", None)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PREFIX and not fullname.startswith(_PREFIX + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _StubbedLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the import hook once. Raises AssertionError if megatron-core was imported before."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert _PREFIX not in sys.modules, "import megarl.platform before megatron.core: it must be rewritten for this CPU"
    sys.meta_path.insert(0, _Finder())


# Collectives ----------------------------------------------------------------------------------------------------------


def all_gather(parts: list[Tensor], local: Tensor, group: Any = None, **more: Any) -> Any:
    """Gather every rank's `local` into `parts`, as torch does, also when the parts have different numbers of rows.

    Ranks that share an expert's tensors gather different numbers of tokens. NCCL takes such parts; gloo does not, so each
    part is padded to the longest.
    """
    if len({part.shape[:1] for part in parts}) == 1:
        return dist.all_gather(parts, local, group=group, **more)
    longest = max(map(len, parts))
    padded = [part.new_empty(longest, *part.shape[1:]) for part in parts]
    dist.all_gather(padded, _padded(local, longest), group=group)
    for part, received in zip(parts, padded, strict=True):
        part.copy_(received[: len(part)])
    return None


def reduce_scatter(output: Tensor, parts: list[Tensor], group: Any = None, **more: Any) -> Any:
    """Sum the ranks' parts and return each rank its part in `output`, as torch does, also for parts of unequal size."""
    if len({part.shape[:1] for part in parts}) == 1:
        return dist.reduce_scatter(output, parts, group=group, **more)
    longest = max(map(len, parts))
    received = output.new_empty(longest, *output.shape[1:])
    dist.reduce_scatter(received, [_padded(part, longest) for part in parts], group=group)
    output.copy_(received[: len(output)])
    return None


def _padded(part: Tensor, num_rows: int) -> Tensor:
    """Append rows of zeros."""
    return pad(part, (0, 0) * (part.dim() - 1) + (0, num_rows - len(part))).contiguous()


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the all-gather or reduce-scatter of `param_and_grad_buffer` that only copies in a group of one rank.

    megatron-core's distributed optimizer gathers and scatters in a group of any size. gloo copies the buffer onto itself in
    a thread with its own OpenMP team. With more threads than cores under libgomp, threads stop spinning, and every small
    product pays for a wake-up (torch 2.13; two threads on two cores: a pass takes 1.1 to 1.3 times as long). Ranks of larger
    groups still pay this price if they have several threads.

    The module rebinds its reduce-scatter under `reduce_scatter_with_fp32_accumulation`, which megarl never sets.
    """

    def replacement(output: Tensor, local: Tensor, *more: Any, group: Any, **named: Any) -> Any:
        if group.size() > 1:
            return collective(output, local, *more, group=group, **named)
        if output.data_ptr() != local.data_ptr():
            output.copy_(local)
        return None  # no work to wait for

    return replacement
