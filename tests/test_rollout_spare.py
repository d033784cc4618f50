"""Memory that is lent to one module after the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.rollout.places import KnownPlaces
from megarl.rollout.spare import SpareMemory
from megarl.sync.in_place import words_of
from megarl.sync.manifest import SyncError
from megarl.sync.read import Box

CPU = torch.device("cpu")


def test_the_next_module_gets_the_same_memory_and_two_parameters_of_one_never_do() -> None:
    spare = SpareMemory()
    first, second = spare.take((4, 8), torch.float32, CPU), spare.take((2, 8), torch.bfloat16, CPU)
    places = first.data_ptr(), second.data_ptr()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    del first, second
    spare.take_back()
    again = spare.take((2, 2, 4), torch.bfloat16, CPU)
    assert again.shape == (2, 2, 4) and again.dtype == torch.bfloat16 and again.data_ptr() == places[0]


def test_memory_that_somebody_kept_is_not_lent_again() -> None:
    """vLLM computes with the weights as they are where it has no kernel that packs them."""
    spare = SpareMemory()
    kept = torch.nn.Parameter(spare.take((4, 8), torch.float32, CPU).fill_(1), requires_grad=False)
    spare.take_back()
    spare.take((4, 8), torch.float32, CPU).fill_(2)
    assert (kept == 1).all()


def test_words_are_of_the_memory_that_was_lent_and_keep_nobody_from_it() -> None:
    """They stay from module to module, and what vLLM keeps is seen beside them."""
    spare, live = SpareMemory(), torch.zeros(4, 8)
    places = []
    for value in (1, 2):
        matrix = spare.take((4, 8), torch.float32, CPU)
        spare.words(matrix)[:] = value
        assert (matrix.view(torch.int32) == value).all() and not live.any()
        spare.words(live)[:] = 3
        assert (matrix.view(torch.int32) == value).all() and (live.view(torch.int32) == 3).all()
        live.zero_()
        places.append(matrix.data_ptr())
        del matrix
        spare.take_back()
    assert places[0] == places[1]
    kept = torch.nn.Parameter(spare.take((4, 8), torch.float32, CPU), requires_grad=False)
    spare.words(kept.detach())[:] = 4
    spare.take_back()
    spare.words(spare.take((4, 8), torch.float32, CPU))[:] = 5
    assert (kept.view(torch.int32) == 4).all()


def test_a_larger_parameter_gets_larger_memory() -> None:
    spare = SpareMemory()
    spare.take((4, 8), torch.float32, CPU)
    spare.take_back()
    assert spare.take((400, 8), torch.float32, CPU).fill_(3).sum() == 9600


def receiver_of(modules: dict[str, torch.nn.Module], covered: dict[str, int]) -> Any:
    """A worker whose modules have a weight [4, 8] each, of which so many elements come."""
    pytest.importorskip("vllm", reason="needs vLLM's base class of receivers")
    from megarl.rollout.receiver import WeightReceiver

    receiver: Any = WeightReceiver.__new__(WeightReceiver)
    receiver._modules, receiver._spare, receiver._repack_s = modules, SpareMemory(), 0.0
    receiver._known = KnownPlaces()
    receiver._sizes = {f"{name}.weight": (4, 8) for name in modules}
    receiver._shape, receiver.model, receiver.device = SimpleNamespace(tied=False), torch.nn.Module(), CPU
    receiver._reader = SimpleNamespace(elements=covered.__getitem__, wrote=lambda place: None)
    return receiver


def linear(elements: int, quant_method: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(elements), requires_grad=False)
    setattr(module, "quant_method", quant_method)  # noqa: B010
    return module


@pytest.mark.parametrize("in_place", [False, True], ids=["from buckets", "in place"])
def test_a_bias_that_vllm_keeps_in_fp32_comes_in_the_format_of_all_others(in_place: bool) -> None:
    """As with the kernel that vLLM has for small weights on CPUs with AMX."""

    class Widening:
        def process_weights_after_loading(self, module: Any) -> None:
            packed.append((module.weight.float().sum().item(), module.bias.dtype))
            module.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
            module.bias.data = module.bias.to(torch.float32)

    packed: list[tuple[float, torch.dtype]] = []
    module = linear(0, Widening())
    module.weight.data = module.weight.to(torch.bfloat16)
    module.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    receiver = receiver_of({"a": module}, {"a.weight": 32, "a.bias": 4})
    receiver._sizes["a.bias"] = (4, 1)
    for value in (1.0, 2.0):
        contents = {name: torch.full(receiver._sizes[name], value, dtype=torch.bfloat16) for name in ("a.weight", "a.bias")}
        boxes = (Box(name, 0, 0, one, None, words_of(one) if in_place else None) for name, one in contents.items())
        receiver._load(boxes, torch.bfloat16)
        receiver._pack_rest()
        assert packed.pop() == (32.0 * value, torch.bfloat16)
        assert module.bias.dtype == torch.float32 and module.bias.tolist() == [value] * 4
    wrong = iter([Box("a.weight", 0, 0, torch.zeros(4, 8, dtype=torch.float16))])
    with pytest.raises(SyncError, match="a.weight is torch.bfloat16 in the engine but torch.float16"):
        receiver._load(wrong, torch.float16)


@pytest.mark.parametrize("in_place", [False, True], ids=["from buckets", "in place"])
def test_a_worker_writes_one_module_after_the_other_into_the_same_memory(in_place: bool) -> None:
    """With a module that packs its weight and drops it, as vLLM's linear layers do on CPUs that have a kernel for it."""
    places, packed = [], []

    class Packing:
        def process_weights_after_loading(self, module: Any) -> None:
            places.append(module.weight.data_ptr())
            packed.append(module.weight.clone())
            module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    names = [f"layers.{number}.linear" for number in range(3)]
    # The last one has a row of padding, which is zero although the memory was written before.
    covered = dict(zip((f"{name}.weight" for name in names), (32, 32, 24), strict=True))
    receiver = receiver_of({name: linear(0, Packing()) for name in names}, covered)
    contents = [torch.full((covered[f"{name}.weight"] // 8, 8), float(number + 1)) for number, name in enumerate(names)]
    words = [words_of(content) if in_place else None for content in contents]
    made = zip(names, contents, words, strict=True)
    boxes = (Box(f"{name}.weight", 0, 0, content, None, whole) for name, content, whole in made)
    receiver._load(boxes, torch.float32)
    receiver._pack_rest()
    assert len(set(places)) == 1
    assert [one.sum().item() for one in packed] == [32.0, 64.0, 72.0] and (packed[2][3] == 0).all()


def test_what_needs_no_spare_memory_is_packed_once_everything_has_come() -> None:
    """Each once; one that vLLM keeps packed stands between them, and does not wait."""
    order: list[str] = []

    class Noting:
        def process_weights_after_loading(self, module: Any) -> None:
            order.append(next(name for name, one in modules.items() if one is module))

    modules = {name: linear(elements, Noting()) for name, elements in (("a", 32), ("packed", 0), ("b", 32))}
    receiver = receiver_of(modules, {"packed.weight": 32})

    def boxes() -> Iterator[Box]:
        for number, name in enumerate(modules, start=1):
            yield Box(f"{name}.weight", 0, 0, torch.full((4, 8), float(number)))
        order.append("all came")

    receiver._load(boxes(), torch.float32)
    receiver._pack_rest()
    assert order == ["packed", "all came", "a", "b"]
    assert [float(module.get_parameter("weight").sum()) for module in modules.values()] == [32.0, 64.0, 96.0]


def test_places_of_one_version_are_those_of_the_next_until_a_parameter_moves() -> None:
    packed: list[str] = []

    class Noting:
        def process_weights_after_loading(self, module: Any) -> None:
            packed.append(next(name for name, one in modules.items() if one is module))

    modules = {name: linear(32, Noting()) for name in ("a", "b")}
    receiver = receiver_of(modules, {})
    contents = [torch.zeros(4, 8), torch.zeros(4, 8)]
    boxes = [Box(f"{name}.weight", 0, 0, one, None, words_of(one)) for name, one in zip(modules, contents, strict=True)]

    def read(chosen: list[Box]) -> Iterator[Box]:
        """As a reader does."""
        places = receiver._known_places(chosen)
        for box, place in zip(chosen, places, strict=True):
            if place is not None:
                place[:] = box.words
        yield from (box for box, place in zip(chosen, places, strict=True) if place is None)

    def take(value: float, chosen: list[Box]) -> list[float]:
        """Sums of both parameters after a version whose elements are all this value."""
        for content in contents:
            content.fill_(value)
        packed.clear()
        receiver._load(read(chosen), torch.float32)
        receiver._pack_rest()
        assert packed == ["a", "b"]
        return [float(module.get_parameter("weight").sum()) for module in modules.values()]

    for module in modules.values():
        module.weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    assert take(1.0, boxes) == [32.0, 32.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver, "_target", None)  # nothing is looked for again
        assert take(2.0, boxes) == [64.0, 64.0]
    with pytest.MonkeyPatch.context() as patch:  # a kernel that keeps a copy of its own, laid out alike

        def keep_copy(self: Noting, module: Any) -> None:
            packed.append(next(name for name, one in modules.items() if one is module))
            module.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)

        patch.setattr(Noting, "process_weights_after_loading", keep_copy)
        assert [take(value, boxes) for value in (6.0, 7.0, 8.0)] == [[192.0] * 2, [224.0] * 2, [256.0] * 2]
    moved = modules["b"].weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    assert take(3.0, boxes) == [96.0, 96.0] and (moved == 3.0).all()
    others = [box._replace(words=words_of(box.content)) for box in boxes]  # mapped anew, as after a start of the trainer
    assert receiver._known.of(others, modules) == [None, None]
    assert take(4.0, others) == [128.0, 128.0]

    def breaks_off() -> Iterator[Box]:
        yield boxes[0]
        raise ValueError("a rank failed")

    with pytest.raises(ValueError, match="a rank failed"):
        receiver._load(breaks_off(), torch.float32)
    assert take(5.0, boxes) == [160.0, 160.0]
    mapped = [weakref.ref(box.words) for box in boxes]
    boxes.clear()
    assert [one() for one in mapped] == [None, None], "what a rank shared stays mapped"


def test_what_lives_has_a_known_place_also_where_other_modules_are_packed() -> None:
    """Each module is packed once in every version: one that lives once everything has come."""
    packed: list[str] = []

    class Noting:
        def process_weights_after_loading(self, module: Any) -> None:
            name = next(name for name, one in modules.items() if one is module)
            packed.append(f"{name} {float(module.weight.sum()):g}")
            if name.startswith("packed"):
                module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    names = ("a", "packed.0", "b", "packed.1")
    modules = {name: linear(0, Noting()) for name in names}
    for name in ("a", "b"):
        modules[name].weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    receiver = receiver_of(modules, dict.fromkeys((f"{name}.weight" for name in names), 32))
    contents = [torch.zeros(4, 8) for _ in names]
    boxes = [Box(f"{name}.weight", 0, 0, one, None, words_of(one)) for name, one in zip(names, contents, strict=True)]
    handed: list[str] = []

    def read() -> Iterator[Box]:
        """As a reader does."""
        places = receiver._known_places(boxes)
        for box, place in zip(boxes, places, strict=True):
            if place is not None:
                place[:] = box.words
        for box, place in zip(boxes, places, strict=True):
            if place is None:
                handed.append(box.parameter)
                yield box
        receiver._pack_rest()

    def take(value: float) -> list[str]:
        for content in contents:
            content.fill_(value)
        packed.clear()
        handed.clear()
        receiver._load(read(), torch.float32)
        receiver._spare.clear()
        return list(packed)

    assert take(1.0) == ["packed.0 32", "packed.1 32", "a 32", "b 32"] and len(handed) == 4
    for value in (2.0, 3.0):
        assert take(value) == [f"{name} {32 * value:g}" for name in ("packed.0", "packed.1", "a", "b")]
        assert handed == ["packed.0.weight", "packed.1.weight"]
    modules["b"].weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)  # it has moved: all are looked for
    assert take(4.0) == [f"{name} 128" for name in ("packed.0", "packed.1", "a", "b")] and len(handed) == 4
    assert float(modules["b"].get_parameter("weight").sum()) == 128.0
