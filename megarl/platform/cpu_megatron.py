"""Run megatron-core on a machine without CUDA: rewrite its modules as they are imported.

megatron-core hard-codes CUDA in about two hundred places. Patching torch would break vLLM in the same process, so only the
syntax trees of `megatron.core` modules are rewritten, at import:

- `torch.cuda` and everything imported from it becomes `megarl.platform.cuda_stub`;
- the literals "cuda" and "torch.cuda.<X>Tensor" become their CPU names;
- `x.cuda()` and `x.pin_memory()` become `x`, `pin_memory=True` becomes False, `x.is_cuda` (read: "on the device") True;
- `x.record_stream(stream)` becomes `x`: there is one stream, and torch accepts no stand-in for it;
- gathers and scatters pad uneven parts, and do nothing in a group of one (`gloo_collectives.py`);
- the router's `te_general_gemm`, which 0.16 reads and leaves undefined without Transformer Engine, becomes None;
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
        tree.body[position:position] = ast.parse(f"import {_STUB} as {_ALIAS}").body
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()
        elif module.__name__ == "megatron.core.tensor_parallel.random":
            import torch  # here: this file leaves the first import of torch to megatron-core

            module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()  # type: ignore[attr-defined]
            module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]
        elif module.__name__ == "megatron.core.tensor_parallel.mappings":
            from megarl.platform import gloo_collectives

            gloo_collectives.install_uneven(module)
        elif module.__name__ == "megatron.core.distributed.param_and_grad_buffer":
            from megarl.platform import gloo_collectives

            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                setattr(module, name, gloo_collectives.unless_alone(getattr(module, name)))
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


def install() -> None:
    """Install the import hook once. Fails if megatron-core was imported before."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert _PREFIX not in sys.modules, "import megarl.platform before megatron.core: it must be rewritten for this CPU"
    sys.meta_path.insert(0, _Finder())
