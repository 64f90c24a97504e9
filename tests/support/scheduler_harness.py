"""A scheduler without a model."""

from __future__ import annotations

from engine.interface.sampling_params import SamplingParams
from engine.requests.request import Request
from engine.sampling.sampler import SamplingState
from engine.scheduling.scheduler import Scheduler, SchedulerOutput
from engine.text.stop_checker import CompletionText
from prefix_cache import KVCacheManager, SwapSpace
from prefix_cache import check_integrity as check_blocks
from tests.support.tiny_kv_cache import GROUP_MIXES, mixed_config

BLOCK_SIZE = 4


class Harness:
    """A scheduler over real blocks, with a model that always generates token 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        seats: int = 8,
        budget: int = 16,
        mix: str = "full",
        swaps: bool = False,
    ) -> None:
        # Never the host's ids: the device's pages are what runs short here.
        config = mixed_config(GROUP_MIXES[mix], num_blocks, BLOCK_SIZE, num_host_blocks=500)
        self.kv = KVCacheManager(config, output_names=(), max_num_batched_tokens=budget)
        self.scheduler = Scheduler(
            self.kv,
            block_size=BLOCK_SIZE,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            swap_space=SwapSpace(self.kv, num_blocks) if swaps else None,
        )
        self.seats = seats
        self.budget = budget
        self.arrivals = 0

    def add(
        self, name: str, prompt: list[int], *, max_tokens: int = 4, priority: int = 0
    ) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(
            request_id=name,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            prompt_embeds=None,
            params=params,
            max_num_tokens=len(prompt) + max_tokens,
            queue_key=(priority, self.arrivals),
            cache_salt=None,
            sampling=SamplingState(
                params, prompt_token_ids=prompt, seed=0, eos_token_ids=(), vocab_size=100_000
            ),
            text=CompletionText(None, params, frozenset()),
        )
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self._schedule()
        sampling = [item.request for item in output.scheduled if item.samples]
        self.scheduler.complete(output)
        for request in sampling:
            request.token_ids.append(7)
            if request.num_tokens == request.max_num_tokens:
                self.scheduler.finish(request)
        check_blocks(self.kv)
        return output

    def fail(self) -> SchedulerOutput:
        """Run a step whose model raises: nothing is computed, and its requests are isolated."""
        output = self._schedule()
        for request in self.scheduler.fault_isolation.recover(output):
            # It ran alone, and the engine would fail it; here it is retried.
            num_tokens = request.num_computed_tokens + output.num_tokens
            self.scheduler.fault_isolation.isolate(request, num_tokens)
            self.scheduler._queues.restart(request)
        check_blocks(self.kv)
        return output

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.seats
        isolated = [item for item in output.scheduled if item.request.is_isolated]
        assert not isolated or len(output.scheduled) == 1, "an isolated request runs with others"
        return output

    def shares(self) -> dict[str, int]:
        """Run a step; return the number of tokens of each request."""
        return {item.request.request_id: item.num_tokens for item in self.step().scheduled}


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))
