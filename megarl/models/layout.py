"""Boxes (rectangles of checkpoint tensors that a rank holds), and the layouts of trainer and engines. No torch.

Loading from a Hugging Face directory, saving to a directory and syncing into vLLM describe both of their ends as boxes.
So one weight table per model family serves all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of one checkpoint tensor and the place where one rank holds it.

    Rows and columns are half-open and in Hugging Face coordinates; a vector of n elements is an [n, 1] matrix.
    `local_row` and `local_col` are where the rectangle starts in the rank's own `parameter`.
    """

    name: str
    row0: int
    row1: int
    col0: int
    col1: int
    rank: int
    parameter: str
    local_row: int
    local_col: int


@dataclass(frozen=True)
class Layout:
    """How one role is sharded over the trainer ranks.

    rank = tensor_rank + tensor * (context_rank + context * (data_rank + data * pipeline_rank)), megatron-core's order.

    `virtual_pipeline` counts the model chunks of each stage, `context` the ranks that share one sequence;
    `sequence_parallel` splits the activations between tensor-parallel regions over the tensor group. `stages` are the
    numbers of layers of each chunk in the model's order, stage by stage and then chunk by chunk; empty for equal chunks.

    Experts have their own sharding over the tensor x context x data ranks of a stage:
    stage rank = expert_tensor_rank + expert_tensor * (expert_rank + expert * expert_data_rank). `expert_tensor` None means
    `tensor`.

    `token_multiple`: the kernels need the number of tokens of a rank to be a multiple of this (1, or an even number).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    stages: tuple[int, ...] = ()
    token_multiple: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_tensor_size(self) -> int:
        """Tensor ranks of one expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.tensor * self.context * self.data // (self.expert_tensor_size * self.expert)

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return the (expert tensor, expert, expert data) rank of a trainer rank."""
        rest, tensor_rank = divmod(rank % (self.tensor * self.context * self.data), self.expert_tensor_size)
        data_rank, expert_rank = divmod(rest, self.expert)
        return tensor_rank, expert_rank, data_rank

    @property
    def sequence_multiple(self) -> int:
        """The divisor of a padded sequence's length: context parallelism needs 2 equal chunks per rank."""
        if self.context == 1:
            return 1
        return max(2, self.token_multiple) * self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The divisor of a padded micro-batch's length: sequence parallelism splits it over the tensor group."""
        if self.token_multiple > 1:
            return self.token_multiple * self.context * (self.tensor if self.sequence_parallel else 1)
        return self.tensor * self.context if self.sequence_parallel else 1

    @property
    def micro_batch_step(self) -> int:
        """The divisor of a rank's number of micro-batches: the interleaved schedule runs groups of this size."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def rank(self, tensor_rank: int, pipeline_rank: int, data_rank: int = 0, context_rank: int = 0) -> int:
        return tensor_rank + self.tensor * (context_rank + self.context * (data_rank + self.data * pipeline_rank))

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return the (tensor, pipeline, data, context) rank of a trainer rank."""
        rest, tensor_rank = divmod(rank, self.tensor)
        rest, context_rank = divmod(rest, self.context)
        pipeline_rank, data_rank = divmod(rest, self.data)
        return tensor_rank, pipeline_rank, data_rank, context_rank


@dataclass(frozen=True)
class RolloutLayout:
    """How one vLLM engine is sharded over its workers.

    worker = tensor_rank + tensor * (pipeline_rank + pipeline * data_rank), vLLM's order of all data-parallel ranks.

    Data-parallel ranks of an engine hold the same weights except experts, whose rows are sharded over the tensor ranks of
    all data-parallel ranks; with `expert_parallel` each of these workers holds whole experts instead.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert_parallel: bool = False

    @property
    def workers(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def cuts_tokens(self) -> bool:
        """Whether tensor ranks divide the tokens of a layer with experts, and so hold shared experts whole."""
        return self.expert_parallel and self.tensor > 1 and self.data > 1

    def worker(self, tensor_rank: int, pipeline_rank: int = 0, data_rank: int = 0) -> int:
        return tensor_rank + self.tensor * (pipeline_rank + self.pipeline * data_rank)

    def coordinates(self, worker: int) -> tuple[int, int, int]:
        """Return the (tensor, pipeline, data) rank of a worker."""
        rest, tensor_rank = divmod(worker, self.tensor)
        data_rank, pipeline_rank = divmod(rest, self.pipeline)
        return tensor_rank, pipeline_rank, data_rank
