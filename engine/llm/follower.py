"""Follower process of a tensor-parallel engine, which computes one shard of a model's layers.

Its leader, the engine, starts and ends it. See :mod:`engine.execution.tensor_parallel`.
"""

from __future__ import annotations

import logging
import sys
from typing import IO

import torch

from engine.attention.layer import AttentionStep
from engine.execution.input_batch import build_step_metadata
from engine.execution.model_runner import (
    FilledPage,
    PageContents,
    bind_layers,
    pages_of,
    run_layers,
)
from engine.execution.tensor_parallel import (
    CheckMessage,
    ClearMessage,
    CopyMessage,
    FollowerMessage,
    FollowerPages,
    FollowerSetup,
    StepMessage,
    join_group,
    read_message,
)
from engine.interface.config import EngineConfig
from engine.interface.placed_error import described
from engine.layers import Shards
from engine.llm.llm_engine import Choices, attention_backends, load_configured, plan_pages
from engine.models.base import CausalModel
from engine.resources.device import are_finite, on_device, total, upload
from prefix_cache import PageCopy, PagedMemory


class Follower:
    """Executes the leader's messages on its shard of the model and of every page."""

    def __init__(
        self, config: EngineConfig, choices: Choices, model: CausalModel, shards: Shards
    ) -> None:
        self._model, self._shards, self._choices = model, shards, choices
        kv_config, _ = plan_pages(config, model, choices)
        self._memory = PagedMemory(kv_config, choices.device)
        self._backends = attention_backends(kv_config, choices, config)
        self._contents = PageContents(self._memory)
        bind_layers(model, self._memory)
        model.drop_all_but_layers()

    def handle(self, message: FollowerMessage) -> None:
        """Execute a message."""
        match message:
            case StepMessage():
                self._step(message)
            case CopyMessage(group_id, sources, targets):
                self._memory.copy_pages(PageCopy(group_id, sources, targets), self._memory)
            case ClearMessage(int(group_id), page_id):
                self._memory.clear_page(group_id, page_id)
            case ClearMessage():
                self._memory.clear_null_page()
            case CheckMessage(pages):
                is_finite = are_finite(self._contents.numbers([FilledPage(0, *p) for p in pages]))
                bad = torch.tensor([0.0 if is_finite else 1.0], device=self._choices.device)
                self._shards.add_up(bad)

    def _step(self, message: StepMessage) -> None:
        arrays, device = message.unpacked(), self._choices.device
        tensors = upload(arrays, device)
        rows, dtype = len(arrays["token_ids"]), self._choices.computed_dtype
        embeds = torch.empty(rows, message.width, dtype=dtype, device=device)
        self._shards.broadcast(embeds)
        features = None
        if message.features_width:
            features = torch.empty(rows, message.features_width, dtype=dtype, device=device)
            self._shards.broadcast(features)
        step = AttentionStep(
            self._backends,
            build_step_metadata(self._memory, arrays, tensors),
            shows_item=tensors.get("shows_item"),
            item_features=features,
            token_ids=tensors["token_ids"],
        )
        run_layers(self._model, embeds, tensors["positions"], step)
        filled = pages_of(arrays)
        if filled:
            self._shards.add_up(total(self._contents.numbers(filled))[None])


def main(answers: IO[str]) -> int:
    """Follow the leader at the other end of standard input, which reads the answers."""
    pipe = sys.stdin.buffer
    logging.disable(logging.WARNING)  # the leader logs the same
    setup: FollowerSetup = read_message(pipe, FollowerSetup)
    torch.set_num_threads(setup.num_threads)

    def report(line: str) -> None:
        print(line.replace("\n", " "), file=answers, flush=True)

    try:
        report("started")
        config = EngineConfig.model_validate_json(setup.config)
        choices = Choices.of(config)
        shards = join_group(setup.folder, setup.rank, setup.size, choices.device)
        with on_device(choices.device):
            choices, model = load_configured(config, choices, shards)
            report("loaded")
            pages: FollowerPages = read_message(pipe, FollowerPages)
            config = config.model_copy(update={"num_blocks": pages.num_pages})
            follower = Follower(config, choices, model, shards)
            report("ready")
            with torch.inference_mode():
                while True:
                    follower.handle(read_message(pipe, FollowerMessage))
    except EOFError:
        return 0
    except Exception as error:  # the leader reports any error
        report(described(error))
        raise
