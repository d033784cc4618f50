"""Run megatron-core on a machine without CUDA: rewrite its modules as they are imported.

megatron-core hard-codes CUDA in about two hundred places. Replacing functions of torch itself would change the whole
process and break vLLM beside it; so only the syntax trees of `megatron.core` modules are rewritten, at import:

- `torch.cuda` and everything imported from it becomes `megarl.platform.cuda_stub`;
- the literals "cuda" and "torch.cuda.<X>Tensor" become their CPU names;
- `x.cuda()` and `x.pin_memory()` become `x`, `pin_memory=True` becomes False, `x.is_cuda` (read: "on the device") True;
- `x.record_stream(stream)` becomes `x`: there is one stream, and torch takes no stand-in for it;
- gathers and scatters of uneven parts pad them, those of a rank alone do nothing (`gloo_collectives.py`);
- the router's `te_general_gemm`, which 0.16 leaves undefined without Transformer Engine and then asks for, becomes None;
- `jit_fuser` (torch.compile, which needs a C++ compiler) is disabled, and the RNG tracker uses the CPU generator.

Checked with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

_PREFIX = "megatron.core"
_STUB = "megarl.platform.cuda_stub"
_ALIAS = "__megarl_cuda__"


class _Rewriter(ast.NodeTransformer):
    """One pass over a module's syntax tree; see the module docstring for the rules."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace(".cuda", "")), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_ALIAS, node.ctx), node)
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


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source; never reads or writes a `.pyc`, which would be shared with a CUDA process."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        body = tree.body
        # The stub's import goes behind the docstring and the __future__ imports, which must stay first.
        position = next(
            (
                index
                for index, node in enumerate(body)
                if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            ),
            len(body),
        )
        tree = _Rewriter().visit(tree)
        tree.body[position:position] = ast.parse(f"import {_STUB} as {_ALIAS}").body
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()
        elif module.__name__ == "megatron.core.tensor_parallel.random":
            module._get_cuda_rng_state = _get_rng_state  # type: ignore[attr-defined]
            module._set_cuda_rng_state = _set_rng_state  # type: ignore[attr-defined]
        elif module.__name__ == "megatron.core.tensor_parallel.mappings":
            from megarl.platform import gloo_collectives  # here: it imports torch, which this file leaves to megatron-core

            gloo_collectives.install_uneven(module)
        elif module.__name__ == "megatron.core.distributed.param_and_grad_buffer":
            from megarl.platform import gloo_collectives

            gloo_collectives.install_alone(module)
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
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _get_rng_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> object:
    import torch

    return torch.get_rng_state()


def _set_rng_state(new_state: object, device: object = -1, graph_safe: bool = False) -> None:
    import torch

    torch.set_rng_state(new_state)  # type: ignore[arg-type]


def install() -> None:
    """Install the hook, once; an error if megatron-core was imported before it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert _PREFIX not in sys.modules, "import megarl.platform before megatron.core: it must be rewritten for this CPU"
    sys.meta_path.insert(0, _Finder())
