"""Scores texts with a model that is distributed over ranks, without the training schedule.

Rank 0 sends requests (`score`, `next_token_logits`). The other ranks compute them together with rank 0
(`serve`) until rank 0 calls `stop`. So only rank 0 runs the code that chooses the texts. Each request
broadcasts the tokens. The result is a sum over all ranks, to which all stages except the last one add zeros.

The rows of a request are divided among the data-parallel replicas. Each replica divides its rows into
micro-batches, which follow each other through the stages. Every rank processes the pairs (micro-batch, stage)
in the same order, so no message waits for a later one, whatever the training schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.inference.growing_texts import GrowingTexts, Pass
from megatron.model.inference.scoring import Scores, score_in_parts
from megatron.model.layer_context import LayerIO, join_layer_io
from megatron.model.layer_list import final_norm_of, first_mtp_layer_of
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.context_parallel import gather_sequence
from megatron.mpu.mesh import Mesh, chunks_of_rank

MICRO_BATCHES_PER_STAGE = 4
"""Number of micro-batches per stage into which a request is divided. The pipeline is then idle for a fifth of
the time."""


class _Request(IntEnum):
    SCORE = 0
    START_TEXTS = 1
    EXTEND_TEXTS = 2
    STOP = 3


class InferenceStopped(Exception):
    """Raised on all ranks if a stop of the run was requested."""


class DistributedGPT:
    """A `LanguageModel` on the ranks of a layout. The module must be in evaluation mode."""

    def __init__(
        self,
        module: GPTModelPipe,
        mesh: Mesh,
        micro_batch_size: int,
        stop_requested: Callable[[], bool] = lambda: False,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """stop_requested: is called at each request; collective, with the same result on all ranks.
        heartbeat: is called for every micro-batch."""
        self.module, self.mesh, self.tp_group = module, mesh, mesh.tp
        self.micro_batch_size = micro_batch_size
        self.vocab_size = module.cross_entropy.vocab_size
        self.is_responding = False
        """Whether a request is being computed. An exception may then come from a collective."""
        self._stop_requested, self._heartbeat = stop_requested, heartbeat
        parallel = module.config.parallel
        # With context parallelism the cache is not used: no rank holds a single new token of a sequence.
        self._cache = module.context.cache if parallel.context_parallel_size == 1 else None
        self._texts = GrowingTexts(self._send_pass, micro_batch_size, self._cache is not None)
        self._rank_of_stage = parallel.rank_of_stage
        self._length_multiple = parallel.length_multiple
        num_layers = module.config.model.num_layers
        self._after_norm = range(final_norm_of(num_layers), first_mtp_layer_of(num_layers))
        self._device = next(module.parameters()).device
        self._pipeline = module.mpu().get_pipe_parallel_group()

    @property
    def batch_size(self) -> int:
        """The smallest number of rows of a request that keeps all ranks busy."""
        stages = len(self._rank_of_stage)
        micro_batches = 1 if stages == 1 else MICRO_BATCHES_PER_STAGE * stages
        return self.micro_batch_size * self.mesh.dp_size * micro_batches

    @property
    def generation_batch_size(self) -> int:
        """The number of texts to generate at a time: the micro-batch size. Keys and values need less memory
        than the activations of a micro-batch in training."""
        return self.micro_batch_size

    def score(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Scores:
        """Returns the scores of `targets`: see `LanguageModel`. Only rank 0 calls it."""
        content = (tokens, targets) if document_ids is None else (tokens, targets, document_ids)
        log_probs, is_greedy = self._send_request(_Request.SCORE, torch.stack(content))
        return Scores(log_probs, is_greedy > 0)

    def next_token_logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Returns the logits of the next token after each text: see `LanguageModel`. Only rank 0 calls it."""
        return self._texts.logits(texts)

    def _send_pass(self, content: Pass) -> Tensor:
        request = _Request.START_TEXTS if content.is_start else _Request.EXTEND_TEXTS
        return self._send_request(request, content.table.unsqueeze(0))

    def stop(self) -> None:
        """Ends `serve` on the other ranks. Only rank 0 calls it."""
        dist.broadcast(self._header(_Request.STOP), 0)

    def serve(self) -> None:
        """Computes the requests of rank 0 together with it. All ranks except rank 0 call this."""
        while True:
            header = self._header(_Request.STOP)
            dist.broadcast(header, 0)
            request, *shape = header.tolist()
            if request == _Request.STOP:
                return
            content = torch.empty(shape, dtype=torch.int64, device=self._device)
            dist.broadcast(content, 0)
            self._respond(_Request(request), content)

    def _header(self, request: _Request, shape: tuple[int, ...] = (0, 0, 0)) -> Tensor:
        return torch.tensor([request, *shape], device=self._device)

    def _send_request(self, request: _Request, content: Tensor) -> Tensor:
        """Broadcasts a request of rank 0 and returns its result. content: int64 [tensors, rows, length]."""
        self.is_responding = True
        content = content.to(self._device)
        dist.broadcast(self._header(request, tuple(content.shape)), 0)
        dist.broadcast(content, 0)
        result = self._respond(request, content)
        self.is_responding = False
        return result

    @torch.no_grad()
    def _respond(self, request: _Request, content: Tensor) -> Tensor:
        """Returns [2, rows, length] for a SCORE request and [texts, vocab_size] for others. All ranks get
        equal results."""
        if self._stop_requested():
            raise InferenceStopped
        if request is _Request.SCORE:
            result = self._scores(*content)
        else:
            result = self._next_tokens(Pass(request is _Request.START_TEXTS, content[0]))
        if self.mesh.world_size > 1:
            dist.all_reduce(result)
        return result

    def _scores(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Returns [2, rows, length]: the scores of this rank's part of the rows, and zeros elsewhere."""
        rows, length = tokens.shape
        own_rows = -(-rows // self.mesh.dp_size)
        first = self.mesh.dp.rank * own_rows
        # The last replicas may have fewer rows. They repeat the last row, because with ZeRO-3 all replicas
        # must take part in each forward pass.
        index = torch.arange(first, first + own_rows, device=self._device).clamp(max=rows - 1)
        own = torch.zeros(2, own_rows, length, device=self._device)
        for start in range(0, own_rows, self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            ids = None if document_ids is None else document_ids[index[part]]
            hidden = self._run_stages(tokens[index[part]], ids)
            if hidden is not None:
                scores = score_in_parts(
                    self._head, hidden[:, :length], targets[index[part]], self.tp_group, self.vocab_size
                )
                own[:, part] = torch.stack((scores.log_probs, scores.is_greedy.float()))
        result = torch.zeros(2, rows, length, device=self._device)
        if self.tp_group.rank == 0 and self.mesh.cp.rank == 0:
            result[:, first : first + own_rows] = own[:, : max(rows - first, 0)]
        return result

    def _next_tokens(self, request: Pass) -> Tensor:
        """Returns logits [texts, vocab_size]: this rank's columns, and zeros elsewhere. All replicas compute
        all texts."""
        result = torch.zeros(len(request.table), self.vocab_size, device=self._device)
        tokens, keeping = request.prepare(self._cache, self._length_multiple)
        with keeping:
            hidden = self._run_stages(tokens)
        if hidden is not None:
            logits = self._head(request.last_of(hidden))[:, 0]
            first = self.tp_group.rank * logits.shape[1]
            if self.mesh.dp_cp.rank == 0:
                result[:, first : first + logits.shape[1]] = logits[:, : max(self.vocab_size - first, 0)]
        return result

    def _head(self, hidden: Tensor) -> Tensor:
        """Returns this rank's logits. The final norm and the head compute each position independently."""
        logits: LayerIO = hidden
        for layer_index, function in self._functions_of(len(self._rank_of_stage) - 1).items():
            if layer_index in self._after_norm:
                logits = function(logits)
        assert isinstance(logits, Tensor)
        return logits

    def _functions_of(self, stage: int) -> dict[int, Callable]:
        """Returns the layers of one of this rank's stages, by their index in `pipeline_layers`."""
        held = chunks_of_rank(self._rank_of_stage, self.mesh.pp.rank)
        return self.module.functions_of_chunk(held.index(stage))

    def _run_stages(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor | None:
        """Runs tokens [rows, length], with document ids if they are given, through this rank's stages. On the
        rank of the last stage it returns the input of the final norm, [rows, padded length, hidden]; on other
        ranks None."""
        self._heartbeat()
        padding = -tokens.shape[1] % self._length_multiple
        padded = torch.nn.functional.pad(tokens, (0, padding))
        # The padding forms a document of its own after all other documents.
        ids = document_ids
        if ids is not None:
            ids = torch.nn.functional.pad(ids, (0, padding), value=tokens.shape[1])
        layer_io = join_layer_io(padded, ids)
        own, last = self.mesh.pp.rank, len(self._rank_of_stage) - 1
        for stage, holder in enumerate(self._rank_of_stage):
            if holder != own:
                continue
            if stage and self._rank_of_stage[stage - 1] != own:
                layer_io = self._receive(stage, *padded.shape)
            for layer_index, function in self._functions_of(stage).items():
                if stage < last or layer_index < self._after_norm.start:
                    layer_io = function(layer_io)
            if stage < last and self._rank_of_stage[stage + 1] != own:
                self._send(layer_io, stage, *padded.shape)
        if self._rank_of_stage[last] != own:
            return None
        assert isinstance(layer_io, Tensor)
        return gather_sequence(layer_io, self.mesh.cp)

    def _send(self, layer_io: LayerIO, stage: int, rows: int, length: int) -> None:
        tensors = [layer_io] if isinstance(layer_io, Tensor) else list(layer_io)
        self.module.check_stage_output(stage, tensors, rows, length)
        self._exchange(dist.isend, [tensor.contiguous() for tensor in tensors], stage + 1)

    def _receive(self, stage: int, rows: int, length: int) -> LayerIO:
        specs = self.module.stage_input(stage, rows, length)
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
        self._exchange(dist.irecv, tensors, stage - 1)
        return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])

    def _exchange(self, operation: Callable, tensors: list[Tensor], stage: int) -> None:
        """Sends tensors to the rank of a stage, or receives them from it. The messages are batched, because a
        batch uses the communicator of the pipeline's group, while a single message would need a communicator
        of the two ranks."""
        per_stage = self.mesh.ranks_per_stage
        # The rank of this stage that has this rank's tensor- and data-parallel coordinates.
        rank = self._rank_of_stage[stage] * per_stage + self.mesh.rank % per_stage
        messages = [dist.P2POp(operation, tensor, rank, self._pipeline) for tensor in tensors]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
